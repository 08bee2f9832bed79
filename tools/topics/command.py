"""Make, show, change and delete durable topics, and read and write them.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import os
from typing import Annotated, Final

import typer

from pixiu.client.login import TOKEN_VARIABLE
from pixiu.client.topics.described import topic_map
from pixiu.client.topics.topic_admin import differing
from pixiu.discovery.topics import MAX_NUMBER
from pixiu.errors import InvalidArgument
from pixiu.objects.manifest import check_url
from pixiu.placement.partition import MAX_PARTITIONS
from pixiu.placement.slots import MAX_PARTS, SLOTS
from pixiu.wire.v1 import topic_pb2
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, Yes, console, guarded, print_json, print_result, print_text
from tools.topics import calls, tables
from tools.topics.channels import channel, channels, dead, resend, seek
from tools.topics.data import last, read, tail, write
from tools.topics.moves import drain_group, rebalance
from tools.topics.values import bytes_of, seconds_of

SUMMARY: Final = (__doc__ or "").split("\n\n")[0]
topic = typer.Typer(help=SUMMARY, no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")]
Retention = Annotated[
    str, typer.Option("--retention", help="Age after which messages may go, such as 12h or 7d; 0: never.", metavar="TIME")
]
RetentionBytes = Annotated[
    str,
    typer.Option(
        "--retention-bytes", help="Bytes of a part above which its oldest go, such as 50GiB; 0: no limit.", metavar="SIZE"
    ),
]
Rate = Annotated[
    int, typer.Option("--rate", min=0, help="Messages that it takes in a second, from all writers; 0: no limit.", metavar="N")
]
RateBytes = Annotated[
    str, typer.Option("--rate-bytes", help="Bytes that it takes in a second, such as 10MB; 0: no limit.", metavar="SIZE")
]
ReadRate = Annotated[
    int,
    typer.Option("--read-rate", min=0, help="Messages that it gives in a second, to all readers; 0: no limit.", metavar="N"),
]
ReadRateBytes = Annotated[
    str, typer.Option("--read-rate-bytes", help="Bytes that it gives in a second, such as 10MB; 0: no limit.", metavar="SIZE")
]
Compact = Annotated[
    str,
    typer.Option(
        "--compact", metavar="TIME",
        help="Keep only the last message of each key; one without a body deletes its key, and stays for this time. 0: keep all.",
    ),
]  # fmt: skip
Acknowledged = Annotated[
    bool, typer.Option("--retain-acknowledged/--retain-all", help="Drop what all channels have acknowledged, or not.")
]
Store = Annotated[
    str,
    typer.Option(
        "--store", help="Object store of closed segments: a folder or a URL; empty: as the servers are configured.", metavar="URL"
    ),
]
Part = Annotated[int, typer.Argument(min=1, max=MAX_NUMBER, help="Number of a part, see `pixiu topic show`.", metavar="PART")]
ToGroups = Annotated[
    list[int] | None,
    typer.Option(
        "--group",
        min=0,
        max=MAX_PARTITIONS - 1,
        help="Group of each new part, in their order; none: chosen by load.",
        metavar="GROUP",
    ),
]


@topic.command()
@guarded
def create(
    name: Name,
    parts: Annotated[
        int, typer.Option("--parts", min=0, max=MAX_PARTS, help="Parts to begin with; 0: one for each group.", metavar="N")
    ] = 0,
    retention: Retention = "0",
    retention_bytes: RetentionBytes = "0",
    rate: Rate = 0,
    rate_bytes: RateBytes = "0",
    read_rate: ReadRate = 0,
    read_rate_bytes: ReadRateBytes = "0",
    retain_acknowledged: Acknowledged = False,
    compact: Compact = "0",
    store: Store = "",
    if_missing: Annotated[bool, typer.Option("--if-missing", help="Succeed if there is one already.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Make a topic. Returns when it can be written."""
    settings = topic_pb2.TopicSettings(
        retention_s=seconds_of(retention), retention_bytes=bytes_of(retention_bytes),
        messages_per_s=rate, bytes_per_s=bytes_of(rate_bytes),
        read_messages_per_s=read_rate, read_bytes_per_s=bytes_of(read_rate_bytes),
        retain_acknowledged=retain_acknowledged, compact=seconds_of(compact), store=check_url(store),
    )  # fmt: skip
    wanted = topic_pb2.CreateTopic(parts=parts, settings=settings, if_missing=if_missing)
    found = _change(target, topic_pb2.TopicChange(name=name, create=wanted))
    if differs := differing(wanted, topic_map(found)):
        text = f"{name} was there and stays as it is: {'; '.join(differs)}; `pixiu topic alter` and `split` change it"
        typer.echo(text, err=True)
    print_result(tables.topic_json(found), f"{name}: {tables.parts_text(found)}, version {found.version}", as_json=as_json)


