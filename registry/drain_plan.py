"""Which processes an operator means, in which order they are drained, and what speaks against it. Pure.

    broker/0/3, gateway/4, 10.0.0.7:7100, 10.0.0.7   ──choose──▶   nodes   ──against──▶   what would be left without

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pixiu.cli.replicas import LEADING, ReplicaStatus
from pixiu.cli.status import ClusterStatus
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from registry.supervisor import START_ORDER, STOP_ORDER

MAX_SHOWN: Final = 40


def name_of(node: Node) -> str:
    """A process as it is named on a command line: gateway/4, broker/0/3."""
    return f"{node.role}/{node.replica}" if node.partition < 0 else f"{node.role}/{node.partition}/{node.replica}"


def choose(view: View, words: Sequence[str]) -> list[Node]:
    """The processes that words name: ROLE/REPLICA, ROLE/PARTITION/REPLICA (as `pixiu status` has them), HOST:PORT, or HOST
    for all of a machine. In the order in which they are drained: clients' side first, stores last.

    Raises `InvalidArgument` that names the word and what there is.

    Source: docs/operations.md.
    """
    found: dict[int, Node] = {}
    for word in words:
        meant = [
            node for node in view.nodes if word.strip().replace(" ", "/") == name_of(node) or word in (node.address, node.host)
        ]
        if not meant:
            there = [f"{name_of(node)} at {node.address}" for node in view.nodes]
            more = ", …" if len(there) > MAX_SHOWN else ""
            raise InvalidArgument(
                f"no process is {word!r}: name ROLE/REPLICA, ROLE/PARTITION/REPLICA, HOST:PORT, or HOST for all of a machine; "
                f"there are {', '.join(there[:MAX_SHOWN]) or 'none'}{more}"
            )
        found.update({node.endpoint: node for node in meant})
    return sorted(found.values(), key=lambda node: (STOP_ORDER.index(node.role), node.partition, node.replica))


def restart_order(nodes: Iterable[Node], replicas: Mapping[int, ReplicaStatus]) -> list[Node]:
    """One after another: stores first, as at a start, and of each partition its leader last, so that it hands over once.

    replicas: endpoint → what the replica of a store says.
    """

    def key(node: Node) -> tuple[int, int, bool, int]:
        replica = replicas.get(node.endpoint)
        return START_ORDER.index(node.role), node.partition, replica is not None and replica.state == LEADING, node.replica

    return sorted(nodes, key=key)


def against(view: View, leaving: Sequence[Node], replicas: Mapping[int, ReplicaStatus]) -> list[str]:
    """What would be left without a process if these left at the same time, in words; empty: nothing speaks against it.

    replicas: endpoint → what the replica of a store says.

    Source: docs/operations.md.
    """
    gone = {node.endpoint for node in leaving}
    problems: list[str] = []
    for role, partition in sorted({(node.role, node.partition) for node in leaving}):
        where = role if partition < 0 else f"{role} partition {partition}"
        running = [node for node in view.of_role(role) if node.partition == partition and node.state is NodeState.RUNNING]
        left = [node for node in running if node.endpoint not in gone]
        if not left:
            problems.append(f"{where} would be without any Running process")
            continue
        leader = next((one for node in running if (one := replicas.get(node.endpoint)) and one.state == LEADING), None)
        if leader is None or leader.node.endpoint not in gone:
            continue
        in_sync = [one for node in left if (one := replicas.get(node.endpoint)) and one.member in leader.in_sync]
        if not in_sync:
            problems.append(f"{where} would be without a leader: no other replica is in sync")
    return problems


def running_beside(view: View, node: Node) -> frozenset[int]:
    """Endpoints of the Running processes of a process's role and partition: itself and those that do the same."""
    return frozenset(
        other.endpoint for other in view.of_role(node.role)
        if other.partition == node.partition and other.state is NodeState.RUNNING
    )  # fmt: skip


def not_back(status: ClusterStatus, node: Node, before: frozenset[int]) -> list[str]:
    """Why a process that was drained does not count as restarted yet, in words; empty: it does.

    before: `running_beside` it when it was drained.
    """
    now = running_beside(status.view, node)
    if len(now) < len(before):
        return [f"no successor of {name_of(node)} is Running", *status.problems]
    return list(status.problems)
