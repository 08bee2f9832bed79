"""Shows the result of a replay of mail: a table for people, JSON for programs.

Source: docs/operations.md.
"""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tools.replay.mail.ledger import MailOutcome
from tools.replay.mail.run import MailResult


def mail_result_json(result: MailResult) -> dict[str, object]:
    """The whole result as JSON values."""
    found = asdict(result.verdict)
    latency = {"p50": found.pop("latency_p50_ms"), "p99": found.pop("latency_p99_ms")}
    schedule = result.plan.schedule
    return {
        "seconds": round(result.seconds, 3),
        "senders": result.plan.senders,
        "receivers": len(result.plan.stays),
        "logins": result.logins,
        "most_online": result.most_online,
        "online": schedule.online,
        "seed": schedule.seed,
        "planned": {"mails": len(result.plan.letters), "stays": sum(map(len, result.plan.stays.values()))},
        "interrupted": result.interrupted,
        **found,
        "latency_ms": latency,
        "ok": not result.verdict.broken,
    }


def print_mail_result(result: MailResult, console: Console) -> None:
    """Print the result of a replay of mail."""
    verdict, schedule = result.verdict, result.plan.schedule
    table = Table(title="Replay of mail", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    receivers = len(result.plan.stays)
    times = f"{result.logins:,} logins, {result.most_online:,} at one time"
    rows: list[tuple[str, int, str]] = [
        ("sent", verdict.sent, f"by {result.plan.senders:,} users to {receivers:,}, {result.seconds:.1f} s"),
        ("confirmed", verdict.confirmed, "stored on all replicas in sync"),
        ("acknowledged", verdict.acknowledged, f"by receivers who are there {schedule.online:.0%} of the time: {times}"),
    ]
    for name, value, _ in rows:
        table.add_row(name, f"{value:,}", _)
    outcomes = verdict.outcomes
    for name, value, text in (
        ("missing", verdict.missing, "confirmed, and not acknowledged by the receiver"),
        ("unread", verdict.unread, "by Pi's count at the end"),
        ("repeated", outcomes[MailOutcome.REPEATED.value] + outcomes[MailOutcome.AGAIN.value], "came to the application again"),
        ("out of order", outcomes[MailOutcome.OUT_OF_ORDER.value], "after a later one of the same inbox"),
        ("alien", outcomes[MailOutcome.ALIEN.value], "somebody else's"),
        ("damaged", outcomes[MailOutcome.DAMAGED.value], "other content than was sent"),
        ("gaps", verdict.gaps, "reported to receivers"),
        ("refused", verdict.refused, "whose sender got an error"),
        ("unanswered", verdict.unanswered, "whose sender got no answer"),
        ("failed logins", verdict.failed_logins, ""),
    ):
        table.add_row(name, f"[red]{value:,}[/]" if value else "0", text)
    if foreign := outcomes[MailOutcome.FOREIGN.value]:
        table.add_row("foreign", f"{foreign:,}", "lay in the inboxes before")
    table.add_row("latency p50", f"{verdict.latency_p50_ms:,.0f} ms", "to the acknowledgement, with the time users are away")
    table.add_row("latency p99", f"{verdict.latency_p99_ms:,.0f} ms", "")
    console.print(table)
    for text in verdict.examples:
        console.print(f"  [dim]{escape(text)}[/]")
    for text in verdict.deaths:
        console.print(f"[yellow]{escape(text)} died[/]", highlight=False)
    for text in verdict.broken:
        console.print(f"[red]✗ {escape(text)}[/]", highlight=False)
    if result.interrupted:
        console.print("[yellow]interrupted: only what was sent until then was judged[/]")
    if not verdict.broken:
        console.print("[green]✓ every mail was acknowledged by its receiver, once[/]")
