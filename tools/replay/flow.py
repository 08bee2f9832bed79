"""Progress of a replay: a live line below its bars on a terminal, else a plain line at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tools.load.histogram import Histogram

RATE_S: Final = 1.0
"""Minimum period of the rates, seconds; longer if nobody asked in between."""
PLAIN_S: Final = 10.0
"""Interval of the lines if there is no terminal, seconds."""
REFRESHES_A_SECOND: Final = 4


class Flow:
    """Totals that grow, as rates and percentiles. Pure: `now` is monotonic seconds.

    Args:
        names: names of the totals, in order, such as "sent" and "delivered".
        period_s: minimum period of the rates, seconds.
    """

    def __init__(self, names: tuple[str, ...], now: float, period_s: float = RATE_S) -> None:
        self._names = names
        self._period_s = period_s
        self._at = now
        self._counts: tuple[int, ...] = (0,) * len(names)
        self._rates: tuple[float, ...] = (0.0,) * len(names)

    def line(self, now: float, counts: tuple[int, ...], latency_us: Histogram) -> str:
        """Format the current rates, and the latencies of all messages so far. `counts`: the totals, as many as names."""
        if now - self._at >= self._period_s:
            seconds = now - self._at
            self._rates = tuple((count - before) / seconds for count, before in zip(counts, self._counts, strict=True))
            self._at, self._counts = now, counts
        parts = [f"{name} {rate:,.0f}/s" for name, rate in zip(self._names, self._rates, strict=True)]
        if latency_us.count:
            p50, p99 = latency_us.percentile(50) / 1000, latency_us.percentile(99) / 1000
            parts.append(f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms so far")
        return " · ".join(parts)


class FlowScreen:
    """Shows a replay's progress; a context manager.

    Args:
        to: the console; if it is not a terminal, it gets a line every ten seconds.
        kind: name of the counted things, such as "messages".
        totals: name → expected total of each count.
        quiet: show nothing.
        now: returns monotonic seconds.
    """

    def __init__(
        self, to: Console, kind: str, totals: dict[str, int], *, quiet: bool = False, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._kind = kind
        self._totals = totals
        self._plain_to = to if not quiet and not to.is_terminal else None
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=to)
        self._tasks = [self._bars.add_task(name, total=total) for name, total in totals.items()]
        self._text = Text(style="dim")
        self._live = Live(
            Group(self._bars, self._text), console=to, refresh_per_second=REFRESHES_A_SECOND, transient=True
        ) if not quiet and to.is_terminal else None  # fmt: skip
        self._flow = Flow(tuple(totals), now(), PLAIN_S if self._plain_to is not None else RATE_S)
        self._said_at = now()
        self._to = None if quiet else to

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, counts: tuple[int, ...], latency_us: Histogram) -> None:
        """Show the counts so far. Cheap enough to be called ten times a second."""
        now = self._now()
        if self._live is not None:
            for task, count in zip(self._tasks, counts, strict=True):
                self._bars.update(task, completed=count)
            self._text.plain = f"{self._kind}: {self._flow.line(now, counts, latency_us)}"
        elif self._plain_to is not None and now - self._said_at >= PLAIN_S:
            self._said_at = now
            done = ", ".join(
                f"{count:,} of {total:,} {name}" for count, (name, total) in zip(counts, self._totals.items(), strict=True)
            )
            self._plain_to.print(f"{self._kind}: {self._flow.line(now, counts, latency_us)} · {done}", highlight=False)

    def say(self, text: str) -> None:
        """Print a line above; rich's markup applies."""
        if self._to is not None:
            self._to.print(text, highlight=False)
