"""The verdict of `pixiu status`: what is missing, who does not answer, and how it is shown."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.ids import EndpointID
from tools.cli import status
from tools.cli.doublings import doublings_of, phase_of, tool_of
from tools.cli.status import (
    ClusterStatus,
    ProcessStatus,
    age_text,
    ask_processes,
    builds,
    judge,
    missing_processes,
    prometheus_targets,
    read_pages,
    render,
    status_json,
)

TARGET = "zk://127.0.0.1:2181/pubsub"


def node(role: str, partition: int, replica: int, endpoint: int, state: NodeState = NodeState.RUNNING) -> Node:
    return Node(
        role,
        partition,
        replica,
        state,
        "127.0.0.1",
        7000 + endpoint,
        8000 + endpoint,
        EndpointID(endpoint),
        1,
        "0.1.0",
        "",
        1_000,
        endpoint + 89,
    )


def layout(**changes: RoleLayout) -> Layout:
    roles = {"broker": RoleLayout(2, 2, 2), "proxy": RoleLayout(1, 1, 1), "gateway": RoleLayout(1, 1, 1), **changes}
    return Layout(3, roles)


def whole() -> View:
    brokers = [node("broker", partition, replica, 10 + 2 * partition + replica) for partition in (0, 1) for replica in (0, 1)]
    return View(layout(), (*brokers, node("proxy", -1, 0, 20), node("gateway", -1, 0, 30)))


def without(view: View, endpoint: int) -> View:
    return View(view.layout, tuple(one for one in view.nodes if one.endpoint != endpoint))


def health(of: Node, **changes: object) -> dict[str, object]:
    return {"endpoint": f"{of.endpoint:016x}", "state": "Running", "registry_connected": True, "peers": {"dead": 0}, **changes}


def test_a_cluster_with_all_its_replicas_is_healthy() -> None:
    assert missing_processes(whole()) == []


def test_a_missing_replica_is_named_with_its_partition() -> None:
    assert missing_processes(without(whole(), 12)) == ["broker partition 1: 1 of 2 Running"]
    assert missing_processes(without(whole(), 20)) == ["proxy: 0 of 1 Running"]


def test_one_that_is_not_running_or_does_not_answer_does_not_count() -> None:
    view = View(layout(), tuple(node("broker", 0, 0, 10, NodeState.INIT) if one.endpoint == 10 else one for one in whole().nodes))
    assert missing_processes(view) == ["broker partition 0: 1 of 2 Running"]
    assert missing_processes(whole(), frozenset([10, 11])) == ["broker partition 0: 0 of 2 Running"]


def test_a_registry_without_a_layout_says_so() -> None:
    assert "no layout" in missing_processes(View())[0]


def test_a_doubling_under_way_is_told() -> None:
    view = View(layout(broker=RoleLayout(2, 4, 2)), whole().nodes)
    assert missing_processes(view) == [
        "broker: a doubling from 2 to 4 partitions is under way; `pixiu double broker` goes on with it"
    ]


async def test_no_page_is_parsed_while_processes_still_have_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing the pages of some would use up the time that the others have."""
    asked, view = 0, whole()

    async def fetch(_host: str, port: int, _path: str) -> tuple[int, bytes]:
        nonlocal asked
        for _ in range(port - 8000):
            await asyncio.sleep(0)
        asked += 1
        return 200, b"{}"

    def read(of: Node, *_: object) -> ProcessStatus:
        assert asked == 2 * len(view.nodes)
        return ProcessStatus(of, True)

    monkeypatch.setattr(status, "fetch", fetch)
    monkeypatch.setattr(status, "read_pages", read)
    assert (await ask_processes(TARGET, view, {})).healthy


