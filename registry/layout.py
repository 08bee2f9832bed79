"""Writes the cluster's layout, and the mirrors of its numbers of partitions in the same transaction.

Source: docs/registry.md; PiXiu §2.1 (`partition_num`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.operations import Check, Create, NoNode, Operation, RegistryConflict, Set
from pixiu.discovery.view import MAX_REPLICAS, Layout, RoleLayout
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import ConfigurationError, InvalidArgument, Unavailable
from pixiu.placement.partition import MAX_PARTITIONS
from registry.layout_change import changed_layout, check_doubled, check_role_layout

MAX_TRIES: Final = 20
"""Number of tries of a write that conflicts with another writer's."""


async def read_layout(zookeeper: ZooKeeper, root: str) -> Layout | None:
    """Read the layout; None if there is none. Raises `MalformedData`, `RegistryUnavailable`."""
    found = await _read(zookeeper, paths.check_root(root))
    return found[0] if found else None


async def ensure_layout(zookeeper: ZooKeeper, root: str, desired: Mapping[str, RoleLayout]) -> Layout:
    """Create the layout, or add missing roles. Returns the resulting layout. Any number of processes may call this at once.

    The wanted replicas of an existing role stay as they are: `set_replicas` changes them.

    A role that was doubled since it was configured keeps its number: the configuration may name an earlier one. A role with groups
    gets those that are missing, and keeps those that were added since.

    Raises `ConfigurationError` when a role has another number of partitions, `InvalidArgument` when a wanted number is not
    allowed, `Unavailable` when others keep writing, `MalformedData`, `RegistryUnavailable`.

    Source: docs/registry.md.
    """
    for role, wanted in desired.items():
        check_role_layout(role, wanted)

    def change(layout: Layout) -> Layout:
        for role, wanted in desired.items():
            there = layout.roles.get(role)
            if role in paths.GROUPED_ROLES:
                continue
            if there is not None and there.n not in (wanted.n << doubled for doubled in range(len(there.ended) + 1)):
                raise ConfigurationError(
                    f"{role} has {there.n} partition(s) in the registry at {root}, but {wanted.n} are configured: set the "
                    f"number in the configuration to {there.n}; it grows by `pixiu double {role}` alone"
                )
        missing = {role: wanted for role, wanted in desired.items() if role not in layout.roles}
        for role in paths.GROUPED_ROLES:
            there = layout.roles.get(role)
            if there is not None and role in desired and desired[role].n > there.n:
                missing[role] = replace(there, n=desired[role].n, next=desired[role].n)
        return replace(layout, roles={**layout.roles, **missing}) if missing else layout

    return await _change(zookeeper, root, change)


async def set_layout(zookeeper: ZooKeeper, root: str, wanted: Mapping[str, RoleLayout]) -> tuple[Layout, Layout]:
    """Add roles, and set the wanted replicas of existing ones, all or none. Returns the layout before and after.

    Raises `ConfigurationError` when a role has another number of partitions or is being doubled, `InvalidArgument`,
    `Unavailable` when others keep writing, `MalformedData`, `RegistryUnavailable`.

    Source: docs/operations.md, "Several machines".
    """
    for role, one in wanted.items():
        check_role_layout(role, one)
    before = Layout()

    def change(layout: Layout) -> Layout:
        nonlocal before
        before = layout
        return changed_layout(layout, wanted)

    after = await _change(zookeeper, root, change)
    return before, after


async def set_replicas(zookeeper: ZooKeeper, root: str, role: str, replicas: int) -> Layout:
    """Set the wanted number of replicas: per partition, or in all for a role without partitions.

    Raises `InvalidArgument` when the layout has no such role or the number is not allowed, `Unavailable`, `RegistryUnavailable`.
    """
    if not 0 <= replicas <= MAX_REPLICAS:
        raise InvalidArgument(f"{replicas} replicas of {role}: 0 to {MAX_REPLICAS} are allowed")

    def change(layout: Layout) -> Layout:
        there = _role_of(layout, root, role)
        return replace(layout, roles={**layout.roles, role: replace(there, replicas=replicas)})

    return await _change(zookeeper, root, change)


async def change_replicas(zookeeper: ZooKeeper, root: str, role: str, by: int) -> Layout:
    """Change the wanted number of replicas by a difference. Returns the new layout.

    Raises `InvalidArgument` when the layout has no such role or the number is not allowed, `ConfigurationError` while the role is
    being doubled, `Unavailable`, `RegistryUnavailable`.

    Source: docs/operations.md, "Draining and adding processes".
    """

    def change(layout: Layout) -> Layout:
        there = _role_of(layout, root, role)
        replicas = there.replicas + by
        if not 1 <= replicas <= MAX_REPLICAS:
            raise InvalidArgument(f"{role} has {there.replicas} wanted replica(s); 1 to {MAX_REPLICAS} are allowed")
        return changed_layout(layout, {role: RoleLayout(there.n, there.n, replicas)})

    return await _change(zookeeper, root, change)


def _role_of(layout: Layout, root: str, role: str) -> RoleLayout:
    there = layout.roles.get(role)
    if there is None:
        raise InvalidArgument(f"the layout at {root} has no role {role!r}; it has {', '.join(sorted(layout.roles)) or 'none'}")
    return there


