"""`pixiu topic write`, `read` and `tail`.

Source: docs/topics.md, "Commands".
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Any, Final, NamedTuple

import typer

from pixiu.client.topics.drafts import TopicLevelName, topic_level
from pixiu.client.topics.reading.received import TopicMessage
from pixiu.client.topics.writing.writer import TopicWriter
from pixiu.discovery.topics import MAX_NUMBER
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.wire.block import STAMP_BYTES, Flag, Message, parse_stored, stored_size
from pixiu.wire.filters import Filter
from pixiu.wire.v1 import topic_pb2
from tools.cli.output import DEFAULT_TARGET, EXIT_NOT_DELIVERED, AsJson, Target, guarded, print_json, print_result, visible
from tools.topics import calls
from tools.topics.calls import TopicCluster
from tools.topics.values import moment_of, offset_of

WAIT_MS: Final = 2_000
"""Time for which the leader of a part waits for the next block, milliseconds."""
PAGE_BYTES: Final = 1 << 20
MAX_FOLLOWED: Final = 256
"""Parts that `tail` follows at one time. Policy: more are refused."""
MAX_WAITING: Final = 1_000
"""Messages of all parts that wait to be printed."""
Name = Annotated[str, typer.Argument(help="The topic's name.", metavar="NAME")]
Count = Annotated[int, typer.Option("--count", "-n", min=0, help="End after this number of messages; 0: all.")]
Parts = Annotated[
    list[int] | None, typer.Option("--part", min=1, max=MAX_NUMBER, help="Only this part; may be repeated.", metavar="PART")
]


class Line(NamedTuple):
    """One stored message."""

    part: int
    offset: int
    time_us: int
    sender: int
    message: Message

    def json(self) -> dict[str, Any]:
        """The message as JSON."""
        return {
            "part": self.part,
            "offset": self.offset,
            "slot": self.message.slot,
            "time_us": self.time_us,
            "sender": self.sender,
            "key": None if self.message.key is None else self.message.key.decode(errors="replace"),
            "headers": {name: value.decode(errors="replace") for name, value in self.message.headers},
            "body": bytes(self.message.body).decode(errors="replace"),
        }

    def text(self) -> str:
        """The message in one line, for people."""
        when = datetime.fromtimestamp(self.time_us / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return f"{self.part}:{self.offset}\t{when}\t{self.said()}"

    def said(self, most: int = 0) -> str:
        """Key and body, for people. most: bytes of the body; 0: all."""
        key = visible(self.message.key.decode(errors="replace")) if self.message.key is not None else "-"
        body = bytes(self.message.body)
        shown = body[:most] if most else body
        return f"{key}\t{visible(shown.decode(errors='replace'))}{'…' if len(shown) < len(body) else ''}"


def line_of(found: TopicMessage) -> Line:
    """A message of the SDK."""
    message = Message(found.body, found.slot, found.key, list(found.headers.items()))
    return Line(found.part, found.offset, found.time_us, found.sender, message)


@guarded
def write(
    name: Name,
    key: Annotated[str | None, typer.Option("--key", help="Key of every message; with --split, of lines without one.")] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="A line is KEY, this separator, and the body.", metavar="SEPARATOR")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Write this number of made messages instead of lines.")] = 0,
    size: Annotated[int, typer.Option("--size", min=0, max=1_000_000, help="With --count: bytes of each.")] = 100,
    keys: Annotated[int, typer.Option("--keys", min=0, help="With --count: number of keys; 0: none.")] = 1_000,
    level: Annotated[
        TopicLevelName,
        typer.Option("--level", help="When a message counts: accepted, persisted, replicated or stored.", metavar="LEVEL"),
    ] = "replicated",
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Write each line of the standard input as a message, or --count made ones. Returns when all are stored."""
    topic_level(level)

    async def work(cluster: TopicCluster) -> tuple[int, float]:
        began = time.monotonic()
        writer = await cluster.client.durable_topic(name).writer().open()
        counters = writer.counters
        try:
            async with writer:
                await (_write_made(writer, count, size, keys, level) if count else _write_lines(writer, key, split, level))
        except BaseException:
            open_ = counters.offered - counters.confirmed
            sys.stderr.write(f"pixiu: stored: {counters.confirmed:,} messages; {open_:,} more were sent and are not confirmed\n")
            raise
        return counters.confirmed, time.monotonic() - began

    written, seconds = calls.run(target, work)
    rate = written / seconds if seconds > 0 else 0.0
    value = {"topic": name, "written": written, "seconds": round(seconds, 3)}
    print_result(value, f"stored: {written:,} messages in {seconds:.2f} s, {rate:,.0f} a second", as_json=as_json)


