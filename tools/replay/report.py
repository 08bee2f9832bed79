"""Shows a replay's result: tables for people, JSON for programs.

Source: docs/operations.md.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tools.load.verdict import Verdict, verdict_json
from tools.replay.run import Result


def result_json(result: Result) -> dict[str, object]:
    """The whole result as JSON values."""
    extra = {"seconds": round(result.seconds, 3), "logins": result.logins, "interrupted": result.interrupted, **result.played}
    return verdict_json(result.verdict, extra, start_us=result.started_us)


def _numbers(result: Result) -> Table:
    verdict, notes = result.verdict, result.notes
    table = Table(title=result.title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name in ("sent", "confirmed", "expected", "delivered"):
        if name in notes:
            table.add_row(name, f"{getattr(verdict, name):,}", notes[name])
    for name, value, text in (
        ("lost", verdict.lost, "owed and never came"),
        ("repeated", verdict.repeated, "came again"),
        ("out of order", verdict.out_of_order, "after a later one of the same sender and room"),
        ("alien", verdict.alien, "to somebody who was not a member"),
        ("damaged", verdict.damaged, "other content than was sent"),
        ("refused", verdict.refused, "messages whose sender got an error"),
        ("unanswered", verdict.unacknowledged, "messages whose sender got no answer"),
        ("failed logins", verdict.failed_logins, ""),
    ):
        table.add_row(name, f"[red]{value:,}[/]" if value else "0", text)
    for name, value in (("unread", verdict.unread), ("gaps", verdict.gaps)):
        if name in notes:
            table.add_row(name, f"[red]{value:,}[/]" if value else "0", notes[name])
    if verdict.foreign:
        table.add_row("foreign", f"{verdict.foreign:,}", "lay in the inboxes before")
    table.add_row("latency p50", f"{verdict.latency_p50_ms:,.1f} ms", notes["latency"])
    table.add_row("latency p99", f"{verdict.latency_p99_ms:,.1f} ms", f"longest {verdict.latency_max_ms:,.1f} ms")
    return table


def _causes(verdict: Verdict) -> Table:
    table = Table(title="Why deliveries are missing", title_justify="left", box=None, pad_edge=False)
    table.add_column("cause")
    table.add_column("deliveries", justify="right")
    texts = {
        "refused": "reported to the sender",
        "unacknowledged": "unacknowledged at a death",
        "between": "sent between a death and the rejoin",
        "in_flight": "inside a gateway that died",
        "link_gap": "lost on a link that counted it",
        "unexplained": "[red]unexplained[/]",
    }
    for cause, count in verdict.causes.items():
        if count:
            table.add_row(texts.get(cause, cause), f"{count:,}")
    return table


def _deaths(verdict: Verdict) -> Table:
    table = Table(title="Deaths", title_justify="left", box=None, pad_edge=False)
    for name in ("process", "away", "unacknowledged", "between", "in flight"):
        table.add_column(name, justify="left" if name == "process" else "right")
    for death in verdict.deaths:
        away = "not back" if death.rejoin_us is None else f"{(death.rejoin_us - death.death_us) / 1e6:.1f} s"
        counts = (str(death.counts[cause]) for cause in ("unacknowledged", "between", "in_flight"))
        table.add_row(death.name, away, *counts)
    return table


def _hops(verdict: Verdict) -> Table:
    table = Table(title="Links", title_justify="left", box=None, pad_edge=False)
    table.add_column("hop")
    for name in ("records sent", "received", "lost (counted)"):
        table.add_column(name, justify="right")
    for hop in verdict.hops:
        lost = f"[red]{hop.lost:,}[/]" if hop.lost else "0"
        table.add_row(f"{hop.sender} → {hop.receiver}", f"{hop.sent:,}", f"{hop.received:,}", lost)
    return table


def render(result: Result) -> RenderableType:
    """Make all tables of a result."""
    verdict = result.verdict
    parts: list[RenderableType] = [_numbers(result)]
    if verdict.lost:
        parts += ["", _causes(verdict)]
    if verdict.deaths:
        parts += ["", _deaths(verdict)]
    if verdict.hops:
        parts += ["", _hops(verdict)]
    parts.append("")
    parts += [f"  [dim]{escape(example)}[/]" for example in verdict.examples]
    parts += [f"[red]✗ {escape(text)}[/]" for text in verdict.broken]
    if result.interrupted:
        parts.append("[yellow]interrupted: only what was sent until then was judged[/]")
    if not verdict.broken:
        parts.append("[green]✓ every promise was kept[/]")
    return Group(*parts)


def print_result(result: Result, console: Console) -> None:
    """Print all tables."""
    console.print(render(result))
