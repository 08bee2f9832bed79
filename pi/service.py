"""A Pi replica's shell: gRPC streams, the replicated log and the inboxes around its core.

    DATA_DIR/replica    the log, and snapshots on their way
    DATA_DIR/inboxes    the state

Source: seed 004 §6.2; DESIGN sections 9 ("Mail"), 11, 12 and 14.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from cluster.links.api import Outcome, PeerState
from cluster.replication import proposals
from cluster.replication.replica import Replica
from cluster.runtime.context import Context
from pi.comparing import Comparer, ReplicasService
from pi.core import Core
from pi.events import (
    Appended,
    Effect,
    EntryApplied,
    Event,
    LayoutChanged,
    LeaderChanged,
    Level,
    LogPersisted,
    Notify,
    ProposalAccepted,
    ProposalRejected,
    Propose,
    Reply,
    Requested,
    StreamClosed,
    Tick,
    TurnEnded,
)
from pi.export import PiExport
from pi.machine import Machine
from pi.operations import ENTRY_KIND
from pi.options import Options
from pi.reading import Read
from pi.state import Results
from pi.streams import PiService, Stream, level_of, message_of, reads_of
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, Draining, OutcomeUnknown, Overloaded, PixiuError, StateDamaged, StorageError
from pixiu.ids import EndpointID
from pixiu.wire.v1 import export_pb2_grpc, pi_pb2, pi_pb2_grpc, pi_replicas_pb2_grpc

DRAIN_POLL_S: Final = 0.02
DAMAGED: Final = "pi_state_damaged"
ANSWER_S: Final = 0.5
"""From the answer to an operator to the end of a process that begins again."""
SET_ASIDE: Final = "pi_state_set_aside"
NOT_MARKED: Final = "pi_state_not_marked"


class Service:
    """Runs one `pi.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        options = context.options
        folder = Path(options.data_dir)
        self._machine = Machine(
            folder / "inboxes", options.store_mb << 20, options.heads_cached, options.flush_interval_s, self._failed,
        )  # fmt: skip
        self._core = Core(
            partition=options.partition, inboxes=self, limits=options.limits(), clock_interval_s=options.clock_interval_s
        )
        self._replica = Replica(
            context, self._machine, folder / "replica", options.replication(),
            on_leading=self._leading, on_deposed=self._deposed, segment_bytes=options.segment_mb << 20,
        )  # fmt: skip
        self._comparer = Comparer(self._machine, self._replica)
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._opened_s = 0.0
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.Handle | None = None
        self._notified = 0
        self.on_appended: Callable[[Sequence[Appended]], None] = self._count_notified
        """Called with what inboxes have now, after it was applied: who delivers mail is told by it."""
        pi_pb2_grpc.add_PiServicer_to_server(PiService(self), context.server)
        pi_replicas_pb2_grpc.add_PiReplicasServicer_to_server(ReplicasService(self._comparer, self._begin_again), context.server)
        self._export = PiExport(self._machine, options)
        export_pb2_grpc.add_ExportServicer_to_server(self._export, context.server)
        context.metrics.collect_from(self._samples)

    # --- what the runtime calls

    async def prepare(self, node: Node) -> Node:
        """Open the inboxes and the log; returns the node with this replica's member."""
        began = time.monotonic()
        if await asyncio.to_thread(self._machine.open):
            self._context.log.error(SET_ASIDE, folder=self._context.options.data_dir)
        found = await self._replica.prepare(node)
        self._opened_s = time.monotonic() - began
        return found

    def on_view(self, view: View) -> None:
        """Where other partitions are."""
        self._export.view = view
        addresses = {node.partition: node.address for node in view.of_role("pi") if node.state is NodeState.RUNNING}
        self._step(LayoutChanged(view.layout.version, view.layout.partitions("pi"), addresses))

    async def start(self) -> None:
        """Take part: who leads is found out by and by."""
        self._machine.start(self._context.options.scrub_keys_per_s)
        await self._replica.start()
        self._tick()

    async def drain(self) -> None:
        """Take no new streams, answer what is under way, hand over."""
        self._draining = True
        while self._core.under_way:
            await asyncio.sleep(DRAIN_POLL_S)
        await self._replica.drain()

    async def stop(self) -> None:
        """Write what is left and close everything."""
        for timer in (self._timer, self._turn):
            if timer is not None:
                timer.cancel()
        self._export.exporter.close()
        await self._replica.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._machine.close()

    def health(self) -> dict[str, object]:
        """Who leads, and what is wrong."""
        status = self._replica.status()
        return {
            "replication": status,
            "degraded": status["degraded"] or self._damage,
            "streams": len(self._streams),
            "disk_full": self._machine.full,
            "damage": self._damage,
            "opened_s": round(self._opened_s, 3),
        }

    # --- what the links call: nothing comes by them

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """No role sends records to Pi."""
        return Outcome.MALFORMED

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """No role sends control messages to Pi."""
        return Outcome.MALFORMED

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Nothing was sent."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """There are no peers on links."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Nothing to add."""
        return b""

    # --- what the streams call

    def admit(self, stream: Stream) -> int:
        """A number for a new stream. Raises Overloaded or Draining."""
        if self._draining:
            raise Draining("this replica is going; use the next leader")
        if len(self._streams) >= self._context.options.max_streams:
            raise Overloaded(f"this replica has {len(self._streams)} streams (pi.max_streams); try again later", 1000)
        number = next(self._numbers)
        self._streams[number] = stream
        return number

    def request(self, number: int, request: pi_pb2.PiRequest) -> None:
        """A request."""
        if not self._core.epoch:
            self._step(LeaderChanged(0, self._replica.leader_address))
        self._step(Requested(number, request.request, request.operations, level_of(request), reads_of(request)))
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def left(self, number: int) -> None:
        """The stream is gone."""
        self._streams.pop(number, None)
        self._step(StreamClosed(number))

    def _end_turn(self) -> None:
        self._turn = None
        self._step(TurnEnded())

    # --- what the core reads

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False,
    ) -> Read:  # fmt: skip
        """Entries of an inbox. Raises Refusal, StateDamaged."""
        try:
            return self._machine.read(uin, number, lane, session, start, count, before, devices)
        except StateDamaged as damage:
            self._damaged(str(damage))
            raise

    def may_read(self) -> bool:
        """Whether what was just read is the newest there is."""
        return self._replica.lease_valid()

    # --- the replica

    def _leading(self, epoch: int) -> None:
        self._step(LeaderChanged(epoch, ""))
        if self._timer is not None:  # a new leader's clock entry, with its limits, is due at once
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_soon(self._tick)

    def _deposed(self, epoch: int) -> None:
        self._step(LeaderChanged(0, ""))

    def _propose(self, effect: Propose) -> None:
        """Write an entry, and say what becomes of it."""
        level = proposals.Level.REPLICATED if effect.replicated else proposals.Level.PERSISTED
        try:
            if self._machine.full:
                raise DiskFull(self._machine.full)
            if self._machine.behind:
                raise Overloaded("the inboxes' disk does not follow; try again later")
            proposal = self._replica.submit([(ENTRY_KIND, effect.payload)], level)
        except PixiuError as refused:
            self._step(ProposalRejected(effect.token, refused.code, str(refused)))
            return
        self._step(ProposalAccepted(effect.token, proposal.epoch, proposal.first))
        task = asyncio.create_task(self._follow(proposal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, proposal: proposals.Proposal) -> None:
        try:
            await proposal.reached(proposals.Level.PERSISTED)
            self._step(LogPersisted(proposal.first))
            written = await proposal.reached(proposals.Level.REPLICATED)
        except OutcomeUnknown:  # whoever waits was told when this replica was deposed
            return
        (results,) = written.answers
        assert isinstance(results, list)
        applied: list[Results] = results
        self._step(EntryApplied(proposal.first, applied, written.copies))

    # --- damage

    async def verify(self, repair: bool) -> tuple[int, str, bool]:
        """Check what is stored: the values that are whole, what is broken, and whether a repair begins. Raises PixiuError."""
        try:
            return await self._machine.verify(), "", False
        except StateDamaged as damage:
            self._machine.damaged = str(damage)
            return 0, str(damage), repair and self._begin_again(str(damage))

    def _begin_again(self, text: str) -> bool:
        """Take the state from another replica, if there is one that has it; whether this begins. Raises DiskFull, DiskFailed."""
        if not self._others_in_sync():
            return False
        self._machine.mark_damaged(text)
        # The answer leaves before the process does.
        asyncio.get_running_loop().call_later(ANSWER_S, self._end_to_begin_again, text)
        return True

    def _end_to_begin_again(self, text: str) -> None:
        self._context.crash(StateDamaged(f"{text}; after a restart this replica takes its inboxes from another one"))

    def _others_in_sync(self) -> bool:
        status = self._replica.status()
        in_sync = status.get("in_sync")
        return isinstance(in_sync, list) and bool(set(in_sync) - {status["member"]})

    @property
    def _damage(self) -> str:
        return self._core.damaged or self._machine.damaged

    def _damaged(self, text: str) -> None:
        """A value is broken. With another replica in sync this one takes its state from there; alone it serves what it can."""
        if not self._others_in_sync():
            return
        try:
            self._machine.mark_damaged(text)
        except StorageError as full:  # the scrub, a read or an operator finds the damage again
            self._context.log.error(NOT_MARKED, error=str(full), code=full.code)
            return
        self._end_to_begin_again(text)

    def _failed(self, error: PixiuError) -> None:
        """The inboxes cannot be written, or are broken."""
        self._context.log.error(DAMAGED, error=str(error), code=error.code)
        if isinstance(error, StateDamaged):
            self._damaged(str(error))
        else:
            self._context.crash(error)

    # --- the core

    def _step(self, event: Event) -> None:
        for effect in self._core.step(event, self._context.now()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Propose):
            self._propose(effect)
        elif isinstance(effect, Reply):
            stream = self._streams.get(effect.stream)
            if stream is not None:
                stream.answer(message_of(effect))
        elif isinstance(effect, Notify):
            self.on_appended(effect.appended)

    def _tick(self) -> None:
        self._step(Tick())
        delay = min(max(self._core.next_deadline() - self._context.now(), 0.05), self._context.options.clock_interval_s)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _count_notified(self, appended: Sequence[Appended]) -> None:
        self._notified += len(appended)

    def _samples(self) -> dict[str, Any]:
        machine = self._machine
        if not machine.opened:
            return {}
        return {
            **{f"{name}_total": value for name, value in self._core.counters.items()},
            **self._export.exporter.samples(),
            "leads": int(bool(self._core.epoch)),
            "dropped_entries_total": machine.state.dropped,
            "malformed_entries_total": machine.state.damaged_entries,
            "transactions_total": machine.transactions,
            "unwritten_changes": machine.state.unwritten,
            "store_bytes": machine.store.bytes_used,
            "disk_full": int(bool(machine.full)),
            "damaged": int(bool(self._damage)),
            "scrubbed_values_total": machine.scrubbed,
            "notified_total": self._notified,
            "streams": len(self._streams),
        }


assert int(Level.REPLICATED) == int(pi_pb2.PI_LEVEL_REPLICATED), "a request without a level is the safest"
