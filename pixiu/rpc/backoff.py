"""Exponential back-off with jitter: the wait before the next attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

MAX_DOUBLINGS: Final = 32
"""Policy: after this number of failures the wait no longer doubles, whatever `max_s` is."""


RETRY_JITTER: Final = 0.25
"""Share by which the wait that a server named is extended at most."""


def retry_after_s(retry_after_ms: int, uniform: Callable[[], float]) -> float:
    """Compute the wait from the time that a server named, seconds; 0: it named none. Jitter spreads clients that were refused
    together."""
    return retry_after_ms / 1000 * (1 + RETRY_JITTER * uniform())


class Backoff:
    """The waits between failed attempts: they double from `first_s` to `max_s`, and each is shortened by up to a half, at random.

    Args:
        first_s: wait before the second attempt.
        max_s: longest wait.
        uniform: returns random numbers in [0, 1), so that callers that failed together do not retry together.
    """

    __slots__ = ("_first_s", "_max_s", "_uniform", "failures")

    def __init__(self, first_s: float, max_s: float, uniform: Callable[[], float]) -> None:
        self._first_s, self._max_s, self._uniform = first_s, max_s, uniform
        self.failures = 0
        """Failures in a row: calls of `next_s` since the last `reset`."""

    def next_s(self) -> float:
        """Count a failure. Returns the wait before the next attempt, seconds."""
        self.failures += 1
        return self.after_s(self.failures)

    def reset(self) -> None:
        """Note a success: the next wait is the first one again."""
        self.failures = 0

    def after_s(self, failures: int) -> float:
        """The wait after this many failures in a row, 1 or more, seconds; counts nothing."""
        longest = min(self._first_s * float(1 << min(failures - 1, MAX_DOUBLINGS)), self._max_s)
        return longest * (0.5 + 0.5 * self._uniform())


PROVEN_S: Final = 10.0
"""Lifetime after which a connection counts as a success, seconds; a shorter one is one more failure, however far it came."""


class Reconnects:
    """The waits before a lost connection is made again: they grow until a connection has proved itself."""

    __slots__ = ("_backoff", "failures")

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.failures = 0
        """Connections in a row that did not prove themselves, including the last one."""

    def lost(self, lived_s: float, confirmed: bool) -> float:
        """Note the end of a connection. Returns the wait before the next one, seconds.

        lived_s: time since the server's first answer; 0: none came. confirmed: the server had confirmed all requests.
        """
        self.failures = 1 if confirmed and lived_s >= PROVEN_S else self.failures + 1
        return self._backoff.after_s(self.failures)


class Resting:
    """Addresses of servers that asked to be left alone for a time: others are used first."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def refused(self, address: str, seconds: float, now: float) -> None:
        """Note the time that a server named (0: none, it may be asked at once). Addresses whose time is over are forgotten."""
        self._until = {each: until for each, until in self._until.items() if until > now and each != address}
        if seconds > 0:
            self._until[address] = now + seconds

    def left_s(self, address: str, now: float) -> float:
        """Seconds for which an address must be left alone."""
        return max(self._until.get(address, now) - now, 0.0)

    def usable(self, addresses: Sequence[str], now: float) -> list[str]:
        """The addresses that may be used now, in their order; if there are none, the one that may be used first."""
        rested = [address for address in addresses if not self.left_s(address, now)]
        return rested or sorted(addresses, key=lambda address: self.left_s(address, now))[:1]
