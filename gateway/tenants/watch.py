"""Looks at a gateway's load for its tenants: who is shed, who meets a limit, and how much the cluster retains and keeps of each.

Nothing is looked at while the access file has no tenants.

Source: docs/tenants.md, "Overload".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
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
REPORT_S: Final = 60.0
"""Interval of reports about a tenant that meets limits, seconds."""
TENANT_STAGE: Final = "tenant_stage"
TENANT_LIMITS: Final = "tenant_limits_met"
LIMITS: Final = {
    "dropped_in": "messages_in_per_s, bytes_in_per_s",
    "dropped_out": "messages_out_per_s, bytes_out_per_s",
    "refused_messages": "messages_in_per_s, bytes_in_per_s, retained_messages, retained_bytes",
    "refused_sessions": "connections",
    "refused_subscriptions": "subscriptions",
    "refused_kept": "kept_sessions",
}
"""Count of a tenant → the limits that it tells of; an overloaded gateway makes them grow, too."""


class TenantWatch:
    """Watches the load of a gateway.

    Args:
        book: the tenants of the gateway.
        now: monotonic seconds.
        memory: share of `gateway.memory_bytes` that is in use.
        count: counts retained messages that match a filter, and their bytes. Raises `PixiuError`.
        count_sessions: counts the sessions of tenants that outlive their connections. Raises `PixiuError`.
    """

    def __init__(
        self,
        book: TenantBook,
        now: Callable[[], float],
        memory: Callable[[], float],
        count: Callable[[str], Awaitable[tuple[int, int]]],
        count_sessions: Callable[[Iterable[str]], Awaitable[Mapping[str, int]]],
        log: FilteringBoundLogger,
    ) -> None:
        self._book, self._now, self._memory, self._log = book, now, memory, log
        self._count, self._count_sessions = count, count_sessions
        self._reported: dict[str, dict[str, int]] = {}
        """Tenant → its counts at the last report."""
        self._reported_at = now()
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

    async def count_kept(self) -> None:
        """Count the sessions of all tenants that outlive their connections."""
        with contextlib.suppress(PixiuError):
            counts = await self._count_sessions([used.name for used in self._book])
            for used in self._book:
                used.kept = counts.get(used.name, used.kept)

    def report(self) -> None:
        """Name the tenants that have met limits, once a minute."""
        if self._now() < self._reported_at + REPORT_S:
            return
        self._reported_at = self._now()
        before, self._reported = self._reported, {}
        for used in self._book:
            counts = self._reported[used.name] = {name: getattr(used.counters, name) for name in LIMITS}
            earlier = before.get(used.name, {})
            met = {name: count - earlier.get(name, 0) for name, count in counts.items() if count > earlier.get(name, 0)}
            if met:
                limits = list(dict.fromkeys(limit for name in met for limit in LIMITS[name].split(", ")))
                self._log.warning(TENANT_LIMITS, tenant=used.name, limits=limits, **met)

    async def _look_on(self) -> None:
        while True:
            due = self._now() + LOOK_S
            await asyncio.sleep(LOOK_S)
            if self._book:
                self.look(max(self._now() - due, 0.0))

    async def _count_on(self) -> None:
        while True:
            await asyncio.sleep(COUNT_S)
            self.report()
            await self.count_retained()
            if self._book:
                await self.count_kept()
