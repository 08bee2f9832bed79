"""The load of mail: one sender to a hundred users, of whom each has a persistent session and a connection of its own.

Receivers speak MQTT with QoS 1 and acknowledge every message, whichever server it is. The sender publishes with QoS 1 to other
servers; to Pixiu it sends mail by the SDK, as MQTT has no mail. A window is sent in one go, the next one when all of it is
confirmed. As `comparison.load` it says `{}`, then what came of it, and waits for a line each time.

    python -m comparison.mail_load CASE PORT TOPIC SECONDS [PROXIES]

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Final, Protocol

import pixiu
from comparison.accounts import NUMBER, Account, share_of
from comparison.cases import CASES, Case
from comparison.load import STALL_S, WARM_S, come, cpu_used_s, step
from comparison.wires import Mqtt, packet_head, packet_id, string

WIRE: Final = Mqtt()
PUBLISH, AGAIN, PUBACK_HEAD, PUBACK_BYTES = 0x32, 0x3A, b"\x40\x02", 4
"""PUBLISH of QoS 1, and the same with the DUP flag; PUBACK."""
CONFIRM_LIMIT_S: Final = 60.0
DRAIN_S: Final = 0.01


class Inbox(asyncio.Protocol):
    """One user's device: takes mail, accounts for it, acknowledges it."""

    def __init__(self, load: MailLoad, user: int, topic: str) -> None:
        self.account = Account()
        self._load, self._user = load, user
        body = load.case.bytes
        self._head = packet_head(PUBLISH, len(string(topic)) + 2 + body)[1:] + string(topic)
        self._bytes = 1 + len(self._head) + 2 + body
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Any part of a stream of messages."""
        assert self._transport is not None
        rest, at, confirmed = self._rest + data, 0, []
        while len(rest) - at >= self._bytes:
            if rest[at] not in (PUBLISH, AGAIN) or not rest.startswith(self._head, at + 1):
                self._load.fail(f"user {self._user} received what is no mail: {rest[at : at + self._bytes]!r}")
                return
            behind = at + 1 + len(self._head)
            confirmed += [PUBACK_HEAD, rest[behind : behind + 2]]
            number = NUMBER.unpack_from(rest, behind + 2)[0]
            if self.account.take(number):
                self._load.came(number, self._user)
            at += self._bytes
        self._rest = rest[at:]
        if confirmed:
            self._transport.write(b"".join(confirmed))

    def connection_lost(self, error: Exception | None) -> None:
        self._load.fail(f"user {self._user} was disconnected: {error}")


class Sender(Protocol):
    """Who sends windows of mail."""

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """Send to (index of a user, body) and wait until all is confirmed."""


class PixiuSender:
    """The SDK's writer of mail."""

    def __init__(self, writer: pixiu.MailWriter) -> None:
        self._writer = writer

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """One call for each mail."""
        for user, body in mails:
            self._writer.send(user + 1, body)
        await self._writer.wait_finished()


class MqttSender(asyncio.Protocol):
    """PUBLISH with QoS 1."""

    def __init__(self, load: MailLoad) -> None:
        self._load = load
        self._sent = self._confirmed_bytes = 0
        self._all = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None
        self._heads = [WIRE.published(topic, load.case.bytes, 1)[0] for topic in load.topics]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """PUBACKs."""
        self._confirmed_bytes += len(data)
        if self._confirmed_bytes >= self._sent * PUBACK_BYTES:
            self._all.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._load.fail(f"the sender was disconnected: {error}")

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """One write for the window."""
        assert self._transport is not None
        self._all.clear()
        parts = []
        for n, (user, body) in enumerate(mails):
            parts += [self._heads[user], packet_id(self._sent + n), body]
        self._sent += len(mails)
        self._transport.write(b"".join(parts))
        async with asyncio.timeout(CONFIRM_LIMIT_S):
            await self._all.wait()