@topic.command("list")
@guarded
def list_topics(
    prefix: Annotated[str, typer.Argument(help="Only names that begin with this.", metavar="PREFIX")] = "",
    deleted: Annotated[bool, typer.Option("--deleted", help="Show those in the bin, too.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """List topics by name."""
    found = calls.run(target, lambda cluster: cluster.list(prefix, deleted=deleted))
    if as_json:
        print_json({"topics": [tables.topic_json(each) for each in found]})
    elif found:
        console().print(tables.topic_table(found))
    else:
        print_text(none_text(prefix, login=bool(os.environ.get(TOKEN_VARIABLE))))


def none_text(prefix: str, *, login: bool) -> str:
    """Say that no topic is listed: a login gets only those with which it may do something."""
    of = f" that begins with {prefix}" if prefix else ""
    if login:
        return f"there is no topic{of} with which this login may do anything; `pixiu acl test` says what its rules allow"
    return f"there is no topic{of}; `pixiu topic create NAME` makes one"


@topic.command()
@guarded
def show(name: Name, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Show a topic: its parts with their sizes, its channels with what they have not acknowledged, and for how long."""
    found = calls.run(target, lambda cluster: cluster.show(name))
    if as_json:
        print_json(tables.shown_json(found))
        return
    print_text(tables.heading(found))
    console().print(tables.part_table(found))
    if found.topic.channels:
        console().print(tables.channel_table(found))
    for line in found.stuck():
        print_text(line)


@topic.command()
@guarded
def alter(
    name: Name,
    retention: Annotated[str | None, typer.Option("--retention", help="As of `create`.", metavar="TIME")] = None,
    retention_bytes: Annotated[str | None, typer.Option("--retention-bytes", help="As of `create`.", metavar="SIZE")] = None,
    rate: Annotated[int | None, typer.Option("--rate", min=0, help="As of `create`.", metavar="N")] = None,
    rate_bytes: Annotated[str | None, typer.Option("--rate-bytes", help="As of `create`.", metavar="SIZE")] = None,
    read_rate: Annotated[int | None, typer.Option("--read-rate", min=0, help="As of `create`.", metavar="N")] = None,
    read_rate_bytes: Annotated[str | None, typer.Option("--read-rate-bytes", help="As of `create`.", metavar="SIZE")] = None,
    retain_acknowledged: Annotated[bool | None, typer.Option("--retain-acknowledged/--retain-all", help="As of `create`.")] = None,
    compact: Annotated[
        str | None, typer.Option("--compact", help="Another time for what deletes a key, of a topic that has one.", metavar="TIME")
    ] = None,
    store: Annotated[str | None, typer.Option("--store", help="As of `create`.", metavar="URL")] = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Change a topic's settings; what is not given stays."""
    wanted = {
        "retention_s": None if retention is None else seconds_of(retention),
        "retention_bytes": None if retention_bytes is None else bytes_of(retention_bytes),
        "messages_per_s": rate,
        "bytes_per_s": None if rate_bytes is None else bytes_of(rate_bytes),
        "read_messages_per_s": read_rate,
        "read_bytes_per_s": None if read_rate_bytes is None else bytes_of(read_rate_bytes),
        "retain_acknowledged": retain_acknowledged,
        "compact": None if compact is None else seconds_of(compact),
        "store": None if store is None else check_url(store),
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    if not given:
        raise InvalidArgument(
            "give --retention, --retention-bytes, --rate, --rate-bytes, --read-rate, --read-rate-bytes, --retain-acknowledged, "
            "--compact or --store"
        )
    settings = topic_pb2.TopicSettings()
    settings.CopyFrom(calls.run(target, lambda cluster: cluster.describe(name)).settings)
    for key, value in given.items():
        setattr(settings, key, value)
    found = _change(target, topic_pb2.TopicChange(name=name, alter=settings))
    print_result(tables.topic_json(found), f"{name}: {tables.settings_text(found)}, version {found.version}", as_json=as_json)


@topic.command()
@guarded
def delete(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Although members read it.")] = False,
    now: Annotated[bool, typer.Option("--now", help="Remove its messages at once: it cannot be restored.")] = False,
    yes: Yes = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Put a topic into the bin, where it stays for a day, or remove it at once."""
    calls.run(target, lambda cluster: cluster.describe(name))  # nobody is asked about a topic that there is not
    if not yes:
        typer.confirm(f"delete topic {name}{' and all of its messages now' if now else ''}?", abort=True, err=True)
    found = _change(target, topic_pb2.TopicChange(name=name, delete=topic_pb2.DeleteTopic(force=force, now=now)))
    text = f"{name} is removed" if now else f"{name} is in the bin for a day; `pixiu topic restore {name}` brings it back"
    print_result(tables.topic_json(found), text, as_json=as_json)


@topic.command()
@guarded
def restore(name: Name, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Take a topic out of the bin."""
    found = _change(target, topic_pb2.TopicChange(name=name, restore=topic_pb2.RestoreTopic()))
    print_result(tables.topic_json(found), f"{name}: {tables.parts_text(found)}, version {found.version}", as_json=as_json)


@topic.command()
@guarded
def split(
    name: Name,
    part: Part,
    into: Annotated[int, typer.Option("--into", min=2, max=SLOTS, help="Number of equal parts that follow.", metavar="N")] = 2,
    at: Annotated[
        list[int] | None,
        typer.Option("--at", min=1, max=SLOTS - 1, help="First slot of a further part; may be repeated.", metavar="SLOT"),
    ] = None,
    group: ToGroups = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Seal a part and open several for its slots. Order per key holds."""
    bounds = sorted(set(at or ()))
    if not bounds:
        low, high = _slots(target, name, part)
        if high - low < into:
            raise InvalidArgument(f"part {part} has {high - low} slots, too few for {into} parts")
        bounds = [low + (high - low) * number // into for number in range(1, into)]
    _resize(target, name, topic_pb2.ResizeTopic(parts=[part], bounds=bounds, groups=group or ()), as_json)


@topic.command()
@guarded
def merge(
    name: Name,
    parts: Annotated[
        list[int], typer.Argument(min=1, max=MAX_NUMBER, help="Numbers of parts whose slots adjoin.", metavar="PART…")
    ],
    group: ToGroups = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Seal parts that adjoin each other and open one for all of their slots. Order per key holds."""
    if len(set(parts)) < 2:
        raise InvalidArgument("a merge needs two parts or more")
    _resize(target, name, topic_pb2.ResizeTopic(parts=parts, groups=group or ()), as_json)


@topic.command()
@guarded
def move(name: Name, part: Part, group: ToGroups = None, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """Seal a part and open one for its slots in another group. What is stored stays where it is until retention."""
    _resize(target, name, topic_pb2.ResizeTopic(parts=[part], groups=group or ()), as_json)


def _resize(target: str, name: str, wanted: topic_pb2.ResizeTopic, as_json: bool) -> None:
    found = _change(target, topic_pb2.TopicChange(name=name, resize=wanted))
    print_result(tables.topic_json(found), f"{name}: {tables.parts_text(found)}, version {found.version}", as_json=as_json)


def _slots(target: str, name: str, part: int) -> tuple[int, int]:
    found = calls.run(target, lambda cluster: cluster.describe(name))
    slots = next(((each.low, each.high) for each in found.parts if each.number == part), None)
    if slots is None:
        raise InvalidArgument(f"topic {name} has no part {part}; `pixiu topic show {name}` lists them")
    return slots


def _change(target: str, change: topic_pb2.TopicChange) -> topic_pb2.TopicDescription:
    return calls.run(target, lambda cluster: cluster.change(change))


topic.command()(rebalance)
topic.command("drain-group")(drain_group)
topic.command()(channels)
topic.command()(dead)
topic.command()(resend)
topic.command()(seek)
topic.command()(write)
topic.command()(read)
topic.command()(tail)
topic.command()(last)
topic.add_typer(channel, name="channel")
