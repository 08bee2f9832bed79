"""`pixiu probe`: every path of a cluster, the times of its hops, and an alarm that names the process that stopped.

Source: PiXiu §3.1; docs/architecture.md, "Probes and traces", docs/operations.md.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pixiu.discovery.reachable import check_reachable
from pixiu.errors import InvalidArgument, PixiuError
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json
from tools.end_of_input import on_end_of_input
from tools.probe.keep import Keeper
from tools.probe.paths import Finding, Member, Prober, percentile
from tools.probe.run import ProbeOptions, ProbeRun

SHOWN_PATHS = 30
"""Limit of failing paths in the table; `--json` has all paths."""


@guarded
def probe(
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Rounds; in each every path is probed once.")] = 10,
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between two rounds.")] = 0.5,
    timeout: Annotated[float, typer.Option(min=0.05, help="Seconds after which a probe that has not arrived has failed.")] = 2.0,
    failures: Annotated[int, typer.Option(min=1, help="Failed probes of a path, in a row, that raise an alarm.")] = 3,
    join_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the subscriptions at the start.")] = 12.0,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C; alarms are printed as they come and go.")] = False,
    seconds: Annotated[float, typer.Option("--for", min=0, help="With --watch: end after this number of seconds; 0: never.")] = 0.0,
    keep: Annotated[
        Path | None,
        typer.Option(help="With --watch: keep the availability of 30 days in this file, over restarts.", metavar="FILE"),
    ] = None,
    until_eof: Annotated[bool, typer.Option("--until-eof", help="With --watch: end when the standard input is closed.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Probe every path (proxy, broker or relay replica, gateway) of a cluster. Exit code 1: one failed; the alarm says where."""
    if not watch and failures > count:
        raise InvalidArgument(f"--failures {failures} can never be reached in --count {count} rounds; raise --count")
    if seconds and not watch:
        raise InvalidArgument("--for needs --watch")
    if (keep is not None or until_eof) and not watch:
        raise InvalidArgument(f"{'--keep' if keep is not None else '--until-eof'} needs --watch")
    options = ProbeOptions(0 if watch else count, interval, timeout, failures, join_timeout, seconds)
    if keep is not None:
        asyncio.run(_keep(target, options, keep, as_json, until_eof))
    elif not asyncio.run(_probe(target, options, as_json, None, until_eof)):
        raise typer.Exit(1)


