"""`pixiu topic channels`, `channel set`, `channel remove`, `dead`, `resend` and `seek`.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from pixiu.client.topics.topic_admin import dead_message
from pixiu.discovery.topics import MAX_ATTEMPTS, MAX_NUMBER
from pixiu.errors import InvalidArgument, PixiuError
from pixiu.wire.v1 import topic_pb2
from tools.cli.output import (
    DEFAULT_TARGET,
    AsJson,
    Target,
    Yes,
    console,
    guarded,
    print_json,
    print_result,
    print_text,
    visible,
)
from tools.topics import calls, tables
from tools.topics.calls import TopicCluster
from tools.topics.data import Line, line_of
from tools.topics.values import duration_text, moment_of, offset_of, timeout_ms_of

SHOWN_BYTES: Final = 80
"""Bytes of a dead letter's body that are shown."""
channel = typer.Typer(help="Make, change and remove a topic's channels.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")]
Channel = Annotated[str, typer.Argument(help="The channel's name.", metavar="CHANNEL")]
OnePart = Annotated[
    list[int] | None, typer.Option("--part", min=1, max=MAX_NUMBER, help="Only in this part; may be repeated.", metavar="PART")
]


@guarded
def channels(name: Name, target: Target = DEFAULT_TARGET, as_json: AsJson = False) -> None:
    """List a topic's channels: what each has not acknowledged, and for how long."""
    found = calls.run(target, lambda cluster: cluster.show(name))
    if as_json:
        print_json({"topic": name, "channels": tables.shown_json(found)["channels"], "problems": found.stuck()})
        return
    if found.topic.channels:
        console().print(tables.channel_table(found))
    else:
        print_text(f"{name} has no channels; `pixiu topic channel set {name} CHANNEL` makes one")
    for line in found.stuck():
        print_text(line)


