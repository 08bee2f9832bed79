"""The common shell of every role: its runners, its tasks, and link methods that refuse.

A role with several cores (a proxy: records, mail, notices) has a `Runner` for each in one `RoleShell`. A role's `Service`
extends `RoleShell`; one that takes nothing by links keeps its link methods.

Source: docs/architecture.md, "The contract".
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from cluster.core.runner import Runner
from cluster.links.api import Outcome, PeerState
from pixiu.ids import EndpointID

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")


class RoleShell:
    """Base of every role's `Service`: tasks whose failure ends the process, and link methods that refuse everything.

    Args:
        crash: ends the process with this error (`Context.crash`).
    """

    def __init__(self, crash: Callable[[BaseException], None]) -> None:
        self._crash = crash
        self._runners: list[Runner[Any, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, runner: Runner[EventT, EffectT]) -> Runner[EventT, EffectT]:
        """Add a core's runner: it is stopped with the shell."""
        self._runners.append(runner)
        return runner

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task; its failure ends the process."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def every(self, interval_s: float, work: Callable[[], Awaitable[None] | None]) -> None:
        """Repeat a function, `interval_s` seconds between the end of one run and the next; a failure ends the process."""

        async def loop() -> None:
            while True:
                await asyncio.sleep(interval_s)
                waiting = work()
                if waiting is not None:
                    await waiting

        self.spawn(loop())

    def stop_runners(self) -> None:
        """Stop all runners: no core takes more events."""
        for runner in self._runners:
            runner.stop()

    async def cancel_tasks(self) -> None:
        """Cancel the tasks of `spawn` and `every`, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    # Methods for links, of roles that nobody sends to by links.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Refuse records: none are expected."""
        return Outcome.MALFORMED

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Refuse control messages: none are expected."""
        return Outcome.MALFORMED

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Ignore outcomes: nothing was sent with a token."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Ignore peers' states."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Add nothing to heartbeats."""
        return b""


def totals(counters: object, prefix: str = "") -> Mapping[str, object]:
    """Return a dataclass of counters, or a mapping of them, as samples: {prefix}{name}_total."""
    if isinstance(counters, Mapping):
        return {f"{prefix}{name}_total": value for name, value in counters.items()}
    assert dataclasses.is_dataclass(counters)
    return {f"{prefix}{field.name}_total": getattr(counters, field.name) for field in dataclasses.fields(counters)}