async def begin_doubling(zookeeper: ZooKeeper, root: str, role: str, doubling: str) -> Layout:
    """Name the next number of partitions, 2n, under a doubling's ID (16 hex digits). Returns the new layout. Does nothing if
    this doubling is under way or over already.

    Raises `InvalidArgument` when another one is under way or the role cannot grow, `Unavailable`, `RegistryUnavailable`.

    Source: docs/doubling.md.
    """

    def change(there: RoleLayout) -> RoleLayout:
        if there.next > there.n:
            raise InvalidArgument(
                f"doubling {there.doublings[-1] if there.doublings else '?'} of {role} is under way: end it first"
            )
        if 2 * there.n > MAX_PARTITIONS:
            raise InvalidArgument(f"{role} has {there.n} partitions, the most there can be")
        return replace(there, next=2 * there.n, doublings=(*there.doublings, doubling))

    return await _change_doubled(zookeeper, root, role, doubling, change, known=lambda there: doubling in there.doublings)


async def commit_doubling(zookeeper: ZooKeeper, root: str, role: str, doubling: str) -> Layout:
    """Make the next number of partitions the present one. Returns the new layout. Does nothing if that was done.

    Raises `InvalidArgument` when this doubling is not the one under way, `Unavailable`, `RegistryUnavailable`.
    """
    return await _change_doubled(
        zookeeper, root, role, doubling, lambda there: replace(there, n=there.next), known=lambda there: there.next == there.n
    )


async def abort_doubling(zookeeper: ZooKeeper, root: str, role: str, doubling: str, unless_changed: Check | None = None) -> Layout:
    """Take back the next number of partitions, and the doubling's ID. Returns the new layout. Does nothing if the doubling is
    unknown.

    unless_changed: a node that changes as soon as another tool continues the doubling: nothing is taken back then.

    Raises `RegistryConflict` in that case, `InvalidArgument` when the doubling is over, `Unavailable`, `RegistryUnavailable`.
    """

    def change(there: RoleLayout) -> RoleLayout:
        if there.next == there.n:
            raise InvalidArgument(f"doubling {doubling} of {role} is over: it cannot be taken back")
        return replace(there, next=there.n, doublings=there.doublings[:-1])

    also = [unless_changed] if unless_changed is not None else []
    return await _change_doubled(zookeeper, root, role, doubling, change, lambda there: doubling not in there.doublings, also)


async def _change_doubled(
    zookeeper: ZooKeeper,
    root: str,
    role: str,
    doubling: str,
    change: Callable[[RoleLayout], RoleLayout],
    known: Callable[[RoleLayout], bool],
    also: Sequence[Check] = (),
) -> Layout:
    """Change one role's layout unless `known` finds the change done."""
    check_doubled(role)

    def changed(layout: Layout) -> Layout:
        there = _role_of(layout, root, role)
        if known(there):
            return layout
        made = change(there)
        if doubling not in (*there.doublings[-1:], *made.doublings[-1:]):
            raise InvalidArgument(f"doubling {doubling} of {role} is not the one under way ({there.doublings[-1]})")
        return replace(layout, roles={**layout.roles, role: made})

    return await _change(zookeeper, root, changed, also)


async def _read(zookeeper: ZooKeeper, root: str) -> tuple[Layout, int] | None:
    """Read the layout and the version of its node."""
    try:
        data, stat = await zookeeper.get(paths.layout(root))
    except NoNode:
        return None
    return Layout.from_json(data), stat.version


async def _change(zookeeper: ZooKeeper, root: str, change: Callable[[Layout], Layout], also: Sequence[Check] = ()) -> Layout:
    """Read, change, write by compare-and-set; repeat after a conflict. A new layout gets the cluster's ID. also: checks that
    must hold at the write. Raises `RegistryConflict` when one does not."""
    paths.check_root(root)
    for _ in range(MAX_TRIES):
        found = await _read(zookeeper, root)
        layout, node_version = found or (Layout(cluster=secrets.token_hex(8)), -1)
        changed = change(layout)
        if found and changed == layout:
            return layout
        changed = replace(changed, version=layout.version + 1)
        data = changed.to_json()
        head: Operation = Set(paths.layout(root), data, node_version) if found else Create(paths.layout(root), data)
        try:
            await zookeeper.ensure_path(root)
            await zookeeper.transaction([*also, head, *await _mirrors(zookeeper, root, changed)])
            return changed
        except RegistryConflict:
            for one in also:
                await _check(zookeeper, one)
    raise Unavailable(f"the layout at {root} was changed by others {MAX_TRIES} times in a row; try again")


async def _check(zookeeper: ZooKeeper, wanted: Check) -> None:
    """Raise `RegistryConflict` when a node has another version."""
    stat = await zookeeper.exists(wanted.path)
    if stat is None or stat.version != wanted.version:
        raise RegistryConflict(f"{wanted.path} was changed by somebody else")


async def _mirrors(zookeeper: ZooKeeper, root: str, layout: Layout) -> list[Operation]:
    """Return the writes of `partition_num`, for every partitioned role of the layout."""
    operations: list[Operation] = []
    for role in paths.PARTITIONED_ROLES:
        if role not in layout.roles:
            continue
        path, data = paths.partition_num(root, role), b"%d" % layout.roles[role].n
        await zookeeper.ensure_path(paths.role_directory(root, role))
        if await zookeeper.access(root) is not None:  # else processes make the missing ones
            numbers = range(max(layout.roles[role].n, layout.roles[role].next))
            await asyncio.gather(*(zookeeper.ensure_path(paths.partition_directory(root, role, number)) for number in numbers))
        stat = await zookeeper.exists(path)
        operations.append(Create(path, data) if stat is None else Set(path, data, stat.version))
    return operations