async def _keep(target: str, options: ProbeOptions, kept: Path, as_json: bool, until_eof: bool) -> None:
    """Probe the cluster for as long as it is wanted, also while there is nothing to probe: that is what is counted."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    if until_eof:
        on_end_of_input(ended.set)
    keeper = Keeper(kept)
    try:
        while not ended.is_set():
            probing = asyncio.create_task(_probe(target, options, as_json, keeper, False))
            waiting = asyncio.create_task(ended.wait())
            await asyncio.wait({probing, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not probing.done():
                probing.cancel()
            try:
                await probing
                return  # Ctrl-C, or its time is over
            except asyncio.CancelledError:
                return
            except InvalidArgument:
                raise
            except PixiuError as error:
                keeper.note_no_path()
                error_console().print(escape(str(error)), highlight=False)
            with suppress(TimeoutError):
                async with asyncio.timeout(options.interval_s):
                    await ended.wait()
    finally:
        keeper.save()


async def _probe(target: str, options: ProbeOptions, as_json: bool, keeper: Keeper | None, until_eof: bool) -> bool:
    """Probe the cluster. True if no path failed."""
    out, closed = console(), asyncio.Event()
    if until_eof:
        on_end_of_input(closed.set)

    def say(findings: list[Finding]) -> None:
        if keeper is not None:
            keeper.alarm(findings)
        if as_json:
            print_json(findings_json(findings, run.prober))
        elif not options.count:
            lines = [f"[red]alarm: {escape(finding.text)}[/]" for finding in findings] or ["[green]every path works again[/]"]
            live.console.print(*lines, sep="\n", highlight=False)

    def show() -> None:
        if keeper is not None:
            keeper.note(run.prober)
        if out.is_terminal and not as_json:
            live.update(render(run.prober), refresh=True)

    run = ProbeRun(target, options, say)
    if keeper is not None:
        keeper.watch(run.prober)
    with Live(console=out, auto_refresh=False, transient=True) as live:
        check_reachable(target)
        async with run:
            _say_running(run, as_json)
            rounds = asyncio.create_task(run.rounds(show))
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, rounds.cancel)
            closing = asyncio.create_task(closed.wait())
            try:
                await asyncio.wait({rounds, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not rounds.done():
                    rounds.cancel()
                    await asyncio.wait({rounds})
            finally:
                rounds.cancel()
                closing.cancel()
            if not rounds.cancelled():
                rounds.result()
    if as_json:
        print_json(result_json(run.prober))
    else:
        out.print(render(run.prober))
    return not run.alarms


def _say_running(run: ProbeRun, as_json: bool) -> None:
    unjoined = run.unjoined
    if as_json:
        print_json({"event": "running", "paths": len(run.prober.paths), "unjoined": [_member_json(m) for m, _ in unjoined]})
    for gateway, problem in unjoined:
        error_console().print(f"[yellow]not subscribed at {escape(gateway.name)}: {escape(problem)}[/]", highlight=False)


def render(prober: Prober) -> RenderableType:
    """The tables: hops, failing paths, and the alarm."""
    hops = Table(box=None, pad_edge=False)
    hops.add_column("hop")
    for name in ("probes", "p50", "p99"):
        hops.add_column(name, justify="right")
    for row in prober.table():
        hops.add_row(row.hop, f"{row.count:,}", _time(row.p50_us), _time(row.p99_us))
    failing = prober.failing()
    verdict = f"[green]✓ all {len(prober.paths)} paths work[/]" if not failing else ""
    partly = sum(1 for path, state in prober.paths.items() if state.failed and path not in set(failing))
    if not failing and partly > 0:
        verdict = f"[yellow]no path raises an alarm; {partly} of {len(prober.paths)} lost single probes[/]"
    if failing:
        lost = sum(1 for path in failing if prober.paths[path].failures)
        parts = [f"{number} {what}" for number, what in ((lost, "fail"), (len(failing) - lost, "are bypassed")) if number]
        verdict = f"[red]✗ of {len(prober.paths)} paths {', '.join(parts)}[/]"
    lines = [f"  [red]{escape(finding.text)}[/]" for finding in prober.findings()]
    lines += [f"  {escape(path.name)}: {escape(prober.paths[path].reason)}" for path in failing[:SHOWN_PATHS]]
    lines += [f"  {escape(text)}" for text in prober.left_out]
    lines += [f"  [yellow]{escape(text)}; the missing ones were not probed[/]" for text in prober.missing]
    around = sum(state.around for state in prober.paths.values())
    if around:
        lines.append(f"  probes that arrived, but bypassed the replica that they were meant for: {around:,}")
    return Group(hops, "", verdict, *lines)


def findings_json(findings: list[Finding], prober: Prober) -> dict[str, object]:
    """A change in the failing paths, as JSON for programs."""
    return {
        "event": "alarm" if findings else "cleared",
        "failing_paths": len(prober.failing()),
        "findings": [
            {"text": finding.text, "paths": finding.paths, "processes": [_member_json(member) for member in finding.members]}
            for finding in findings
        ],
    }


def result_json(prober: Prober) -> dict[str, object]:
    """The whole result as JSON, for programs."""
    paths = []
    for path, state in prober.paths.items():
        entry: dict[str, object] = {member.role: _member_json(member) for member in path}
        entry |= {"sent": state.sent, "arrived": state.arrived, "failed": state.failed, "around": state.around}
        entry |= {"failures_in_a_row": state.failures, "arounds_in_a_row": state.arounds}
        entry |= {"p50_us": percentile(state.times_us, 0.5), "p99_us": percentile(state.times_us, 0.99), "reason": state.reason}
        paths.append(entry)
    findings = prober.findings()
    return {
        **findings_json(findings, prober),
        "event": "result",
        "hops": [asdict(row) for row in prober.table()],
        "paths": paths,
        "left_out": prober.left_out,
        "missing": prober.missing,
    }


def _member_json(member: Member) -> dict[str, object]:
    return {"role": member.role, "partition": member.partition, "replica": member.replica, "address": member.address}


def _time(microseconds: int) -> str:
    return f"{microseconds:,} µs" if abs(microseconds) < 10_000 else f"{microseconds / 1000:,.1f} ms"
