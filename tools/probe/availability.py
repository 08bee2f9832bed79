"""Availability as a number: the share of probes that arrived, by path and in total, over 30 days. Pure.

    rounds of probes ──▶ today's counts of each path ──▶ 30 days ──▶ report
                         this hour's counts of all  ──▶ 720 hours

A path is named by the places of its processes, so it stays the same when one of them is started again. A moment without any path,
because no proxy or gateway is registered, counts as a probe that failed: nobody could have sent anything.

Source: docs/console.md, "Availability".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

from pixiu.errors import MalformedData
from tools.probe.paths import Path, Prober

DAYS: Final = 30
DAY_S: Final = 86_400
HOUR_S: Final = 3_600
HOURS: Final = DAYS * 24
MAX_PATHS: Final = 500
"""Paths of a day that have a count of their own. Policy: those that follow are counted together, as `OTHERS`."""
MAX_HOPS: Final = 32
OTHERS: Final = "others"
NO_PATH: Final = "no path"
BOUNDS_US: Final = (250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000)
"""Upper bounds of the buckets of a hop's times, microseconds; a last bucket has what is above."""
VERSION: Final = 1
MAX_FILE_BYTES: Final = 8 << 20

Counts = list[int]
"""Probes that arrived, and probes that failed."""


class Availability:
    """Counts of probes, a day and an hour at a time."""

    def __init__(self) -> None:
        self._days: dict[int, dict[str, Counts]] = {}
        self._hours: dict[int, Counts] = {}
        self._hops: dict[str, list[int]] = {}
        """Hop → values in each bucket, and their sum in microseconds."""
        self._seen: dict[Path, tuple[int, int]] = {}
        """Path → what the prober had counted when it was last looked at."""

    # --- counting

    def begin(self) -> None:
        """Begin with another prober, which counts from zero."""
        self._seen = {}

    def note(self, prober: Prober, now_s: float) -> None:
        """Count what a prober has found since the last call; `now_s` is Unix seconds."""
        seen: dict[Path, tuple[int, int]] = {}
        for path, state in prober.paths.items():
            before = self._seen.get(path, (0, 0))
            if state.arrived < before[0] or state.failed < before[1]:
                before = (0, 0)  # the path was away, and is a new one
            seen[path] = state.arrived, state.failed
            self.count(path.place, state.arrived - before[0], state.failed - before[1], now_s)
        if not prober.paths:
            self.count(NO_PATH, 0, 1, now_s)
        self._seen = seen

    def count(self, place: str, arrived: int, failed: int, now_s: float) -> None:
        """Count probes of a path."""
        if not arrived and not failed:
            return
        day, hour = int(now_s // DAY_S), int(now_s // HOUR_S)
        paths = self._days.setdefault(day, {})
        if place not in paths and len(paths) >= MAX_PATHS:
            place = OTHERS
        for counts in (paths.setdefault(place, [0, 0]), self._hours.setdefault(hour, [0, 0])):
            counts[0] += arrived
            counts[1] += failed
        self._forget(day, hour)

    def note_hops(self, times_us: Mapping[str, int]) -> None:
        """Count the times of a probe's hops; one below 0, of clocks that differ, counts as 0."""
        for hop, time_us in times_us.items():
            if hop not in self._hops and len(self._hops) >= MAX_HOPS:
                continue
            buckets = self._hops.setdefault(hop, [0] * (len(BOUNDS_US) + 2))
            buckets[bisect_left(BOUNDS_US, time_us)] += 1
            buckets[-1] += max(time_us, 0)

    def _forget(self, day: int, hour: int) -> None:
        for old in [each for each in self._days if each <= day - DAYS]:
            del self._days[old]
        for old in [each for each in self._hours if each <= hour - HOURS]:
            del self._hours[old]

    # --- what it shows

    def report(self, now_s: float) -> dict[str, Any]:
        """Shares of the last 30 days, as JSON values. A share is None where nothing was probed."""
        self._forget(int(now_s // DAY_S), int(now_s // HOUR_S))
        paths: dict[str, Counts] = {}
        for counted in self._days.values():
            for place, (arrived, failed) in counted.items():
                counts = paths.setdefault(place, [0, 0])
                counts[0] += arrived
                counts[1] += failed
        days = [{"day_s": day * DAY_S, **_shares(_sum(counted.values()))} for day, counted in sorted(self._days.items())]
        hours = [{"hour_s": hour * HOUR_S, **_shares(counts)} for hour, counts in sorted(self._hours.items())]
        worst = sorted(paths.items(), key=lambda each: (each[1][0] / sum(each[1]), each[0]))
        return {
            "at_s": int(now_s),
            "total": _shares(_sum(paths.values())),
            "days": days,
            "hours": hours,
            "paths": [{"path": place, **_shares(counts)} for place, counts in worst],
            "hops": [_hop(hop, buckets) for hop, buckets in self._hops.items()],
        }

    # --- over a restart

    def saved(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {"version": VERSION, "days": self._days, "hours": self._hours, "hops": self._hops}

    @classmethod
    def restored(cls, saved: Any) -> Availability:
        """Make it from what was saved. Raises `MalformedData`."""
        found = cls()
        try:
            if saved["version"] != VERSION:
                raise MalformedData(f"version {saved['version']}, and this one reads {VERSION}")
            for day, paths in list(saved["days"].items())[-DAYS:]:
                found._days[int(day)] = {str(place): _counts(counts) for place, counts in list(paths.items())[: MAX_PATHS + 1]}
            found._hours = {int(hour): _counts(counts) for hour, counts in list(saved["hours"].items())[-HOURS:]}
            for hop, buckets in list(saved["hops"].items())[:MAX_HOPS]:
                if len(buckets) == len(BOUNDS_US) + 2:
                    found._hops[str(hop)] = [int(count) for count in buckets]
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise MalformedData("other fields than those that are saved") from None
        return found


def _counts(saved: Any) -> Counts:
    arrived, failed = saved
    return [max(int(arrived), 0), max(int(failed), 0)]


def _sum(counts: Iterable[Counts]) -> Counts:
    total = [0, 0]
    for arrived, failed in counts:
        total[0] += arrived
        total[1] += failed
    return total


def _shares(counts: Counts) -> dict[str, Any]:
    arrived, failed = counts
    share = round(arrived / (arrived + failed), 6) if arrived + failed else None
    return {"arrived": arrived, "failed": failed, "share": share}


def _hop(hop: str, buckets: list[int]) -> dict[str, Any]:
    """A histogram as Prometheus has it: values that are not above each bound, seconds."""
    cumulated = list(accumulate(buckets[:-1]))
    bounds = [*(f"{bound / 1_000_000:g}" for bound in BOUNDS_US), "+Inf"]
    return {
        "hop": hop, "count": cumulated[-1], "sum_s": buckets[-1] / 1_000_000, "buckets": dict(zip(bounds, cumulated, strict=True)),
    }  # fmt: skip
