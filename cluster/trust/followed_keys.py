"""Key rings that change while a process runs: read again once a second at most, and keys derived from them for a purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cluster.trust.key_ring import KeyRing
from pixiu.errors import ConfigurationError

KEYS_S: Final = 1.0
"""Time for which a ring is cached, seconds."""
Purpose = tuple[str, str]


def keys_of(ring: KeyRing | None, purpose: Purpose) -> tuple[bytes, ...]:
    """Keys of a purpose, the one that signs first; none without a ring."""
    if ring is None:
        return ()
    numbers = [ring.signing, *sorted((number for number in ring.keys if number != ring.signing), reverse=True)]
    return tuple(ring.derive(number, *purpose) for number in numbers)


class ProofKeys:
    """Current keys of a purpose. The ring is read every `KEYS_S` at most, however often strangers cause a check.

    Args:
        ring: reads the ring; None: there is none. Raises ConfigurationError.
        now: monotonic seconds.
        keep: keep the last keys while the ring cannot be read; otherwise there are none.
    """

    def __init__(
        self,
        ring: Callable[[], KeyRing | None],
        purpose: Purpose,
        now: Callable[[], float] = time.monotonic,
        *,
        keep: bool = False,
    ) -> None:
        self._ring, self._purpose, self._now, self._keep = ring, purpose, now, keep
        self._keys: tuple[bytes, ...] = ()
        self._until = 0.0
        self.problem = ""
        """Reason why the keys could not be read last; empty if they could."""

    def newest(self) -> tuple[bytes, ...]:
        """The keys, the one that signs first."""
        if self._now() >= self._until:
            try:
                self._keys, self.problem = keys_of(self._ring(), self._purpose), ""
            except ConfigurationError as error:
                self._keys, self.problem = self._keys if self._keep else (), str(error)
            self._until = self._now() + KEYS_S
        return self._keys
