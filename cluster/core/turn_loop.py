"""An event loop that calls functions at the end of a turn, when all that was ready has been read.

    wake-up ─▶ callbacks of what is readable ─▶ functions for the end of the turn ─▶ wait

By `call_soon` they would take a turn of their own, with a look for events before it: a system call, and ten calls of Python.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop with ends of turns."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._end, self._at_end = asyncio.Handle(self._end_turn, (), self), list[asyncio.Handle]()
        self._reading = False

    def call_at_end(self, act: Callable[[], object]) -> asyncio.Handle:
        """Call this once at the end of this turn, or soon if nothing is being read."""
        if not self._reading:
            return self.call_soon(act)
        self._at_end.append(asyncio.Handle(act, (), self))
        return self._at_end[-1]

    def _process_events(self, event_list: list[Any]) -> None:
        # asyncio's own: puts the callbacks of what is ready into the queue of this turn.
        super()._process_events(event_list)  # type: ignore[misc]
        if event_list:
            self._reading = True
            self._ready.append(self._end)  # type: ignore[attr-defined]

    def _end_turn(self) -> None:
        acts, self._at_end, self._reading = self._at_end, [], False
        for act in acts:
            if not act.cancelled():
                act._run()


def call_at_end(act: Callable[[], object]) -> asyncio.Handle:
    """Call this at the end of the running loop's turn, as `TurnLoop.call_at_end`; soon if the loop is another one."""
    loop = asyncio.get_running_loop()
    return loop.call_at_end(act) if isinstance(loop, TurnLoop) else loop.call_soon(act)
