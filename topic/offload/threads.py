"""Threads for calls that may hang: a process ends without waiting for them, which the pools of the standard library would do.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Found = TypeVar("Found")


async def in_thread(work: Callable[[], Found]) -> Found:
    """Call a function in a thread of its own. Who is cancelled meanwhile does not get its outcome."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Found] = loop.create_future()

    def settle(result: Any, problem: BaseException | None) -> None:
        if future.done():
            return
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = work(), None
        except BaseException as problem:
            outcome = None, problem
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="topic-store", daemon=True).start()
    return await future
