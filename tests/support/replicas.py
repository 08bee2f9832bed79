"""Replicas of `replicated_role.py` as processes of their own, writers that never give up, and what they were promised."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from onebox.embedded import EmbeddedZooKeeper
from onebox.fork_server import Forked
from pixiu.discovery.view import RoleLayout
from registry.layout import ensure_layout
from tests.support.forks import fork
from tests.support.shared_zookeeper import own_root
from tests.support.waiting import until
from tests.support.zookeeper import connected

CALL_S = 1.0
"""How long a writer waits for one replica before it asks the next one."""


class Replicas:
    """Processes by name: "a", "b", "c". Each keeps its folder over restarts."""

    def __init__(self, folder: Path, server: EmbeddedZooKeeper, session_timeout_s: float = 2.0, **settings: object) -> None:
        self.folder, self.server = folder, server
        self._root = own_root()
        self.target = f"zk://{server.address}{self._root}"
        self._settings = {
            "registry": self.target, "log_format": "json", "drain_timeout_s": "10",
            "session_timeout_ms": str(int(session_timeout_s * 1000)),
        } | {key: str(value) for key, value in settings.items()}  # fmt: skip
        self._processes: dict[str, Forked] = {}
        self._log_starts: dict[str, int] = {}
        self._folders: dict[str, Path] = {}

    async def layout(self) -> None:
        """Write the cluster's layout."""
        zookeeper = await connected(self.server)
        await ensure_layout(zookeeper, self._root, {"xiu": RoleLayout(1, 1, 1)})
        await zookeeper.close()

    def start(self, *names: str, folder: Path | None = None) -> None:
        """Start processes, new or again; `folder` elsewhere than usual."""
        for name in names:
            if folder is not None:
                self._folders[name] = folder
            wanted = self._settings | {"data_dir": str(self._folders.get(name, self.folder / name))}
            arguments = [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]
            path = self.folder / f"{name}.log"
            self._log_starts[name] = path.stat().st_size if path.exists() else 0
            self._processes[name] = fork("tests.support.replicated_role", arguments, path)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """To one process; a killed one is waited for."""
        self._processes[name].send_signal(number)
        if number is signal.SIGKILL:
            self._processes[name].wait(30)

    def log(self, name: str) -> str:
        """What a process logged since its last start."""
        return (self.folder / f"{name}.log").read_bytes()[self._log_starts[name] :].decode(errors="replace")

    def _registered(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for line in self.log(name).splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "registered":
                    found = event
        return found

    def address(self, name: str) -> str:
        """host:port of a process; empty before it is registered."""
        return str(self._registered(name).get("address", ""))

    def live(self) -> list[str]:
        """Whose process runs."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    async def status(self, name: str) -> dict[str, Any]:
        """What a replica says of itself; empty when it does not answer."""
        found = self._registered(name)
        if not found or self._processes[name].poll() is not None:
            return {}

        def ask() -> dict[str, Any]:
            host = str(found["address"]).rpartition(":")[0]
            request = f"http://{host}:{found['http_port']}/health"
            try:
                with urllib.request.urlopen(request, timeout=1.0) as reply:
                    said = reply.read()
            except urllib.error.HTTPError as refused:
                said = refused.read()
            except OSError:
                return {}
            status: dict[str, Any] = json.loads(said)["service"].get("replication", {})
            return status

        return await asyncio.to_thread(ask)

    async def leader(self, *but: str) -> str:
        """Who leads, as it says itself; empty for nobody. `but`: who is not asked."""
        for name in self.live():
            if name not in but and (await self.status(name)).get("state") == "Leading":
                return name
        return ""

    async def wait_leader(self, *but: str) -> str:
        """The same, once there is one."""
        await until(lambda: self.leader(*but), "a leader")
        return await self.leader(*but)

    async def wait_in_sync(self, count: int, *but: str) -> None:
        """Until the leader's set has so many members."""

        async def enough() -> bool:
            name = await self.leader(*but)
            return bool(name) and len((await self.status(name)).get("in_sync", [])) == count

        await until(enough, f"{count} replicas in sync")

    async def call(self, name: str, method: str, data: bytes = b"", timeout_s: float = 10.0) -> bytes:
        """A call of the test's service. Raises AioRpcError."""
        async with grpc.aio.insecure_channel(self.address(name), options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call: Any = channel.unary_unary(f"/test.List/{method}")
            return bytes(await call(data, timeout=timeout_s))

    async def dump(self, name: str) -> dict[str, int]:
        """Payload → place, as one replica has it."""
        found: dict[str, int] = json.loads(await self.call(name, "Dump"))
        return found

    async def wait_equal(self, *names: str) -> dict[str, int]:
        """What these replicas hold, once they hold the same and it is all that was committed."""
        found: dict[str, int] = {}

        async def equal() -> bool:
            said = [await self.status(name) for name in names]
            ends = {one.get("end") for one in said}
            if len(ends) != 1 or any(one.get("applied") != one.get("end") for one in said):
                return False  # replicas that just started are equal as well, with what their snapshots have
            dumps = [await self.dump(name) for name in names]
            found.clear()
            found.update(dumps[0])
            return all(dump == dumps[0] for dump in dumps)

        await until(equal, "equal replicas")
        return found

    def stop(self) -> None:
        """End them all; what was stopped goes on first."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(30)


Make = Callable[..., Awaitable[Replicas]]
"""Starts replicas by name, the first of them alone; `folder`: where that one keeps its files."""


@asynccontextmanager
async def making(server: EmbeddedZooKeeper, parent: Path) -> AsyncIterator[Make]:
    """Replicas of as many partitions as the test asks for, ended with the block."""
    made: list[Replicas] = []

    async def start(*names: str, folder: Path | None = None, **settings: object) -> Replicas:
        replicas = Replicas(parent, server, **settings)  # type: ignore[arg-type]
        made.append(replicas)
        await replicas.layout()
        replicas.start(names[0], folder=folder)
        await replicas.wait_in_sync(1)
        replicas.start(*names[1:])
        await replicas.wait_in_sync(len(names))
        return replicas

    try:
        yield start
    finally:
        for replicas in made:
            await asyncio.to_thread(replicas.stop)


class Writers:
    """So many writers, each with one write under way, that go from replica to replica until it is acknowledged."""

    def __init__(self, replicas: Replicas, count: int = 8, payload_bytes: int = 0) -> None:
        self._replicas, self._count, self._padding = replicas, count, "x" * payload_bytes
        self.acknowledged: dict[str, int] = {}
        self._newest = 0.0
        """When the newest of the writes that were acknowledged was begun."""
        self.refusals: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Writers:
        self._tasks = [asyncio.create_task(self._write(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def _write(self, number: int) -> None:
        index, tried = 0, 0
        address = ""
        channel: grpc.aio.Channel | None = None
        while True:
            payload = f"{number}.{index}.{self._padding}"
            names = self._replicas.live()
            wanted = self._replicas.address(names[tried % len(names)]) if names else ""
            if not wanted:
                tried += 1
                await asyncio.sleep(0.05)
                continue
            if channel is None or address != wanted:
                if channel is not None:
                    await channel.close()
                address, channel = wanted, grpc.aio.insecure_channel(wanted, options=[("grpc.use_local_subchannel_pool", 1)])
            begun = time.monotonic()
            try:
                call: Any = channel.unary_unary("/test.List/Append")
                place = int(await call(payload.encode(), timeout=CALL_S))
            except grpc.aio.AioRpcError as error:
                code = str(error.details()).partition(":")[0]
                self.refusals[code] = self.refusals.get(code, 0) + 1
                await channel.close()
                channel = None
                tried += 1
                await asyncio.sleep(0.05)
                continue
            self.acknowledged[payload] = place
            self._newest = max(self._newest, begun)
            index += 1

    async def wait_more(self, count: int = 20) -> float:
        """Until so many more writes are acknowledged, and one that was begun after this call; returns the seconds until that."""
        begin, before = time.monotonic(), len(self.acknowledged)
        first = 0.0
        while not first or len(self.acknowledged) < before + count:
            assert time.monotonic() < begin + 60, "no more writes are acknowledged"
            await asyncio.sleep(0.01)
            if not first and self._newest > begin:
                first = time.monotonic() - begin
        return first

    def check(self, held: dict[str, int]) -> None:
        """Every acknowledged write is there, at its place, no place twice, each writer's in order."""
        missing = [payload for payload in self.acknowledged if payload not in held]
        assert not missing, f"{len(missing)} of {len(self.acknowledged)} acknowledged writes are lost: {missing[:5]}"
        moved = [payload for payload, place in self.acknowledged.items() if held[payload] != place]
        assert not moved, moved[:5]
        assert len(set(held.values())) == len(held)
        for number in range(self._count):
            own = [held[payload] for payload in self.acknowledged if payload.startswith(f"{number}.")]
            assert own == sorted(own)
