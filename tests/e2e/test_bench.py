"""`pixiu bench` in front of a real cluster: everything comes, is counted and timed, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pixiu.client.stores.view import InboxView
from tests.support.cluster import PIXIU, LocalCluster, running_cluster
from tests.support.effort import portion
from tools.cli.http import samples

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One of each, with stores."""
    one = [part for role in ("router", "broker", "relay", "xiu", "pi") for part in (f"--{role}s", "1", f"--{role}-replicas", "1")]
    with running_cluster(tmp_path_factory.mktemp("bench"), *one, "--proxies", "1", "--gateways", "1", layout="nodes") as running:
        yield running


def bench(cluster: LocalCluster, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    result = cluster.pixiu("bench", "--json", *arguments)
    assert result.stdout, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return result.returncode, {one["kind"]: one for one in found}


def test_every_kind_comes_once_and_is_timed(cluster: LocalCluster) -> None:
    code, found = bench(cluster, "--kind", "room", "--kind", "signal", "--kind", "mail", "--count", "300", "--size", "200")
    assert list(found) == ["room", "signal", "mail"]
    for one in found.values():
        assert (one["sent"], one["delivered"], one["failed"], one["lost"], one["repeated"]) == (300, 300, 0, 0, 0)
        assert 0 < one["p50_us"] <= one["p99_us"] <= one["highest_us"]
        assert one["whole"] is True
    assert code == 0


async def test_mail_is_removed_again_and_so_are_the_devices(cluster: LocalCluster) -> None:
    code, found = bench(cluster, "--kind", "mail", "--count", "20", "--keys", "2")
    assert (code, found["mail"]["delivered"], len(found["mail"]["keys"])) == (0, 20, 2)
    async with InboxView(cluster.target) as view:
        for uin in found["mail"]["keys"]:
            lanes = await view.unread(uin)
            assert sum(lane.last for lane in lanes) == 10
            assert [(lane.readable, lane.devices) for lane in lanes if lane.readable or lane.devices] == []


def test_every_metric_that_the_board_names_is_there_and_a_load_is_seen_in_every_histogram(cluster: LocalCluster) -> None:
    """The cluster here has every role."""
    bench(cluster, "--kind", "room", "--kind", "signal", "--kind", "mail", "--count", "10")
    found: Counter[str] = Counter()
    for process in cluster.status()["processes"]:
        with urllib.request.urlopen(f"{process['http']}/metrics", timeout=30) as reply:
            for name, _, value in samples(reply.read()):
                found[name] += int(value)
    histograms = {name: found[name] for name in found if re.fullmatch(r"pixiu_\w+_(seconds|records|entries)_count", name)}
    assert len(histograms) == 12
    assert [name for name, count in histograms.items() if not count] == []
    board = json.loads((DEPLOY / "grafana/pixiu.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        patterns = re.findall(r'__name__=~"([^"]+)"', expression)
        names = re.findall(r"\b(?:pixiu|process)_[a-z_]+", re.sub(r'"[^"]*"', "", expression))
        assert patterns or names, expression
        for pattern in [*patterns, *names]:
            assert any(re.fullmatch(pattern, name) for name in found), pattern


def test_a_load_for_a_time_keeps_its_rate_and_a_table_is_for_people(cluster: LocalCluster) -> None:
    code, found = bench(cluster, "--kind", "room", "--rate", "50", "--for", "1", "--window", "10")
    assert code == 0
    assert 1 < found["room"]["sent"] <= 60
    shown = cluster.pixiu("bench", "--kind", "signal", "--count", "5")
    assert shown.returncode == 0
    assert "signal" in shown.stdout
    assert "p99" in shown.stdout


def test_what_does_not_come_is_lost_or_failed_and_the_exit_code_says_so(cluster: LocalCluster) -> None:
    [broker] = cluster.processes("broker")
    started = cluster.start_pixiu("bench", "--json", "--kind", "room", "--rate", "20", "--for", "3", "--timeout", "1")
    os.kill(broker["pid"], signal.SIGSTOP)
    try:
        out, _ = started.communicate(timeout=120)
    finally:
        os.kill(broker["pid"], signal.SIGCONT)
    [line] = out.splitlines() or ["{}"]
    said = json.loads(line)
    assert started.returncode in (1, 2)
    assert "error" in said or said["lost"] + said["failed"] > 0
    cluster.wait_healthy()


AROUND = {"supervisor", "zookeeper", "node"}
COSTS = {"idle": {*AROUND, "xiu"}, "pair-qos1-1": AROUND, "mail-1": {*AROUND, "relay", "xiu", "pi"}}
"""Case → kinds of processes."""


@pytest.mark.parametrize("case", portion(COSTS))
def test_what_pixiu_costs_at_rest_at_work_and_with_mail_is_measured(case: str) -> None:
    """As in a comparison, without a peer: every process of every cluster is counted, and Pixiu grants what was asked for."""
    command = [PIXIU, "bench", "--peers", "--server", "pixiu", "--case", case, "--rounds", "1", "--for", "0.5", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)["cases"][case]["servers"]["pixiu"]["median"]
    assert set(found["hops"]) == COSTS[case]
    if case == "idle":
        assert found["processes"] == 10, (
            "two nodes, two Xius, two Pis with topics, the supervisor and its fork server, ZooKeeper and its parent"
        )
        assert min(found[name] for name in ("start_s", "memory_bytes", "switches_per_s", "server_cpu_s")) > 0
    else:
        assert found["deliveries"] == found["published"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kind", "chat"), "--kind chat: one of room, signal, mail"),
        (("--kind", "mail", "--target", "127.0.0.1:1"), "give zk://"),
        (("--target", "127.0.0.1:1"), "no cluster"),
        (("--size", "3"), "16"),
    ],
)
def test_wrong_use_says_what_to_do(cluster: LocalCluster, arguments: tuple[str, ...], words: str) -> None:
    result = cluster.pixiu("bench", *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
