"""Changes that an operator asks of the layout: their notation on a command line, the allowed ones, their effect. Pure.

    proxy=2 broker=4x3   ──parse──▶   role → partitions, replicas   ──changed_layout──▶   the new layout

Source: docs/operations.md, "Several machines".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.view import MAX_REPLICAS, Layout, RoleLayout
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.placement.partition import MAX_PARTITIONS, is_partition_count

_WANTED: Final = re.compile(r"([a-z]+)=(?:([0-9]{1,6})x)?([0-9]{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Change:
    """A role before and after."""

    role: str
    before: RoleLayout | None
    """None: it is new."""
    after: RoleLayout

    def __str__(self) -> str:
        """Describe the change: `broker: 2 partitions × 3 replicas (new)`."""
        now = role_text(self.role, self.after)
        return f"{self.role}: {now} (new)" if self.before is None else f"{self.role}: {role_text(self.role, self.before)} → {now}"


def role_text(role: str, layout: RoleLayout) -> str:
    """Describe a role's layout in words."""
    replicas = f"{layout.replicas} replica{'' if layout.replicas == 1 else 's'}"
    if role in paths.UNPARTITIONED_ROLES:
        return f"{layout.replicas} process{'' if layout.replicas == 1 else 'es'}"
    return f"{layout.n} {'group' if role in paths.GROUPED_ROLES else 'partition'}{'' if layout.n == 1 else 's'} × {replicas}"


def check_role_layout(role: str, wanted: RoleLayout) -> None:
    """Check the layout of a new role. Raises `InvalidArgument`."""
    if role not in paths.ROLES:
        raise InvalidArgument(f"role {role!r} is unknown; one of {', '.join(paths.ROLES)}")
    if role in paths.GROUPED_ROLES:
        if not 1 <= wanted.n <= MAX_PARTITIONS:
            raise InvalidArgument(f"{role} cannot have {wanted.n} groups; 1 to {MAX_PARTITIONS} are allowed")
    elif not is_partition_count(wanted.n) or (role in paths.UNPARTITIONED_ROLES and wanted.n != 1):
        allowed = "1" if role in paths.UNPARTITIONED_ROLES else f"a power of two up to {MAX_PARTITIONS}"
        raise InvalidArgument(f"{role} cannot have {wanted.n} partitions; {allowed} is allowed")
    if wanted.next != wanted.n:
        raise InvalidArgument(f"{role}: next is {wanted.next}; a new layout has no doubling under way, so it must be {wanted.n}")
    if not 0 <= wanted.replicas <= MAX_REPLICAS:
        raise InvalidArgument(f"{wanted.replicas} replicas of {role}: 0 to {MAX_REPLICAS} are allowed")


def parse_wanted(words: Sequence[str]) -> dict[str, RoleLayout]:
    """Read `ROLE=PARTITIONSxREPLICAS`, and `ROLE=PROCESSES` of roles without partitions.

    Raises `InvalidArgument` that names the word and shows the notation.

    Source: docs/operations.md.
    """
    found: dict[str, RoleLayout] = {}
    for word in words:
        match = _WANTED.fullmatch(word)
        if match is None:
            raise InvalidArgument(
                f"{word!r} is not the layout of a role: write ROLE=PARTITIONSxREPLICAS, such as broker=2x3, or proxy=2, gateway=2"
            )
        role, partitions, replicas = match[1], match[2], int(match[3])
        if role in paths.UNPARTITIONED_ROLES and partitions is not None:
            raise InvalidArgument(f"{word}: {role} has no partitions: write {role}={replicas}")
        if role in paths.PARTITIONED_ROLES and partitions is None:
            what = "groups" if role in paths.GROUPED_ROLES else "partitions"
            raise InvalidArgument(f"{word}: {role} has {what}: write {role}={what.upper()}x{replicas}, such as {role}=1x{replicas}")
        n = int(partitions or 1)
        check_role_layout(role, RoleLayout(n, n, replicas))
        if replicas < 1:
            raise InvalidArgument(f"{word}: a role needs at least one replica")
        if role in found:
            raise InvalidArgument(f"{word}: {role} is given twice")
        found[role] = RoleLayout(n, n, replicas)
    if not found:
        raise InvalidArgument("no role is given: write ROLE=PARTITIONSxREPLICAS, such as broker=2x3, or proxy=2, gateway=2")
    return found


def changed_layout(layout: Layout, wanted: Mapping[str, RoleLayout]) -> Layout:
    """Return the layout with new roles added, with new numbers of replicas for existing ones, and with further groups; the version
    stays.

    Raises `ConfigurationError` when a role has another number of partitions (fewer groups), or a doubling is under way.

    Source: docs/operations.md.
    """
    roles = dict(layout.roles)
    for role, asked in wanted.items():
        there = roles.get(role)
        if there is None:
            roles[role] = asked
            continue
        if there.next != there.n:
            raise ConfigurationError(
                f"{role} is being doubled from {there.n} to {there.next} partitions: wait until that has ended (`pixiu status`)"
            )
        if role in paths.GROUPED_ROLES:
            roles[role] = more_groups(role, there, asked)
            continue
        if asked.n != there.n:
            raise ConfigurationError(
                f"{role} has {there.n} partition(s), not {asked.n}: `pixiu double {role}` doubles them while the cluster runs; "
                f"nothing else changes their number. For other replicas write {role}={there.n}x{asked.replicas}"
            )
        roles[role] = replace(there, replicas=asked.replicas)
    return replace(layout, roles=roles)


def check_doubled(role: str) -> None:
    """Check that a role grows by doubling. Raises `InvalidArgument` that says how it grows otherwise."""
    if role in paths.GROUPED_ROLES:
        raise InvalidArgument(
            f"{role} is never doubled: it grows by further groups. `pixiu layout set {role}=GROUPSxREPLICAS` adds them, with more "
            "groups than there are"
        )
    if role not in paths.DOUBLED_ROLES:
        raise InvalidArgument(f"{role!r} has no partitions; these have: {', '.join(paths.DOUBLED_ROLES)}")


def more_groups(role: str, there: RoleLayout, asked: RoleLayout) -> RoleLayout:
    """Return the layout of a role with groups that has further ones. Raises `ConfigurationError` when there would be fewer."""
    if asked.n < there.n:
        raise ConfigurationError(
            f"{role} has {there.n} groups, and a group is never taken away, because it holds parts of topics: "
            f"write {role}={there.n}x{asked.replicas}"
        )
    return replace(there, n=asked.n, next=asked.n, replicas=asked.replicas)


def changes(before: Layout, after: Layout) -> list[Change]:
    """Return the roles that differ, in the order of `ROLES`."""
    return [
        Change(role, before.roles.get(role), after.roles[role])
        for role in paths.ROLES
        if role in after.roles and after.roles[role] != before.roles.get(role)
    ]
