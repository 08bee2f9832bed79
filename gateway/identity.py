"""What a gateway leases: its instance number, and the worker number of the SnowflakeIDs that it makes.

Source: docs/identifiers.md.
"""

from __future__ import annotations

from collections.abc import Callable

from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import SnowflakeGenerator
from registry.leases import Instance, InstanceLease, WorkerLease, WorkerLeases, wall_clock_ms


class Identity:
    """The leases of one gateway.

    Args:
        on_lost: called when another process took the instance while this one had no session.
    """

    def __init__(self, zookeeper: ZooKeeper, root: str, holder: str, on_lost: Callable[[], None]) -> None:
        self.snowflakes = SnowflakeGenerator(wall_clock_ms)
        self._instances = InstanceLease(zookeeper, root, holder, on_lost=lambda _: on_lost())
        self._workers = WorkerLeases(zookeeper, root, holder, on_renewed=self._use)
        self._worker: WorkerLease | None = None

    async def acquire(self) -> Instance:
        """Take an instance and a worker number. Raises what the leases raise."""
        self._use(await self._workers.acquire())
        self._workers.start()
        return await self._instances.acquire()

    async def release(self) -> None:
        """Give both back."""
        await self._workers.close()
        if self._worker is not None:
            await self._workers.release(self._worker.worker, self.snowflakes.last_used_ms)
            self._worker = None
        await self._instances.release()

    def _use(self, lease: WorkerLease) -> None:
        self._worker = lease
        self.snowflakes.lease(lease.worker, lease.from_ms, lease.until_ms)
