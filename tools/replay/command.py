"""`pixiu replay`.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import typer

from pixiu.errors import InvalidArgument
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json
from tools.replay.driver import Driver
from tools.replay.flow import FlowScreen
from tools.replay.mail.driver import MailDriver
from tools.replay.mail.plan import MailPlan, MailSchedule
from tools.replay.mail.run import load_mail_plan, replay_mail
from tools.replay.options import ReplayOptions
from tools.replay.plan import Plan
from tools.replay.report import print_result, result_json
from tools.replay.run import SAMPLE, SAMPLE_SPEED, LogChoice, Result, load_plan
from tools.replay.run import replay as run_replay
from tools.replay.watch import ClusterWatch

DEFAULTS = ReplayOptions()
MAIL = MailSchedule()
MAIL_SETTLE_S: Final = 30.0
"""Mail that was lost on the way is sent again after ten seconds or more."""


@guarded
def replay(
    file: Annotated[
        str,
        typer.Argument(
            help="A chat log: JSON lines, plain or gzip; `sample`: the included one. With --mail: mentions.", metavar="FILE"
        ),
    ],
    target: Target = DEFAULT_TARGET,
    speed: Annotated[float | None, typer.Option(help="Factor by which log time passes faster (default: 1; sample: 200).")] = None,
    align: Annotated[str, typer.Option(help="`rooms`: every room starts at 0, for logs that span years.")] = "",
    rooms: Annotated[int, typer.Option(min=0, help="Number of rooms to replay, the first ones; 0: all.")] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Number of lines of those rooms to replay; 0: all.")] = 0,
    mentions: Annotated[
        str, typer.Option(help="CSV ts_ms,line,room,user,to_user, plain or gzip: sent as chat, in the log's time.", metavar="FILE")
    ] = "",
    idle_minutes: Annotated[
        float, typer.Option(min=0.1, help="Minutes of silence after which a user is logged out, in logs with joins.")
    ] = 30.0,
    grpc_share: Annotated[
        float, typer.Option(help="Share of the users that subscribe by gRPC; the rest use MQTT.")
    ] = DEFAULTS.grpc_share,
    sdk_share: Annotated[
        float, typer.Option(help="Share of the messages published through the SDK; the rest use MQTT.")
    ] = DEFAULTS.sdk_share,
    settle: Annotated[
        float | None, typer.Option(help="Seconds without a delivery after which the replay ends (default: 5; with --mail 30).")
    ] = None,
    max_open: Annotated[int, typer.Option(min=1, help="Limit of deliveries under way at a time.")] = DEFAULTS.max_open_deliveries,
    mail: Annotated[
        bool,
        typer.Option("--mail", help="FILE is CSV ts_ms,line,room,user,to_user: each row is a mail to a user who comes and goes."),
    ] = False,
    seconds: Annotated[float, typer.Option(help="With --mail: seconds in which all of it is sent.")] = MAIL.seconds,
    online: Annotated[float, typer.Option(help="With --mail: share of the time in which each user is online.")] = MAIL.online,
    cycle: Annotated[float, typer.Option(help="With --mail: seconds between two times at which a user comes.")] = MAIL.cycle_s,
    seed: Annotated[int, typer.Option(help="With --mail: seed of the times at which users come.")] = MAIL.seed,
    as_json: AsJson = False,
) -> None:
    """Play a chat log through a cluster, check every delivery, report. Exit code 1: a promise was broken."""
    if mail:
        if mentions or rooms or align or speed is not None:
            raise InvalidArgument("--mail takes a file of mentions: leave out --mentions, --rooms, --align and --speed (--seconds)")
        schedule = MailSchedule(seconds=seconds, online=online, cycle_s=cycle, seed=seed)
        mail_plan = load_mail_plan(Path(file), schedule, limit=limit)
        show(asyncio.run(_run_mail(target, mail_plan, MAIL_SETTLE_S if settle is None else settle, quiet=as_json)), as_json)
        return
    choice = LogChoice(path=file, rooms=rooms, limit=limit, align=align, idle_ms=int(idle_minutes * 60_000), mentions=mentions)
    options = ReplayOptions(
        speed=speed if speed is not None else SAMPLE_SPEED if file == SAMPLE else 1.0,
        grpc_share=grpc_share,
        sdk_share=sdk_share,
        settle_s=DEFAULTS.settle_s if settle is None else settle,
        max_open_deliveries=max_open,
    )
    options.validate()
    plan = load_plan(choice)
    show(asyncio.run(_run(target, plan, options, quiet=as_json)), as_json)


def show(result: Result, as_json: bool) -> None:
    """Print a result, and exit with its code."""
    if as_json:
        print_json(result_json(result), indent=2)
    else:
        print_result(result, console())
    if result.verdict.exit_code:
        raise typer.Exit(result.verdict.exit_code)


async def _run_mail(target: str, plan: MailPlan, settle_s: float, *, quiet: bool) -> Result:
    letters = len(plan.letters)
    with FlowScreen(error_console(), "mail", {"sent": letters, "acknowledged": letters}, quiet=quiet) as screen:
        return await replay_mail(target, plan, settle_s=settle_s, on_progress=_progress(screen))


async def _run(target: str, plan: Plan, options: ReplayOptions, *, quiet: bool) -> Result:
    with FlowScreen(error_console(), "messages", {"sent": plan.messages, "delivered": plan.expected}, quiet=quiet) as screen:
        return await run_replay(target, plan, options, _progress(screen))


def _progress(screen: FlowScreen) -> Callable[[Driver | MailDriver, ClusterWatch], None]:
    shown: set[int] = set()

    def progress(driver: Driver | MailDriver, watch: ClusterWatch) -> None:
        screen.update((driver.ledger.sent, driver.ledger.delivered), driver.ledger.latency_us)
        for death in watch.book.deaths:
            if death.endpoint not in shown:
                shown.add(death.endpoint)
                screen.say(f"[yellow]{death.name} died[/]")

    return progress
