"""A replica of a Pi partition: what it takes from its callers, and what it answers. Pure.

    request ──▶ checked ──▶ one entry a turn ──▶ replicated log ──▶ committed, applied ──▶ reply with results
       └──▶ reads, while this replica leads and holds its lease

Who leads and what is committed is decided by `cluster.replication.core`; what numbers are given by `pi.state`.

Source: seed 004 §6.2; DESIGN sections 8, 9 ("Mail"), 11 and 12.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pi.events import (
    Appended,
    Effect,
    EntryApplied,
    Event,
    LayoutChanged,
    LeaderChanged,
    LogPersisted,
    Notify,
    ProposalAccepted,
    ProposalRejected,
    Propose,
    ReadFound,
    ReadRequest,
    Reply,
    Requested,
    StreamClosed,
    Tick,
    TurnEnded,
)
from pi.reading import Read, Refusal
from pi.state import Results
from pixiu.errors import (
    InvalidArgument,
    NotLeader,
    OldSession,
    OutcomeUnknown,
    Overloaded,
    PixiuError,
    StaleWriter,
    StateDamaged,
    TooManyReceivers,
    Unavailable,
    UnknownDevice,
    WrongPartition,
)
from pixiu.ids import MAX_ID
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    DELETE,
    LANE_SHIFT,
    MAX_RECEIVERS,
    TRIM,
    U64,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Appends,
    Clock,
    Code,
    Deletes,
    DropDevices,
    Fanout,
    Limits,
    OpenSessions,
    Operation,
    Trims,
    decode,
    encode,
)
from pixiu.wire.levels import Level

MAX_REQUEST_BYTES: Final = 1 << 20
MAX_REQUEST_READS: Final = 1000
MAX_WAITING_BYTES: Final = 64 << 20
"""Operations that wait for their commit. Policy: more are refused with OVERLOADED."""
MAX_ENTRY_BYTES: Final = 1 << 20
"""Of one entry; what came in one turn beyond it goes into the next one."""
MAX_WRITERS_A_STREAM: Final = 64
"""Writers on one stream. Policy: more are refused with INVALID_ARGUMENT."""
_CODES: Final = {
    Code.UNKNOWN_DEVICE: UnknownDevice.code, Code.OLD_SESSION: OldSession.code, Code.INVALID_ARGUMENT: InvalidArgument.code,
}  # fmt: skip


_FORMS: Final[dict[type[Operation], struct.Struct]] = {
    Acknowledges: ACKNOWLEDGE, OpenSessions: USER_DEVICE, DropDevices: USER_DEVICE, Trims: TRIM, Deletes: DELETE,
}  # fmt: skip


class Inboxes(Protocol):
    """What the core reads: `pi.state.State`, and the lease of this replica."""

    def may_read(self) -> bool:
        """Whether what was just read is the newest there is: asked after reading."""

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """Entries of an inbox. Raises Refusal, StateDamaged."""


@dataclass(slots=True)
class _Waiting:
    """A request whose operations are under way."""

    stream: int
    request: int
    level: Level
    operations: list[Operation]
    size: int
    reads: list[ReadFound]
    answered: bool = False


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        partition: that this replica serves.
        inboxes: for reads.
        limits: that this replica sets as leader.
        clock_interval_s: a leader appends the time at least so often while its log has anything in it.
    """

    def __init__(self, *, partition: int, inboxes: Inboxes, limits: Limits, clock_interval_s: float) -> None:
        self.partition = partition
        self._inboxes = inboxes
        self.epoch = 0
        """In which this replica leads; 0: it does not."""
        self.committed = 0
        self.damaged = ""
        """What is broken in the state; empty: nothing that was found."""
        self.counters = dict.fromkeys(("requests", "refused", "appended", "reads", "outcomes_unknown"), 0)
        self._limits = limits
        self._clock_interval_s = clock_interval_s
        self._clock_at = -math.inf
        self._partitions, self._layout_version = 0, 0
        self._addresses: dict[int, str] = {}
        self._leader = ""
        self._turn: list[_Waiting] = []
        self._turn_bytes = 0
        self._token = 0
        self._proposed: dict[int, list[_Waiting]] = {}
        """By token: not in the log yet."""
        self._logged: dict[int, list[_Waiting]] = {}
        """By counter: not committed yet."""
        self._to_persist: deque[int] = deque()
        """Counters of entries with a request that waits for the leader's disk alone."""
        self._waiting_bytes = 0
        self._ended: dict[int, dict[int, int]] = {}
        """By stream: worker → the generation of its appends that ended with a refusal."""
        self._handlers: dict[type[Any], Callable[[Any, float, list[Effect]], None]] = {
            Requested: self._on_requested,
            StreamClosed: self._on_stream_closed,
            TurnEnded: self._on_turn_ended,
            ProposalAccepted: self._on_accepted,
            ProposalRejected: self._on_rejected,
            LogPersisted: self._on_persisted,
            EntryApplied: self._on_applied,
            LeaderChanged: self._on_leader,
            LayoutChanged: self._on_layout,
            Tick: self._on_tick,
        }

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        out: list[Effect] = []
        self._handlers[type(event)](event, now, out)
        return out

    def next_deadline(self) -> float:
        """When `Tick` is due, monotonic seconds."""
        return self._clock_at + self._clock_interval_s

    @property
    def under_way(self) -> int:
        """Requests that were not answered."""
        return len(self._turn) + sum(map(len, self._proposed.values())) + sum(map(len, self._logged.values()))

    # --- requests

    def _on_requested(self, event: Requested, now: float, out: list[Effect]) -> None:
        self.counters["requests"] += 1
        operations: list[Operation] = []
        try:
            if len(event.operations) > MAX_REQUEST_BYTES or len(event.reads) > MAX_REQUEST_READS:
                raise InvalidArgument(f"a request has at most {MAX_REQUEST_BYTES} bytes and {MAX_REQUEST_READS} reads")
            operations = decode(event.operations)
            if not self.epoch:
                raise NotLeader(f"this replica of pi partition {self.partition} does not lead; ask {self._leader or 'another one'}")
            for operation in operations:
                self._check(event.stream, operation)
            self._check_users([read.uin for read in event.reads])
            if self._waiting_bytes + len(event.operations) > MAX_WAITING_BYTES:
                raise Overloaded(f"{MAX_WAITING_BYTES >> 20} MiB wait for their commit in this partition; try again later", 200)
            reads = self._read_all(event.reads)
        except PixiuError as refused:
            self._end_writers(event.stream, operations)
            self._refuse(event.stream, event.request, refused, out)
            return
        waiting = _Waiting(event.stream, event.request, event.level, operations, len(event.operations), reads)
        if operations:
            self._turn.append(waiting)
            self._turn_bytes += waiting.size
            self._waiting_bytes += waiting.size
            if self._turn_bytes >= MAX_ENTRY_BYTES:
                self._propose(out)
        else:
            out.append(self._reply(waiting))

    def _check(self, stream: int, operation: Operation) -> None:
        """Raises what is wrong with one operation of a caller."""
        if isinstance(operation, Appends | Fanout):
            writer, ended = operation.writer, self._ended.get(stream, {})
            if ended.get(writer.worker, -1) >= writer.generation:
                raise self._stale(writer.worker, writer.generation)
        if isinstance(operation, Appends):
            self._check_users([uin for _, uin in APPEND.iter_unpack(operation.items)])
            self._check_messages([msg_id for msg_id, _ in APPEND.iter_unpack(operation.items)])
        elif isinstance(operation, Fanout):
            receivers = [uin for (uin,) in U64.iter_unpack(operation.receivers)]
            if len(receivers) > MAX_RECEIVERS:
                raise TooManyReceivers(f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several")
            self._check_users(receivers)
            self._check_messages([operation.msg_id])
        elif isinstance(operation, AddDevice):
            self._check_users([operation.uin])
        elif isinstance(operation, Clock):
            raise InvalidArgument("only a leader sets the clock")
        else:
            self._check_users([item[0] for item in _FORMS[type(operation)].iter_unpack(operation.items)])

    @staticmethod
    def _stale(worker: int, generation: int) -> PixiuError:
        return StaleWriter(f"the stream {generation} of writer {worker} ended with a refusal; open one with a higher generation")

    def _check_users(self, uins: list[int]) -> None:
        n, mine = self._partitions, self.partition
        for uin in uins:
            if n and uin % n != mine % n:
                raise WrongPartition(f"user {uin} is served by pi partition {uin % n} of {n}, not by {mine}", key=uin)
            if not 0 < uin <= MAX_ID:
                raise InvalidArgument(f"there is no user {uin}")

    @staticmethod
    def _check_messages(msg_ids: list[int]) -> None:
        for msg_id in msg_ids:
            if not 0 < msg_id <= MAX_ID:
                raise InvalidArgument(f"there is no MsgID {msg_id}")

    def _end_writers(self, stream: int, operations: list[Operation]) -> None:
        """What follows in a stream of appends must not overtake what was refused."""
        ended = self._ended.setdefault(stream, {})
        for operation in operations:
            if isinstance(operation, Appends | Fanout) and (operation.writer.worker in ended or len(ended) < MAX_WRITERS_A_STREAM):
                worker, generation, _ = operation.writer
                ended[worker] = max(generation, ended.get(worker, 0))
        if not ended:
            del self._ended[stream]

    def _on_stream_closed(self, event: StreamClosed, now: float, out: list[Effect]) -> None:
        self._ended.pop(event.stream, None)

    def _read_all(self, reads: Sequence[ReadRequest]) -> list[ReadFound]:
        found = [self._read(read) for read in reads]
        if found and not self._inboxes.may_read():
            return [ReadFound([], code=Unavailable.code) for _ in reads]
        return found

    def _read(self, read: ReadRequest) -> ReadFound:
        self.counters["reads"] += 1
        try:
            return ReadFound(*self._inboxes.read(*read))
        except Refusal as refusal:
            return ReadFound([], code=_CODES[refusal.code])
        except StateDamaged as damage:
            self.damaged = str(damage)
            return ReadFound([], code=damage.code)

    # --- the log

    def _on_turn_ended(self, event: TurnEnded, now: float, out: list[Effect]) -> None:
        if self._turn:
            self._propose(out)

    def _propose(self, out: list[Effect]) -> None:
        turn, self._turn, self._turn_bytes = self._turn, [], 0
        self._token += 1
        self._proposed[self._token] = turn
        replicated = any(waiting.level is Level.REPLICATED for waiting in turn)
        payload = encode(operation for waiting in turn for operation in waiting.operations)
        out.append(Propose(self._token, payload, replicated))

    def _on_accepted(self, event: ProposalAccepted, now: float, out: list[Effect]) -> None:
        self._logged[event.counter] = turn = self._proposed.pop(event.token, [])
        self._answer_level(turn, Level.ACCEPTED, out)
        self._to_persist.append(event.counter)

    def _on_rejected(self, event: ProposalRejected, now: float, out: list[Effect]) -> None:
        for waiting in self._proposed.pop(event.token, []):
            self._waiting_bytes -= waiting.size
            self._end_writers(waiting.stream, waiting.operations)
            self._refuse(waiting.stream, waiting.request, (event.code, event.text), out)

    def _on_persisted(self, event: LogPersisted, now: float, out: list[Effect]) -> None:
        while self._to_persist and self._to_persist[0] <= event.counter:
            self._answer_level(self._logged.get(self._to_persist.popleft(), []), Level.PERSISTED, out)

    def _answer_level(self, turn: list[_Waiting], level: Level, out: list[Effect]) -> None:
        """Answer who waits for no more than this; others may stand in the same entry."""
        out += [self._answered(waiting) for waiting in turn if waiting.level is level and not waiting.answered]

    def _on_applied(self, event: EntryApplied, now: float, out: list[Effect]) -> None:
        self.committed = max(self.committed, event.counter)
        turn = self._logged.pop(event.counter, None)
        if turn is None:
            return
        results, at = event.results, 0
        appended: list[Appended] = []
        for waiting in turn:
            own = results[at : at + len(waiting.operations)]
            at += len(waiting.operations)
            for operation, found in zip(waiting.operations, own, strict=True):
                if isinstance(operation, Appends | Fanout):
                    appended += _appended(operation, found)
            if not waiting.answered:
                out.append(self._answered(waiting, [number for found in own for number in found], event.copies))
        self.counters["appended"] += len(appended)
        if appended:
            out.append(Notify(appended))

    # --- who leads, and where what is served

    def _on_leader(self, event: LeaderChanged, now: float, out: list[Effect]) -> None:
        self._leader = event.address
        if event.epoch == self.epoch:
            return
        was, self.epoch = self.epoch, event.epoch
        if was:
            turns = (*self._logged.values(), *self._proposed.values(), self._turn)
            unknown = [waiting for turn in turns for waiting in turn if not waiting.answered]
            self.counters["outcomes_unknown"] += len(unknown)
            for waiting in unknown:
                self._waiting_bytes -= waiting.size
                self._end_writers(waiting.stream, waiting.operations)
                error = OutcomeUnknown("this replica no longer leads; send it again to the new leader, with the same MsgIDs")
                self._refuse(waiting.stream, waiting.request, error, out)
            self._logged, self._proposed, self._turn, self._turn_bytes = {}, {}, [], 0
            self._to_persist.clear()
        self._clock_at = -math.inf

    def _on_layout(self, event: LayoutChanged, now: float, out: list[Effect]) -> None:
        self._layout_version, self._partitions, self._addresses = event.version, event.partitions, event.addresses

    def _on_tick(self, event: Tick, now: float, out: list[Effect]) -> None:
        if now < self.next_deadline():
            return
        self._clock_at = now
        if self.epoch:
            self._token += 1
            self._proposed[self._token] = []
            out.append(Propose(self._token, encode([Clock(self._limits)]), replicated=False))

    # --- replies

    def _reply(self, waiting: _Waiting) -> Reply:
        return Reply(waiting.stream, waiting.request, self._layout_version, self.epoch, self.committed, reads=waiting.reads)

    def _answered(self, waiting: _Waiting, results: Results | None = None, copies: int = 0) -> Reply:
        self._waiting_bytes -= waiting.size
        waiting.answered = True
        reply = self._reply(waiting)
        reply.results, reply.copies = results or (), copies
        return reply

    def _refuse(self, stream: int, request: int, error: PixiuError | tuple[str, str], out: list[Effect]) -> None:
        self.counters["refused"] += 1
        code, text = (error.code, str(error)) if isinstance(error, PixiuError) else error
        reply = Reply(stream, request, self._layout_version, self.epoch, self.committed, code=code, text=text)
        if isinstance(error, WrongPartition):
            right = error.key % self._partitions
            reply.server = (right, self._partitions, self._addresses.get(right, ""))
        elif code == NotLeader.code:
            reply.server = (self.partition, self._partitions, self._leader)
        out.append(reply)


def _appended(operation: Appends | Fanout, found: Results) -> list[Appended]:
    """What inboxes have now, by the results of an operation."""
    if isinstance(operation, Appends):
        pairs = list(APPEND.iter_unpack(operation.items))
    else:
        pairs = [(operation.msg_id, uin) for (uin,) in U64.iter_unpack(operation.receivers)]
    return [
        Appended(uin, msg_id >> LANE_SHIFT & 3, seq, msg_id) for (msg_id, uin), seq in zip(pairs, found, strict=True) if seq > 0
    ]
