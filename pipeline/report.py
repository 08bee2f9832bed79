"""Results of jobs, as tables on the terminal, JSON, Parquet, and one self-contained HTML file.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pixiu.errors import DiskFailed

SHOWN_ROWS: Final = 20
"""Limit of rows on the terminal; Parquet has all."""
HTML_ROWS: Final = 500
BAR_PX: Final = 420
PLOT_PX, PLOT_HEIGHT_PX = 780, 120
BUCKETS: Final = 60
"""Columns of a plot over time, at most."""
PAGE_STYLE: Final = (
    ":root{color-scheme:light dark;--ink:#1a1a1a;--page:#fff;--line:#ccc;--bar:#4a7fb5}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6e6e6;--page:#16181c;--line:#444a52;--bar:#7fb2e5}}"
    "body{font:14px sans-serif;margin:2em;max-width:70em;color:var(--ink);background:var(--page)}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}"
    "td,th{border:1px solid var(--line);padding:.2em .6em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "svg{max-width:100%}rect{fill:var(--bar)}text{font:12px sans-serif;fill:var(--ink)}line{stroke:var(--line)}"
)


@dataclass(frozen=True, slots=True)
class Bars:
    """A plot: a bar for each label."""

    title: str
    values: tuple[tuple[str, float], ...]
    unit: str = ""
    """Of the values; "ms" is shown in a unit that fits."""


@dataclass(frozen=True, slots=True)
class Series:
    """A plot over time: a column for each interval."""

    title: str
    begin_us: int
    """Unix microseconds."""
    step_us: int
    values: tuple[float, ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    total: int
    """Total number of rows; `rows` may be the first of them."""
    units: tuple[tuple[str, str], ...] = ()
    """Units of columns, as of `Bars`."""

    def shown(self, row: tuple[Any, ...]) -> list[str]:
        """The cells of a row, for people."""
        units = dict(self.units)
        return [text_of(value, units.get(name, "")) for name, value in zip(self.columns, row, strict=True)]

    def heading(self, limit: int) -> str:
        """The title, with the number of rows and of those that are shown."""
        shown, rows = min(limit, len(self.rows)), f"{self.total:,} {'row' if self.total == 1 else 'rows'}"
        return f"{self.title}: {shown:,} of {rows}" if shown < self.total else f"{self.title}: {rows}"


@dataclass(slots=True)
class Report:
    """The result of a job."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    findings: int = 0
    """Number of problems; the job's exit code is 1 if there are any."""

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, for programs."""
        tables = {
            section.title: {"total": section.total, "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows]}
            for section in self.sections
        }
        return {"title": self.title, "findings": self.findings, **self.facts, "tables": tables}

    def show(self, console: Console) -> None:
        """Print the report on a terminal."""
        console.print(f"[bold]{self.title}[/]", highlight=False)
        for name, value in self.facts.items():
            console.print(f"  {name.replace('_', ' ')}: {value}", highlight=False, markup=False)
        for section in self.sections:
            if not section.total:
                continue
            console.print(
                section.heading(SHOWN_ROWS), style="italic", highlight=False, markup=False
            )  # a title is as wide as its table
            table = Table()
            for name in section.columns:
                table.add_column(name)
            for row in section.rows[:SHOWN_ROWS]:
                table.add_row(*section.shown(row))
            console.print(table)
        if nothing := self.nothing_in():
            console.print(nothing, highlight=False, markup=False)

    def nothing_in(self) -> str:
        """Name the tables without rows; empty: there are none."""
        empty = [section.title for section in self.sections if not section.total]
        return f"Nothing in: {', '.join(empty)}." if empty else ""

    def to_html(self) -> str:
        """Make one page, plots included."""
        parts = [
            "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>{html.escape(self.title)}</title><style>{PAGE_STYLE}</style>"
        ]
        parts.append(f"<h1>{html.escape(self.title)}</h1><table>")
        for name, value in self.facts.items():
            parts.append(f"<tr><td>{html.escape(name.replace('_', ' '))}<td>{html.escape(text_of(value))}")
        parts.append("</table>")
        parts += [_columns(series) for series in self.series if series.values]
        parts += [_svg(bars) for bars in self.bars if any(value for _, value in bars.values)]
        for section in self.sections:
            if section.rows:
                heads = "".join(f"<th>{html.escape(name)}" for name in section.columns)
                parts.append(f"<h2>{html.escape(section.heading(HTML_ROWS))}</h2><table><tr>{heads}")
                for row in section.rows[:HTML_ROWS]:
                    parts.append("<tr>" + "".join(f"<td>{html.escape(text)}" for text in section.shown(row)))
                parts.append("</table>")
        if nothing := self.nothing_in():
            parts.append(f"<p>{html.escape(nothing)}")
        return "\n".join(parts)

    def write_html(self, path: Path) -> None:
        """Write the page, whole or not at all. Raises DiskFailed."""
        new = path.with_name(path.name + ".new")
        try:
            new.write_text(self.to_html())
            os.replace(new, path)
        except OSError as error:
            raise DiskFailed(f"the report cannot be written to {path}: {error.strerror}") from error


def text_of(value: Any, unit: str = "") -> str:
    """Format a value for people: times in UTC, milliseconds in a unit that fits, counts as whole numbers."""
    if unit == "ms" and isinstance(value, int | float):
        return _duration(value)
    if isinstance(value, float):
        text = f"{value:,.0f}" if value.is_integer() else f"{value:,.2f}"
    elif isinstance(value, datetime):  # Spark gives times without a zone, in that of this process
        text = value.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00") + "Z"
    elif isinstance(value, list | dict):
        text = json.dumps(value, default=str)
    else:
        text = str(value)
    return f"{text} {unit}" if unit else text


def _duration(ms: float) -> str:
    """Milliseconds as microseconds, milliseconds, seconds or minutes."""
    size = abs(ms)
    if size < 1:
        return f"{ms * 1000:.0f} µs"
    if size < 1000:
        return f"{ms:.3g} ms"
    return f"{ms / 1000:.3g} s" if size < 120_000 else f"{ms / 60_000:,.0f} min"


def when(at_us: int, step_us: int = 1_000_000) -> str:
    """A Unix time in microseconds as a date and a time in UTC, as fine as times that far apart need."""
    digits = "seconds" if step_us >= 1_000_000 else "milliseconds" if step_us >= 1000 else "microseconds"
    at = datetime.fromtimestamp(at_us // 1_000_000, UTC).replace(microsecond=at_us % 1_000_000)
    return at.isoformat(timespec=digits).removesuffix("+00:00") + "Z"


def _svg(bars: Bars) -> str:
    most = max((value for _, value in bars.values), default=0) or 1
    title, height = html.escape(bars.title), 22 * len(bars.values) + 4
    lines = [f'<h2>{title}</h2><svg width=800 viewBox="0 0 800 {height}" role=img aria-label="{title}">']
    for place, (label, value) in enumerate(bars.values):
        y, width = 22 * place, max(0.0, value / most * BAR_PX)
        lines.append(f'<text x=0 y={y + 15}>{html.escape(label)}</text><rect x=240 y={y + 2} width="{width:.1f}" height=16 />')
        lines.append(f'<text x="{245 + width:.1f}" y={y + 15}>{html.escape(text_of(value, bars.unit))}</text>')
    return "".join(lines) + "</svg>"


def _columns(series: Series) -> str:
    most, title = max(series.values) or 1, html.escape(series.title)
    each, base, step = PLOT_PX / len(series.values), PLOT_HEIGHT_PX + 18, series.step_us
    lines = [f'<h2>{title}</h2><svg width=800 viewBox="0 0 800 {base + 20}" role=img aria-label="{title}">']
    lines.append(f"<text x=0 y=12>most: {html.escape(text_of(float(most), series.unit))}</text>")
    for place, value in enumerate(series.values):
        height, at = max(0.0, value / most * PLOT_HEIGHT_PX), when(series.begin_us + place * step, step)
        lines.append(
            f'<rect x="{place * each:.1f}" y="{base - height:.1f}" width="{each * 0.85:.1f}" height="{height:.1f}">'
            f"<title>{at}: {html.escape(text_of(float(value), series.unit))}</title></rect>"
        )
    end = when(series.begin_us + len(series.values) * step, step)
    lines.append(f"<line x1=0 x2={PLOT_PX} y1={base} y2={base} /><text x=0 y={base + 15}>{when(series.begin_us, step)}</text>")
    lines.append(f'<text x={PLOT_PX} y={base + 15} text-anchor="end">{end}</text>')
    return "".join(lines) + "</svg>"


def series_of(title: str, frame: Any, column: str, unit: str = "", value: Any = None) -> Series:
    """Plot the rows of a DataFrame over time: their number, or an aggregate, in intervals of the timestamps in a column."""
    from pyspark.sql import functions as f

    at = f.unix_micros(column)
    first, last = frame.agg(f.min(at), f.max(at)).first()
    if first is None:
        return Series(title, 0, 1, (), unit)
    step = max(1, -(-(last - first + 1) // BUCKETS))
    bucket = f.floor((at - f.lit(first)) / f.lit(step)).alias("bucket")
    total = (f.count(f.lit(1)) if value is None else value).alias("total")
    found = {row.bucket: float(row.total or 0) for row in frame.where(at.isNotNull()).groupBy(bucket).agg(total).collect()}
    return Series(title, first, step, tuple(found.get(place, 0.0) for place in range((last - first) // step + 1)), unit)


def section_of(title: str, frame: Any, limit: int = HTML_ROWS, units: tuple[tuple[str, str], ...] = ()) -> Section:
    """Make a section of a DataFrame's first rows, and their total number."""
    rows = frame.limit(limit).collect()
    total = len(rows) if len(rows) < limit else frame.count()
    return Section(title, tuple(frame.columns), tuple(tuple(row) for row in rows), total, units)
