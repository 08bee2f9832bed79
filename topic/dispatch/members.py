"""A channel with its members: who gets what of which part. Pure.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.core.contract import NEVER
from topic.dispatch.flights import Flights, offsets_of
from topic.dispatch.lanes import Lanes
from topic.dispatch.ready import MICRO, AnyOrder, Ready
from topic.entries import ChannelSettings, Settlement, part_id, topic_of
from topic.events import ChannelView, Deliver, MemberView, Run
from topic.state.channels import Progress
from topic.state.parts import Part
from topic.state.state import State

BATCH: Final = 256
"""Messages that a member gets of a part before the next member has its turn."""

SlotsOf = Callable[[int, int, int], Sequence[int]]
"""(part, low, high) → slots of the messages with these offsets."""


@dataclass(slots=True)
class Member:
    """A member of a channel."""

    credit: int
    having: int = 0
    """Messages that it has and did not report."""
    name: str = ""
    tag: str = ""


@dataclass(slots=True)
class Queue:
    """A part as the channel sees it."""

    flights: Flights
    ready: Ready
    progress: Progress
    missing: set[int]
    """IDs of parents that the channel has not finished, as far as is known."""


class Dispatcher:
    """One channel on the leader of a group. Everything here is the leader's memory: the next leader begins from the state.

    Args:
        settings: the channel's.
        state: of the group.
        slots: of messages; used if the channel is ordered.
    """

    def __init__(self, settings: ChannelSettings, state: State, slots: SlotsOf) -> None:
        self.settings = settings
        self._state, self._slots = state, slots
        self.members: dict[int, Member] = {}
        """In order of turns."""
        self.queues: dict[int, Queue] = {}
        """By part."""

    # --- parts

    def begin(self, part: Part, now: float) -> None:
        """Begin with a part that the state has."""
        number, settings = part.part, self.settings
        progress = self._state.progress.get((settings.channel, number))
        if number in self.queues or progress is None:
            return
        flights = Flights(settings.channel, number, settings.timeout_s, settings.max_attempts)
        clock_us, ready = self._state.clock_us, None
        if settings.ordered:
            ready = self.lanes(progress, clock_us, now, lambda low, high: self._slots(number, low, high))
        parents = {part_id(topic_of(number), parent) for parent in part.parents} if settings.ordered else set()
        self.queues[number] = Queue(flights, ready or AnyOrder(progress, clock_us, now), progress, parents)

    def look(self, now: float) -> None:
        """Begin with parts that the state has from now on, and drop those that it no longer has."""
        for number in [number for number in self.queues if number not in self._state.parts]:
            del self.queues[number]
            self._count()
        for part in self._state.parts_of(self.settings.topic):
            self.begin(part, now)

    def suspend(self, part: int) -> None:
        """Nothing of a part counts any more before it is resumed."""
        if self.queues.pop(part, None) is not None:
            self._count()

    def resume(self, part: int, now: float) -> None:
        """Begin with a part as the state says now."""
        self.suspend(part)
        if part in self._state.parts:
            self.begin(self._state.parts[part], now)

    def resent(self, part: int, now: float) -> None:
        """Dead letters of a part wait for delivery again."""
        self.resume(part, now)

    def lanes(self, progress: Progress, clock_us: int, now: float, slots: Callable[[int, int], Sequence[int]]) -> Lanes:
        """The order of an ordered channel."""
        return Lanes(progress, clock_us, now, slots)

    def missing_parents(self) -> set[int]:
        """IDs of parents of other groups that hold back a part."""
        for _, queue in sorted(self.queues.items()):  # parents have lower numbers
            queue.missing = {each for each in queue.missing if not self.finished(each)}
        return {each for queue in self.queues.values() for each in queue.missing if each not in self._state.parts}

    def finished(self, part: int) -> bool:
        """True if the channel has acknowledged all of a sealed part, and has finished its parents: a part without messages has
        nothing to acknowledge, and says nothing of those before it."""
        queue = self.queues.get(part)
        return queue is not None and not queue.missing and self._state.finished(self.settings.channel, part)

    def finished_parts(self) -> list[int]:
        """The sealed parts that the channel has finished."""
        return [part for part in sorted(self.queues) if self.finished(part)]

    def parent_finished(self, part: int) -> None:
        """The channel has finished a parent."""
        for queue in self.queues.values():
            queue.missing.discard(part)

    # --- members

    def report(
        self, member: int, part: int, acknowledged: Sequence[tuple[int, int]], refused: Sequence[tuple[int, float]]
    ) -> Settlement | None:
        """See `Flights.settle`."""
        queue, found = self.queues.get(part), self.members.get(member)
        if queue is None or found is None:
            return None
        before = queue.flights.in_flight
        settlement = queue.flights.settle(member, acknowledged, refused)
        found.having -= before - queue.flights.in_flight
        return settlement

    def leave(self, member: int) -> list[Settlement]:
        """A member is gone. Returns what is to be committed."""
        self.members.pop(member, None)
        return _all(queue.flights.leave(member) for queue in self.queues.values())

    def time_out(self, now: float) -> list[Settlement]:
        """See `Flights.time_out`. Members that keep messages beyond their time have room for others."""
        found = _all(queue.flights.time_out(now) for queue in self.queues.values())
        if found:
            self._count()
        return found

    def _count(self) -> None:
        for number, member in self.members.items():
            member.having = sum(queue.flights.count(number) for queue in self.queues.values())

    def touch(self, member: int, part: int, offsets: Sequence[int], now: float) -> None:
        """See `Flights.touch`."""
        queue = self.queues.get(part)
        if queue is not None:
            queue.flights.touch(member, offsets, now)

    # --- settlements

    def committed(self, settlement: Settlement, now: float) -> None:
        """A settlement of this leader is in the state."""
        queue = self.queues.get(settlement.part)
        if queue is None:
            return
        queue.flights.committed(settlement)
        again = {each.offset: now + each.delay_us / MICRO for each in settlement.deferred}
        for offset in offsets_of(settlement):
            if offset in again:
                queue.ready.again(offset, again[offset])
            else:
                queue.ready.done(offset)

    def refused(self, settlement: Settlement) -> None:
        """A settlement is not in the log."""
        queue = self.queues.get(settlement.part)
        if queue is not None:
            queue.flights.refused(settlement)
            self._count()

    # --- dispatching

    def pump(self, now: float, out: list[Deliver]) -> None:
        """Give members with credit what is ready."""
        if not self.members:
            return
        self.missing_parents()
        for part, queue in self.queues.items():
            if queue.missing:
                continue
            end = self._state.parts[part].end
            while (found := self._next_member()) is not None:
                number, member = found
                offsets = queue.ready.take(min(member.credit - member.having, BATCH), end, now)
                if not offsets:
                    break
                self.members[number] = self.members.pop(number)  # the others first next time
                member.having += len(offsets)
                out.append(Deliver(number, self.settings.channel, part, self._given(queue, number, offsets, now)))

    def _given(self, queue: Queue, member: int, offsets: Sequence[int], now: float) -> list[Run]:
        waiting, found = queue.progress.waiting, list[Run]()
        for offset in offsets:
            before = waiting.get(offset)
            attempts = before.attempts + 1 if before else 1
            queue.flights.give(offset, member, attempts, now)
            if found and found[-1].high == offset and found[-1].attempts == attempts:
                found[-1] = Run(found[-1].low, offset + 1, attempts)
            else:
                found.append(Run(offset, offset + 1, attempts))
        return found

    def describe(self, part: Part) -> ChannelView:
        """The channel in a part."""
        channel = self.settings.channel
        progress, queue = self._state.progress[channel, part.part], self.queues.get(part.part)
        having = {number: queue.flights.count(number) if queue else 0 for number in self.members}
        members = [MemberView(each.name, each.tag, each.credit, having[number]) for number, each in self.members.items()]
        return ChannelView(
            channel, part.part, progress.acks.floor, part.end, progress.unacknowledged(part.end), sum(having.values()),
            len(progress.waiting), len(progress.dead), progress.lost, members, [],
        )  # fmt: skip

    def _next_member(self) -> tuple[int, Member] | None:
        return next(((number, member) for number, member in self.members.items() if member.having < member.credit), None)

    def next_deadline(self) -> float:
        """Time at which a message is overdue, or due again."""
        deadlines = [queue.flights.next_deadline() for queue in self.queues.values()]
        if self._next_member() is not None:
            deadlines += [queue.ready.next_deadline() for queue in self.queues.values() if not queue.missing]
        return min(deadlines, default=NEVER)


def _all(found: Iterable[Settlement | None]) -> list[Settlement]:
    return [each for each in found if each is not None]
