"""Changes the registered state of a process while it runs: back to Init, and Running again.

Source: docs/memberships.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.process.context import Membership
from pixiu.discovery.node import NodeState


class Restate:
    """Writes the newest state to the registry, one at a time; a process that drains stays Draining.

    Args:
        membership: the process's place in the registry.
        on_failed: called when the process is not registered at all.
    """

    def __init__(self, membership: Membership, on_failed: Callable[[BaseException], None]) -> None:
        self._membership = membership
        self._on_failed = on_failed
        self._wanted: NodeState | None = None
        self._task: asyncio.Task[None] | None = None

    def set(self, state: NodeState) -> None:
        """Register this state soon; returns at once."""
        self._wanted = state
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End a write that is under way; write nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            node = self._membership.node
            if node is None or node.state is NodeState.DRAINING:
                return
            try:
                await self._membership.set_state(wanted)
            except Exception as error:  # not registered: a process that nobody can find must not continue
                self._on_failed(error)
                return
