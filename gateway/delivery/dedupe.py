"""Identities of recently delivered messages, by which repeats are dropped. Pure.

Repeats come three to ten seconds late: after a broker was silent, a publisher's stream stalled, or a proxy died. A publisher
whose session outlives its connection repeats what was not acknowledged when it is back. Two generations are kept, each for
`WINDOW_S`, and for `LONG_S` while it has fewer than `FEW` messages. So everything is remembered for at least `WINDOW_S` at any
rate. Only at the bound of messages is the time shorter, and that is counted.

        before │ current        at `turn`, when current is old enough or full:   before := current, current := {}

Source: docs/promises.md; docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

from typing import Final

WINDOW_S: Final = 15.0
"""Longer than any server repeats a message on its own, seconds."""
LONG_S: Final = 300.0
"""Time after which a generation ends, however few its messages, seconds."""
FEW: Final = 100_000
"""Messages of a generation, 10 MB, that need no space urgently."""
MAX_MESSAGES: Final = 1_000_000
"""Messages in one generation, about 100 bytes each. Policy: at the bound the older generation is forgotten early."""


class Dedupe:
    """Identities of messages: SnowflakeID and key, as 16 bytes.

    A loop over a batch checks `current` and `before` itself, and adds to `current` what it delivers and each repeat, since another
    one may follow.
    """

    __slots__ = ("_begun", "_max", "before", "current", "forgotten_early")

    def __init__(self, max_messages: int = MAX_MESSAGES) -> None:
        self._max = max_messages
        self._begun = 0.0
        self.current: set[bytes] = set()
        self.before: set[bytes] = set()
        self.forgotten_early = 0
        """Messages remembered for less than the window."""

    def __len__(self) -> int:
        return len(self.current) + len(self.before)

    def turn(self, now: float) -> None:
        """Note the time of a batch, monotonic seconds, and change generations if due."""
        age, count = now - self._begun, len(self.current)
        if age < (WINDOW_S if count >= FEW else LONG_S) and count < self._max:
            return
        if age < WINDOW_S:
            self.forgotten_early += len(self.before)
        self.before = self.current if age < 2 * LONG_S else set()
        self.current, self._begun = set(), now
