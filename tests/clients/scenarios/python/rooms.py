"""Scenarios of rooms, signals, chat, subscriptions, requests, and of rooms with Python in the harness."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pixiu
from tests.clients.scenarios.python.play import Play, check, fails, numbers, same, scenario, take


def texts(messages: Sequence[pixiu.Message]) -> list[str]:
    """Their payloads."""
    return [message.payload.decode() for message in messages]


async def up_to(subscription: pixiu.Subscription, last: str) -> list[pixiu.Message]:
    """The messages before the one with this text."""
    found: list[pixiu.Message] = []
    while True:
        (message,) = await take(subscription, 1)
        if message.payload == last.encode():
            return found
        found.append(message)


@scenario("publish/confirmed")
async def confirmed(play: Play) -> None:
    px = await play.user(1)
    subscription = await play.subscribe(px)
    await px.room(play.seed).send(b"hello", type=7)
    (message,) = await take(subscription, 1)
    found = message.room, message.sender, message.payload, message.type
    same(found, (play.seed, play.seed + 1, b"hello", 7), "room, sender, body, type")


@scenario("publish/order")
async def order(play: Play) -> None:
    px, subscription = await play.pair()
    for text in numbers(500):
        px.room(play.seed).send_soon(text.encode())
    await px.room(play.seed).send(b"last")
    same(texts(await up_to(subscription, "last")), numbers(500), "messages")


@scenario("publish/backpressure")
async def backpressure(play: Play) -> None:
    px = await play.connect(queue_bytes=64 << 10, max_record_bytes=32 << 10)
    async with px.room(play.seed).writer() as writer:
        for _ in range(5_000):
            await writer.send(bytes(1024))
    same(px.stats().accepted, 5_000, "accepted")


@scenario("publish/too_large")
async def too_large(play: Play) -> None:
    px = await play.connect(max_record_bytes=1_000)
    await fails(pixiu.RecordTooLarge, lambda: px.room(play.seed).send(bytes(1_000)))
    same(px.stats().streams_opened, 0, "streams to proxies")


@scenario("publish/bad_room")
async def bad_room(play: Play) -> None:
    px = await play.connect()
    for room in (0, 1 << 62):
        await fails(pixiu.InvalidArgument, lambda room=room: px.room(room).send(b"x"))  # type: ignore[misc]


@scenario("publish/headers")
async def headers(play: Play) -> None:
    px, subscription = await play.pair()
    given = {"trace": "3f", "größe": "<ü>"}
    await px.room(play.seed).send(b"{}", headers=given)
    same(dict((await take(subscription, 1))[0].headers), given, "headers")


@scenario("publish/deadline")
async def deadline(play: Play) -> None:
    px = await play.connect()
    await fails(pixiu.NotSent, lambda: px.room(play.seed).send(b"late", timeout_s=0.0))
    await px.room(play.seed).send(b"in time")


@scenario("publish/load_test")
async def load_test(play: Play) -> None:
    px, usual = await play.pair()
    passing = await play.subscribe(px, room=play.seed, load_test="pass")
    await px.room(play.seed).send(b"marked", load_test=True)
    await px.room(play.seed).send(b"plain")
    same(texts(await take(passing, 2)), ["marked", "plain"], "passed")
    same(texts(await take(usual, 1)), ["plain"], "by default")


async def signalled(play: Play, receipt: bool) -> pixiu.SignalReceipt:
    """A signal is delivered once."""
    px, subscription = await play.pair()
    found = await px.room(play.seed).signal(b"signal", receipt)
    (first,) = await take(subscription, 1)
    same((first.payload, first.signal), (b"signal", True), "signal")
    await px.room(play.seed).send(b"last")
    same(texts(await up_to(subscription, "last")), [], "more signals")
    return found


@scenario("signal/confirmed")
async def signal(play: Play) -> None:
    await signalled(play, receipt=False)


@scenario("signal/receipt")
async def signal_receipt(play: Play) -> None:
    check((await signalled(play, receipt=True)).gateways >= 1, "it counts no gateway")


@scenario("signal/undelivered")
async def undelivered(play: Play) -> None:
    px = await play.connect()
    await fails(pixiu.Undelivered, lambda: px.room(play.seed).signal(b"signal", receipt=True))


@scenario("chat/delivered")
async def chat(play: Play) -> None:
    receiver, sender = await play.user(1), await play.user(2)
    subscription = await play.subscribe(receiver, chat=True)
    await sender.user(play.seed + 1).chat(b"to you")
    (message,) = await take(subscription, 1)
    found = message.user, message.room, message.sender, message.payload
    same(found, (play.seed + 1, 0, play.seed + 2, b"to you"), "user, room, sender, body")


@scenario("chat/offline")
async def offline(play: Play) -> None:
    px = await play.connect()
    await fails(pixiu.Offline, lambda: px.user(play.seed + 9).chat(b"nobody"))


@scenario("subscribe/from_now")
async def from_now(play: Play) -> None:
    px = await play.connect()
    await px.room(play.seed).send(b"before")
    subscription = await play.subscribe(px)
    for text in numbers(10):
        await px.room(play.seed).send(text.encode())
    same(texts(await take(subscription, 10)), numbers(10), "messages")


@scenario("subscribe/several_rooms")
async def several_rooms(play: Play) -> None:
    px = await play.connect()
    subscription = await play.subscribe(px, rooms=[play.seed + number for number in (1, 2, 3)])
    for number in (4, 1, 2, 3):
        await px.room(play.seed + number).send(str(number).encode())
    same(sorted(texts(await take(subscription, 3))), ["1", "2", "3"], "messages")
    await px.room(play.seed + 1).send(b"end")
    same(texts(await up_to(subscription, "end")), [], "more messages")


@scenario("subscribe/join_leave")
async def join_leave(play: Play) -> None:
    px, subscription = await play.pair()
    here, there = px.room(play.seed), px.room(play.seed + 1)
    await there.send(b"not joined")
    await subscription.join([there.id])
    await there.send(b"joined")
    same(texts(await take(subscription, 1)), ["joined"], "after the join")
    await subscription.leave([there.id])
    await there.send(b"left")
    await here.send(b"end")
    same(texts(await up_to(subscription, "end")), [], "after leaving")


@scenario("subscribe/free_topic")
async def free_topic(play: Play) -> None:
    px, mine, other = await play.connect(), f"s{play.seed}/mine", f"s{play.seed}/other"
    subscription = await play.subscribe(px, topic=mine)
    for topic in (other, mine):
        await px.topic(topic).send(topic.encode())
    (message,) = await take(subscription, 1)
    same((message.topic, message.payload), (mine, mine.encode()), "topic, body")


@scenario("subscribe/two_clients")
async def two_clients(play: Play) -> None:
    (px, first), (_, second) = await play.pair(), await play.pair()
    for text in numbers(20):
        await px.room(play.seed).send(text.encode())
    for subscription in (first, second):
        same(texts(await take(subscription, 20)), numbers(20), "messages")


@scenario("subscribe/close")
async def close(play: Play) -> None:
    _, subscription = await play.pair()

    async def count() -> int:
        return len([message async for message in subscription])

    counting = play.background(count())
    await subscription.close()
    same(await counting, 0, "messages")


@scenario("interop/rooms")
async def interop_rooms(play: Play) -> None:
    px, subscription = await play.pair()
    await play.ask("publish", play.seed, "python")
    same(texts(await take(subscription, 1)), ["python"], "messages")
    await play.ask("listen", play.seed + 1)
    await px.room(play.seed + 1).send(b"sdk")
    same(await play.ask("heard", 1), "sdk", "the harness heard")


async def answering(play: Play, px: pixiu.Client, **where: object) -> None:
    """Answer requests with their payload, doubled."""
    subscription = await play.subscribe(px, **where)
    play.background(subscription.run(_answer))


async def _answer(message: pixiu.Message) -> None:
    if "reply-to" in message.headers:
        await message.reply(message.payload * 2)


@scenario("request/reply")
async def request_reply(play: Play) -> None:
    asking, answering_ = await play.connect(), await play.connect()
    await answering(play, answering_, room=play.seed)
    replies = await asyncio.gather(*(asking.room(play.seed).request(text.encode(), headers={"n": text}) for text in numbers(50)))
    same(texts(replies), [2 * text for text in numbers(50)], "replies")


@scenario("request/user")
async def request_user(play: Play) -> None:
    asking, phone = await play.connect(), await play.user(1)
    await answering(play, phone, chat=True)
    same((await asking.user(play.seed + 1).request(b"ab")).payload, b"abab", "reply")


@scenario("request/unanswered")
async def request_unanswered(play: Play) -> None:
    px, subscription = await play.pair()
    await fails(pixiu.OutcomeUnknown, lambda: px.room(play.seed).request(b"anybody", timeout_s=1.0))
    (asked,) = await take(subscription, 1)
    await asked.reply(b"late")
    await answering(play, px, room=play.seed + 1)
    same((await px.room(play.seed + 1).request(b"x")).payload, b"xx", "the next reply")


@scenario("request/no_request")
async def no_request(play: Play) -> None:
    px, subscription = await play.pair()
    await px.room(play.seed).send(b"plain", headers={"request-id": "1"})
    (message,) = await take(subscription, 1)
    await fails(pixiu.InvalidArgument, lambda: px.reply(message, b"x"))


@scenario("interop/requests")
async def interop_requests(play: Play) -> None:
    px = await play.connect()
    await play.ask("answer", play.seed, "python")
    same((await px.room(play.seed).request(b"sdk")).payload, b"python", "reply of the harness")
    await answering(play, px, room=play.seed + 1)
    same(await play.ask("request", play.seed + 1, "ab"), "abab", "reply to the harness")