def test_a_process_that_runs_and_answers_is_healthy_and_its_links_counters_are_read() -> None:
    one = node("broker", 0, 0, 10)
    page = (
        b"pixiu_broker_links_lost_items 3.0\npixiu_broker_links_queue_drops_total 4.0\n"
        b'pixiu_broker_links_refused_total{reason="tag"} 5.0\npixiu_broker_links_refused_total{reason="replay"} 6.0\n'
    )
    found = read_pages(one, 200, health(one), page)
    assert (found.healthy, found.problem, found.lost, found.queue_drops, found.refused) == (True, "", 3, 4, 11)
    assert found.registry_connected is True


def test_what_a_running_process_needs_an_operator_for_is_a_problem_and_it_still_counts() -> None:
    view, why = whole(), "MQTT clients cannot publish: this machine's clock shows a time before 2020: set it"
    for one in view.nodes:
        others = [ProcessStatus(other, True) for other in view.nodes if other is not one]
        found = judge(TARGET, view, [*others, read_pages(one, 200, health(one, service={"degraded": why}), b"")])
        assert [problem.endswith(f": {why}") for problem in found.problems] == [True]
        assert not judge(TARGET, view, [*others, read_pages(one, 200, health(one, service={"degraded": None}), b"")]).problems


@pytest.mark.parametrize(
    ("status", "changes", "word"),
    [
        (503, {"state": "Draining"}, "is Draining"),
        (503, {"state": "Init", "waits_for": ["router: none"]}, "is Init and waits for router: none"),
        (503, {"state": "Init", "waits_for": "nonsense"}, "is Init"),
        (200, {"peers": {"dead": 2}}, "gets no heartbeats from 2 of its peers"),
        (200, {"endpoint": "00000000000000ff"}, "another process answers"),
    ],
)
def test_a_process_with_a_problem_makes_the_cluster_not_healthy(status: int, changes: dict[str, object], word: str) -> None:
    view = whole()
    one = view.nodes[0]
    processes = [read_pages(found, 200, health(found), b"") for found in view.nodes if found is not one]
    found = judge(TARGET, view, [*processes, read_pages(one, status, health(one, **changes), b"")])
    assert not found.healthy
    assert any(word in problem for problem in found.problems)


def silent(of: Node) -> ProcessStatus:
    return ProcessStatus(of, False, "does not answer (no answer in time); was it killed, or does it hang?", silent=True)


def test_who_misses_a_process_that_does_not_answer_is_well_and_who_misses_more_is_not() -> None:
    view = whole()
    others = [one for one in view.nodes if one.endpoint != 10]
    misses = [read_pages(one, 200, health(one, peers={"dead": 1}), b"") for one in others]
    found = judge(TARGET, view, [silent(view.by_endpoint(10) or others[0]), *misses])
    assert [problem.partition(";")[0] for problem in found.problems] == [
        "broker 0/0 at 127.0.0.1:7010: does not answer (no answer in time)",
        "broker partition 0: 1 of 2 Running",
    ]
    assert [process.problem for process in found.processes[1:]] == [""] * len(others)
    more = read_pages(others[0], 200, health(others[0], peers={"dead": 2}), b"")
    assert any("gets no heartbeats from 2" in problem for problem in judge(TARGET, view, [silent(whole().nodes[0]), more]).problems)


def test_a_node_that_does_not_answer_is_one_problem_with_all_of_its_roles() -> None:
    nodes = [replace(one, pid=47) if one.endpoint in (10, 20) else one for one in whole().nodes]
    processes = [silent(one) if one.pid == 47 else ProcessStatus(one, True) for one in nodes]
    problem, *lacking = judge(TARGET, View(layout(), tuple(nodes)), processes).problems
    assert problem.startswith("broker 0/0 at 127.0.0.1:7010 (pid 47, with proxy 0): does not answer")
    assert sorted(lacking) == ["broker partition 0: 1 of 2 Running", "proxy: 0 of 1 Running"]


