"""A Pi replica's shell: gRPC streams, the replicated log and the inboxes around its core.

    DATA_DIR/replica    the log, and snapshots on their way
    DATA_DIR/inboxes    the state

Source: PiXiu §6.2; docs/architecture.md, "A mail is sent", docs/stores.md, docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.rpc.methods import EXCHANGE
from cluster.store.doubling.copied import Record
from cluster.store.doubling.leader import CopyingLeader
from cluster.store.doubling.phases import Phase
from cluster.store.doubling.service import phase_samples
from cluster.store.events import Committed, Propose
from cluster.store.repair.service import RepairService
from cluster.store.shell import StoreShell
from pi import events as ev
from pi.core import Core
from pi.inboxes.reading import Read
from pi.options import Options
from pi.store.machine import Machine
from pi.store.repairer import Repairer
from pi.streams.export import PiExport
from pi.streams.streams import PiService, level_of, message_of, reads_of
from pi.streams.work import work_of
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, Draining, Overloaded, PixiuError, StateDamaged
from pixiu.ids import msg_lane
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc

DRAIN_POLL_S: Final = 0.02
BEHIND_RETRY_MS: Final = 200
"""Time after which a caller may try again while LMDB lags, milliseconds."""
DAMAGED: Final = "pi_state_damaged"
SET_ASIDE: Final = "pi_state_set_aside"


class Service(StoreShell):
    """Pi's shell: runs one `pi.core.Core` over a replica."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        options = context.options
        inboxes = Path(options.data_dir) / "inboxes"
        self._machine = Machine(inboxes, options.store_mb << 20, options.heads_cached, options.flush_interval_s, self._failed)
        self._core = Core(
            partition=options.partition, inboxes=self, limits=options.limits(), clock_interval_s=options.clock_interval_s
        )
        self._runner: Runner[ev.Event, ev.Effect] = Runner(self._core, context.now, tick=TICK, end_of_turn=END_OF_TURN)
        super().__init__(context, self._machine, self._runner, lambda: not (self._machine.refuses or self._machine.beyond))
        self.repairer = Repairer(context, self._machine, self._replica, self.spawn)
        RepairService(context, self._replica, self.repairer)
        self._doubling = CopyingLeader(context, self._machine, self._replica, self._end_turn, self._doubling_changed)
        self._draining = False
        self._opened_s = 0.0
        self._runner.effects.on(ev.Reply, self._reply)
        served = PiService(self, context.audit)
        self._streams = served.streams
        pi_pb2_grpc.add_PiServicer_to_server(served, context.server)
        context.streams.serve(EXCHANGE, pi_pb2.PiRequest.FromString, served.exchange_framed)
        self._export = PiExport(context, self._machine)
        context.metrics.collect_from(self._samples)

    # --- what the runtime calls

    async def prepare(self, node: Node) -> Node:
        """Open the inboxes and the log; returns the node with this replica's member."""
        began = time.monotonic()
        if await asyncio.to_thread(self._machine.open):
            self._context.log.error(SET_ASIDE, folder=self._context.options.data_dir)
        found = await self._replica.prepare(node)
        self._runner.step(ev.DoublingChanged(self._doubling.record))
        self._opened_s = time.monotonic() - began
        return found

    def on_view(self, view: View) -> None:
        """Note the addresses of other partitions."""
        addresses = {node.partition: node.address for node in view.of_role("pi") if node.state is NodeState.RUNNING}
        self._runner.step(ev.LayoutChanged(view.layout.version, view.layout.partitions("pi"), addresses))
        self._doubling.look()

    async def start(self) -> None:
        """Start; the leader becomes known later."""
        self._machine.start(self._context.options.scrub_keys_per_s)
        await self._replica.start()

    async def drain(self) -> None:
        """Accept no new streams and no more writes, answer pending requests, hand over."""
        self._draining = True
        while self._core.under_way:
            await asyncio.sleep(DRAIN_POLL_S)
        await self._replica.drain()

    async def stop(self) -> None:
        """Write remaining changes and close everything."""
        self._export.exporter.close()
        await self._doubling.close()
        await self._replica.stop()
        self.stop_runners()
        await self.cancel_tasks()
        await self._machine.close()

    def health(self) -> dict[str, object]:
        """Report replication and problems."""
        status, opened = self._replica.status(), self._machine.opened
        degraded = status["degraded"] or self._damage or (self._doubling.problem if opened else "")
        return {
            "replication": {**status, "degraded": degraded},
            "degraded": degraded,
            "streams": len(self._streams),
            "disk_full": self._machine.full or self._machine.beyond or self._replica.log_full,
            "damage": self._damage,
            "doubling": Phase(self._doubling.record.phase if opened else Phase.NONE).name,
            "opened_s": round(self._opened_s, 3),
        }

    # --- what the streams call

    def admit(self) -> None:
        """Raise Draining if no new stream is taken."""
        if self._draining:
            raise Draining("this replica is draining; use the next leader")

    def request(self, number: int, request: pi_pb2.PiRequest) -> None:
        """Give a stream's request to the core."""
        self._note_leader()
        reads = reads_of(request)
        if self._core.epoch:
            uin, count = work_of(request.operations, [read.uin for read in reads], random.random())
            if count:
                self._context.hot_users.add(uin, count, time.time())
        self._runner.step(ev.Requested(number, request.request, request.operations, level_of(request), reads))

    def left(self, number: int) -> None:
        """Report a stream that has ended."""
        self._runner.step(ev.StreamClosed(number))

    # --- what the core reads

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False, notes: bool = False,
    ) -> Read:  # fmt: skip
        """Entries of an inbox. Raises ReadRefusal, StateDamaged."""
        try:
            return self._machine.read(uin, number, lane, session, start, count, before, devices, notes)
        except StateDamaged as damage:
            self._machine.damaged = str(damage)
            self.repairer.damaged(str(damage))
            raise

    def stored(self, msg_id: int, uin: int) -> int:
        """Return the InboxSeq of a MsgID in a user's inbox; 0: it is not there. Raises StateDamaged."""
        return self._machine.state.inboxes.number_of(uin, msg_lane(msg_id), msg_id)

    def may_grow(self) -> bool:
        """True if there is space for mail."""
        return not self._machine.beyond

    def may_read(self) -> bool:
        """True if the values just read are the newest there are; for a state that stands still, if nobody has newer ones."""
        return self._replica.lease_valid() or (self._machine.stands and self._replica.holds_lease())

    # --- the replica

    def _end_turn(self) -> None:
        self._runner.step(END_OF_TURN)

    def _doubling_changed(self, record: Record, appended: int) -> None:
        self._runner.step(ev.DoublingChanged(record, appended))

    def _leader_changed(self, epoch: int) -> None:
        if epoch:
            self._doubling.leading()
        super()._leader_changed(epoch)
        if not epoch:
            self._doubling.deposed()

    def _applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        if self._core.epoch:
            self._runner.step(Committed(first, answers, copies))

    def _check(self, effect: Propose) -> None:
        refused = self._machine.refuses or (DiskFull(self._machine.beyond) if effect.grows else None)
        if refused is not None:
            if self._replica.leave_for_space():
                raise Draining("this replica cannot write its inboxes; use the next leader")
            raise refused
        if self._draining:  # else work would always be pending, and there would be no hand-over
            raise Draining("this replica is draining; use the next leader")
        if self._machine.behind:
            raise Overloaded("LMDB writes lag behind the log; retry later", BEHIND_RETRY_MS)

    # --- damage

    @property
    def _damage(self) -> str:
        damage = self._machine.damaged
        return f"{damage}; {self.repairer.alone}" if damage and self.repairer.alone else damage

    def _failed(self, error: PixiuError) -> None:
        """Handle inboxes that cannot be written, or are broken."""
        self._context.log.error(DAMAGED, error=str(error), code=error.code)
        if self._machine.stop.at:
            self._runner.step(ev.StoodStill(self._machine.stop.text))
        if isinstance(error, StateDamaged):
            self.repairer.damaged(str(error))
        else:
            self._context.crash(error)

    def _reply(self, effect: ev.Reply) -> None:
        message = message_of(effect)
        self._streams.answer(effect.stream, message, message.ByteSize())

    def _samples(self) -> dict[str, object]:
        machine = self._machine
        if not machine.opened:
            return {}
        return {
            **totals(self._core.counters),
            **self._export.exporter.samples(),
            "leads": int(bool(self._core.epoch)),
            "dropped_entries_total": machine.state.inboxes.dropped,
            "malformed_entries_total": machine.state.damaged_entries,
            "transactions_total": machine.transactions,
            "unwritten_changes": machine.state.unwritten,
            "store_bytes": machine.store.bytes_used,
            "store_live_bytes": machine.store.bytes_live,
            "disk_full": int(bool(machine.full or machine.beyond or self._replica.log_full)),
            "damaged": int(bool(self._damage)),
            "scrubbed_values_total": machine.scrubbed,
            "streams": len(self._streams),
            "doubling_phase{phase}": phase_samples(self._doubling.record.phase),
        }
