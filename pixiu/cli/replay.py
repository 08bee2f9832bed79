"""`pixiu replay`.

Source: DESIGN section 15.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pixiu.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json
from pixiu.replay.driver import Driver
from pixiu.replay.options import ReplayOptions
from pixiu.replay.plan import Plan
from pixiu.replay.report import print_result, result_json
from pixiu.replay.run import SAMPLE, SAMPLE_SPEED, LogChoice, Result, load_plan
from pixiu.replay.run import replay as run_replay
from pixiu.replay.watch import ClusterWatch

DEFAULTS = ReplayOptions()


@guarded
def replay(
    file: Annotated[
        str, typer.Argument(help="A chat log: JSON lines, plain or gzip; `sample`: the one that ships.", metavar="FILE")
    ],
    target: Target = DEFAULT_TARGET,
    speed: Annotated[float | None, typer.Option(help="Log time passes so many times faster [default: 1; sample: 200].")] = None,
    align: Annotated[str, typer.Option(help="`rooms`: every room starts at 0, for logs that span years.")] = "",
    rooms: Annotated[int, typer.Option(min=0, help="Only the first so many rooms; 0: all.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only so many lines of those; 0: all.")] = 0,
    mentions: Annotated[
        str, typer.Option(help="CSV ts_ms,line,room,user,to_user, plain or gzip: sent as chat, in the log's time.", metavar="FILE")
    ] = "",
    idle_minutes: Annotated[float, typer.Option(min=0.1, help="Log out who is silent so long, in logs with joins.")] = 30.0,
    grpc_share: Annotated[
        float, typer.Option(help="Share of the users that subscribe by gRPC; the rest use MQTT.")
    ] = DEFAULTS.grpc_share,
    sdk_share: Annotated[
        float, typer.Option(help="Share of what is published through the SDK; the rest by MQTT.")
    ] = DEFAULTS.sdk_share,
    settle: Annotated[float, typer.Option(help="End when nothing came for so many seconds.")] = DEFAULTS.settle_s,
    max_open: Annotated[int, typer.Option(min=1, help="Deliveries on their way at one time.")] = DEFAULTS.max_open_deliveries,
    as_json: AsJson = False,
) -> None:
    """Play a chat log through a cluster, check every delivery, report. Exit code 1: a promise was broken."""
    choice = LogChoice(path=file, rooms=rooms, limit=limit, align=align, idle_ms=int(idle_minutes * 60_000), mentions=mentions)
    options = ReplayOptions(
        speed=speed if speed is not None else SAMPLE_SPEED if file == SAMPLE else 1.0,
        grpc_share=grpc_share,
        sdk_share=sdk_share,
        settle_s=settle,
        max_open_deliveries=max_open,
    )
    options.validate()
    plan = load_plan(choice)
    result = asyncio.run(_run(target, plan, options, error_console(), quiet=as_json))
    if as_json:
        print_json(result_json(result), indent=2)
    else:
        print_result(result, console())
    if result.verdict.exit_code:
        raise typer.Exit(result.verdict.exit_code)


async def _run(target: str, plan: Plan, options: ReplayOptions, to: Console, *, quiet: bool) -> Result:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,}/{task.total:,}"), TimeElapsedColumn())
    with Progress(*columns, console=to, disable=quiet or not to.is_terminal, transient=True) as progress:
        sent = progress.add_task("sent", total=plan.messages)
        delivered = progress.add_task("delivered", total=plan.expected)

        def show(driver: Driver, watch: ClusterWatch) -> None:
            progress.update(sent, completed=driver.ledger.sent)
            progress.update(delivered, completed=driver.ledger.delivered)
            for death in watch.book.deaths:
                if death.endpoint not in told:
                    told.add(death.endpoint)
                    progress.console.print(f"[yellow]{death.name} died[/]", highlight=False)

        told: set[int] = set()
        return await run_replay(target, plan, options, show)
