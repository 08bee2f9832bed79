"""Results of jobs, as tables on the terminal, JSON, Parquet, and one self-contained HTML file.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from pixiu.errors import DiskFailed

SHOWN_ROWS: Final = 20
"""Limit of rows on the terminal; Parquet has all."""
HTML_ROWS: Final = 500
BAR_PX: Final = 420
PAGE_STYLE: Final = (
    "body{font:14px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse;margin:1em 0}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:right}td:first-child,th:first-child{text-align:left}"
    "rect{fill:#4a7fb5}text{font:12px sans-serif}"
)


@dataclass(frozen=True, slots=True)
class Bars:
    """A plot: a bar for each label."""

    title: str
    values: tuple[tuple[str, float], ...]
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One table of a report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    total: int
    """Total number of rows; `rows` may be the first of them."""


@dataclass(slots=True)
class Report:
    """The result of a job."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    sections: list[Section] = field(default_factory=list)
    bars: list[Bars] = field(default_factory=list)
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
            more = f" (the first {len(section.rows[:SHOWN_ROWS])} of {section.total})" if section.total > SHOWN_ROWS else ""
            table = Table(title=f"{section.title}{more}", title_justify="left")
            for name in section.columns:
                table.add_column(name)
            for row in section.rows[:SHOWN_ROWS]:
                table.add_row(*(_text(value) for value in row))
            console.print(table)

    def to_html(self) -> str:
        """Make one page, plots included."""
        parts = [f"<!doctype html><meta charset=utf-8><title>{html.escape(self.title)}</title><style>{PAGE_STYLE}</style>"]
        parts.append(f"<h1>{html.escape(self.title)}</h1><table>")
        parts += [f"<tr><td>{html.escape(name)}<td>{html.escape(_text(value))}" for name, value in self.facts.items()]
        parts.append("</table>")
        parts += [_svg(bars) for bars in self.bars]
        for section in self.sections:
            parts.append(f"<h2>{html.escape(section.title)}: {section.total}</h2>")
            if section.rows:
                heads = "".join(f"<th>{html.escape(name)}" for name in section.columns)
                parts.append(f"<table><tr>{heads}")
                for row in section.rows[:HTML_ROWS]:
                    parts.append("<tr>" + "".join(f"<td>{html.escape(_text(value))}" for value in row))
                parts.append("</table>")
        return "\n".join(parts)

    def write_html(self, path: Path) -> None:
        """Write the page, whole or not at all. Raises DiskFailed."""
        new = path.with_name(path.name + ".new")
        try:
            new.write_text(self.to_html())
            os.replace(new, path)
        except OSError as error:
            raise DiskFailed(f"the report cannot be written to {path}: {error.strerror}") from error


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, list | dict):
        return json.dumps(value, default=str)
    return str(value)


def _svg(bars: Bars) -> str:
    most = max((value for _, value in bars.values), default=0) or 1
    lines = [f"<h2>{html.escape(bars.title)}</h2><svg width=800 height={22 * len(bars.values) + 4}>"]
    for place, (label, value) in enumerate(bars.values):
        y, width = 22 * place, value / most * BAR_PX
        lines.append(f'<text x=0 y={y + 15}>{html.escape(label)}</text><rect x=240 y={y + 2} width="{width:.1f}" height=16 />')
        lines.append(f'<text x="{245 + width:.1f}" y={y + 15}>{_text(value)} {html.escape(bars.unit)}</text>')
    return "".join(lines) + "</svg>"


def section_of(title: str, frame: Any, limit: int = HTML_ROWS) -> Section:
    """Make a section of a DataFrame's first rows, and their total number."""
    rows = frame.limit(limit).collect()
    total = len(rows) if len(rows) < limit else frame.count()
    return Section(title, tuple(frame.columns), tuple(tuple(row) for row in rows), total)
