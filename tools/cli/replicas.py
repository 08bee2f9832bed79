"""Replicated partitions in `pixiu status`: leader, in-sync set, and position of each replica. Pure.

Source: docs/replication.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.markup import escape
from rich.table import Table

from pixiu.discovery.node import Node

LEADING = "Leading"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """State of a replica, as it reports it at /health."""

    node: Node
    state: str
    member: str
    leader: str
    """The MemberID of the leader in ZooKeeper's state, in hex."""
    epoch: int
    in_sync: tuple[str, ...]
    end: int
    committed: int
    applied: int
    lag: dict[str, int]
    """For a leader: member → number of entries that it has not acknowledged."""
    degraded: str
    may_not_lead: str = ""
    """The reason why it would not be promoted; empty: it leads, or may."""
    no_space: str = ""
    """The reason why it has no space to lead; empty: it has."""
    left_out: dict[str, str] = field(default_factory=dict)
    """For a leader: member → reason why it is not in sync."""

    def json(self) -> dict[str, object]:
        """The state as JSON values."""
        return {
            "state": self.state, "member": self.member, "leader": self.leader, "epoch": self.epoch, "in_sync": list(self.in_sync),
            "end": self.end, "committed": self.committed, "applied": self.applied, "lag": self.lag, "degraded": self.degraded,
            "may_not_lead": self.may_not_lead, "no_space": self.no_space, "left_out": self.left_out,
        }  # fmt: skip


def read_replica(node: Node, said: dict[str, object]) -> ReplicaStatus | None:
    """Read the replica in a process's /health; None if there is none, or it cannot be read."""
    service = said.get("service")
    found: Any = service.get("replication") if isinstance(service, dict) else None
    if not isinstance(found, dict):
        return None
    try:
        return ReplicaStatus(
            node,
            str(found["state"]),
            str(found.get("member", "")),
            str(found.get("leader", "")),
            int(found.get("epoch", 0)),
            tuple(map(str, found.get("in_sync", ()))),
            int(found.get("end", 0)),
            int(found.get("committed", 0)),
            int(found.get("applied", 0)),
            {str(member): int(lag) for member, lag in dict(found.get("lag", {})).items()},
            str(found.get("degraded") or ""),
            str(found.get("may_not_lead") or ""),
            str(found.get("no_space") or ""),
            {str(member): str(why) for member, why in dict(found.get("left_out", {})).items()},
        )
    except (KeyError, TypeError, ValueError):
        return None


def replica_problems(replicas: Iterable[ReplicaStatus]) -> list[str]:
    """Describe the problems of replicated partitions."""
    problems: list[str] = []
    partitions: dict[tuple[str, int], list[ReplicaStatus]] = {}
    for replica in replicas:
        partitions.setdefault((replica.node.role, replica.node.partition), []).append(replica)
        name = f"{replica.node.role} {replica.node.partition}/{replica.node.replica}"
        if replica.degraded:
            problems.append(f"{name}: {replica.degraded}")
        if replica.no_space and replica.no_space != replica.degraded:
            problems.append(f"{name} lacks disk space to lead: {replica.no_space}")
    for (role, partition), found in sorted(partitions.items()):
        leaders = [replica for replica in found if replica.state == LEADING]
        if not leaders:
            problems.append(f"{role} partition {partition}: no leader; writes are refused{_who_may_lead(role, partition, found)}")
            continue
        leader = max(leaders, key=lambda replica: replica.epoch)
        out = [
            replica.member + (f" ({leader.left_out[replica.member]})" if replica.member in leader.left_out else "")
            for replica in found
            if replica.member not in leader.in_sync
        ]
        if out:
            problems.append(f"{role} partition {partition}: {len(out)} of {len(found)} replicas are not in sync: {', '.join(out)}")
    return problems


def _who_may_lead(role: str, partition: int, found: list[ReplicaStatus]) -> str:
    """For a partition that waits for missing replicas, describe how to end the wait; empty while one that may lead is running."""
    known = max(found, key=lambda replica: replica.epoch)
    if not known.in_sync or {replica.member for replica in found} & set(known.in_sync):
        return ""
    return (
        f". Only {', '.join(known.in_sync)} may lead, and none of them is running: start them on their data directories, or give "
        f"up the entries that only they have with `pixiu promote {role} {partition} MEMBER --force`"
    )


def replica_table(replicas: Iterable[ReplicaStatus]) -> Table | None:
    """Make a table of the partitions; None without any."""
    found = sorted(replicas, key=lambda replica: (replica.node.role, replica.node.partition, replica.node.replica))
    if not found:
        return None
    table = Table(box=None, pad_edge=False)
    right = ("partition", "replica", "epoch", "end", "committed", "applied", "lag")
    for name in (
        "role",
        "partition",
        "replica",
        "member",
        "state",
        "epoch",
        "in sync",
        "end",
        "committed",
        "applied",
        "lag",
        "may lead",
    ):
        table.add_column(name, justify="right" if name in right else "left")
    for replica in found:
        leads = [
            other
            for other in found
            if (other.node.role, other.node.partition) == (replica.node.role, replica.node.partition) and other.state == LEADING
        ]
        leader = max(leads, key=lambda other: other.epoch, default=None)
        lag = leader.lag.get(replica.member) if leader is not None else None
        table.add_row(
            replica.node.role,
            str(replica.node.partition),
            str(replica.node.replica),
            escape(replica.member),
            escape(replica.state),
            str(replica.epoch),
            "yes" if replica.member in (leader or replica).in_sync else "no",
            f"{replica.end:,}",
            f"{replica.committed:,}",
            f"{replica.applied:,}",
            "" if lag is None else f"{lag:,}",
            escape(f"no: {replica.may_not_lead}") if replica.may_not_lead else "yes",
        )
    return table
