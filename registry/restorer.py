"""Restores something in the registry after every loss: a registration, a lease."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from pixiu.discovery.operations import SessionEvent, SessionState, WatchEvent
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import RegistryUnavailable
from pixiu.rpc.backoff import Backoff

FIRST_BACKOFF_S: Final = 0.2
"""First back-off while connected; doubles up to the owner's limit, with jitter."""
MAX_BACKOFF_S: Final = 5.0

_log = logging.getLogger("registry.restorer")


class Restorer:
    """Calls `restore` whenever the session or a watched node changed, and retries while that fails.

    Args:
        zookeeper: the process's session.
        restore: checks the node, puts it there, and watches it with `on_watch`. Every error is retried: a node that stays gone for
            ever would be worse.
        what: names it in the log.
        max_backoff_s: the longest wait between attempts, seconds.
    """

    def __init__(
        self, zookeeper: ZooKeeper, restore: Callable[[], Awaitable[None]], what: str, max_backoff_s: float = MAX_BACKOFF_S
    ) -> None:
        self._zookeeper, self._restore = zookeeper, restore
        self._what = what
        self._backoff = Backoff(FIRST_BACKOFF_S, max_backoff_s, random.random)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start restoring, at once and after every change of the session."""
        self._zookeeper.add_listener(self._on_session)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self.wake()

    def pause(self) -> None:
        """Ignore changes of the session until the next `start`."""
        self._zookeeper.remove_listener(self._on_session)

    async def stop(self) -> None:
        """Stop restoring, also an attempt that is under way."""
        self.pause()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def wake(self) -> None:
        """Check the node now."""
        self._wake.set()

    def on_watch(self, _event: WatchEvent) -> None:
        """Handle a change of a watched node."""
        self._wake.set()

    def _on_session(self, event: SessionEvent) -> None:
        if event.state is SessionState.CONNECTED:
            self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._restore()
                self._backoff.reset()
            except Exception as error:
                expected = isinstance(error, RegistryUnavailable)
                _log.log(logging.DEBUG if expected else logging.WARNING, "%s is not there again yet: %r", self._what, error)
                if expected and not self._zookeeper.connected:
                    continue  # the next connection wakes us
                await asyncio.sleep(self._backoff.next_s())
                self._wake.set()
