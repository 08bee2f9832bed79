"""A small real cluster for an application's own tests: every role once, in one process, on free ports, in a temporary folder.

    import pixiu.testing

    with pixiu.testing.cluster() as cluster:                  # or `async with`
        with pixiu.connect_sync(cluster.target) as px:
            px.room(42).send(b"hello")

The cluster is the one that `pixiu up --small` runs, so it needs the servers: `pip install 'pixiu-sdk[onebox]'`. Starting takes some
seconds: share one between many tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pixiu.errors import ConfigurationError, NotConnected, Unavailable

COMMANDS: Final = "pixiu.commands"
"""The entry-point group of the commands that need the servers."""
START_S: Final = 120.0
STOP_S: Final = 60.0
"""Time after which the processes are killed, seconds."""
POLL_S: Final = 0.05
LOG_END: Final = 2_000
"""Characters of the log that an error includes."""
OUTSIDE: Final = "the cluster does not run: use it inside `with pixiu.testing.cluster() as cluster:`"


class Cluster:
    """A cluster on this machine, made by `cluster` and used with `with` or `async with`. Its processes also end when this process
    ends."""

    def __init__(self, counts: Mapping[str, int], settings: Mapping[str, object], timeout_s: float) -> None:
        self._counts = counts
        self._settings = settings
        self._timeout_s = timeout_s
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._found: dict[str, Any] = {}
        self._ending = threading.Event()

    @property
    def target(self) -> str:
        """Target for `connect`, `InboxView` and the `--target` of commands. Raises `NotConnected` outside of the `with` block."""
        return str(self._where("registry"))

    @property
    def proxies(self) -> list[str]:
        """host:port of each proxy."""
        return list(self._where("proxies"))

    @property
    def gateways(self) -> list[str]:
        """host:port of each gateway, for gRPC."""
        return list(self._where("gateways"))

    @property
    def mqtt(self) -> list[str]:
        """host:port of each gateway, for MQTT."""
        return list(self._where("mqtt"))

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs; it is removed with the cluster."""
        if self._folder is None:
            raise NotConnected(OUTSIDE)
        return self._folder / "run" / "logs"

    def start(self) -> None:
        """Start the cluster, and wait until every process is Running.

        Raises `ConfigurationError` when the servers are not installed or an option is wrong, and `Unavailable` when the cluster
        does not come up; both include the output of the processes.
        """
        if self._process is not None:
            raise ConfigurationError("the cluster runs already; make another one")
        if not any(command.name == "up" for command in entry_points(group=COMMANDS)):
            raise ConfigurationError("a cluster for tests needs the servers: pip install 'pixiu-sdk[onebox]'")
        self._ending.clear()
        self._folder = folder = Path(tempfile.mkdtemp(prefix="pixiu-test-"))
        try:
            with open(folder / "up.log", "wb") as log:
                # This process holds the other end of the child's standard input, so the child ends when this process does, for any
                # reason.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tools.cli.main", "up", "--json", "--until-eof", *self._arguments(folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONSAFEPATH": "1"},
                )
            self._wait_running(self._process, folder / "up.log")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every process in order, and remove the folder."""
        self._ending.set()
        process, self._process, self._found = self._process, None, {}
        folder, self._folder = self._folder, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its children end with it
                process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.create_task(asyncio.to_thread(self.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._ending.set()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.to_thread(self.stop)  # it may already be up
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.stop)

    def _where(self, name: str) -> Any:
        if not self._found:
            raise NotConnected(OUTSIDE)
        return self._found[name]

    def _arguments(self, folder: Path) -> list[str]:
        # Put what is usually in /dev/shm into the folder, so that it is removed with the cluster. A gateway does not make it.
        tables = folder / "tables"
        tables.mkdir(exist_ok=True)
        settings: dict[str, object] = {"gateway.signal_table_dir": tables, "gateway.signal_table_mb": 1}
        if self._counts.get("xius") != 0:
            settings |= {"xiu.table_dir": tables, "xiu.table_mb": 8}
        settings |= self._settings
        found = ["--small", "--data", str(folder / "run"), "--mqtt-port=0", "--zookeeper-port=0"]
        found += [f"--{name}={count}" for name, count in self._counts.items()]
        return found + [f"--set={name}={value}" for name, value in settings.items()]

    def _wait_running(self, process: subprocess.Popen[bytes], log: Path) -> None:
        until = time.monotonic() + self._timeout_s
        while not self._ending.wait(POLL_S):
            text = log.read_text(errors="replace")
            self._found = running_event(text)
            if self._found:
                return
            if process.poll() is not None:
                raise ConfigurationError(f"the cluster did not start: {text[-LOG_END:].strip() or 'it said nothing'}")
            if time.monotonic() >= until:
                raise Unavailable(f"the cluster was not up after {self._timeout_s:g} s: {text[-LOG_END:].strip()}")
        raise NotConnected("the cluster was ended while it started")


def running_event(log: str) -> dict[str, Any]:
    """The event that `pixiu up --json` prints once everything is Running: "registry", "proxies", "gateways", "mqtt". Empty before
    that."""
    for line in log.splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "running":
                return event
    return {}


def cluster(
    *,
    proxies: int = 1,
    gateways: int = 1,
    mail: bool = True,
    settings: Mapping[str, object] | None = None,
    timeout_s: float = START_S,
) -> Cluster:
    """A small real cluster for tests: `with pixiu.testing.cluster() as cluster: … connect(cluster.target)`.

    Args:
        proxies, gateways: number of each; every other role is there once. The first of each are one process.
        mail: run the stores for inboxes; without them the cluster starts sooner.
        settings: options of the servers, such as {"gateway.max_connections": 10}, as for `pixiu up --set`.
        timeout_s: time limit for the start, seconds.

    Entering raises `ConfigurationError` when the servers are not installed or an option is wrong, and `Unavailable` when the
    cluster does not come up in time.
    Source: docs/sdk.md, "Testing".
    """
    counts = {"proxies": proxies, "gateways": gateways, **({} if mail else {"xius": 0, "pis": 0})}
    return Cluster(counts, dict(settings or {}), timeout_s)
