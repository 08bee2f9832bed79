"""A Pi replica's shell: gRPC streams, the replicated log and the inboxes around its core.

Source: seed 004 §6.2; DESIGN sections 9 ("Mail"), 11, 12 and 14.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from pi.core import Core
from pi.events import (
    Appended,
    Effect,
    EntryApplied,
    Event,
    LayoutChanged,
    LeaderChanged,
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
from pi.machine import Machine
from pi.options import Options
from pi.sole import SoleReplica
from pi.streams import PiService, Stream, level_of, message_of, reads_of
from pixiu.discovery.node import NodeState
from pixiu.discovery.paths import partition_state
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, Draining, NotLeader, Overloaded, PixiuError
from pixiu.ids import EndpointID
from pixiu.links.api import PeerState
from pixiu.replication.events import Rejection
from pixiu.replication.model import Damage, Entry
from pixiu.runtime.context import Context
from pixiu.wire.v1 import pi_pb2, pi_pb2_grpc

DRAIN_POLL_S: Final = 0.02
REJECTIONS: Final = {
    Rejection.NOT_LEADER: (NotLeader.code, "this replica does not lead"),
    Rejection.DRAINING: (Draining.code, "this replica is going; use the next leader"),
    Rejection.OVERLOADED: (Overloaded.code, "too much waits for its commit; try again later"),
    Rejection.TOO_FEW_IN_SYNC: ("UNAVAILABLE", "too few replicas are in sync for level replicated; try again later"),
    Rejection.DISK_FULL: (DiskFull.code, "the disk of this partition's leader is full; nothing was written"),
}
"""Code and text of each."""


class Service:
    """Runs one `pi.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        options = context.options
        self._folder = Path(options.data_dir)
        began = time.monotonic()
        self._machine = Machine(
            self._folder / "inboxes", options.store_mb << 20, options.heads_cached, options.flush_interval_s, self.failed,
        )  # fmt: skip
        self._core = Core(
            partition=options.partition,
            state=self._machine.state,
            limits=options.limits(),
            clock_interval_s=options.clock_interval_s,
        )
        self._core.committed = self._machine.applied
        self._replica = SoleReplica(
            self._folder / "log", options.segment_mb << 20, context.zookeeper,
            partition_state(context.root, "pi", options.partition), self._machine.applied, self,
        )  # fmt: skip
        self._opened_s = time.monotonic() - began
        self._streams: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._damage = ""
        self._leads = asyncio.Event()
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._notified = 0
        self.on_appended: Callable[[Sequence[Appended]], None] = self._count_notified
        """Called with what inboxes have now, after it was applied: who delivers mail is told by it."""
        pi_pb2_grpc.add_PiServicer_to_server(PiService(self), context.server)
        context.metrics.collect_from(self._samples)

    # --- what the runtime calls

    def on_view(self, view: View) -> None:
        """The own place in the registry, and where other partitions are."""
        mine = self._context.membership.node
        if mine is not None and mine.replica >= 0:
            self._replica.registered(mine.replica, mine.incarnation)
        addresses = {node.partition: node.address for node in view.of_role("pi") if node.state is NodeState.RUNNING}
        self._step(LayoutChanged(view.layout.version, view.layout.partitions("pi"), addresses))

    async def start(self) -> None:
        """Until this replica leads: it is the only one. A damaged log waits for its operator, and says so."""
        self._machine.start(self._context.options.scrub_keys_per_s)
        self._arm()
        await self._leads.wait()

    async def drain(self) -> None:
        """Take no new streams; answer what is under way."""
        self._draining = True
        while self._core.under_way:
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Write what is left and close everything."""
        for timer in (self._timer, self._turn):
            if timer is not None:
                timer.cancel()
        await self._replica.close()
        await self._machine.close()

    def health(self) -> dict[str, object]:
        """Who leads, and what is wrong."""
        return {
            "replication": self._replica.state,
            "epoch": self._core.epoch,
            "applied": self._machine.applied,
            "streams": len(self._streams),
            "disk_full": self._machine.full,
            "damage": self._damage or self._core.damaged or self._machine.damaged,
            "opened_s": round(self._opened_s, 3),
        }

    # --- what the links call: nothing comes by them

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> bool:
        """No role sends records to Pi."""
        return False

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> bool:
        """No role sends control messages to Pi."""
        return False

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
        level, reads = level_of(request), reads_of(request)
        self._step(Requested(number, request.request, request.operations, level, reads, self._replica.may_read()))
        if self._turn is None:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    def left(self, number: int) -> None:
        """The stream is gone."""
        self._streams.pop(number, None)
        self._step(StreamClosed(number))

    def _end_turn(self) -> None:
        self._turn = None
        self._step(TurnEnded())

    # --- what the replica says

    def accepted(self, token: int, epoch: int, counter: int) -> None:
        """A proposal is in the log."""
        self._step(ProposalAccepted(token, epoch, counter))

    def rejected(self, token: int, reason: Rejection) -> None:
        """A proposal is not."""
        self._step(ProposalRejected(token, *REJECTIONS[reason]))

    def persisted(self, counter: int) -> None:
        """The log is on the disk up to here."""
        self._step(LogPersisted(counter))

    def committed(self, entries: Sequence[Entry], copies: int) -> None:
        """Apply these. Raises StateDamaged."""
        for entry, results in zip(entries, self._machine.apply(entries), strict=True):
            self._step(EntryApplied(entry.counter, results, copies))

    def leading(self, epoch: int) -> None:
        """This replica leads; 0: no longer."""
        node = self._context.membership.node
        self._step(LeaderChanged(epoch, node.address if node is not None and epoch else ""))
        self._context.log.info("pi_leads" if epoch else "pi_deposed", epoch=epoch)
        if epoch:
            self._leads.set()

    def damage(self, damage: Damage) -> None:
        """The log is damaged: nothing is served before an operator's word."""
        self._damage = f"the log ends at {damage.position}, {damage.sealed} was acknowledged: {damage.reason}"
        self._context.log.error("pi_log_damaged", damage=self._damage)

    def failed(self, error: PixiuError) -> None:
        """Nothing more can be promised by this process."""
        self._context.crash(error)

    # --- the core

    def _step(self, event: Event) -> None:
        for effect in self._core.step(event, self._context.now()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Propose):
            if self._machine.full:
                self._step(ProposalRejected(effect.token, DiskFull.code, self._machine.full))
            elif self._machine.behind:
                self._step(ProposalRejected(effect.token, *REJECTIONS[Rejection.OVERLOADED]))
            else:
                self._replica.propose(effect.token, effect.payload, effect.replicated)
        elif isinstance(effect, Reply):
            stream = self._streams.get(effect.stream)
            if stream is not None:
                stream.answer(message_of(effect))
        elif isinstance(effect, Notify):
            self.on_appended(effect.appended)

    def _arm(self) -> None:
        delay = min(max(self._core.next_deadline() - self._context.now(), 0.05), self._context.options.clock_interval_s)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._replica.flushed(self._machine.flushed)
        self._step(Tick(not self._machine.full and self._replica.may_read()))
        self._arm()

    def _count_notified(self, appended: Sequence[Appended]) -> None:
        self._notified += len(appended)

    def _samples(self) -> dict[str, Any]:
        machine = self._machine
        return {
            **{f"{name}_total": value for name, value in self._core.counters.items()},
            "leads": int(bool(self._core.epoch)),
            "epoch": self._core.epoch,
            "applied": machine.applied,
            "dropped_entries_total": machine.state.dropped,
            "transactions_total": machine.transactions,
            "unwritten_changes": machine.state.unwritten,
            "store_bytes": machine.store.bytes_used,
            "disk_full": int(bool(machine.full)),
            "damaged": int(bool(self._damage or self._core.damaged or machine.damaged)),
            "scrubbed_values_total": machine.scrubbed,
            "notified_total": self._notified,
            "streams": len(self._streams),
        }
