"""A clock and a network for simulations: seeded, in one heap, nothing else decides what happens when.

What is delivered is fed into a hash, so that two runs can be compared byte for byte.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable

DELAY_S = (0.001, 0.03)
"""Wide enough that datagrams overtake each other."""


class Network:
    """Time, chance and a trace.

    Args:
        seed: of everything that is random.
        drop: probability that a datagram is lost.
        repeat: that it arrives twice.
    """

    def __init__(self, seed: int, drop: float, repeat: float) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.faults = True
        """Whether `chance` may say yes."""
        self.drop, self.repeat = drop, repeat
        self.deliveries = 0
        self._trace = hashlib.blake2b(digest_size=16)
        self._order = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def trace(self) -> str:
        """Of everything that was delivered so far, and when."""
        return self._trace.hexdigest()

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do something later."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay, self._order, action))

    def note(self, data: bytes) -> None:
        """Feed something into the trace."""
        self._trace.update(data)

    def run_until(self, end: float) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    def chance(self, probability: float) -> bool:
        """Whether something bad happens."""
        return self.faults and self.rng.random() < probability

    def delay(self) -> float:
        """Of one datagram."""
        return self.rng.uniform(*DELAY_S)

    def datagram(self, source: int, target: int, messages: list[bytes], arrive: Callable[[bool], None]) -> bool:
        """Send; `arrive(first)` is called for each copy that arrives. False: it is lost."""
        if self.chance(self.drop):
            return False
        for copy in range(2 if self.chance(self.repeat) else 1):
            self.after(self.delay(), lambda first=copy == 0: self._arrive(source, target, messages, arrive, first))  # type: ignore[misc]
        return True

    def _arrive(self, source: int, target: int, messages: list[bytes], arrive: Callable[[bool], None], first: bool) -> None:
        self.deliveries += 1
        self._trace.update(repr((self.now, source, target, first)).encode())
        for message in messages:
            self._trace.update(message)
        arrive(first)
