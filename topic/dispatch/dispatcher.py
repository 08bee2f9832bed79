"""A channel with its members: who gets what of which part. Pure.

    a part grew, a settlement was committed, time passed ──▶ the part is hungry ──pump──▶ members with room get its messages
                                                                    └── nothing is ready: it is no longer

Only what may have something to give costs a turn. Everything here is the memory of the group's leader; the next one begins from the
state.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from cluster.core.contract import NEVER
from cluster.topics.entries import ChannelSettings, Settlement, number_of, part_id, topic_of
from topic.dispatch.flights import Flights, Pending
from topic.dispatch.lanes import Lanes
from topic.dispatch.members import Member, Members
from topic.dispatch.paces import Paces
from topic.dispatch.ready import AnyOrder, Ready
from topic.dispatch.sorting import FOR_ALL, MICRO, WORK, Blocks, Sorter, Wants
from topic.events import ChannelView, Deliver, LoadTest, MemberView
from topic.state.channels import Progress
from topic.state.parts import Part
from topic.state.state import State

BATCH: Final = 256
"""Messages that a member gets of a part before the next member has its turn; a lone one gets all that it has room for."""
SKIPPED_ENOUGH: Final = 4096
SKIPPED_S: Final = 1.0
"""Messages that are not wanted are acknowledged by one entry when there are so many, or after so many seconds."""
REFUSED_AGAIN_S: Final = 0.25
"""Pause before messages are settled again whose settlement the log did not take, as while the disk is full."""
MAX_SHOWN: Final = 1000
"""Members that a description has. Policy: those that are here longest."""
SKIPPED_RANGES: Final = 1024
"""Ranges of such an entry."""

Clock = Callable[[float], int]
"""Monotonic seconds → the log's clock, Unix µs."""


@dataclass(slots=True, eq=False)
class Queue:
    """A part as the channel sees it."""

    part: Part
    flights: Flights
    ready: Ready
    progress: Progress
    since: int
    """Counter of the last entry that the state had when it was made."""
    missing: set[int] = field(default_factory=set)
    """IDs of parents that the channel has not finished, as far as is known."""
    alarm: float = NEVER
    """Time at which it is looked at again, whatever happens."""
    rest_until: float = NEVER
    """Time from which it may give something again by its topic's rate, while it may not."""