@guarded
def last(
    name: Name,
    key: Annotated[str, typer.Argument(help="The key.", metavar="KEY")],
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Show the last message of a key, in a topic that is compacted. Ends with 1 if there is none, or the key was deleted."""
    found = calls.run(target, lambda cluster: cluster.client.durable_topic(name).last(key))
    if found is None:
        if as_json:
            print_json(None)
        sys.stderr.write(f"pixiu: topic {name} has no message of the key {visible(key)}, or it was deleted\n")
        raise typer.Exit(EXIT_NOT_DELIVERED)
    _print(line_of(found), as_json)


async def _write_made(writer: TopicWriter, count: int, size: int, keys: int, level: TopicLevelName) -> None:
    body = b"x" * size
    for number in range(count):
        await writer.send(body, key=b"%d" % (number % keys) if keys else None, level=level)


async def _write_lines(writer: TopicWriter, key: str | None, split: str | None, level: TopicLevelName) -> None:
    # A thread reads the lines, so that the client's heartbeats go on.
    while line := await asyncio.to_thread(sys.stdin.buffer.readline):
        found, body = _split(line.rstrip(b"\r\n"), split)
        await writer.send(body, key=found if found is not None else key.encode() if key is not None else None, level=level)


def _split(line: bytes, separator: str | None) -> tuple[bytes | None, bytes]:
    if separator is None:
        return None, line
    key, found, body = line.partition(separator.encode())
    return (key, body) if found else (None, line)


@guarded
def read(
    name: Name,
    start: Annotated[
        str, typer.Option("--from", help="start, a time ago such as 10m, a date, or @OFFSET of one --part.", metavar="WHERE")
    ] = "start",
    part: Parts = None,
    count: Count = 0,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Print what is stored, part by part: part:offset, time, key, body. No channel is concerned."""
    where = start_of(start, part)

    async def work(cluster: TopicCluster) -> None:
        left = count or sys.maxsize
        async for line in stored(cluster, name, where, part):
            _print(line, as_json)
            left -= 1
            if not left:
                return

    calls.run(target, work)


async def stored(
    cluster: TopicCluster, name: str, where: topic_pb2.TopicReadRequest, parts: list[int] | None, filter_: Filter | None = None
) -> AsyncIterator[Line]:
    """Iterate over the messages of a topic, part by part, from a place on; only those that a filter selects, if there is one."""
    topic = await cluster.describe(name)
    for each in _chosen(topic, parts):
        async for line in _lines(cluster, topic, each, where, filter_=filter_):
            if isinstance(line, Line):
                yield line


@guarded
def tail(
    name: Name,
    part: Parts = None,
    count: Count = 0,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Print messages as they are stored, until Ctrl-C. No channel is concerned."""

    async def work(cluster: TopicCluster) -> None:
        topic, left = await cluster.describe(name), count or sys.maxsize
        followed = [each for each in _chosen(topic, part) if each.state != topic_pb2.PART_SEALED or part]
        if len(followed) > MAX_FOLLOWED:
            raise InvalidArgument(
                f"{name} has {len(followed)} open parts; at most {MAX_FOLLOWED} are followed: give some with --part"
            )
        waiting: asyncio.Queue[Line] = asyncio.Queue(MAX_WAITING)
        async with asyncio.TaskGroup() as tasks:
            begun: set[int] = set()

            def follow(each: topic_pb2.TopicPart, where: topic_pb2.TopicReadRequest) -> None:
                if each.number not in begun:
                    begun.add(each.number)
                    running.append(tasks.create_task(one(each, where)))

            async def one(each: topic_pb2.TopicPart, where: topic_pb2.TopicReadRequest) -> None:
                async for line in _lines(cluster, topic, each, where, wait=True):
                    if isinstance(line, Line):
                        await waiting.put(line)
                    else:
                        follow(line, topic_pb2.TopicReadRequest(offset=0))

            running: list[asyncio.Task[None]] = []
            for each in followed:
                follow(each, topic_pb2.TopicReadRequest(end=True))
            while left:
                _print(await waiting.get(), as_json)
                left -= 1
            for task in running:
                task.cancel()

    with suppress(asyncio.CancelledError):
        calls.run(target, work)


async def _lines(
    cluster: TopicCluster,
    topic: topic_pb2.TopicDescription,
    part: topic_pb2.TopicPart,
    where: topic_pb2.TopicReadRequest,
    *,
    wait: bool = False,
    filter_: Filter | None = None,
) -> AsyncIterator[Line | topic_pb2.TopicPart]:
    """The messages of a part; if it is waited for them, then the children of a sealed part."""
    request = topic_pb2.TopicReadRequest(topic=topic.name, part=part.number, max_bytes=PAGE_BYTES, wait_ms=WAIT_MS if wait else 0)
    request.MergeFrom(where)
    at = -1
    while True:
        reply = await cluster.read(topic, part, request)
        for line in _messages(part.number, reply.blocks, filter_):
            if line.offset >= max(at, where.offset):
                yield line
        if reply.gap_high:
            sys.stderr.write(f"pixiu: part {part.number}: offsets {reply.gap_low} to {reply.gap_high - 1} are gone\n")
        if at < 0 and where.offset and where.offset >= reply.committed_end:
            sys.stderr.write(f"pixiu: part {part.number} ends at offset {reply.committed_end}: nothing is at {where.offset}\n")
        done = not reply.blocks and not reply.gap_high
        if done and (not wait or (reply.sealed and reply.next >= reply.committed_end)):
            for child in reply.children if wait else ():
                yield child
            return
        at = max(reply.next, reply.gap_high)
        request.offset = at


def _messages(part: int, blocks: bytes, filter_: Filter | None) -> Iterator[Line]:
    at = 0
    while at < len(blocks):
        size = stored_size(blocks[at : at + STAMP_BYTES])
        if not size:
            raise MalformedData(f"part {part}: the leader sent what is no block")
        stamp, block = parse_stored(blocks[at : at + size])
        count = 0 if block.flags & Flag.HOLE else block.count
        for number in range(count) if filter_ is None else filter_.matching(block, 0, count):
            yield Line(part, stamp.base + number, stamp.at_us, stamp.sender, block.message(number))
        at += size


def _chosen(topic: topic_pb2.TopicDescription, wanted: list[int] | None) -> list[topic_pb2.TopicPart]:
    """The parts to read, each behind its parents. Raises `InvalidArgument` for one that does not exist."""
    missing = set(wanted or ()) - {part.number for part in topic.parts}
    if missing:
        raise InvalidArgument(f"topic {topic.name} has no part {min(missing)}; `pixiu topic show {topic.name}` lists them")
    return sorted((part for part in topic.parts if not wanted or part.number in wanted), key=lambda part: part.number)


def start_of(text: str, parts: list[int] | None) -> topic_pb2.TopicReadRequest:
    """A place to read from as people name it. Raises `InvalidArgument`."""
    if text == "start":
        return topic_pb2.TopicReadRequest(offset=0)
    if text.startswith("@"):
        return topic_pb2.TopicReadRequest(offset=offset_of(text, parts))
    return topic_pb2.TopicReadRequest(time_us=moment_of(text, time.time()))


def _print(line: Line, as_json: bool) -> None:
    if as_json:
        print_json(line.json())
    else:
        sys.stdout.write(line.text() + "\n")
        sys.stdout.flush()
