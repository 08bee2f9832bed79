"""Time limits that raise errors of the SDK."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from pixiu.errors import PixiuError


@contextlib.asynccontextmanager
async def within(seconds: float | None, late: Callable[[], PixiuError]) -> AsyncIterator[None]:
    """Run the block within `seconds`; None: without limit. Raises the error that `late` makes when they are over; errors of the SDK
    that are `TimeoutError`s themselves pass unchanged."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except PixiuError:
        raise
    except TimeoutError:
        raise late() from None
