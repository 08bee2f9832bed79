"""The core of a topic replica: takes blocks, dispatches to channels, and answers when the log has committed. Pure.

    block, report, request ──▶ checked ──▶ entries of one turn ──▶ replicated log ──▶ committed, applied ──▶ answers, deliveries
                                                                         └──▶ refused: everything is as before

`cluster.replication.core.core` decides who leads and what is committed; `topic.state` says what entries mean. A leader delivers
only after an entry of its own is applied (BEGIN): before that it does not know all that a former leader has confirmed to members.

Source: docs/topics.md, "Driving the core", docs/replication.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.core.contract import NEVER, EndOfTurn, EventTable, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.core.refusals import not_leader
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from cluster.topics import entries as en
from cluster.topics.entries import Settlement
from pixiu.errors import InvalidArgument, MalformedData, NotServed, OutcomeUnknown, Overloaded, PixiuError, Refusal
from pixiu.wire import filters
from pixiu.wire.block import Block, Stamp
from pixiu.wire.levels import Level, Triple
from topic import events as ev
from topic.dispatch.channels import Channels
from topic.dispatch.dispatcher import Dispatcher
from topic.dispatch.flights import Pending
from topic.dispatch.paces import Paces
from topic.state.clock import LogClock
from topic.state.parts import Appended, Verdict
from topic.state.state import Done, State
from topic.stored import Stored
from topic.writes import Writes

MAX_WAITING_BYTES: Final = 64 << 20
"""Limit of blocks that wait for their commit. Policy: more are refused with OVERLOADED."""
BEGIN_AGAIN_S: Final = 0.1
"""Delay of the next BEGIN after one that was refused, since other replicas had not reported their time yet, say."""
ASK_AGAIN_S: Final = 1.0
"""Longest interval at which the leaders of parents are asked again."""
ASK_SOON_S: Final = 0.02
"""Delay of the first question after a part was opened; it doubles up to `ASK_AGAIN_S`."""
ENDING: Final = frozenset({en.SEAL, en.TOPIC, en.DROP})
"""Entries after which parts may take no blocks."""
LEASE_AGAIN_S: Final = 0.05
"""Delay of the next look at the lease while something is ready and this replica may not deliver."""


class Parts(Protocol):
    """Interface to what the core reads besides the state."""

    def may_deliver(self) -> bool:
        """True while this replica holds its lease: no other one leads."""

    def blocks(self, part: int, low: int, high: int) -> Iterable[tuple[Stamp, Block]]:
        """The blocks that hold the messages [low, high) of a part, or the first of them; none if the first cannot be read.

        Asked for ordered channels; for others only if the part has messages with a tag, a mark, a delay or an expiry, or the
        channel a filter. What only the object store has comes later: `Loaded`."""

    def store_of(self, topic: en.TopicSettings) -> str:
        """URL of a topic's object store; empty: it has none."""


@dataclass(slots=True)
class Counters:
    """Totals of a topic's core since the start."""

    blocks: int = 0
    messages: int = 0
    repeated: int = 0
    refused: int = 0
    malformed: int = 0
    delivered: int = 0
    delivered_again: int = 0
    settlements: int = 0
    filter_errors: int = 0
    """Messages for which a filter's expression had no value."""
    timed_out: int = 0
    outcomes_unknown: int = 0


@dataclass(slots=True)
class _Write:
    """A block under way."""

    stream: int
    request: int
    block: Block
    size: int
    level: Level = Level.REPLICATED
    answered: bool = False


@dataclass(slots=True)
class _Report:
    """A settlement under way. `request` -1: no member asked for it."""

    member: int
    request: int
    pending: Pending

    @property
    def settlement(self) -> Settlement:
        return self.pending.settlement


@dataclass(slots=True)
class _Request:
    """A request of admin under way. `request` -1: it is this leader's BEGIN."""

    request: int
    kind: int = en.BEGIN
    payload: bytes = b""


_Work = _Write | _Report | _Request


