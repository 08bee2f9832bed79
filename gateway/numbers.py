"""Leased numbers of a gateway: its instance number, and the worker number of the SnowflakeIDs that it makes.

Source: docs/identifiers.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final, Protocol

from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import LeaseExpired, PixiuError
from pixiu.ids import SnowflakeGenerator, SnowflakeID
from pixiu.rpc.backoff import Backoff
from registry.leases import FIRST_BACKOFF_S, MAX_BACKOFF_S, Instance, InstanceLease, WorkerLease, WorkerLeases, wall_clock_ms

WORKER_NUMBER_OVER: Final = "worker_number_over"
WORKER_NUMBER_LOST: Final = "worker_number_lost"
WORKER_NUMBER_BACK: Final = "worker_number_back"


class Log(Protocol):
    """The part of a structlog logger that is used."""

    def warning(self, event: str, **fields: object) -> object:
        """Log something that an operator should know."""


class GatewayNumbers:
    """The leased numbers of one gateway.

    Args:
        on_lost: called when another process took the instance while this one had no session.
        log: gets the events of the worker number.
        clock_ms: Unix milliseconds.
    """

    def __init__(
        self,
        zookeeper: ZooKeeper,
        root: str,
        holder: str,
        on_lost: Callable[[], None],
        log: Log,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._snowflakes = SnowflakeGenerator(clock_ms)
        self._log = log
        self._instances = InstanceLease(zookeeper, root, holder, on_lost=lambda _: on_lost())
        self._workers = WorkerLeases(
            zookeeper, root, holder, on_renewed=self._use, on_lost=self._worker_lost, clock_ms=clock_ms
        )  # fmt: skip
        self._worker: WorkerLease | None = None
        self._over = False
        """True if messages were refused because the number's time was over, or it was lost."""
        self._acquiring: asyncio.Task[None] | None = None

    async def acquire(self) -> Instance:
        """Take an instance and a worker number. Raises what the leases raise."""
        self._use(await self._workers.acquire())
        self._workers.start()
        return await self._instances.acquire()

    async def release(self) -> None:
        """Give the worker number and the instance back."""
        if self._acquiring is not None:
            self._acquiring.cancel()
            await asyncio.gather(self._acquiring, return_exceptions=True)
        await self._workers.close()
        if self._worker is not None:
            await self._workers.release(self._worker.worker, self._snowflakes.last_used_ms)
            self._worker = None
        await self._instances.release()

    def next_snowflake(self) -> SnowflakeID:
        """Make a new message's ID. Raises `LeaseExpired`: the number is extended within a second, if the registry answers."""
        try:
            return self._snowflakes.next()
        except LeaseExpired as error:
            if not self._over:
                self._over = True
                self._log.warning(WORKER_NUMBER_OVER, text=str(error))
            raise

    @property
    def problem(self) -> str:
        """Reason why MQTT clients cannot publish now; empty while they can."""
        if self._worker is None and self._acquiring is not None:
            return "MQTT clients cannot publish: another process took the gateway's worker number, and no other one is leased yet"
        why = self._snowflakes.why_not() if self._worker is not None else ""
        return f"MQTT clients cannot publish: {why}" if why else ""

    def _use(self, lease: WorkerLease) -> None:
        self._worker = lease
        self._snowflakes.lease(lease.worker, lease.from_ms, lease.until_ms)
        if self._over and not self._snowflakes.why_not():
            self._over = False
            self._log.warning(WORKER_NUMBER_BACK, worker=lease.worker)

    def _worker_lost(self, lease: WorkerLease) -> None:
        """Lease another worker number: the time of this one was over, and another process has it."""
        self._log.warning(WORKER_NUMBER_LOST, worker=lease.worker)
        self._worker, self._over = None, True
        self._snowflakes.lease(lease.worker, lease.from_ms, 0)
        if self._acquiring is None or self._acquiring.done():
            self._acquiring = asyncio.create_task(self._acquire_another())

    async def _acquire_another(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while self._worker is None:
            try:
                self._use(await self._workers.acquire())
            except PixiuError:
                await asyncio.sleep(backoff.next_s())
