"""A whole cluster for a test: `pixiu up` as a user starts it, on free ports, in a folder of the test, beside the ZooKeeper that
tests share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from onebox.fork_server import Forked
from pixiu.errors import PixiuError
from pixiu.testing import running_event
from tests.support.forks import FORKED_PIXIU, fork, fork_pixiu
from tests.support.shared_zookeeper import shared_server
from tests.support.waiting import pause_after
from tools.cli.status import ClusterStatus, read_status, status_json

PIXIU = str(Path(sys.executable).parent / "pixiu")
WAIT_S = 120.0
"""For a condition that must come; generous, because machines are loaded."""
LAYOUTS = {"separate": ("--separate",), "nodes": (), "small": ("--small",)}
"""The options of `pixiu up`, by layout."""
LAYOUT = os.environ.get("PIXIU_LAYOUT", "separate")
"""The layout of clusters whose tests name none."""
Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found], what: str | Callable[[], str], timeout_s: float = WAIT_S, pause_s: float = 0.05
) -> Found:
    """The condition's first true value. Fails with `what`, a function is called then, when it does not come. What takes long to
    ask is asked less often."""
    end = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        found = condition()
        if found:
            return found
        now = time.monotonic()
        assert now < end, f"{what if isinstance(what, str) else what()} did not come in {timeout_s:.0f} s"
        time.sleep(pause_after(now - asked, pause_s))


def read_status_of(target: str) -> ClusterStatus:
    """What `pixiu status` reads, without the start of a process, which is most of what the command costs. From any thread, also
    one with an event loop. Raises PixiuError."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(read_status(target))).result(WAIT_S)


def status_of(target: str) -> dict[str, Any]:
    """`pixiu status --json`. Raises PixiuError."""
    found: dict[str, Any] = json.loads(json.dumps(status_json(read_status_of(target), time.time_ns() // 1_000_000)))
    return found


def problems_of(target: str) -> list[str]:
    """What `pixiu status` would name; a registry that is away is one."""
    try:
        return read_status_of(target).problems
    except PixiuError as error:
        return [str(error)]


def is_healthy(target: str) -> bool:
    """Whether `pixiu status` would say so."""
    return not problems_of(target)


class LocalCluster:
    """`pixiu up` in a process of its own.

    layout: of `LAYOUTS`. With `separate` roles are processes of their own, which tests can kill one by one.
    """

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, layout: str = LAYOUT) -> None:
        self.folder = folder
        self._arguments = (*LAYOUTS[layout], *arguments)
        self._environment = environment
        self._log = folder / "up.log"
        self._process: Forked | None = None
        self.target = ""

    def start(self) -> None:
        """Start it and wait until every process is Running."""
        free, stores = ["--mqtt-port", "0", "--zookeeper-port", "0"], ["--xius", "0", "--pis", "0", "--topics", "0"]
        tables = []
        if any(word.startswith("--xius") for word in self._arguments):  # shared memory is small in containers
            tables = [f"--set=xiu.table_dir={self.folder}", "--set=xiu.table_mb=8"]
        if not {"--registry", "--secure"} & set(self._arguments):
            free += ["--registry", f"zk://{shared_server().address}/{self.folder.parent.name}-{self.folder.name}"]
        command = ["up", "--data", str(self.folder / "run"), *free, *stores, *tables, "--json", *self._arguments]
        self._log.write_bytes(b"")
        self._process = fork(FORKED_PIXIU, ["", *command], self._log, self._environment)
        self.target = wait_for(self._running, "the cluster")

    def _running(self) -> str:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        return str(running_event(self._log.read_text()).get("registry", ""))

    def stop(self) -> int:
        """End it as Ctrl-C does. Returns its exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise AssertionError(self._log.read_text()) from None

    @property
    def supervisor(self) -> int:
        """The process that starts the others again."""
        assert self._process is not None
        return self._process.pid

    def pixiu(self, command: str, *arguments: str, timeout_s: float = WAIT_S) -> subprocess.CompletedProcess[str]:
        """Run a `pixiu` command, such as "status" or "inbox list", against the cluster."""
        return fork_pixiu(*self._command(command, *arguments), limit_s=timeout_s)

    def start_pixiu(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """The same in the background."""
        words = [PIXIU, *self._command(command, *arguments)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _command(self, command: str, *arguments: str) -> list[str]:
        return [*command.split(), "--target", self.target, *arguments]

    def status(self) -> dict[str, Any]:
        """`pixiu status --json`. Raises PixiuError."""
        return status_of(self.target)

    def processes(self, role: str) -> list[dict[str, Any]]:
        """The Running processes of a role."""
        return [p for p in self.status()["processes"] if p["role"] == role and p["state"] == "Running"]

    def wait_leader(self, role: str) -> int:
        """The process ID of the replica that leads the only partition of a role, once two are in sync."""

        def find() -> int:
            found = [process for process in self.processes(role) if process["replication"]["state"] == "Leading"]
            return int(found[0]["pid"]) if len(found) == 1 and len(found[0]["replication"]["in_sync"]) == 2 else 0

        return wait_for(find, f"a leader of {role} with both in sync")

    def together(self, process: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The Running roles of the process that has this one: a node has several, and what hits one of them hits all."""
        return [p for p in self.status()["processes"] if p["pid"] == process["pid"] and p["state"] == "Running"]

    def wait_healthy(self) -> None:
        """Until `pixiu status` says healthy."""
        problems: list[str] = []

        def healthy() -> bool:
            nonlocal problems
            problems = problems_of(self.target)
            return not problems

        wait_for(healthy, lambda: f"a healthy status instead of {problems}", pause_s=0.2)

    def mqtt_ports(self) -> list[int]:
        """Of every gateway."""
        return [int(p["mqtt"].rpartition(":")[2]) for p in self.processes("gateway")]


@contextlib.contextmanager
def running_cluster(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None, layout: str = LAYOUT
) -> Iterator[LocalCluster]:
    """A cluster that ends with the block, and must end in good order. `environment` is added to the processes' own."""
    cluster = LocalCluster(folder, *arguments, environment=environment, layout=layout)
    cluster.start()
    try:
        yield cluster
    finally:
        code = cluster.stop()
    assert code == 0, (folder / "up.log").read_text()
