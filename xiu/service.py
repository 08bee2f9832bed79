"""A Xiu's shell: its core over a replica of `cluster.replication`, gRPC streams of writers, reads, and periodic work.

    stream ──▶ core ── Propose ──▶ Replica ── accepted, persisted ──▶ core ──▶ answers
                                      └─ committed entries ─▶ Machine ─▶ core ──▶ RocksDB, answers

Source: PiXiu §6.1; docs/stores.md.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.core.contract import Tick
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.links.api import Outcome
from cluster.process.context import Context
from cluster.process.shared_memory import folder_name
from cluster.replication.model import Entry
from cluster.rpc.methods import STORE
from cluster.store.doubling.service import phase_samples
from cluster.store.events import Committed
from cluster.store.repair.service import RepairService
from cluster.store.shell import StoreShell
from pixiu.discovery.node import Node
from pixiu.discovery.view import RoleLayout, View
from pixiu.errors import DiskFull, PixiuError, StorageError, StoreDamaged, Unavailable
from pixiu.wire.v1 import xiu_pb2, xiu_pb2_grpc
from xiu import events as ev
from xiu.core import Core, CoreSettings
from xiu.doubling.cuts import Cuts
from xiu.export.export import XiuExport
from xiu.export.holding import Holding
from xiu.options import Options
from xiu.records.batch import drawn_user
from xiu.records.block import Block
from xiu.records.table import Table, open_table
from xiu.state.keys import BLOCKS, KEY
from xiu.state.restoring import Step
from xiu.state.state import Head
from xiu.store.machine import Machine
from xiu.store.reading import Reading
from xiu.store.repairer import NOT_REPAIRED, Repairer
from xiu.store.store import Store
from xiu.streams import XiuService

SPACE: Final = "disk_space"
STORE_DAMAGED: Final = "store_damaged"
STORE_MENDED: Final = "store_mended"
FLUSH_FAILED: Final = "flush_failed"
RESTORE: Final = "restore"
TRIM: Final = "trim"
LAYOUT_REFUSED: Final = "layout_refused"
SPACE_INTERVAL_S: Final = 1.0
MEND_POLL_S: Final = 0.2
OPEN_POLL_S: Final = 0.1
"""Interval at which a replica checks if it leads a child that may open or is over, seconds."""
MEND_AGAIN_S: Final = 5.0
"""Pause between tries to repair the store, seconds: another replica may have joined."""
LEADER_WAIT_S: Final = 10.0
"""Time limit of a start's wait for a leader of the partition, seconds; then the process is Running without one."""
LEADER_POLL_S: Final = 0.05


def _written(store: Store, keys: Sequence[bytes]) -> list[bool]:
    """Check which rows are in the store. An unreadable one is not kept in the table either: before a repair it is unknown if it was
    committed."""
    try:
        return [value is not None for value in store.get_many(list(keys))]
    except StoreDamaged:
        return [False] if len(keys) == 1 else [each for key in keys for each in _written(store, [key])]


