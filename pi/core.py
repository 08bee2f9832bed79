"""The core of a Pi replica: decides which requests it accepts, and answers them. Pure.

    request ──▶ checked ──▶ one entry a turn ──▶ replicated log ──▶ committed, applied ──▶ reply with results
       └──▶ reads, while this replica leads and holds its lease

`cluster.replication.core.core` decides who leads and what is committed; `pi.state` assigns the numbers.

Source: PiXiu §6.2; docs/routing.md, docs/architecture.md, "A mail is sent", docs/stores.md, docs/replication.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.core.contract import NEVER, EndOfTurn, EventTable, Tick
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.core.refusals import not_leader
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pi import events as ev
from pi.checks import NOBODY, appends_of, check, check_users, writers_of
from pi.inboxes.reading import Read, ReadRefusal
from pi.serving import Serving
from pi.state import Results
from pixiu.errors import (
    DiskFull,
    InvalidArgument,
    NotLeader,
    OldSession,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    Refusal,
    StaleWriter,
    StateDamaged,
    Unavailable,
    UnknownDevice,
    WrongPartition,
)
from pixiu.wire.inbox_operations import (
    ENTRY_KIND,
    MAX_OPERATIONS,
    MAX_OPERATIONS_BYTES,
    MAX_READS,
    Clock,
    Code,
    Limits,
    Writer,
    encode,
    spans,
)
from pixiu.wire.levels import Level, Triple

MAX_WAITING_BYTES: Final = 64 << 20
"""Limit of operations that wait for their commit. Policy: more are refused with OVERLOADED."""
MAX_ENTRY_BYTES: Final = 256 << 10
"""Size limit of an entry; what exceeds it in one turn goes into the next entry. Appends of this size, 16,000, are applied in about
20 ms."""
CLOCK_AGAIN_S: Final = 0.1
"""Delay of the next clock entry after one that was refused because other replicas had not reported their time yet."""
SWEEP_AGAIN_S: Final = 0.5
"""Delay of the next clock entry after one whose sweep of expired mail did not finish."""
HELD_S: Final = 0.5
"""Time for which a child that learns holds requests, seconds. It decides them if it opens meanwhile; it gets them because its
parent has been split. Policy: after that time, and beyond `MAX_WAITING_BYTES` or `MAX_HELD`, requests are refused."""
MAX_HELD: Final = 4096
MAX_NOTES_BYTES: Final = 1 << 20
"""Limit of the notes in the answers to a request, bytes. Policy: further reads with notes are answered with OVERLOADED, and can be
sent again at once."""
_CODES: Final = {
    Code.UNKNOWN_DEVICE: UnknownDevice.code, Code.OLD_SESSION: OldSession.code, Code.INVALID_ARGUMENT: InvalidArgument.code,
}  # fmt: skip


class Inboxes(Protocol):
    """Interface to what the core reads: `pi.state.State`, and the lease of this replica."""

    def may_read(self) -> bool:
        """Return True if the values just read are the newest there are; call it after reading."""

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False, notes: bool = False,
    ) -> Read:  # fmt: skip
        """Entries of an inbox. Raises ReadRefusal, StateDamaged."""

    def stored(self, msg_id: int, uin: int) -> int:
        """Return the InboxSeq of a MsgID in a user's inbox; 0: it is not there. Raises StateDamaged."""

    def may_grow(self) -> bool:
        """Return True if there is space for mail and new devices. Operations that free space, or need none, are accepted in any
        case."""


@dataclass(slots=True)
class Counters:
    """Totals of a Pi's core since the start."""

    requests: int = 0
    refused: int = 0
    appends: int = 0
    reads: int = 0
    outcomes_unknown: int = 0
    held: int = 0
    held_too_long: int = 0


@dataclass(slots=True)
class _Waiting:
    """A request whose operations are in progress."""

    stream: int
    request: int
    level: Level
    payload: bytes
    """Its operations, as they came."""
    operations: int
    appends: int
    writers: list[Writer]
    reads: list[ev.ReadFound]
    answered: bool = False


