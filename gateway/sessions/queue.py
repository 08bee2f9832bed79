"""Reads and writes of sessions' state that wait for Pi: one at a time for each user, many users to a request. Pure.

    call ─▶ line of its UIN ─▶ partition ─▶ request ─▶ answer ─▶ done, or again until its time is over
             the first one is under way; writes of the same note behind it become one

Source: docs/pi.md, "Notes".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Generic, NamedTuple, TypeVar

from pixiu.errors import (
    DiskFull,
    InvalidArgument,
    OldSession,
    Overloaded,
    PixiuError,
    StateDamaged,
    Unavailable,
    WrongPartition,
    error_of_code,
)
from pixiu.placement.split import SplitPartitions
from pixiu.wire.inbox_operations import MAX_LANE, Code, encode_clears, encode_note
from pixiu.wire.v1 import pi_pb2

MAX_CALLS: Final = 100_000
MAX_BYTES: Final = 32 << 20
"""Limits of calls that wait, and of their values, bytes. Policy: further ones are refused with OVERLOADED."""
CALLS_A_REQUEST: Final = 200
BYTES_A_REQUEST: Final = 256 << 10
MAX_REQUESTS: Final = 4
"""Requests under way to a partition: while they are, calls gather for the next one."""
RETRY_S: Final = 0.1
"""Pause before a call is sent again, seconds."""
LANES: Final = MAX_LANE + 1
_SAID: Final = (Overloaded.code, DiskFull.code, StateDamaged.code)
"""Codes that a caller is given when its time is over; everything else is Unavailable."""
_REFUSED: Final[dict[int, PixiuError]] = {
    Code.OLD_SESSION: OldSession("a newer connection of this client has taken the session over"),
    Code.DISK_FULL: DiskFull("the inboxes have no space for this session; its operator must free some"),
}

FutureT = TypeVar("FutureT")


class SessionState(NamedTuple):
    """A session's state in Pi."""

    notes: dict[int, tuple[int, bytes]]
    """Name → (generation, value)."""
    generation: int
    """The highest one that set or cleared notes, also where none are left; a lower one can set none. 0: there never was one."""
    last: tuple[int, ...]
    """The newest InboxSeq of each lane."""
    waiting: int
    """Entries that can be read, and that no acknowledgement has reached."""
    dropped: int
    """Entries lost unacknowledged, ever: a higher number than before means a loss."""
    exists: bool
    """True if there is note 0."""


class Kind(IntEnum):
    """A call."""

    READ = 0
    WRITE = 1
    CLEAR = 2


@dataclass(slots=True, eq=False)
class Call(Generic[FutureT]):
    """One read or change, and all who wait for it."""

    kind: Kind
    uin: int
    until: float
    """Monotonic seconds after which it is not sent again."""
    name: int = 0
    generation: int = 0
    value: bytes = b""
    waiters: list[FutureT] = field(default_factory=list)
    error: PixiuError = field(default_factory=lambda: Unavailable("no Pi has answered; try again"))
    """The reason why it has not succeeded so far."""

    @property
    def size(self) -> int:
        """Bytes of its operation, about."""
        return len(self.value) + 32


class Done(NamedTuple, Generic[FutureT]):
    """A call that is over: its waiters get the state, the error, or nothing."""

    call: Call[FutureT]
    state: SessionState | None = None
    error: PixiuError | None = None


class Request(NamedTuple, Generic[FutureT]):
    """Calls for the leader of a partition, encoded."""

    partition: int
    calls: list[Call[FutureT]]
    operations: bytes
    reads: list[pi_pb2.PiRead]


