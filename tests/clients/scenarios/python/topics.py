"""Scenarios of durable topics."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pixiu
from tests.clients.scenarios.python.play import Play, check, fails, numbers, same, scenario, take, until


async def write_keys(topic: pixiu.DurableTopic, keys: int, first: int, end: int) -> None:
    """Write the numbers from `first` to before `end` under each of so many keys."""
    async with topic.writer() as writer:
        for number in range(first, end):
            for key in range(keys):
                await writer.send(str(number).encode(), key=f"key-{key}")


def in_order(messages: Sequence[pixiu.TopicMessage], keys: int, each: int) -> None:
    """Check that every key has all of its numbers once, in order."""
    by_key: dict[bytes | None, list[str]] = {}
    for message in messages:
        by_key.setdefault(message.key, []).append(message.body.decode())
    same(len(by_key), keys, "keys")
    for key, found in by_key.items():
        same(found, numbers(each), f"messages of {key!r}")


async def read(play: Play, topic: pixiu.DurableTopic, count: int) -> list[pixiu.TopicMessage]:
    """The first messages of a topic."""
    reader = await play.ends.enter_async_context(topic.reader(start="earliest"))
    return await take(reader, count)


async def member_of(play: Play, topic: pixiu.DurableTopic, channel: str = "work", **options: object) -> pixiu.ChannelMember:
    """A member that ends with the scenario."""
    return await play.ends.enter_async_context(topic.channel(channel, **options))  # type: ignore[arg-type]


async def handle(member: pixiu.ChannelMember, count: int) -> list[str]:
    """Take and acknowledge so many messages; returns their texts, sorted."""
    found = await take(member, count)
    for message in found:
        check(await message.ack(), f"the acknowledgement of {message.body!r} did not count")
    return sorted(message.body.decode() for message in found)


@scenario("topics/create_describe_delete")
async def create_describe_delete(play: Play) -> None:
    px, topic = await play.topic(parts=4, retention=timedelta(hours=1))
    info = await topic.describe()
    same((len(info.open_parts), info.retention_s), (4, 3600), "parts, retention")
    same([each.name for each in await px.topics.list(topic.name)], [topic.name], "listed")
    await px.topics.delete(topic.name)
    same(await px.topics.list(topic.name), [], "listed after it was deleted")


@scenario("topics/exists")
async def exists(play: Play) -> None:
    px, topic = await play.topic()
    await fails(pixiu.TopicExists, lambda: px.topics.create(topic.name))


@scenario("topics/unknown")
async def unknown(play: Play) -> None:
    px = await play.connect()
    await fails(pixiu.UnknownTopic, lambda: px.durable_topic(f"s{play.seed}-none").send(b"x"))


@scenario("topics/positions")
async def positions(play: Play) -> None:
    _, topic = await play.topic()
    for key in ("a", "b", "c"):
        receipt = await topic.send(key.encode(), key=key, headers={"of": key})
        assert receipt.position is not None
        part, offset = receipt.position
        async with topic.reader(start={str(part): offset}) as reader:
            found = (await take(reader, 1))[0]
            while found.part != part:  # parts that a position does not name are read from their beginning
                found = (await take(reader, 1))[0]
        same((found.position, found.body, found.key), (receipt.position, key.encode(), key.encode()), "position, body, key")
        same(dict(found.headers), {"of": key.encode()}, "headers")


@scenario("topics/key_order")
async def key_order(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    await write_keys(topic, 10, 0, 30)
    in_order(await read(play, topic, 300), 10, 30)


@scenario("topics/reader_latest")
async def reader_latest(play: Play) -> None:
    _, topic = await play.topic(["before"])
    async with topic.reader(start="latest") as reader:
        await topic.send(b"after")
        same([each.body for each in await take(reader, 1)], [b"after"], "messages")


@scenario("topics/reader_position")
async def reader_position(play: Play) -> None:
    _, topic = await play.topic(numbers(20))
    async with topic.reader() as first:
        found = await take(first, 8)
        async with topic.reader(start=first.position) as second:
            found += await take(second, 12)
    same(sorted(int(each.body) for each in found), list(range(20)), "messages")


@scenario("topics/channel_ack")
async def channel_ack(play: Play) -> None:
    _, topic = await play.topic(numbers(20))
    async with topic.channel("work") as first:
        same(await handle(first, 20), sorted(numbers(20)), "messages")
    second = await member_of(play, topic)
    await topic.send(b"new")
    same(await handle(second, 1), ["new"], "messages of the next member")


@scenario("topics/channel_unacknowledged")
async def channel_unacknowledged(play: Play) -> None:
    _, topic = await play.topic(numbers(3))
    async with topic.channel("work") as first:
        await take(first, 3)
    again = await take(await member_of(play, topic), 3)
    same(sorted(each.body.decode() for each in again), numbers(3), "messages")
    check(all(each.attempts > 1 for each in again), f"attempts {[each.attempts for each in again]}")


@scenario("topics/channel_shared")
async def channel_shared(play: Play) -> None:
    px, topic = await play.topic(parts=4)
    came: list[list[str]] = [[], []]
    for own in came:
        member = await member_of(play, topic, credit=8)
        play.background(member.run(lambda message, own=own: own.append(message.body.decode())))  # type: ignore[misc]
    async with asyncio.timeout(60):
        while max(len(part.members) for part in await px.topics.channel_state(topic.name, "work")) < 2:
            pass
    async with topic.writer() as writer:
        for text in numbers(200):
            await writer.send(text.encode(), key=text)
    await until(lambda: sum(map(len, came)) >= 200, "all messages")
    same(sorted(came[0] + came[1]), sorted(numbers(200)), "messages")
    check(all(came), "one member got all")


@scenario("topics/channels_independent")
async def channels_independent(play: Play) -> None:
    _, topic = await play.topic(numbers(10))
    for channel in ("billing", "audit"):
        same(await handle(await member_of(play, topic, channel), 10), numbers(10), f"messages of {channel}")


@scenario("topics/channel_nack")
async def channel_nack(play: Play) -> None:
    _, topic = await play.topic(["again"])
    member = await member_of(play, topic)
    check(await (await take(member, 1))[0].nack(), "the refusal did not count")
    same([(each.body, each.attempts) for each in await take(member, 1)], [(b"again", 2)], "messages")


@scenario("topics/channel_reject_to_dead_letters")
async def channel_reject(play: Play) -> None:
    px, topic = await play.topic(["bad"])
    member = await member_of(play, topic)
    check(await (await take(member, 1))[0].reject("it is bad"), "the rejection did not count")
    letters = await px.topics.dead_letters(topic.name, "work")
    same([(each.message and each.message.body, each.reason) for each in letters], [(b"bad", "it is bad")], "dead letters")
    await topic.send(b"good", key="bad")
    same(await handle(member, 1), ["good"], "messages")
    same(await px.topics.resend(topic.name, "work"), 1, "resent")
    same(await handle(member, 1), ["bad"], "messages after the resend")


@scenario("topics/channel_attempts_used_up")
async def channel_attempts_used_up(play: Play) -> None:
    px, topic = await play.topic(["twice"])
    member = await member_of(play, topic, max_attempts=2)
    for attempts in (1, 2):
        (message,) = await take(member, 1)
        same(message.attempts, attempts, "attempts")
        check(await message.nack(), "the refusal did not count")
    letters = await px.topics.dead_letters(topic.name, "work")
    same([each.message and each.message.body for each in letters], [b"twice"], "dead letters")


@scenario("topics/compacted_last")
async def compacted_last(play: Play) -> None:
    _, topic = await play.topic(compact=timedelta(days=1))
    for body in (b"old", b"new", b""):
        await topic.send(body, key="user-7")
        last = await topic.last("user-7")
        same(last.body if last is not None else None, body or None, f"the last message after {body!r}")


@scenario("topics/resized")
async def resized(play: Play) -> None:
    px, topic = await play.topic(parts=1)
    await write_keys(topic, 10, 0, 10)
    writing = play.background(write_keys(topic, 10, 10, 40))
    await px.topics.resize(topic.name, [1], bounds=[32_768])
    await writing
    await write_keys(topic, 10, 40, 50)
    in_order(await read(play, topic, 500), 10, 50)


async def load(topic: pixiu.DurableTopic, end: int, first: int = 1) -> int:
    """Write rows under ten keys by a writer with a name. Returns its progress when it opened."""
    async with topic.writer("loader") as writer:
        progress = writer.progress
        for row in range(first, end):
            await write_row(writer, row)
    return progress


async def write_row(writer: pixiu.TopicWriter, row: int) -> pixiu.TopicReceipt:
    """Write a row, 1 or more, under one of ten keys. Returns its receipt once there is space for the next one."""
    return await writer.send(str((row - 1) // 10).encode(), key=f"key-{row % 10}", progress=row if writer.name else 0)


@scenario("topics/writer_resumes")
async def writer_resumes(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    same(await load(topic, 301), 0, "the progress of a new writer")
    again = (await play.connect()).durable_topic(topic.name)
    progress = await load(again, 401)  # all rows again, of which those that are stored are passed over
    check(0 < progress <= 300, f"progress {progress}")
    progress = await load(again, 501, progress + 1)
    check(progress <= 400, f"progress {progress} of 400")
    in_order(await read(play, topic, 500), 10, 50)
    same(sum(each.end for each in await ends(play, topic)), 500, "messages that are stored")


async def ends(play: Play, topic: pixiu.DurableTopic) -> Sequence[pixiu.ChannelPartInfo]:
    """A channel in each part, whose `end` is the number of messages there."""
    px = await play.connect()
    await px.topics.set_channel(topic.name, "count")
    return await px.topics.channel_state(topic.name, "count")


@scenario("topics/writer_stale")
async def writer_stale(play: Play) -> None:
    _, topic = await play.topic()
    other = (await play.connect()).durable_topic(topic.name)
    first = await topic.writer("loader").open()
    await (await first.send(b"1", key="a", progress=1))
    async with other.writer("loader") as second:
        await (await second.send(b"2", key="a", progress=2))
        receipt = await first.send(b"3", key="a", progress=3)
        await fails(pixiu.StaleWriter, receipt.wait)
        await fails(pixiu.StaleWriter, lambda: first.send(b"4", key="a", progress=4))
        await (await second.send(b"5", key="a", progress=5))
    same([each.body for each in await read(play, topic, 3)], [b"1", b"2", b"5"], "messages")


@scenario("topics/writer_taken_over")
async def writer_taken_over(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    first = await topic.writer("loader").open()
    receipts = [first.send_soon(str((row - 1) // 10).encode(), key=f"key-{row % 10}", progress=row) for row in range(1, 2_001)]
    await receipts[200]
    await load((await play.connect()).durable_topic(topic.name), 3_001)
    for receipt in receipts:
        await receipt.outcome()
    in_order(await read(play, topic, 3_000), 10, 300)
    same(sum(each.end for each in await ends(play, topic)), 3_000, "messages that are stored")


@scenario("topics/writer_progress")
async def writer_progress(play: Play) -> None:
    _, topic = await play.topic()
    async with topic.writer("loader") as writer:
        await writer.send(b"2", progress=2)
        for progress in (1, 2, 0):
            await fails(pixiu.InvalidArgument, lambda progress=progress: writer.send(b"x", progress=progress))  # type: ignore[misc]
    async with topic.writer() as unnamed:
        await fails(pixiu.InvalidArgument, lambda: unnamed.send(b"x", progress=3))
    await fails(pixiu.InvalidArgument, lambda: topic.send(b"x", progress=3))


@scenario("interop/topics")
async def interop_topics(play: Play) -> None:
    _, topic = await play.topic(parts=1)
    await topic.send(b"one", key="sdk")
    await play.ask("write", topic.name, "python", "two")
    same(await play.ask("read", topic.name, 2), "sdk=one python=two", "the harness read")
    found = [(each.key, each.body) for each in await read(play, topic, 2)]
    same(found, [(b"sdk", b"one"), (b"python", b"two")], "messages")
