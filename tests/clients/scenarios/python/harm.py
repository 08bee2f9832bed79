"""Scenarios in which processes are killed and drained."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pixiu
from tests.clients.scenarios.python.mail import box
from tests.clients.scenarios.python.play import LIMIT_S, Failed, Play, check, same, scenario, take, until
from tests.clients.scenarios.python.topics import ends, in_order, load, member_of, read, write_keys, write_row

AFTERWARDS = 100
"""Messages that are sent after the harm."""


def counting(play: Play, things: AsyncIterator[pixiu.Message] | AsyncIterator[pixiu.Mail]) -> Counter[str]:
    """Count what comes by text, and acknowledge mail, until the scenario ends."""
    found: Counter[str] = Counter()

    async def count() -> None:
        async for thing in things:
            found[thing.payload.decode()] += 1
            if isinstance(thing, pixiu.Mail):
                thing.acknowledge()

    play.background(count())
    return found


async def each_once(found: Counter[str], wanted: list[str]) -> None:
    """Check that all of these came, each once."""
    try:
        await until(lambda: found.keys() >= set(wanted), "every message")
    except Failed:
        same([text for text in wanted if text not in found], [], "missing")
    same([text for text, count in found.items() if count > 1], [], "repeated")


async def sending_while(
    play: Play, send: Callable[[bytes], Awaitable[object]], happens: Awaitable[object]
) -> tuple[list[str], list[str]]:
    """Send one message after the other while something happens, and some more. Returns those that were confirmed, and failures."""
    confirmed: list[str] = []
    failed: list[str] = []
    happening, number, after = play.background(happens), 0, 0
    while not happening.done() or after < AFTERWARDS:
        after += happening.done()
        text, number = f"m{number}", number + 1
        try:
            await send(text.encode())
            confirmed.append(text)
        except pixiu.PixiuError as error:
            failed.append(f"{text}: {error!r}")
    await happening
    return confirmed, failed


async def in_turn(*steps: Callable[[], Awaitable[object]]) -> None:
    """One step after the other."""
    for step in steps:
        await step()


async def room_of(play: Play) -> tuple[pixiu.Client, pixiu.Subscription, list[str]]:
    """A client, a subscription to the room, and its gaps."""
    px, gaps = await play.connect(publish_timeout_s=30.0), list[str]()
    return px, await play.subscribe(px, room=play.seed, on_gap=gaps.append), gaps


@scenario("reconnect/gateway_killed")
async def gateway_killed(play: Play) -> None:
    px, subscription, gaps = await room_of(play)
    await play.ask("kill", "gateway", subscription.gateway)
    await until(lambda: gaps and subscription.gateway, "a gap, and another gateway")
    await subscription.ready(timeout_s=LIMIT_S)
    await px.room(play.seed).send(b"after")
    same([each.payload for each in await take(subscription, 1)], [b"after"], "messages")
    await play.ask("healthy")


@scenario("reconnect/gateway_drained")
async def gateway_drained(play: Play) -> None:
    px, subscription, gaps = await room_of(play)
    found = counting(play, subscription)
    happens = in_turn(
        lambda: play.ask("drain", "gateway", subscription.gateway),
        lambda: until(lambda: subscription.counters.moves, "the move"),
        lambda: play.ask("healthy"),
    )
    confirmed, failed = await sending_while(play, px.room(play.seed).send, happens)
    same(failed, [], "failed")
    await each_once(found, confirmed)
    same(gaps, [], "gaps")


async def through_proxy(play: Play, action: str) -> tuple[list[str], pixiu.Client]:
    """Kill or drain a proxy while messages are sent. Returns what failed."""
    px, subscription, _ = await room_of(play)
    found = counting(play, subscription)
    address = px.cluster().proxies[play.seed % len(px.cluster().proxies)]
    await px.room(play.seed).send(b"first")
    happens = in_turn(lambda: play.ask(action, "proxy", address), lambda: play.ask("healthy"))
    confirmed, failed = await sending_while(play, px.room(play.seed).send, happens)
    check(bool(confirmed), f"nothing was confirmed: {failed[:1]}")
    await each_once(found, ["first", *confirmed])
    return failed, px


@scenario("reconnect/proxy_killed")
async def proxy_killed(play: Play) -> None:
    _, px = await through_proxy(play, "kill")
    check(px.stats().streams_died > 0, "the client did not lose a proxy")


@scenario("reconnect/proxy_drained")
async def proxy_drained(play: Play) -> None:
    failed, _ = await through_proxy(play, "drain")
    same(failed, [], "failed")


@scenario("reconnect/inbox_gateway_killed")
async def inbox_gateway_killed(play: Play) -> None:
    px = await play.user(1)
    inbox, user = await box(px), px.user(play.seed + 1)
    texts = [f"m{number}" for number in range(40)]
    for text in texts[:20]:
        await user.mail(text.encode())
    mails = await take(inbox, 20)
    for mail in mails[:10]:
        mail.acknowledge()
    await inbox.flush()
    await play.ask("kill", "gateway", inbox.gateway)
    for text in texts[20:]:
        await user.mail(text.encode())
    mails += await take(inbox, 20)
    same([mail.payload.decode() for mail in mails], texts, "mail")
    for mail in mails[10:]:
        mail.acknowledge()
    await play.ask("healthy")


async def mailed(play: Play, role: str, whom: Callable[[pixiu.Client], str]) -> None:
    """Kill a process while mail is sent."""
    px = await play.user(1)
    found = counting(play, await box(px))
    happens = in_turn(lambda: play.ask("kill", role, whom(px)), lambda: play.ask("healthy"))
    confirmed, failed = await sending_while(play, px.user(play.seed + 1).mail, happens)
    same(failed, [], "failed")
    await each_once(found, confirmed)


@scenario("reconnect/mail_proxy_killed")
async def mail_proxy_killed(play: Play) -> None:
    await mailed(play, "proxy", lambda px: px.cluster().proxies[0])


@scenario("reconnect/mail_leader_killed")
async def mail_leader_killed(play: Play) -> None:
    await mailed(play, "pi", lambda _: "leader")


async def rows_while_killed(play: Play, writer: pixiu.TopicWriter, first: int) -> int:
    """Write rows, one after the other, while the leader of the topic's group is killed, and many more at once. Returns the number
    of rows that there are."""
    killing, row = play.background(play.ask("kill", "topic", "leader")), first
    while not killing.done():
        await (await write_row(writer, row))
        row += 1
    await killing
    end = row + 10 * AFTERWARDS - row % 10  # as many of each key
    for each in range(row, end + 1):
        await write_row(writer, each)
    return end


async def stored_once(play: Play, topic: pixiu.DurableTopic, rows: int) -> None:
    """Check that so many rows are stored, each once, in order for each key, and nothing else."""
    in_order(await read(play, topic, rows), 10, rows // 10)
    same(sum(each.end for each in await ends(play, topic)), rows, "messages that are stored")


@scenario("reconnect/topic_writer")
async def topic_writer(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    async with topic.writer() as writer:
        rows = await rows_while_killed(play, writer, 1)
    await play.ask("healthy")
    await stored_once(play, topic, rows)


@scenario("reconnect/named_writer")
async def named_writer(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    await load(topic, 51)
    async with topic.writer("loader") as writer:
        rows = await rows_while_killed(play, writer, 51)
    await load((await play.connect()).durable_topic(topic.name), rows + 1_001)
    await play.ask("healthy")
    await stored_once(play, topic, rows + 1_000)


@scenario("reconnect/topic_reader")
async def topic_reader(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    async with topic.reader() as reader:
        await write_keys(topic, 10, 0, 20)
        before = await take(reader, 200)
        await play.ask("kill", "topic", "leader")
        await write_keys(topic, 10, 20, 40)
        in_order([*before, *await take(reader, 200)], 10, 40)
    await play.ask("healthy")


@scenario("reconnect/channel_member")
async def channel_member(play: Play) -> None:
    px, topic = await play.topic(parts=4)
    member, came = await member_of(play, topic), set[tuple[bytes | None, bytes]]()

    async def acknowledge() -> None:
        async for message in member:
            came.add((message.key, message.body))
            await message.ack()  # False of one whose answer the leader's end took: it may be acknowledged

    async def acknowledged() -> bool:
        return not any(each.unacknowledged for each in await px.topics.channel_state(topic.name, "work"))

    play.background(acknowledge())
    await write_keys(topic, 10, 0, 20)
    await play.ask("kill", "topic", "leader")
    await write_keys(topic, 10, 20, 40)
    await until(lambda: len(came) == 400, "every message")
    await until(acknowledged, "every acknowledgement")
    await play.ask("healthy")
