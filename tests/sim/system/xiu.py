"""A Xiu replica: its production core and reading, over a store and a table in memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import xiu.core
import xiu.events as xe
from cluster.core.contract import Settle, Tick
from cluster.links.api import Outcome
from cluster.replication.core.events import Accepted, Persisted
from cluster.replication.model import Entry, Position
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pixiu.errors import PixiuError, Refusal
from pixiu.wire.levels import Level
from pixiu.wire.v1 import xiu_pb2
from tests.sim.replication.disk import Disk
from tests.sim.system.base import Unlinked
from tests.sim.system.replica import Kept, Replica
from tests.sim.system.streams import Stream
from tests.sim.system.xiu_doubler import XiuDoubler
from xiu.records import block as blocks
from xiu.records.block import Block
from xiu.state.keys import BLOCKS, KEY, MARK, MARKS
from xiu.state.state import Decision, Head
from xiu.store.reading import Reading
from xiu.store.repair import Cursor

MAX_RECORD_BYTES: Final = 1 << 20


class Rows:
    """The twin of `xiu.store.store.Store`: a dict. `durable` is what a crash leaves."""

    def __init__(self, durable: tuple[dict[bytes, bytes], Head] | None) -> None:
        rows, self.head = durable if durable is not None else ({}, Head())
        self.rows = dict(rows)
        self._firsts = sorted(KEY.unpack(key)[1] for key in rows if key[:1] == BLOCKS and len(key) == KEY.size)

    def get_many(self, keys: list[bytes]) -> Sequence[bytes | None]:
        """See `xiu.core.Store`."""
        return [self.rows.get(key) for key in keys]

    def row_before(self, key: bytes) -> tuple[bytes, bytes] | None:
        """See `xiu.core.Store`."""
        found = max((there for there in self.rows if there <= key), default=None)
        return None if found is None else (found, self.rows[found])

    def write(self, decisions: Iterable[Decision]) -> None:
        """See `xiu.core.Store`."""
        for decision in decisions:
            for key, value in decision.puts:
                if key[:1] == BLOCKS and key not in self.rows:
                    bisect.insort(self._firsts, KEY.unpack(key)[1])
                self.rows[key] = value
            for begin, end in decision.deletes:
                for key in [key for key in self.rows if begin <= key < end]:
                    del self.rows[key]
            self.head = decision.head

    def reopen(self) -> None:
        """See `xiu.core.Store`."""
        raise AssertionError("no write fails here")

    def marks(self, begin: int = 0) -> Iterator[tuple[int, int, int]]:
        """See `xiu.core.Store`."""
        for key in sorted(key for key in self.rows if key[:1] == MARKS):
            if KEY.unpack(key)[1] >= begin:
                yield KEY.unpack(key)[1], *MARK.unpack(self.rows[key])

    def block_of(self, sequence: int) -> Block | None:
        """See `xiu.store.reading.StoredBlocks`."""
        at = bisect.bisect_right(self._firsts, sequence)
        if not at:
            return None
        first = self._firsts[at - 1]
        block = blocks.decode(first, self.rows[KEY.pack(BLOCKS, first)])
        assert block is not None
        return block if sequence <= block.last else None

    def next_first(self, sequence: int) -> int | None:
        """See `xiu.store.reading.StoredBlocks`."""
        at = bisect.bisect_left(self._firsts, sequence)
        return self._firsts[at] if at < len(self._firsts) else None

    def last_before(self, sequence: int) -> int:
        """See `xiu.store.reading.StoredBlocks`."""
        raise AssertionError("nobody exports here")

    def scan(self, sequence: int) -> Iterator[Block]:
        """See `xiu.store.reading.StoredBlocks`."""
        raise AssertionError("nobody scans here")

    def cursor(self) -> Cursor:
        """See `xiu.store.reading.StoredBlocks`."""
        raise AssertionError("nobody repairs here")


class NoTable:
    """The twin of a table with no space for what is persisted: everything is read from the store."""

    def __init__(self) -> None:
        self._unpersisted: dict[int, None] = {}

    def has_space(self, records_bytes: int) -> bool:
        """See `xiu.core.Table`."""
        return True

    def put(self, new: Sequence[tuple[Block, bytes]], persisted: bool) -> bool:
        """See `xiu.core.Table`."""
        self._unpersisted.update((block.first, None) for block, _ in new)
        return True

    def persisted(self, firsts: Iterable[int]) -> None:
        """See `xiu.core.Table`."""
        for first in firsts:
            self._unpersisted.pop(first, None)

    def dropped(self) -> int:
        """See `xiu.core.Table`."""
        count = len(self._unpersisted)
        self._unpersisted.clear()
        return count

    def trim(self, floor: int) -> None:
        """See `xiu.core.Table`."""

    def get(self, sequence: int) -> Block | None:
        """See `xiu.store.reading.RecentBlocks`."""
        return None


class Machine:
    """See `tests.sim.system.replica.Machine`."""

    def __init__(self, process: XiuProcess, kept: Kept) -> None:
        self._process, self._kept = process, kept

    @property
    def position(self) -> Position:
        """See `Machine`."""
        return self._process.store.head.applied

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """See `Machine`."""
        process = self._process
        before = self.position.counter
        process.step(Committed(entries[0].counter, entries, process.replica.copies))
        assert self.position.counter == entries[-1].counter
        process.world.mail.stored(process, entries)
        return [None] * (self.position.counter - before)

    def flush(self) -> int:
        """See `Machine`."""
        self._kept.state = self.snapshot()
        return self.position.counter

    def snapshot(self) -> object:
        """See `Machine`."""
        return dict(self._process.store.rows), self._process.store.head

    def load(self, snapshot: Any) -> None:
        """See `Machine`."""
        store = Rows(snapshot)
        process = self._process
        process.store.rows, process.store.head, process.store._firsts = store.rows, store.head, store._firsts
        self._kept.state = snapshot
        process.core.replaced()


class XiuProcess(Unlinked):
    """One replica of a partition of Xiu."""

    def start_core(self) -> None:
        """See `Process`."""
        place, world = self.place, self.world
        if place.kept is None:
            place.kept = Kept(Disk(), None)
        kept: Kept = place.kept
        self.store, self.table = Rows(kept.state), NoTable()
        self._streams: dict[int, Stream] = {}
        self._number = 0
        partition = world.partitions["xiu", place.partition]
        machine = Machine(self, kept)
        self.replica = Replica(self, partition, place.number + 1, kept.disk, machine, self._led)
        settings = xiu.core.CoreSettings(partition=place.partition, max_record_bytes=MAX_RECORD_BYTES)
        self.core = world.variant.xiu(settings, self.replica.log, self.store, self.table)
        self.doubler = XiuDoubler(self)
        self.reading = Reading(place.partition, self.store, self.table)
        self.after(0.02, lambda: self.set_state("Running"))

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """See `Served`."""
        return {"Store": self._store, "Fetch": self._fetch, "Position": self._position, "Ask": self.doubler.asked}

    def on_view(self) -> None:
        """See `Process`."""
        addresses = {node.partition: "{}:{}".format(*node.address) for node in self.view.running("xiu")}
        serving = tuple(addresses.get(partition, "") for partition in range(self.view.next("xiu")))
        self.step(xe.LayoutChanged(self.view.version, self.view.count("xiu"), serving))

    def deadline(self) -> float:
        """See `Process`."""
        return min(self.replica.deadline(), self.core.next_deadline())

    def tick(self) -> None:
        """See `Process`."""
        if self.core.next_deadline() < self.world.now:
            self.step(Tick())
        self.replica.tick()

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`."""
        self.replica.drain(done)

    def crash(self) -> None:
        """See `Process`."""
        super().crash()
        self.replica.crash()

    # --- streams

    def _store(self, stream: Stream) -> None:
        self._number += 1
        number = self._number
        self._streams[number] = stream
        stream.take = lambda request: self._requested(number, request)
        stream.left = lambda: self._left(number)

    def _left(self, number: int) -> None:
        self._streams.pop(number, None)

    def _requested(self, number: int, request: xiu_pb2.StoreRequest) -> None:
        level = Level.from_wire(request.level)
        assert level is not None
        self.step(xe.StoreReceived(number, request.position, level, request.epoch, request.batch, request.count))

    def _fetch(self, stream: Stream) -> None:
        def take(request: xiu_pb2.FetchRequest) -> None:
            found = self.reading.fetch(request.msg_ids)
            records, codes = b"".join(each.record for each in found), [each.code for each in found]
            stream.reply(xiu_pb2.FetchReply(batch=records, codes=codes, partial=len(found) < len(request.msg_ids)))

        stream.take = take

    def _position(self, stream: Stream) -> None:
        def take(request: xiu_pb2.PositionRequest) -> None:
            reply = xiu_pb2.PositionReply(partition=self.place.partition, epoch=self.core.epoch, committed=self.core.committed)
            reply.leader, reply.last = self.replica.leader_address, self.store.head.last
            stream.reply(reply)

        stream.take = take

    # --- the core

    def _led(self, epoch: int) -> None:
        self.step(LeaderChanged(epoch))

    def step(self, event: xe.Event) -> None:
        """Give the core an event and do what it asks for."""
        if not self.alive:
            return
        for effect in self.core.step(event, self.world.now):
            match effect:
                case xe.Answer(stream):
                    found = self._streams.get(stream)
                    if found is not None:
                        found.reply(self._reply(effect))
                case Propose():
                    self._propose(effect)
                case xe.AskParent():
                    self.doubler.ask(effect)
                case Settle(outcome):
                    assert outcome is Outcome.TAKEN, "no write fails here"
                case _:
                    raise AssertionError(f"a Xiu says {effect}")

    def _propose(self, effect: Propose) -> None:
        last = [0]

        def persisted() -> None:
            if not effect.replicated:
                self.step(Persisted(last[0]))

        try:
            verdict = self.replica.submit(effect.payloads, effect.replicated, persisted, lambda *_: None)
        except PixiuError as error:
            self.step(Refused(effect.token, Refusal.of(error)))
        else:
            last[0] = verdict.last
            self.step(Accepted(effect.token, verdict.epoch, verdict.first, verdict.last))

    def _reply(self, answer: xe.Answer) -> xiu_pb2.StoreReply:
        return xiu_pb2.StoreReply(
            results=[
                xiu_pb2.StoreResult(
                    position=r.position, count=r.count, sequence=r.sequence, msg_id=r.msg_id, code=r.code, text=r.text,
                    partitions=r.partitions, retry_after_ms=r.retry_after_ms,
                )
                for r in answer.results
            ],
            layout_version=answer.triple.layout_version, epoch=answer.triple.epoch, committed=answer.triple.committed,
            copies=answer.copies, partition=self.place.partition,
            leader="" if answer.triple.epoch else self.replica.leader_address,
        )  # fmt: skip