class Dispatcher:
    """One channel on the leader of a group.

    Args:
        settings: the channel's.
        state: of the group.
        blocks: of parts.
        clock: the log's.
        paces: of the parts.
    """

    def __init__(self, settings: ChannelSettings, state: State, blocks: Blocks, clock: Clock, paces: Paces) -> None:
        self.settings = settings
        self._state, self._blocks, self._clock, self._paces = state, blocks, clock, paces
        self.wants = Wants(settings.filter)
        self.members = Members()
        self.queues: dict[int, Queue] = {}
        """By part."""
        self._blocked: dict[int, Queue] = {}
        """Those with missing parents, by part."""
        self._suspended: dict[int, int] = {}
        """Part → seeks on their way."""
        self._hungry: dict[str, dict[int, None]] = {}
        """By tag: parts that may have something for members with it, in order of turns."""
        self._alarms: list[tuple[float, int]] = []
        self.more = False
        """The last pump stopped at a limit: the next one goes on."""

    # --- parts

    def look(self, now: float) -> None:
        """Begin with parts that the state has from now on, and drop those that it no longer has."""
        for number in [number for number in self.queues if number not in self._state.parts]:
            self._drop(number)
        for part in self._state.parts_of(self.settings.topic):
            if part.part not in self.queues:
                self._begin(part, now)

    def update(self, settings: ChannelSettings) -> None:
        """The channel's settings have changed."""
        self.settings = settings
        for queue in self.queues.values():
            queue.flights.limit(settings.timeout_s, settings.max_attempts)
        if self.wants.set_filter(settings.filter):
            self._sort_again(anew=True)

    def _begin(self, part: Part, now: float) -> Queue | None:
        """Begin with a part, unless there is nothing to be done: it has no messages to be delivered, and waits for no parents."""
        number, settings = part.part, self.settings
        progress, parents = self._state.progress.get((settings.channel, number)), part.parents if settings.ordered else ()
        if progress is None or number in self._suspended:
            return None
        if progress.acks.floor >= part.end and not progress.waiting and not parents:
            return None
        flights = Flights(settings.channel, number, settings.timeout_s, settings.max_attempts)
        sorter = Sorter(self.wants, part, self._blocks, self._clock, not settings.ordered)
        order = self.lanes if settings.ordered else AnyOrder
        ready: Ready = order(progress, sorter, self._clock(now), now)
        queue = self.queues[number] = Queue(part, flights, ready, progress, self._state.applied)
        if parents:
            queue.missing = {part_id(topic_of(number), parent) for parent in parents}
            self._blocked[number] = queue
            self._find_finished()
        self.wake(number)
        return queue

    def lanes(self, progress: Progress, sorter: Sorter, clock_us: int, now: float) -> Lanes:
        """The order of an ordered channel."""
        return Lanes(progress, sorter, clock_us, now)

    def _drop(self, part: int) -> None:
        queue = self.queues.pop(part, None)
        self._blocked.pop(part, None)
        for hungry in self._hungry.values():
            hungry.pop(part, None)
        if queue is not None:
            for member, count in queue.flights.counts().items():
                self.members.freed(member, count)

    def suspend(self, part: int) -> None:
        """Nothing of a part counts any more before it is resumed, as often as it was suspended."""
        self._suspended[part] = self._suspended.get(part, 0) + 1
        self._drop(part)

    def resume(self, part: int, now: float) -> None:
        """Begin with a part as the state says now."""
        left = self._suspended.pop(part, 1) - 1
        if left:
            self._suspended[part] = left
        elif part in self._state.parts and part not in self.queues:
            self._begin(self._state.parts[part], now)

    # --- parents

    @property
    def is_blocked(self) -> bool:
        """True if a part waits for its parents."""
        return bool(self._blocked)

    def missing_parents(self) -> set[int]:
        """IDs of parents of other groups that hold back a part."""
        return {each for queue in self._blocked.values() for each in queue.missing if each not in self._state.parts}

    def finished(self, part: int) -> bool:
        """True if the channel has acknowledged all of a sealed part, and has finished its parents: a part without messages has
        nothing to acknowledge, and says nothing of those before it."""
        return part not in self._blocked and part not in self._suspended and self._state.finished(self.settings.channel, part)

    def finished_parts(self) -> list[int]:
        """The sealed parts that the channel has finished."""
        return [part.part for part in self._state.parts_of(self.settings.topic) if self.finished(part.part)]

    def parent_finished(self, part: int) -> None:
        """The channel has finished a parent in another group."""
        for number, queue in list(self._blocked.items()):
            if part in queue.missing:
                queue.missing.discard(part)
                self._unblock(number, queue)
        self._find_finished()

    def check_finished(self, part: int) -> bool:
        """A part was sealed, or something of it settled. Returns True if the channel has finished it."""
        if not self.finished(part):
            return False
        self._find_finished()
        return True

    def _find_finished(self) -> None:
        """Parts begin whose parents are finished."""
        for number, queue in sorted(self._blocked.items()):  # parents have lower numbers
            queue.missing = {each for each in queue.missing if not self.finished(each)}
            self._unblock(number, queue)

    def _unblock(self, number: int, queue: Queue) -> None:
        if not queue.missing:
            self._blocked.pop(number, None)
            self.wake(number)

    # --- members

    def join(self, number: int, member: Member, load_test: LoadTest) -> None:
        """A member is here."""
        if not len(self.members) and load_test is not self.wants.load_test:
            self.wants.load_test = load_test
            self._sort_again(anew=True)
        if self.members.add(number, member):
            self._hungry[member.tag] = dict.fromkeys(part.part for part in self._state.parts_of(self.settings.topic))
            self._tags_changed()

    def leave(self, number: int) -> list[Pending]:
        """A member is gone. Returns what is to be committed."""
        member = self.members.get(number)
        if member is not None and self.members.remove(number):
            self._hungry.pop(member.tag, None)
            self._tags_changed()
        queues = [self.queues.get(part) for part in member.parts] if member else []
        return [each for queue in queues if queue for each in queue.flights.leave(number)]

    def _tags_changed(self) -> None:
        if self.wants.tags != self.members.tags:
            self.wants.tags = self.members.tags
            self._sort_again(anew=False)

    def _sort_again(self, anew: bool) -> None:
        for number, queue in self.queues.items():
            queue.ready.sort_again(anew)
            self.wake(number)

    def report(
        self,
        member: int,
        part: int,
        acknowledged: Sequence[tuple[int, int]],
        refused: Sequence[tuple[int, float]],
        rejected: Sequence[tuple[int, str]] = (),
    ) -> Pending | None:
        """See `Flights.settle`."""
        queue = self.queues.get(part)
        if queue is None:
            return None
        before = queue.flights.in_flight
        pending = queue.flights.settle(member, acknowledged, refused, rejected)
        self.members.freed(member, before - queue.flights.in_flight)
        return pending

    def touch(self, member: int, part: int, offsets: Sequence[int], now: float) -> None:
        """See `Flights.touch`."""
        queue = self.queues.get(part)
        if queue is not None:
            queue.flights.touch(member, offsets, now)
            self._remind(part, queue)

    # --- settlements

    def committed(self, pending: Pending, now: float) -> None:
        """A settlement of this leader is in the state."""
        settlement = pending.settlement
        queue = self.queues.get(settlement.part)
        if queue is None or queue.flights is not pending.flights:
            return
        if self.settings.ordered:
            for low, high in settlement.acknowledged:
                queue.ready.done(low, high)
            for dead in settlement.dead:
                queue.ready.done(dead.offset, dead.offset + 1)
        if settlement.deferred:
            self._again(queue, settlement, now)
        if self.settings.ordered or settlement.deferred:
            self.wake(settlement.part)

    def _again(self, queue: Queue, settlement: Settlement, now: float) -> None:
        ready, waiting = queue.ready, queue.progress.waiting
        low, high, delay_us = 0, 0, -1
        for each in settlement.deferred:
            if each.offset not in waiting:  # acknowledged meanwhile: by retention, say
                ready.done(each.offset, each.offset + 1)
            elif each.offset == high and each.delay_us == delay_us:
                high += 1
            else:
                if low < high:
                    ready.again(low, high, now + delay_us / MICRO)
                low, high, delay_us = each.offset, each.offset + 1, each.delay_us
        if low < high:
            ready.again(low, high, now + delay_us / MICRO)
        self._remind(settlement.part, queue)

    def refused(self, pending: Pending, now: float) -> None:
        """A settlement is not in the log."""
        settlement = pending.settlement
        queue = self.queues.get(settlement.part)
        if queue is None or queue.flights is not pending.flights:
            return
        if not pending.taken:
            for low, high in settlement.acknowledged:
                queue.ready.skipped.add(low, high, now)
        for member, flight in pending.taken:
            # What is overdue, as all is of a member that is gone, is settled after a pause: it would be refused at once again.
            least = now + REFUSED_AGAIN_S
            queue.flights.refused(member, flight, least if self.members.get(member) is None else max(flight.until, least))
            self.members.freed(member, flight.low - flight.high)
        self._remind(settlement.part, queue)

    def resent(self, part: int, offsets: Sequence[int], counter: int, now: float) -> None:
        """Dead letters of a part wait for delivery again, by the entry of this counter."""
        queue = self.queues.get(part)
        if queue is not None and queue.since < counter:
            queue.ready.resent(offsets, now)
        self.wake(part)

    # --- time

    def _remind(self, part: int, queue: Queue) -> None:
        ready, flights = queue.ready, queue.flights
        due = min(ready.next_deadline(), flights.next_deadline(), ready.skipped.since + SKIPPED_S, queue.rest_until)
        if due < queue.alarm:
            queue.alarm = due
            heapq.heappush(self._alarms, (due, part))

    def next_deadline(self) -> float:
        """Time at which a message is overdue, or due again, or skipped ones have to be settled."""
        alarms = self._alarms
        while alarms:
            due, part = alarms[0]
            queue = self.queues.get(part)
            if queue is not None and queue.alarm == due:
                return due
            heapq.heappop(alarms)
        return NEVER

    def tick(self, now: float) -> list[Pending]:
        """Time has passed: returns what is to be committed. Members that keep messages beyond their time have room for others."""
        found = list[Pending]()
        while self.next_deadline() <= now:
            _, part = heapq.heappop(self._alarms)
            queue = self.queues[part]
            queue.alarm = NEVER
            late = queue.flights.time_out(now)
            for pending in late:
                for member, flight in pending.taken:
                    self.members.freed(member, flight.high - flight.low)
            found += late
            found += self._skip(part, queue, now)
            if min(queue.ready.next_deadline(), queue.rest_until) <= now:
                queue.rest_until = NEVER
                queue.ready.wake(now)
                self.wake(part)
            self._remind(part, queue)
        return found

    def _skip(self, part: int, queue: Queue, now: float) -> list[Pending]:
        """Acknowledge what is not wanted, many messages by one entry."""
        skipped, found = queue.ready.skipped, list[Pending]()
        if skipped.count >= SKIPPED_ENOUGH or (skipped.count and (queue.part.sealed or skipped.since + SKIPPED_S <= now)):
            while skipped.count:
                settlement = Settlement(self.settings.channel, part, skipped.take(SKIPPED_RANGES))
                found.append(Pending(settlement, queue.flights))
        return found

    # --- dispatching

    def wake(self, part: int) -> None:
        """A part may have something to give."""
        for hungry in self._hungry.values():
            hungry[part] = None

    def pump(self, now: float, out: list[Deliver]) -> list[Pending]:
        """Give members with room what is ready. Returns what is to be committed."""
        found, self.more, self.wants.work = list[Pending](), False, WORK
        if self.wants.broken or not any(self._hungry.values()):
            return found
        for tag in self.members.free_tags():
            free, hungry, full = self.members.free(tag), self._hungry.get(tag), list[int]()
            while free and hungry:
                part = next(iter(hungry))
                del hungry[part]
                queue = self.queues.get(part) or self._begin_grown(part, now)
                if queue is None or queue.missing:
                    continue
                hungry.pop(part, None)
                if wait_s := self._paces.wait_s(queue.part, now):
                    queue.rest_until = now + wait_s
                    self._remind(part, queue)
                    continue
                gave = self._give(tag, part, queue, now, out)
                if queue.ready.left:
                    if gave:
                        hungry[part] = None
                    else:
                        full.append(part)
                        self.more = True
                if queue.ready.skipped.count:
                    found += self._skip(part, queue, now)
            for part in full:
                self._hungry[tag][part] = None
        return found

    def _begin_grown(self, part: int, now: float) -> Queue | None:
        found = self._state.parts.get(part)
        return self._begin(found, now) if found is not None else None

    def _give(self, tag: str, part: int, queue: Queue, now: float, out: list[Deliver]) -> bool:
        """Give one member what it may have of a part. Returns False if nothing is ready."""
        free = self.members.free(tag)
        number, member = next(iter(free.items()))
        room = member.credit - member.having
        limit = self._paces.limit(queue.part, room if len(free) == 1 else min(room, BATCH), now)
        runs = queue.ready.take(tag, limit, len(free), queue.part.end, now)
        if len(self._hungry) > 1:
            for other, hungry in self._hungry.items():
                if other != tag and (runs or queue.ready.has(other)):
                    hungry[part] = None
        if runs:
            count = sum(run.high - run.low for run in runs)
            self.members.gave(number, part, count)
            self._paces.gave(queue.part, count, now)
            queue.flights.give(number, runs, now)
            out.append(Deliver(number, self.settings.channel, part, runs))
        self._remind(part, queue)
        return bool(runs)

    # --- queries

    def describe(self, part: Part) -> ChannelView:
        """The channel in a part."""
        channel = self.settings.channel
        progress, queue = self._state.progress[channel, part.part], self.queues.get(part.part)
        having = queue.flights.counts() if queue else {}
        some = islice(self.members.items(), MAX_SHOWN)
        members = [MemberView(each.name, each.tag, each.credit, having.get(number, 0)) for number, each in some]
        unacknowledged, with_members = progress.unacknowledged(part.end), sum(having.values())
        stuck = list(self._stuck(part, queue, progress)) if unacknowledged > with_members else []
        return ChannelView(
            channel, part.part, progress.acks.floor, part.end, unacknowledged, with_members,
            len(progress.waiting), len(progress.dead), progress.lost, members, stuck, self.wants.errors.get(part.part, 0),
        )  # fmt: skip

    def _stuck(self, part: Part, queue: Queue | None, progress: Progress) -> Iterable[str]:
        """Why messages wait, in words."""
        if self.wants.broken:
            yield f"the channel's filter cannot be read: {self.wants.broken}"
        if part.part in self._suspended:
            yield "a seek is on its way"
        if not len(self.members):
            yield "no member is here"
        elif not self.members.free_tags():
            names = ", ".join(sorted(each.name or "one without a name" for _, each in self.members.items())[:5])
            yield f"every member has as many messages as its credit allows, and reports none: {names}"
        if progress.waiting:
            yield f"{len(progress.waiting)} messages wait for another delivery"
        if queue is None:
            return
        if queue.missing:
            numbers = ", ".join(str(number_of(each)) for each in sorted(queue.missing))
            yield f"the channel is ordered, and has not finished the parts before it: {numbers}"
        for tag, count in queue.ready.parked().items():
            if len(self.members) and not self.members.free(tag):
                whom = f"with the tag {tag}" if tag != FOR_ALL else "without a tag"
                yield f"{count} messages wait for a member {whom} that has room"