@channel.command("set")
@guarded
def set_channel(
    name: Name,
    channel_name: Channel,
    ordered: Annotated[
        bool, typer.Option("--ordered", help="A key's messages one batch after the other. Only when it is made.")
    ] = False,
    from_end: Annotated[bool, typer.Option("--from-end", help="Begin behind what is there. Only when it is made.")] = False,
    max_attempts: Annotated[
        int,
        typer.Option(
            "--max-attempts", min=0, max=MAX_ATTEMPTS, help="Deliveries before a message is a dead letter; 0: what it has, or 16."
        ),
    ] = 0,
    timeout: Annotated[
        str, typer.Option("--timeout", help="Time for which a member may keep a message, such as 30s; 0: what it has, or 60s.")
    ] = "0",
    filter_: Annotated[
        str | None,
        typer.Option("--filter", help="An expression, or conditions in JSON; empty: none. Default: what it has.", metavar="FILTER"),
    ] = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Make a channel, or change its settings."""

    timeout_ms = timeout_ms_of(timeout)

    async def work(cluster: TopicCluster) -> topic_pb2.TopicDescription:
        kept = ""
        if filter_ is None:
            there = await cluster.describe(name)
            kept = next((each.filter for each in there.channels if each.name == channel_name), "")
        wanted = topic_pb2.TopicChannel(
            name=channel_name,
            ordered=ordered,
            from_end=from_end,
            max_attempts=max_attempts,
            timeout_ms=timeout_ms,
            filter=kept if filter_ is None else filter_,
        )
        return await cluster.change(topic_pb2.TopicChange(name=name, set_channel=wanted))

    found = calls.run(target, work)
    made = next((each for each in found.channels if each.name == channel_name), None)
    if made is None:
        raise InvalidArgument(f"channel {channel_name} was removed by somebody else meanwhile")
    mode = "ordered" if made.ordered else "any"
    text = f"{name}, channel {channel_name}: mode {mode}, {made.max_attempts} attempts of {duration_text(made.timeout_ms)}"
    print_result(tables.channel_json(made), text, as_json=as_json)


@channel.command("remove")
@guarded
def remove_channel(
    name: Name, channel_name: Channel, yes: Yes = False, target: Target = DEFAULT_TARGET, as_json: AsJson = False
) -> None:
    """Remove a channel, with what it has acknowledged and its dead letters. The messages stay."""
    there = calls.run(target, lambda cluster: cluster.describe(name))
    if all(each.name != channel_name for each in there.channels):
        raise InvalidArgument(f"topic {name} has no channel {channel_name}; `pixiu topic channels {name}` lists them")
    if not yes:
        typer.confirm(f"remove channel {channel_name} of topic {name}?", abort=True, err=True)
    change = topic_pb2.TopicChange(name=name, remove_channel=channel_name)
    found = calls.run(target, lambda cluster: cluster.change(change))
    print_result(tables.topic_json(found), f"{name} has no channel {channel_name} any longer", as_json=as_json)


@guarded
def dead(
    name: Name,
    channel_name: Channel,
    part: OnePart = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1_000, help="Number of them of each group.")] = 100,
    after: Annotated[int, typer.Option("--after", min=0, help="Only beyond this offset.", metavar="OFFSET")] = 0,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """List a channel's dead letters: messages whose attempts are used up."""
    found = calls.run(target, lambda cluster: dead_letters(cluster, name, channel_name, part, count, after))
    if as_json:
        letters = [dead_json(each) | {"message": line.json() if (line := line_in(name, each)) else None} for each in found]
        print_json({"topic": name, "channel": channel_name, "dead": letters})
        return
    for each in found:
        print_text(dead_text(name, each))
    if not found:
        print_text(f"{name}, channel {channel_name}: no dead letters")


@guarded
def resend(
    name: Name,
    channel_name: Channel,
    offsets: Annotated[
        list[int] | None, typer.Argument(min=0, help="Offsets in one part; none: all dead letters.", metavar="OFFSET…")
    ] = None,
    part: OnePart = None,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Deliver dead letters again, as if they had not been delivered before."""
    changed = calls.run(target, lambda cluster: resend_dead(cluster, name, channel_name, offsets, part))
    print_result(
        {"topic": name, "channel": channel_name, "resent": changed}, f"{changed:,} messages are delivered again", as_json=as_json
    )


@guarded
def seek(
    name: Name,
    channel_name: Channel,
    to: Annotated[
        str,
        typer.Option("--to", help="start, end, a time ago such as 2h, a date, or @OFFSET of one --part.", metavar="WHERE"),
    ],
    part: OnePart = None,
    force: Annotated[bool, typer.Option("--force", help="Although the channel has members.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Move a channel: it goes on from there, forward or back."""
    wanted = seek_of(to, part, force=force)
    changed, there = calls.run(target, lambda cluster: seek_channel(cluster, name, channel_name, wanted, part))
    went = [{"part": each.part, "offset": each.floor, "end": each.end} for each in there]
    text = f"{name}, channel {channel_name}: moved; {changed:,} messages are concerned{moved_text(wanted, there)}"
    print_result({"topic": name, "channel": channel_name, "changed": changed, "parts": went}, text, as_json=as_json)


async def dead_letters(
    cluster: TopicCluster, name: str, channel_name: str, parts: list[int] | None, count: int, after: int
) -> list[topic_pb2.DeadMessage]:
    """The dead letters of a channel: `count` of each group at most, beyond an offset."""
    wanted = topic_pb2.DeadLettersRequest(limit=count, after=after)
    request = topic_pb2.ChannelRequest(topic=name, channel=channel_name, parts=parts or (), dead=wanted)
    return [each for reply in (await _asked(cluster, name, request, parts)).values() for each in reply.dead]


async def resend_dead(
    cluster: TopicCluster, name: str, channel_name: str, offsets: list[int] | None, parts: list[int] | None
) -> int:
    """Have dead letters delivered again, all or those at these offsets of one part. Returns their number."""
    if offsets and (not parts or len(parts) != 1):
        raise InvalidArgument("offsets are those of one part: give --part PART")
    resend_ = topic_pb2.ResendDead(offsets=offsets or ())
    request = topic_pb2.ChannelRequest(topic=name, channel=channel_name, parts=parts or (), resend=resend_)
    return sum(reply.changed for reply in (await _asked(cluster, name, request, parts)).values())


def seek_of(to: str, parts: list[int] | None, *, force: bool) -> topic_pb2.SeekChannel:
    """A place in a topic as people name it. Raises `InvalidArgument`."""
    wanted = topic_pb2.SeekChannel(force=force)
    if to == "start":
        wanted.start = True
    elif to == "end":
        wanted.end = True
    elif to.startswith("@"):
        wanted.offset = offset_of(to, parts)
    else:
        wanted.time_us = moment_of(to, time.time())
    return wanted


async def seek_channel(
    cluster: TopicCluster, name: str, channel_name: str, wanted: topic_pb2.SeekChannel, parts: list[int] | None
) -> tuple[int, list[topic_pb2.ChannelPart]]:
    """Move a channel. Returns the number of messages that are concerned, and the parts as they are then, if that is known."""
    request = topic_pb2.ChannelRequest(topic=name, channel=channel_name, parts=parts or (), seek=wanted)
    replies = await _asked(cluster, name, request, parts)
    state = topic_pb2.ChannelRequest(topic=name, channel=channel_name, parts=parts or (), state=True)
    rejoin = topic_pb2.ChannelRequest(topic=name, channel=channel_name, rejoin=True)
    try:
        await _asked(cluster, name, rejoin, None)
        there = [each for reply in (await _asked(cluster, name, state, parts)).values() for each in reply.parts]
    except PixiuError:
        there = []  # it is moved, whatever is known of it
    return sum(reply.changed for reply in replies.values()), there


def moved_text(wanted: topic_pb2.SeekChannel, there: list[topic_pb2.ChannelPart]) -> str:
    """The place to which a channel went that was sent to an offset."""
    if wanted.WhichOneof("to") != "offset" or len(there) != 1:
        return ""
    found, asked = there[0], wanted.offset
    why = ", its end" if asked > found.end else ", the first that is kept" if asked < found.floor else ""
    return f"; it goes on at {found.part}:{found.floor}{f'{why}, and not at {asked}' if why else ''}"


async def _asked(
    cluster: TopicCluster, name: str, request: topic_pb2.ChannelRequest, parts: list[int] | None
) -> dict[int, topic_pb2.ChannelReply]:
    """Ask the leaders of all groups, or of those that hold these parts. Raises the first refusal."""
    topic = await cluster.describe(name)
    groups = {part.number: part.group for part in topic.parts}
    missing = [number for number in parts or () if number not in groups]
    if missing:
        raise InvalidArgument(f"topic {name} has no part {missing[0]}; `pixiu topic show {name}` lists them")
    wanted = {groups[number] for number in parts} if parts else None
    found: dict[int, topic_pb2.ChannelReply] = {}
    for group, reply in (await cluster.channel(topic, request, wanted)).items():
        if isinstance(reply, PixiuError):
            raise reply
        found[group] = reply
    return found


def line_in(topic: str, letter: topic_pb2.DeadMessage) -> Line | None:
    """The message of a dead letter; None: it can no longer be read."""
    message = dead_message(topic, letter).message
    return None if message is None else line_of(message)


def dead_text(topic: str, letter: topic_pb2.DeadMessage) -> str:
    """A dead letter in one line, for people: where, attempts, reason, when it was given up, key, body."""
    when = datetime.fromtimestamp(letter.at_us / 1_000_000, UTC).isoformat(timespec="seconds")
    line = line_in(topic, letter)
    said = line.said(SHOWN_BYTES) if line is not None else "(cannot be read)"
    return f"{letter.part}:{letter.message.base}\t{letter.attempts} attempts\t{visible(letter.reason)}\t{when}\t{said}"


def dead_json(letter: topic_pb2.DeadMessage) -> dict[str, Any]:
    """A dead letter as JSON, without what it says."""
    return {
        "part": letter.part,
        "offset": letter.message.base,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "at_us": letter.at_us,
        "bytes": len(letter.message.data),
    }
