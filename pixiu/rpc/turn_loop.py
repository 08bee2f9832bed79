"""An event loop that calls functions at the end of a turn, behind all that was ready in it.

    wake-up ─▶ callbacks that wait, and of what is readable ─▶ functions for the end of the turn ─▶ timers ─▶ wait

By `call_soon` they would take a turn of their own, with a look for events before it: a system call, and ten calls of Python.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable
from typing import Any, Final

MAX_ROUNDS: Final = 16
"""Rounds of an end of a turn: each calls what the one before asked for. Policy: the rest waits for the next turn."""


class TurnLoop(asyncio.SelectorEventLoop):
    """An event loop with ends of turns."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._end = _End(self.end_turn, (), self)
        self.at_end: list[asyncio.Handle] = []
        """To call at the end of this turn."""
        self.is_over = True
        """True behind the end of a turn."""

    def _process_events(self, event_list: list[Any]) -> None:
        # asyncio's own: puts the callbacks of what is ready into the queue of this turn, and timers behind them.
        super()._process_events(event_list)  # type: ignore[misc]
        self._ready.append(self._end)  # type: ignore[attr-defined]
        self.is_over = False

    def end_turn(self) -> None:
        """Call what is to be called at the end of this turn, and what that asks for."""
        for _ in range(MAX_ROUNDS):
            acts, self.at_end = self.at_end, []
            for act in acts:
                if not act._cancelled:  # as asyncio itself asks
                    act._run()
            if not self.at_end:
                break
        self.is_over = True
        self._ready.extend(self.at_end)  # type: ignore[attr-defined]
        self.at_end = []


class _End(asyncio.Handle):
    """The callback that ends turns, without a call where nobody wants one."""

    _loop: TurnLoop

    def _run(self) -> None:
        if self._loop.at_end:
            self._loop.end_turn()
        self._loop.is_over = True


def call_at_end(act: Callable[[], object], context: contextvars.Context | None = None) -> asyncio.Handle:
    """Call this once at the end of this turn of the running loop, behind what is called there already; soon if that is over, as it
    is for timers, or if the loop has no ends of turns."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, TurnLoop) or loop.is_over:
        return loop.call_soon(act, context=context)
    handle = asyncio.Handle(act, (), loop, context)
    loop.at_end.append(handle)
    return handle
