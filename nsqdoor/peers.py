"""The listeners of a cluster, as the registry has them: an ephemeral node for each.

    ROOT/nsq/listeners/n…    JSON: address, ports, version

Source: docs/nsq.md, "Finding listeners".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Final

from cluster.core import log
from pixiu.discovery.operations import NodeExists, NoNode, WatchEvent
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import PixiuError
from registry.restorer import Restorer

FOLDER: Final = "nsq/listeners"
POLL_S: Final = 10.0
MAX_PEERS: Final = 1_000
"""Listeners that are named. Policy: the oldest are."""
PEERS_UNREADABLE: Final = "nsq_listeners_unreadable"


@dataclass(frozen=True)
class Peer:
    """A listener."""

    broadcast_address: str
    hostname: str
    tcp_port: int
    http_port: int
    version: str
    remote_address: str = ""

    def json(self) -> bytes:
        """Encode it."""
        return json.dumps(asdict(self)).encode()


def peer_of(data: bytes) -> Peer | None:
    """Decode a listener; None: it is none."""
    try:
        found = json.loads(data)
        peer = Peer(**{name: found[name] for name in Peer.__annotations__})
    except (ValueError, TypeError, KeyError):
        return None
    texts = (peer.broadcast_address, peer.hostname, peer.version, peer.remote_address)
    ports = (peer.tcp_port, peer.http_port)
    return peer if all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in ports) else None


class Peers:
    """Registers this listener, and knows the others.

    Args:
        zookeeper: a session; None: there is no registry, so this listener knows itself alone.
        root: the cluster's root.
        own: this listener.
    """

    def __init__(self, zookeeper: ZooKeeper | None, root: str, own: Peer) -> None:
        self._zookeeper, self._folder, self.own = zookeeper, f"{root}/{FOLDER}", own
        self._path = ""
        self._restorer = Restorer(zookeeper, self._restore, "nsq listener") if zookeeper is not None else None
        self._task: asyncio.Task[None] | None = None
        self.known: tuple[Peer, ...] = (own,)

    async def start(self) -> None:
        """Register, and follow the others."""
        self.known = (self.own,)
        if self._restorer is not None:
            self._restorer.start()
            self._task = asyncio.create_task(self._follow(), name="nsq-peers")

    async def leave(self) -> None:
        """Take this listener out of the registry."""
        if self._restorer is None or self._zookeeper is None:
            return
        await self._restorer.stop()
        if self._path:
            with contextlib.suppress(PixiuError):
                await self._zookeeper.delete(self._path)

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _restore(self) -> None:
        assert self._zookeeper is not None
        assert self._restorer is not None
        if self._path and await self._zookeeper.exists(self._path, watch=self._restorer.on_watch) is not None:
            return
        with contextlib.suppress(NodeExists):
            await self._zookeeper.ensure_path(self._folder)
        self._path = await self._zookeeper.create(f"{self._folder}/n", self.own.json(), ephemeral=True, sequence=True)
        await self._zookeeper.exists(self._path, watch=self._restorer.on_watch)

    async def _follow(self) -> None:
        changed = asyncio.Event()

        def on_change(_event: WatchEvent) -> None:
            changed.set()

        while True:
            changed.clear()
            try:
                await self._look(on_change)
            except PixiuError as error:
                if log.once_per(60, PEERS_UNREADABLE):
                    log.get_logger().warning(PEERS_UNREADABLE, error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await changed.wait()

    async def _look(self, on_change: object) -> None:
        assert self._zookeeper is not None
        found: list[Peer] = []
        try:
            names = await self._zookeeper.children(self._folder, watch=on_change)  # type: ignore[arg-type]
        except NoNode:
            names = []
        for name in names[:MAX_PEERS]:
            with contextlib.suppress(NoNode):
                peer = peer_of((await self._zookeeper.get(f"{self._folder}/{name}"))[0])
                if peer is not None:
                    found.append(peer)
        # While the registry is away, or this one is not in it yet, this one serves all the same.
        self.known = tuple(found) if self.own in found else (*found, self.own)
