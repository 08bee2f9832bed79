"""`pixiu up` with real processes: a whole small cluster, a replay through it, crashes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import is_healthy

pytestmark = pytest.mark.e2e
LIMIT_S = 120.0
SMALL = [
    *(f"--{name}=1" for name in ("proxies", "gateways", "brokers", "routers", "relays", "xius", "pis")),
    *(f"--{name}-replicas=1" for name in ("router", "relay", "xiu", "pi")),
    *("--topics=0", "--mqtt-port=0", "--zookeeper-port=0", "--separate"),
]
"""Every role once, and two brokers, all of them processes."""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tools.cli.main", *arguments]


def until(found: Callable[[], Any], what: str) -> Any:
    """The first true value; fails after a generous time."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {LIMIT_S} s: {what}")


def left_running(data: Path) -> list[str]:
    """The command lines of processes that were started for this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if entry.name.isdigit() and int(entry.name) != os.getpid() and str(data) in line:
            found.append(line)
    return found


class Up:
    """One `pixiu up --json` and the events that it printed."""

    def __init__(self, data: Path, *arguments: str) -> None:
        self.data = data
        self.output = data.parent / "events.jsonl"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(command("up", "--json", "--data", str(data), *SMALL, *arguments), stdout=out)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = self.output.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("}")]
        return [event for event in found if event["event"] == name]

    def registry(self) -> str:
        def ready() -> str:
            assert self.process.poll() is None, self.output.read_text()
            return next((str(event["registry"]) for event in self.events("running")), "")

        return str(until(ready, "all processes are Running"))

    def status(self) -> tuple[int, dict[str, Any]]:
        done = subprocess.run(command("status", "--json", "--target", self.registry()), capture_output=True, check=False)
        return done.returncode, json.loads(done.stdout)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path / "data", *arguments))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            try:
                one.process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                one.process.kill()


def test_a_replay_through_a_whole_cluster_loses_nothing_and_nothing_is_left_running(up: Callable[..., Up], tmp_path: Path) -> None:
    log = tmp_path / "chat.jsonl"
    rows = [{"ts_ms": i * 10, "room": f"r{i % 3}", "user": f"u{i % 7}", "text": f"text {i} é"} for i in range(300)]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cluster = up("--replay", str(log), "--speed", "1000", "--for", "0")
    assert cluster.process.wait(LIMIT_S) == 0, cluster.output.read_text()
    text = cluster.output.read_text()
    report = json.loads(text[text.index("{\n") : text.rindex("\n}") + 2])
    assert report["sent"] == 300
    assert report["delivered"] == report["expected"] == report["planned"]["deliveries"] > 300
    assert (report["lost"], report["repeated"], report["out_of_order"], report["alien"], report["damaged"]) == (0, 0, 0, 0, 0)
    assert {hop["from"] for hop in report["per_hop"]} == {"proxy", "broker"}
    assert all(hop["sent"] == hop["received"] for hop in report["per_hop"])
    assert cluster.events("stopped")
    assert left_running(cluster.data) == []
    written = [path for path in (cluster.data, *cluster.data.rglob("*")) if not path.is_symlink()]
    assert len(written) > 20
    assert not [path for path in written if path.stat().st_mode & 0o077], "others could read the mail of everybody"


def test_a_killed_process_is_started_again_on_its_port_and_nothing_outlives_a_killed_supervisor(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    # Killed gateways and stores leave their tables in shared memory for their successors, who do not come here.
    cluster = up("--set", f"gateway.signal_table_dir={tmp_path}", "--set", f"xiu.table_dir={tmp_path}", "--set", "xiu.table_mb=8")
    code, status = cluster.status()
    assert (code, status["problems"]) == (0, [])
    victim = next(process for process in status["processes"] if process["role"] == "broker")
    os.kill(victim["pid"], signal.SIGKILL)

    def rejoined() -> bool:
        return any(event["process"].startswith("broker") and event["restarts"] == 1 for event in cluster.events("process_running"))

    until(rejoined, "the broker is Running again")
    until(lambda: is_healthy(cluster.registry()), "status is healthy again")
    brokers = [process for process in cluster.status()[1]["processes"] if process["role"] == "broker"]
    assert victim["address"] in {process["address"] for process in brokers}
    assert victim["pid"] not in {process["pid"] for process in brokers}
    assert len(left_running(cluster.data)) >= 6
    cluster.process.kill()
    cluster.process.wait(LIMIT_S)
    until(lambda: not left_running(cluster.data), "every child has ended")


def test_a_role_that_refuses_its_options_ends_the_start_with_its_own_words(up: Callable[..., Up]) -> None:
    cluster = up("--set", "router.no_such_option=1")
    assert cluster.process.wait(LIMIT_S) == 2
    assert "no_such_option" in cluster.output.read_text()
    assert left_running(cluster.data) == []
