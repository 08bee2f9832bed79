"""A chat log goes through the cluster while processes are killed or drained, and ZooKeeper is away.

The replay itself checks every delivery; here it is told what to survive.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from onebox.embedded import EmbeddedZooKeeper
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tests.support.forks import fork_pixiu

SAMPLE_LOG_S = 2_413
"""How long the sample is in its own time, seconds."""
OUTLASTS_S = 120
"""How long it is made to last where it must outlast what is done meanwhile, also beside other work; it is ended then."""
SMALL = ["--proxies=1", "--gateways=1", "--brokers=1", "--routers=1", "--relays=0"]
ENOUGH = 1_000
"""Deliveries that must come after that."""


class Replay:
    """`pixiu replay sample --json` in the background."""

    def __init__(self, cluster: LocalCluster, seconds: float) -> None:
        self._cluster = cluster
        self._delivered_before = at_gateways(cluster, "deliveries_total")
        self.process = cluster.start_pixiu("replay", "sample", "--speed", str(SAMPLE_LOG_S / seconds), "--json")

    def __enter__(self) -> Replay:
        """Once its users are connected and get messages: what is done to the cluster from then on is done to them."""
        wait_for(
            lambda: not self.running or at_gateways(self._cluster, "deliveries_total") > self._delivered_before,
            "the first deliveries of the replay",
            pause_s=0.2,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def running(self) -> bool:
        """Whether it still sends."""
        return self.process.poll() is None

    def enough(self) -> dict[str, Any]:
        """Its report, when it has gone on well for a while after all that was done to the cluster."""
        assert self.running, ("the log was over too early: make it last longer", self.process.communicate())
        so_far = at_gateways(self._cluster, "deliveries_total")
        wait_for(
            lambda: not self.running or at_gateways(self._cluster, "deliveries_total") > so_far + ENOUGH,
            "more deliveries",
            pause_s=0.2,
        )
        self.process.send_signal(signal.SIGINT)
        return self.report()

    def report(self) -> dict[str, Any]:
        """Its report, when it is over."""
        output, errors = self.process.communicate(timeout=240)
        assert output, errors
        found: dict[str, Any] = json.loads(output)
        assert self.process.returncode == (0 if found["ok"] else 1)
        return found


def assert_nothing_wrong(report: dict[str, Any]) -> None:
    """Whatever happened, no promise was broken."""
    assert report["ok"], json.dumps(report)  # pytest would cut the dict short
    wrong = ("repeated", "out_of_order", "alien", "damaged", "failed_logins", "unexplained")
    assert {name: report[name] for name in wrong} == dict.fromkeys(wrong, 0)


def assert_exact(report: dict[str, Any]) -> None:
    """Every delivery came, once, in order; and the links lost nothing."""
    assert_nothing_wrong(report)
    assert report["delivered"] == report["expected"] > ENOUGH
    assert report["lost"] == 0
    assert sum(hop["lost"] for hop in report["per_hop"]) == 0
    assert all(hop["sent"] == hop["received"] for hop in report["per_hop"])


def wait_until_gone(cluster: LocalCluster, pid: int) -> None:
    """Until the registry and `pixiu status` no longer know a process."""
    wait_for(
        lambda: pid not in {process["pid"] for process in cluster.status()["processes"]}, f"the end of process {pid}", pause_s=0.2
    )


def at_gateways(cluster: LocalCluster, metric: str) -> float:
    """The sum of a metric over all gateways."""
    total = 0.0
    for process in cluster.processes("gateway"):
        with urllib.request.urlopen(f"{process['http']}/metrics", timeout=30) as reply:
            found = re.findall(rf"^pixiu_gateway_{metric}(?:{{[^}}]*}})? (\S+)", reply.read().decode(), re.MULTILINE)
        total += sum(map(float, found))
    return total


def test_each_role_is_killed_in_turn(cluster: LocalCluster) -> None:
    killed: list[list[str]] = []
    """Endpoints of the roles of each process."""
    with Replay(cluster, OUTLASTS_S) as replay:
        for role in ("proxy", "router", "broker"):
            cluster.wait_healthy()
            victim = cluster.processes(role)[0]
            killed.append(sorted(each["endpoint"] for each in cluster.together(victim)))
            os.kill(victim["pid"], signal.SIGKILL)
            wait_until_gone(cluster, victim["pid"])
            cluster.wait_healthy()
        report = replay.enough()
    assert_nothing_wrong(report)
    deaths = iter(death["endpoint"] for death in report["deaths"])
    assert [sorted(islice(deaths, len(roles))) for roles in killed] == killed
    assert not list(deaths)
    assert report["lost"] == report["explained"]


@contextlib.contextmanager
def own_zookeeper(folder: Path) -> Iterator[tuple[int, Any]]:
    """An embedded ZooKeeper that a test may kill and start again: its port, and the function that starts it."""
    servers: list[EmbeddedZooKeeper] = []

    def start(port: int = 0) -> EmbeddedZooKeeper:
        server = EmbeddedZooKeeper(folder, port)
        server.start()
        servers.append(server)
        return server

    try:
        yield start().port, (start, servers)
    finally:
        servers[-1].stop()


@pytest.mark.timeout(400)
def test_an_outage_of_zookeeper_changes_nothing(tmp_path: Path) -> None:
    """Killed for longer than the session of every process, then paused for as long: no message is lost, nobody leaves."""
    away_s = 6.0
    sessions = [f"--set={role}.session_timeout_ms=4000" for role in ("proxy", "gateway", "broker", "router")]
    with (
        own_zookeeper(tmp_path / "zookeeper") as (port, (start, servers)),
        running_cluster(tmp_path, *SMALL, *sessions, "--registry", f"zk://127.0.0.1:{port}/pubsub", layout="nodes") as cluster,
    ):
        before = {p["endpoint"] for p in cluster.status()["processes"]}
        with Replay(cluster, OUTLASTS_S) as replay:
            servers[-1].kill()
            time.sleep(away_s)
            start(port)
            cluster.wait_healthy()
            os.kill(servers[-1].pid, signal.SIGSTOP)
            time.sleep(away_s)
            os.kill(servers[-1].pid, signal.SIGCONT)
            cluster.wait_healthy()
            assert_exact(replay.enough())
        assert {p["endpoint"] for p in cluster.status()["processes"]} == before


def test_a_taken_port_is_named(tmp_path: Path, cluster: LocalCluster) -> None:
    port = str(cluster.mqtt_ports()[0])
    result = fork_pixiu("up", "--data", str(tmp_path / "run"), "--zookeeper-port", "0", "--mqtt-port", port)
    assert result.returncode == 2
    assert port in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
