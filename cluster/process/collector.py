"""Keeps the garbage collector from stopping a process with many objects: objects that a full collection found alive are set aside.

A full collection visits every container in one go: a second with four million members in a map. Right after one there is no
garbage, so everything is set aside (`gc.freeze`), and the next one visits only newer objects. Objects that were set aside are still
freed when the last reference goes; only a cycle that dies later stays in memory.

Source: docs/decisions/0222-frozen-after-full-collections.md.
"""

from __future__ import annotations

import gc
import time
from typing import Any, Final

OLDEST: Final = 2
"""Generation of a full collection."""
SET_ASIDE_S: Final = 0.002
"""CPU time of a full collection, seconds, from which a freeze follows."""
THRESHOLDS: Final = (700, 10, 2)
"""A full collection follows two of the middle generation, if a quarter as many objects as were alive before are new, so each
visits few."""


class Collector:
    """Watches the collections of one process.

    Args:
        set_aside_s: a full collection that took this much CPU time is followed by a freeze.
    """

    def __init__(self, set_aside_s: float = SET_ASIDE_S) -> None:
        self._set_aside_s = set_aside_s
        self.full = 0
        """Number of full collections."""
        self.set_aside = 0
        """Number of freezes."""
        self.longest_s = 0.0
        """CPU time of the longest collection."""
        self._began = 0.0

    def start(self) -> None:
        """Start watching."""
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Stop watching. Objects that were set aside stay so."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)

    def samples(self) -> dict[str, float]:
        """Return values for metrics."""
        return {
            "collections_full_total": self.full,
            "collections_set_aside_total": self.set_aside,
            "collection_longest_seconds": round(self.longest_s, 6),
        }

    def _called(self, phase: str, info: dict[str, Any]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._began = now
            return
        took = now - self._began
        self.longest_s = max(self.longest_s, took)
        if info["generation"] == OLDEST:
            self.full += 1
            if took >= self._set_aside_s:
                gc.freeze()
                self.set_aside += 1
