"""Time limits that end as errors of the SDK."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from pixiu.errors import PixiuError


@contextlib.asynccontextmanager
async def within(seconds: float | None, late: Callable[[], PixiuError]) -> AsyncIterator[None]:
    """Do something within so many seconds, None: without limit. Raises what `late` makes when they are over; errors of the SDK
    that are `TimeoutError`s themselves pass as they are."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except PixiuError:
        raise
    except TimeoutError:
        raise late() from None
