"""Work on many sessions in slices: a person's change of a file must not stop the loops of all processes at once.

Few sessions are visited at once; many are spread over some seconds, with a share that each process draws for itself, so that
clients whose sessions end do not all return in one moment. Each slice takes at most a millisecond; the rest follows in the next
turn of the event loop.

Source: docs/security.md, "What a change of these files does".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
SLICE_S: Final = 0.001
SPREAD_S: Final = 10.0
"""Longest time over which many visits are spread, seconds; the shortest is half of it."""
FEW_PER_S: Final = 1000.0
"""Lowest rate of visits, per second."""
NAP_S: Final = 0.01


class Visits(Generic[Item]):
    """Args: visit: visits one item; exceptions go to `failed`. clock: monotonic seconds. share: fraction of `SPREAD_S`, 0.5 to
    1."""

    def __init__(
        self,
        visit: Callable[[Item], None],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ) -> None:
        self._visit, self._failed, self._clock, self._share = visit, failed, clock, share
        self._waiting: OrderedDict[Item, None] = OrderedDict()
        self._per_s = FEW_PER_S
        self._next_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, items: Iterable[Item]) -> None:
        """Visit these, each once, even if it is added again before."""
        self._waiting.update(dict.fromkeys(items))
        if not self._waiting:
            return
        self._per_s = max(FEW_PER_S, len(self._waiting) / (SPREAD_S * self._share()))
        self._next_at = self._clock()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="visits")

    def slice(self) -> float:
        """Visit the items that are due, for at most `SLICE_S`. Returns the seconds until there is more to do."""
        now = begun = self._clock()
        while self._waiting and self._next_at <= now and now - begun < SLICE_S:
            item, _ = self._waiting.popitem(last=False)
            self._next_at += 1 / self._per_s
            try:
                self._visit(item)
            except Exception as error:  # of any kind: the others still get their turn
                self._failed(error)
            now = self._clock()
        return max(self._next_at - now, 0.0)

    async def close(self) -> None:
        """Stop visiting."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while self._waiting:
            wait_s = self.slice()
            await asyncio.sleep(max(wait_s, NAP_S) if wait_s else 0)
        self._task = None
