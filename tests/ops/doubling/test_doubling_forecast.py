"""What a doubling would bring: where hot keys go, room on machines, the pause; and processes that are too old for one."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from ops.doubling import reading as doubling_reading
from ops.doubling.forecast import (
    DISK_LEAST_BYTES,
    MEMORY_LEAST_BYTES,
    Load,
    Plan,
    Replica,
    forecast,
    load_warnings,
    machines,
    pause,
    replica_warnings,
    room_problems,
)
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID

GIB = 1 << 30
NODE = Node(
    "pi", 0, 3, NodeState.RUNNING, "10.0.0.5", 7000, 7001, EndpointID(5), 1, "0.1.0", "", 1, protocol_min=1, protocol_max=2
)  # fmt: skip


def test_keys_that_are_not_hot_divide_evenly_and_a_hot_one_goes_where_its_number_says() -> None:
    (stays, goes) = forecast(2, {0: Load(100.0, [(8, 40.0), (12, 20.0)]), 1: Load(100.0, [(3, 60.0), (5, 10.0)])})
    assert (stays.stays_per_s, stays.goes_per_s) == (80.0, 20.0), "8 and 12 leave 0 when divided by 4"
    assert (goes.stays_per_s, goes.goes_per_s) == (25.0, 75.0), "3 is partition 3's, 5 stays"
    assert (stays.child, goes.child, goes.hottest, goes.hottest_per_s) == (2, 3, 3, 60.0)
    assert goes.lighter
    assert not stays.lighter


def test_keys_of_another_partition_are_not_counted_and_a_page_that_knows_less_than_its_keys_is_not_believed() -> None:
    (one,) = forecast(2, {1: Load(5.0, [(2, 90.0), (3, 10.0)])})
    assert (one.per_s, one.stays_per_s, one.goes_per_s) == (10.0, 0.0, 10.0)


def test_one_hot_user_will_not_get_lighter_and_the_plan_says_so() -> None:
    found = forecast(1, {0: Load(1000.0, [(7, 900.0)])})
    said = load_warnings("pi", found)
    assert said == [
        "partition 0 will not get lighter: user 7 alone is 90% of it, and one user is never divided; "
        "95% of its load stays in one partition",
        "the busiest partition of pi has 1,000/s now and would have 950/s",
    ]
    assert Plan("pi", found).json()["load"] == [
        {
            "partition": 0, "child": 1, "per_s": 1000.0, "stays_per_s": 50.0, "goes_per_s": 950.0, "hottest": 7,
            "hottest_per_s": 900.0, "lighter": False,
        }
    ]  # fmt: skip


def test_hot_rooms_that_stay_together_are_named_too() -> None:
    found = forecast(1, {0: Load(100.0, [(room, 10.0) for room in range(2, 20, 2)])})
    assert "its hot rooms stay together" in load_warnings("broker", found)[0]


def test_an_even_load_gets_lighter_and_no_load_is_said_to_be_none() -> None:
    assert load_warnings("relay", forecast(1, {0: Load(100.0, [(1, 5.0), (2, 5.0)])})) == []
    (said,) = load_warnings("relay", forecast(1, {0: Load(0.2, [(1, 0.2)])}))
    assert "no load to speak of" in said


def test_where_messages_are_the_load_replicas_are_named_and_where_memberships_are_nothing_is() -> None:
    even = forecast(2, {0: Load(1000.0, [(2, 90.0)]), 1: Load(800.0)})
    (said,) = replica_warnings("broker", even, 5000, 3.0)
    assert said.startswith("messages are the load, 1,800/s, and not memberships, 5,000 with 3 changes/s: add replicas instead ")
    assert "`pixiu add-replica broker`" in said
    assert "not devices" in replica_warnings("relay", even, 5000, 3.0)[0]
    assert replica_warnings("broker", even, 5000, 2000.0) == [], "joins and leaves: every replica handles all of them"
    assert replica_warnings("broker", forecast(1, {0: Load(0.2)}), 5000, 0.0) == [], "no load to speak of"
    assert replica_warnings("broker", forecast(1, {0: Load(1000.0, [(2, 900.0)])}), 5000, 0.0) == [], "one room is one replica's"
    for role in ("router", "xiu", "pi"):  # each replica, or the leader alone, does all of its partition's work
        assert replica_warnings(role, even, 5000, 0.0) == []


async def test_the_plan_reads_messages_and_memberships_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[int] = Counter()

    async def fetch(host: str, port: int, path: str) -> tuple[int, bytes]:
        if path == "/hot":
            return 200, b'{"per_s": {"rooms": 100.0}, "rooms": [{"key": 2, "per_s": 20.0}]}'
        asked[port] += 1
        applied = 50 * asked[port]
        return 200, f"pixiu_broker_members 700\npixiu_broker_membership_applied_total {applied}\n".encode()

    monkeypatch.setattr(doubling_reading, "fetch", fetch)
    monkeypatch.setattr(doubling_reading, "BETWEEN_S", 0.5)
    replicas = [replace(NODE, role="broker", replica=at, http_port=at, endpoint=EndpointID(at)) for at in (1, 2)]
    plan = await doubling_reading.read_plan(View(Layout(1, {"broker": RoleLayout(1, 1, 2)}), tuple(replicas)), "broker", here=True)
    (said,) = plan.warnings
    found = re.search(r"load, 200/s, and not memberships, 700 with (\d+) changes/s", said)
    assert found is not None, said
    assert 50 < int(found[1]) <= 100, "each replica applies all of them"


def test_a_machine_wants_room_for_each_new_replica_that_does_not_run_yet() -> None:
    there = [
        Replica("a", 0, 4 * GIB, 3 * GIB, GIB, 2 * GIB),
        Replica("a", 1, 4 * GIB, GIB, None, 0),
        Replica("b", 0, None, None, GIB),
    ]
    a, b = machines(2, there, {2: 0, 3: 0})
    assert (a.memory_free_bytes, a.disk_free_bytes, a.replicas) == (4 * GIB, GIB, 2)
    assert (a.memory_wanted_bytes, a.disk_wanted_bytes) == (GIB + MEMORY_LEAST_BYTES, 2 * GIB + DISK_LEAST_BYTES)
    assert (b.memory_free_bytes, b.disk_wanted_bytes, b.replicas) == (None, 0, 1)
    (problem,) = room_problems([a, b])
    assert problem.startswith("a has 1,024 MiB of disk left, and 2 new replica(s) there want 2,304 MiB: ")
    a, b = machines(2, there, {2: 2, 3: 1})
    assert (a.replicas, b.replicas) == (0, 0), "they run already"


@pytest.mark.parametrize(("role", "expected"), [("broker", 0.0), ("xiu", 0.06), ("pi", 0.06)])
def test_the_pause_is_two_commits_and_what_lies_between_them(role: str, expected: float) -> None:
    assert pause(role, 0.01, 1000.0) == pytest.approx(expected)
    assert pause(role, None, 0.0) >= 0.0
