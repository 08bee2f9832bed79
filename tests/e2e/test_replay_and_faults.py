"""A chat log goes through the cluster while processes are killed or drained, and ZooKeeper is away.

The replay itself checks every delivery; here it is told what to survive.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from registry.embedded import EmbeddedZooKeeper
from tests.support.cluster import LocalCluster, running_cluster, wait_for

SAMPLE_LOG_S = 2_413
"""How long the sample is in its own time, seconds."""
SAMPLE_S = 30
"""How long it is made to last where processes are killed meanwhile, about."""
KILLS_S = 75
"""The same where it must outlast three kills, also beside other work on both cores."""


class Replay:
    """`pixiu replay sample --json` in the background."""

    def __init__(self, cluster: LocalCluster, seconds: float) -> None:
        self.process = cluster.start_pixiu("replay", "sample", "--speed", str(SAMPLE_LOG_S / seconds), "--json")

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def running(self) -> bool:
        """Whether it still sends."""
        return self.process.poll() is None

    def report(self) -> dict[str, Any]:
        """Its report, when it is over."""
        output, errors = self.process.communicate(timeout=240)
        assert output, errors
        found: dict[str, Any] = json.loads(output)
        assert self.process.returncode == (0 if found["ok"] else 1)
        return found


def assert_nothing_wrong(report: dict[str, Any]) -> None:
    """Whatever happened, no promise was broken."""
    assert report["ok"], report
    wrong = ("repeated", "out_of_order", "alien", "damaged", "failed_logins", "unexplained")
    assert {name: report[name] for name in wrong} == dict.fromkeys(wrong, 0)
    assert report["sent"] > 2000


def assert_exact(report: dict[str, Any]) -> None:
    """Every delivery came, once, in order; and the links lost nothing."""
    assert_nothing_wrong(report)
    assert report["delivered"] == report["expected"] > 10_000
    assert report["lost"] == 0
    assert sum(hop["lost"] for hop in report["per_hop"]) == 0
    assert all(hop["sent"] == hop["received"] for hop in report["per_hop"])


def wait_until_gone(cluster: LocalCluster, pid: int) -> None:
    """Until the registry and `pixiu status` no longer know a process."""
    wait_for(lambda: pid not in {process["pid"] for process in cluster.status()["processes"]}, f"the end of process {pid}")


def has_clients(cluster: LocalCluster) -> bool:
    """Whether a gateway has delivered to somebody who is connected."""
    for process in cluster.processes("gateway"):
        with urllib.request.urlopen(f"{process['http']}/metrics", timeout=30) as reply:
            found = re.search(r"^pixiu_gateway_connections(?:{[^}]*})? ([0-9.]+)", reply.read().decode(), re.MULTILINE)
        if found is not None and float(found[1]) > 0:
            return True
    return False


def test_the_sample_is_carried_exactly(cluster: LocalCluster) -> None:
    with Replay(cluster, 10) as replay:
        assert_exact(replay.report())


def test_each_role_is_killed_in_turn(cluster: LocalCluster) -> None:
    killed: list[str] = []
    with Replay(cluster, KILLS_S) as replay:
        for role in ("proxy", "router", "broker"):
            cluster.wait_healthy()
            wait_for(lambda: has_clients(cluster), "the users of the replay")  # it tells the deaths that it sees
            victim = cluster.processes(role)[0]
            os.kill(victim["pid"], signal.SIGKILL)
            killed.append(victim["endpoint"])
            wait_until_gone(cluster, victim["pid"])
            cluster.wait_healthy()
        assert replay.running, "the log was over before all were killed: make it last longer"
        report = replay.report()
    assert_nothing_wrong(report)
    assert [death["endpoint"] for death in report["deaths"]] == killed
    assert report["lost"] == report["explained"]


def test_draining_loses_nothing(cluster: LocalCluster) -> None:
    """SIGTERM: the process leaves in good order, and comes back as the supervisor restarts it."""
    with Replay(cluster, SAMPLE_S) as replay:
        for role in ("proxy", "broker", "router"):
            cluster.wait_healthy()
            victim = cluster.processes(role)[0]
            os.kill(victim["pid"], signal.SIGTERM)
            wait_until_gone(cluster, victim["pid"])
            cluster.wait_healthy()
        report = replay.report()
    assert_nothing_wrong(report)
    assert report["lost"] == 0


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
    """Killed for longer than every session, then paused for as long: no message is lost, nobody leaves."""
    away_s = 14.0
    with (
        own_zookeeper(tmp_path / "zookeeper") as (port, (start, servers)),
        running_cluster(tmp_path, "--registry", f"zk://127.0.0.1:{port}/pubsub") as cluster,
    ):
        before = {p["endpoint"] for p in cluster.status()["processes"]}
        with Replay(cluster, 2 * away_s + 45) as replay:
            time.sleep(5)  # the replay must have begun; how far it is does not matter
            servers[-1].kill()
            time.sleep(away_s)
            start(port)
            cluster.wait_healthy()
            os.kill(servers[-1].pid, signal.SIGSTOP)
            time.sleep(away_s)
            os.kill(servers[-1].pid, signal.SIGCONT)
            cluster.wait_healthy()
            assert replay.running, "the log was over before the outages were: make it last longer"
            assert_exact(replay.report())
        assert {p["endpoint"] for p in cluster.status()["processes"]} == before


def test_up_for_a_while_replays_and_ends_with_the_replays_code(tmp_path: Path) -> None:
    """What `make run` does."""
    command = [str(Path(sys.executable).parent / "pixiu"), "up", "--for", "1", "--replay", "sample"]
    command += ["--data", str(tmp_path / "run"), "--mqtt-port", "0", "--zookeeper-port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every promise was kept" in result.stdout


def test_a_taken_port_is_named(tmp_path: Path, cluster: LocalCluster) -> None:
    command = [str(Path(sys.executable).parent / "pixiu"), "up", "--data", str(tmp_path / "run"), "--zookeeper-port", "0"]
    result = subprocess.run(
        [*command, "--mqtt-port", str(cluster.mqtt_ports()[0])], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 2
    assert str(cluster.mqtt_ports()[0]) in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
