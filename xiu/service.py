"""A Xiu's shell: gRPC streams of writers, reads, and the threads behind the core.

Source: seed 004 §6.1; DESIGN section 11.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import asdict
from typing import Final

from pixiu.discovery import paths
from pixiu.discovery.view import View
from pixiu.errors import DiskFull, LogDamaged, PixiuError, StorageError, Unavailable
from pixiu.ids import EndpointID, hex_id
from pixiu.links.api import PeerState
from pixiu.replication import events as ev
from pixiu.runtime.context import Context
from pixiu.wire.v1 import xiu_pb2_grpc
from xiu.core import Core, Settings
from xiu.events import Answer, EndStream, Event, LayoutChanged, NeedEpoch, SpaceChanged, Tick, TrimDue
from xiu.options import Options
from xiu.partition import Disks
from xiu.reading import Reading
from xiu.rpc import Streams, XiuService
from xiu.single import SingleReplica

DAMAGED: Final = "log_damaged"
DISK_STATE: Final = "disk_state"
STORE_WARNING: Final = "store_warning"
FLUSH_FAILED: Final = "flush_failed"
LEADS: Final = "leads"
SPACE_INTERVAL_S: Final = 1.0
DRAIN_POLL_S: Final = 0.02
LEAD_POLL_S: Final = 0.2
LEAD_LIMIT_S: Final = 10.0


class Service:
    """Runs one `xiu.core.Core`."""

    def __init__(self, context: Context[Options]) -> None:
        self._context = context
        self._disks: Disks | None = None
        self._core: Core | None = None
        self._replica: SingleReplica | None = None
        self.streams = Streams()
        self._layout = LayoutChanged(0, 1)
        self._ready = asyncio.Event()
        self._failure: PixiuError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._degraded = ""
        self.reading: Reading | None = None
        xiu_pb2_grpc.add_XiuServicer_to_server(XiuService(self, context.options), context.server)
        context.metrics.collect_from(self._samples)

    # What the runtime calls.

    async def start(self) -> None:
        """Open everything, apply what the log has, lead. Raises ConfigurationError, StorageError, Unavailable."""
        context, options = self._context, self._context.options
        loop = asyncio.get_running_loop()
        self._disks = disks = await loop.run_in_executor(None, Disks, options, context.root)
        for warning in disks.warnings:
            context.log.error(STORE_WARNING, text=warning)
        if disks.log.damage is not None:
            damage = disks.log.damage
            raise LogDamaged(
                f"the log in {disks.log.directory} is damaged after {damage.position}: {damage.reason}; up to {damage.sealed} was "
                "acknowledged. This is the only replica: restore the folder from a backup"
            )
        settings = Settings(
            partition=options.partition,
            max_record_bytes=context.cluster.max_record_bytes,
            keep_us=int(options.keep_h * 3_600_000_000),
            keep_bytes=options.keep_mb << 20,
        )
        self._core = Core(settings, disks.log, disks.store, disks.table)
        self.reading = Reading(options.partition, disks.store, disks.table)
        self._step(self._layout)
        self._replica = SingleReplica(
            disks.log,
            context.zookeeper,
            paths.partition_state(context.root, "xiu", options.partition),
            disks.store.head.applied.counter,
            self._on_replication,
            self._failed,
            context.now,
        )
        self._watch_space()
        await self._replica.start()
        await self._until_leading()
        for work in (self._flush_loop(), self._trim_loop(), self._space_loop()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    async def _until_leading(self) -> None:
        """Until the first entry of the own epoch is committed."""
        assert self._replica is not None
        try:
            async with asyncio.timeout(self._context.options.session_timeout_ms / 1000 + LEAD_LIMIT_S):
                while not self._ready.is_set() and not self._replica.others_in_sync:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LEAD_POLL_S):
                            await self._ready.wait()
        except TimeoutError:
            raise Unavailable(f"partition {self._context.options.partition} of Xiu is not led yet; the registry is slow") from None
        if self._replica.others_in_sync:
            members = ", ".join(map(hex_id, self._replica.others_in_sync))
            raise Unavailable(
                f"partition {self._context.options.partition} of Xiu cannot be led from {self._context.options.data_dir} (member "
                f"{hex_id(self._replica.member)}): the registry says that {members} has its messages; start it with that data_dir"
            )
        if self._failure is not None:
            raise self._failure

    async def drain(self) -> None:
        """Take no more writes; wait until those that were taken are answered."""
        if self._replica is None or self._core is None:
            return
        self._replica.step(ev.Drain())
        while self._core.unanswered:
            await asyncio.sleep(DRAIN_POLL_S)

    async def stop(self) -> None:
        """Flush and close; nothing is left of the table when everything is in the store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self.streams.close()
        self.reading = None
        core, self._core = self._core, None
        if self._replica is not None:
            await self._replica.close()
        elif self._disks is not None:
            self._disks.log.close()
        if self._disks is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._close_disks, core is not None and not core.waiting)

    def _close_disks(self, all_written: bool) -> None:
        assert self._disks is not None
        flushed = False
        with contextlib.suppress(StorageError):
            self._disks.store.flush()
            flushed = True
        self._disks.table.close(remove=flushed and all_written)
        self._disks.store.close()

    def health(self) -> dict[str, object]:
        """Where the partition stands. `degraded` is a text while something needs an operator."""
        core, disks = self._core, self._disks
        if core is None or disks is None:
            return {"degraded": self._degraded}
        head = disks.store.head
        return {
            "epoch": core.epoch,
            "committed": core.committed,
            "applied": head.applied.counter,
            "flushed": disks.store.flushed,
            "copies": 1,
            "waiting_entries": core.waiting,
            "degraded": core.full or self._degraded,
        }

    def on_view(self, view: View) -> None:
        """Who serves which partition."""
        count = view.layout.partitions("xiu") if "xiu" in view.layout.roles else 1
        serving = []
        for partition in range(count):
            nodes = view.replicas("xiu", partition)
            serving.append(nodes[0].address if nodes else "")
        self._layout = LayoutChanged(view.layout.version, count, tuple(serving))
        self._step(self._layout)

    # What the links call: nobody sends a Xiu datagrams.

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> bool:
        """Records come by stream only."""
        return False

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> bool:
        """Nothing is expected."""
        return False

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Nothing was sent."""

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Links have no peers here."""

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Nothing to say."""
        return b""

    # What the streams call.

    @property
    def core(self) -> Core | None:
        """While the partition is open."""
        return self._core

    def take(self, event: Event) -> None:
        """A writer's batch."""
        self._step(event)

    # Inside.

    def _step(self, event: Event) -> None:
        core = self._core
        if core is None:
            return
        try:
            for effect in core.step(event, self._context.now()):
                if isinstance(effect, Answer | EndStream):
                    self.streams.deliver(effect)
                elif isinstance(effect, NeedEpoch):
                    self._failed(Unavailable("the sequences of this epoch are used up; a restart takes the next epoch"))
                elif self._replica is not None:
                    self._replica.step(effect)
        except StorageError as error:
            self._failed(error)
        self._arm(core)

    def _arm(self, core: Core) -> None:
        deadline = core.next_deadline()
        if deadline is not None and self._timer is None:
            delay = max(deadline - self._context.now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._step(Tick())

    def _on_replication(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Accepted | ev.Rejected | ev.Persisted | ev.Committed | ev.Leading | ev.Deposed):
            self._step(effect)
            if isinstance(effect, ev.Leading):
                self._context.log.info(LEADS, epoch=effect.epoch)
            elif isinstance(effect, ev.Committed):
                self._ready.set()
        elif isinstance(effect, ev.ReportDamage):
            self._degraded = f"the log is damaged after {effect.damage.position}: {effect.damage.reason}"
            self._context.log.error(DAMAGED, text=self._degraded)

    def _failed(self, error: PixiuError) -> None:
        """This process cannot go on; its supervisor starts it again."""
        self._failure = error
        if self._ready.is_set():
            self._context.crash(error)
        self._ready.set()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.crash(error)

    async def _flush_loop(self) -> None:
        assert self._disks is not None
        assert self._replica is not None
        loop, store = asyncio.get_running_loop(), self._disks.store
        while True:
            await asyncio.sleep(self._context.options.flush_interval_s)
            if store.head.applied.counter == store.flushed:
                continue
            try:
                self._replica.step(ev.Flushed(await loop.run_in_executor(None, store.flush)))
            except DiskFull as error:
                self._context.log.error(FLUSH_FAILED, text=str(error))

    async def _trim_loop(self) -> None:
        while True:
            await asyncio.sleep(self._context.options.trim_interval_s)
            self._step(TrimDue(time.time_ns() // 1000))

    async def _space_loop(self) -> None:
        while True:
            await asyncio.sleep(SPACE_INTERVAL_S)
            self._watch_space()

    def _watch_space(self) -> None:
        assert self._disks is not None
        assert self._core is not None
        enough = self._disks.free_bytes() >= self._context.options.reserve_mb << 20
        if enough is not self._core.enough_space:
            self._context.log.warning(DISK_STATE, enough=enough, reserve_mb=self._context.options.reserve_mb)
        self._step(SpaceChanged(enough))

    def _samples(self) -> dict[str, object]:
        core, disks = self._core, self._disks
        if core is None or disks is None or self._replica is None:
            return {}
        table = {f"table_{name}_total": value for name, value in asdict(disks.table.counters).items()}
        return core.samples() | table | {
            "table_bytes": disks.table.used_bytes,
            "table_unpersisted": disks.table.unpersisted,
            "syncs_total": self._replica.syncs,
            "flushed": disks.store.flushed,
            "reads_damaged_total": self.reading.damaged if self.reading is not None else 0,
            "streams": len(self.streams),
        }  # fmt: skip
