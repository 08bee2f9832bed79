"""`pixiu topic rebalance` and `drain-group`: moves of parts between groups, one after the other.

Source: docs/topics.md, "Placement".
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from pixiu.placement.partition import MAX_PARTITIONS
from pixiu.wire.v1 import topic_pb2
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, console, guarded, print_json, print_text
from tools.topics import calls
from tools.topics.calls import TopicCluster

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would move, and move nothing.")]


@guarded
def rebalance(dry_run: DryRun = False, yes: Yes = False, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Move parts from loaded groups to others, as a new one. Order per key holds; what is stored stays until retention."""
    _run(target, None, "the groups are even: nothing has to move", dry_run=dry_run, yes=yes, as_json=as_json)


@guarded
def drain_group(
    group: Annotated[
        int, typer.Argument(min=0, max=MAX_PARTITIONS - 1, help="Number of a group, see `pixiu status`.", metavar="GROUP")
    ],
    dry_run: DryRun = False,
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Move all open parts of a group to others. It still serves what it has stored until retention drops that."""
    _run(target, group, f"group {group} has no open parts", dry_run=dry_run, yes=yes, as_json=as_json)


def _run(target: str, drain: int | None, nothing: str, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    plan = calls.run(target, lambda cluster: cluster.plan(drain))
    if not as_json:
        console().print(_table(plan))
        if not plan.moves:
            print_text(nothing)
    if plan.moves and not dry_run:
        if not yes:
            count = "1 part" if len(plan.moves) == 1 else f"{len(plan.moves):,} parts"
            typer.confirm(f"move {count}?", abort=True, err=True)
        calls.run(target, lambda cluster: _move(cluster, plan, quiet=as_json))
    if as_json:
        print_json({"moved": not dry_run, **plan_json(plan)})


async def _move(cluster: TopicCluster, plan: topic_pb2.TopicPlan, *, quiet: bool) -> None:
    """Make the moves, each when the one before it is in effect. Raises the error of the first one that fails."""
    for move in plan.moves:
        resize = topic_pb2.ResizeTopic(parts=[move.part], groups=[move.target])
        await cluster.change(topic_pb2.TopicChange(name=move.topic, resize=resize))
        if not quiet:
            print_text(f"{move.topic}: part {move.part} is followed by one in group {move.target}")


def _table(plan: topic_pb2.TopicPlan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("group", "open parts", "load", "with the moves"):
        table.add_column(name, justify="right")
    gone = {group.group: sum(move.source == group.group for move in plan.moves) for group in plan.groups}
    come = {group.group: sum(move.target == group.group for move in plan.moves) for group in plan.groups}
    for group in plan.groups:
        after = group.parts - gone[group.group] + come[group.group]
        parts = f"{group.parts}" if after == group.parts else f"{group.parts} → {after}"
        table.add_row(str(group.group), parts, f"{group.load / 1000:.3f}", f"{group.after / 1000:.3f}")
    return table


def plan_json(plan: topic_pb2.TopicPlan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "moves": [
            {"topic": move.topic, "part": move.part, "source": move.source, "target": move.target, "load": round(move.load, 3)}
            for move in plan.moves
        ],
        "groups": [
            {"group": group.group, "parts": group.parts, "load": round(group.load, 3), "after": round(group.after, 3)}
            for group in plan.groups
        ],
    }
