"""How much of a turn of the event loop goes to what clients say.

    a read ── small, or the turn has time left ──▶ worked off at once
           └─ large, and it has not ──▶ the line ──▶ the next turns, so long as each has time

A turn reads from every client that has sent something. Without a bound a few hundred clients with much to say each make one turn
last for seconds, in which nobody is served, heartbeats stop and the registry takes the gateway for dead. A read that is small does
not wait behind large ones: most clients say one thing at a time.

Source: docs/decisions/0277-a-turn-of-a-gateway-has-a-bound.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.002
"""What clients said may take so long; what is begun is finished."""
SMALL_READ_BYTES: Final = 1024
"""A read of so many bytes is worked off at once whatever the turn has had."""
_NOTED_S: Final = TURN_S / 5
"""Less than this is not worth a look at when a turn ends: it counts for the next ones too."""


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

    def has_time(self, size: int) -> bool:
        """Whether a read of so many bytes is to be worked off now."""
        return size <= SMALL_READ_BYTES or self._spent_s < TURN_S

    def spend(self, began: float) -> None:
        """What a client said has taken the time since then."""
        self._spent_s += self.now() - began
        if self._spent_s > _NOTED_S:
            self._ask()

    def later(self, work: Callable[[], None]) -> None:
        """Call this in one of the next turns; it says itself what it spends."""
        self._line.append(work)
        self._ask()

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
