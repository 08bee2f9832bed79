"""Passes revocations on to all gateways, by the registry.

Source: docs/security.md, "Revoking subscriptions".
"""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.access.revocations import Revocation
from cluster.trust.audit import Audit
from cluster.trust.identity import Identity
from gateway.clients.revoking import note_revocation
from gateway.http.answers import busy
from pixiu.discovery import paths
from pixiu.discovery.zookeeper import ZooKeeper
from registry.mailbox import posted

POSTED_S: Final = 3.0
"""Time that a request stays, seconds: a gateway whose session breaks sees it when it reads the registry again."""
MAX_POSTED: Final = 100
"""Requests of this gateway that are there at one time."""


class Revoker:
    """Posts revocations."""

    def __init__(self, zookeeper: ZooKeeper, root: str, audit: Audit) -> None:
        self._zookeeper, self._path, self._audit = zookeeper, f"{paths.revocations(root)}/r", audit
        self._posted: set[asyncio.Task[None]] = set()

    async def revoke(self, revocation: Revocation, by: Identity) -> None:
        """Post a revocation; returns when all gateways are notified of it. Raises `RegistryUnavailable`, `Refused`."""
        if len(self._posted) >= MAX_POSTED:
            raise busy("too many revocations at once")
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._post(revocation.text(), made), name="revocation")
        self._posted.add(task)
        task.add_done_callback(self._posted.discard)
        await made
        note_revocation(self._audit, by, revocation)

    async def close(self) -> None:
        """Take the requests away."""
        for task in self._posted:
            task.cancel()
        await asyncio.gather(*self._posted, return_exceptions=True)

    async def _post(self, text: str, made: asyncio.Future[None]) -> None:
        try:
            async with posted(self._zookeeper, self._path, text, sequence=True):
                made.set_result(None)
                await asyncio.sleep(POSTED_S)
        except Exception as error:
            if not made.done():
                made.set_exception(error)
