"""A whole stored role over the mechanisms of Xiu and Pi: counts by key. It doubles, is compared, exports and is killed as they are.

    entry of kind DATA    key u64 | number u64: the count of the key becomes `number`, if it is one less

Its processes register as those of Pi. `test.Counter/Add` takes such an entry and answers with the count, or an error's code.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar
from zlib import crc32

import grpc
import grpc.aio
import pyarrow as pa

from cluster.core.contract import NEVER
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.process.host import run_role
from cluster.replication.core.events import Accepted
from cluster.replication.model import Entry, EntryKind, Position
from cluster.replication.role_options import ReplicatedOptions
from cluster.store.doubling.copied import Record
from cluster.store.doubling.copying import Copying
from cluster.store.doubling.leader import CopyingLeader
from cluster.store.doubling.machine import Rows
from cluster.store.doubling.phases import DOUBLING_KIND, Doubling, counted
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from cluster.store.export.arrow import schema_of
from cluster.store.export.export import Part
from cluster.store.export.service import ExportService
from cluster.store.repair.digests import Digests
from cluster.store.repair.repairer import StoreRepairer
from cluster.store.repair.service import RepairService
from cluster.store.shell import StoreShell
from cluster.wire.v1 import repair_pb2
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import NotLeader, OutcomeUnknown, WrongPartition
from pixiu.wire.export_tables import Columns
from pixiu.wire.v1 import export_pb2
from registry.membership import Membership
from tests.support.file_machine import FileMachine

ADD, KEY, COUNT = struct.Struct("<QQ"), struct.Struct(">cQ"), struct.Struct(">Q")
MARK_KIND = EntryKind.DATA + 1
PART_ROWS = 3
POLL_S = 0.02
T = TypeVar("T")


# --- the keys, and the state machine


class Counting(Copying):
    SPACES = b"c"
    now_s = 0

    def user_of(self, key: bytes) -> int | None:
        return int(KEY.unpack(key)[1]) if key[:1] == self.SPACES else None

    def of_child(self, kind: int, payload: bytes, doubling: Doubling) -> bytes:
        return payload if kind == EntryKind.DATA and doubling.moves(ADD.unpack(payload)[0]) else b""

    def _learn(self, entry: Entry) -> bool:
        if entry.kind == EntryKind.DATA and entry.payload:
            add(self._table, entry.payload)
        return True


def add(table: Any, payload: bytes) -> int:
    key, number = ADD.unpack(payload)
    found = table.get(KEY.pack(b"c", key))
    count: int = COUNT.unpack(found)[0] if found else 0
    if number == count + 1:
        table.put(KEY.pack(b"c", key), COUNT.pack(number))
    return number if number == count + 1 else count


class Rowset:
    """A table, and a view of one."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self.rows, self.get, self.put, self.put_raw = rows, rows.get, rows.__setitem__, rows.__setitem__

    def delete(self, key: bytes) -> None:
        self.rows.pop(key, None)

    def keys(self, low: bytes, high: bytes, limit: int) -> list[bytes]:
        return sorted(key for key in self.rows if low <= key < high)[:limit]

    def part(self) -> Rows:
        return [(key, self.rows.pop(key)) for key in sorted(self.rows)[:PART_ROWS]]

    def close(self) -> None:
        self.rows.clear()


class Sums(NamedTuple):
    total: int
    rows: int
    size: int


class Counter(FileMachine):
    behind, unwritten = False, 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.advanced = asyncio.Event()
        self.cut: Rowset | None = None
        self.on_doubling: Callable[[], None] = lambda: None
        self.marks: dict[bytes, tuple[int, int]] = {}
        """Mark → its counter, and the digest of the state there."""
        self._restore(((0, 0), {}))

    @property
    def applied(self) -> int:
        return self.position.counter

    @property
    def stored(self) -> tuple[int, int]:
        return len(self.table.rows), sum(map(len, self.table.rows.values()))

    def _dumped(self) -> Any:
        return self.position, {key.hex(): value.hex() for key, value in self.table.rows.items()}

    def _restore(self, found: Any) -> None:
        position, rows = found
        self.position = Position(*position)
        self.table = Rowset({bytes.fromhex(key): bytes.fromhex(value) for key, value in rows.items()})
        self.copying = Counting(self.table)
        self.copying.on_open = lambda: setattr(self, "cut", self.view())
        self.on_doubling()

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        record, answers = self.copying.record, list[object]()
        for entry in entries:
            self.position = entry.position
            if entry.kind == DOUBLING_KIND:
                answers.append([[int(self.copying.apply(entry))]])
                continue
            own = entry.kind == EntryKind.DATA and not self.copying.learning
            answers.append(add(self.table, entry.payload) if own else 0)
            if entry.kind == MARK_KIND:
                self.marks[entry.payload] = entry.counter, crc32(json.dumps(self._dumped()[1], sort_keys=True).encode())
        self._flush()
        self.advanced.set()
        if self.copying.record is not record:
            self.on_doubling()
        return answers

    def view(self) -> Rowset:
        return Rowset(dict(self.table.rows))

    def close_cut(self) -> None:
        self.cut = None

    async def read_view(self, view: Rowset, take: Callable[[Rows], T]) -> T | None:
        return take(rows) if (rows := view.part()) else None

    async def digest(self, view: Rowset, moves: Callable[[bytes], bool] | None = None) -> Sums:
        rows = [key + value for key, value in view.rows.items() if moves is None or moves(key)]
        return Sums(sum(map(crc32, rows)), len(rows), sum(map(len, rows)))


