"""What a replay shows while it runs: rates, percentiles, a live line on a terminal and plain ones elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from tools.load.histogram import Histogram
from tools.replay.flow import PLAIN_S, Flow, FlowScreen


def latencies(*milliseconds: int) -> Histogram:
    found = Histogram()
    for value in milliseconds:
        found.add(value * 1000)
    return found


def test_rates_are_of_the_last_period_and_percentiles_of_all_so_far() -> None:
    flow = Flow(("sent", "delivered"), 100.0, period_s=1.0)
    assert flow.line(100.5, (50, 400), Histogram()) == "sent 0/s · delivered 0/s"
    assert flow.line(102.0, (200, 4000), latencies(1, 1, 1)) == "sent 100/s · delivered 2,000/s · p50 1.0 ms, p99 1.0 ms so far"
    assert flow.line(102.9, (999, 9999), latencies(2)).startswith("sent 100/s · delivered 2,000/s · p50 2.0 ms")
    assert flow.line(104.0, (200, 4010), Histogram()) == "sent 0/s · delivered 5/s"


def test_without_a_terminal_a_plain_line_comes_every_ten_seconds() -> None:
    out, now = io.StringIO(), [0.0]
    with FlowScreen(Console(file=out, width=200), "messages", {"sent": 100, "delivered": 500}, now=lambda: now[0]) as screen:
        for tenth in range(250):
            now[0] = tenth / 10
            screen.update((tenth, 2 * tenth), latencies(3))
        screen.say("[yellow]a broker died[/]")
    lines = out.getvalue().splitlines()
    assert lines == [
        "messages: sent 10/s · delivered 20/s · p50 3.0 ms, p99 3.0 ms so far · 100 of 100 sent, 200 of 500 delivered",
        "messages: sent 10/s · delivered 20/s · p50 3.0 ms, p99 3.0 ms so far · 200 of 100 sent, 400 of 500 delivered",
        "a broker died",
    ]
    assert PLAIN_S == 10.0


def test_on_a_terminal_one_line_lives_below_the_bars_and_goes_at_the_end() -> None:
    out, now = io.StringIO(), [0.0]
    terminal = Console(file=out, width=120, force_terminal=True)
    with FlowScreen(terminal, "mail", {"sent": 10, "acknowledged": 10}, now=lambda: now[0]) as screen:
        now[0] = 2.0
        screen.update((10, 4), latencies(7))
    text = out.getvalue()
    assert "mail: sent 5/s · acknowledged 2/s · p50 7.0 ms" in text
    assert "4/10" in text
    assert text.rindex("\x1b[2K") > text.rindex("mail: sent"), "erased at the end"


def test_quiet_shows_nothing() -> None:
    out = io.StringIO()
    with FlowScreen(Console(file=out, force_terminal=True), "mail", {"sent": 1}, quiet=True) as screen:
        screen.update((1,), Histogram())
        screen.say("text")
    assert out.getvalue() == ""
