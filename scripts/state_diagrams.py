"""Draw the registered state tables: one Markdown page with Mermaid diagrams and the tables themselves for each.

A state table is a mapping `(state, event) -> (next state, action)`, where states and events are enums and the first line of the
action's docstring describes it.

    python scripts/state_diagrams.py           writes the pages
    python scripts/state_diagrams.py --check   names outdated pages, exit code 1
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Table = Mapping[tuple[Enum, Enum], tuple[Enum, Callable[..., Any]]]


class Page(NamedTuple):
    """A page of docs/: its path, its heading, and (title, "module:table", initial state's name) of each table."""

    path: str
    heading: str
    tables: tuple[tuple[str, str, str], ...]


PAGES: tuple[Page, ...] = (
    Page(
        "docs/mqtt_states.md",
        "States of MQTT sessions",
        (("The server's side of a connection", "cluster.mqtt.server:TABLE", "CONNECTING"),),
    ),
    Page(
        "docs/replication_states.md",
        "States of a replica of Xiu and Pi",
        (("A replica", "cluster.replication.core.core:TABLE", "FOLLOWING"),),
    ),
    Page(
        "docs/delivery_states.md",
        "States of the delivery of mail to a device",
        (("A session", "relay.delivery.session:TABLE", "OFFLINE"),),
    ),
)


def load(name: str) -> Table:
    """Load the table at "module:attribute"."""
    module, attribute = name.split(":")
    table: Table = getattr(importlib.import_module(module), attribute)
    return table


def what(action: Callable[..., Any]) -> str:
    """Return the first line of an action's docstring without its full stop. Raises ValueError if there is none."""
    if not action.__doc__:
        raise ValueError(f"the action {action.__qualname__} needs a docstring: the diagram shows it")
    return action.__doc__.strip().splitlines()[0].rstrip(".")


def is_nothing(state: Enum, target: Enum, action: Callable[..., Any]) -> bool:
    """Return True if a row neither changes the state nor acts: the diagram leaves it out."""
    return state is target and what(action) == "Nothing"


def diagram(table: Table, initial: str) -> list[str]:
    """Return the lines of a Mermaid state diagram; events with the same states and action share an arrow."""
    arrows: dict[tuple[Enum, Enum, str], list[str]] = {}
    for (state, event), (target, action) in table.items():
        if not is_nothing(state, target, action):
            arrows.setdefault((state, target, what(action)), []).append(str(event.value))
    states = list(dict.fromkeys(state for state, _ in table))
    final = [state for state in states if all(target is state for (of, _), (target, _) in table.items() if of is state)]
    lines = ["stateDiagram-v2", f"    [*] --> {next(state.value for state in states if state.name == initial)}"]
    for (state, target, doing), events in arrows.items():
        # In a label Mermaid takes ":" and ";" for its own.
        label = f"{', '.join(events)}<br/>/ {doing}".replace(":", " –").replace(";", ",")
        lines.append(f"    {state.value} --> {target.value}: {label}")
    return lines + [f"    {state.value} --> [*]" for state in final]


def rows(table: Table) -> list[str]:
    """Return the lines of a Markdown table of all rows that do something."""
    lines = ["| state | event | next state | action |", "|---|---|---|---|"]
    for (state, event), (target, action) in table.items():
        if not is_nothing(state, target, action):
            lines.append(f"| {state.value} | {event.value} | {target.value} | {what(action)} |")
    return lines


def render(page: Page) -> str:
    """Render the text of a page."""
    lines = [
        f"# {page.heading}",
        "",
        "Written by `scripts/state_diagrams.py` from the tables in the code: do not edit. An event that is not shown in a state",
        "changes and does nothing there.",
    ]
    for title, name, initial in page.tables:
        table = load(name)
        lines += ["", f"## {title}", "", f"`{name}`", "", "```mermaid", *diagram(table, initial), "```", "", *rows(table)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the pages under `root`, or with --check only compare. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Draw the state tables of the code into docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a page is not up to date")
    check = parser.parse_args(arguments).check
    stale = []
    for page in PAGES:
        path, text = root / page.path, render(page)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(page.path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is not up to date: run python scripts/state_diagrams.py" if check else f"{name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
