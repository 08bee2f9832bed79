"""Requests and replies, by a proxy and a gateway in this process that pass messages on to whoever is in the room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import pixiu
from pixiu.errors import InvalidArgument, NotConnected, NotSent, OutcomeUnknown
from pixiu.wire.record import Flag, Record, encode
from pixiu.wire.v1 import wire_pb2

Until = Callable[[Callable[[], object]], Awaitable[None]]


def connect_rooms(cluster: Any) -> None:
    """What a proxy takes goes to the streams of the gateway that have joined the room, or take messages to users."""
    (gateway,) = cluster.gateways

    def passed_on(record: Record) -> wire_pb2.PublishFailure | None:
        data = encode(
            record.kind, record.key, record.body, record.snowflake_id, sender=record.sender, flags=record.flags,
            type=record.type, extension=record.extension,
        )  # fmt: skip
        for queue, (rooms, _) in gateway.streams.items():
            if record.key in rooms or not record.flags & Flag.TO_ROOM:
                queue.put_nowait(wire_pb2.SubscribeReply(batch=data, count=1))
        return None

    for proxy in cluster.proxies:
        proxy.failing = passed_on


@pytest.fixture(name="served")
async def served_fixture(cluster: Any) -> Any:
    await cluster.start(proxies=1, gateways=1)
    connect_rooms(cluster)
    return cluster


async def answering(px: pixiu.Client, **where: Any) -> asyncio.Task[None]:
    """A service that answers requests with their payload doubled."""
    subscription = px.subscribe(**where)
    await subscription.ready()

    async def handle(message: pixiu.Message) -> None:
        if message.headers.get("reply-to"):
            await message.reply(message.payload * 2, headers={"answered-by": px.name})

    return asyncio.create_task(subscription.run(handle))


async def test_a_request_to_a_room_gets_its_reply(served: Any) -> None:
    async with pixiu.connect(served.target, client="service") as service, pixiu.connect(served.target) as px:
        task = await answering(service, room=42)
        replies = await asyncio.gather(*(px.room(42).request(b"%d" % n, headers={"trace": str(n)}) for n in range(50)))
        assert [reply.payload for reply in replies] == [b"%d%d" % (n, n) for n in range(50)]
        assert {reply.headers["answered-by"] for reply in replies} == {"service"}
        assert len({reply.headers["request-id"] for reply in replies}) == 50
        requests = [message for message in served.proxies[0].records if message.key == 42]
        assert all(b'"trace"' in record.extension for record in requests)
        await px.room(42).send(b"no request")
        task.cancel()


async def test_a_request_to_a_user_gets_the_reply_of_a_device(served: Any) -> None:
    async with pixiu.connect(served.target, uin=7, client="phone") as phone, pixiu.connect(served.target) as px:
        task = await answering(phone, chat=True)
        reply = await px.user(7).request(b"ab", timeout_s=20.0)
        assert reply.payload == b"abab"
        task.cancel()


@pytest.mark.slow
async def test_without_a_reply_it_says_so_in_time_and_late_replies_harm_nothing(served: Any, until: Until) -> None:
    async with pixiu.connect(served.target) as px, px.subscribe(room=42) as there:
        with pytest.raises(OutcomeUnknown, match="nobody replied") as raised:
            await px.room(42).request(b"x", timeout_s=1.0)
        assert isinstance(raised.value, TimeoutError)
        late = await anext(there)
        await late.reply(b"late")
        waiting = asyncio.create_task(px.room(42).request(b"y", timeout_s=20.0))
        await (await anext(there)).reply(b"in time")
        assert (await waiting).payload == b"in time"
        waiting = asyncio.create_task(px.room(42).request(b"z", timeout_s=20.0))
        assert (await anext(there)).payload == b"z"
    with pytest.raises(OutcomeUnknown, match="closed"):
        await waiting


async def test_what_is_no_request_is_not_answered_and_its_headers_are_the_sdks(served: Any) -> None:
    async with pixiu.connect(served.target) as px, px.subscribe(room=42) as there:
        for headers in (
            None,
            {"reply-to": "room/x", "request-id": "1"},
            {"reply-to": "room/7"},
            {"reply-to": "a/b", "request-id": "1"},
        ):
            await px.room(42).send(b"x", headers=headers)
            with pytest.raises(InvalidArgument, match="asks for no reply"):
                await (await anext(there)).reply(b"y")
        await px.room(42).send(b"x", headers={"reply-to": "room/0", "request-id": "1"})
        with pytest.raises(InvalidArgument, match="RoomID"):
            await (await anext(there)).reply(b"y")
        with pytest.raises(InvalidArgument, match="not extension"):
            await px.room(42).request(b"x", extension=b"x")
        with pytest.raises(InvalidArgument, match="a request's own"):
            await px.room(42).request(b"x", headers={"reply-to": "room/1"})


async def test_without_a_gateway_nothing_was_sent(cluster: Any) -> None:
    await cluster.start(proxies=1)
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(NotSent, match="takes its reply"):
            await px.room(42).request(b"x", timeout_s=0.2)
    with pytest.raises(NotConnected):
        await px.room(42).request(b"x")
    assert not cluster.proxies[0].records


def test_threads_ask_and_answer(background: Any, empty_cluster: Any) -> None:
    background.run(empty_cluster.start(proxies=1, gateways=1))
    connect_rooms(empty_cluster)
    with pixiu.connect_sync(empty_cluster.target) as px, px.subscribe(room=42) as there:

        def answer() -> None:
            message = next(there)
            with pytest.raises(InvalidArgument, match=r"px\.reply"):
                message.reply(b"")
            px.reply(message, b"yes")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert px.room(42).request(b"?", timeout_s=20.0).payload == b"yes"
        thread.join(20)
    background.run(empty_cluster.stop())
