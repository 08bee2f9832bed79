"""Selects the processes that an operator names, orders their drains, and lists the objections. Pure.

    broker/0/3, gateway/4, 10.0.0.7:7100, 10.0.0.7   ──choose──▶   nodes   ──against──▶   what would be left without

Source: docs/operations.md, "Draining and adding processes".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.paths import DRAIN_ORDER, START_ORDER
from pixiu.discovery.view import View
from pixiu.errors import InvalidArgument
from tools.cli.replicas import LEADING, ReplicaStatus
from tools.cli.status import ClusterStatus

MAX_SHOWN: Final = 40


def name_of(node: Node) -> str:
    """Name a process as on the command line: gateway/4, broker/0/3."""
    return f"{node.role}/{node.replica}" if node.partition < 0 else f"{node.role}/{node.partition}/{node.replica}"


def choose(view: View, words: Sequence[str]) -> list[Node]:
    """Return the processes that words name: ROLE/REPLICA, ROLE/PARTITION/REPLICA (as `pixiu status` shows them), HOST:PORT, or
    HOST for all of a machine, with all roles of each. They are in draining order: clients' side first, stores last.

    Raises `InvalidArgument` that names the word and the existing processes.

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
        drained = {node.process for node in meant}
        found.update({node.endpoint: node for node in view.nodes if node.process in drained})
    return sorted(found.values(), key=lambda node: (DRAIN_ORDER.index(node.role), node.partition, node.replica))


def by_process(nodes: Iterable[Node]) -> list[list[Node]]:
    """Group roles by their process; processes and roles keep their order."""
    found: dict[tuple[str, int, int], list[Node]] = {}
    for node in nodes:
        found.setdefault(node.process, []).append(node)
    return list(found.values())


def restart_order(nodes: Iterable[Node], replicas: Mapping[int, ReplicaStatus]) -> list[list[Node]]:
    """Order a restart of processes, each with its roles: stores first, as at a start, and the leader of each partition last, so
    that it hands over once.

    replicas: endpoint → the state of a store's replica.

    """

    def key(node: Node) -> tuple[int, int, bool, int]:
        replica = replicas.get(node.endpoint)
        return START_ORDER.index(node.role), node.partition, replica is not None and replica.state == LEADING, node.replica

    return by_process(sorted(nodes, key=key))


def against(view: View, leaving: Sequence[Node], replicas: Mapping[int, ReplicaStatus]) -> list[str]:
    """List, in words, the partitions and roles that would be left without a process if these left at the same time; empty: no
    objection.

    replicas: endpoint → the state of a store's replica.

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


def running_beside(view: View, roles: Sequence[Node]) -> list[frozenset[int]]:
    """Return, for each role of a process, the endpoints of the Running ones of its role and partition, itself included."""
    return [
        frozenset(
            other.endpoint for other in view.of_role(node.role)
            if other.partition == node.partition and other.state is NodeState.RUNNING
        )
        for node in roles
    ]  # fmt: skip


def not_back(status: ClusterStatus, roles: Sequence[Node], before: Sequence[frozenset[int]]) -> list[str]:
    """Explain, in words, why a drained process, with its roles, does not count as restarted yet; empty: it does.

    before: `running_beside` of it when it was drained.
    """
    now = running_beside(status.view, roles)
    missing = [
        f"no successor of {name_of(node)} is Running"
        for node, ran, runs in zip(roles, before, now, strict=True)
        if len(runs) < len(ran)
    ]
    return [*missing, *status.problems]
