"""Looks at a gateway's load for its tenants: who is shed, and how many messages of each are retained.

Nothing is looked at while the access file has no tenants.

Source: docs/tenants.md, "Overload".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from structlog.typing import FilteringBoundLogger

from cluster.access.tenants.book import TenantBook
from cluster.access.tenants.use import Stage
from gateway.tenants.shedding import Offered, Shedding
from pixiu.errors import PixiuError

LOOK_S: Final = 0.25
LATE_S: Final = 0.25
"""Delay of the event loop, on average over some looks, at which the gateway counts as overloaded, seconds."""
SMOOTH: Final = 0.2
"""Weight of the last look in that average."""
FULL: Final = 0.75
"""Share of the memory for clients' input from which it does, too: soon connections would be closed."""
COUNT_S: Final = 10.0
"""Interval at which the retained messages of tenants are counted that have put some, seconds."""
TENANT_STAGE: Final = "tenant_stage"


class TenantWatch:
    """Watches the load of a gateway.

    Args:
        book: the tenants of the gateway.
        now: monotonic seconds.
        memory: share of `gateway.memory_bytes` that is in use.
        count: counts retained messages that match a filter, and their bytes. Raises `PixiuError`.
    """

    def __init__(
        self,
        book: TenantBook,
        now: Callable[[], float],
        memory: Callable[[], float],
        count: Callable[[str], Awaitable[tuple[int, int]]],
        log: FilteringBoundLogger,
    ) -> None:
        self._book, self._now, self._memory, self._count, self._log = book, now, memory, count, log
        self._shedding = Shedding()
        self._offered: dict[str, int] = {}
        self._late_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.pressure = 0.0
        """1: the gateway is overloaded."""

    def start(self) -> None:
        """Start to look."""
        run = asyncio.get_running_loop().create_task
        self._tasks = [run(self._look_on(), name="tenants"), run(self._count_on(), name="tenants-retained")]

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def look(self, late_s: float) -> None:
        """Take or give back a step. `late_s`: by which this look is late, seconds."""
        self._late_s += SMOOTH * (late_s - self._late_s)
        self.pressure = max(self._late_s / LATE_S, self._memory() / FULL)
        offered: list[Offered] = []
        before, self._offered = self._offered, {}
        for used in self._book:
            total = self._offered[used.name] = used.offered
            offered.append(Offered(used.name, used.settings.weight, total - before.get(used.name, total)))
        stages = self._shedding.look(self.pressure, offered)
        for used in self._book:
            stage = stages.get(used.name, Stage.NONE)
            if stage is not used.stage:
                used.stage = stage
                self._log.warning(TENANT_STAGE, tenant=used.name, stage=stage.name, pressure=round(self.pressure, 2))

    async def count_retained(self) -> None:
        """Count the retained messages of tenants that have put some."""
        for used in list(self._book):
            if used.retained.asked:
                used.retained.asked = False
                with contextlib.suppress(PixiuError):  # what was known stays
                    used.retained.messages, used.retained.bytes = await self._count(f"{used.names.prefix}#")

    async def _look_on(self) -> None:
        while True:
            due = self._now() + LOOK_S
            await asyncio.sleep(LOOK_S)
            if self._book:
                self.look(max(self._now() - due, 0.0))

    async def _count_on(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            await self.count_retained()
