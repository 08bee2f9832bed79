"""An event loop that calls functions at the end of a turn, behind all that was ready in it.

    wake-up ─▶ callbacks that wait, and of what is readable ─▶ functions for the end of the turn ─▶ timers ─▶ wait

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
        self._end = _End(self.end_turn, (), self)
        self.at_end: list[asyncio.Handle] = []
        """To call at the end of this turn."""
        self.is_over = True
        """True behind the end of a turn."""

    def call_at_end(self, act: Callable[[], object]) -> asyncio.Handle:
        """Call this once at the end of this turn; soon if that is over, as it is for timers."""
        if self.is_over:
            return self.call_soon(act)
        self.at_end.append(asyncio.Handle(act, (), self))
        return self.at_end[-1]

    def _process_events(self, event_list: list[Any]) -> None:
        # asyncio's own: puts the callbacks of what is ready into the queue of this turn, and timers behind them.
        super()._process_events(event_list)  # type: ignore[misc]
        self._ready.append(self._end)  # type: ignore[attr-defined]
        self.is_over = False

    def end_turn(self) -> None:
        """Call what is to be called at the end of this turn."""
        acts, self.at_end = self.at_end, []
        for act in acts:
            if not act._cancelled:  # type: ignore[attr-defined]  # as asyncio's own loop asks
                act._run()


class _End(asyncio.Handle):
    """The callback that ends turns, without a call where nobody wants one."""

    _loop: TurnLoop

    def _run(self) -> None:
        self._loop.is_over = True
        if self._loop.at_end:
            self._loop.end_turn()


def call_at_end(act: Callable[[], object]) -> asyncio.Handle:
    """Call this at the end of the running loop's turn, as `TurnLoop.call_at_end`; soon if the loop is another one."""
    loop = asyncio.get_running_loop()
    return loop.call_at_end(act) if isinstance(loop, TurnLoop) else loop.call_soon(act)
