"""`pixiu repair`: what is said to differ, and when all is well."""

from __future__ import annotations

import io

from rich.console import Console

from ops.repair.repair import Checked, absent, table
from pixiu.discovery.node import Node, NodeState
from pixiu.ids import EndpointID
from tools.cli.replicas import ReplicaStatus


def replica(number: int) -> Checked:
    return Checked("xiu", 0, number, f"{number:016x}", checked=7)


def test_what_is_left_or_could_not_be_asked_is_not_well_and_is_shown() -> None:
    left, silent = replica(0), replica(1)
    left.left, silent.text = 1, "does not answer"
    assert not left.well
    assert not silent.well
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table([left, silent]))
    shown = console.export_text()
    assert "does not answer" in shown
    assert "0000000000000001" in shown


def status(member: str, in_sync: tuple[str, ...], leader: str = "a") -> ReplicaStatus:
    node = Node("xiu", 3, 0, NodeState.RUNNING, "127.0.0.1", 7000, 7001, EndpointID(1), 1, "", "", 0)
    return ReplicaStatus(node, "Leading", member, leader, 1, in_sync, 0, 0, 0, {}, "")


def test_a_member_in_sync_that_is_not_registered_is_named() -> None:
    assert absent([status("a", ("a", "b")), status("b", ("a", "b"))]) == []
    assert absent([status("b", ("b", "c"))]) == [], "what a follower remembers is not asked"
    (found,) = absent([status("a", ("a", "b", "c")), status("c", ())])
    assert (found.role, found.partition, found.member, found.well) == ("xiu", 3, "b", False)
