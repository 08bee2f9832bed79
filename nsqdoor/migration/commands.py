"""Move topics from an NSQ cluster to this one, in three phases.

Source: docs/nsq.md, "Moving from NSQ".
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer

from cluster.core import log
from cluster.nsq.frames import EPHEMERAL, is_name
from cluster.settings.options import is_loopback
from nsqdoor.migration import proxy, states
from nsqdoor.migration.phases import Found, Phase, phase_of, refusal
from nsqdoor.migration.states import States
from nsqdoor.migration.upstream import Upstream
from pixiu.discovery.target import names_registry, parse_address
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, TopicInUse
from registry.session import registry_of
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, guarded, operator, print_json, print_result, print_text

SUMMARY: Final = (__doc__ or "").split("\n\n")[0]
nsq_proxy = typer.Typer(name="nsq-proxy", help=SUMMARY, no_args_is_help=True)
Old = Annotated[
    list[str] | None,
    typer.Option("--old", envvar="PIXIU_NSQ_OLD", help="HTTP address of an nsqlookupd of the old cluster.", metavar="HOST:PORT"),
]
New = Annotated[
    list[str] | None,
    typer.Option("--new", envvar="PIXIU_NSQ_NEW", help="HTTP address of a listener of `pixiu nsq`.", metavar="HOST:PORT"),
]
TEXTS: Final = {
    Phase.OLD: "consumers and producers: the old cluster",
    Phase.READ_BOTH: "consumers: both; producers: the old cluster",
    Phase.WRITE_NEW: "consumers: both; producers: the new cluster",
    Phase.NEW: "consumers and producers: the new cluster",
}


@nsq_proxy.command()
@guarded
def serve(
    old: Old = None,
    new: New = None,
    target: Target = DEFAULT_TARGET,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of nsqlookupd's HTTP; 0: any.")] = 4161,
    insecure: Annotated[bool, typer.Option("--insecure", help="Answer other machines, which nobody asks for a login.")] = False,
    log_format: Annotated[str, typer.Option(help="console or json.")] = "console",
) -> None:
    """Answer look-ups for both clusters, by the phase of each topic. Ends on Ctrl-C or SIGTERM."""
    if not is_loopback(host) and not insecure:
        raise InvalidArgument(f"--host {host}: look-ups need no login, as with nsqlookupd: give --insecure, or a loopback address")
    if not names_registry(target):
        raise InvalidArgument(f"--target {target}: the phases are in the registry; give zk://HOST:PORT/ROOT")
    log.configure(log_format, "info")
    asyncio.run(_serve(target, *_sides(old, new), host, port))


def _sides(old: list[str] | None, new: list[str] | None) -> tuple[list[str], list[str]]:
    if not old or not new:
        raise InvalidArgument("give the addresses of both sides: --old and --new, or PIXIU_NSQ_OLD and PIXIU_NSQ_NEW")
    return old, new


async def _serve(target: str, old: list[str], new: list[str], host: str, port: int) -> None:
    address = parse_address(target)
    zookeeper = ZooKeeper(address, roles=("nsq",))
    await zookeeper.connect()
    try:
        await proxy.serve(States(zookeeper, address.root), old, new, host, port)
    except OSError as error:
        raise InvalidArgument(f"port {port} on {host} cannot be used: {error.strerror or error}") from None
    finally:
        await zookeeper.close()


@nsq_proxy.command()
@guarded
def show(target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show the phase of each topic that has one; all others are in phase 0."""

    async def look() -> dict[str, Phase]:
        async with registry_of(target) as (zookeeper, root):
            return await states.read_all(zookeeper, root)

    found = asyncio.run(look())
    if as_json:
        print_json({topic: int(phase) for topic, phase in sorted(found.items())})
        return
    for topic, phase in sorted(found.items()):
        print_text(f"{topic}  phase {int(phase)}  {TEXTS[phase]}")


@nsq_proxy.command()
@guarded
def phase(
    topic: Annotated[str, typer.Argument(help="The topic.", metavar="TOPIC")],
    number: Annotated[int, typer.Argument(min=0, max=3, help="Its new phase.", metavar="PHASE")],
    old: Old = None,
    new: New = None,
    force: Annotated[bool, typer.Option("--force", help="Go on although the old side holds messages, or does not answer.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Bring a topic into a phase, forth by one or back by any. Phase 1 makes the topic and its channels on the new side; 2 is
    refused if the new side lacks one of them, and 3 while the old side holds messages."""
    if not is_name(topic) or topic.endswith(EPHEMERAL):
        raise InvalidArgument(f"{topic!r} is no topic that can move")
    before, found = asyncio.run(_phase(target, topic, phase_of(number), *_sides(old, new), force=force))
    said = {"topic": topic, "before": int(before), "phase": number, "old_left": found.old_left}
    print_result(said, f"{topic}: phase {int(before)} → {number}: {TEXTS[Phase(number)]}", as_json=as_json)


async def _phase(target: str, topic: str, wanted: Phase, old: list[str], new: list[str], *, force: bool) -> tuple[Phase, Found]:
    async with registry_of(target) as (zookeeper, root), Upstream(old, new) as upstream:
        before, version = await states.read(zookeeper, root, topic)
        found = await upstream.found(topic) if wanted > before else Found()
        why = refusal(before, wanted, found)
        if why and not (force and wanted == before + 1):
            raise TopicInUse(f"{topic} stays in phase {int(before)}: {why}")
        if wanted > before and wanted is Phase.READ_BOTH:
            await upstream.make(topic, found.old_channels)
        await states.write(zookeeper, root, topic, wanted, operator(), version)
        return before, found
