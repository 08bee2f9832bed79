"""Shows a replay's result: tables for people, JSON for programs.

Source: docs/operations.md.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table

from tools.replay.run import Result
from tools.replay.verdict import Verdict, verdict_json


def result_json(result: Result) -> dict[str, object]:
    """The whole result as JSON values."""
    return verdict_json(
        result.verdict,
        {
            "seconds": round(result.seconds, 3),
            "rooms": len(result.plan.rooms),
            "users": result.plan.users,
            "logins": result.logins,
            "connections": result.connections,
            "broken_connections": result.breaks,
            "sent_by_sdk": result.sent_by_sdk,
            "planned": {"messages": result.plan.messages, "chats": result.plan.chats, "deliveries": result.plan.expected},
            "interrupted": result.interrupted,
        },
        start_us=result.started_us,
    )


def _numbers(result: Result) -> Table:
    verdict = result.verdict
    table = Table(title="Replay", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    seconds = max(result.seconds, 1e-9)
    rows: list[tuple[str, str, str]] = [
        ("sent", f"{verdict.sent:,}", f"in {len(result.plan.rooms)} rooms by {result.plan.users} users, {result.seconds:.1f} s"),
        ("expected", f"{verdict.expected:,}", "deliveries to those who were members at the time"),
        ("delivered", f"{verdict.delivered:,}", f"{verdict.delivered / seconds:,.0f} a second"),
    ]
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
        rows.append((name, f"[red]{value:,}[/]" if value else "0", text))
    rows.append(("latency p50", f"{verdict.latency_p50_ms:,.1f} ms", "from the sender's call to the subscriber's callback"))
    rows.append(("latency p99", f"{verdict.latency_p99_ms:,.1f} ms", f"longest {verdict.latency_max_ms:,.1f} ms"))
    for row in rows:
        table.add_row(*row)
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
