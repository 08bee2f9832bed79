"""Replicated partitions in `pixiu status`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pixiu.discovery.node import Node, NodeState
from pixiu.ids import EndpointID
from tools.cli.replicas import ReplicaStatus, read_replica, replica_problems, replica_table

A, B = "a" * 16, "b" * 16


def node(replica: int, partition: int = 0) -> Node:
    return Node("xiu", partition, replica, NodeState.RUNNING, "127.0.0.1", 7000, 7001, EndpointID(replica + 1), 1, "", "", 0)


def replica(number: int, member: str, state: str = "Following", *in_sync: str, lag: dict[str, int] | None = None) -> ReplicaStatus:
    found = {
        "state": state, "member": member, "leader": A, "epoch": 4, "in_sync": list(in_sync), "end": 1234, "committed": 1200,
        "applied": 1190, "lag": lag or {}, "degraded": None,
    }  # fmt: skip
    made = read_replica(node(number), {"service": {"replication": found}})
    assert made is not None
    return made


def test_a_leader_with_all_in_sync_has_no_problems_and_is_shown() -> None:
    found = [replica(0, A, "Leading", A, B, lag={B: 34}), replica(1, B, "Following", A, B)]
    assert replica_problems(found) == []
    out = io.StringIO()
    table = replica_table(found)
    assert table is not None
    Console(file=out, width=200).print(table)
    first, second = (line.split() for line in out.getvalue().splitlines()[1:])
    assert first == ["xiu", "0", "0", A, "Leading", "4", "yes", "1,234", "1,200", "1,190", "yes"]
    assert second[-2:] == ["34", "yes"]


def test_who_is_not_in_sync_is_named() -> None:
    found = [replica(0, A, "Leading", A), replica(1, B, "Repairing", A)]
    assert replica_problems(found) == [f"xiu partition 0: 1 of 2 replicas are not in sync: {B}"]


def test_why_a_replica_may_not_lead_is_shown() -> None:
    leader = {"state": "Leading", "member": A, "in_sync": [A], "left_out": {B: "its disk is full"}}
    full = {"state": "Following", "member": B, "may_not_lead": "it is not in sync", "no_space": "3 MiB are free"}
    found = [read_replica(node(number), {"service": {"replication": said}}) for number, said in enumerate((leader, full))]
    whole = [each for each in found if each is not None]
    assert replica_problems(whole) == [
        "xiu 0/1 lacks disk space to lead: 3 MiB are free",
        f"xiu partition 0: 1 of 2 replicas are not in sync: {B} (its disk is full)",
    ]
    out = io.StringIO()
    Console(file=out, width=200).print(replica_table(whole))
    assert out.getvalue().splitlines()[-1].rstrip().endswith("no: it is not in sync")
    assert whole[1].json()["no_space"] == "3 MiB are free"


def test_a_partition_without_a_leader_and_what_a_replica_says_are_problems() -> None:
    said = {"state": "Damaged", "member": A, "degraded": "the log is damaged"}
    damaged = read_replica(node(0), {"service": {"replication": said}})
    assert damaged is not None
    assert replica_problems([damaged]) == ["xiu 0/0: the log is damaged", "xiu partition 0: no leader; writes are refused"]


def test_a_partition_whose_replicas_in_sync_are_all_away_says_who_may_lead_and_what_ends_the_wait() -> None:
    [problem] = replica_problems([replica(0, "c" * 16, "Following", A, B)])
    assert problem.startswith(
        f"xiu partition 0: no leader; writes are refused. Only {A}, {B} may lead, and none of them is running"
    )
    assert "`pixiu promote xiu 0 MEMBER --force`" in problem
    assert replica_problems([replica(1, B, "Following", A, B)]) == ["xiu partition 0: no leader; writes are refused"]


@pytest.mark.parametrize(
    "said", [{}, {"service": 1}, {"service": {"replication": {}}}, {"service": {"replication": {"state": "x", "epoch": "y"}}}]
)
def test_a_page_without_a_replica_is_no_replica(said: dict[str, object]) -> None:
    assert read_replica(node(0), said) is None
    assert replica_table([]) is None
