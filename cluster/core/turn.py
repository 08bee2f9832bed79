"""Bounds the share of a turn of the event loop that clients' input takes, at every listener of a process: MQTT and gRPC.

    a read ── small, or the turn has time left ──▶ handled at once
           └─ large, and it has not ──▶ the line ──▶ the next turns, as long as each has time
    many new connections, joins in steps ──▶ the paced line ──▶ a millisecond, then a rest

A turn reads from every client that has sent something. Without a bound a few hundred clients with much input each make one turn
last for seconds, in which nobody is served, heartbeats stop and the registry takes the gateway for dead. A small read does not wait
for large ones: most clients send one thing at a time.

A stream of gRPC waits for its turn twice: before a message is parsed, and for each slice of its request (`Turn.run`). While it
waits nothing more is read from it.

A bound of each turn still lets a crowd that connects at once have the whole processor as long as it has input, and the other
processes of the machine wait for it at each hop of a message. So a crowd's work rests longer than it runs.

Source: docs/decisions/0277-a-turn-of-a-gateway-has-a-bound.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

TURN_S: Final = 0.002
"""Time for clients' input in one turn; work that has begun is finished."""
SMALL_READ_BYTES: Final = 1024
"""A read up to this size is handled at once even when the turn has no time left, unless its client has not identified itself
yet."""
PACED_S: Final = 0.001
"""Time of one run of the paced line, ..."""
REST_S: Final = 0.003
"""... and the rest after it, longer if the last piece of work took longer."""
NEW_S: Final = 2.0
"""Time for which a connection is new."""
CROWD: Final = 100
"""Number of new connections above which they are a crowd."""
_NOTED_S: Final = TURN_S / 5
"""Time below which a turn's end is not scheduled: it counts for the next turns too."""


class Newcomers:
    """The new connections."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._new_until: deque[float] = deque()

    def arrived(self) -> float:
        """Add a connection. Returns the time until which it counts as new."""
        until = self._now() + NEW_S
        self._new_until.append(until)
        self.is_crowd()  # forgets those that are no longer new
        return until

    def is_crowd(self) -> bool:
        """Return True if there are many."""
        now = self._now()
        while self._new_until and self._new_until[0] <= now:
            self._new_until.popleft()
        return len(self._new_until) > CROWD


class PacedLine:
    """Work that gets a share of the time, whatever else there is to do.

    Args:
        now: monotonic seconds.
        call_later: calls a function after a number of seconds.
    """

    def __init__(self, now: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._now, self._call_later = now, call_later
        self._line: deque[Callable[[], None]] = deque()
        self._asked = False

    def later(self, work: Callable[[], None], *, first: bool = False) -> None:
        """Call this after the work before it, when it is time. `first`: it continues work that has begun, ahead of all others."""
        (self._line.appendleft if first else self._line.append)(work)
        if not self._asked:
            self._asked = True
            self._call_later(0.0, self._work)

    @property
    def waiting(self) -> int:
        """Number of waiting pieces of work."""
        return len(self._line)

    def _work(self) -> None:
        began = self._now()
        try:
            while self._line and self._now() - began < PACED_S:
                self._line.popleft()()
        finally:
            self._asked = bool(self._line)
            if self._asked:
                worked_s = self._now() - began
                self._call_later(max(REST_S, worked_s * REST_S / PACED_S), self._work)


class Turn:
    """The time of one gateway's clients.

    Args:
        now: monotonic seconds.
        next_turn: calls a function in the next turn of the event loop, before that turn's reads.
    """

    def __init__(self, now: Callable[[], float], next_turn: Callable[[Callable[[], None]], object]) -> None:
        self.now, self._next_turn = now, next_turn
        self._spent_s = 0.0
        self._line: deque[Callable[[], None]] = deque()
        self._asked = False

    @property
    def has_time(self) -> bool:
        """True if more work may be done in this turn."""
        return self._spent_s < TURN_S

    def spend(self, began: float) -> None:
        """Count the time since `began` as spent for a client."""
        self._spent_s += self.now() - began
        if self._spent_s > _NOTED_S:
            self._ask()

    def later(self, work: Callable[[], None], *, first: bool = False) -> None:
        """Call this in one of the next turns; it reports its time by `spend` itself. `first`: as `PacedLine.later`."""
        (self._line.appendleft if first else self._line.append)(work)
        self._ask()

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Do this now if it is small or the turn has time, else in one of the next turns. Returns and raises what it does.

        size: bytes of its input.
        """
        if size <= SMALL_READ_BYTES or self.has_time:
            began = self.now()
            try:
                return work()
            finally:
                self.spend(began)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def piece() -> None:
            if done.done():
                return  # the waiting caller is gone
            began = self.now()
            try:
                done.set_result(work())
            except Exception as error:
                done.set_exception(error)
            self.spend(began)

        self.later(piece)
        return await done

    @property
    def waiting(self) -> int:
        """Number of waiting pieces of work."""
        return len(self._line)

    def _ask(self) -> None:
        if not self._asked:
            self._asked = True
            self._next_turn(self._begin)

    def _begin(self) -> None:
        self._asked, self._spent_s = False, 0.0
        for _ in range(len(self._line)):
            self._line.popleft()()
            if self._spent_s >= TURN_S:
                break
        if self._line:
            self._ask()
