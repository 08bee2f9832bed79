"""Exponential backoff with jitter: how long to wait before the next attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MAX_DOUBLINGS: Final = 32
"""Policy: after so many failures the wait no longer doubles, whatever `max_s` is."""


class Backoff:
    """The waits between failed attempts: they double from `first_s` to `max_s`, and each is shortened by up to a half, at random.

    Args:
        first_s: before the second attempt.
        max_s: of every wait.
        uniform: random numbers in [0, 1); those who failed together must not try again together.
    """

    __slots__ = ("_first_s", "_max_s", "_uniform", "failures")

    def __init__(self, first_s: float, max_s: float, uniform: Callable[[], float]) -> None:
        self._first_s, self._max_s, self._uniform = first_s, max_s, uniform
        self.failures = 0
        """Failures in a row: calls of `next_s` since the last `reset`."""

    def next_s(self) -> float:
        """Count a failure. Returns how long to wait now."""
        self.failures += 1
        return self.after_s(self.failures)

    def reset(self) -> None:
        """An attempt succeeded: the next wait is the first one again."""
        self.failures = 0

    def after_s(self, failures: int) -> float:
        """How long to wait after this many failures in a row, 1 or more; counts nothing."""
        longest = min(self._first_s * float(1 << min(failures - 1, MAX_DOUBLINGS)), self._max_s)
        return longest * (0.5 + 0.5 * self._uniform())
