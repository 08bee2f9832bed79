"""The kernel of all simulations: simulated time, one heap of what is to come, one source of chance, and a trace of what happened.

Nothing else decides what happens when, so that the same seed gives the same run, byte for byte, on every machine.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from typing import Any

ASK_S = 0.25
"""How often, in simulated time, it is asked whether a run is done."""


class Simulation:
    """Time, chance and a trace.

    Args:
        seed: of everything that is random.
        now: the time at which it begins, in seconds.
    """

    def __init__(self, seed: int, now: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.now = now
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0
        self._trace = hashlib.blake2b(digest_size=16)

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something later."""
        self.at(self.now + delay, action, *arguments)

    def at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time; what is to happen at the same time happens in the order in which it was asked for."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action, arguments))

    def run_until(self, end: float, done: Callable[[], bool] | None = None) -> None:
        """Let time pass, until something holds at the latest: it is asked now and then."""
        heap, ask_at = self._heap, self.now
        while heap and heap[0][0] <= end:
            self.now, _, action, arguments = heapq.heappop(heap)
            action(*arguments)
            if done is not None and self.now >= ask_at:
                ask_at = self.now + ASK_S
                if done():
                    return
        self.now = max(self.now, end)

    def run(self, seconds: float) -> None:
        """Let so much time pass."""
        self.run_until(self.now + seconds)

    def wait_for(self, condition: Callable[[], bool], limit_s: float = 300.0, step_s: float = 0.05) -> None:
        """Let time pass until something holds, which must not take longer."""
        end = self.now + limit_s
        while not condition():
            assert self.now < end, "it did not come"
            self.run(step_s)

    def note(self, *happened: bytes) -> None:
        """Take something into the trace, and when it happened."""
        self._trace.update(b"%.9f" % self.now)
        for part in happened:
            self._trace.update(part)

    @property
    def trace(self) -> str:
        """Of everything that was noted so far, in hex: runs that differ have different ones."""
        return self._trace.hexdigest()
