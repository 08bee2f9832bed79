"""Waiting for what must come, in tests with a real clock."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

WAIT_S = 120.0
"""Reached only by a test that fails; generous, because machines are loaded."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.001, 0.05
MAX_LONG_PAUSE_S = 0.5
"""Where it takes long to ask."""


def pause_after(took_s: float, pause_s: float) -> float:
    """Seconds from one asking to the next, which took so long: to ask every process for a page at every moment would take the CPU
    from those whose work is waited for."""
    return max(pause_s, min(2 * took_s, MAX_LONG_PAUSE_S))


async def until(
    condition: Callable[[], object], what: str | Callable[[], str] = "what was waited for", limit_s: float = WAIT_S
) -> None:
    """Wait until a condition holds.

    Args:
        condition: asked again and again; it may be a coroutine function.
        what: that did not come, for the message of the failure; a function is called then.
        limit_s: how long to wait.
    """
    end, pause = time.monotonic() + limit_s, FIRST_PAUSE_S
    try:
        async with asyncio.timeout(limit_s):
            while True:
                asked = time.monotonic()
                found = condition()
                if inspect.isawaitable(found):
                    found = await found
                if found:
                    return
                await asyncio.sleep(pause_after(time.monotonic() - asked, pause))
                pause = min(2 * pause, MAX_PAUSE_S)
    except TimeoutError:
        if time.monotonic() < end:
            raise  # the condition's own
        text = what if isinstance(what, str) else what()
        raise AssertionError(f"{text}: not within {limit_s:.0f} s") from None
