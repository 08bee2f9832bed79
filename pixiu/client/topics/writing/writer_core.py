"""The core of a topic writer: which block goes to which leader, and what is confirmed. Pure.

    offer ──▶ slot ──▶ part ──▶ queue ──cut──▶ blocks under way ──▶ leader of the group
                         ▲                          │ STORED, REPEATED: confirmed
                         └──────── children ◀───────┤ SEALED: what is left goes on there, in the order of the writer
                                                    └ HOLE, refused, the stream died: again, under the same positions

A writer numbers its messages for each part from 1, without a hole. What is not confirmed keeps its position, and is sent again
until it is; so nothing is stored twice, whatever dies. A child begins when everything of the parts before it is settled.

A writer with a name and a `progress` stores nothing twice over its own restarts, too. For that the first message to a part that
has none of it is confirmed before any later one leaves (`_barrier`): after a restart, what is missing in such a part is known to
be later than all that is stored.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import merge
from math import inf
from operator import attrgetter
from typing import Final

from pixiu.client.options import ClientOptions
from pixiu.client.send.events import Failure, in_doubt
from pixiu.client.topics.leader_link import LeaderLink
from pixiu.client.topics.topic_map import TopicMap
from pixiu.client.topics.writing.ahead import Ahead
from pixiu.client.topics.writing.resumed import Resumed, Stored
from pixiu.client.topics.writing.writer_events import (
    FINAL,
    CloseStream,
    Effect,
    GroupStream,
    OpenStream,
    PartStream,
    RefreshTopic,
    Request,
    Resolved,
    Result,
    SentBlock,
    TopicCounters,
    TopicTicket,
    Verdict,
    Writable,
    encoded,
)
from pixiu.errors import (
    Draining,
    InvalidArgument,
    NotLeader,
    NotSent,
    OutcomeUnknown,
    StaleWriter,
    UnknownTopic,
)
from pixiu.placement.slots import SLOTS, slot_of
from pixiu.wire.block import HEAD_BYTES, MAX_BLOCK_BYTES, join
from pixiu.wire.levels import Level

LINGER_S: Final = 0.005
"""Longest wait of a message for others of its block, while the part has a block under way. Otherwise it leaves at once."""
BLOCK_BYTES: Final = 256 << 10
"""Size at which a block leaves without waiting."""
MAX_UNDER_WAY: Final = 8
"""Blocks of a part that may be unanswered. Policy: further messages wait, and share a block."""
STALL_S: Final = 15.0
"""Time after which a leader that owes an answer and is silent is left, seconds."""
REFRESH_S: Final = 0.2
"""Interval at which the topic's description is asked for while something waits for it."""
RESEND: Final = "a named writer that opens again knows what is stored"
ANOTHER: Final = "another process writes under this writer's name; end it, open the writer again, and go on after its `progress`"
SPREAD: Final = 40_503
"""Odd factor by which messages without a key walk over the slots of a part."""
number_of = attrgetter("message_id")


