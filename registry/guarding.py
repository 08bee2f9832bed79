"""Guards a cluster's registry: gives every node its access list.

    guard ─▶ ROOT/access, the digests ─▶ every node below ROOT, repeatedly until no list was different ─▶ directories
          └▶ nodes above ROOT, and ZooKeeper's quotas, where the ZooKeeper is this cluster's alone

Once `ROOT/access` is there, every new node gets its list; the next walk finds nodes that were made just before. A process that has
logged in keeps working meanwhile. One that has not is shut out, so these are looked for first.

Source: docs/security.md, "The registry".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.access import LOGINS, OPERATOR, Access, directories
from pixiu.discovery.operations import NodeExists, NoNode
from pixiu.discovery.view import View
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, Unavailable
from registry.session import read_view

AT_ONCE: Final = 64
MAX_WALKS: Final = 10
WALK_AGAIN_S: Final = 1.0
"""Interval until the next walk: a process that has just found the registry open has made its node by then."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """Result of guarding a registry."""

    nodes: int
    """Nodes below the root."""
    changed: int
    """Nodes that had another list."""


def tops(root: str) -> list[str]:
    """Return the nodes outside a cluster that everybody owns in a new ZooKeeper: those above its root, and those of quotas."""
    names = root.split("/")[1:-1]
    above = ["/" + "/".join(names[:count]) for count in range(len(names) + 1)]
    return [*above, "/zookeeper", "/zookeeper/quota"]


async def guard(
    zookeeper: ZooKeeper, root: str, credentials: Mapping[str, tuple[str, ...]], *, force: bool = False, whole: bool = False
) -> Guarded:
    """Admit only these logins to a cluster's registry, each to its own nodes. In an open registry anybody may do so, in a
    guarded one an operator, for instance to change passwords.

    Args:
        force: continue although registered processes have not logged in; these are shut out.
        whole: the ZooKeeper is this cluster's alone, so the nodes above the root become the operator's, too.

    Raises `InvalidArgument` when there are such processes, or the session has no operator's login; `RegistryDenied`,
    `RegistryUnavailable`.

    Source: docs/security.md, "The registry".
    """
    paths.check_root(root)
    own = zookeeper.login.read().get(OPERATOR, ()) if zookeeper.login is not None else ()
    if set(own).isdisjoint(credentials[OPERATOR]):
        raise InvalidArgument(
            "include an operator's login in the file; otherwise nobody could change the registry's access lists again"
        )
    view = await read_view(zookeeper, root)
    strangers = [f"{node.role} at {node.address}" for node in view.nodes if not node.login]
    if strangers and not force:
        raise InvalidArgument(
            f"{len(strangers)} processes have not logged in, and would be shut out: {', '.join(strangers[:5])}; restart them with "
            "[cluster] registry_credentials_file first"
        )
    access = Access.of(credentials)
    await zookeeper.ensure_path(root)
    path, data = paths.access(root), access.to_json()
    try:
        await zookeeper.set(path, data)
    except NoNode:
        try:
            await zookeeper.create(path, data)
        except NodeExists:
            await zookeeper.set(path, data)
    nodes, changed = await _walk(zookeeper, root, access), 0
    counted = len(nodes)
    for walks in range(MAX_WALKS):
        differed = sum(nodes.values())
        changed += differed
        if not differed and walks:
            break
        if walks and view.nodes:
            await asyncio.sleep(WALK_AGAIN_S)
        nodes = await _walk(zookeeper, root, access)
        counted = len(nodes)
    else:
        raise Unavailable(
            f"nodes without the required access list keep appearing below {root}: find the process that has not logged in"
        )
    for path in tops(root) if whole else ():
        with contextlib.suppress(NoNode):
            changed, counted = changed + await zookeeper.set_acl(path, access, ""), counted + 1
    await make_directories(zookeeper, root, view)
    return Guarded(counted, changed)


async def make_directories(zookeeper: ZooKeeper, root: str, view: View | None = None) -> None:
    """Make the directories that processes may not make: of roles, leases and requests, and of the layout's partitions."""
    layout = (view or await read_view(zookeeper, root)).layout
    partitions = [
        paths.partition_directory(root, role, number)
        for role, found in layout.roles.items()
        if role in paths.PARTITIONED_ROLES
        for number in range(max(found.n, found.next))
    ]
    await asyncio.gather(*(zookeeper.ensure_path(f"{root}{path}") for path in directories()))
    await asyncio.gather(*map(zookeeper.ensure_path, partitions))


async def guard_first(zookeeper: ZooKeeper, root: str) -> None:
    """Guard a new cluster's registry if nothing is below its root yet and this command has the logins of all roles. Raises as
    `guard`."""
    login = zookeeper.login
    if login is not None and set(zookeeper.logged_in_as) == set(LOGINS) and await zookeeper.exists(root) is None:
        await guard(zookeeper, root, login.read())


async def _walk(zookeeper: ZooKeeper, root: str, access: Access) -> dict[str, bool]:
    """Give every node its list. Returns path → True if it had another one."""
    done: dict[str, bool] = {}
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(path: str) -> list[str]:
        try:
            async with slots:
                done[path] = await zookeeper.set_acl(path, access, path[len(root) :])
                return [f"{path}/{name}" for name in await zookeeper.children(path)]
        except NoNode:  # gone meanwhile
            done.pop(path, None)
            return []

    level = [root]
    while level:
        found = await asyncio.gather(*map(one, level))
        level = [path for below in found for path in below]
    return done
