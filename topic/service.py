"""A topic replica's shell: the replicated log, the state and its segments, and the listeners around the core.

    DATA_DIR/replica    the log, and snapshots on their way
    DATA_DIR/state      the state: segments of the parts, and rows

Source: docs/topics.md, docs/replication.md, "Use by a role".
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cluster.access.logins import guard_of
from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.replication.core.refusals import not_leader
from cluster.store.events import Committed, LeaderChanged, Propose
from cluster.store.repair.service import RepairService
from cluster.store.shell import StoreShell
from cluster.topics.entries import TopicSettings, topic_of
from cluster.wire.v1 import topic_group_pb2_grpc
from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, Draining, OutcomeUnknown, Overloaded, PixiuError, Refusal, Unavailable, error_of_code
from pixiu.wire.block import Block, Stamp
from pixiu.wire.v1 import topic_pb2_grpc
from registry.mailbox import Requests
from topic import events as ev
from topic.clients.listener import TopicLog
from topic.clients.members import Members
from topic.clients.reads import Reads
from topic.clients.writes import Writes
from topic.compaction import Compaction
from topic.core import Core, Counters
from topic.groups import Parents, TopicGroups
from topic.mending import Mending
from topic.offload.offload import LOOK_S, Offload
from topic.options import Options
from topic.rates import Rates
from topic.repairer import Repairer
from topic.retention import Retention
from topic.storage.machine import Machine
from topic.storage.reader import Reader
from topic.storage.segment import Gap
from topic.storage.store import Store

DRAIN_POLL_S: Final = 0.02
BEHIND_RETRY_MS: Final = 200
RATES_S: Final = 5.0
MAX_SUMMED: Final = 20_000
"""Channels times parts above which the metrics have no backlogs."""
MAX_NAMED: Final = 256
"""Topics with a backlog in the metrics."""
FAILED: Final = "topic_state_failed"
SET_ASIDE: Final = "topic_state_set_aside"


class Service(StoreShell):
    """A topic replica's shell: runs one `topic.core.Core` over a replica."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        options = context.options
        folder = Path(options.data_dir) / "state"
        self._machine = Machine(
            folder, options.memory_mb << 20, options.flush_interval_s, self._failed, self._replaced, self._found
        )
        self._counters = Counters()
        self._runner: Runner[ev.Event, ev.Effect] = Runner(None, context.now, tick=TICK, end_of_turn=END_OF_TURN)
        super().__init__(context, self._machine, self._runner, lambda: not self._machine.full)
        self._mending = Mending(context, self, self._machine)
        self._repairer = Repairer(context, self._replica, self, self._machine, self._mending)
        RepairService(context, self._replica, self._repairer)
        self._offload = Offload(context, self, self._machine, self._mending)
        self.reader = Reader(lambda: self.store, self._mending.found, self._offload.fetcher.blocks)
        self._away: set[tuple[int, int]] = set()
        """(part, offset) that channels wait for, from the object store."""
        self._writes = Writes(self, context.turn, options.writer_window_bytes)
        self._members = Members(self, context.turn, self.spawn)
        self._reads, self._retention, self._rates = Reads(self, self._offload.describe), Retention(self), Rates()
        self._compaction = Compaction(self)
        self._parents = Parents(context, self)
        self._requests: dict[int, asyncio.Future[object]] = {}
        self._numbers = itertools.count(1)
        self._draining = False
        self._guard = guard_of(options, context.cluster, context.log, context.audit, context.client_called)
        self._kicks = Requests(context.zookeeper, paths.kicks(context.root), self._kick)
        self._enter_effects()
        assert context.client_server is not None
        served = TopicLog(self, self._writes, self._members, self._reads, self._guard, context.audit)
        topic_pb2_grpc.add_TopicLogServicer_to_server(served, context.client_server)
        topic_group_pb2_grpc.add_TopicGroupsServicer_to_server(TopicGroups(self, self._rates), context.server)
        context.metrics.collect_from(self._samples)

    def _enter_effects(self) -> None:
        effects = self._runner.effects
        effects.on(ev.WriteReply, self._writes.answer)
        effects.on(ev.Deliver, self._members.deliver)
        effects.on(ev.ReportReply, self._members.reported)
        effects.on(ev.MemberEnded, self._members.ended)
        effects.on(ev.PartsFinished, self._members.finished)
        effects.on(ev.Reply, self._reply)
        effects.on(ev.AskParent, self._parents.ask)

    # --- what the runtime calls

    async def prepare(self, node: Node) -> Node:
        """Open the state and the log; returns the node with this replica's member."""
        await asyncio.to_thread(self._offload.check)
        if await asyncio.to_thread(self._machine.open):
            self._context.log.error(SET_ASIDE, folder=self._context.options.data_dir)
        found = await self._replica.prepare(node)
        self._replaced()
        return found

    def on_view(self, view: View) -> None:
        """Note the layout's version."""
        if self._runner.core is not None:
            self.core.layout_version = view.layout.version

    async def start(self) -> None:
        """Start; the leader becomes known later."""
        self._machine.start()
        if self._guard is not None:
            self._guard.start()
            self._kicks.start()
        self.every(self._context.options.retention_interval_s, self._retain)
        self.every(RATES_S, self._look_at_rates)
        self.every(LOOK_S, self._offload.look)
        self.spawn(self._mending.run())
        self.spawn(self._repairer.scrub(self._context.options.scrub_mb_per_s << 20))
        await self._replica.start()

    async def drain(self) -> None:
        """Accept no new streams and no more entries, answer what is under way, hand over."""
        self._draining = True
        self._writes.drain()
        self._members.drain()
        while self._writes.unanswered or self._requests:
            if self.core.stored.parts:  # the next leader uploads what they wait for
                self._runner.step(ev.StoreLeft(Refusal.of(OutcomeUnknown("the leader is draining; send it again"))))
            await asyncio.sleep(DRAIN_POLL_S)
        await self._replica.drain()

    async def stop(self) -> None:
        """Write what is missing and close everything."""
        self._reads.stopping = True
        self._reads.wake_all()
        self._writes.stop()
        self._members.stop()
        if self._guard is not None:
            await self._kicks.stop()
            await self._guard.close()
        await asyncio.gather(self._parents.close(), self._mending.close(), self._offload.close())
        await self._replica.stop()
        self.stop_runners()
        await self.cancel_tasks()
        await self._machine.close()

    def health(self) -> dict[str, object]:
        """Report replication and problems."""
        status = self._replica.status()
        degraded = status["degraded"] or self._mending.text or self._offload.text
        return {
            "replication": {**status, "degraded": degraded},
            "degraded": degraded,
            "writers": len(self._writes.streams),
            "members": len(self._members.streams),
            "disk_full": self._machine.full or self._replica.log_full,
            "gaps": len(self._mending),
        }

    # --- as `topic.clients.group.Group`

    @property
    def core(self) -> Core:
        """The core; there is one from `prepare` on."""
        core = self._runner.core
        assert isinstance(core, Core)
        return core

    @property
    def store(self) -> Store:
        """The state and its blocks."""
        return self._machine.store

    @property
    def leader(self) -> str:
        """See `Group`."""
        node = self._replica.leader_node
        return node.client_address if node is not None else ""

    def step(self, event: ev.Event) -> None:
        """Pass an event to the core."""
        if not self._epoch:  # it is about to refuse
            self._runner.step(LeaderChanged(0, self.leader))
        self._runner.step(event)

    def check_reads(self) -> None:
        """See `Group`."""
        if not self._replica.is_leader or not self._epoch:
            raise not_leader(self.leader)
        if not self._replica.lease_valid() or not self.core.delivers:
            raise Unavailable("this leader does not know yet that it has everything; ask again in a moment")

    async def request(self, kind: int, payload: bytes, force: bool = False) -> object:
        """See `Group`."""
        number = next(self._numbers)
        future = self._requests[number] = asyncio.get_running_loop().create_future()
        try:
            self.step(ev.Requested(number, kind, payload, force))
            return await future
        finally:
            self._requests.pop(number, None)

    # --- as `topic.core.Parts`

    def may_deliver(self) -> bool:
        """See `Parts`."""
        return self._replica.lease_valid()

    def blocks(self, part: int, low: int, high: int) -> Sequence[tuple[Stamp, Block]]:
        """See `Parts`."""
        return self.store.blocks(part, low, high)

    def store_of(self, topic: TopicSettings) -> str:
        """See `Parts`."""
        return self._offload.store_of(topic)

    def _wanted(self, part: int, offset: int) -> None:
        """Channels want an offset that only the object store has."""
        if (part, offset) not in self._away:
            self._away.add((part, offset))
            self.spawn(self._load(part, offset))

    async def _load(self, part: int, offset: int) -> None:
        try:
            while self._epoch:
                try:
                    if await self.reader.load(part, offset) is None:
                        self._runner.step(ev.Loaded(part))
                    return
                except Unavailable:
                    await asyncio.sleep(LOOK_S)
        finally:
            self._away.discard((part, offset))

    # --- the replica

    def _replaced(self) -> None:
        """Begin with a core on the state that is there now; this replica does not lead."""
        core = Core(self._machine.state, self, self._context.view.layout.version)
        core.counters = self._counters
        self.store.on_away = self._wanted
        self._runner.core = core
        self._mending.replaced()

    def _leader_changed(self, epoch: int) -> None:
        self._epoch = epoch
        self._runner.step(LeaderChanged(epoch, "" if epoch else self.leader))
        self._offload.leader_changed(epoch)
        self._members.leader_changed()
        self._reads.wake_all()

    def _applied(self, first: int, answers: Sequence[object], copies: int) -> None:
        if self.core.epoch:
            self._runner.step(Committed(first, answers, copies))
            self._reads.applied()

    def _check(self, effect: Propose) -> None:
        if self._machine.full:
            if self._replica.leave_for_space():
                raise Draining("this replica cannot write its segments; use the next leader")
            raise DiskFull(self._machine.full)
        if self._draining:  # else work would always be pending, and there would be no hand-over
            raise Draining("this replica is draining; use the next leader")
        if self._machine.behind:
            raise Overloaded("the segments of topics lag behind the log; retry later", BEHIND_RETRY_MS)

    def _reply(self, effect: ev.Reply) -> None:
        future = self._requests.get(effect.request)
        if future is None or future.done():
            return
        if effect.refusal is None:
            future.set_result(effect.answer)
        else:
            future.set_exception(error_of_code(*effect.refusal))

    # --- the rest

    def _failed(self, error: PixiuError) -> None:
        self._context.log.error(FAILED, error=str(error), code=error.code)
        self._context.crash(error)

    def _found(self, part: int, gap: Gap) -> None:
        self._mending.found(part, gap)

    def _kick(self, request: str) -> None:
        if self._guard is not None:
            self._guard.kick(request)

    async def _retain(self) -> None:
        if self._epoch and self.core.delivers:
            await self._retention.look()
            await self._compaction.look()

    def _look_at_rates(self) -> None:
        totals = {part: (log.appended_bytes, log.end) for part, log in self.store.logs.items()}
        self._rates.look(totals, time.monotonic(), time.process_time())

    def _backlogs(self) -> dict[str, int]:
        """Most messages beyond a channel's floor in one part, by topic, on a leader."""
        state, found = self.store.state, dict[str, int]()
        if not self._epoch or len(state.progress) > MAX_SUMMED:
            return found
        for (_, number), progress in state.progress.items():
            topic, part = state.topics.get(topic_of(number)), state.parts.get(number)
            if topic is not None and part is not None and (topic.name in found or len(found) < MAX_NAMED):
                found[topic.name] = max(found.get(topic.name, 0), part.end - progress.acks.floor)
        return found

    def _samples(self) -> dict[str, object]:
        machine = self._machine
        if not machine.opened:
            return {}
        store = machine.store
        return {
            **totals(self._counters),
            "leads": int(bool(self._epoch)),
            "refused_before_core_total": self._writes.refused,
            "parts": len(store.state.parts),
            "channels": len(store.state.channels),
            "writers": len(self._writes.streams),
            "members": len(self._members.streams),
            "flushes_total": machine.flushes,
            "trims_total": self._retention.trims,
            "compacted_messages_total": self._compaction.removed,
            "compacted_bytes_total": machine.compacted_bytes,
            "loads_total": self.reader.loads,
            "unwritten_bytes": store.tail_bytes,
            "cached_bytes": store.cache.size,
            "stored_bytes": sum(log.stored_bytes for log in store.logs.values()),
            "backlog_messages{topic}": self._backlogs(),
            "appended_bytes": sum(log.appended_bytes for log in store.logs.values()),
            "damaged": int(bool(self._mending.open())),
            "gaps": len(self._mending),
            "scrubbed_bytes_total": self._repairer.scrubbed,
            "gaps_mended_total": self._mending.mended,
            "gaps_given_up_total": self._mending.lost,
            "disk_full": int(bool(machine.full or self._replica.log_full)),
            **self._offload.samples(),
        }