class MailLoad:
    """All users, the sender, and what came."""

    def __init__(self, case: Case, topic: str) -> None:
        self.case = case
        self.topics = [topic.format(n + 1) for n in range(case.members)]
        self.inboxes = [Inbox(self, n, topic) for n, topic in enumerate(self.topics)]
        self.problem = ""
        self._sent = self._received = 0
        self._sent_at, self._times_s, self._windows_s = array("d"), array("d"), array("d")
        self._moved_at = 0.0

    def came(self, number: int, user: int) -> None:
        """A mail came for the first time."""
        now = time.perf_counter()
        self._received += 1
        self._moved_at = now
        self._times_s.append(now - self._sent_at[number * self.case.members + user])

    def fail(self, problem: str) -> None:
        """Nothing that follows can be believed; what is said first is kept."""
        self.problem = self.problem or problem

    async def run(self, sender: Sender, seconds: float) -> dict[str, float]:
        """Send windows for so long, and wait until all is delivered."""
        self._times_s, self._windows_s = array("d"), array("d")
        users, body = self.case.members, bytes(self.case.bytes - NUMBER.size)
        for inbox in self.inboxes:
            inbox.account = Account(inbox.account.next)
        first, came, used, began = self._sent, self._received, cpu_used_s(), time.perf_counter()
        while not self.problem and (now := time.perf_counter()) < began + seconds:
            numbers = range(self._sent, self._sent + self.case.window)
            self._sent += self.case.window
            self._sent_at.extend([now] * self.case.window)
            await sender.send([(n % users, NUMBER.pack(n // users) + body) for n in numbers])
            self._windows_s.append(time.perf_counter() - now)
        self._moved_at = time.perf_counter()
        while not self.problem and self._received < self._sent and time.perf_counter() < self._moved_at + STALL_S:
            await asyncio.sleep(DRAIN_S)
        if self.problem:
            raise ConnectionError(self.problem)
        wall, cpu = time.perf_counter() - began, cpu_used_s() - used
        accounts = [inbox.account for inbox in self.inboxes]
        times, windows = sorted(self._times_s), sorted(self._windows_s)
        return {
            "published": self._sent - first,
            "deliveries": self._received - came,
            "per_second": (self._received - came) / wall,
            "p50_ms": share_of(times, 0.5) * 1000,
            "p99_ms": share_of(times, 0.99) * 1000,
            "confirmed_p50_ms": share_of(windows, 0.5) * 1000,
            "confirmed_p99_ms": share_of(windows, 0.99) * 1000,
            "lost": sum(account.lost(self._sent // users) for account in accounts),
            "repeated": sum(account.repeated for account in accounts),
            "disordered": sum(account.disordered for account in accounts),
            "load_share": cpu / wall,
        }


@contextlib.asynccontextmanager
async def sending(load: MailLoad, port: int, proxies: str) -> AsyncIterator[Sender]:
    """A sender: by the SDK where there are proxies, else by MQTT."""
    if proxies:
        async with pixiu.connect(proxies, client="bench") as px, px.mail_writer() as writer:
            yield PixiuSender(writer)
        return
    (sock,) = come(port, WIRE, [("mail-sender", "")])
    sock.setblocking(False)
    transport, sender = await asyncio.get_running_loop().create_connection(lambda: MqttSender(load), sock=sock)
    try:
        yield sender
    finally:
        transport.close()


def _itself(inbox: Inbox) -> Inbox:
    return inbox


async def work(case: Case, port: int, topic: str, seconds: float, proxies: str) -> None:
    """Connect, warm up, and work."""
    load, loop = MailLoad(case, topic), asyncio.get_running_loop()
    # The client's name is the user, and the device.
    socks = come(port, WIRE, [(str(n + 1), topic) for n, topic in enumerate(load.topics)], case.qos, clean=False)
    for sock, inbox in zip(socks, load.inboxes, strict=True):
        sock.setblocking(False)
        await loop.create_connection(functools.partial(_itself, inbox), sock=sock)
    async with sending(load, port, proxies) as sender:
        await load.run(sender, min(WARM_S, seconds))
        step({})
        step(await load.run(sender, seconds))


def main(arguments: list[str]) -> int:
    """Run one case of mail against one server."""
    name, port, topic, seconds, *proxies = arguments
    asyncio.run(work(CASES[name], int(port), topic, float(seconds), "".join(proxies)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