def test_a_machine_that_is_gone_is_one_problem_and_not_one_for_each_of_its_processes() -> None:
    nodes = [replace(one, host="127.0.0.2") if one.replica == 1 or one.role == "gateway" else one for one in whole().nodes]
    view = View(layout(), tuple(nodes))
    processes = [silent(one) if one.host == "127.0.0.2" else ProcessStatus(one, True) for one in view.nodes]
    assert judge(TARGET, view, processes).problems[0] == "127.0.0.2: none of its 3 processes answers; is the machine down?"
    assert not any("does not answer" in problem for problem in judge(TARGET, view, processes).problems)
    alone = [silent(one) for one in whole().nodes]
    assert not any("machine" in problem for problem in judge(TARGET, whole(), alone).problems), "is it this one that is cut off?"


def test_a_refused_layout_is_said_once_for_all_who_refuse_it() -> None:
    view, refusal = whole(), {"broker": "layout version 4 was edited by hand"}
    found = judge(TARGET, view, [read_pages(one, 200, health(one, layout_refused=refusal), b"") for one in view.nodes])
    assert found.problems == ["layout version 4 was edited by hand"]


def test_the_status_as_json_has_every_process_and_the_layout() -> None:
    view = whole()
    found = judge(TARGET, view, [ProcessStatus(one, True) for one in view.nodes])
    report = json.loads(json.dumps(status_json(found, 61_000)))
    assert report["healthy"] is True
    assert len(report["processes"]) == 6
    assert report["layout"]["broker"] == {"n": 2, "next": 2, "replicas": 2}
    assert {process["age_s"] for process in report["processes"]} == {60}


def test_prometheus_is_given_every_process_as_host_and_port() -> None:
    view = whole()
    view = View(view.layout, (*view.nodes, replace(node("proxy", -1, 1, 21), host="::1")))
    assert prometheus_targets(view) == [
        {
            "targets": ["127.0.0.1:8010", "127.0.0.1:8011", "127.0.0.1:8012", "127.0.0.1:8013"],
            "labels": {"__meta_pixiu_role": "broker"},
        },
        {"targets": ["127.0.0.1:8030"], "labels": {"__meta_pixiu_role": "gateway"}},
        {"targets": ["127.0.0.1:8020", "[::1]:8021"], "labels": {"__meta_pixiu_role": "proxy"}},
    ]


def test_the_status_as_json_says_what_protocol_all_speak() -> None:
    old, new = node("router", 0, 0, 1), replace(node("broker", 0, 0, 2), protocol_max=2)
    for nodes, spoken in (((old, new), 1), ((new,), 2)):
        report = status_json(judge(TARGET, View(Layout(), nodes), [ProcessStatus(one, True) for one in nodes]), 61_000)
        assert report["protocol"] == spoken
        processes: Any = report["processes"]
        assert [process["protocol"] for process in processes] == [[1, one.protocol_max] for one in nodes]


def test_the_table_says_while_an_upgrade_is_under_way() -> None:
    old, new = node("router", 0, 0, 1), replace(node("broker", 0, 0, 2), protocol_max=2)
    for nodes, under_way in (((old, new), True), ((new,), False), ((), False)):
        out = io.StringIO()
        Console(file=out, width=200).print(render(judge(TARGET, View(Layout(), nodes), []), 61_000))
        assert ("protocol 1 (some processes speak 2: an upgrade is under way)" in out.getvalue()) is under_way


def test_the_table_says_healthy_or_why_not() -> None:
    def text(status: ClusterStatus) -> str:
        out = io.StringIO()
        Console(file=out, width=200).print(render(status, 61_000))
        return out.getvalue()

    view = whole()
    assert "✓ healthy" in text(judge(TARGET, view, [ProcessStatus(one, True) for one in view.nodes]))
    broken = text(
        judge(
            TARGET, view, [ProcessStatus(one, one.endpoint != 20, "" if one.endpoint != 20 else "is [gone]") for one in view.nodes]
        )
    )
    assert "✗ not healthy" in broken
    assert "proxy 0 at 127.0.0.1:7020: is [gone]" in broken


