"""Which processes are meant, in which order they go, and what speaks against it."""

from __future__ import annotations

import pytest

from ops.drain_plan import against, by_process, choose, name_of, not_back, restart_order, running_beside
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import InvalidArgument
from pixiu.ids import EndpointID
from tools.cli.replicas import LEADING, ReplicaStatus
from tools.cli.status import ClusterStatus


def node(
    role: str, partition: int, replica: int, host: str = "10.0.0.1", state: NodeState = NodeState.RUNNING, pid: int = 0
) -> Node:
    return Node(role, partition, replica, state, host, 7000 + replica, 1, EndpointID(replica), 1, "", "", 0, pid)


GATEWAYS = [node("gateway", -1, 4), node("gateway", -1, 5, "10.0.0.2")]
BROKERS = [node("broker", 0, 1), node("broker", 0, 2, "10.0.0.2"), node("broker", 1, 3, "10.0.0.2")]
XIUS = [node("xiu", 0, 7), node("xiu", 0, 8, "10.0.0.2")]
VIEW = View(Layout(), (*BROKERS, *GATEWAYS, *XIUS))


def replica(of: Node, member: str, state: str, *in_sync: str) -> ReplicaStatus:
    return ReplicaStatus(of, state, member, "", 1, in_sync, 0, 0, 0, {}, "")


def stores(*in_sync: str) -> dict[int, ReplicaStatus]:
    """The first Xiu leads."""
    return {
        XIUS[0].endpoint: replica(XIUS[0], "a", LEADING, *in_sync),
        XIUS[1].endpoint: replica(XIUS[1], "b", "Following", *in_sync),
    }


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["broker/0/2"], ["broker/0/2"]),
        (["broker 0/2", "gateway 4"], ["gateway/4", "broker/0/2"]),
        (["10.0.0.1:7004", "gateway/4"], ["gateway/4"]),
        (["10.0.0.2"], ["gateway/5", "broker/0/2", "broker/1/3", "xiu/0/8"]),
    ],
)
def test_processes_are_named_by_role_address_or_machine_and_go_clients_first(words: list[str], names: list[str]) -> None:
    assert [name_of(node) for node in choose(VIEW, words)] == names


@pytest.mark.parametrize("word", ["broker/0/9", "broker", "10.0.0.3", "10.0.0.1:1", ""])
def test_a_name_of_nobody_is_refused_with_who_there_is(word: str) -> None:
    with pytest.raises(InvalidArgument, match=r"no process is .*there are broker/0/1 at 10.0.0.1:7001, "):
        choose(VIEW, ["gateway/4", word])


def test_a_restart_takes_stores_first_and_the_leader_of_a_partition_last() -> None:
    order = [name_of(node) for (node,) in restart_order(VIEW.nodes, stores("a", "b"))]
    assert order == ["xiu/0/8", "xiu/0/7", "broker/0/1", "broker/0/2", "broker/1/3", "gateway/4", "gateway/5"]


def test_the_last_of_a_partition_is_missed() -> None:
    assert against(VIEW, [BROKERS[0]], {}) == []
    assert against(VIEW, [BROKERS[2]], {}) == ["broker partition 1 would be without any Running process"]
    assert against(VIEW, BROKERS[:2], {}) == ["broker partition 0 would be without any Running process"]
    assert against(VIEW, GATEWAYS, {}) == ["gateway would be without any Running process"]


def test_one_that_is_not_running_takes_over_from_nobody() -> None:
    view = View(Layout(), (GATEWAYS[0], node("gateway", -1, 6, state=NodeState.INIT)))
    assert against(view, [GATEWAYS[0]], {}) == ["gateway would be without any Running process"]


def test_a_leader_goes_only_when_another_replica_is_in_sync() -> None:
    assert against(VIEW, [XIUS[0]], stores("a", "b")) == []
    assert against(VIEW, [XIUS[0]], stores("a")) == ["xiu partition 0 would be without a leader: no other replica is in sync"]
    assert against(VIEW, [XIUS[1]], stores("a")) == []


def test_a_process_is_back_when_as_many_run_as_before_and_nothing_is_wrong() -> None:
    one = [BROKERS[0]]
    before = running_beside(VIEW, one)
    assert [len(ran) for ran in before] == [2]
    less = View(Layout(), VIEW.nodes[1:])
    assert not_back(ClusterStatus("", less), one, before) == ["no successor of broker/0/1 is Running"]
    again = View(Layout(), (*less.nodes, node("broker", 0, 11)))
    assert not_back(ClusterStatus("", again), one, before) == []
    assert not_back(ClusterStatus("", again, problems=["a link"]), one, before) == ["a link"]


NODES = View(
    Layout(),
    tuple(
        node(role, partition, replica, pid=pid)
        for replica, (role, partition, pid) in enumerate(
            [("broker", 0, 47), ("broker", 0, 48), ("gateway", -1, 47), ("gateway", -1, 48), ("pi", 0, 49), ("pi", 0, 48)]
        )
    ),
)
"""Two nodes of several roles, and a Pi apart."""


def test_with_one_role_of_a_node_all_of_it_drains() -> None:
    assert [name_of(node) for node in choose(NODES, ["broker/0/0"])] == ["gateway/2", "broker/0/0"]
    assert [[name_of(node) for node in roles] for roles in by_process(choose(NODES, ["broker/0/1", "pi/0/4"]))] == [
        ["gateway/3", "broker/0/1", "pi/0/5"],
        ["pi/0/4"],
    ]
    assert against(NODES, choose(NODES, ["gateway/2", "gateway/3"]), {}) == [
        "broker partition 0 would be without any Running process",
        "gateway would be without any Running process",
    ]


def test_a_node_is_restarted_once_and_is_back_when_all_of_its_roles_are() -> None:
    plan = restart_order(NODES.nodes, {})
    assert [[name_of(node) for node in roles] for roles in plan] == [
        ["pi/0/4"],
        ["pi/0/5", "broker/0/1", "gateway/3"],
        ["broker/0/0", "gateway/2"],
    ]
    roles = plan[2]
    before = running_beside(NODES, roles)
    half = View(Layout(), (*NODES.nodes[1:2], *NODES.nodes[3:], node("gateway", -1, 9)))
    assert not_back(ClusterStatus("", half), roles, before) == ["no successor of broker/0/0 is Running"]
    whole = View(Layout(), (*half.nodes, node("broker", 0, 10)))
    assert not_back(ClusterStatus("", whole), roles, before) == []