class SessionQueue(Generic[FutureT]):
    """Decides what is sent when. `add` and `answered` are followed by `requests`."""

    def __init__(self) -> None:
        self.split = SplitPartitions()
        self.calls = self.bytes = self.merged = self.repeated = 0
        self._lines: dict[int, deque[Call[FutureT]]] = {}
        """By UIN: the first one is under way, or about to be sent."""
        self._ready: dict[tuple[int, bool], deque[Call[FutureT]]] = {}
        """By partition, and whether they are reads."""
        self._under_way: dict[tuple[int, bool], int] = {}
        self._later: deque[tuple[float, Call[FutureT]]] = deque()
        """(when, call) to be sent again, in order."""

    def add(self, call: Call[FutureT]) -> None:
        """Take a call with one waiter. Raises Overloaded."""
        line = self._lines.get(call.uin)
        if call.kind is Kind.WRITE and line is not None and len(line) > 1:
            last = line[-1]
            if (last.kind, last.name, last.generation) == (Kind.WRITE, call.name, call.generation):
                self.bytes += call.size - last.size
                last.value, last.until = call.value, max(last.until, call.until)
                last.waiters += call.waiters
                self.merged += 1
                return
        if self.calls >= MAX_CALLS or self.bytes + call.size > MAX_BYTES:
            raise Overloaded("too many changes of sessions wait for Pi; try again later", 1000)
        self.calls += 1
        self.bytes += call.size
        if line is None:
            self._lines[call.uin] = deque((call,))
            self._send(call)
        else:
            line.append(call)

    def _send(self, call: Call[FutureT]) -> None:
        place = self.split.of(call.uin), call.kind is Kind.READ
        self._ready.setdefault(place, deque()).append(call)

    def next_deadline(self) -> float | None:
        """Monotonic seconds at which `requests` must be called again; None: there is no such time."""
        return self._later[0][0] if self._later else None

    def requests(self, now: float) -> list[Request[FutureT]]:
        """Return what is to be sent now; each must be `answered`."""
        while self._later and self._later[0][0] <= now:
            self._send(self._later.popleft()[1])
        found: list[Request[FutureT]] = []
        for place, ready in list(self._ready.items()):
            while ready and self._under_way.get(place, 0) < MAX_REQUESTS:
                found.append(self._request(place, ready))
                self._under_way[place] = self._under_way.get(place, 0) + 1
            if not ready:
                del self._ready[place]
        return found

    def _request(self, place: tuple[int, bool], ready: deque[Call[FutureT]]) -> Request[FutureT]:
        calls, size = list[Call[FutureT]](), 0
        while ready and len(calls) < CALLS_A_REQUEST and (not calls or size + ready[0].size <= BYTES_A_REQUEST):
            calls.append(ready.popleft())
            size += calls[-1].size
        partition, reads = place
        if reads:
            return Request(partition, calls, b"", [read for call in calls for read in _reads_of(call.uin)])
        return Request(partition, calls, b"".join([_operation_of(call) for call in calls]), [])

    def answered(
        self, request: Request[FutureT], reply: pi_pb2.PiReply | None, partitions: int, now: float
    ) -> list[Done[FutureT]]:  # fmt: skip
        """Take the answer to a request. Returns the calls that are over.

        partitions: of Pi, if the partition does not serve these users; else 0.
        """
        calls, reads = request.calls, bool(request.reads)
        place = request.partition, reads
        self._under_way[place] -= 1
        if not self._under_way[place]:
            del self._under_way[place]
        if reply is None or reply.code:
            at_once = bool(partitions) and self.split.moved(request.partition, partitions)
            error = _error_of(reply.code, reply.text) if reply is not None else Unavailable("the leader of Pi is not connected")
            return [done for call in calls if (done := self._again(call, error, now, at_once=at_once)) is not None]
        found: list[Done[FutureT]] = []
        for index, call in enumerate(calls):
            done = self._read(call, reply, index, now) if reads else self._changed(call, reply, index, now)
            if done is not None:
                found.append(done)
        return found

    def _read(self, call: Call[FutureT], reply: pi_pb2.PiReply, index: int, now: float) -> Done[FutureT] | None:
        lanes = reply.reads[index * LANES : (index + 1) * LANES]
        if len(lanes) < LANES:
            return self._again(call, Unavailable("Pi has answered too little"), now)
        code = next((lane.code for lane in lanes if lane.code), "")
        if code:
            too_many = code == Overloaded.code and index > 0  # the first call of a request always has space
            return self._again(call, _error_of(code, "Pi refused to read the session"), now, at_once=too_many)
        notes = {note.name: (note.generation, note.value) for note in lanes[0].notes}
        last, waiting = tuple(lane.last for lane in lanes), sum(lane.unread for lane in lanes)
        dropped = sum(lane.dropped for lane in lanes)
        return self._over(Done(call, SessionState(notes, lanes[0].notes_generation, last, waiting, dropped, 0 in notes)))

    def _changed(self, call: Call[FutureT], reply: pi_pb2.PiReply, index: int, now: float) -> Done[FutureT] | None:
        if index >= len(reply.results):
            return self._again(call, Unavailable("Pi has answered too little"), now)
        result = reply.results[index]
        if result >= 0:
            return self._over(Done(call))
        refused = _REFUSED.get(-result)
        error = InvalidArgument(f"Pi refused a note with {result}") if refused is None else type(refused)(str(refused))
        return self._over(Done(call, error=error))

    def _again(self, call: Call[FutureT], error: PixiuError, now: float, *, at_once: bool = False) -> Done[FutureT] | None:
        call.error = error
        if now >= call.until:
            return self._over(Done(call, error=error))
        self.repeated += 1
        if at_once:
            self._send(call)
        else:
            self._later.append((now + RETRY_S, call))
        return None

    def _over(self, done: Done[FutureT]) -> Done[FutureT]:
        call, line = done.call, self._lines[done.call.uin]
        line.popleft()
        self.calls -= 1
        self.bytes -= call.size
        if line:
            self._send(line[0])
        else:
            del self._lines[call.uin]
        return done

    def all(self) -> Sequence[Call[FutureT]]:
        """Every call that is not over."""
        return [call for line in self._lines.values() for call in line]


def _reads_of(uin: int) -> list[pi_pb2.PiRead]:
    return [pi_pb2.PiRead(uin=uin, lane=lane, peek=True, notes=not lane) for lane in range(LANES)]


def _operation_of(call: Call[FutureT]) -> bytes:
    if call.kind is Kind.CLEAR:
        return encode_clears([(call.uin, call.generation)])
    return encode_note(call.uin, call.name, call.generation, call.value)


def _error_of(code: str, text: str) -> PixiuError:
    if code in _SAID:
        return error_of_code(code, text)
    if code == WrongPartition.code:
        return Unavailable("Pi's partitions are changing; try again")
    return Unavailable(f"Pi answered {code}: {text}")
