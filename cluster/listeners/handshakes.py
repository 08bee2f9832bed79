"""Counts the TLS handshakes at a gRPC listener that failed: a wrong certificate, none, no TLS at all.

gRPC does not report a failed handshake (grpc/grpc#38665; metrics of them are planned, grpc/proposal A118). Its signs are:

    a handshake begins        it asks which certificate to show
    connections that live     channelz lists them
    a call                    an interceptor sees the caller

A handshake that began, is not among the live connections when its time is over, and had no call before it went, has failed. gRPC
does not reveal its origin. The count lags while many connect; it is too high by one if a caller's port is reused between two looks.

Source: docs/security.md, "Handshakes that fail".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Final

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from cluster.trust.audit import Audit

LOOK_S: Final = 10.0
"""Interval between two looks at the connections."""
SETTLE_S: Final = 2.5
"""Time after which a handshake is over in any case: it has `cluster.listeners.server.HANDSHAKE_TIMEOUT_MS`."""
PAGE: Final = 500
MAX_LIVE: Final = 50_000
"""Maximum connections to list (3 µs each). Policy: with more at a listener nothing is counted as failed."""
MAX_CALLED: Final = 50_000
"""Maximum callers to note between two looks. Policy: as above, until the next look."""
HANDSHAKES_FAILED: Final = "handshakes_failed"


def servers() -> frozenset[int]:
    """Return the numbers of all gRPC servers in this process. channelz numbers servers when asked, in any order: ask before and
    after one is made."""
    found: set[int] = set()
    while True:
        page = json.loads(cygrpc.channelz_get_servers(max(found, default=-1) + 1))
        numbers = {int(server["ref"]["serverId"]) for server in page.get("server", [])}
        found |= numbers
        if page.get("end") or not numbers:
            return frozenset(found)


class Handshakes:
    """The handshakes at one gRPC listener of this process.

    Args:
        listener: its name in the audit log.
        settle_s: for tests.
    """

    def __init__(self, listener: str, audit: Audit, *, settle_s: float = SETTLE_S) -> None:
        self._listener, self._audit, self._settle_s = listener, audit, settle_s
        self._numbers = itertools.count(1)
        self.begun = 0
        """Connections that asked for the certificate, since the start."""
        self.failed = 0
        """Connections that failed."""
        self._came = 0
        """Connections that were seen alive, or called."""
        self._unseen = 0
        """Handshakes while there were too many connections to look at: they are not judged."""
        self._server = 0
        self._live: dict[int, str] = {}
        self._short: set[str] = set()
        """Callers that had called by the last look and were not listed."""
        self._called: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def begins(self) -> None:
        """Count a handshake. Called by gRPC, in its own threads."""
        self.begun = next(self._numbers)

    def called(self, peer: str) -> None:
        """Note a call on the connection of this peer, as gRPC names it."""
        if len(self._called) < MAX_CALLED:
            self._called.add(peer)

    @contextlib.contextmanager
    def watching(self, judges: bool = True) -> Iterator[None]:
        """Watch the one server that is made meanwhile. If there is none, or with judges=False, nothing counts as failed."""
        before = servers()
        yield
        made = servers() - before
        self._server = max(made) if judges and len(made) == 1 else 0

    def start(self) -> None:
        """Start looking at intervals."""
        if self._server:
            self._task = asyncio.get_running_loop().create_task(self._look_again())

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def look(self) -> None:
        """Judge the handshakes that have begun until now."""
        begun = self.begun
        await asyncio.sleep(self._settle_s)
        live = await asyncio.to_thread(self._list)
        called, self._called = self._called, set()
        if live is None or len(called) >= MAX_CALLED:
            self._unseen, self._live = begun - self._came - self.failed, live or {}
            return
        # A connection may have called before channelz lists it: it is counted once.
        new = sum(number not in self._live and peer not in self._short for number, peer in live.items())
        short = called - {*self._live.values(), *live.values()}
        self._came += new + len(short - self._short)
        self._live, self._short = live, short
        failed = begun - self._came - self._unseen
        if failed > self.failed:
            self._audit.write(HANDSHAKES_FAILED, listener=self._listener, count=failed - self.failed)
            self.failed = failed

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    def _list(self) -> dict[int, str] | None:
        """Return connection → peer, of all connections; None: too many."""
        found: dict[int, str] = {}
        while len(found) < MAX_LIVE:
            page = json.loads(cygrpc.channelz_get_server_sockets(self._server, max(found, default=-1) + 1, PAGE))
            refs = page.get("socketRef", [])
            # chttp2 ipv4:10.0.0.7:41000
            found |= {int(ref["socketId"]): str(ref.get("name", "")).partition(" ")[2] for ref in refs}
            if page.get("end") or not refs:
                return found
        return None