class Core:
    """Decides; see the module. `step` never raises on input from the network.

    Args:
        state: of the group; the shell applies committed entries to it before it gives their answers to the core.
        parts: what else the core reads.
        layout_version: V of the answers to writers.
    """

    def __init__(self, state: State, parts: Parts, layout_version: int = 0) -> None:
        self._state, self._parts = state, parts
        self.layout_version = layout_version
        self.epoch = 0
        """Epoch in which this replica leads; 0: it does not."""
        self.delivers = False
        """True once an entry of this leader is applied."""
        self.counters = Counters()
        self._committed = 0
        self._leader = ""
        self._begin_at = NEVER
        self._ask_at = NEVER
        self._ask_wait = ASK_AGAIN_S
        self._writes = Writes(state)
        self._waiting_bytes = 0
        self.paces = Paces(state)
        """Rates at which the parts are read."""
        self._channels = Channels(state, self.dispatcher)
        self._clock = LogClock(state)
        self._lease_at = NEVER
        self._grown: dict[int, None] = {}
        """Parts that have more messages."""
        self._turn: list[tuple[_Work, tuple[int, bytes]]] = []
        self._token = 0
        self._proposed: dict[int, list[_Work]] = {}
        """By token: not in the log yet."""
        self._logged: deque[tuple[int, _Work]] = deque()
        """(counter, what waits for it), rising: not committed yet."""
        self._to_persist: deque[tuple[int, _Write]] = deque()
        """(counter, write) of level persisted, rising: not on this disk yet."""
        self.stored = Stored(state)
        self._events: EventTable[ev.Effect] = EventTable()
        self._events.on(ev.WriteRequested, self._on_write)
        self._events.on(ev.Requested, self._on_requested)
        self._events.on(ev.Joined, self._on_joined)
        self._events.on(ev.Credited, self._on_credited)
        self._events.on(ev.Reported, self._on_reported)
        self._events.on(ev.Touched, self._on_touched)
        self._events.on(ev.Left, self._on_left)
        self._events.on(ev.ParentFinished, self._on_parent_finished)
        self._events.on(ev.StoreLeft, self._on_store_left)
        self._events.on(ev.Loaded, self._on_loaded)
        self._events.on(LeaderChanged, self._on_leader)
        self._events.on(Accepted, self._on_accepted)
        self._events.on(Persisted, self._on_persisted)
        self._events.on(Refused, self._on_refused)
        self._events.on(Committed, self._on_committed)
        self._events.on(EndOfTurn, self._on_end_of_turn)
        self._events.on(Tick, self._on_tick)

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Handle one event; `now` is monotonic seconds. Returns effects, in order."""
        self._clock.now = now
        return self._events.step(event, now)

    def next_deadline(self) -> float:
        """Time at which a BEGIN, a question or a message is due, monotonic seconds."""
        if not self.epoch:
            return NEVER
        return min(
            self._begin_at, self._ask_at, self._lease_at, self._channels.next_deadline(), self._writes.parked.next_deadline()
        )

    def clock(self, now: float) -> int:
        """The log's clock at a time, Unix µs, as far as its entries tell."""
        return self._clock.at(now)

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        """The dispatcher of a channel."""
        return Dispatcher(settings, self._state, self._parts.blocks, self.clock, self.paces)

    def finished(self, channel: int, part: int) -> bool:
        """The answer to another leader's `AskParent`: True if a channel has finished a part and all before it. Stays true, unless
        the channel is moved by a SEEK."""
        return self._channels.finished(channel, part, self._clock.now)

    def describe(self, channel: int) -> list[ev.ChannelView]:
        """A channel in each part that is here, by number. Of members only a leader knows."""
        return self._channels.describe(channel)

    # --- writers

    def _on_write(self, event: ev.WriteRequested, now: float, out: list[ev.Effect], *, parks: bool = True) -> None:
        try:
            block, refused, certain = self._writes.check(event.block)
            if not self.epoch:
                raise not_leader(self._leader)
            first = self._writes.check_epoch(block, event.epoch)
            if self._waiting_bytes + len(event.block) > MAX_WAITING_BYTES:
                raise Overloaded(f"{MAX_WAITING_BYTES >> 20} MiB wait for their commit in this group; try again later", 200)
            if event.level is Level.STORED or self.stored.hold:
                self._check_store(block, event.level)
            if refused is None:
                self._writes.charge(block, len(event.block), now)
        except PixiuError as problem:
            self.counters.refused += 1
            self.counters.malformed += isinstance(problem, MalformedData)
            out.append(self._refusal(event.stream, event.request, Refusal.of(problem)))
            return
        if parks and refused is not None and refused.verdict is Verdict.NOT_HERE and self._park(block, event, now):
            return
        # Before everything of former leaders is applied, what becomes of a block is not known in advance.
        level = event.level if (certain and self.delivers) or event.level is Level.STORED else Level.REPLICATED
        write = _Write(event.stream, event.request, block, len(event.block), level)
        if refused is not None:
            self._answer_write(write, refused, out)
            return
        if first:
            self._begin_epoch(block, event.epoch)
        self._writes.proposed(block)
        self._waiting_bytes += write.size
        self._turn.append((write, (en.BLOCK, en.encode_block(event.sender, event.block))))

    def _begin_epoch(self, block: Block, epoch: int) -> None:
        """A group that did not know the writer's epoch learns it before its first block."""
        payload = en.encode_fence(block.topic, block.writer, epoch)
        self._writes.fence(block.topic, block.writer, epoch)
        self._turn.append((_Request(-1, en.FENCE, payload), (en.FENCE, payload)))

    def _park(self, block: Block, event: ev.WriteRequested, now: float) -> bool:
        """Let a block wait: its part may be a child whose parent has just been sealed."""
        return block.topic in self._state.topics and self._writes.parked.park(en.part_id(block.topic, block.part), event, now)

    def _check_store(self, block: Block, level: Level) -> None:
        topic = self._state.topics.get(block.topic)
        if topic is not None:
            self.stored.check(level, topic, self._parts.store_of(topic))

    def _refusal(self, stream: int, request: int, refusal: Refusal) -> ev.WriteReply:
        return ev.WriteReply(stream, request, self._triple(), refusal=refusal)

    def _answer_early(self, write: _Write, out: list[ev.Effect]) -> None:
        write.answered = True
        out.append(ev.WriteReply(write.stream, write.request, self._triple(), write.block.last, -1, Verdict.STORED))

    def _answer_write(self, write: _Write, found: Appended, out: list[ev.Effect]) -> None:
        counters, children = self.counters, list[en.Child]()
        if found.verdict is Verdict.STORED:
            counters.blocks += 1
            counters.messages += write.block.count
        elif found.verdict is Verdict.REPEATED:
            counters.repeated += 1
        else:
            counters.refused += 1
            part = self._state.parts.get(en.part_id(write.block.topic, write.block.part))
            children = list(part.children) if part else []
        if write.answered:
            return
        if found.verdict is Verdict.DELETED:
            deleted = Refusal.of(NotServed(f"the topic {write.block.topic} is deleted; restore it, or write to another one"))
            out.append(self._refusal(write.stream, write.request, deleted))
            return
        out.append(ev.WriteReply(write.stream, write.request, self._triple(), found.position, found.base, found.verdict, children))

    def _triple(self) -> Triple:
        return Triple(self.layout_version, self.epoch, self._committed)

    # --- admin

    def _on_requested(self, event: ev.Requested, now: float, out: list[ev.Effect]) -> None:
        try:
            if not self.epoch:
                raise not_leader(self._leader)
            en.check(event.kind, event.payload)
            if event.kind == en.SEEK:
                self._check_seek(event, now)
            elif event.kind == en.FENCE:
                self._writes.fence(*en.decode_fence(event.payload))
            elif event.kind == en.CHANNEL and (text := en.ChannelSettings.decode(event.payload).filter):
                filters.parse(text)
        except PixiuError as problem:
            out.append(ev.Reply(event.request, refusal=Refusal.of(problem)))
            return
        if event.kind in ENDING:
            self._writes.ending(1)
        self._turn.append((_Request(event.request, event.kind, event.payload), (event.kind, event.payload)))

    def _check_seek(self, event: ev.Requested, now: float) -> None:
        """Make what members have count no longer: their reports come after the seek. Raises InvalidArgument, Overloaded."""
        if not self.delivers:
            raise Overloaded("the new leader has not applied everything of former ones yet; try again in a moment", 200)
        number, part, _ = en.decode_seek(event.payload)
        channel = self._channels.made(number, now)
        if channel is None:
            return
        if len(channel.members) and not event.force:
            raise InvalidArgument(
                f"the channel {channel.settings.name} has {len(channel.members)} members here; end them, or force the seek"
            )
        channel.suspend(part)

    # --- members

    def _on_joined(self, event: ev.Joined, now: float, out: list[ev.Effect]) -> None:
        if self.epoch:
            self._channels.join(event, now, out)
            self._ask_soon(now)
        else:
            out.append(ev.MemberEnded(event.member, Refusal.of(not_leader(self._leader))))

    def _on_credited(self, event: ev.Credited, now: float, out: list[ev.Effect]) -> None:
        self._channels.credit(event.member, event.credit)

    def _on_reported(self, event: ev.Reported, now: float, out: list[ev.Effect]) -> None:
        channel = self._channels.of_member(event.member)
        if channel is None:
            problem = NotServed("this leader does not know the member; join the channel")
            refusal = Refusal.of(problem if self.epoch else not_leader(self._leader))
            out.append(ev.ReportReply(event.member, event.request, event.part, refusal=refusal))
            return
        pending = channel.report(event.member, event.part, event.acknowledged, event.refused, event.rejected)
        if pending is None:
            out.append(ev.ReportReply(event.member, event.request, event.part))
        else:
            self._settle(_Report(event.member, event.request, pending))
            self._channels.wake(channel.settings.channel)

    def _on_touched(self, event: ev.Touched, now: float, out: list[ev.Effect]) -> None:
        channel = self._channels.of_member(event.member)
        if channel is not None:
            channel.touch(event.member, event.part, event.offsets, now)

    def _on_left(self, event: ev.Left, now: float, out: list[ev.Effect]) -> None:
        self._settle_all(self._channels.leave(event.member))

    def _settle_all(self, found: Iterable[Pending]) -> None:
        for pending in found:
            self._settle(_Report(-1, -1, pending))

    def _settle(self, report: _Report) -> None:
        self.counters.settlements += 1
        self._turn.append((report, (en.SETTLE, report.settlement.encode())))

    def _on_parent_finished(self, event: ev.ParentFinished, now: float, out: list[ev.Effect]) -> None:
        self._channels.parent_finished(event.channel, event.part)

    # --- the log

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        self._pump(now, out)
        if self._turn:
            self._token += 1
            works = self._proposed[self._token] = [work for work, _ in self._turn]
            replicated = any(not isinstance(work, _Write) or work.level.at_least(Level.REPLICATED) for work in works)
            out.append(Propose(self._token, [payload for _, payload in self._turn], replicated))
            self._turn = []

    def _on_accepted(self, event: Accepted, now: float, out: list[ev.Effect]) -> None:
        works = self._proposed.pop(event.token, ())
        self._logged += enumerate(works, event.first)
        for counter, work in enumerate(works, event.first):
            if isinstance(work, _Write) and not work.level.at_least(Level.REPLICATED):
                if work.level is Level.ACCEPTED:
                    self._answer_early(work, out)
                else:
                    self._to_persist.append((counter, work))

    def _on_persisted(self, event: Persisted, now: float, out: list[ev.Effect]) -> None:
        while self._to_persist and self._to_persist[0][0] <= event.counter:
            _, write = self._to_persist.popleft()
            if not write.answered:
                self._answer_early(write, out)

    def _on_refused(self, event: Refused, now: float, out: list[ev.Effect]) -> None:
        self._give_up(self._proposed.pop(event.token, ()), event.refusal, now, out)

    def _give_up(self, works: Iterable[_Work], refusal: Refusal, now: float, out: list[ev.Effect]) -> None:
        """Answer what will not be confirmed, or may be kept all the same (OUTCOME_UNKNOWN)."""
        for work in works:
            match work:
                case _Write():
                    self._waiting_bytes -= work.size
                    self._writes.refused(work.block)
                    if not work.answered:
                        work.answered = True
                        out.append(self._refusal(work.stream, work.request, refusal))
                case _Report():
                    channel = self._channels.get(work.settlement.channel)
                    if channel is not None:
                        channel.refused(work.pending, now)
                        self._channels.wake(work.settlement.channel)
                    if work.request >= 0:
                        out.append(_not_reported(work, refusal))
                case _Request():
                    self._request_refused(work, refusal, now, out)

    def _on_committed(self, event: Committed, now: float, out: list[ev.Effect]) -> None:
        """Entries are applied; those of other leaders wait for nobody here."""
        self._committed = event.first + len(event.values) - 1
        logged = self._logged
        while logged and logged[0][0] <= self._committed:
            counter, work = logged.popleft()
            answer = event.values[counter - event.first]
            self._applied(work, answer, counter, event.copies, now, out)
        self._clock.committed(now)
        if self.delivers:
            self._channels.look(now, out)
        for part in self._grown:
            self._channels.grew(part)
        self._grown.clear()

    def _applied(self, work: _Work, answer: object, counter: int, copies: int, now: float, out: list[ev.Effect]) -> None:
        few = None if copies else Refusal.of(OutcomeUnknown("it is on fewer disks than min_in_sync asks for; send it again"))
        match work:
            case _Write():
                assert isinstance(answer, Appended)
                self._waiting_bytes -= work.size
                self._writes.applied(work.block, answer)
                if answer.verdict is Verdict.STORED:
                    self._grown[en.part_id(work.block.topic, work.block.part)] = None
                if few is not None and not work.answered:
                    self.counters.outcomes_unknown += 1
                    out.append(self._refusal(work.stream, work.request, few))
                else:
                    self._answer_applied(work, answer, out)
                work.answered = True
            case _Report():
                number, part = work.settlement.channel, self._state.parts.get(work.settlement.part)
                channel = self._channels.get(number)
                if channel is not None:
                    channel.committed(work.pending, now)
                    self._channels.wake(number)
                if work.request >= 0:
                    out.append(_reported(work) if few is None else _not_reported(work, few))
                if channel is not None and part is not None and part.sealed:
                    self._channels.check_finished(number, part.part, out)
            case _Request():
                if work.request >= 0:
                    out.append(ev.Reply(work.request, answer if few is None else None, few))
                self._request_applied(work, answer, counter, now, out)

    def _answer_applied(self, write: _Write, found: Appended, out: list[ev.Effect]) -> None:
        if write.level is not Level.STORED:
            self._answer_write(write, found, out)
            return
        replies, number = list[ev.Effect](), en.part_id(write.block.topic, write.block.part)
        self._answer_write(write, found, replies)
        for reply in replies:
            if not isinstance(reply, ev.WriteReply) or not self.stored.keep(number, write.block.count, reply):
                out.append(reply)

    def _request_applied(self, work: _Request, answer: object, counter: int, now: float, out: list[ev.Effect]) -> None:
        payload, channels = work.payload, self._channels
        match work.kind:
            case en.BEGIN:
                self.delivers = True
            case en.SEEK:
                self._seek_ended(payload, now)
            case en.RESEND:
                number, part, _ = en.decode_resend(payload)
                channel = channels.get(number)
                if channel is not None and isinstance(answer, Done):
                    channel.resent(part, answer.offsets, counter, now)
                    channels.wake(number)
            case en.FENCE:
                self._writes.fenced(*en.decode_fence(payload)[:2])
            case en.SEAL:
                channels.sealed(en.decode_seal(payload)[0], out)
            case en.OPEN:
                self._ask_soon(now)
                for event in self._writes.parked.take(en.Opening.decode(payload).part):
                    self._on_write(event, now, out)
            case en.TRIM | en.LOST | en.COMPACT:
                part = en.part_of(payload)
                channels.grew(part)
                channels.sealed(part, out)
                out += self.stored.reached(part)
            case en.TOPIC:
                self._leave_store(en.TopicSettings.decode(payload).topic, out)
            case en.UPLOADED:
                out += self.stored.reached(en.decode_objects(payload)[0])
            case en.DROP:
                out += self.stored.reached(en.decode_drop(payload))
        if work.kind in ENDING:
            self._writes.ending(-1)

    def _leave_store(self, number: int, out: list[ev.Effect]) -> None:
        """A topic has other settings: nobody waits for a store that it has no longer."""
        topic = self._state.topics.get(number)
        if topic is not None and not self._parts.store_of(topic):
            gone = Refusal.of(OutcomeUnknown(f"the topic {topic.name} has no object store any more; send it again"))
            out += [self._refusal(reply.stream, reply.request, gone) for reply in self.stored.leave(number)]

    def _request_refused(self, work: _Request, refusal: Refusal, now: float, out: list[ev.Effect]) -> None:
        if work.request >= 0:
            out.append(ev.Reply(work.request, refusal=refusal))
        if work.kind == en.BEGIN:
            self._begin_at = now + BEGIN_AGAIN_S
        elif work.kind == en.SEEK:
            self._seek_ended(work.payload, now)
        elif work.kind == en.FENCE:
            self._writes.fenced(*en.decode_fence(work.payload)[:2])
        elif work.kind in ENDING:
            self._writes.ending(-1)

    def _seek_ended(self, payload: bytes, now: float) -> None:
        number, part, _ = en.decode_seek(payload)
        channel = self._channels.get(number)
        if channel is not None:
            channel.resume(part, now)
            self._channels.wake(number)

    def _on_leader(self, event: LeaderChanged, now: float, out: list[ev.Effect]) -> None:
        self.epoch, self._leader, self.delivers = event.epoch, event.address, False
        unknown = Refusal.of(OutcomeUnknown("the leader has changed; send it again"))
        under_way = [work for works in self._proposed.values() for work in works] + [work for _, work in self._logged]
        under_way += [work for work, _ in self._turn]
        self._proposed, self._turn = {}, []
        self._logged.clear()
        self._to_persist.clear()
        self._on_store_left(ev.StoreLeft(unknown), now, out)
        self.counters.outcomes_unknown += len(under_way)
        self._give_up(under_way, unknown, now, out)
        self._channels.stop(not_leader(self._leader), out)
        self._writes.clear()
        self.paces.clear()
        moved = Refusal.of(not_leader(self._leader))
        out += [self._refusal(parked.stream, parked.request, moved) for parked in self._writes.parked.clear()]
        self._grown.clear()
        self._lease_at = NEVER
        self._begin_at, self._ask_at = (now, now) if self.epoch else (NEVER, NEVER)

    def _on_store_left(self, event: ev.StoreLeft, now: float, out: list[ev.Effect]) -> None:
        out += [self._refusal(reply.stream, reply.request, event.refusal) for reply in self.stored.leave(part=event.part)]

    def _on_loaded(self, event: ev.Loaded, now: float, out: list[ev.Effect]) -> None:
        if self.epoch:
            self._channels.grew(event.part)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if now >= self._begin_at and self.epoch:
            self._begin_at = NEVER
            self._turn.append((_Request(-1), (en.BEGIN, b"")))
        for parked in self._writes.parked.overdue(now):
            self._on_write(parked, now, out, parks=False)
        overdue = self._channels.tick(now)
        self.counters.timed_out += sum(bool(pending.taken) for pending in overdue)
        self._settle_all(overdue)
        if now >= self._ask_at and self.epoch:
            questions = self._channels.questions()
            self._ask_wait = min(2 * self._ask_wait, ASK_AGAIN_S) if questions else ASK_AGAIN_S
            self._ask_at = now + self._ask_wait
            out += questions
        self._on_end_of_turn(EndOfTurn(), now, out)

    def _ask_soon(self, now: float) -> None:
        """A part may wait for parents that were not asked for yet."""
        self._ask_wait = ASK_SOON_S
        self._ask_at = min(self._ask_at, now + ASK_SOON_S)

    def _pump(self, now: float, out: list[ev.Effect]) -> None:
        self._lease_at = NEVER
        if not self.delivers or not self._channels.is_awake:
            return
        if not self._parts.may_deliver():
            self._lease_at = now + LEASE_AGAIN_S
            return
        found = list[ev.Deliver]()
        self._settle_all(self._channels.pump(now, found))
        self.counters.filter_errors += self._channels.take_filter_errors()
        if self._channels.is_awake:
            self._lease_at = now  # there is more to look at
        for each in found:
            for low, high, attempts in each.runs:
                self.counters.delivered += high - low
                self.counters.delivered_again += high - low if attempts > 1 else 0
        out += found


def _reported(work: _Report) -> ev.ReportReply:
    found = work.settlement
    refused = [each.offset for each in found.deferred] + [each.offset for each in found.dead]
    return ev.ReportReply(work.member, work.request, found.part, found.acknowledged, refused)


def _not_reported(work: _Report, refusal: Refusal) -> ev.ReportReply:
    return ev.ReportReply(work.member, work.request, work.settlement.part, refusal=refusal)
