"""Medians, ratios, and what is said of figures that are wrong or to be doubted."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from comparison.cases import CASES
from comparison.report import Machine, as_bytes, as_json, as_ratio, as_times, notes, processor_in, render, render_hops, render_idle
from comparison.results import Looked, Results, Sample, cpu_us, doubts, middle, ratios, sample_of, wrong
from tools.cli.output import console

FANOUT, CONNECTIONS = CASES["fanout-100"], CASES["connections"]


def rounds(*per_cpu: float, first: int = 1) -> list[Sample]:
    """Samples of consecutive rounds."""
    return [Sample(first + n, per_cpu=each) for n, each in enumerate(per_cpu)]


def test_a_sample_is_what_the_load_said_and_what_was_seen_of_the_servers() -> None:
    said = {"deliveries": 900.0, "published": 9.0, "p50_ms": 1.5}
    found = sample_of(FANOUT, said, Looked({"a": 10, "b": 0}, 100, 1, 50, 5), Looked({"a": 12, "b": 1}, 110, 3, 60, 10))
    assert (found.deliveries, found.server_cpu_s, found.per_cpu, found.p50_ms) == (900, 3, 300, 1.5)
    assert found.others_cores == (10 - 3 - 2) / 5
    assert found.memory_bytes == 60
    assert found.hops == {"a": 2, "b": 1}


def test_processes_and_the_switches_of_threads_that_go_on_are_counted() -> None:
    before, after = Looked({"a": 10}, 0, 0, 5, 4, 2, {1: 100, 2: 900}), Looked({"a": 11}, 1, 0, 7, 8, 3, {1: 300, 3: 7})
    found = sample_of(CASES["idle"], {}, before, after)
    assert (found.processes, found.switches_per_s, found.server_cores, found.memory_bytes) == (3, 50, 0.25, 7)


def test_connections_have_the_memory_that_each_added() -> None:
    found = sample_of(CONNECTIONS, {"deliveries": 10}, Looked({}, 0, 0, 5000, 0), Looked({"a": 1}, 1, 0, 6000, 1))
    assert found.memory_bytes == 100


def test_a_load_that_says_something_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="speed"):
        sample_of(FANOUT, {"speed": 1.0}, Looked({}, 0, 0, 0, 0), Looked({}, 0, 0, 0, 1))


def test_a_server_that_used_no_cpu_has_no_rate() -> None:
    assert sample_of(FANOUT, {"deliveries": 5}, Looked({"a": 1}, 0, 0, 0, 0), Looked({"a": 1}, 0, 0, 0, 0)).per_cpu == 0


def test_figures_are_medians_and_losses_sums() -> None:
    found = middle([Sample(1, p99_ms=1, lost=2), Sample(2, p99_ms=9), Sample(3, p99_ms=3, lost=1)])
    assert (found.p99_ms, found.lost) == (3, 3)


def test_where_the_cpu_goes_adds_up_to_the_whole() -> None:
    found = middle([
        Sample(1, published=100, server_cpu_s=3, hops={"proxy": 1, "broker": 2}),
        Sample(2, published=300, server_cpu_s=1, hops={"proxy": 1, "broker": 0}),
    ])  # fmt: skip
    assert cpu_us(found) == {"proxy": 5000, "broker": 5000}
    assert cpu_us(Sample(hops={"proxy": 1})) == {}
    out = console()
    with out.capture() as captured:
        out.print(render_hops({"rooms": {"pixiu": [found], "nats": [Sample(1, published=1, hops={"nats": 1})]}, "mail": {}}))
    assert captured.get().split()[-3:] == ["5,000.0", "5,000.0", "10,000.0"]
    assert "nats" not in captured.get()


def test_ratios_are_of_the_same_round() -> None:
    found = ratios({"pixiu": rounds(100, 10, 40), "nats": rounds(50, 10, 10), "redis": []})
    assert found == {"nats": (2.0, 1.0, 4.0)}


def test_a_round_that_failed_is_left_out_of_the_ratios() -> None:
    assert ratios({"pixiu": rounds(100, 10, 40), "nats": rounds(10, 10, first=2)}) == {"nats": (2.5, 1.0, 4.0)}
    assert ratios({"nats": rounds(10)}) == {}
    assert ratios({"pixiu": rounds(10), "nats": rounds(0)}) == {}


def test_what_went_wrong_is_said_with_how_much() -> None:
    ours = [Sample(1, deliveries=8, lost=2), Sample(2, deliveries=10, repeated=1)]
    assert wrong({"rooms": {"pixiu": ours, "nats": rounds(5)}}) == ["rooms, pixiu: 2 lost, 1 repeated of 20"]
    assert wrong({"rooms": {"nats": ours}}, "pixiu") == []


def test_a_busy_load_and_a_busy_machine_are_doubted() -> None:
    busy = {
        "fanout-100": {"nats": [Sample(1, load_share=0.9)]},
        "fanout-100-open": {"nats": [Sample(1, load_share=0.9, late_p99_ms=9)]},
    }
    assert [line.split(":")[0] for line in doubts(busy)] == [
        "the load used more than 80% of a core and may limit the rate by the clock",
        "the load sent later than it should, which its latencies include",
    ]
    assert "fanout-100-open" not in doubts(busy)[0]
    assert doubts({"rooms": {"nats": [Sample(1, others_cores=1.0)]}})[0].startswith("others used 1.0 cores")
    assert doubts({"rooms": {"nats": rounds(5)}}) == []


def test_the_report_has_every_case_and_server_in_a_table_and_in_json() -> None:
    results: Results = {
        "connections": {"pixiu": rounds(2000), "redis": rounds(8000)},
        "mail": {"pixiu": [Sample(1, per_cpu=10, per_second=1234, lost=5, p50_ms=0.25)], "nats": rounds(5)},
    }
    out = console()
    with out.capture() as captured:
        out.print(render(results))
    text = captured.get()
    assert all(word in text for word in ("1,234", "0.25 ms", "redis", "2.00  (2.00, 2.00)", "0.25  (0.25, 0.25)"))
    assert [line for line in notes(results) if "two minutes" in line]
    assert [line for line in notes({"mail-1": {"nats": rounds(5)}}) if "two minutes" in line]
    assert [line for line in notes({"rooms": {}}) if "for QoS 0, for mail for QoS 1" in line]
    assert not [line for line in notes({"rooms": {}}) if "two minutes" in line]
    where = Machine("a processor", 2, 8.0, "Linux", "3.11", {"pixiu": "0.1"})
    found = json.loads(json.dumps(as_json(results, where, ["x"], {"rabbitmq": "apt-get install rabbitmq-server"})))
    assert found["cases"]["mail"]["ratios_per_cpu"] == {"nats": {"median": 2.0, "lowest": 2.0, "highest": 2.0}}
    assert [(found["cases"][case]["qos"], found["cases"][case]["subscribed_qos"]) for case in results] == [(0, 0), (1, 1)]
    assert found["cases"]["mail"]["servers"]["nats"]["rounds"] == [asdict(Sample(1, per_cpu=5))]
    assert (found["wrong"], found["failures"], list(found["not_installed"])) == (["mail, pixiu: 5 lost of 5"], ["x"], ["rabbitmq"])
    assert "(unknown version)" in Machine("", 2, 8.0, "Linux", "3.11", {"nats": ""}).line


def test_rest_has_a_table_of_its_own() -> None:
    at_rest = Sample(1, processes=24, server_cores=0.131, switches_per_s=1075, memory_bytes=600 << 20, start_s=3.6)
    results: Results = {"idle": {"pixiu": [at_rest]}}
    out = console()
    with out.capture() as captured:
        out.print(render_idle(results))
    assert captured.get().split()[-8:] == ["pixiu", "24", "13.10%", "1,075", "600", "MiB", "3.60", "s"]
    assert not render(results).row_count
    assert not render_idle({"rooms": {"pixiu": rounds(5)}}).row_count
    assert [line for line in notes(results) if line.startswith("at rest: ")]
    assert not [line for line in notes({"rooms": {}}) if line.startswith("at rest: ")]


def test_figures_in_words() -> None:
    assert (as_times(0), as_times(0.256), as_times(1234.5)) == ("", "0.26 ms", "1,234.5 ms")
    assert (as_bytes(0), as_bytes(5120), as_bytes(3 << 20)) == ("", "5.0 KiB", "3 MiB")
    assert (as_ratio(0.0066), as_ratio(0.123), as_ratio(63.4)) == ("0.007", "0.12", "63")
    assert processor_in("a : b\nmodel name\t: Some CPU: fast\n") == "Some CPU: fast"
    assert processor_in("") == ""
