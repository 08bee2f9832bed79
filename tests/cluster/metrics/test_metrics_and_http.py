"""Metrics at scrape time, and what a process shows over HTTP."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.links.api import PeerState
from cluster.links.stats import Counts, LinkStats, PeerStats
from cluster.listeners import http as runtime_http
from cluster.listeners.http import HttpServer
from cluster.metrics import metrics as runtime_metrics
from cluster.metrics.histogram import Histogram, OneAtATime
from cluster.metrics.metrics import ALERTS, Metrics, Sample, link_samples
from pixiu.errors import ConfigurationError
from pixiu.ids import EndpointID

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def text_of(metrics: Metrics) -> str:
    return asyncio.run(metrics.render()).decode()


def scrape(metrics: Metrics) -> Samples:
    """What a page says. The labels that every sample has are taken off again; a test of their own looks at them."""
    found: Samples = {}
    for family in text_string_to_metric_families(text_of(metrics)):
        for sample in family.samples:
            if sample.name.startswith("pixiu_"):
                assert sample.labels.pop("role") == metrics.role
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@dataclass
class Numbers:
    records_total: int = 3
    queue_bytes: int = 4
    drops_total: dict[str, int] = field(default_factory=lambda: {"full": 5})


def test_mappings_dataclasses_and_samples_become_named_samples() -> None:
    metrics = Metrics("proxy")
    metrics.collect_from(Numbers)
    metrics.collect_from(lambda: {"rooms": 7, "refused_total{reason}": {"size": 8, "rate": 9}}, prefix="edge_")
    metrics.collect_from(lambda: [Sample("age_seconds", 1.5, {"peer": "a:1"}), Sample("age_seconds", 2.5, {"peer": "b:1"})])
    found = scrape(metrics)
    assert found[("pixiu_proxy_records_total", ())] == 3
    assert found[("pixiu_proxy_queue_bytes", ())] == 4
    assert found[("pixiu_proxy_drops_total", (("kind", "full"),))] == 5
    assert found[("pixiu_proxy_edge_rooms", ())] == 7
    assert found[("pixiu_proxy_edge_refused_total", (("reason", "size"),))] == 8
    assert found[("pixiu_proxy_edge_refused_total", (("reason", "rate"),))] == 9
    assert found[("pixiu_proxy_age_seconds", (("peer", "a:1"),))] == 1.5
    assert found[("pixiu_proxy_age_seconds", (("peer", "b:1"),))] == 2.5


def test_counters_and_gauges_are_typed_and_helped() -> None:
    metrics = Metrics("proxy")
    metrics.collect_from(lambda: {"records_total": 1, "running": 1})
    text = text_of(metrics)
    assert "# TYPE pixiu_proxy_records_total counter" in text
    assert "# TYPE pixiu_proxy_running gauge" in text
    assert f"# HELP pixiu_proxy_running {ALERTS['running']}" in text


def test_process_build_and_lag_are_there_without_any_source() -> None:
    metrics = Metrics("proxy")
    metrics.note_loop_lag(0.25)
    metrics.note_loop_lag(-1.0)
    found = scrape(metrics)
    assert found[("process_start_time_seconds", ())] > 1e9
    assert found[("pixiu_proxy_loop_lag_seconds", ())] == 0.25
    assert any(name == "pixiu_proxy_build_info" and dict(labels)["version"] for name, labels in found)
    for _ in range(runtime_metrics.LAG_WINDOW):
        metrics.note_loop_lag(0.1)
    assert metrics.loop_lag_s == 0.1


@pytest.mark.parametrize("wrong", [{"Bad-Name": 1}, {"x": "text"}, {"a{b}{c}": 1}, [Sample("a{b}", 1)], 5])
def test_a_broken_source_is_counted_and_hides_no_other(wrong: Any) -> None:
    metrics = Metrics("proxy")
    metrics.collect_from(lambda: wrong)
    metrics.collect_from(lambda: {"good": 1})
    found = scrape(metrics)
    assert found[("pixiu_proxy_good", ())] == 1
    assert found[("pixiu_proxy_metrics_failures_total", ())] == 1


def test_a_source_beyond_its_bound_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_metrics, "MAX_SAMPLES", 10)
    metrics = Metrics("proxy")

    def endless() -> Iterable[Sample]:
        number = 0
        while True:
            number += 1
            yield Sample("room_members", number, {"room": "9" * 500 + str(number)})

    metrics.collect_from(endless)
    text = text_of(metrics)
    assert text.count("\npixiu_proxy_room_members{") == 10
    assert "9" * (runtime_metrics.MAX_LABEL + 1) not in text
    assert 'pixiu_proxy_metrics_left_out_total{role="proxy"} 1.0' in text


def test_sources_are_bounded() -> None:
    metrics = Metrics("proxy")
    for _ in range(runtime_metrics.MAX_SOURCES):
        metrics.collect_from(dict)
    with pytest.raises(ValueError, match="at most 256 sources"):
        metrics.collect_from(dict)


def test_link_counts_become_totals_and_samples_by_peer() -> None:
    peers = {
        EndpointID(1): PeerStats("broker", PeerState.ALIVE, Counts(records_sent=5), 1500, 100, 10, 1),
        EndpointID(2): PeerStats("", PeerState.DEAD, Counts(), 0, 0, 0, 0),
    }
    stats = LinkStats(Counts(records_sent=1, lost=2), {}, {"tag": 3}, {"push_back": 4}, items_given_up=2, kernel_drops=1)
    metrics = Metrics("proxy")
    metrics.collect_from(lambda: link_samples(stats, peers.items(), lambda endpoint: f"broker:h\n:{endpoint}"))
    found = scrape(metrics)
    assert found[("pixiu_proxy_links_records_sent_total", ())] == 6
    assert found[("pixiu_proxy_links_lost_items", ())] == 2
    assert found[("pixiu_proxy_links_refused_total", (("reason", "tag"),))] == 3
    assert found[("pixiu_proxy_links_dropped_total", (("reason", "push_back"),))] == 4
    for series in ("links_refused_total", "links_dropped_total"):
        assert sum(name == f"pixiu_proxy_{series}" for name, _ in found) > 3, "a series that begins with its event has no increase"
    assert found[("pixiu_proxy_links_refused_total", (("reason", "magic"),))] == 0
    assert found[("pixiu_proxy_links_items_given_up_total", ())] == 2
    assert found[("pixiu_proxy_links_kernel_drops_total", ())] == 1
    assert found[("pixiu_proxy_peers_alive", ())] == found[("pixiu_proxy_peers_dead", ())] == 1
    one, two = (("peer", "broker:h\\u000a:1"),), (("peer", "broker:h\\u000a:2"),)
    assert found[("pixiu_proxy_peer_records_sent_total", one)] == 5
    assert found[("pixiu_proxy_peer_round_trip_seconds", one)] == 0.0015
    assert (found[("pixiu_proxy_peer_up", one)], found[("pixiu_proxy_peer_up", two)]) == (1, 0)


def test_peers_beyond_the_shown_ones_are_in_the_totals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_metrics, "MAX_PEERS", 3)
    peers = {EndpointID(n): PeerStats("broker", PeerState.ALIVE, Counts(), 0, 0, 0, 0) for n in range(9)}
    samples = list(filter(None, link_samples(LinkStats(Counts(), {}, {}, {}), peers.items(), str)))
    assert sum(sample.name == "peer_up" for sample in samples) == 3
    assert next(sample.value for sample in samples if sample.name == "peers_alive") == 9


def test_every_sample_says_role_and_partition() -> None:
    metrics = Metrics("broker", 3)
    metrics.collect_from(lambda: {"records_total": 1, "refused_total{reason}": {'a "b"\\': 2}})
    metrics.histogram("pixiu_wait_seconds", "Waits.", queue="log").add(0.25)
    text = text_of(metrics)
    assert 'pixiu_broker_records_total{role="broker",partition="3"} 1.0' in text
    families = [family for family in text_string_to_metric_families(text) if family.name.startswith("pixiu_")]
    labels = [sample.labels for family in families for sample in family.samples]
    assert {(one["role"], one["partition"]) for one in labels} == {("broker", "3")}
    assert 'a "b"\\' in {one.get("reason") for one in labels}


def test_a_histogram_has_prometheus_classic_buckets() -> None:
    metrics = Metrics("proxy")
    histogram = metrics.histogram("pixiu_wait_seconds", "How long it waits.", (0.1, 1.0))
    for value in (0.1, 0.5, 0.5, 7.0, -3.0):
        histogram.add(value)
    found = scrape(metrics)
    assert [found[("pixiu_wait_seconds_bucket", (("le", bound),))] for bound in ("0.1", "1.0", "+Inf")] == [2, 4, 5]
    assert found[("pixiu_wait_seconds_count", ())] == 5
    assert found[("pixiu_wait_seconds_sum", ())] == pytest.approx(8.1)
    text = text_of(metrics)
    assert "# TYPE pixiu_wait_seconds histogram" in text
    assert "# HELP pixiu_wait_seconds How long it waits." in text


def test_two_histograms_of_one_name_are_one_family() -> None:
    metrics = Metrics("proxy")
    for kind in ("room", "chat"):
        metrics.histogram("pixiu_wait_seconds", "Waits.", kind=kind).add(1.0)
    assert text_of(metrics).count("# TYPE pixiu_wait_seconds ") == 1
    assert scrape(metrics)[("pixiu_wait_seconds_count", (("kind", "chat"),))] == 1


def test_histograms_are_bounded() -> None:
    metrics = Metrics("proxy")
    with pytest.raises(ValueError, match="at most 64 histograms"):
        for number in range(runtime_metrics.MAX_HISTOGRAMS + 1):
            metrics.histogram(f"pixiu_{number}_seconds", "")


def test_one_thing_at_a_time_is_timed() -> None:
    histogram = Histogram("pixiu_wait_seconds", "")
    timed = OneAtATime(histogram)
    timed.begin((1, 10), 5.0)
    timed.begin((2, 20), 6.0)
    assert timed.mark == (1, 10)
    timed.end(7.0)
    assert histogram.total == 2.0
    timed.begin((2, 20), 8.0)
    assert timed.mark == (2, 20)
    timed.drop()
    timed.begin((3, 30), 9.0)
    assert (timed.mark, histogram.total) == ((3, 30), 2.0)


class Shown:
    """An HTTP server whose health a test sets."""

    def __init__(self) -> None:
        self.serving = True
        self.said: dict[str, Any] = {"role": "proxy"}
        self.error: Exception | None = None
        self.metrics = Metrics("proxy")
        self.server = HttpServer(self.metrics, self.health, lambda: {"rooms": [{"key": 7, "per_s": 2.5}], "users": []})
        self.port = 0

    def health(self) -> tuple[bool, dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return self.serving, self.said

    async def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{self.port}{path}", headers=headers) as reply:
            return reply.status, reply.content_type, await reply.text()


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    shown = Shown()
    shown.port = await shown.server.bind("127.0.0.1", 0, fallback=True)
    yield shown
    await shown.server.close()


async def test_metrics_health_and_live_answer(shown: Shown) -> None:
    status, kind, text = await shown.get("/metrics")
    assert (status, kind) == (200, "text/plain")
    assert "pixiu_proxy_build_info{" in text
    assert await shown.get("/health") == (200, "application/json", '{"role": "proxy"}')
    shown.serving = False
    assert (await shown.get("/health"))[0] == 503
    assert await shown.get("/live") == (200, "text/plain", "live\n")
    assert await shown.get("/hot") == (200, "application/json", '{"rooms": [{"key": 7, "per_s": 2.5}], "users": []}')
    assert (await shown.get("/connections"))[0] == 404
    shown.server.pages["/connections"] = lambda: {"connections": 1}
    assert await shown.get("/connections") == (200, "application/json", '{"connections": 1}')


async def test_a_scrape_is_made_in_slices_between_which_the_loop_turns(shown: Shown) -> None:
    """300 peers, of which the first 64 are shown, and a source of 5,000 samples: in no turn of the event loop more than a slice."""
    loop = asyncio.get_running_loop()
    turn = 0
    work: Counter[int] = Counter()

    def turned() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(turned)

    def peers() -> Iterator[tuple[EndpointID, PeerStats]]:
        for number in range(300):
            work[turn] += 1
            yield EndpointID(number), PeerStats("broker", PeerState.ALIVE, Counts(records_sent=1), 0, 0, 0, 0)

    def name(endpoint: EndpointID) -> str:
        work[turn] += 1
        return str(endpoint)

    def samples() -> Iterator[Sample]:
        for number in range(5000):
            work[turn] += 1
            yield Sample("members", number, {"room": str(number)})

    shown.metrics.collect_from(lambda: link_samples(LinkStats(Counts(), {}, {}, {}), peers(), name))
    shown.metrics.collect_from(samples)
    loop.call_soon(turned)
    _, _, text = await shown.get("/metrics")
    assert 'pixiu_proxy_links_records_sent_total{role="proxy"} 300.0' in text
    assert text.count("pixiu_proxy_members{") == 5000
    assert sum(work.values()) == 300 + 64 + 5000
    assert max(work.values()) <= runtime_metrics.SLICE


async def test_a_health_that_raises_is_503_without_its_text(shown: Shown) -> None:
    shown.error = RuntimeError("inner detail")
    status, _, text = await shown.get("/health")
    assert status == 503
    assert "inner detail" not in text


async def test_long_headers_are_refused(shown: Shown) -> None:
    assert (await shown.get("/live", Large="y" * 5000))[0] == 400
    assert (await shown.get("/live"))[0] == 200


async def test_connections_beyond_the_bound_are_closed_and_counted(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_http, "MAX_CONNECTIONS", 2)
    held = [await asyncio.open_connection("127.0.0.1", shown.port) for _ in range(2)]
    for reader, writer in held:
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readuntil(b"live\n")).startswith(b"HTTP/1.1 200")
    reader, writer = await asyncio.open_connection("127.0.0.1", shown.port)
    assert await reader.read() == b""
    assert shown.server.stats() == {"http_refused_total": 1}
    for _, other in [*held, (reader, writer)]:
        other.close()


async def test_one_address_cannot_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """S10: whoever held 64 connections made a supervisor kill the process, as it was not answered any more."""
    monkeypatch.setattr(runtime_http, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(runtime_http, "MAX_OF_ADDRESS", 3, raising=False)
    shown = Shown()
    shown.port = await shown.server.bind("0.0.0.0", 0, fallback=True)

    async def live(local: str) -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", shown.port, local_addr=(local, 0))
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        try:
            return await reader.readuntil(b"live\n"), writer
        except (asyncio.IncompleteReadError, ConnectionError):
            return b"", writer

    answers = [await live("127.0.0.2") for _ in range(5)]
    assert [bool(answer) for answer, _ in answers] == [True, True, True, False, False]
    answer, writer = await live("127.0.0.3")
    assert answer.startswith(b"HTTP/1.1 200")
    for _, other in [*answers, (answer, writer)]:
        other.close()
    await shown.server.close()


async def test_a_connection_that_says_nothing_is_closed_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_http, "MAX_CONNECTION_S", 0.05)
    monkeypatch.setattr(runtime_http, "SWEEP_S", 0.02)
    shown = Shown()
    shown.port = await shown.server.bind("127.0.0.1", 0, fallback=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", shown.port)
    writer.write(b"GET /live HT")
    assert await asyncio.wait_for(reader.read(), 20) == b""
    writer.close()
    await shown.server.close()


async def test_a_taken_port_is_named_or_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown = Shown()
        with pytest.raises(ConfigurationError, match=rf"port {port} on 127\.0\.0\.1 cannot be used for HTTP: .*set http_port"):
            await shown.server.bind("127.0.0.1", port, fallback=False)
        await shown.server.close()
        shown = Shown()
        assert await shown.server.bind("127.0.0.1", port, fallback=True) not in (0, port)
        await shown.server.close()
