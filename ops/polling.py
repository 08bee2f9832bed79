"""Wait until the cluster has done what a command asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def polled(look: Callable[[], Awaitable[T]], done: Callable[[T], object], timeout_s: float, every_s: float) -> T:
    """Look again and again until `done` accepts what is there, or the time is over. Returns what was seen last."""
    until = time.monotonic() + timeout_s
    while not done(seen := await look()) and time.monotonic() < until:
        await asyncio.sleep(every_s)
    return seen
