"""SIGSTOP for ten seconds: the process is there, its socket takes datagrams, and heartbeats find that nobody handles them.

Others go on without it; then it comes back with ten seconds of old datagrams in its socket, and must do no harm. What was
measured is printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.cluster import LocalCluster
from tests.support.effort import portion
from tests.support.fleet import WAIT_S, Fleet, Player
from tests.support.waiting import until
from tools.cli.http import samples

ROOMS = range(2000, 2040)
"""So that every partition and replica has some."""
STOPPED_S = 10.0
APART_S = 0.01


class Traffic:
    """One publisher who goes on sending to every room in turn, and who knows what everybody has had."""

    def __init__(self, publisher: Player, listeners: list[Player], *, chat: bool) -> None:
        self._publisher, self.listeners = publisher, listeners
        self._chat = chat
        """Send to every listener as well."""
        self.sent = 0

    async def go_on(self) -> None:
        """Send until cancelled."""
        while True:
            topics = [f"room/{room}" for room in ROOMS]
            for topic in topics + [f"user/{one.uin}" for one in self.listeners if self._chat]:
                self.say(topic)
                await asyncio.sleep(APART_S)

    def say(self, topic: str) -> bytes:
        """One message."""
        self.sent += 1
        payload = b"%d to %s" % (self.sent, topic.encode())
        self._publisher.client.publish_with_ack(topic, payload)
        return payload

    def round_of(self) -> dict[Player, Counter[bytes]]:
        """One message to every room, and to every listener where those are sent to; returns what each listener is to get."""
        rooms = Counter(self.say(f"room/{room}") for room in ROOMS)
        own = {one: [self.say(f"user/{one.uin}")] if self._chat else [] for one in self.listeners}
        return {one: rooms + Counter(payloads) for one, payloads in own.items()}

    async def reaches_everybody(self) -> None:
        """Send to everybody until a whole round has arrived."""

        async def one_round() -> bool:
            wanted = self.round_of()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    while not all(some <= listener.got for listener, some in wanted.items()):
                        await asyncio.sleep(0.01)
                    return True
            return False

        async with asyncio.timeout(WAIT_S):
            while not await one_round():
                pass


@contextlib.asynccontextmanager
async def stopped(process: dict[str, Any]) -> AsyncIterator[None]:
    """A process that does nothing inside the block, which takes ten seconds at least."""
    os.kill(process["pid"], signal.SIGSTOP)
    end = time.monotonic() + STOPPED_S
    try:
        yield
        await asyncio.sleep(max(end - time.monotonic(), 0.0))
    finally:
        os.kill(process["pid"], signal.SIGCONT)


async def who_hears(fleet: Fleet, name: str) -> dict[str, bool]:
    """The processes that heartbeat this one, and whether it answers."""
    others = [own for own in fleet.processes if own != name]
    pages = await asyncio.gather(*(fleet.page(fleet.processes[own], "/metrics") for own in others))
    found: dict[str, bool] = {}
    for own, page in zip(others, pages, strict=True):
        values = {sample.partition("_peer_")[2]: value for sample, labels, value in samples(page) if labels.get("peer") == name}
        if values.get("heartbeats_sent_total"):
            found[own] = bool(values["up"])
    return found


@pytest.mark.parametrize("role", portion(["broker", "relay"]))
async def test_a_hung_process_is_found_and_comes_back_clean(cluster: LocalCluster, role: str) -> None:
    await asyncio.to_thread(cluster.wait_healthy)
    fleet = await asyncio.to_thread(Fleet, cluster)
    name, victim = next((name, process) for name, process in fleet.processes.items() if process["role"] == role)
    ports = fleet.mqtt_ports
    # Of users so many that every relay has some.
    listeners = [
        Player(port, 500_000 + number, ROOMS, chat=role == "relay")
        for number, port in enumerate(ports * (6 if role == "relay" else 1))
    ]
    moving = [Player(ports[number % len(ports)], 510_000 + number, ROOMS) for number in range(20)]
    publisher, late = Player(ports[0], 520_000, []), Player(ports[-1], 530_000, ROOMS, chat=role == "relay")
    everybody = [*listeners, *moving, publisher, late]
    sending: asyncio.Task[None] | None = None
    heard: dict[str, bool] = {}

    async def heard_by(*, nobody: bool) -> bool:
        heard.clear()
        heard.update(await who_hears(fleet, name))
        return not any(heard.values()) if nobody else all(heard.values())

    try:
        await publisher.client.connect()
        await asyncio.gather(*(player.come() for player in (*listeners, *moving)))
        await fleet.until_equal()
        assert all((await who_hears(fleet, name)).values())
        traffic = Traffic(publisher, [*listeners], chat=role == "relay")
        sending = asyncio.create_task(traffic.go_on())
        async with stopped(victim):
            start = time.monotonic()
            await until(lambda: heard_by(nobody=True), lambda: f"silence for all others: {heard}", WAIT_S)
            found_s = time.monotonic() - start
            await traffic.reaches_everybody()
            goes_on_s = time.monotonic() - start
            # Some leave, some move, one comes: its subscription must be confirmed by those who are left.
            await asyncio.gather(*(player.leave(*ROOMS[::2]) for player in moving[::2]), *(player.go() for player in moving[1::2]))
            async with asyncio.timeout(WAIT_S):
                await late.come()
            traffic.listeners.append(late)
            await traffic.reaches_everybody()
        back = time.monotonic()
        await asyncio.to_thread(cluster.wait_healthy)
        await until(lambda: heard_by(nobody=False), lambda: f"an answer to all others: {heard}", WAIT_S)
        await fleet.until_equal()
        clean_s = time.monotonic() - back
        print(f"\n{role}: dead for all of {len(heard)} others after {found_s:.1f} s, all rooms go on after {goes_on_s:.1f} s")
        print(f"{role}: clean {clean_s:.1f} s after its return")
        assert [process["pid"] for process in cluster.processes(role) if process["address"] == victim["address"]] == [victim["pid"]]
        sending.cancel()
        for wanted in [traffic.round_of() for _ in range(5)]:
            await until(
                lambda wanted=wanted: all(some <= one.got for one, some in wanted.items()),  # type: ignore[misc]
                lambda: "something was lost after it came back",
            )
        assert {count for player in everybody for count in player.got.values()} == {1}, "something came twice"
    finally:
        if sending is not None:
            sending.cancel()
        await asyncio.gather(*(player.client.close() for player in everybody))
