"""`pixiu bridge status|pause|resume|replay|check`: bridges between durable topics and other systems.

Source: docs/bridges.md, "Commands".
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer
from rich.table import Table

import pixiu
from pixiu.client.topics.topic_admin import TopicInfo
from pixiu.discovery.node import Node
from pixiu.discovery.target import names_registry
from pixiu.errors import InvalidArgument, PixiuError, UnknownTopic
from registry.session import read_view, registry_of
from registry.settings import change_settings, read_settings
from tools.cli.http import fetch
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, console, guarded, operator, print_json, print_result, print_text
from tools.topics.values import moment_of

PAUSED: Final = "bridge.paused"
SUMMED: Final = ("messages", "bytes", "rejected", "retries", "waiting")
ELSEWHERE: Final = "another process runs it"
"""State of a bridge that one process alone runs, in the others."""
CHECK_S: Final = 15.0
"""Time in which a connector has to open, seconds."""
bridge = typer.Typer(name="bridge", no_args_is_help=True, help="Bridges between durable topics and other systems.")
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help="Names of bridges.")]


@bridge.command("status")
@guarded
def status(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show each bridge: its state, what it carried since its processes began, what it lacks. Exit code 1: one does not get on."""
    found, silent, warnings = asyncio.run(bridges_of(target))
    if as_json:
        print_json({"bridges": list(found.values()), "warnings": warnings}, indent=2)
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("bridge", "kind", "topic", "state", "messages", "dead letters", "retries", "waiting", ""):
            table.add_column(title, overflow="fold")
        for each in found.values():
            numbers = [f"{each[field]:,}" for field in ("messages", "rejected", "retries", "waiting")]
            why = each["why"] or (f"before: {each['before']}" if each.get("before") else "")
            table.add_row(each["name"], each["kind"], each["topic"], each["state"], *numbers, why)
        console().print(table)
        if not found and not silent:
            print_text("no process runs bridges: python -m bridge --config FILE")
        for line in warnings:
            print_text(f"! {line}")
        for line in silent:
            print_text(f"! {line}")
    if silent or any(each["why"] for each in found.values()):
        raise typer.Exit(1)


