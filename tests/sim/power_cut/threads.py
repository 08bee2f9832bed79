"""An event loop with a clock of its own, whose threads run one at a time, in an order that a seed decides.

A job of `run_in_executor` runs in a thread of its own, but only while the loop stands still for it. At its syncs, and around what
writes much, it may be put aside for a while; the loop goes on meanwhile, as it does while a disk is slow. A lock that such a job
holds, and somebody else wants, lets it go on.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import cluster.replication.storage.log
import pi.store.machine
import xiu.store.machine

POINTS: Final = frozenset({
    "fdatasync", "fsync", "pwrite", "ftruncate", "unlink", "rename", "replace", "link",
    "sync", "flush", "putmulti", "copyfd", "create_checkpoint", "close",
})  # fmt: skip
"""Calls before and after which a job may be put aside."""
OURS: Final = tuple(
    str(Path(str(package.__file__)).parent) for package in (cluster.replication.storage.log, pi.store.machine, xiu.store.machine)
)
"""Whose calls these are."""
ASIDE: Final = 0.5
"""How often it is."""
DELAY_S: Final = (0.0, 0.0005, 0.004, 0.03)
"""How long at most: one of these, by the seed."""
LOCK_TRIES: Final = 10_000
MAX_TURNS: Final = 500_000
"""Of the loop, in a life: one that has more does not end."""


class _Clock:
    """In the place of a selector. Nobody sends anything: where the loop would wait, its time passes."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits, and nothing is to come"
        self._loop.turns += 1
        assert self._loop.turns < MAX_TURNS, f"the run did not end in {MAX_TURNS} turns of the loop"
        self._loop.now += max(timeout, 0.0)
        return []


class Job:
    """A call in a thread."""

    def __init__(self, loop: Loop, work: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self._loop, self._work, self._done = loop, work, done
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False
        self.waits: Lock | None = None
        """For what it waits."""
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def go_on(self) -> None:
        """Let it run until it is put aside, or has ended."""
        if self._timer is not None:
            self._timer.cancel()
        before, self._loop.running = self._loop.running, self
        if not self._thread.ident:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        self._loop.running = before
        if self._ended:
            self._thread.join()
            self._loop.jobs.discard(self)
        else:
            self._timer = self._loop.call_later(self._loop.delay(), self.go_on)

    def put_aside(self) -> None:
        """In its thread: somebody else goes on."""
        self._loop.before_switch()
        self._back.release()
        self._go.acquire()

    def _run(self) -> None:
        sys.setprofile(self._look)
        found: Any = None
        problem: BaseException | None = None
        try:
            found = self._work()
        except BaseException as error:
            problem = error
        sys.setprofile(None)
        self._loop.before_switch()
        self._ended = True
        self._loop.call_later(self._loop.delay(), self._done, found, problem)
        self._back.release()

    def _look(self, frame: types.FrameType, event: str, what: Any) -> None:
        if event not in ("c_call", "c_return") or what.__name__ not in POINTS:
            return
        if event == "c_return" and what.__name__ == "flush":
            self._loop.after_flush(what.__self__)
        if (
            frame.f_code.co_filename.startswith(OURS) and self._loop.rng.random() < ASIDE
        ):  # the garbage collector closes things, too
            self.put_aside()


class Lock:
    """A lock, or one that its holder may take again: of whoever runs in its turn."""

    def __init__(self, loop: Loop, again: bool) -> None:
        self._loop, self._again = loop, again
        self._holder: Job | str | None = ""
        self._times = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take it."""
        mine = self._loop.running
        for _ in range(LOCK_TRIES):
            if not self._times or (self._again and self._holder is mine):
                self._holder, self._times = mine, self._times + 1
                return True
            if not blocking:
                return False
            if mine is not None:
                mine.waits = self
                mine.put_aside()
                mine.waits = None
            else:
                self._last_holder().go_on()
        raise AssertionError("two wait for each other")

    def _last_holder(self) -> Job:
        """Who goes on when the loop waits: its holder, or whoever holds what that one waits for."""
        holder, seen = self._holder, set[int]()
        while isinstance(holder, Job) and holder.waits is not None and id(holder) not in seen:
            seen.add(id(holder))
            if not holder.waits._times:  # it is free by now
                break
            holder = holder.waits._holder
        assert isinstance(holder, Job), "the loop waits for itself"
        return holder

    def release(self) -> None:
        """Give it back."""
        self._times -= 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Loop(asyncio.BaseEventLoop):
    """See above.

    Args:
        seed: of all that threads do.
        now: at which its clock begins.
    """

    def __init__(self, seed: int, now: float) -> None:
        self.rng, self.now = random.Random(seed), now
        self.slow = self.rng.choice(DELAY_S)
        """How long a job is put aside at most."""
        self.running: Job | None = None
        """Who runs; None: the loop."""
        self.jobs: set[Job] = set()
        self.before_switch: Callable[[], None] = lambda: None
        """Called in a job's thread before somebody else goes on."""
        self.after_flush: Callable[[object], None] = lambda _whose: None
        """Called in a job's thread when a `flush` has returned, with whose it was."""
        self.turns = 0
        self._lines: dict[Any, deque[Job]] = {}
        super().__init__()
        self._selector = _Clock(self)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Its own."""
        return self.now

    def delay(self) -> float:
        """Until a job goes on."""
        return self.rng.uniform(0.0, self.slow)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """In a thread. An executor that is given has one."""
        future = self.create_future()

        def done(found: Any, problem: BaseException | None) -> None:
            if executor is not None:
                line = self._lines[executor]
                line.popleft()
                if line:
                    line[0].go_on()
            if future.cancelled():
                return
            if problem is None:
                future.set_result(found)
            else:
                future.set_exception(problem)

        job = Job(self, lambda: func(*args), done)
        self.jobs.add(job)
        line = self._lines.setdefault(executor, deque()) if executor is not None else deque[Job]()
        line.append(job)
        if len(line) == 1:
            self.call_later(self.delay(), job.go_on)
        return future

    def lock(self) -> Lock:
        """In the place of `threading.Lock`."""
        return Lock(self, again=False)

    def rlock(self) -> Lock:
        """In the place of `threading.RLock`."""
        return Lock(self, again=True)

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """It has none."""

    def _process_events(self, _events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in another thread."""