class WriterCore:
    """Decides; see the module.

    Args:
        options: bounds of what is unresolved, and times.
        topic: the topic as described last.
        writer: the writer's ID.
        uniform: returns random numbers in [0, 1).
        stored: of a named writer, what each part has of it; None: the writer is new.
    """

    def __init__(
        self,
        options: ClientOptions,
        topic: TopicMap,
        writer: int,
        uniform: Callable[[], float],
        stored: dict[int, Stored] | None = None,
    ) -> None:
        self._options, self._uniform = options, uniform
        self.writer, self._ahead = writer, Ahead(topic)
        self.resumed = None if stored is None else Resumed(topic.lineage, stored)
        self._stored = stored or {}
        self.counters = TopicCounters()
        self.unresolved = self.unresolved_bytes = 0
        self.last_progress = 0
        self.failed: Failure | None = None
        """The reason why nothing more is taken."""
        self._groups: dict[int, GroupStream] = {}
        self._by_number: dict[int, GroupStream] = {}
        self._streams: dict[int, PartStream] = {}
        """By part: those with a position."""
        self._older: dict[int, PartStream] = {}
        """Those of `_streams` that are busy and whose part is sealed."""
        self._requests: dict[int, tuple[PartStream, SentBlock]] = {}
        self._numbers = 0
        """Of streams and requests."""
        self._spread = int(uniform() * SLOTS)
        """Number of the next slot for messages without a key."""
        self._spread_left = 0
        """Bytes that still go there."""
        self._flush = 0
        """Number of the last message that does not linger."""
        self._refresh_at = inf
        self._deadline = inf
        """Lower bound of the next deadline."""
        self._last_reason = ""
        self._touched: set[int] = set()
        self._barrier_moved = False

    @property
    def topic(self) -> TopicMap:
        """The topic, with the parts that leaders have named since it was described."""
        return self._ahead.topic

    # --- offering

    def has_space(self, size: int = 0, reserved_bytes: int = 0, reserved_records: int = 0) -> bool:
        """True if a message of `size` bytes may be offered, beside what is reserved."""
        options, number = self._options, self.unresolved + reserved_records
        used = self.unresolved_bytes + reserved_bytes
        return not number or (number < options.queue_records and used + size <= options.queue_bytes)

    def slot(self, key: bytes | None, progress: int) -> int:
        """The slot of a message that names none: by its key, for a named writer by its progress, else in turn by blocks."""
        if key is not None:
            return slot_of(key)
        if self.resumed is not None and progress:
            return slot_of(progress.to_bytes(8, "little"))  # the same when it is sent again after a restart
        if self._spread_left <= 0:
            self._spread, self._spread_left = self._spread + 1, BLOCK_BYTES
        parts = self.topic.lineage.open_parts()
        turn, place = self._spread // len(parts), parts[self._spread % len(parts)]
        return place.low + turn * SPREAD % (place.high - place.low)

    def offer(self, ticket: TopicTicket, now: float) -> list[Effect]:
        """Take a message. Raises the error that ended the writer, and `InvalidArgument` for progress that does not rise."""
        if self.failed is not None:
            raise self.failed.error()
        assert ticket.encoded is not None
        if self.resumed is not None and (ticket.progress or self.last_progress):
            if ticket.progress <= self.last_progress:
                raise InvalidArgument(f"progress rises with every message; {ticket.progress} follows {self.last_progress}")
            self.last_progress = ticket.progress
        slot = ticket.encoded.slot
        if ticket.progress and self.resumed is not None and ticket.progress <= self.resumed.of_slot(slot):
            self.counters.offered += 1
            self.counters.repeated += 1
            ticket.message_id, ticket.encoded, ticket.resolved = self.counters.offered, None, True
            return []
        return self.offer_all((ticket,), slot, now)

    def offer_all(self, tickets: Sequence[TopicTicket], slot: int, now: float) -> list[Effect]:
        """Take messages of one slot; with progress each by itself. Raises the error that ended the writer."""
        if self.failed is not None:
            raise self.failed.error()
        size, deadline = sum(ticket.size for ticket in tickets), now + self._options.topic_timeout_s
        for number, ticket in enumerate(tickets, self.counters.offered + 1):
            ticket.message_id, ticket.at, ticket.deadline = number, now, deadline
        self.counters.offered += len(tickets)
        self._spread_left -= size
        self.unresolved += len(tickets)
        self.unresolved_bytes += size
        stream = self._stream_of(slot)
        stream.queue.extend(tickets)
        stream.queue_bytes += size
        group = self._busy(stream)
        self._deadline = min(self._deadline, now + LINGER_S, deadline)
        if not group.number:
            return self._wanted(group, now)
        return [Writable(group.number)] if group.open and self._may_cut(stream, now) else []

    def _stream_of(self, slot: int) -> PartStream:
        """The stream of the open part that holds a slot."""
        part = self.topic.lineage.open_part(slot)
        stream = self._streams.get(part.number)
        if stream is None:
            stream = self._streams[part.number] = PartStream(part.number, part.low, part.high, part.group)
            stream.confirmed = stream.safe = self._stored.get(part.number, Stored()).position
            stream.doubtful = self.resumed is not None
            stream.touched = self._is_touched(part.number)
        return stream

    def _is_touched(self, number: int) -> bool:
        """True if something of the writer is known to be in a part, or for each of its slots in the parts before it."""
        part = self.topic.lineage.parts.get(number)
        if part is None or self.resumed is None or number in self._touched:
            return number in self._touched
        if self._stored.get(number, Stored()).position or self.resumed.covers(part.low, part.high):
            return True
        return bool(part.parents) and all(self._is_touched(parent) for parent in part.parents)

    def _busy(self, stream: PartStream) -> GroupStream:
        group = self._groups.get(stream.group)
        if group is None:
            options = self._options
            link = LeaderLink.new(options.backoff_s, options.max_backoff_s, self._uniform)
            link.set_addresses(self.topic.groups.get(stream.group, ()))
            group = self._groups[stream.group] = GroupStream(link)
        group.busy[stream.part] = stream
        return group

    # --- streams

    def group_of(self, number: int) -> int | None:
        """The group that a stream leads to."""
        stream = self._by_number.get(number)
        return next((group for group, each in self._groups.items() if each is stream), None) if stream is not None else None

    def next_request(self, number: int, now: float) -> Request | None:
        """The next block for a stream; None: there is none now."""
        group = self._by_number.get(number)
        if group is None or not group.open or group.draining:
            return None
        for part, stream in list(group.busy.items()):
            if not stream.busy:
                del group.busy[part]
                continue
            block = self._next_block(stream, now)
            if block is None:
                continue
            if group.under_way and group.under_way + len(block.data) > group.window_bytes:
                return None
            if not group.under_way:
                group.progress_at = now
            group.busy[part] = group.busy.pop(part)  # the others first next time
            return self._send(group, stream, block)
        return None

    def _send(self, group: GroupStream, stream: PartStream, block: SentBlock) -> Request:
        self.counters.blocks += 1
        self.counters.resent += block.tickets[0].attempts > 0
        for ticket in block.tickets:
            ticket.attempts += 1
        self._numbers += 1
        block.request = self._numbers
        self._requests[block.request] = stream, block
        stream.sent += 1
        group.under_way += len(block.data)
        return Request(block.request, block.data, block.tickets[0].level)

    def _next_block(self, stream: PartStream, now: float) -> SentBlock | None:
        """The next block of a part that may leave now: one that has to be sent again, or a new one."""
        if stream.ended or now < stream.rest_until or stream.sent >= MAX_UNDER_WAY or self._is_blocked(stream):
            return None
        if stream.sent < len(stream.blocks):
            return stream.blocks[stream.sent]
        if not self._may_cut(stream, now):
            return None
        return self._cut(stream)

    def _may_cut(self, stream: PartStream, now: float) -> bool:
        queue = stream.queue
        if not queue or stream.ended:
            return False
        full = stream.queue_bytes >= BLOCK_BYTES or queue[0].message_id <= self._flush
        return full or not stream.sent or now >= queue[0].at + LINGER_S

    def _is_blocked(self, stream: PartStream) -> bool:
        """True while a part before this one is not settled."""
        return any(
            older.busy and older.part < stream.part and older.low < stream.high and stream.low < older.high
            for older in self._older.values()
        )

    def _barrier(self, stream: PartStream) -> float:
        """Number of the first message of another part that has none of the writer: later ones wait until it is confirmed."""
        if self.resumed is None or not self.last_progress:
            return inf
        untouched = (each for each in self._streams.values() if not each.touched and each.busy and each is not stream)
        return min((each.first_number() for each in untouched), default=inf)

    def _cut(self, stream: PartStream) -> SentBlock | None:
        """Make a block of the first messages of a queue."""
        queue, barrier, size, taken = stream.queue, self._barrier(stream), HEAD_BYTES, list[TopicTicket]()
        while queue:
            ticket = queue[0]
            if ticket.resolved and not ticket.attempts:  # its time was over before it was sent
                queue.popleft()
                continue
            if (
                ticket.message_id > barrier
                or size + ticket.size > MAX_BLOCK_BYTES
                or (taken and ticket.level is not taken[0].level)
            ):
                break
            queue.popleft()
            stream.queue_bytes -= ticket.size
            taken.append(ticket)
            size += ticket.size
        if not taken:
            return None
        progress = taken[-1].progress if queue else self.last_progress if self.resumed is not None else taken[-1].progress
        first = stream.blocks[-1].last + 1 if stream.blocks else stream.confirmed + 1
        data = join(
            encoded(taken), topic=self.topic.id, part=stream.part, writer=self.writer, first=first, progress=progress
        )  # fmt: skip
        block = SentBlock(first, taken, data)
        stream.blocks.append(block)
        return block

    def opened(self, number: int, window_bytes: int, now: float) -> list[Effect]:
        """Handle the first reply of a stream."""
        group = self._by_number.get(number)
        if group is None:
            return []
        group.open, group.window_bytes, group.progress_at = True, max(window_bytes, 1), now
        group.link.answered()
        return [Writable(number)]

    def draining(self, number: int, now: float) -> list[Effect]:
        """Handle a leader that is going: it gets nothing more, and is left when it has answered."""
        group = self._by_number.get(number)
        if group is None:
            return []
        group.draining = True
        return [RefreshTopic()] if group.under_way else self._leave(group, now)

    def stream_died(self, number: int, now: float, text: str, leader: str = "", retry_after_s: float = 0.0) -> list[Effect]:
        """Handle the end of a stream: everything under way is sent again. `leader`: the address that a refusal named."""
        group = self._by_number.get(number)
        if group is None:
            return []
        self._last_reason = text
        self.counters.streams_died += 1
        return self._leave(group, now, leader, retry_after_s, close=False)

    def _leave(
        self, group: GroupStream, now: float, leader: str = "", retry_after_s: float = 0.0, *, close: bool = True
    ) -> list[Effect]:
        number = group.number
        del self._by_number[number]
        group.number, group.open, group.draining, group.under_way = 0, False, False, 0
        for stream in group.busy.values():
            self._unsend(stream, 0)
        group.link.failed(now, leader, retry_after_s)
        effects: list[Effect] = [CloseStream(number)] if close else []
        if not leader:
            effects.append(RefreshTopic())
        return effects + self._wanted(group, now)

    def _wanted(self, group: GroupStream, now: float) -> list[Effect]:
        """Open a stream if there is something to send and none is open."""
        if group.number:
            return [Writable(group.number)] if group.open else []
        if not any(stream.busy and not stream.ended for stream in group.busy.values()):
            return []
        if now < group.link.rest_until:
            self._deadline = min(self._deadline, group.link.rest_until)
            return []
        address = group.link.address()
        if not address:
            group.link.failed(now)
            self._deadline = min(self._deadline, group.link.rest_until)
            return [RefreshTopic()]
        self._numbers += 1
        self.counters.streams_opened += 1
        group.number, group.progress_at = self._numbers, now
        self._by_number[group.number] = group
        self._deadline = min(self._deadline, now + STALL_S)
        return [OpenStream(address, group.number)]

    # --- replies

    def results(self, number: int, results: Iterable[Result], now: float) -> list[Effect]:
        """Handle answers to blocks."""
        group = self._by_number.get(number)
        if group is None:
            return []
        woken: list[TopicTicket] = []
        effects: list[Effect] = []
        for result in results:
            stream, block = self._requests.pop(result.request, (None, None))
            if stream is None or block is None:
                continue  # of a block that was sent again since
            group.under_way -= len(block.data)
            group.progress_at = now
            block.request = 0
            if block.done:
                continue  # it was sent again, together with one before it
            effects += self._answered(group, stream, block, result, now, woken)
            if group.number != number:
                break  # it does not lead, and everything is sent again
        if woken:
            effects.insert(0, Resolved(woken))
        if group.number == number and group.draining and not group.under_way:
            effects += self._leave(group, now)
        if self._older or self._barrier_moved:
            self._barrier_moved = False
            for each in self._groups.values():  # what waited for this may go on
                effects += self._wanted(each, now)
        elif group.number == number:
            effects.append(Writable(number))
        return effects

    def _answered(
        self, group: GroupStream, stream: PartStream, block: SentBlock, result: Result, now: float, woken: list[TopicTicket]
    ) -> list[Effect]:
        verdict = result.verdict
        if verdict is Verdict.STORED or (verdict is Verdict.REPEATED and stream.may_have(block)):
            self._stored_block(stream, block, result.base, woken)
            return []
        if verdict is Verdict.REPEATED:
            return self._renumber(stream, result.position)  # never sent before: another process of this writer used its position
        if verdict is Verdict.HOLE:
            self.counters.holes += 1
            if result.position < stream.safe:  # it led before, and knows less than what was confirmed
                self._last_reason = "a replica that no longer leads answered"
                return self._leave(group, now)
            return self._catch_up(stream, result.position, woken)
        gone = verdict is Verdict.NOT_HERE and stream.part not in self.topic.lineage.parts
        if verdict is Verdict.SEALED or gone:
            ended = [] if gone else self._catch_up(stream, max(result.position, stream.confirmed), woken)
            if self.failed is not None:
                return ended
            self._unsend(stream, 0)
            stream.dissolve()
            stream.ended = True
            self._older[stream.part] = stream
            self._ahead.note(result.children)
            return [RefreshTopic(newer=True), *self._learned(now)]
        return self._refused(group, stream, block, result, now, woken)

    def _refused(
        self, group: GroupStream, stream: PartStream, block: SentBlock, result: Result, now: float, woken: list[TopicTicket]
    ) -> list[Effect]:
        refusal = result.refusal
        code = refusal.code if refusal is not None else result.verdict.name
        self._last_reason = f"{code}: {refusal.text}" if refusal is not None else code
        if refusal is not None and code in FINAL:
            failure = Failure(code, refusal.text)
            unsure = any(ticket.attempts > 1 for ticket in block.tickets)
            for ticket in block.tickets:
                self._settle(ticket, in_doubt(failure, RESEND) if unsure else failure, woken)
            self._drop(stream, block)
            return []
        if code == StaleWriter.code and refusal is not None:
            return self.fail(Failure(code, refusal.text), stream.tickets_from(block))
        if code in (NotLeader.code, Draining.code) and refusal is not None:
            return self._leave(group, now, result.leader, refusal.retry_after_ms / 1000)
        self._unsend(stream, stream.blocks.index(block))
        wait_s = refusal.retry_after_ms / 1000 if refusal is not None else 0.0
        stream.rest_until = now + max(wait_s, REFRESH_S * (0.5 + 0.5 * self._uniform()))
        self._deadline = min(self._deadline, stream.rest_until)
        return [RefreshTopic(newer=True)] if result.verdict in (Verdict.NOT_HERE, Verdict.FULL) else []

    def _drop(self, stream: PartStream, block: SentBlock) -> None:
        """Leave out a block that is not stored: those after it move up."""
        at = stream.blocks.index(block)
        self._unsend(stream, at)
        after = [stream.blocks.pop() for _ in range(len(stream.blocks) - at)]
        tickets = [ticket for each in reversed(after) if each is not block for ticket in each.tickets]
        for ticket in tickets:
            ticket.attempts = 0  # under the positions that they get
        stream.requeue(tickets)

    def _stored_block(
        self, stream: PartStream, block: SentBlock, base: int, woken: list[TopicTicket], *, advance: bool = True
    ) -> None:
        block.done = True
        for at, ticket in enumerate(block.tickets):
            ticket.part, ticket.offset = stream.part, base + at if base >= 0 else -1
            self._settle(ticket, None, woken)
        if advance:
            self._advance(stream)

    def _advance(self, stream: PartStream) -> None:
        blocks = stream.blocks
        while blocks and blocks[0].done:
            block = blocks.popleft()
            stream.confirmed = block.last
            if block.tickets[0].level.at_least(Level.REPLICATED):
                stream.safe = block.last
            stream.sent = max(0, stream.sent - 1)
            if not stream.touched:
                stream.touched = self._barrier_moved = True
                self._touched.add(stream.part)

    def _catch_up(self, stream: PartStream, position: int, woken: list[TopicTicket]) -> list[Effect]:
        """A leader has a writer's messages up to a position, and what it got does not follow: go on after it."""
        self._unsend(stream, 0)
        for block in stream.blocks:
            if block.last > position or not (block.done or stream.may_have(block)):
                break
            self._stored_block(stream, block, -1, woken, advance=False)
        self._advance(stream)
        return self._renumber(stream, position) if stream.confirmed != position else []

    def _renumber(self, stream: PartStream, position: int) -> list[Effect]:
        """Give everything that is not confirmed other positions: what was confirmed at a lower level is lost. A named writer ends
        where the leader has more: another process stored that, perhaps the same rows."""
        self._unsend(stream, 0)
        if self.resumed is not None and position > stream.confirmed:
            return self.fail(Failure(InvalidArgument.code, ANOTHER))
        stream.dissolve()
        stream.confirmed, stream.doubtful = position, True
        return []

    def _unsend(self, stream: PartStream, first: int) -> None:
        """Blocks from this one on are not under way any more; late answers to them are passed over."""
        for block in list(stream.blocks)[first : stream.sent]:
            if self._requests.pop(block.request, None) is not None:
                group = self._groups[stream.group]
                group.under_way = max(0, group.under_way - len(block.data))
            block.request = 0
        stream.sent = min(stream.sent, first)

    # --- the topic

    def set_topic(self, topic: TopicMap, now: float) -> list[Effect]:
        """Take a newer description of the topic."""
        if topic.replaces(self.topic):
            return self.fail(Failure(UnknownTopic.code, topic.gone_text()))
        return self._learned(now) if self._ahead.describe(topic) else []

    def _learned(self, now: float) -> list[Effect]:
        """The topic has changed, as far as is known."""
        topic = self.topic
        for number, group in self._groups.items():
            group.link.set_addresses(topic.groups.get(number, ()))
        open_parts = {part.number for part in topic.lineage.open_parts()}
        for part, stream in list(self._streams.items()):
            if part not in open_parts:
                if stream.busy:
                    self._older[part] = stream
                else:
                    self._streams.pop(part)
        effects = self._follow(now)
        for group in self._groups.values():
            effects += self._wanted(group, now)
        return effects

    def _follow(self, now: float) -> list[Effect]:
        """Give what sealed parts did not take to the parts that follow them, once these are known."""
        lineage, effects = self.topic.lineage, list[Effect]()
        for stream in [each for each in self._older.values() if each.ended]:
            part = lineage.parts.get(stream.part)
            if part is not None and not part.sealed:
                self._refresh_at = min(self._refresh_at, now + REFRESH_S)
                self._deadline = min(self._deadline, self._refresh_at)
                continue
            self.counters.followed += 1
            tickets = [ticket for ticket in stream.queue if not ticket.resolved]
            stream.queue.clear()
            stream.queue_bytes = 0
            by_part: dict[int, list[TopicTicket]] = {}
            for ticket in tickets:
                ticket.attempts = 0  # none of it is stored
                assert ticket.encoded is not None
                by_part.setdefault(self._stream_of(ticket.encoded.slot).part, []).append(ticket)
            for number, moved in by_part.items():
                child = self._streams[number]
                child.queue.extend(merge([child.queue.popleft() for _ in range(len(child.queue))], moved, key=number_of))
                child.queue_bytes = sum(ticket.size for ticket in child.queue)
                effects += self._wanted(self._busy(child), now)
        self._tidy()
        return effects

    def _tidy(self) -> None:
        """Forget sealed parts that are settled: those that follow them may go on."""
        for part in [part for part, stream in self._older.items() if not stream.busy]:
            known = self.topic.lineage.parts.get(part)
            if known is None or known.sealed:
                del self._older[part]
                self._streams.pop(part, None)

    # --- time

    def next_deadline(self) -> float:
        """Time at which `tick` has something to do at the earliest, monotonic seconds."""
        return self._deadline

    def tick(self, now: float) -> list[Effect]:
        """Let lingering blocks leave, expire messages, leave silent streams, end back-offs."""
        if now < self._deadline:
            return []
        effects: list[Effect] = []
        woken: list[TopicTicket] = []
        deadline = inf
        if self._older:
            self._tidy()
        if now >= self._refresh_at:
            self._refresh_at = inf
            if any(stream.ended for stream in self._older.values()):
                self._refresh_at = now + REFRESH_S
                effects.append(RefreshTopic(newer=True))
        deadline = min(deadline, self._refresh_at)
        for group in list(self._groups.values()):
            for stream in group.busy.values():
                deadline = min(deadline, self._expire(stream, now, woken))
                if stream.queue and stream.sent and stream.queue[0].at + LINGER_S > now:
                    deadline = min(deadline, stream.queue[0].at + LINGER_S)
                if stream.rest_until > now:
                    deadline = min(deadline, stream.rest_until)
            waits = group.number and (not group.open or group.under_way)
            if waits and now >= group.progress_at + STALL_S:
                self.counters.streams_died += 1
                self._last_reason = f"no answer for {STALL_S:g} s"
                effects += self._leave(group, now)
            elif waits:
                deadline = min(deadline, group.progress_at + STALL_S)
        self._deadline = deadline
        for group in self._groups.values():
            effects += self._wanted(group, now)  # may set an earlier deadline
        return [Resolved(woken), *effects] if woken else effects

    def _expire(self, stream: PartStream, now: float, woken: list[TopicTicket]) -> float:
        """Give up messages whose time is over; one that was sent keeps its position. Returns the next deadline."""
        because = f" (last failure: {self._last_reason})" if self._last_reason else ""
        for ticket in stream.expired(now):
            if ticket.attempts:
                text = f"no leader confirmed the message in time{because}: it may be stored; {RESEND}"
                self._settle(ticket, Failure(OutcomeUnknown.code, text), woken)
            else:
                text = f"the message was not sent in time: no leader took it{because}; check `pixiu status`, then send again"
                self._settle(ticket, Failure(NotSent.code, text), woken)
        while stream.queue and stream.queue[0].resolved and not stream.queue[0].attempts:
            stream.queue_bytes -= stream.queue.popleft().size
        return next((ticket.deadline for ticket in stream.tickets() if not ticket.resolved), inf)

    # --- waiting

    def flush(self) -> int:
        """Let everything offered so far leave at once. Returns the number to ask `sent` with."""
        self._flush = self.counters.offered
        self._deadline = -inf
        return self._flush

    def sent(self, number: int) -> bool:
        """True if all messages up to a number have left for a leader at least once, or are resolved."""
        return not any(stream.unsent(number) for stream in self._streams.values())

    # --- ends

    def _settle(self, ticket: TopicTicket, failure: Failure | None, woken: list[TopicTicket]) -> None:
        if ticket.resolved:
            return
        counters = self.counters
        ticket.failure = failure
        ticket.resolved = True  # last: another thread may look
        self.unresolved -= 1
        self.unresolved_bytes -= ticket.size
        if failure is None:
            ticket.encoded = None
            counters.confirmed += 1
        else:
            counters.failed += 1
            counters.failures_by_code[failure.code] = counters.failures_by_code.get(failure.code, 0) + 1
        if ticket.watched or failure is not None:
            woken.append(ticket)

    def fail(self, failure: Failure, refused: Collection[TopicTicket] = ()) -> list[Effect]:
        """End the writer: fail everything unresolved, and refuse what is offered. refused: not stored, if it was sent once."""
        self.failed = failure
        return self._give_up(lambda ticket: in_doubt(failure, RESEND) if ticket.attempts > (ticket in refused) else failure)

    def abandon(self, text: str) -> list[Effect]:
        """Fail everything unresolved and end every stream, because the client closes."""
        unknown = Failure(OutcomeUnknown.code, f"{text}: its outcome is unknown")
        never = Failure(NotSent.code, f"{text}; it was not sent")
        return self._give_up(lambda ticket: unknown if ticket.attempts else never)

    def _give_up(self, why: Callable[[TopicTicket], Failure]) -> list[Effect]:
        woken: list[TopicTicket] = []
        for stream in self._streams.values():
            for ticket in stream.tickets():
                self._settle(ticket, why(ticket), woken)
            stream.queue.clear()
            stream.blocks.clear()
            stream.queue_bytes = stream.sent = 0
        effects: list[Effect] = [Resolved(woken)] if woken else []
        effects += [CloseStream(number) for number in self._by_number]
        self._streams.clear()
        self._older.clear()
        self._groups.clear()
        self._by_number.clear()
        self._requests.clear()
        self._deadline = inf
        return effects
