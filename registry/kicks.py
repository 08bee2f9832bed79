"""Requests to end sessions: an operator's tool puts one into the registry, and gateways and proxies end their matching sessions.

    tool                                         gateways and proxies
      │ creates ROOT/kick/NUMBER, ephemeral        │ watch ROOT/kick
      ├──────────────── registry ─────────────────▶│ end these sessions
      │ removes it after a while

Everybody who may write the registry may ask. Users may log in again unless a rule denies it.

Source: docs/security.md, "Ending sessions".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from pixiu.discovery.zookeeper import NoNode, ZooKeeper
from registry.restorer import Restorer

MAX_BACKOFF_S: Final = 5.0
MAX_REQUESTS: Final = 1000
"""Maximum number of requests that a process looks at."""
MAX_REQUEST: Final = 4096
"""Maximum size of a request, bytes."""


def directory(root: str) -> str:
    """Path of the requests."""
    return f"{root}/kick"


class KickRequests:
    """Watches for requests to end sessions.

    Args:
        zookeeper: the process's session.
        root: the cluster's root.
        kick: ends the sessions that a request names; called in the event loop.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, kick: Callable[[str], object]) -> None:
        self._zookeeper, self._directory, self._kick = zookeeper, directory(root), kick
        self._done: set[str] = set()
        self._restorer = Restorer(zookeeper, self._look, "the watch for requests to end sessions", MAX_BACKOFF_S)

    def start(self) -> None:
        """Start watching; survives losses of the session."""
        self._restorer.start()

    async def stop(self) -> None:
        """Stop watching."""
        await self._restorer.stop()

    async def _look(self) -> None:
        await self._zookeeper.ensure_path(self._directory)
        names = (await self._zookeeper.children(self._directory, self._restorer.on_watch))[:MAX_REQUESTS]
        self._done &= set(names)
        for name in names:
            if name not in self._done:
                with contextlib.suppress(NoNode):
                    data, _ = await self._zookeeper.get(f"{self._directory}/{name}")
                    self._kick(data[:MAX_REQUEST].decode(errors="replace"))
                self._done.add(name)


async def request_kick(zookeeper: ZooKeeper, root: str, request: str, lasts_s: float) -> None:
    """Ask all processes to end sessions. The request stays in the registry for `lasts_s` seconds.

    Raises `RegistryUnavailable`.
    """
    path = await zookeeper.create(f"{directory(root)}/r", request.encode(), ephemeral=True, sequence=True, make_parents=True)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        with contextlib.suppress(Exception):  # it goes with the session
            await zookeeper.delete(path)
