"""Takes a process with a hanging event loop out of the registry: kazoo's own thread would keep its session alive for ever.

A timer of the loop shows that it turns; a thread checks it. After half the session timeout without a turn the thread closes the
ZooKeeper session. When the whole process had been stopped (a suspended machine), the loop first gets its chance.

Source: docs/registry.md.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final

TURN_S: Final = 0.5
"""Seconds between two turns of the loop's timer, and between the thread's checks; less if the limit is short."""
MAX_STACK: Final = 50
"""Frames of the hanging loop that the log shows."""


class Watchdog:
    """Watches one event loop.

    limit_s: seconds without a turn that count as hanging.
    on_stall: called in the watchdog's thread with the seconds so far and the loop's stack.
    on_back: called in the loop when it turns again after a stall.
    on_lag: called in the loop at each turn with its delay, seconds.
    """

    def __init__(
        self, limit_s: float, on_stall: Callable[[float, str], None], on_back: Callable[[], None], on_lag: Callable[[float], None]
    ) -> None:
        self._limit_s = limit_s
        self._turn_s = min(TURN_S, limit_s / 5)
        self._on_stall, self._on_back, self._on_lag = on_stall, on_back, on_lag
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop_thread = 0
        self._turned = self._looked = 0.0
        self._stalled = False
        self.stalls = 0
        """Number of times that the loop was found hanging."""

    def start(self) -> None:
        """Watch the running loop."""
        self._loop_thread = threading.get_ident()
        self._turned = self._looked = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._turn_s, self._turn, self._turned + self._turn_s)
        self._thread = threading.Thread(target=self._watch, name="pixiu-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; the thread ends within a turn."""
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * TURN_S)

    def _turn(self, due: float) -> None:
        now = time.monotonic()
        self._turned = now
        self._on_lag(now - due)
        if self._stalled:
            self._stalled = False
            self._on_back()
        self._timer = asyncio.get_running_loop().call_later(self._turn_s, self._turn, now + self._turn_s)

    def _watch(self) -> None:
        while not self._stop.wait(self._turn_s):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Check once, at `now` monotonic seconds. Called by the thread; tests may call it."""
        slept, self._looked = now - self._looked, now
        if slept > 4 * self._turn_s:
            # This thread stood still as well: the process, not the loop, was stopped. Start counting from here.
            self._turned = max(self._turned, now)
            return
        still = now - self._turned
        if still > self._limit_s and not self._stalled and not self._stop.is_set():
            self._stalled = True
            self.stalls += 1
            self._on_stall(still, self._stack())

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)[-MAX_STACK:]) if frame is not None else ""