def test_which_build_the_processes_run_is_said() -> None:
    proxy, gateway = node("proxy", -1, 0, 20), node("gateway", -1, 0, 30)
    compiled = read_pages(proxy, 200, health(proxy, build="compiled"), b"")
    plain = read_pages(gateway, 200, health(gateway, build="plain (PIXIU_COMPILE is not 1)"), b"")
    older = read_pages(gateway, 200, health(gateway), b"")
    assert builds(judge(TARGET, whole(), [compiled])) == "compiled"
    assert builds(judge(TARGET, whole(), [compiled, plain, compiled])) == "2 compiled, 1 plain"
    assert builds(judge(TARGET, whole(), [older])) == ""
    said: Any = status_json(judge(TARGET, whole(), [compiled, plain]), 0)["processes"]
    assert [each["build"] for each in said] == ["compiled", "plain (PIXIU_COMPILE is not 1)"]


def test_listeners_that_are_open_to_everybody_are_repeated_and_no_problem() -> None:
    view = whole()
    first, *others = view.nodes
    listener = "mqtt_insecure = true: everybody who reaches mqtt_host = [::] can act as any client"
    wrongs: tuple[object, ...] = ([], "x", None)
    processes = [read_pages(first, 200, health(first, insecure_listeners=[listener]), b"")]
    processes += [
        read_pages(one, 200, health(one, insecure_listeners=wrong), b"") for one, wrong in zip(others, wrongs, strict=False)
    ]
    processes += [ProcessStatus(one, True) for one in others[3:]]
    status = judge(TARGET, view, processes)
    said = [f"{processes[0].name} at {first.address}: {listener}"]
    assert status.healthy
    assert status.insecure == said == status_json(status, 61_000)["insecure"]
    out = io.StringIO()
    Console(file=out, width=200).print(render(status, 61_000))
    assert out.getvalue().count("not guarded") == 1
    assert said[0] in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 d")])
def test_ages_are_said_as_people_do(seconds: int, text: str) -> None:
    assert age_text(seconds) == text


def test_a_doubling_is_shown_with_its_phase_its_tool_and_what_the_logs_say() -> None:
    under_way = View(Layout(3, {"pi": RoleLayout(1, 2, 1, ("0" * 15 + "a",)), "broker": RoleLayout(2, 2, 1)}), ())
    tools = {"pi": tool_of(b'{"operator": "anna@a", "phase": "learn"}')}
    (one,) = doublings_of(under_way, [("pi", 1, "learning")], tools)
    assert one.text() == "doubling of pi: 1 → 2 partitions; phase learn, by anna@a (partitions: 1 learning)"
    assert one.json()["partitions"] == {"1": "learning"}
    (one,) = doublings_of(under_way, [], {})
    assert one.text() == "doubling of pi: 1 → 2 partitions; no tool is at work: `pixiu double pi` goes on"
    committed = View(Layout(4, {"pi": RoleLayout(2, 2, 1, ("0" * 15 + "a",))}), ())
    assert doublings_of(committed, [("pi", 1, "open")], {}) == [], "a child that serves is done"
    (one,) = doublings_of(committed, [("pi", 0, "split"), ("pi", 1, "open")], {})
    assert one.text().startswith("doubling of pi: to 2 partitions, committed; no tool is at work")
    assert tool_of(b"nonsense") == tool_of(b"[]") == {}


@pytest.mark.parametrize(
    ("service", "phase"),
    [
        ({"replication": {"state": "Leading"}, "doubling": "SPLIT"}, "split"),
        ({"replication": {"state": "Leading"}, "doubling": "NONE"}, ""),
        ({"replication": {"state": "Following"}, "doubling": "SPLIT"}, ""),
        ({"replication": None}, ""),
        ([], ""),
    ],
)
def test_the_phase_is_the_leaders(service: object, phase: str) -> None:
    assert phase_of({"service": service}) == phase
