"""The hour of rates: bounded, and only what is new is given again."""

from __future__ import annotations

from ops.console.series import MAX_ROWS, MOMENTS, Series, series_json
from tools.cli.rates import Row


def test_an_hour_stays_and_the_oldest_goes() -> None:
    series = Series()
    for number in range(MOMENTS + 10):
        series.add(number, [Row("broker", 0, alive=2, in_per_s=float(number))])
    kept = series.since(-1)
    assert len(kept) == MOMENTS
    assert [moment.at_ms for moment in kept] == list(range(10, MOMENTS + 10))


def test_moments_after_one_are_given() -> None:
    series = Series()
    for at_ms in (5, 10, 15):
        series.add(at_ms, [])
    assert [moment.at_ms for moment in series.since(5)] == [10, 15]
    assert series.since(15) == []


def test_a_moment_has_the_first_rows_only() -> None:
    series = Series()
    series.add(1, [Row("broker", number) for number in range(MAX_ROWS + 1)])
    assert len(series.since(0)[0].points) == MAX_ROWS


def test_moments_as_json_are_rows_of_numbers() -> None:
    series = Series()
    series.add(7, [Row("pi", 1, 3, 1, 2.04, 1.0, 0.5, 0.01234, None, 0.25, 9, 0)])
    said = series_json(series.since(0))
    assert said["fields"] == [
        "role", "partition", "alive", "dead", "in_per_s", "out_per_s", "drops_per_s", "p99_s", "behind", "lag_s",
    ]  # fmt: skip
    assert said["moments"] == [[7, [["pi", 1, 3, 1, 2.0, 1.0, 0.5, 0.25, 9, 0.0123]]]]
