"""`pixiu top`: rates, latency, lags and dead processes out of real pages, and how they are shown."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping

import pytest
from rich.console import Console

from cluster.metrics.metrics import Metrics
from tools.cli.http import samples
from tools.cli.rates import Reading, hottest, quantile, reading, rows
from tools.cli.top import Screen, render


def page(role: str, counts: Mapping[str, object], latency: str = "", seconds: tuple[float, ...] = (), partition: int = -1) -> bytes:
    """What a process of this role shows."""
    metrics = Metrics(role, partition)
    metrics.collect_from(lambda: counts)
    if latency:
        for value in seconds:
            metrics.histogram(latency, "", kind=str(value)).add(value)
    return asyncio.run(metrics.render())


def read(role: str, identity: int, at: float, text: bytes | None, partition: int = -1) -> Reading:
    found = None if text is None else samples(text)
    return reading(f"{role} {identity}", role, partition, identity, at, found)


def test_rates_of_a_role_are_those_of_all_its_processes() -> None:
    before = [
        read("gateway", 1, 10.0, page("gateway", {"deliveries_total": 100, "links_records_received_total": 7})),
        read("gateway", 2, 10.0, page("gateway", {"deliveries_total": 100})),
    ]
    now = [
        read("gateway", 1, 12.0, page("gateway", {"deliveries_total": 300, "links_records_received_total": 27})),
        read("gateway", 2, 12.0, page("gateway", {"deliveries_total": 110, "links_lost_items": 4})),
    ]
    [row] = rows({one.identity: one for one in before}, now)
    assert (row.role, row.partition, row.alive, row.dead) == ("gateway", -1, 2, 0)
    assert (row.in_per_s, row.out_per_s, row.drops_per_s) == (10.0, 105.0, 2.0)


def test_a_process_that_does_not_answer_is_dead_and_counts_no_rate() -> None:
    before = read("broker", 1, 10.0, page("broker", {"links_records_received_total": 5}))
    [row] = rows({1: before}, [read("broker", 1, 12.0, None, 0)])
    assert (row.alive, row.dead, row.in_per_s) == (0, 1, 0.0)
    assert (row.p50_s, row.p99_s, row.behind) == (None, None, None)


def test_a_process_that_was_not_there_before_has_no_rate_yet() -> None:
    [row] = rows({}, [read("broker", 1, 12.0, page("broker", {"links_records_received_total": 5}), 0)])
    assert (row.alive, row.in_per_s) == (1, 0.0)


def test_latency_is_that_of_the_interval_over_all_labels() -> None:
    name = "pixiu_record_latency_seconds"
    before = read("broker", 1, 10.0, page("broker", {}, name, (4.0,) * 50, 0), 0)
    now = read("broker", 1, 12.0, page("broker", {}, name, (4.0,) * 50 + (0.003, 0.2) * 5, 0), 0)
    [row] = rows({1: before}, [now])
    assert row.p50_s == pytest.approx(0.005)
    assert 0.1 < (row.p99_s or 0) <= 0.25


def test_a_store_has_the_entries_of_its_first_replica_and_says_how_far_the_last_is_behind() -> None:
    def replica(identity: int, at: float, committed: int, missing: int) -> Reading:
        counts = {"replica_committed": committed, "replica_missing": missing}
        return read("pi", identity, at, page("pi", counts, partition=1), 1)

    before = {1: replica(1, 10.0, 100, 0), 2: replica(2, 10.0, 90, 0)}
    [row] = rows(before, [replica(1, 12.0, 140, 1), replica(2, 12.0, 92, 0)])
    assert (row.in_per_s, row.behind, row.missing) == (20.0, 48, 1)


@pytest.mark.parametrize(
    ("buckets", "share", "wanted"),
    [
        ({}, 0.5, None),
        ({1.0: 0, float("inf"): 0}, 0.5, None),
        ({1.0: 10, 2.0: 20, float("inf"): 20}, 0.5, 1.0),
        ({1.0: 10, 2.0: 20, float("inf"): 20}, 0.75, 1.5),
        ({1.0: 1, 2.0: 1, float("inf"): 100}, 0.99, 2.0),
    ],
)
def test_quantiles_go_by_prometheus_rule(buckets: dict[float, float], share: float, wanted: float | None) -> None:
    assert quantile(buckets, share) == wanted


def test_hot_keys_of_several_processes_are_added_and_what_is_none_is_left_out() -> None:
    pages: list[Mapping[str, object]] = [
        {"rooms": [{"key": 7, "per_s": 2.0}, {"key": 8, "per_s": 3}]},
        {"rooms": [{"key": 7, "per_s": 2.5}, {"key": "x", "per_s": 9}, 5, {"key": 9}]},
        {"rooms": "no"},
        {},
    ]
    assert hottest(pages, "rooms", 5) == [(7, 4.5), (8, 3)]
    assert hottest(pages, "rooms", 1) == [(7, 4.5)]


def test_the_screen_names_the_dead_what_is_missing_and_what_is_hot() -> None:
    found = rows({}, [read("broker", 1, 1.0, None, 0), read("proxy", 2, 1.0, page("proxy", {}))])
    screen = Screen("zk://h:1/p", 2.0, found, [(1000, 12.4)], [], ["broker 0/1 at h:5"], ["broker partition 0: 0 of 1 Running"])
    out = Console(file=io.StringIO(), width=150)
    out.print(render(screen))
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    for words in ("1 dead", "broker 0/1 at h:5 does not answer", "0 of 1 Running", "hottest rooms: 1000 12/s", "zk://h:1/p"):
        assert words in text
    assert "hottest users" not in text
    said = json.loads(json.dumps(screen.json()))
    assert said["hot_rooms"] == [{"room": 1000, "per_s": 12.4}]
    assert said["roles"][0]["dead"] == 1
