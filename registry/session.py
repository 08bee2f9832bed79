"""The registry for an operator's command: a session that ends with the command.

Source: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.view import View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument

CONNECT_TIMEOUT_S: Final = 5.0


@asynccontextmanager
async def registry_of(target: str) -> AsyncIterator[tuple[ZooKeeper, str]]:
    """Open a session with the registry of a target. Yields it with the cluster's root.

    Raises `InvalidArgument` when the target names proxies, `RegistryUnavailable`.

    Source: docs/operations.md.
    """
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: this command works on the registry; give zk://HOST:PORT/ROOT")
    check_reachable(target)
    address = parse_address(target)
    zookeeper = ZooKeeper(address, connect_timeout_s=CONNECT_TIMEOUT_S)
    await zookeeper.connect()
    try:
        yield zookeeper, address.root
    finally:
        await zookeeper.close()


async def read_view(zookeeper: ZooKeeper, root: str) -> View:
    """Read everything that is registered now. Raises `RegistryUnavailable`."""
    discovery = Discovery(zookeeper, root, lambda _view: None)
    try:
        await discovery.start()
        return discovery.view
    finally:
        await discovery.close()
