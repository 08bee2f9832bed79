"""A Xiu's shell of `xiu.state.readers`: notes readers one after the other, in the partition's log.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cluster.replication.replica import Replica
from pixiu.errors import Overloaded
from xiu.state.readers import Held, alive, encode, hold, keep_from
from xiu.state.state import XiuKind
from xiu.store.machine import Machine

MAX_WAITING: Final = 64
"""Limit of waiting calls. Policy: further ones are refused."""


class Holding:
    """The readers for which retention of one partition waits.

    Args:
        machine, replica: of the partition.
        hold_h: hours after which a silent reader is ignored.
    """

    def __init__(self, machine: Machine, replica: Replica, hold_h: float) -> None:
        self._machine, self._replica = machine, replica
        self._hold_us = int(hold_h * 3_600_000_000)
        self._one = asyncio.Lock()
        self._waiting = 0

    @property
    def readers(self) -> dict[str, Held]:
        """Readers heard of recently, by the time that the partition agreed on. Raises StoreDamaged, DiskFailed."""
        return alive(self._machine.store.readers(), self._replica.now_us(), self._hold_us)

    def keep_from(self) -> int:
        """The lowest position that a reader needs. Raises StoreDamaged, DiskFailed."""
        return keep_from(self.readers)

    async def hold(self, reader: str, position: int) -> None:
        """Note that a reader needs records from a position on; `EVERYTHING`: it is removed. Raises PixiuError."""
        if self._waiting >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} readers wait to be noted; try again later")
        self._waiting += 1
        try:
            async with self._one:  # the entry depends on the other readers
                self._replica.check_leader()
                said = hold(self._machine.store.readers(), reader, position, self._replica.now_us(), self._hold_us)
                await self._replica.propose([(int(XiuKind.HOLD), encode(said))])
        finally:
            self._waiting -= 1
