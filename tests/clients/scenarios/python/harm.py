"""Scenarios in which processes are killed and drained."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pixiu
from tests.clients.scenarios.python.mail import box
from tests.clients.scenarios.python.play import LIMIT_S, Failed, Play, check, same, scenario, take, until
from tests.clients.scenarios.python.topics import in_order, load, member_of, read, write_keys

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


@scenario("reconnect/topic_writer")
async def topic_writer(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    await write_keys(topic, 10, 0, 5)
    writing = play.background(write_keys(topic, 10, 5, 200))
    await play.ask("kill", "topic", "leader")
    await writing
    await play.ask("healthy")
    in_order(await read(play, topic, 2_000), 10, 200)


@scenario("reconnect/named_writer")
async def named_writer(play: Play) -> None:
    _, topic = await play.topic(parts=4)
    await load(topic, 51)
    writing = play.background(load(topic, 1_001))
    await play.ask("kill", "topic", "leader")
    await writing
    await load((await play.connect()).durable_topic(topic.name), 2_001)
    await play.ask("healthy")
    in_order(await read(play, topic, 2_000), 10, 200)


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
    _, topic = await play.topic(parts=4)
    member, acknowledged = await member_of(play, topic), set[tuple[bytes | None, bytes]]()

    async def acknowledge() -> None:
        async for message in member:
            if await message.ack():
                acknowledged.add((message.key, message.body))

    play.background(acknowledge())
    await write_keys(topic, 10, 0, 20)
    await play.ask("kill", "topic", "leader")
    await asyncio.gather(write_keys(topic, 10, 20, 40))
    await until(lambda: len(acknowledged) == 400, "every message")
    await play.ask("healthy")
