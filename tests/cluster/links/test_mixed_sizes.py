"""Records of mixed sizes over a network that delays, between machines: by the clock of a simulation nobody waits for the others."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from cluster.links.api import Outcome
from cluster.links.link import MIN_DELAY_S
from cluster.links.options import LinkOptions
from tests.cluster.links.world import Node, Recorder, World, make_record

DELAY_S = 0.000_1
STREAM_DELAY_S = 0.000_5
TICK_S = 0.001
ROOMS = 100


class Ages(Recorder):
    """Writes down how old each record is when it is handled, and in which order those of a room came."""

    def __init__(self, world: World, sent_at: dict[int, float]) -> None:
        super().__init__()
        self.world, self.sent_at = world, sent_at
        self.ages: dict[int, float] = {}
        self.rooms: dict[int, list[int]] = {}

    def on_records(self, peer: object, data: bytes, start: int, end: int, count: int) -> Outcome:
        before = len(self.records)
        super().on_records(peer, data, start, end, count)  # type: ignore[arg-type]
        for record in self.records[before:]:
            number = int.from_bytes(record[16:24], "little")
            assert number not in self.ages
            self.ages[number] = self.world.now - self.sent_at[number]
            self.rooms.setdefault(int.from_bytes(record[24:32], "little"), []).append(number)
        return Outcome.TAKEN


class Wire:
    """Two nodes, and what is under way between them: in order, each carrier with its delay, some datagrams lost."""

    def __init__(self, options: LinkOptions, seed: int, loss: float = 0.0) -> None:
        self.world = World()
        self.rng, self.loss = random.Random(seed), loss
        self.sent_at: dict[int, float] = {}
        self.alice, self.bob = self.world.node(1, options), self.world.node(2, options)
        self.handler = Ages(self.world, self.sent_at)
        self.bob.handler = self.bob.core._handler = self.handler
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self.alice.know(self.bob)
        self.bob.know(self.alice)
        self.run(0.05)
        self.alice.core.stream_connected(self.bob.id, True, self.world.now)

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.world.now + seconds, next(self._numbers), act))

    def turn(self, node: Node) -> None:
        """End a turn of a node: what it sends is under way."""
        node.turn()
        other = self.bob if node is self.alice else self.alice
        outputs = node.core.outputs
        for data, _ in node.sent:
            if self.rng.random() >= self.loss:
                self.after(DELAY_S, lambda data=data: other.core.receive(data, node.address, self.world.now))  # type: ignore[misc]
        for frames in (outputs.frames, outputs.replies):
            for _, frame in frames:
                self.after(
                    STREAM_DELAY_S,
                    lambda frame=frame: other.core.receive_frame(frame, node.id, "test", self.world.now),  # type: ignore[misc]
                )
            frames.clear()
        node.sent.clear()

    def run(self, seconds: float) -> None:
        """Let time pass: what is due arrives, timers ring."""
        until = self.world.now + seconds
        while True:
            timers = max(min(node.core.next_deadline() for node in (self.alice, self.bob)), self.world.now + MIN_DELAY_S)
            then = min(timers, self._due[0][0] if self._due else until, until)
            self.world.now = max(self.world.now, then)
            while self._due and self._due[0][0] <= self.world.now:
                heapq.heappop(self._due)[2]()
            for node in (self.alice, self.bob):
                if node.core.next_deadline() <= self.world.now + TICK_S:
                    node.core.poll(self.world.now)
                self.turn(node)
            if self.world.now >= until:
                return

    def send(self, number: int, size: int) -> None:
        self.sent_at[number] = self.world.now
        self.alice.send(self.bob, [make_record(number, size, room=self.rng.randrange(ROOMS))], token=number)
        self.turn(self.alice)


@pytest.mark.parametrize(("every", "large"), [(10, 2048), (2, 2048), (10, 60_000), (1, 2048), (3, 60_000)])
def test_small_records_do_not_wait_for_large_ones(every: int, large: int) -> None:
    wire = Wire(LinkOptions(loopback_mtu_bytes=1400), seed=every)
    for number in range(1, 1001):
        wire.send(number, 200 if number % every else large)
        wire.run(TICK_S)
    wire.run(0.5)
    ages = wire.handler.ages
    assert len(ages) == 1000, "nothing was pushed back"
    assert sorted(wire.alice.handler.settled) == [(number, True) for number in range(1, 1001)]
    small = sorted(ages[number] for number in ages if number % every) or [0.0]
    assert small[len(small) // 2] <= 0.001
    assert small[len(small) * 99 // 100] <= 0.010
    assert all(numbers == sorted(numbers) for numbers in wire.handler.rooms.values())


@pytest.mark.parametrize("seed", range(6))
def test_with_losses_what_is_settled_was_handled_and_rooms_stay_in_order(seed: int) -> None:
    wire = Wire(LinkOptions(loopback_mtu_bytes=1400), seed, loss=0.05)
    sizes = [200, 200, 200, 2048, 20_000, 60_000]
    for number in range(1, 401):
        wire.send(number, wire.rng.choice(sizes))
        wire.run(TICK_S * wire.rng.random() * 3)
    wire.run(5.0)
    settled = dict(wire.alice.handler.settled)
    assert len(settled) == 400
    assert all(number in wire.handler.ages for number, handled in settled.items() if handled)
    assert all(numbers == sorted(numbers) for numbers in wire.handler.rooms.values())
    assert len(wire.handler.ages) > 250


def test_a_busy_sender_among_many_is_not_held_to_a_datagram_in_ten_milliseconds() -> None:
    """The window of one of 64 senders, where the kernel gave 212,992 bytes: three datagrams."""
    wire = Wire(LinkOptions(loopback_mtu_bytes=1400), seed=1)
    wire.bob.core.receive_buffer_given(2 * 3328)
    for number in range(1, 1501):
        wire.send(number, 200)
        wire.run(1 / 3000)
    wire.run(0.5)
    assert len(wire.handler.ages) == 1500
    ages = sorted(wire.handler.ages.values())
    assert ages[len(ages) * 99 // 100] <= 0.010
