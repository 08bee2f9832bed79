"""How much of a turn of the event loop goes to what clients say, at every listener of a process: MQTT and gRPC.

    a read ── small, or the turn has time left ──▶ worked off at once
           └─ large, and it has not ──▶ the line ──▶ the next turns, so long as each has time
    many who are new, joins in steps ──▶ the paced line ──▶ a millisecond, then a rest

A turn reads from every client that has sent something. Without a bound a few hundred clients with much to say each make one turn
last for seconds, in which nobody is served, heartbeats stop and the registry takes the gateway for dead. A read that is small does
not wait behind large ones: most clients say one thing at a time.

A stream of gRPC waits for its turn twice: before a message is parsed, and for each slice of what it asks for (`Turn.run`). While it
waits nothing more is read from it.

A bound of each turn still lets a crowd that connects at once have the whole processor for as long as it has something to say, and
the other processes of the machine wait for it at each hop of a message. So what a crowd says rests longer than it works.

Source: docs/decisions/0277-a-turn-of-a-gateway-has-a-bound.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

TURN_S: Final = 0.002
"""What clients said may take so long; what is begun is finished."""
SMALL_READ_BYTES: Final = 1024
"""A read of so many bytes is worked off at once whatever the turn has had, but of a client that has not said who it is."""
PACED_S: Final = 0.001
"""The paced line has so long, ..."""
REST_S: Final = 0.003
"""... and then rests, for longer as what was begun took longer."""
NEW_S: Final = 2.0
"""So long a connection is a new one."""
CROWD: Final = 100
"""More new ones than these are a crowd."""
_NOTED_S: Final = TURN_S / 5
"""Less than this is not worth a look at when a turn ends: it counts for the next ones too."""


class Newcomers:
    """The connections that are new."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._new_until: deque[float] = deque()

    def arrived(self) -> float:
        """One more. Returns until when it is a new one."""
        until = self._now() + NEW_S
        self._new_until.append(until)
        self.is_crowd()  # forgets those that are new no more
        return until

    def is_crowd(self) -> bool:
        """Whether they are many."""
        now = self._now()
        while self._new_until and self._new_until[0] <= now:
            self._new_until.popleft()
        return len(self._new_until) > CROWD


class PacedLine:
    """Work that has a part of the time, whatever else there is to do.

    Args:
        now: monotonic seconds.
        call_later: calls a function in so many seconds.
    """

    def __init__(self, now: Callable[[], float], call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self._now, self._call_later = now, call_later
        self._line: deque[Callable[[], None]] = deque()
        self._asked = False

    def later(self, work: Callable[[], None], *, first: bool = False) -> None:
        """Call this when those before it are done, and it is time. `first`: it goes on with what is begun, before all others."""
        (self._line.appendleft if first else self._line.append)(work)
        if not self._asked:
            self._asked = True
            self._call_later(0.0, self._work)

    @property
    def waiting(self) -> int:
        """How many pieces of work wait."""
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
        next_turn: calls a function in the next turn of the event loop, before what is read there.
    """

    def __init__(self, now: Callable[[], float], next_turn: Callable[[Callable[[], None]], object]) -> None:
        self.now, self._next_turn = now, next_turn
        self._spent_s = 0.0
        self._line: deque[Callable[[], None]] = deque()
        self._asked = False

    @property
    def has_time(self) -> bool:
        """Whether more is to be worked off in this turn."""
        return self._spent_s < TURN_S

    def spend(self, began: float) -> None:
        """What a client said has taken the time since then."""
        self._spent_s += self.now() - began
        if self._spent_s > _NOTED_S:
            self._ask()

    def later(self, work: Callable[[], None], *, first: bool = False) -> None:
        """Call this in one of the next turns; it says itself what it spends. `first`: as `PacedLine.later`."""
        (self._line.appendleft if first else self._line.append)(work)
        self._ask()

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Do this now where it is small or the turn has time, else in one of the next turns. Returns and raises what it does.

        size: bytes that it is about.
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
                return  # who waited is gone
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
        """How many clients wait in the line."""
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
