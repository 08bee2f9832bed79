"""Exponential backoff with jitter: how long to wait before the next attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

MAX_DOUBLINGS: Final = 32
"""Policy: after so many failures the wait no longer doubles, whatever `max_s` is."""


RETRY_JITTER: Final = 0.25
"""Whoever was told when to try again waits at most so much longer, as a share."""


def retry_after_s(retry_after_ms: int, uniform: Callable[[], float]) -> float:
    """Seconds to wait for a server that named a time; 0: it named none. Those who were refused together come back apart."""
    return retry_after_ms / 1000 * (1 + RETRY_JITTER * uniform())


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


PROVEN_S: Final = 10.0
"""A connection that lived for so long counts as a success; a shorter one is one more failure, however far it came."""


class Reconnects:
    """The waits before a lost connection is made anew: they grow until one has proved itself."""

    __slots__ = ("_backoff", "failures")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.failures = 0
        """Connections in a row that did not prove themselves, and the last one."""

    def lost(self, lived_s: float, confirmed: bool) -> float:
        """A connection is over. How long to wait before the next one.

        lived_s: since the server's first answer; 0: none came. confirmed: all that was asked of it was.
        """
        self.failures = 1 if confirmed and lived_s >= PROVEN_S else self.failures + 1
        return self._backoff.after_s(self.failures)


class Resting:
    """Addresses whose servers want to be left alone for a time: others are used first."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def refused(self, address: str, seconds: float, now: float) -> None:
        """A server named a time (0: none, it may be asked at once). Addresses whose time is over are forgotten."""
        self._until = {each: until for each, until in self._until.items() if until > now and each != address}
        if seconds > 0:
            self._until[address] = now + seconds

    def left_s(self, address: str, now: float) -> float:
        """Seconds for which an address is to be left alone."""
        return max(self._until.get(address, now) - now, 0.0)

    def usable(self, addresses: Sequence[str], now: float) -> list[str]:
        """The addresses that may be asked now, in their order; where there is none, the one that may be asked first."""
        rested = [address for address in addresses if not self.left_s(address, now)]
        return rested or sorted(addresses, key=lambda address: self.left_s(address, now))[:1]
