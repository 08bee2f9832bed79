"""The core of a topic replica: takes blocks, dispatches to channels, and answers when the log has committed. Pure.

    block, report, request ──▶ checked ──▶ entries of one turn ──▶ replicated log ──▶ committed, applied ──▶ answers, deliveries
                                                                         └──▶ refused: everything is as before

`cluster.replication.core.core` decides who leads and what is committed; `topic.state` says what entries mean. A leader delivers
only after an entry of its own is applied (BEGIN): before that it does not know all that a former leader has confirmed to members.

Source: docs/topics.md, "Driving the core", docs/replication.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from cluster.core.contract import NEVER, EndOfTurn, EventTable, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.core.refusals import not_leader
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import InvalidArgument, MalformedData, NotServed, OutcomeUnknown, Overloaded, PixiuError, Refusal
from pixiu.wire.block import Block
from pixiu.wire.levels import Level, Triple
from topic import entries as en
from topic import events as ev
from topic.dispatch.members import Dispatcher, Member
from topic.entries import Settlement
from topic.state.parts import Appended, Verdict
from topic.state.state import State
from topic.writes import Writes

MAX_WAITING_BYTES: Final = 64 << 20
"""Limit of blocks that wait for their commit. Policy: more are refused with OVERLOADED."""
MAX_MEMBERS: Final = 10_000
"""Members of all channels on a leader. Policy: one more is refused with OVERLOADED."""
MAX_CREDIT: Final = 10_000
"""Messages that a member may have. Policy: more is cut to this."""
BEGIN_AGAIN_S: Final = 0.1
"""Delay of the next BEGIN after one that was refused, since other replicas had not reported their time yet, say."""
ASK_AGAIN_S: Final = 1.0
"""Interval at which the leaders of parents are asked again."""


class Parts(Protocol):
    """Interface to what the core reads besides the state."""

    def may_deliver(self) -> bool:
        """True while this replica holds its lease: no other one leads."""

    def slots(self, part: int, low: int, high: int) -> Sequence[int]:
        """The slots of the messages [low, high) of a part, or of the first of them."""


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
    settlement: Settlement


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
        self._writes = Writes(state)
        self._waiting_bytes = 0
        self._channels: dict[int, Dispatcher] = {}
        self._shape = -1
        """`State.shape` that they follow."""
        self._members: dict[int, ev.Joined] = {}
        """Those that have joined; before this leader delivers they wait."""
        self._channel_of_member: dict[int, int] = {}
        self._turn: list[tuple[_Work, tuple[int, bytes]]] = []
        self._token = 0
        self._proposed: dict[int, list[_Work]] = {}
        """By token: not in the log yet."""
        self._logged: deque[tuple[int, _Work]] = deque()
        """(counter, what waits for it), rising: not committed yet."""
        self._to_persist: deque[tuple[int, _Write]] = deque()
        """(counter, write) of level persisted, rising: not on this disk yet."""
        self._events: EventTable[ev.Effect] = EventTable()
        self._events.on(ev.WriteRequested, self._on_write)
        self._events.on(ev.Requested, self._on_requested)
        self._events.on(ev.Joined, self._on_joined)
        self._events.on(ev.Credited, self._on_credited)
        self._events.on(ev.Reported, self._on_reported)
        self._events.on(ev.Touched, self._on_touched)
        self._events.on(ev.Left, self._on_left)
        self._events.on(ev.ParentFinished, self._on_parent_finished)
        self._events.on(LeaderChanged, self._on_leader)
        self._events.on(Accepted, self._on_accepted)
        self._events.on(Persisted, self._on_persisted)
        self._events.on(Refused, self._on_refused)
        self._events.on(Committed, self._on_committed)
        self._events.on(EndOfTurn, self._on_end_of_turn)
        self._events.on(Tick, self._on_tick)

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Handle one event; `now` is monotonic seconds. Returns effects, in order."""
        return self._events.step(event, now)

    def next_deadline(self) -> float:
        """Time at which a BEGIN, a question or a message is due, monotonic seconds."""
        if not self.epoch:
            return NEVER
        deadlines = [each.next_deadline() for each in self._channels.values()] if self.delivers else []
        return min((self._begin_at, self._ask_at, *deadlines))

    def dispatcher(self, settings: en.ChannelSettings) -> Dispatcher:
        """The dispatcher of a channel."""
        return Dispatcher(settings, self._state, self._parts.slots)

    def finished(self, channel: int, part: int) -> bool:
        """The answer to another leader's `AskParent`: True if a channel has finished a part and all before it. Stays true."""
        found = self._channels.get(channel)
        if not self.delivers or found is None:
            return False
        found.missing_parents()  # it may have finished some since it last looked
        return found.finished(part)

    def describe(self, channel: int) -> list[ev.ChannelView]:
        """A channel in each part that is here, by number. Of members only a leader knows."""
        settings = self._state.channels.get(channel)
        if settings is None:
            return []
        dispatcher = self._channels.get(channel) or self.dispatcher(settings)
        return [dispatcher.describe(part) for part in self._state.parts_of(settings.topic)]

    # --- writers

    def _on_write(self, event: ev.WriteRequested, now: float, out: list[ev.Effect]) -> None:
        try:
            block, refused, certain = self._writes.check(event.block)
            if not self.epoch:
                raise not_leader(self._leader)
            if self._waiting_bytes + len(event.block) > MAX_WAITING_BYTES:
                raise Overloaded(f"{MAX_WAITING_BYTES >> 20} MiB wait for their commit in this group; try again later", 200)
        except PixiuError as problem:
            self.counters.refused += 1
            self.counters.malformed += isinstance(problem, MalformedData)
            out.append(self._refusal(event.stream, event.request, Refusal.of(problem)))
            return
        # Before everything of former leaders is applied, what becomes of a block is not known in advance.
        level = event.level if certain and self.delivers else Level.REPLICATED
        write = _Write(event.stream, event.request, block, len(event.block), level)
        if refused is not None:
            self._answer_write(write, refused, out)
            return
        self._writes.proposed(block)
        self._waiting_bytes += write.size
        self._turn.append((write, (en.BLOCK, en.encode_block(event.sender, event.block))))

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
                self._check_seek(event)
        except PixiuError as problem:
            out.append(ev.Reply(event.request, refusal=Refusal.of(problem)))
            return
        if event.kind in (en.SEAL, en.TOPIC, en.DROP):
            self._writes.uncertain()
        self._turn.append((_Request(event.request, event.kind, event.payload), (event.kind, event.payload)))

    def _check_seek(self, event: ev.Requested) -> None:
        """What members have counts no longer from now on: their reports come after the seek. Raises InvalidArgument."""
        number, part, _ = en.decode_seek(event.payload)
        channel = self._channels.get(number)
        if channel is None:
            return
        if channel.members and not event.force:
            raise InvalidArgument(
                f"the channel {channel.settings.name} has {len(channel.members)} members here; end them, or force the seek"
            )
        channel.suspend(part)

    # --- members

    def _on_joined(self, event: ev.Joined, now: float, out: list[ev.Effect]) -> None:
        try:
            if not self.epoch:
                raise not_leader(self._leader)
            if len(self._members) >= MAX_MEMBERS:
                raise Overloaded(f"{MAX_MEMBERS} members are at this leader; end some, or try again later", 1000)
            self._members[event.member] = event
            if self.delivers:
                self._look(now, out)
                self._take_member(event, out)
        except PixiuError as problem:
            self._end_member(event.member, Refusal.of(problem), out)

    def _end_member(self, member: int, refusal: Refusal, out: list[ev.Effect]) -> None:
        self._members.pop(member, None)
        self._channel_of_member.pop(member, None)
        out.append(ev.MemberEnded(member, refusal))

    def _take_member(self, event: ev.Joined, out: list[ev.Effect]) -> None:
        """Raises NotServed, InvalidArgument."""
        topic = self._state.topic_named(event.topic)
        if topic is None:
            raise NotServed(f"this group holds nothing of a topic {event.topic}; ask a proxy where it is")
        if topic.deleted:
            raise NotServed(f"the topic {event.topic} is deleted; restore it, or use another one")
        found = self._state.channel_named(topic.topic, event.channel)
        if found is None:
            raise NotServed(f"the topic {event.topic} has no channel {event.channel}; make it first")
        if event.filter and event.filter != found.filter:
            raise InvalidArgument(
                f"the channel {event.channel} has the filter {found.filter or 'none'}, the member asks for {event.filter}"
            )
        channel = self._channels[found.channel]
        channel.members[event.member] = Member(min(event.credit, MAX_CREDIT), name=event.name, tag=event.tag)
        self._channel_of_member[event.member] = found.channel
        finished = channel.finished_parts()
        if finished:
            out.append(ev.PartsFinished(event.member, finished))

    def _on_credited(self, event: ev.Credited, now: float, out: list[ev.Effect]) -> None:
        joined, channel = self._members.get(event.member), self._channel_of(event.member)
        if joined is not None:
            self._members[event.member] = replace(joined, credit=event.credit)
        if channel is not None:
            channel.members[event.member].credit = min(event.credit, MAX_CREDIT)

    def _on_reported(self, event: ev.Reported, now: float, out: list[ev.Effect]) -> None:
        channel = self._channel_of(event.member)
        if channel is None:
            problem = (
                NotServed("this leader does not know the member; join the channel") if self.epoch else not_leader(self._leader)
            )
            out.append(ev.ReportReply(event.member, event.request, event.part, refusal=Refusal.of(problem)))
            return
        settlement = channel.report(event.member, event.part, event.acknowledged, event.refused)
        if settlement is None:
            out.append(ev.ReportReply(event.member, event.request, event.part))
        else:
            self._settle(_Report(event.member, event.request, settlement))

    def _on_touched(self, event: ev.Touched, now: float, out: list[ev.Effect]) -> None:
        channel = self._channel_of(event.member)
        if channel is not None:
            channel.touch(event.member, event.part, event.offsets, now)

    def _on_left(self, event: ev.Left, now: float, out: list[ev.Effect]) -> None:
        channel = self._channel_of(event.member)
        self._members.pop(event.member, None)
        self._channel_of_member.pop(event.member, None)
        for settlement in channel.leave(event.member) if channel else ():
            self._settle(_Report(event.member, -1, settlement))

    def _channel_of(self, member: int) -> Dispatcher | None:
        return self._channels.get(self._channel_of_member.get(member, -1))

    def _settle(self, report: _Report) -> None:
        self.counters.settlements += 1
        self._turn.append((report, (en.SETTLE, report.settlement.encode())))

    def _on_parent_finished(self, event: ev.ParentFinished, now: float, out: list[ev.Effect]) -> None:
        if event.channel in self._channels:
            self._channels[event.channel].parent_finished(event.part)

    # --- the log

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        self._pump(now, out)
        if self._turn:
            self._token += 1
            works = self._proposed[self._token] = [work for work, _ in self._turn]
            replicated = any(not isinstance(work, _Write) or work.level is Level.REPLICATED for work in works)
            out.append(Propose(self._token, [payload for _, payload in self._turn], replicated))
            self._turn = []

    def _on_accepted(self, event: Accepted, now: float, out: list[ev.Effect]) -> None:
        works = self._proposed.pop(event.token, ())
        self._logged += enumerate(works, event.first)
        for counter, work in enumerate(works, event.first):
            if isinstance(work, _Write) and work.level is not Level.REPLICATED:
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
                        channel.refused(work.settlement)
                    if work.request >= 0:
                        out.append(_not_reported(work, refusal))
                case _Request():
                    self._request_ended(work, False, None, refusal, now, out)

    def _on_committed(self, event: Committed, now: float, out: list[ev.Effect]) -> None:
        """Entries are applied; those of other leaders wait for nobody here."""
        self._committed = event.first + len(event.values) - 1
        logged = self._logged
        while logged and logged[0][0] <= self._committed:
            counter, work = logged.popleft()
            answer = event.values[counter - event.first]
            self._applied(work, answer, event.copies, now, out)
        self._look(now, out)

    def _applied(self, work: _Work, answer: object, copies: int, now: float, out: list[ev.Effect]) -> None:
        few = None if copies else Refusal.of(OutcomeUnknown("it is on fewer disks than min_in_sync asks for; send it again"))
        match work:
            case _Write():
                assert isinstance(answer, Appended)
                self._waiting_bytes -= work.size
                self._writes.applied(work.block, answer)
                if few is None or work.answered:
                    self._answer_write(work, answer, out)
                else:
                    self.counters.outcomes_unknown += 1
                    out.append(self._refusal(work.stream, work.request, few))
                work.answered = True
            case _Report():
                channel = self._channels.get(work.settlement.channel)
                if channel is not None:
                    channel.committed(work.settlement, now)
                if work.request >= 0:
                    out.append(_reported(work) if few is None else _not_reported(work, few))
                part, number = self._state.parts.get(work.settlement.part), work.settlement.channel
                if channel is not None and part is not None and part.sealed:
                    self._tell_finished(number, part.part, out)
            case _Request():
                self._request_ended(work, True, answer if few is None else None, few, now, out)

    def _tell_finished(self, channel: int, part: int, out: list[ev.Effect]) -> None:
        found = self._channels[channel]
        if found.finished(part):
            out += [ev.PartsFinished(member, [part]) for member in found.members]

    def _request_ended(
        self, work: _Request, applied: bool, answer: object, refusal: Refusal | None, now: float, out: list[ev.Effect]
    ) -> None:
        if work.request >= 0:
            out.append(ev.Reply(work.request, answer, refusal))
        if work.kind == en.BEGIN:
            if applied:
                self.delivers = True
            else:
                self._begin_at = now + BEGIN_AGAIN_S
        elif work.kind == en.SEEK:
            number, part, _ = en.decode_seek(work.payload)
            if number in self._channels:
                self._channels[number].resume(part, now)
        elif work.kind == en.RESEND:
            number, part, _ = en.decode_resend(work.payload)
            if number in self._channels:
                self._channels[number].resent(part, now)
        elif work.kind == en.SEAL:
            part, _ = en.decode_seal(work.payload)
            for number in self._channels:
                self._tell_finished(number, part, out)

    def _look(self, now: float, out: list[ev.Effect]) -> None:
        """Take up channels and parts that the state has from now on, and drop those that it no longer has."""
        state = self._state
        if not self.delivers or self._shape == state.shape:
            return
        first, self._shape = self._shape < 0, state.shape
        for number in [number for number in self._channels if number not in state.channels]:
            self._drop_channel(number, NotServed("the channel was removed"), out)
        for number, settings in state.channels.items():
            topic = state.topics[settings.topic]
            if topic.deleted:
                if number in self._channels:
                    self._drop_channel(number, NotServed(f"the topic {topic.name} is deleted; restore it, or use another one"), out)
                continue
            if number not in self._channels:
                self._channels[number] = self.dispatcher(settings)
            dispatcher = self._channels[number]
            dispatcher.settings = settings
            dispatcher.look(now)
        for member in list(self._members.values()) if first else ():
            try:
                self._take_member(member, out)
            except PixiuError as problem:
                self._end_member(member.member, Refusal.of(problem), out)

    def _drop_channel(self, number: int, why: PixiuError, out: list[ev.Effect]) -> None:
        for member in self._channels.pop(number).members:
            self._end_member(member, Refusal.of(why), out)

    def _on_leader(self, event: LeaderChanged, now: float, out: list[ev.Effect]) -> None:
        self.epoch, self._leader, self.delivers = event.epoch, event.address, False
        unknown = Refusal.of(OutcomeUnknown("the leader has changed; send it again"))
        under_way = [work for works in self._proposed.values() for work in works] + [work for _, work in self._logged]
        under_way += [work for work, _ in self._turn]
        self._proposed, self._turn = {}, []
        self._logged.clear()
        self._to_persist.clear()
        self.counters.outcomes_unknown += len(under_way)
        self._give_up(under_way, unknown, now, out)
        for member in list(self._members):
            self._end_member(member, Refusal.of(not_leader(self._leader)), out)
        self._writes.clear()
        self._channels, self._shape = {}, -1
        self._begin_at, self._ask_at = (now, now) if self.epoch else (NEVER, NEVER)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if now >= self._begin_at and self.epoch:
            self._begin_at = NEVER
            self._turn.append((_Request(-1), (en.BEGIN, b"")))
        for channel in self._channels.values():
            for settlement in channel.time_out(now):
                self.counters.timed_out += 1
                self._settle(_Report(-1, -1, settlement))
        if now >= self._ask_at and self.epoch:
            self._ask_at = now + ASK_AGAIN_S
            out += [
                ev.AskParent(number, part) for number, each in self._channels.items() for part in sorted(each.missing_parents())
            ]
        self._on_end_of_turn(EndOfTurn(), now, out)

    def _pump(self, now: float, out: list[ev.Effect]) -> None:
        if not self.delivers or not self._parts.may_deliver():
            return
        found = list[ev.Deliver]()
        for channel in self._channels.values():
            channel.pump(now, found)
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
