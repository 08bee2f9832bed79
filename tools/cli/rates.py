"""Changes between two readings of processes' /metrics, by role and partition: rates, drops, lags, latency. Pure.

A process that did not answer is dead; one that was restarted between two readings counts from zero.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

Sample = tuple[str, Mapping[str, str], float]

IN: Final = ("links_records_received_total",)
OUT: Final = ("links_records_sent_total",)
STORED: Final = ("replica_committed",)
FLOWS_IN: Final[Mapping[str, Sequence[str]]] = {
    "proxy": ("records_in_total", "mail_mails_in_total"),
    "router": ("links_control_received_total",),
    "xiu": STORED,
    "pi": STORED,
    "topic": STORED,
}
"""Metrics of incoming traffic, per role; for others `IN`. A store's entries are counted at the replica that has committed the
most."""
FLOWS_OUT: Final[Mapping[str, Sequence[str]]] = {
    "gateway": ("deliveries_total", "signals_delivered_total", "mail_delivered_total"),
    "router": ("links_control_sent_total",),
}
DROPS: Final = (
    "links_queue_drops_total",
    "links_kernel_drops_total",
    "links_lost_items",
    "slow_consumer_dropped_total",
    "signals_dropped_total",
    "records_dropped_total",
)
"""Metrics of drops: before sending, by the kernel, on the way, for slow clients, in a proxy."""
LATENCY: Final[Mapping[str, str]] = {"proxy": "pixiu_publish_seconds", "xiu": "pixiu_commit_seconds", "pi": "pixiu_commit_seconds"}
"""Metric of the latency, per role; for others the age of a message when it arrives."""
ARRIVAL: Final = "pixiu_record_latency_seconds"
STORES: Final = frozenset(("xiu", "pi", "topic"))


OTHERS: Final = ("loop_lag_seconds", "replica_missing", "replica_committed", "access_", "links_refused")
"""Beginnings of other metrics that are shown."""


@cache
def wanted(role: str) -> tuple[str, ...]:
    """Beginnings of the names that a reading of a role takes: a page has ten times as many."""
    names = (*FLOWS_IN.get(role, IN), *FLOWS_OUT.get(role, OUT), *DROPS, *OTHERS)
    return (*(f"pixiu_{role}_{name}" for name in names), f"{LATENCY.get(role, ARRIVAL)}_bucket")


@dataclass(frozen=True, slots=True)
class Reading:
    """Metrics of one process, with the time of reading (monotonic seconds)."""

    name: str
    role: str
    partition: int
    at: float
    counts: Mapping[str, float] | None
    """Name without pixiu_<role>_ → the sum over its labels; None: it did not answer."""
    buckets: Mapping[float, float] = field(default_factory=dict)
    """Histogram of the role's latency: upper bound → number of values not above it, all labels together."""
    identity: int = 0
    """ID of this run of the process."""


def reading(name: str, role: str, partition: int, identity: int, at: float, page: Iterable[Sample] | None) -> Reading:
    """Evaluate one process's samples; None: it did not answer."""
    if page is None:
        return Reading(name, role, partition, at, None, {}, identity)
    prefix, latency = f"pixiu_{role}_", f"{LATENCY.get(role, ARRIVAL)}_bucket"
    counts: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[float, float] = defaultdict(float)
    for sample, labels, value in page:
        if sample.startswith(prefix):
            counts[sample.removeprefix(prefix)] += value
        elif sample == latency:
            buckets[float(labels["le"])] += value
    return Reading(name, role, partition, at, counts, buckets, identity)


@dataclass(slots=True)
class Row:
    """A role, or one of its partitions: all its processes together."""

    role: str
    partition: int
    alive: int = 0
    dead: int = 0
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    drops_per_s: float = 0.0
    lag_s: float = 0.0
    """The highest delay of an event loop in the last minute, seconds."""
    p50_s: float | None = None
    p99_s: float | None = None
    behind: int | None = None
    """For a store: entries that its first replica has committed and its last one has not."""
    missing: int | None = None
    """For a store: replicas that are required and not in sync."""


def rows(before: Mapping[int, Reading], now: Sequence[Reading]) -> list[Row]:
    """Make the table: a row for each role and partition, in the order of `now`. `before`: the previous readings, by identity."""
    groups: dict[tuple[str, int], list[Reading]] = {}
    for each in now:
        groups.setdefault((each.role, each.partition), []).append(each)
    return [_row(role, partition, found, before) for (role, partition), found in groups.items()]


def _row(role: str, partition: int, found: Sequence[Reading], before: Mapping[int, Reading]) -> Row:
    row = Row(role, partition)
    buckets: defaultdict[float, float] = defaultdict(float)
    committed: list[float] = []
    for each in found:
        if each.counts is None:
            row.dead += 1
            continue
        row.alive += 1
        row.lag_s = max(row.lag_s, each.counts.get("loop_lag_seconds", 0.0))
        old = before.get(each.identity)
        seconds = each.at - old.at if old is not None else 0.0
        if old is not None and old.counts is not None and seconds > 0:
            _add_rates(row, each.counts, old.counts, seconds)
            for bound, count in each.buckets.items():
                buckets[bound] += max(count - old.buckets.get(bound, 0.0), 0.0)
        if role in STORES and "replica_committed" in each.counts:
            committed.append(each.counts["replica_committed"])
            row.missing = max(row.missing or 0, int(each.counts.get("replica_missing", 0)))
    if committed:
        row.behind = int(max(committed) - min(committed))
    row.p50_s, row.p99_s = quantile(buckets, 0.5), quantile(buckets, 0.99)
    return row


def _add_rates(row: Row, now: Mapping[str, float], old: Mapping[str, float], seconds: float) -> None:
    def rate(names: Sequence[str]) -> float:
        return sum(max(now.get(name, 0.0) - old.get(name, 0.0), 0.0) for name in names) / seconds

    into, out = rate(FLOWS_IN.get(row.role, IN)), rate(FLOWS_OUT.get(row.role, OUT))
    if row.role in STORES:
        row.in_per_s = max(row.in_per_s, into)
    else:
        row.in_per_s += into
        row.out_per_s += out
    row.drops_per_s += rate(DROPS)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value that `share` of the values do not exceed, by Prometheus's rule: linear within its bucket; the highest finite bound
    for values above it. None if there is no value.

    buckets: upper bound (the last one infinite) → number of values not above it.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    wanted = buckets[bounds[-1]] * share
    lower, below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below) if count > below else bound
        lower, below = bound, count
    return lower


def hottest(pages: Iterable[Mapping[str, object]], what: str, most: int) -> list[tuple[int, float]]:
    """Combine the hottest rooms or users of several processes' /hot: (key, messages a second).

    what: "rooms" or "users". Invalid entries are skipped.
    """
    total: defaultdict[int, float] = defaultdict(float)
    for page in pages:
        entries = page.get(what)
        for entry in entries if isinstance(entries, list) else ():
            key, per_s = (entry.get("key"), entry.get("per_s")) if isinstance(entry, dict) else (None, None)
            if isinstance(key, int) and isinstance(per_s, int | float):
                total[key] += per_s
    return sorted(total.items(), key=lambda one: (-one[1], one[0]))[:most]