class Core(EventTable[ev.Effect]):
    """Decides; see the module. `step` never raises on input from the network.

    Args:
        partition: of this replica.
        inboxes: for reads.
        limits: set by this replica while it leads, with whether there is space.
        clock_interval_s: longest interval at which a leader appends the time.
    """

    def __init__(self, *, partition: int, inboxes: Inboxes, limits: Limits, clock_interval_s: float) -> None:
        super().__init__()
        self._inboxes = inboxes
        self.epoch = 0
        """Epoch in which this replica leads; 0: it does not."""
        self.committed = 0
        self.counters = Counters()
        self._limits = limits
        self._clock_interval_s = clock_interval_s
        self._clock_at = -math.inf
        self._limits_said: Limits | None = None
        """This leader's limits that are in its log, or on their way there before all else."""
        self._serving = Serving(partition)
        self._leader = ""
        self._turn: list[_Waiting] = []
        self._turn_bytes = self._turn_operations = 0
        self._token = 0
        self._proposed: dict[int, list[_Waiting]] = {}
        """By token: not in the log yet."""
        self._logged: dict[int, list[_Waiting]] = {}
        """By counter: not committed yet."""
        self._to_persist: deque[int] = deque()
        """Counters of entries with a request that waits only for the leader's disk."""
        self._waiting_bytes = 0
        self._held: deque[tuple[float, ev.Requested]] = deque()
        """(deadline, request) held by a child that learns, in order."""
        self._held_bytes = 0
        self._copies = 0
        """Of the last entry applied."""
        self._too_few = False
        """True if the last entry applied is on fewer disks than `min_in_sync`, as far as is known."""
        self._ended: dict[int, dict[int, int]] = {}
        """By stream: worker → the generation of its appends that ended with a refusal; at most `WORKERS`, since others are
        malformed."""
        self.on(ev.Requested, self._on_requested)
        self.on(ev.StreamClosed, self._on_stream_closed)
        self.on(EndOfTurn, self._on_end_of_turn)
        self.on(LeaderChanged, self._on_leader)
        self.on(Accepted, self._on_accepted)
        self.on(Refused, self._on_refused)
        self.on(Persisted, self._on_persisted)
        self.on(Committed, self._on_committed)
        self.on(ev.StoodStill, self._on_stood_still)
        self.on(ev.LayoutChanged, self._on_layout)
        self.on(ev.DoublingChanged, self._on_doubling)
        self.on(Tick, self._on_tick)

    def next_deadline(self) -> float:
        """Time at which the next clock entry or a held request is due, monotonic seconds."""
        if not self.epoch:
            return NEVER
        clock_due = self._clock_at + self._clock_interval_s
        if not self._held:
            return clock_due
        return min(clock_due, self._held[0][0]) if self._serving.own == NOBODY else -math.inf

    @property
    def under_way(self) -> int:
        """Number of requests without an answer."""
        return len(self._held) + len(self._turn) + sum(map(len, self._proposed.values())) + sum(map(len, self._logged.values()))

    # --- requests

    def _on_requested(self, event: ev.Requested, now: float, out: list[ev.Effect]) -> None:
        self.counters.requests += 1
        if self._held and self._serving.own != NOBODY:
            self._release(now, out)
        self._take(event, now, out, held_until=now + HELD_S)

    def _take(self, event: ev.Requested, now: float, out: list[ev.Effect], held_until: float) -> None:
        """`held_until`: deadline until which a child that is not open may hold the request."""
        payload, writers = event.operations, list[Writer]()
        try:
            if len(payload) > MAX_OPERATIONS_BYTES or len(event.reads) > MAX_READS:
                raise InvalidArgument(f"a request has at most {MAX_OPERATIONS_BYTES} bytes and {MAX_READS} reads")
            found = spans(payload)
            writers = writers_of(payload, found)
            if not self.epoch:
                raise not_leader(self._leader)
            self._check_writers(event.stream, writers)
            own, partitions = self._serving.own, self._serving.partitions
            appends = check(payload, found, own, partitions)
            check_users([read.uin for read in event.reads], own, partitions)
            if self._waiting_bytes + len(payload) > MAX_WAITING_BYTES:
                raise Overloaded(f"{MAX_WAITING_BYTES >> 20} MiB wait for their commit in this partition; try again later", 200)
            reads = self._read_all(event.reads)
        except PixiuError as refused:
            if isinstance(refused, WrongPartition) and now < held_until and self._hold(event, held_until):
                return
            self._end_writers(event.stream, writers)
            self._refuse(event.stream, event.request, Refusal.of(refused), out, refused)
            return
        waiting = _Waiting(event.stream, event.request, event.level, payload, len(found), appends, writers, reads)
        if not found:
            out.append(self._reply(waiting))
            return
        if self._turn_operations + len(found) > MAX_OPERATIONS:
            self._propose(now, out)
        self.counters.appends += appends
        self._turn.append(waiting)
        self._turn_operations += len(found)
        self._turn_bytes += len(payload)
        self._waiting_bytes += len(payload)
        if self._turn_bytes >= MAX_ENTRY_BYTES:
            self._propose(now, out)

    def _hold(self, event: ev.Requested, until: float) -> bool:
        """Keep a request until this child opens; return False if the limits do not allow it: see `HELD_S`."""
        more = self._held_bytes + len(event.operations)
        if not self._serving.learns or more > MAX_WAITING_BYTES or len(self._held) >= MAX_HELD:
            return False
        self.counters.held += 1
        self._held.append((until, event))
        self._held_bytes = more
        return True

    def _release(self, now: float, out: list[ev.Effect], until: float = math.inf) -> None:
        """Decide requests held with a deadline up to `until`, in order."""
        while self._held and self._held[0][0] <= until:
            _, event = self._held.popleft()
            self.counters.held_too_long += self._serving.own == NOBODY
            self._held_bytes -= len(event.operations)
            self._take(event, now, out, held_until=-math.inf)
        if self._turn:
            self._propose(now, out)

    def _check_writers(self, stream: int, writers: list[Writer]) -> None:
        """Raise StaleWriter for a stream of appends that ended with a refusal."""
        ended = self._ended.get(stream)
        if ended is None:
            return
        for worker, generation, _ in writers:
            if ended.get(worker, -1) >= generation:
                raise StaleWriter(
                    f"the stream {generation} of writer {worker} ended with a refusal; open one with a higher generation"
                )

    def _end_writers(self, stream: int, writers: list[Writer]) -> None:
        """End streams of appends after a refusal: later appends must not overtake the refused ones."""
        if not writers:
            return
        ended = self._ended.setdefault(stream, {})
        for worker, generation, _ in writers:
            ended[worker] = max(generation, ended.get(worker, 0))

    def _on_stream_closed(self, event: ev.StreamClosed, now: float, out: list[ev.Effect]) -> None:
        self._ended.pop(event.stream, None)
        if self._held:
            self._held = deque(held for held in self._held if held[1].stream != event.stream)
            self._held_bytes = sum(len(request.operations) for _, request in self._held)

    def _read_all(self, reads: Sequence[ev.ReadRequest]) -> list[ev.ReadFound]:
        found: list[ev.ReadFound] = []
        room = MAX_NOTES_BYTES
        for read in reads:
            found.append(self._read(read) if room > 0 or not read.notes else ev.ReadFound([], code=Overloaded.code))
            room -= sum([len(note.value) for note in found[-1].notes])
        if found and not self._inboxes.may_read():
            return [ev.ReadFound([], code=Unavailable.code) for _ in reads]
        return found

    def _read(self, read: ev.ReadRequest) -> ev.ReadFound:
        self.counters.reads += 1
        try:
            return ev.ReadFound(*self._inboxes.read(*read))
        except ReadRefusal as refusal:
            return ev.ReadFound([], code=_CODES[refusal.code])
        except StateDamaged as damage:
            return ev.ReadFound([], code=damage.code)

    # --- the log

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        if self._held and self._serving.own != NOBODY:  # not at once: it may have opened while its log was being applied
            self._release(now, out)
        if self._turn:
            self._propose(now, out)

    def _propose(self, now: float, out: list[ev.Effect]) -> None:
        # A replica that decides by an earlier leader's limits, or by none, keeps too little or too much.
        if self._limits_said != self._limits_now():
            self._propose_clock(now, out)
        turn, self._turn, self._turn_bytes, self._turn_operations = self._turn, [], 0, 0
        if self._inboxes.may_grow():
            self._propose_turn(turn, out)
            return
        for grows in (False, True):
            if part := [waiting for waiting in turn if bool(waiting.appends) is grows]:
                self._propose_turn(part, out, grows=grows)

    def _propose_turn(self, turn: list[_Waiting], out: list[ev.Effect], *, grows: bool = False) -> None:
        self._token += 1
        self._proposed[self._token] = turn
        replicated = any(waiting.level is Level.REPLICATED for waiting in turn)
        out.append(Propose(self._token, [(ENTRY_KIND, b"".join([waiting.payload for waiting in turn]))], replicated, grows))

    def _on_accepted(self, event: Accepted, now: float, out: list[ev.Effect]) -> None:
        self._logged[event.first] = turn = self._proposed.pop(event.token, [])
        self._answer_level(turn, Level.ACCEPTED, out)
        self._to_persist.append(event.first)

    def _on_refused(self, event: Refused, now: float, out: list[ev.Effect]) -> None:
        turn = self._proposed.pop(event.token, None)
        if turn == []:  # a clock entry
            self._clock_at = now + CLOCK_AGAIN_S - self._clock_interval_s
            self._limits_said = None
        for waiting in turn or ():
            if event.refusal.code != DiskFull.code or not self._confirm_stored(waiting, out):
                self._waiting_bytes -= len(waiting.payload)
                self._end_writers(waiting.stream, waiting.writers)
                self._refuse(waiting.stream, waiting.request, event.refusal, out)

    def _confirm_stored(self, waiting: _Waiting, out: list[ev.Effect]) -> bool:
        """Answer a request that was refused for lack of space; return False if it has no stored appends. Appends that are already
        stored are confirmed all the same, since a sender that repeats them would take them for lost."""
        pairs = appends_of(waiting.payload, spans(waiting.payload))
        if not pairs:
            return False
        try:
            results = [self._inboxes.stored(msg_id, uin) for msg_id, uin in pairs]
        except StateDamaged:
            results = []
        too_few = self._too_few and waiting.level is Level.REPLICATED and any(results)
        on_their_way = any(other.appends for turn in self._logged.values() for other in turn)
        if not results or too_few or (not all(results) and (on_their_way or not self._inboxes.may_read())):
            self._waiting_bytes -= len(waiting.payload)
            self._end_writers(waiting.stream, waiting.writers)
            unknown = Refusal(Unavailable.code, "there is no space, and some of it may be stored already: send it again")
            self._refuse(waiting.stream, waiting.request, unknown, out)
            return True
        if not any(results):
            return False
        if not all(results):
            self._end_writers(waiting.stream, waiting.writers)
        out.append(self._answered(waiting, [result or -Code.DISK_FULL for result in results], self._copies))
        return True

    def _on_persisted(self, event: Persisted, now: float, out: list[ev.Effect]) -> None:
        while self._to_persist and self._to_persist[0] <= event.counter:
            self._answer_level(self._logged.get(self._to_persist.popleft(), []), Level.PERSISTED, out)

    def _answer_level(self, turn: list[_Waiting], level: Level, out: list[ev.Effect]) -> None:
        """Answer requests that wait for this level; others may be in the same entry."""
        out += [self._answered(waiting) for waiting in turn if waiting.level is level and not waiting.answered]

    def _on_committed(self, event: Committed, now: float, out: list[ev.Effect]) -> None:
        self.committed, self._copies = event.first + len(event.values) - 1, event.copies
        self._too_few = not event.copies
        for counter, results in enumerate(event.values, event.first):
            turn = self._logged.pop(counter, None)
            if turn:
                self._answer_turn(turn, results, event.copies, out)
            elif turn is not None and results and results[0][0] == 0:  # a clock entry whose sweep did not finish
                self._clock_at = now + SWEEP_AGAIN_S - self._clock_interval_s

    def _answer_turn(self, turn: list[_Waiting], results: Sequence[Results], copies: int, out: list[ev.Effect]) -> None:
        at = 0
        for waiting in turn:
            own = results[at : at + waiting.operations]
            at += waiting.operations
            if waiting.answered:
                continue
            if copies:
                out.append(self._answered(waiting, [number for found in own for number in found], copies))
            else:
                self._leave_open(waiting, "fewer than min_in_sync replicas have it; send it again, with the same MsgIDs", out)

    def _on_stood_still(self, event: ev.StoodStill, now: float, out: list[ev.Effect]) -> None:
        """Requests in the log without an answer may be applied or not; an operator decides."""
        self._fail([waiting for turn in self._logged.values() for waiting in turn], event.text, out)
        self._logged = {}

    def _fail(self, turn: Sequence[_Waiting], why: str, out: list[ev.Effect]) -> None:
        """Answer requests whose outcome is unknown."""
        for waiting in turn:
            if not waiting.answered:
                self._leave_open(waiting, f"{why}; send it again, with the same MsgIDs", out)

    # --- the leader, the layout, the clock

    def _on_leader(self, event: LeaderChanged, now: float, out: list[ev.Effect]) -> None:
        self._leader = event.address
        if event.epoch == self.epoch:
            return
        was, self.epoch = self.epoch, event.epoch
        if was:
            turns = (*self._logged.values(), *self._proposed.values(), self._turn)
            self._fail([waiting for turn in turns for waiting in turn], "this replica no longer leads: ask the new leader", out)
            self._logged, self._proposed, self._turn = {}, {}, []
            self._turn_bytes = self._turn_operations = 0
            self._to_persist.clear()
        self._clock_at, self._limits_said, self._too_few = -math.inf, None, False
        if self._held:
            self._release(now, out)

    def _leave_open(self, waiting: _Waiting, why: str, out: list[ev.Effect]) -> None:
        self.counters.outcomes_unknown += 1
        self._waiting_bytes -= len(waiting.payload)
        waiting.answered = True
        self._end_writers(waiting.stream, waiting.writers)
        self._refuse(waiting.stream, waiting.request, Refusal(OutcomeUnknown.code, why), out)

    def _on_layout(self, event: ev.LayoutChanged, now: float, out: list[ev.Effect]) -> None:
        self._serving.layout_changed(event)

    def _on_doubling(self, event: ev.DoublingChanged, now: float, out: list[ev.Effect]) -> None:
        self._serving.doubling_changed(event)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if not self.epoch:
            return
        if self._held:
            self._release(now, out, now if self._serving.own == NOBODY else math.inf)
        if now >= self._clock_at + self._clock_interval_s:
            self._propose_clock(now, out)

    def _propose_clock(self, now: float, out: list[ev.Effect]) -> None:
        self._clock_at, self._limits_said = now, self._limits_now()
        self._token += 1
        self._proposed[self._token] = []
        out.append(Propose(self._token, [(ENTRY_KIND, encode([Clock(self._limits_said)]))], replicated=False))

    def _limits_now(self) -> Limits:
        return self._limits._replace(no_space=int(not self._inboxes.may_grow()))

    # --- replies

    @property
    def _triple(self) -> Triple:
        return Triple(self._serving.version, self.epoch, self.committed)

    def _reply(self, waiting: _Waiting) -> ev.Reply:
        return ev.Reply(waiting.stream, waiting.request, self._triple, reads=waiting.reads)

    def _answered(self, waiting: _Waiting, results: Results | None = None, copies: int = 0) -> ev.Reply:
        self._waiting_bytes -= len(waiting.payload)
        waiting.answered = True
        reply = self._reply(waiting)
        reply.results, reply.copies = results or (), copies
        return reply

    def _refuse(self, stream: int, request: int, why: Refusal, out: list[ev.Effect], error: PixiuError | None = None) -> None:
        self.counters.refused += 1
        reply = ev.Reply(stream, request, self._triple, code=why.code, text=why.text, retry_after_ms=why.retry_after_ms)
        if isinstance(error, WrongPartition):
            reply.server = self._serving.server_of(error.key)
        elif why.code == NotLeader.code:
            reply.server = self._serving.led_by(self._leader)
        out.append(reply)
