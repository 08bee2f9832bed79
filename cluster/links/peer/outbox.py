"""Data that waits to be sent to one peer: parcels in lanes, bounded in bytes and in time.

Source: docs/links.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

RUN_COST_BYTES: Final = 64
"""Bytes that a queued run counts in addition to its items, so that many small ones are bounded too."""

INFINITY: Final = float("inf")
NO_RUN: Final = (1 << 62) - 1
"""Above the number of every run."""
FIRST_LANE_TURNS: Final = 8
"""Number of nine datagrams in which lane 0 comes first while both lanes wait: it is preferred, and the other one never starves."""


class Settlement:
    """Pending outcome of one parcel: `open` counts its runs not yet sent and its datagrams in flight."""

    __slots__ = ("failed", "open", "token", "urgent")

    def __init__(self, token: int, urgent: bool = False) -> None:
        self.token = token
        self.urgent = urgent
        """True if somebody waits for the outcome."""
        self.open = 0
        self.failed = False


def close(settlement: Settlement, handled: bool, settled: list[tuple[int, bool]]) -> None:
    """Note that one of a parcel's runs or datagrams is decided; the last one appends (token, all handled) to `settled`."""
    if not handled:
        settlement.failed = True
    settlement.open -= 1
    if not settlement.open:
        settled.append((settlement.token, not settlement.failed))


class ItemRun:
    """Consecutive items of one parcel for the same carrier, or the fragments of one item."""

    __slots__ = ("at", "fragments", "items", "number", "queued_at", "settlement", "size")

    def __init__(
        self, items: list[bytes], size: int, settlement: Settlement | None, now: float, *, fragments: bool = False
    ) -> None:
        self.items = items
        self.size = size
        """Bytes not yet sent."""
        self.at = 0
        self.fragments = fragments
        """True if `items` are the fragments of one item: each leaves in its own datagram."""
        self.number = 0
        self.settlement = settlement
        self.queued_at = now
        if settlement is not None:
            settlement.open += 1


Taken = tuple[list[bytes], int, list[Settlement], int, bool]
"""Contents of one datagram or frame: the items, their total bytes, the parcels with a token among them, the number of fragments of
the item if this is a fragment (otherwise 0), and True if it is the item's last. A `NamedTuple` would take five times as long to
make."""


class Outbox:
    """Items of one kind (records or control) that wait for one carrier to one peer, lane 0 preferred."""

    __slots__ = ("_lanes", "_settled", "_turn", "bytes", "number", "since")

    def __init__(self, lanes: int, settled: list[tuple[int, bool]]) -> None:
        self._lanes: tuple[deque[ItemRun], ...] = tuple(deque() for _ in range(lanes))
        self._settled = settled
        self._turn = 0
        self.bytes = 0
        """Bytes that wait, including the cost of each run."""
        self.number = 0
        """Number of the run queued last."""
        self.since = INFINITY
        """Time at which the oldest run was queued that waited when `take` was called last."""

    def put(self, run: ItemRun, lane: int) -> None:
        """Queue a run; `overflow` bounds the queue afterwards."""
        self.bytes += run.size + RUN_COST_BYTES
        self.number += 1
        run.number = self.number
        self._lanes[lane].append(run)

    def first_number(self) -> int:
        """Number of the run queued first; `NO_RUN` if nothing waits."""
        first = NO_RUN
        for lane in self._lanes:
            if lane and lane[0].number < first:
                first = lane[0].number
        return first

    def _in_turn(self) -> Sequence[deque[ItemRun]]:
        """The lanes, both with waiting items, in the order in which they fill the next datagram."""
        lanes = self._lanes
        run = lanes[1][0]
        if run.fragments and run.at:
            # This item is begun: its fragments leave one after the other.
            return lanes[::-1]
        run = lanes[0][0]
        if run.fragments and run.at:
            return lanes
        self._turn += 1
        return lanes if self._turn % (FIRST_LANE_TURNS + 1) else lanes[::-1]

    def take(self, room: int) -> Taken:
        """Take items for one datagram: at most `room` bytes, but at least one item; or one fragment."""
        parts: list[bytes] = []
        settlements: list[Settlement] = []
        size = 0
        lanes = self._lanes
        self.since = INFINITY
        for lane in lanes:
            if lane and lane[0].queued_at < self.since:
                self.since = lane[0].queued_at
        for lane in self._in_turn() if len(lanes) > 1 and lanes[0] and lanes[1] else lanes:
            while lane:
                run = lane[0]
                if run.fragments:
                    return (parts, size, settlements, 0, False) if parts else self._take_fragment(lane)
                if size + run.size <= room:
                    parts += run.items[run.at :] if run.at else run.items
                    size += run.size
                    self.bytes -= run.size + RUN_COST_BYTES
                    lane.popleft()
                    if run.settlement is not None:
                        # The run closes and its datagram opens: the count does not change.
                        settlements.append(run.settlement)
                    continue
                taken = self._take_some(run, room - size, parts)
                if taken and run.settlement is not None:
                    run.settlement.open += 1
                    settlements.append(run.settlement)
                if not run.size:
                    self._finish(lane)
                return parts, size + taken, settlements, 0, False
        return parts, size, settlements, 0, False

    def _take_fragment(self, lane: deque[ItemRun]) -> Taken:
        run = lane[0]
        part = run.items[run.at]
        size = len(part)
        run.at += 1
        run.size -= size
        self.bytes -= size
        settlements = []
        if run.settlement is not None:
            run.settlement.open += 1
            settlements.append(run.settlement)
        last = run.at == len(run.items)
        if last:
            self._finish(lane)
        return [part], size, settlements, len(run.items), last

    def _take_some(self, run: ItemRun, room: int, parts: list[bytes]) -> int:
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

    def _finish(self, lane: deque[ItemRun]) -> None:
        run = lane.popleft()
        self.bytes -= RUN_COST_BYTES
        if run.settlement is not None:
            close(run.settlement, True, self._settled)

    def _drop(self, lane: deque[ItemRun]) -> int:
        run = lane.popleft()
        self.bytes -= run.size + RUN_COST_BYTES
        if run.settlement is not None:
            close(run.settlement, False, self._settled)
        return 1 if run.fragments else len(run.items) - run.at

    def drop_older(self, queued_before: float) -> int:
        """Drop runs that were queued before a time, oldest first. Returns the number of items."""
        dropped = 0
        for lane in self._lanes:
            while lane and lane[0].queued_at <= queued_before:
                dropped += self._drop(lane)
        return dropped

    def overflow(self, max_bytes: int) -> int:
        """Drop the oldest runs, those of the last lane first, until at most this many bytes wait. Returns the number of items."""
        dropped = 0
        for lane in reversed(self._lanes):
            while lane and self.bytes > max_bytes:
                dropped += self._drop(lane)
        return dropped

    def clear(self) -> int:
        """Drop everything. Returns the number of items."""
        dropped = 0
        for lane in self._lanes:
            while lane:
                dropped += self._drop(lane)
        return dropped

    def oldest(self) -> float:
        """Time at which the oldest run was queued; infinity if nothing waits."""
        oldest = INFINITY
        for lane in self._lanes:
            if lane and lane[0].queued_at < oldest:
                oldest = lane[0].queued_at
        return oldest
