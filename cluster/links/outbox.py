"""What waits to be sent to one peer: parcels in lanes, bounded in bytes and in time.

Source: docs/links.md.
"""

from __future__ import annotations

from collections import deque
from typing import Final

RUN_COST_BYTES: Final = 64
"""What a queued run counts besides its items, so that many small ones are bounded too."""

ANY: Final = 0
SMALL: Final = 1
LARGE: Final = 2


class Settlement:
    """What will become of one parcel: `open` counts its runs not yet sent and its datagrams in flight."""

    __slots__ = ("failed", "open", "token")

    def __init__(self, token: int) -> None:
        self.token = token
        self.open = 0
        self.failed = False


def close(settlement: Settlement, handled: bool, settled: list[tuple[int, bool]]) -> None:
    """One of a parcel's runs or datagrams is decided; the last one appends (token, all handled) to `settled`."""
    if not handled:
        settlement.failed = True
    settlement.open -= 1
    if not settlement.open:
        settled.append((settlement.token, not settlement.failed))


class Run:
    """Consecutive items of one parcel that go by the same carrier."""

    __slots__ = ("at", "items", "large", "queued_at", "settlement", "size")

    def __init__(self, items: list[bytes], size: int, large: bool, settlement: Settlement | None, now: float) -> None:
        self.items = items
        self.size = size
        """Bytes not yet sent."""
        self.at = 0
        self.large = large
        self.settlement = settlement
        self.queued_at = now
        if settlement is not None:
            settlement.open += 1


class Outbox:
    """The items of one kind (records or control) that wait for one peer; lane 0 leaves first."""

    __slots__ = ("_lanes", "_settled", "bytes", "max_bytes")

    def __init__(self, lanes: int, max_bytes: int, settled: list[tuple[int, bool]]) -> None:
        self._lanes: tuple[deque[Run], ...] = tuple(deque() for _ in range(lanes))
        self._settled = settled
        self.bytes = 0
        """Bytes that wait, each run with its own cost."""
        self.max_bytes = max_bytes

    def put(self, run: Run, lane: int) -> None:
        """Queue a run; `overflow` bounds the queue afterwards."""
        self.bytes += run.size + RUN_COST_BYTES
        self._lanes[lane].append(run)

    def head(self) -> Run | None:
        """The run that leaves next."""
        for lane in self._lanes:
            if lane:
                return lane[0]
        return None

    def take(self, room: int, which: int) -> tuple[list[bytes], int, list[Settlement]]:
        """Items for one datagram: (items, bytes, the parcels with a token among them).

        At most `room` bytes, but at least one item. Stops before a large run (`which` SMALL), before a small one (LARGE),
        or only when full (ANY).
        """
        parts: list[bytes] = []
        settlements: list[Settlement] = []
        size = 0
        for lane in self._lanes:
            while lane:
                run = lane[0]
                if which and run.large is (which == SMALL):
                    return parts, size, settlements
                if size + run.size <= room:
                    parts += run.items[run.at :] if run.at else run.items
                    size += run.size
                    self.bytes -= run.size + RUN_COST_BYTES
                    lane.popleft()
                    if run.settlement is not None:
                        # The run closes and its datagram opens: the count stays.
                        settlements.append(run.settlement)
                    continue
                taken = self._take_some(run, room - size, parts)
                if taken and run.settlement is not None:
                    run.settlement.open += 1
                    settlements.append(run.settlement)
                if not run.size:
                    self._finish(lane)
                return parts, size + taken, settlements
        return parts, size, settlements

    def _take_some(self, run: Run, room: int, parts: list[bytes]) -> int:
        at = run.at
        items = run.items
        taken = 0
        while at < len(items):
            size = len(items[at])
            if taken + size > room and (parts or taken):
                break
            taken += size
            at += 1
            if taken > room:
                break
        parts += items[run.at : at]
        run.at = at
        run.size -= taken
        self.bytes -= taken
        return taken

    def _finish(self, lane: deque[Run]) -> None:
        run = lane.popleft()
        self.bytes -= RUN_COST_BYTES
        if run.settlement is not None:
            close(run.settlement, True, self._settled)

    def _drop(self, lane: deque[Run]) -> int:
        run = lane.popleft()
        self.bytes -= run.size + RUN_COST_BYTES
        if run.settlement is not None:
            close(run.settlement, False, self._settled)
        return len(run.items) - run.at

    def drop_older(self, queued_before: float) -> int:
        """Drop runs that were queued before a time, oldest first. Returns how many items."""
        dropped = 0
        for lane in self._lanes:
            while lane and lane[0].queued_at <= queued_before:
                dropped += self._drop(lane)
        return dropped

    def overflow(self) -> int:
        """Drop the oldest runs, the last lane's first, until the bound holds. Returns how many items."""
        dropped = 0
        for lane in reversed(self._lanes):
            while lane and self.bytes > self.max_bytes:
                dropped += self._drop(lane)
        return dropped

    def clear(self) -> int:
        """Drop everything. Returns how many items."""
        dropped = 0
        for lane in self._lanes:
            while lane:
                dropped += self._drop(lane)
        return dropped

    def oldest(self) -> float:
        """When the oldest run was queued; infinity when nothing waits."""
        return min((lane[0].queued_at for lane in self._lanes if lane), default=float("inf"))
