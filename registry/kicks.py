"""Requests to end sessions: an operator's tool puts one into the registry, gateways and proxies end those that they have.

    tool                                         gateways and proxies
      │ creates ROOT/kick/NUMBER, ephemeral        │ watch ROOT/kick
      ├──────────────── registry ─────────────────▶│ end these sessions
      │ removes it after a while

Who may write the registry may ask. Who is not denied by a rule may log in again.

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
"""Requests at one time that a process looks at."""
MAX_REQUEST: Final = 4096
"""Bytes of a request that are read."""


def directory(root: str) -> str:
    """Where the requests are."""
    return f"{root}/kick"


class KickRequests:
    """A process's ear for requests.

    Args:
        zookeeper: the process's session.
        root: of the cluster.
        kick: ends the sessions that a request is about; called in the event loop.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, kick: Callable[[str], object]) -> None:
        self._zookeeper, self._directory, self._kick = zookeeper, directory(root), kick
        self._done: set[str] = set()
        self._restorer = Restorer(zookeeper, self._look, "the watch for requests to end sessions", MAX_BACKOFF_S)

    def start(self) -> None:
        """Listen from now on, through losses of the session."""
        self._restorer.start()

    async def stop(self) -> None:
        """Listen no more."""
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
    """Ask all processes to end sessions, and leave the request there for `lasts_s` seconds.

    Raises `RegistryUnavailable`.
    """
    path = await zookeeper.create(f"{directory(root)}/r", request.encode(), ephemeral=True, sequence=True, make_parents=True)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        with contextlib.suppress(Exception):  # it goes with the session
            await zookeeper.delete(path)
