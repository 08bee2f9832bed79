"""What the layout wants and is not there, and what a process that starts says that it waits for."""

from __future__ import annotations

from pixiu.discovery.lacks import NO_LAYOUT, Lack, lacks, waits_for
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID

LAYOUT = Layout(1, {"router": RoleLayout(2, 2, 2), "proxy": RoleLayout(1, 1, 1)})


def node(role: str, partition: int, endpoint: int, state: NodeState = NodeState.RUNNING) -> Node:
    return Node(role, partition, endpoint, state, "127.0.0.1", 7000, 7001, EndpointID(endpoint), 1, "", "", 0)


def test_each_place_that_lacks_processes_is_named_with_the_command_that_starts_one() -> None:
    view = View(LAYOUT, (node("router", 0, 1), node("router", 0, 2), node("router", 1, 3), node("router", 1, 4, NodeState.INIT)))
    found = lacks(view)
    assert found == [Lack("proxy", -1, 0, 1), Lack("router", 1, 1, 2)]
    assert [str(lack) for lack in found] == ["proxy: 0 of 1 Running", "router partition 1: 1 of 2 Running"]
    assert [lack.start() for lack in found] == [
        "python -m proxy --config FILE",
        "python -m router --config FILE --set partition=1",
    ]
    assert found[0].start("zk://h:1/a") == "python -m proxy --config FILE --set registry=zk://h:1/a"
    assert Lack("router", 0, 1, 2) in lacks(view, without={2})
    assert lacks(View(Layout(), view.nodes)) == []


def test_a_process_waits_for_the_others_and_not_for_itself() -> None:
    own = node("router", 1, 4, NodeState.INIT)
    nodes = (node("router", 0, 1), node("router", 1, 3), own)
    assert waits_for(View(LAYOUT, nodes), own) == ["proxy: 0 of 1 Running", "router partition 0: 1 of 2 Running"]
    assert waits_for(View(LAYOUT, (own,)), own)[2] == "router partition 1: 0 of 2 Running, without this process"
    assert waits_for(View(Layout(), nodes), own) == [NO_LAYOUT]