class Service(StoreShell):
    """Xiu's shell: runs one `xiu.core.Core` over a replica."""

    def __init__(self, context: Context[Options]) -> None:
        self._context, self._options = context, context.options
        options = context.options
        memtable, cache = options.memtable_mb << 20, options.cache_mb << 20
        store = Path(options.data_dir) / "store"
        self._machine = Machine(store, memtable, cache, self._apply, self._replaced, self._met_damage)
        self._runner: Runner[ev.Event, ev.Effect] = Runner(None, context.now, tick=Tick())
        super().__init__(context, self._machine, self._runner, self._has_space)
        self.holding = Holding(self._machine, self._replica, options.reader_hold_h)
        self.healer = Repairer(context, self._machine, self._replica, self._catch_up, self._rewound)
        RepairService(context, self._replica, self.healer)
        self.core: Core | None = None
        self.reading: Reading | None = None
        self._table: Table | None = None
        self._layout = ev.LayoutChanged(0, 0)
        self._laid_out: RoleLayout | None = None
        """Layout of Xiu, as accepted last."""
        self._refused: RoleLayout | None = None
        """A layout that does not follow from a doubling."""
        self._not_repaired = ""
        """Reason for the last failed repair, as logged."""
        self._runner.effects.on(ev.NeedEpoch, self._need_epoch)
        self.cuts = Cuts(context, self._replica, self, self._runner.step)
        self._runner.effects.on(ev.AskParent, self.cuts.ask)
        served = XiuService(self, options)
        self._streams = served.streams
        self._runner.effects.on(ev.Answer, lambda effect: self._streams.answer(effect.stream, effect))
        self._runner.effects.on(ev.EndStream, lambda effect: self._streams.end(effect.stream, effect.text))
        xiu_pb2_grpc.add_XiuServicer_to_server(served, context.server)
        context.streams.serve(STORE, xiu_pb2.StoreRequest.FromString, served.store)
        self._export = XiuExport(context, self)
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def prepare(self, node: Node) -> Node:
        """Open the store, the log and the table. Raises ConfigurationError, StorageError."""
        await self._machine.open()
        if self._machine.warning:
            self._context.log.error(STORE_DAMAGED, text=self._machine.warning)
        if self._machine.notice:
            self._context.log.warning(STORE_MENDED, text=self._machine.notice)
        node = await self._replica.prepare(node)
        self._table = table = await asyncio.to_thread(self._open_table)
        options, store = self._options, self._machine.store
        settings = CoreSettings(
            partition=options.partition,
            max_record_bytes=self._context.cluster.max_record_bytes,
            keep_us=int(options.keep_h * 3_600_000_000),
            keep_bytes=options.keep_mb << 20,
            await_restore=options.await_restore,
        )
        self._runner.core = self.core = Core(settings, self._replica.log, store, table)
        self.reading = Reading(options.partition, store, table, self.core.owed)
        self._runner.step(self._layout)
        self._watch_space()
        return node

    def _open_table(self) -> Table:
        """Open the table; drop blocks that are not in the store: the log has them if they commit."""
        options, store, member = self._options, self._machine.store, self._replica.member
        owner = f"{self._context.root}-{options.partition}-{member:016x}"
        folder = Path(options.table_dir) / (options.table_name or folder_name("xiu", owner))
        table = open_table(folder, options.table_mb << 20, member)
        table.recover(lambda firsts: _written(store, [KEY.pack(BLOCKS, first) for first in firsts]))
        table.dropped()
        return table

    async def start(self) -> None:
        """Start; returns when the partition has a leader, or after `LEADER_WAIT_S` without."""
        await self._replica.start()
        self.every(self._options.flush_interval_s, self._flush)
        self.every(self._options.trim_interval_s, self._trim)
        self.every(SPACE_INTERVAL_S, self._watch_space)
        self.every(MEND_POLL_S, self._mend)
        self.every(OPEN_POLL_S, self.cuts.look)
        limit = time.monotonic() + LEADER_WAIT_S
        while not self._replica.leader_address and not self._serves() and time.monotonic() < limit:
            await asyncio.sleep(LEADER_POLL_S)

    def _serves(self) -> bool:
        return self.core is not None and self.core.epoch > 0 and self._replica.lease_valid()

    async def drain(self) -> None:
        """Hand over to another replica, if there is one."""
        await self._replica.drain()

    async def stop(self) -> None:
        """Flush and close; the table is removed if everything is in the store."""
        await self.cancel_tasks()
        self._streams.close()
        self._export.exporter.close()
        await self.healer.close()
        await self.cuts.close()
        self.stop_runners()
        core, self.core, self.reading = self.core, None, None
        await self._replica.stop()
        flushed = False
        if core is not None:
            try:
                await self._machine.flush()
                flushed = True
            except StorageError as error:
                self._context.log.error(FLUSH_FAILED, text=str(error))
        if self._table is not None:
            self._table.close(remove=flushed and core is not None and not core.waiting)
        await self._machine.close()

    def health(self) -> dict[str, object]:
        """Report the partition's status. `degraded` is a text while something needs an operator."""
        status = self._replica.status()
        core = self.core
        degraded = ((core.damaged or core.full or self.cuts.problem) if core is not None else "") or status["degraded"]
        return {
            "replication": {**status, "degraded": degraded},
            "waiting_entries": core.waiting if core is not None else 0,
            "degraded": degraded,
            "doubling": self.head.doubling.phase.name if core is not None else "NONE",
        }

    def on_view(self, view: View) -> None:
        """Take the layout, and the address of each partition's server."""
        there = view.layout.roles.get("xiu")
        if there is not None and self._laid_out is not None and not there.grew(self._laid_out):
            if there != self._refused:
                self._context.log.error(LAYOUT_REFUSED, partitions=there.n, counted=self._laid_out.n)
            self._refused = there
        elif there is not None:
            self._laid_out = there
        counted = self._laid_out or RoleLayout(0, 0)
        serving = [view.replicas("xiu", partition) for partition in range(counted.next)]
        addresses = tuple(nodes[0].address if nodes else "" for nodes in serving)
        self._layout = ev.LayoutChanged(view.layout.version, counted.n, addresses)
        self._runner.step(self._layout)

    # What the streams call.

    @property
    def leader_address(self) -> str:
        """Address of the partition's leader; empty if unknown."""
        return self._replica.leader_address

    def take(self, event: ev.StoreReceived) -> None:
        """Give a writer's batch to the core."""
        self._note_leader()
        if self.core is not None and self.core.epoch and (uin := drawn_user(event.data, event.count, random.random())):
            self._context.hot_users.add(uin, event.count, time.time())
        self._runner.step(event)

    @property
    def member(self) -> int:
        """This replica's MemberID."""
        return self._replica.member

    @property
    def head(self) -> Head:
        """The head of the committed state."""
        return self._machine.store.head

    async def restore(self, step: Step, blocks: Sequence[Block], operator: str, reason: str) -> Head:
        """Take a step of a restore; return the head after it. Raises PixiuError."""
        if self.core is None:
            raise Unavailable("this Xiu is not open; try again soon")
        if step is not Step.BLOCKS:
            self.core.restore_entry(step)  # refused steps are not audited
            what = {"restore": step.name.lower(), "restored": self._machine.store.head.restored}
            await asyncio.to_thread(self._replica.audit, operator, reason, what)
            self._context.log.warning(RESTORE, operator=operator, reason=reason, **what)
        await self._replica.propose([self.core.restore_entry(step, blocks)])
        head = self._machine.store.head
        if bool(head.below) is (step is Step.END) or (blocks and head.restored < blocks[-1].last):
            raise Unavailable("the restore was changed by somebody else meanwhile; begin again")
        return head

    async def trim(self, position: int, operator: str, reason: str) -> Head:
        """Trim records before a position that no reader needs; return the head after it. Raises PixiuError."""
        if self.core is None:
            raise Unavailable("this Xiu is not open; try again soon")
        position = min(position, self.holding.keep_from())
        if self.core.trim_before(position) is not None:
            what = {"trim": position, "floor": self._machine.store.head.floor}
            await asyncio.to_thread(self._replica.audit, operator, reason, what)
            self._context.log.warning(TRIM, operator=operator, reason=reason, **what)
            entry = self.core.trim_before(position)
            if entry is not None:
                await self._replica.propose([entry])
        return self._machine.store.head

    # What the replica calls.

    def _apply(self, entries: Sequence[Entry]) -> str:
        """Pass committed entries to the core; return why they are not written now, or "". The same entries come again then."""
        if self._runner.take(Committed(entries[0].counter, entries, self._replica.copies)) is Outcome.TAKEN:
            self.cuts.applied()
            return ""
        return self.core.why_not if self.core is not None else "the process ends"

    def _replaced(self) -> None:
        if self.core is not None and self._table is not None:
            self._table.clear()
            self.core.replaced()

    def _met_damage(self, text: str) -> bool:
        """Note damage found otherwise than by a read; return True if another replica is in sync that can repair it."""
        self._context.log.error(STORE_DAMAGED, text=text)
        if self.core is not None:
            self.core.met_damage(text)
        return bool(self._replica.others_in_sync)

    def _catch_up(self, store: Store) -> bool:
        return self.core is None or self.core.catch_up(store)

    def _rewound(self) -> None:
        if self.core is not None:
            self.core.rewound(self._context.now())

    # Inside.

    def _need_epoch(self, effect: ev.NeedEpoch) -> None:
        self._context.crash(Unavailable("the sequences of this epoch are used up; the next start takes another epoch"))

    async def _flush(self) -> None:
        if self._machine.applied == self._machine.flushed:
            return
        try:
            await self._machine.flush()
        except (DiskFull, StoreDamaged) as error:
            self._context.log.error(FLUSH_FAILED, text=str(error))
            if isinstance(error, StoreDamaged) and self.core is not None:
                self.core.met_damage(str(error))

    async def _mend(self) -> None:
        """Repair damage found otherwise than by a read, as no further read may find it."""
        if self.core is None or not self.core.damaged:
            return
        try:
            await self.healer.repair()
        except PixiuError as error:
            said = str(error)
            if said != self._not_repaired:
                self._not_repaired = said
                self._context.log.error(NOT_REPAIRED, error=said, code=error.code, damage=self.core.damaged if self.core else "")
            if isinstance(error, StorageError) and self.core is not None and self.core.stuck and self.core.epoch:
                # There is another replica, whose store may be undamaged: it shall lead, and this one wait as a follower.
                self._context.crash(StoreDamaged(f"this leader can store nothing, and its store is not repaired: {said}"))
            await asyncio.sleep(MEND_AGAIN_S)

    def _trim(self) -> None:
        try:
            self._runner.step(ev.TrimDue(self._replica.now_us(), self.holding.keep_from()))
        except StoreDamaged as damage:
            if self.core is not None:
                self.core.met_damage(str(damage))

    def _watch_space(self) -> None:
        assert self.core is not None
        space = ev.SpaceChanged(self._machine.free_bytes() >> 20, self._options.reserve_mb)
        enough = space.enough
        if (not enough or self.core.full) and self._replica.leave_for_space() and not enough:
            return  # the replica refuses writes like a draining one, until another one leads
        if enough is not self.core.enough_space:
            self._context.log.warning(
                SPACE, enough=enough, free_mb=space.free_mb, reserve_mb=space.reserve_mb, folder=self._options.data_dir
            )
        self._runner.step(space)

    def _has_space(self) -> bool:
        """True if this store has the space that a leader needs, and a margin."""
        blocked = self.core is not None and self.core.full
        return not blocked and self._machine.free_bytes() >= 2 * self._options.reserve_mb << 20

    def _samples(self) -> dict[str, object]:
        core, table = self.core, self._table
        if core is None or table is None:
            return {}
        return {
            **totals(core.counters),
            **core.samples(),
            **self._export.exporter.samples(),
            "reader_lag{reader}": self._export.reader_lags(),
            **totals(table.counters, "table_"),
            "table_bytes": table.used_bytes,
            "table_unpersisted": table.unpersisted,
            "flushed": self._machine.flushed,
            "reads_damaged_total": self.reading.damaged if self.reading is not None else 0,
            "streams": len(self._streams),
            "doubling_phase{phase}": phase_samples(self.head.doubling.phase),
            **totals(self.healer.counters),
        }  # fmt: skip
