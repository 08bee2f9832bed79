"""Measurements of the batches of records that a process gets by links: once a batch, a microsecond each.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Final

from cluster.metrics.histogram import SIZES, Histogram
from cluster.metrics.hot_keys import HotKeys
from cluster.metrics.metrics import Metrics
from pixiu.ids import SNOWFLAKE_EPOCH_MS, SNOWFLAKE_SEQUENCE_BITS, SNOWFLAKE_WORKER_BITS
from pixiu.wire.record import CHAT, ROOM, ROUTE_SIZE, SIGNAL, WALK, Flag

MAX_AGE_MS: Final = 3_600_000
"""Maximum age of a message by its SnowflakeID: an older one was kept by its sender, or its ID holds no time, and is not counted."""
LATENCY: Final = (
    "Time from a message's SnowflakeID to its arrival at this process, by kind, of one message of each batch. As exact as "
    "the machines' clocks agree."
)
HANDLING: Final = "Time that handling a batch from a peer kept the event loop busy."
TO_USERS: Final = frozenset((CHAT, SIGNAL))
_TIME_SHIFT: Final = SNOWFLAKE_WORKER_BITS + SNOWFLAKE_SEQUENCE_BITS


class ReceivedBatches:
    """Histograms and hot keys of one process.

    Args:
        metrics: the process's metrics, which show them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.rooms, self.users = HotKeys(), HotKeys()
        self._records = metrics.histogram("pixiu_received_batch_records", "Records in a batch that came from a peer.", SIZES)
        self._handling = metrics.histogram("pixiu_handling_seconds", HANDLING)
        self._latency = {
            number: metrics.histogram("pixiu_record_latency_seconds", LATENCY, kind=name)
            for number, name in ((ROOM, "room"), (SIGNAL, "signal"), (CHAT, "chat"))
        }

    def hot(self) -> dict[str, object]:
        """Return the content of `/hot`: the rooms and users with the most messages in the last whole ten seconds, and the rate
        of all of them together."""
        now_s = time.time_ns() / 1e9
        tops = (("rooms", self.rooms.top(now_s)), ("users", self.users.top(now_s)))
        said: dict[str, object] = {name: [{"key": key, "per_s": round(per_s, 1)} for key, per_s in top] for name, top in tops}
        said["per_s"] = {"rooms": round(self.rooms.per_s(now_s), 1), "users": round(self.users.per_s(now_s), 1)}
        return said

    def note(self, data: bytes, start: int, end: int, count: int, took_s: float) -> None:
        """Count a batch of `count` records in data[start:end] that has just been handled in `took_s` seconds."""
        measured: list[tuple[Histogram, float]] = [(self._records, float(count)), (self._handling, took_s)]
        if end - start >= ROUTE_SIZE:
            _, kind_and_flags, _, number, key = WALK.unpack_from(data, start)
            now_s = time.time_ns() / 1e9
            if kind_and_flags >> 8 & Flag.TO_ROOM:
                self.rooms.add(key, count, now_s)
            elif kind_and_flags & 255 in TO_USERS:
                self.users.add(key, count, now_s)
            latency = self._latency.get(kind_and_flags & 255)
            # `took_s` was spent after the arrival.
            age_ms = (now_s - took_s) * 1e3 - SNOWFLAKE_EPOCH_MS - (number >> _TIME_SHIFT)
            if latency is not None and not kind_and_flags >> 8 & Flag.DERIVED_ID and age_ms < MAX_AGE_MS:
                measured.append((latency, age_ms / 1e3))
        for histogram, value in measured:  # as `Histogram.add`, without a call for each
            least = value if value > 0.0 else 0.0
            histogram.counts[bisect_left(histogram.bounds, least)] += 1
            histogram.total += least