@bridge.command("pause")
@guarded
def pause(names: Names, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Let bridges finish what they write, and do nothing more. What comes waits in the topic, or in the source."""
    known = asyncio.run(bridges_of(target)).found
    for name in names:
        _known(known, name)
    paused = asyncio.run(pause_bridges(target, add=names))
    print_result({"paused": paused}, f"paused: {', '.join(paused)}", as_json=as_json)


@bridge.command("resume")
@guarded
def resume(names: Names, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Let paused bridges go on."""
    paused = asyncio.run(pause_bridges(target, remove=names))
    print_result({"paused": paused}, f"paused: {', '.join(paused) or 'none'}", as_json=as_json)


@bridge.command("replay")
@guarded
def replay(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A bridge to a target.")],
    to: Annotated[str, typer.Option("--to", help="start, end, a time ago such as 2h, or a date.", metavar="WHERE")],
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Move a bridge: it goes on from there, and writes again what follows. The audit log of the topic's groups has it."""
    found = _known(asyncio.run(bridges_of(target)).found, name)
    if not found["channel"]:
        raise InvalidArgument(
            f"{name} is a bridge from a source: the topic keeps its positions and stores nothing twice; to store all again, give "
            "the bridge another name in the file of bridges"
        )
    where: Literal["start", "end"] | datetime
    if to in ("start", "end"):
        where = "start" if to == "start" else "end"
    else:
        where = datetime.fromtimestamp(moment_of(to, time.time()) / 1_000_000, UTC)
    if not yes:
        typer.confirm(f"move {name}, channel {found['channel']} of topic {found['topic']}, to {to}?", abort=True, err=True)

    async def move() -> int:
        async with pixiu.connect(target, client="pixiu-bridge") as px:
            return await px.topics.seek(found["topic"], found["channel"], where, force=True)

    changed = asyncio.run(move())
    print_result({"bridge": name, "changed": changed}, f"{name}: moved; {changed:,} messages are concerned", as_json=as_json)


@bridge.command("check")
@guarded
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file of bridges.")],
    offline: Annotated[bool, typer.Option("--offline", help="Read the file only; connect to nothing.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Check a file of bridges: connect to each target and source once, and look for the topics. Exit code 1: one does not open, or
    lacks its topic."""
    bridges = importlib.import_module("bridge.catalog").read_bridges(file)
    problems, warnings = ({}, {}) if offline else asyncio.run(_checked(target, bridges))
    found = [
        {
            "name": each.name, "kind": each.options.kind, "problem": "; ".join(problems.get(each.name, ())),
            "warning": warnings.get(each.name, ""),
        }
        for each in bridges
    ]  # fmt: skip
    if as_json:
        print_json(found, indent=2)
    for each in () if as_json else found:
        print_text(f"{each['name']}: {each['problem'] or ('well described' if offline else 'opens')}")
        if each["warning"]:
            print_text(f"! {each['name']}: {each['warning']}")
    if problems:
        raise typer.Exit(1)


async def _checked(target: str, bridges: Sequence[Any]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Bridge → problems, and bridge → warning."""
    problems = {name: [text] for name, text in (await _opened(bridges)).items()}
    warnings: dict[str, str] = {}
    try:
        if names_registry(target):
            async with registry_of(target) as (zookeeper, root):
                gateways = (await read_view(zookeeper, root)).running("gateway")
            warnings = await importlib.import_module("bridge.surroundings").own_gateways(bridges, gateways)
        async with pixiu.connect(target, client="pixiu-bridge") as px:
            for each in bridges:
                if text := await topic_problem(each, px.topics.describe):
                    problems.setdefault(each.name, []).append(text)
    except PixiuError as error:
        for each in bridges:
            problems.setdefault(each.name, []).append(f"its topic cannot be looked for, give --target or --offline: {error}")
    return problems, warnings


async def topic_problem(bridge: Any, describe: Callable[[str], Awaitable[TopicInfo]]) -> str:
    """Say what is wrong with the topic of a bridge, or with its channel there, and what to do; empty: nothing."""
    topic = bridge.options.topic
    try:
        found = await describe(topic)
    except UnknownTopic:
        return f"there is no topic {topic}: `pixiu topic create {topic}`"
    if found.deleted_at_ms:
        return f"topic {topic} is in the bin: `pixiu topic restore {topic}`"
    channel = found.channels.get(bridge.channel)
    if channel is None or channel.ordered == bridge.options.ordered:
        return ""  # a channel that is missing will be made
    return (
        f"channel {channel.name} of topic {topic} {'is' if channel.ordered else 'is not'} ordered, and stays as it was made: "
        f"change `ordered` or `channel` in the file, or remove it: `pixiu topic channel remove {topic} {channel.name}`"
    )


async def _opened(bridges: Sequence[Any]) -> dict[str, str]:
    """Open every connector: bridge → why it does not open."""
    failed: dict[str, str] = {}
    for each in (each for each in bridges if not each.kind.of_cluster):
        made = each.kind.make(each.name, each.options)
        try:
            async with asyncio.timeout(CHECK_S):
                await made.open()
        except TimeoutError:
            failed[each.name] = f"it does not answer within {CHECK_S:g} s"
        except PixiuError as error:
            failed[each.name] = str(error)
        except Exception as error:  # of a connector's library, as in a process that runs the bridge
            failed[each.name] = f"{type(error).__name__}: {error}"
        finally:
            with suppress(Exception):
                async with asyncio.timeout(CHECK_S):
                    await made.close()
    return failed


def _known(found: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in found:
        raise InvalidArgument(f"no running process has a bridge {name}; known: {', '.join(found) or 'none'}")
    return found[name]


async def pause_bridges(target: str, *, add: Sequence[str] = (), remove: Sequence[str] = (), by: str = "") -> list[str]:
    """Pause bridges and let others go on. Returns those that are paused then. by: who asked; empty: who runs the command."""
    async with registry_of(target) as (zookeeper, root):
        settings = await read_settings(zookeeper, root)
        before = [str(each) for each in settings.values.get(PAUSED, ())]
        paused = sorted({*before, *add} - {*remove})
        await change_settings(zookeeper, root, {PAUSED: paused}, by or operator())
    return paused


class Bridges(NamedTuple):
    """The bridges of a cluster."""

    found: dict[str, dict[str, Any]]
    """By name, numbers of all processes added up."""
    silent: list[str]
    """A line for each process that does not answer."""
    warnings: list[str]
    """Sentences of processes that an operator should look at; they stop nothing."""


async def bridges_of(target: str) -> Bridges:
    """Ask all processes for their bridges."""
    async with registry_of(target) as (zookeeper, root):
        nodes = (await read_view(zookeeper, root)).running("bridge")
    replies = await asyncio.gather(*(_ask(node) for node in nodes))
    answers = [each for each in replies if not isinstance(each, str)]
    warnings = dict.fromkeys(text for each in answers for text in each.get("warnings", ()))
    silent = [each for each in replies if isinstance(each, str)]
    return Bridges(merged([each["bridges"] for each in answers]), silent, list(warnings))


def merged(answers: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The bridges of all processes by name: numbers added up, the state that says most. A bridge that each process leaves to
    another one is named: the processes have different files."""
    found = dict[str, dict[str, Any]]()
    for each in (each for bridges in answers for each in bridges):
        other = found.get(each["name"])
        if other is None:
            found[each["name"]] = dict(each)
            continue
        for field in SUMMED:
            other[field] += each[field]
        better = each["state"] == "running" or other["state"] == ELSEWHERE
        if each["why"] or (other["state"] != "running" and better and not other["why"]):
            other |= {"state": each["state"], "why": each["why"]}
    for each in found.values():
        if each["state"] == ELSEWHERE:
            each["why"] = "no process runs it: give all processes of bridges the same file"
    return dict(sorted(found.items()))


async def _ask(node: Node) -> dict[str, Any] | str:
    """Ask a process for its bridges. Returns why it does not say them, if it does not."""
    try:
        _, body = await fetch(node.host, node.http_port, "/health")
        service: dict[str, Any] = json.loads(body)["service"]
        _ = service["bridges"]
    except (OSError, ValueError, KeyError) as error:
        return f"the bridge process at {node.address} does not answer: {error}"
    return service
