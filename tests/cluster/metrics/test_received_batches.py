"""What is measured of batches that come by links."""

from __future__ import annotations

import time

import pytest

from cluster.metrics.metrics import Metrics
from cluster.metrics.received_batches import ReceivedBatches
from pixiu.ids import snowflake
from pixiu.wire.record import Flag, Kind, encode
from tools.cli.http import samples


def record(kind: Kind, age_ms: int, flags: int = 0) -> bytes:
    return encode(kind, 1000, b"body", snowflake(time.time_ns() // 1_000_000 - age_ms, 7, 1), flags=flags)


async def noted(*batches: bytes) -> dict[tuple[str, str, str], float]:
    """(name, kind, le) → value, of the histograms after these batches, each the fourth byte of a larger buffer on."""
    metrics = Metrics("broker", 1)
    received = ReceivedBatches(metrics)
    for batch in batches:
        received.note(b"\xff" * 4 + batch, 4, 4 + len(batch), 5, 0.002)
    found = samples(await metrics.render())
    return {(name, labels.get("kind", ""), labels.get("le", "")): value for name, labels, value in found}


@pytest.mark.parametrize("kind", [Kind.ROOM, Kind.SIGNAL, Kind.CHAT])
async def test_a_batch_is_counted_by_kind_with_size_time_and_age(kind: Kind) -> None:
    found = await noted(record(kind, 40_000) + record(kind, 0))
    name = kind.name.lower()
    assert found["pixiu_received_batch_records_bucket", "", "4.0"] == 0
    assert found["pixiu_received_batch_records_bucket", "", "8.0"] == 1
    assert found["pixiu_handling_seconds_bucket", "", "0.001"] == 0
    assert found["pixiu_handling_seconds_bucket", "", "0.0025"] == 1
    assert found["pixiu_record_latency_seconds_bucket", name, "10.0"] == 0
    assert found["pixiu_record_latency_seconds_bucket", name, "+Inf"] == 1
    assert found["pixiu_record_latency_seconds_sum", name, ""] == pytest.approx(40, abs=30)
    assert sum(value for (name, _, le), value in found.items() if name.endswith("latency_seconds_count")) == 1


def test_the_first_record_of_a_batch_says_which_room_or_user_is_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    received = ReceivedBatches(Metrics("broker", 1))
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    for kind, flags in (
        (Kind.ROOM, Flag.TO_ROOM),
        (Kind.SIGNAL, Flag.TO_ROOM),
        (Kind.CHAT, 0),
        (Kind.SIGNAL, 0),
        (Kind.ADDRESSED, 0),
    ):
        data = record(kind, 0, flags)
        received.note(data, 0, len(data), 5, 0.0)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 10 * 10**9)
    assert received.hot() == {
        "rooms": [{"key": 1000, "per_s": 1.0}],
        "users": [{"key": 1000, "per_s": 1.0}],
        "per_s": {"rooms": 1.0, "users": 1.0},
    }


@pytest.mark.parametrize(
    "batch",
    [
        record(Kind.ROOM, 0, Flag.DERIVED_ID),
        record(Kind.ROOM, 2 * 3_600_000),
        record(Kind.ADDRESSED, 0),
        b"short",
        b"",
    ],
    ids=["derived", "kept by its sender", "addressed", "short", "empty"],
)
async def test_what_holds_no_time_of_sending_is_counted_without_an_age(batch: bytes) -> None:
    found = await noted(batch)
    assert found["pixiu_received_batch_records_count", "", ""] == 1
    assert sum(value for (name, _, _), value in found.items() if name.endswith("latency_seconds_count")) == 0
