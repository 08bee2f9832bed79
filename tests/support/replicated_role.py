"""A role whose state is a list: `python replicated_role.py --set …`. For tests of `cluster.replication.Replica` in real processes.

Its calls, with raw bytes: `test.List/Append` (a payload; answers with its place), `test.List/Read` (refused without the lease),
`test.List/Dump` (what is here, whoever leads). After SIGUSR1 its disk syncs nothing until SIGUSR2.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from cluster.links.api import Outcome, PeerState
from cluster.process.context import Context
from cluster.process.host import run_role
from cluster.replication.model import Entry, EntryKind, Position
from cluster.replication.replica import Replica
from cluster.replication.role_options import ReplicatedOptions
from cluster.replication.storage.kernel_sync import KernelSync
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.segment import Segment
from cluster.settings.fields import bounded
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from registry.membership import Membership
from tests.support.file_machine import FileMachine

SERVICE = "test.List"


@dataclass(frozen=True, kw_only=True)
class Options(ReplicatedOptions):
    """What tests set."""

    segment_bytes: int = bounded(64 << 20, 1024, 1 << 30)
    """Of the log."""


class ListMachine(FileMachine):
    """Payloads in the order of the log, each once."""

    applied = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.places: dict[str, int] = {}

    def _dumped(self) -> Any:
        return {"applied": self.applied, "places": self.places}

    def _restore(self, found: Any) -> None:
        self.applied, self.places = found["applied"], found["places"]

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        assert entries[0].counter == self.applied + 1
        answers: list[object] = []
        for entry in entries:
            if entry.kind == EntryKind.DATA:
                answers.append(self.places.setdefault(entry.payload.decode(), entry.counter))
            else:
                answers.append(None)
        self.applied = entries[-1].counter
        self._flush()
        return answers


class HangingDisk:
    """Lets every sync of the log wait between SIGUSR1 and SIGUSR2, by the kernel or in a thread."""

    def __init__(self) -> None:
        self._may = threading.Event()
        self._may.set()
        self._late: list[Callable[[], object]] = []
        finish, begin = SegmentedLog.finish_sync, KernelSync.begin

        def finish_sync(log: SegmentedLog, dirty: Sequence[Segment]) -> Position:
            self._may.wait()
            return finish(log, dirty)

        def begin_sync(kernel: KernelSync, fd: int, done: Callable[[int], None]) -> bool:
            if self._may.is_set():
                return begin(kernel, fd, done)
            self._late.append(partial(begin, kernel, fd, done))
            return True

        SegmentedLog.finish_sync = finish_sync  # type: ignore[method-assign, assignment]
        KernelSync.begin = begin_sync  # type: ignore[method-assign, assignment]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self._may.clear)
        loop.add_signal_handler(signal.SIGUSR2, self._answers)

    def _answers(self) -> None:
        self._may.set()
        while self._late:
            self._late.pop()()


class Service:
    """The role's shell."""

    def __init__(self, context: Context[Options]) -> None:
        HangingDisk()
        options = context.options
        folder = Path(options.data_dir)
        self.machine = ListMachine(folder / "state")
        self.replica = Replica(
            context, self.machine, folder / "replica", options.replication(), segment_bytes=options.segment_bytes
        )  # fmt: skip
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(call)
            for name, call in (("Append", self._append), ("Read", self._read), ("Dump", self._dump))
        }
        context.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def _append(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        answers = await self.replica.propose([(EntryKind.DATA, data)])
        return str(answers[0]).encode()

    async def _read(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        found = json.dumps(self.machine.places).encode()
        if not self.replica.lease_valid():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no lease")
        return found

    async def _dump(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return json.dumps(self.machine.places).encode()

    async def prepare(self, node: Node) -> Node:
        await asyncio.to_thread(self.machine.open)
        return await self.replica.prepare(node)

    async def start(self) -> None:
        await self.replica.start()

    async def drain(self) -> None:
        await self.replica.drain()

    async def stop(self) -> None:
        await self.replica.stop()

    def health(self) -> dict[str, object]:
        return {"replication": self.replica.status()}

    def on_view(self, view: View) -> None:
        """Replication sees its replicas by itself."""

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        return Outcome.MALFORMED

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        return Outcome.MALFORMED

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Nothing is sent."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """No peers."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        return b""


if __name__ == "__main__":
    sys.exit(run_role("xiu", Options, Service, sys.argv[1:], membership=Membership))
