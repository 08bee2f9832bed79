"""The load of mail: one sender to a hundred users, each with a persistent session and a connection of their own.

Receivers acknowledge every message; they use MQTT with QoS 1, or a server's own protocol. So does the sender, but it sends mail to
Pixiu with the SDK, as MQTT has no mail. A window is sent in one go, the next one when all of it is confirmed. As `comparison.load`
does, it prints `{}`, then the results, and waits for a line each time.

    python -m comparison.mail_load CASE PORT WIRE SECONDS [PROXIES]

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

import pixiu
from comparison.accounts import NUMBER
from comparison.cases import CASES, Case
from comparison.load import STALL_S, WARM_S, cpu_used_s, step
from comparison.mail_wires import MAIL_WIRES, Inbox, MailWire
from pixiu.ids import UIN, RoomID
from tools.load.histogram import Histogram
from tools.load.ledger import Judgement, Ledger
from tools.load.payload import monotonic_us

DRAIN_S: Final = 0.01


class Sends(Protocol):
    """Sender of windows of mail."""

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """Send to (index of a user, body) and wait until all is confirmed."""


class PixiuSender:
    """A sender that uses the SDK's writer of mail."""

    def __init__(self, writer: pixiu.MailWriter) -> None:
        self._writer = writer

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """Send with one call for each mail."""
        for user, body in mails:
            self._writer.send(user + 1, body)
        await self._writer.wait_finished()


class MailLoad:
    """All users, the sender, and the results."""

    def __init__(self, case: Case, wire: MailWire) -> None:
        self.case = case
        self.topics = [wire.topic.format(n + 1) for n in range(case.members)]
        self.inboxes = [wire.inbox(self, n) for n in range(case.members)]
        self.problem = ""
        self._ledger, self._next = Ledger(), 0
        self._moved_us = 0

    def came(self, number: int, user: int) -> None:
        """Note that a user's inbox got its mail of this number."""
        at_us = monotonic_us()
        outcome = self._ledger.arrived(number * self.case.members + user, RoomID(user), UIN(user), at_us)
        if outcome in (Judgement.DELIVERED, Judgement.OUT_OF_ORDER):
            self._moved_us = at_us

    def fail(self, problem: str) -> None:
        """Note a problem, which invalidates all results; the first one is kept."""
        self.problem = self.problem or problem

    async def run(self, sender: Sends, seconds: float) -> dict[str, float]:
        """Send windows for `seconds`, and wait until all is delivered."""
        users, body = self.case.members, bytes(self.case.bytes - NUMBER.size)
        ledger = self._ledger = Ledger()
        for user in range(users):
            ledger.joining(RoomID(user), UIN(user), 0)
            ledger.joined(RoomID(user), UIN(user))
        confirmed_us, used, began_us = Histogram(), cpu_used_s(), monotonic_us()
        while not self.problem and (sent_us := monotonic_us()) < began_us + seconds * 1e6:
            numbers = range(self._next, self._next + self.case.window)
            self._next = numbers.stop
            for number in numbers:
                ledger.send(number, RoomID(number % users), UIN(0), b"", sent_us)
            await sender.send([(n % users, NUMBER.pack(n // users) + body) for n in numbers])
            confirmed_us.add(monotonic_us() - sent_us)
        self._moved_us = monotonic_us()
        while not self.problem and ledger.open_messages and monotonic_us() < self._moved_us + STALL_S * 1e6:
            await asyncio.sleep(DRAIN_S)
        if self.problem:
            raise ConnectionError(self.problem)
        wall, cpu = (monotonic_us() - began_us) / 1e6, cpu_used_s() - used
        return {
            "published": ledger.sent,
            "deliveries": ledger.delivered,
            "per_second": ledger.delivered / wall,
            "p50_ms": ledger.latency_us.percentile(50) / 1000,
            "p99_ms": ledger.latency_us.percentile(99) / 1000,
            "confirmed_p50_ms": confirmed_us.percentile(50) / 1000,
            "confirmed_p99_ms": confirmed_us.percentile(99) / 1000,
            "lost": ledger.lost,
            "repeated": ledger.outcomes.total() - ledger.delivered,
            "disordered": ledger.outcomes[Judgement.OUT_OF_ORDER],
            "load_share": cpu / wall,
        }


@contextlib.asynccontextmanager
async def sending(load: MailLoad, port: int, wire: MailWire, proxies: str) -> AsyncIterator[Sends]:
    """Yield a sender: the SDK's if there are proxies, else one for the server's protocol."""
    if proxies:
        async with pixiu.connect(proxies, client="bench") as px, px.mail_writer() as writer:
            yield PixiuSender(writer)
        return
    sock = wire.connect(port, load)
    sock.setblocking(False)
    transport, sender = await asyncio.get_running_loop().create_connection(lambda: wire.sender(load), sock=sock)
    try:
        yield sender
    finally:
        transport.close()


def _itself(inbox: Inbox) -> Inbox:
    return inbox


async def work(case: Case, port: int, wire: MailWire, seconds: float, proxies: str) -> None:
    """Connect, warm up, and work."""
    load, loop = MailLoad(case, wire), asyncio.get_running_loop()
    for sock, inbox in zip(wire.come(port, load), load.inboxes, strict=True):
        sock.setblocking(False)
        await loop.create_connection(functools.partial(_itself, inbox), sock=sock)
    async with sending(load, port, wire, proxies) as sender:
        await load.run(sender, min(WARM_S, seconds))
        step({})
        step(await load.run(sender, seconds))


def main(arguments: list[str]) -> int:
    """Run one case of mail against one server."""
    name, port, wire, seconds, *proxies = arguments
    asyncio.run(work(CASES[name], int(port), MAIL_WIRES[wire], float(seconds), "".join(proxies)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