# --- the core


class Add(NamedTuple):
    number: int
    payload: bytes


class Layout(NamedTuple):
    partitions: int


class Changed(NamedTuple):
    record: Record
    appended: int


class Answer(NamedTuple):
    number: int
    said: str


class Core:
    def __init__(self, partition: int) -> None:
        self._partition, self._epoch, self._layout, self._changed = partition, 0, 0, Changed(Record(), 0)
        self._waiting: dict[int, int] = {}
        """Counter of an entry → number of its request."""

    def next_deadline(self) -> float:
        return NEVER

    def step(self, event: object, now: float) -> list[Any]:
        match event:
            case Add(number, payload):
                total = counted(self._changed.record, self._layout, self._changed.appended) or 1
                if not self._epoch:
                    return [Answer(number, NotLeader.code)]
                if ADD.unpack(payload)[0] % total != self._partition:
                    return [Answer(number, WrongPartition.code)]
                return [Propose(number, [(EntryKind.DATA, payload)])]
            case Accepted():
                self._waiting[event.first] = event.token
            case Refused(number, refusal):
                return [Answer(number, refusal.code)]
            case Committed(first, values, copies):
                told = [(self._waiting.pop(first + at, None), str(value)) for at, value in enumerate(values)]
                return [Answer(to, said if copies else OutcomeUnknown.code) for to, said in told if to is not None]
            case LeaderChanged(epoch):
                self._epoch, lost = epoch, list(self._waiting.values())
                self._waiting.clear()
                return [Answer(number, OutcomeUnknown.code) for number in lost]
            case Layout(partitions):
                self._layout = partitions
            case Changed():
                self._changed = event
        return []


# --- the shell


class Export(ExportService):
    TABLES: ClassVar[dict[str, Columns]] = {"counts": (("key", "long"), ("count", "long"))}
    opened = True

    def __init__(self, context: Context[Any], machine: Counter) -> None:
        super().__init__(context)
        self._machine = machine

    def bounds(self, request: export_pb2.BoundsRequest) -> export_pb2.BoundsReply:
        return export_pb2.BoundsReply(applied=self._machine.applied)

    async def parts(self, request: export_pb2.RowsOfRequest, columns: Columns, users: frozenset[int]) -> Callable[[], Part]:
        view = self._machine.view()

        def part() -> Part:
            rows = [(KEY.unpack(key)[1], COUNT.unpack(value)[0]) for key, value in view.part() if key[:1] == Counting.SPACES]
            batch = pa.RecordBatch.from_pylist([dict(zip(("key", "count"), row, strict=True)) for row in rows], schema_of(columns))
            return Part(batch, last=not view.rows)

        return part


class Repairer(StoreRepairer):
    RANGES = "one"

    def __init__(self, context: Context[Any], machine: Counter, replica: Any) -> None:
        super().__init__(context, replica)
        self._machine = machine

    @property
    def opened(self) -> bool:
        return True

    async def verify(self, repair: bool) -> repair_pb2.VerifyReply:
        return repair_pb2.VerifyReply(checked=self._machine.stored[0])

    def mark(self) -> int:
        return random.getrandbits(64)

    async def digests(self, mark: int, *, leads: bool) -> Digests:
        if leads:
            await self._replica.propose([(MARK_KIND, COUNT.pack(mark))])
        while COUNT.pack(mark) not in self._machine.marks:
            await asyncio.sleep(POLL_S)
        position, digest = self._machine.marks.pop(COUNT.pack(mark))
        return Digests(position, {0: digest})


class Service(StoreShell):
    def __init__(self, context: Context[ReplicatedOptions]) -> None:
        self._machine = Counter(Path(context.options.data_dir) / "state")
        runner: Runner[Any, Any] = Runner(Core(context.options.partition), context.now)
        super().__init__(context, self._machine, runner, lambda: True)
        self._doubling = CopyingLeader(
            context, self._machine, self._replica, lambda: None, lambda *changed: runner.step(Changed(*changed))
        )
        RepairService(context, self._replica, Repairer(context, self._machine, self._replica))
        self._export = Export(context, self._machine)
        self._answers: list[asyncio.Future[bytes]] = []
        runner.effects.on(Answer, lambda answer: self._answers[answer.number].set_result(answer.said.encode()))
        handlers: Any = {"Add": grpc.unary_unary_rpc_method_handler(self._add)}
        context.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Counter", handlers),))

    async def _add(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._runner.step(Add(len(self._answers) - 1, data))
        return await answer

    def _leader_changed(self, epoch: int) -> None:
        if epoch:
            self._doubling.leading()
        super()._leader_changed(epoch)
        if not epoch:
            self._doubling.deposed()

    def _applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        self._runner.step(Committed(first, answers, copies))

    async def prepare(self, node: Node) -> Node:
        await asyncio.to_thread(self._machine.open)
        return await self._replica.prepare(node)

    async def start(self) -> None:
        await self._replica.start()

    async def drain(self) -> None:
        await self._replica.drain()

    async def stop(self) -> None:
        self._export.exporter.close()
        await self._doubling.close()
        await self._replica.stop()
        self.stop_runners()

    def health(self) -> dict[str, object]:
        return {"replication": self._replica.status()}

    def on_view(self, view: View) -> None:
        self._runner.step(Layout(view.layout.partitions("pi")))
        self._doubling.look()


if __name__ == "__main__":
    sys.exit(run_role("pi", ReplicatedOptions, Service, sys.argv[1:], membership=Membership))
