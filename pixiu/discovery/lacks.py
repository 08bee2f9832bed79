"""Processes that the layout requires and the registry does not show Running. Pure.

Source: docs/operations.md, "Several machines".
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from pixiu.discovery.node import Node
from pixiu.discovery.paths import NO_PARTITION, ROLES, UNPARTITIONED_ROLES
from pixiu.discovery.view import View

NO_LAYOUT: Final = (
    "the registry holds no layout: is the root right, and was a cluster ever started there? `pixiu up` writes one, and "
    "`pixiu layout set` for several machines"
)


@dataclass(frozen=True, slots=True)
class Lack:
    """A role, or one of its partitions, with fewer Running processes than required."""

    role: str
    partition: int
    """`NO_PARTITION` if the role has none."""
    running: int
    wanted: int

    def __str__(self) -> str:
        """Describe it: `broker partition 1: 1 of 2 Running`."""
        where = self.role if self.partition < 0 else f"{self.role} partition {self.partition}"
        return f"{where}: {self.running} of {self.wanted} Running"

    def start(self, registry: str = "") -> str:
        """The command that starts one of the missing processes, in the cluster of this registry; empty: the file names it."""
        which = "" if self.partition < 0 else f" --set partition={self.partition}"
        where = f" --set registry={registry}" if registry else ""
        return f"python -m {self.role} --config FILE{where}{which}"


def lacks(view: View, without: Container[int] = (), roles: Iterable[str] = ROLES) -> list[Lack]:
    """Find every role or partition that lacks processes, in the order of `ROLES`; none without a layout.

    Args:
        without: endpoints of nodes that are not counted, because they do not answer.
        roles: the roles in the view.

    Source: docs/operations.md.
    """
    found: list[Lack] = []
    for role in roles:
        layout = view.layout.roles.get(role)
        if layout is None:
            continue
        for partition in [NO_PARTITION] if role in UNPARTITIONED_ROLES else range(layout.n):
            nodes = view.running(role) if partition < 0 else view.replicas(role, partition)
            lack = Lack(role, partition, sum(node.endpoint not in without for node in nodes), max(layout.replicas, 1))
            if lack.running < lack.wanted:
                found.append(lack)
    return found


def waits_for(view: View, own: Node, roles: Iterable[str] = ROLES) -> list[str]:
    """Describe what a process that is not Running yet may be waiting for: the layout, or members of roles and partitions.

    own: the process itself, which does not wait for itself. roles: the roles in the view.

    Source: docs/operations.md.
    """
    if not view.layout.version:
        return [NO_LAYOUT]
    found = []
    for lack in lacks(view, roles=roles):
        if (lack.role, lack.partition) != (own.role, own.partition):
            found.append(str(lack))
        elif lack.running + 1 < lack.wanted:
            found.append(f"{lack}, without this process")
    return found
