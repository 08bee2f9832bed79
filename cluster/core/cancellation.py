"""Work that a cancelled caller waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: Awaitable[T]) -> T:
    """Await work. A cancelled caller still waits until it has ended: a thread cannot be stopped, what it uses must stay open, and
    what it opens must be closed."""
    running = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
