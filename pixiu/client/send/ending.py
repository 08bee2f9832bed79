"""The end of a closed client's streams: what was sent is awaited for a moment, and the rest fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Protocol


class Closable(Protocol):
    """A stream that can be told to end."""

    closing: bool
    task: asyncio.Task[None] | None

    def kick(self) -> None:
        """Wake it up."""


async def end_streams(
    streams: Iterable[Closable], ending: Collection[asyncio.Task[None]], grace_s: float, abandon: Callable[[], None]
) -> None:
    """Let streams end by themselves for `grace_s` seconds, give up what is unresolved, and cancel what still runs.

    Args:
        ending: tasks of streams that were left before.
        abandon: fails every unresolved message.
    """
    tasks = []
    for stream in streams:
        stream.closing = True
        stream.kick()
        if stream.task is not None:
            tasks.append(stream.task)
    if tasks:
        await asyncio.wait(tasks, timeout=grace_s)
    abandon()
    left = [*ending, *tasks]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
