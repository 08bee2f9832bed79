"""Subscribing over real gRPC streams: joins, damage, slow consumers, lost and draining gateways, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import grpc
import pytest

import pixiu
from pixiu.client.receive.subscriber import Subscription
from pixiu.errors import InvalidArgument, NotConnected, Overloaded, Unavailable
from pixiu.ids import snowflake, topic_room, uin_of_name
from pixiu.wire.record import Flag, Kind, encode, with_topic
from pixiu.wire.v1 import wire_pb2

Until = Callable[[Callable[[], object]], Awaitable[None]]
SENT_MS = 1_700_000_000_000


def record(number: int, room: int = 42, body: bytes | None = None, **fields: Any) -> bytes:
    fields.setdefault("flags", Flag.TO_ROOM)
    return encode(Kind.ROOM, room, str(number).encode() if body is None else body, snowflake(SENT_MS, 3, number), **fields)


async def take(subscription: Subscription, count: int) -> list[bytes]:
    return [(await anext(subscription)).payload for _ in range(count)]


async def test_messages_of_a_room_come_with_all_that_the_sender_said(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target, uin=9, client="reader") as px:
        subscription = px.subscribe(room=42)
        reading = asyncio.ensure_future(anext(subscription))
        await until(lambda: gateway.joined() == {42})
        gateway.send(record(1, body=b"hi", sender=7, type=64 | 5, lifetime_min=2, extension=b"{}"))
        message = await reading
        assert message == pixiu.Message(
            room=42,  # type: ignore[arg-type]
            topic=None,
            sender=7,
            payload=b"hi",
            message_id=snowflake(SENT_MS, 3, 1),
            type=5,
            first_lane=False,
            sent_at_ms=SENT_MS,
            extension=b"{}",
            lifetime_min=2,
        )
        assert message.destination == "room/42"
        assert message.sent_at == datetime.fromtimestamp(SENT_MS / 1000, UTC)
        assert (gateway.hellos[0].uin, gateway.hellos[0].client) == (9, "reader")
        assert subscription.gateway == gateway.address
    await until(lambda: not gateway.streams)


async def test_topics_and_derived_ids(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with (
        pixiu.connect(cluster.target, client="reader") as px,
        px.subscribe(topic="weather/north", topics=["a/b"]) as subscription,
    ):
        assert gateway.topics() == {"weather/north", "a/b"}
        body = with_topic("weather/x", b"sun")
        gateway.send(
            record(1, room=topic_room("weather/x"), body=body, flags=Flag.TO_ROOM | Flag.TOPIC | Flag.DERIVED_ID, type=0),
        )
        message = await anext(subscription)
        assert (message.topic, message.payload, message.sent_at_ms, message.first_lane) == ("weather/x", b"sun", 0, True)
        assert (message.destination, message.sent_at) == ("weather/x", None)
        assert gateway.hellos[0].uin == 0


async def test_join_and_leave_return_when_the_cluster_has_confirmed(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target) as px:
        subscription = px.subscribe()
        await subscription.join(rooms=[1, 2], topics=["a/b"])
        assert (gateway.joined(), gateway.topics()) == ({1, 2}, {"a/b"})
        gateway.confirming = False
        joining = asyncio.create_task(subscription.join(rooms=[3]))
        again = asyncio.create_task(subscription.join(rooms=[3]))
        await until(lambda: gateway.unconfirmed)
        assert not joining.done()
        assert not again.done()
        gateway.confirm()
        await asyncio.gather(joining, again)
        await subscription.leave(rooms=[1], topics=["a/b"])
        assert (gateway.joined(), gateway.topics()) == ({2, 3}, set())
        assert subscription.rooms == {2, 3}


async def test_very_many_rooms_are_joined_in_several_requests(cluster: Any) -> None:
    await cluster.start(gateways=1)
    async with pixiu.connect(cluster.target) as px, px.subscribe(rooms=range(1, 2501)):
        assert cluster.gateways[0].joined() == set(range(1, 2501))
        assert cluster.gateways[0].written >= 3


async def test_a_join_that_is_not_confirmed_in_time_says_so_and_stays_wanted(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    gateway.confirming = False
    async with pixiu.connect(cluster.target) as px:
        subscription = px.subscribe()
        with pytest.raises(Unavailable, match=rf"within 0.2 s \(gateway {gateway.address} did not confirm it\)"):
            await subscription.join(rooms=[1], timeout_s=0.2)
        assert subscription.rooms == {1}
        gateway.confirm()
        await subscription.join(rooms=[1])


async def test_damaged_messages_are_counted_and_left_out(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        bad = bytearray(record(2))
        bad[-1] ^= 1
        not_text = record(4, body=b"\x00\x01\xff", flags=Flag.TO_ROOM | Flag.TOPIC)
        gateway.send(record(1), bytes(bad), not_text, record(3))
        gateway.push(wire_pb2.SubscribeReply(batch=b"rubbish", count=2))
        gateway.push(wire_pb2.SubscribeReply(batch=b"", count=4_000_000_000))
        gateway.send(record(5))
        assert await take(subscription, 3) == [b"1", b"3", b"5"]
        assert subscription.counters.damaged == 2 + 2 + 1
        assert subscription.counters.received == 3


async def test_batches_give_what_arrived_together(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        gateway.send(record(1), record(2), record(3))
        gateway.send(record(4))
        assert await take(subscription, 1) == [b"1"]
        batches = subscription.batches()
        assert [[message.payload for message in await anext(batches)] for _ in range(2)] == [[b"2", b"3"], [b"4"]]


async def test_a_slow_reader_stops_the_gateway_and_hears_what_it_dropped(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    told: list[int] = []
    async with (
        pixiu.connect(cluster.target, receive_records=10) as px,
        px.subscribe(room=42, on_dropped=told.append) as subscription,
    ):
        before = gateway.written
        for number in range(200):
            gateway.send(record(number, body=bytes(100_000)))
        gateway.push(wire_pb2.SubscribeReply(dropped=17))
        await until(lambda: subscription.counters.received > 10)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert subscription.counters.received == 11, "ten are in the buffer, one waits for space"
        assert gateway.written - before < 150, "gRPC pushed back"
        assert len(await take(subscription, 200)) == 200
        await until(lambda: told)
        assert told == [17]
        assert subscription.counters.dropped == 17


async def test_joining_while_the_buffer_is_full_does_not_wait_for_ever(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    dropped: list[int] = []
    async with (
        pixiu.connect(cluster.target, receive_records=10) as px,
        px.subscribe(room=42, on_dropped=dropped.append) as subscription,
    ):
        for number in range(50):
            gateway.send(record(number))
        await until(lambda: subscription.counters.received == 11)
        await subscription.join(rooms=[43])
        assert await take(subscription, 20) == [str(number).encode() for number in range(30, 50)]
        assert sum(dropped) == 30


async def test_a_lost_gateway_is_replaced_rooms_are_joined_again_and_the_gap_is_told(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    gaps: list[str] = []
    async with (
        pixiu.connect(cluster.target, backoff_s=0.01, max_backoff_s=0.05) as px,
        px.subscribe(rooms=[1, 2], on_gap=gaps.append) as subscription,
    ):
        (serving,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (other,) = [gateway for gateway in cluster.gateways if gateway is not serving]
        serving.send(record(1))
        assert await take(subscription, 1) == [b"1"]
        await serving.kill()
        await until(lambda: other.joined() == {1, 2})
        await subscription.join(rooms=[3])
        other.send(record(1))  # its sender had no answer, and repeats it; this gateway has not seen it
        other.send(record(2))
        assert await take(subscription, 1) == [b"2"]
        assert len(gaps) == subscription.counters.gaps == 1
        assert serving.address in gaps[0]
        assert subscription.gateway == other.address


async def test_a_join_under_way_when_the_gateway_dies_is_confirmed_by_the_next_one(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    async with pixiu.connect(cluster.target, backoff_s=0.01, max_backoff_s=0.05) as px, px.subscribe(room=1) as subscription:
        (serving,) = [gateway for gateway in cluster.gateways if gateway.streams]
        serving.confirming = False
        joining = asyncio.create_task(subscription.join(rooms=[2]))
        await until(lambda: serving.unconfirmed)
        await serving.kill()
        await joining
        (other,) = [gateway for gateway in cluster.gateways if gateway is not serving]
        assert other.joined() == {1, 2}


async def test_the_same_gateway_is_used_again_when_it_is_the_only_one(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target, backoff_s=0.01, max_backoff_s=0.05) as px, px.subscribe(room=1) as subscription:
        await gateway.kill()
        await until(lambda: subscription.gateway == "")
        await gateway.start()
        await until(lambda: gateway.joined() == {1})
        gateway.send(record(7))
        assert await take(subscription, 1) == [b"7"]


@pytest.mark.slow
async def test_leaving_a_draining_gateway_loses_and_repeats_nothing(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    gaps: list[str] = []
    async with pixiu.connect(cluster.target) as px, px.subscribe(rooms=[42], on_gap=gaps.append) as subscription:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        new.confirming = False
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.joined() == {42})
        both = [record(number) for number in range(1, 4)]
        old.send(*both)
        new.send(*both[1:], record(4))
        assert await take(subscription, 3) == [b"1", b"2", b"3"]
        joining = asyncio.create_task(subscription.join(rooms=[43]))
        new.confirm()
        assert await take(subscription, 1) == [b"4"]
        await joining
        await until(lambda: not old.streams)
        await until(lambda: new.joined() == {42, 43})
        new.send(record(5))
        assert await take(subscription, 1) == [b"5"]
        assert gaps == []
        assert subscription.counters.moves == 1


@pytest.mark.slow
async def test_what_is_on_its_way_when_the_new_gateway_has_confirmed_still_comes_by_the_old_one(cluster: Any, until: Until) -> None:
    """It was accepted before the join, so that nobody else gets it: a gateway on a busy machine sends it later."""
    await cluster.start(gateways=2)
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.joined() == {42} and not new.unconfirmed)
        new.send(record(2))
        old.send(record(1), record(2))
        assert await take(subscription, 2) == [b"1", b"2"]
        await until(lambda: not old.streams)
        new.send(record(3))
        assert await take(subscription, 1) == [b"3"]


@pytest.mark.slow
@pytest.mark.parametrize("answers", [True, False])
async def test_a_draining_gateway_that_stands_still_is_waited_for_and_else_a_gap_is_reported(
    cluster: Any, until: Until, answers: bool
) -> None:
    await cluster.start(gateways=2)
    gaps: list[str] = []
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42, on_gap=gaps.append) as subscription:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.joined() == {42} and not new.unconfirmed)
        old.confirming = False
        new.send(record(2))
        await until(lambda: old.unconfirmed)  # the client has read on for its time, and asks whether there is more
        if answers:
            old.confirming = True
            old.send(record(1))
            old.confirm()
        assert await take(subscription, 1 + answers) == [b"1", b"2"][not answers :]
        await until(lambda: not old.streams)
        assert len(gaps) == (not answers)
        assert subscription.counters.moves == 1


@pytest.mark.slow
async def test_what_the_new_gateway_sends_later_than_the_old_one_did_is_not_shown_twice(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        new.confirming = False
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.joined() == {42})
        old.send(record(1), record(2))
        assert await take(subscription, 2) == [b"1", b"2"]
        new.confirm()
        await until(lambda: subscription.gateway == new.address)
        new.send(record(2), record(3))
        assert await take(subscription, 1) == [b"3"]


@pytest.mark.slow
async def test_a_draining_gateway_that_takes_the_move_for_another_login_changes_nothing(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    async with pixiu.connect(cluster.target, uin=7, client="phone") as px, px.subscribe(chat=True) as subscription:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        new.confirming = False
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.unconfirmed)
        old.push(wire_pb2.SubscribeReply(error_code="LOGIN_REPLACED", error_text="the same device connected elsewhere"))
        old.push(None)
        new.confirm()
        await until(lambda: subscription.gateway == new.address)
        new.send(record(1))
        assert await take(subscription, 1) == [b"1"]


@pytest.mark.slow
async def test_a_draining_gateway_without_another_one_serves_until_its_end(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        gateway.push(wire_pb2.SubscribeReply(draining=True))
        asked = cluster.asked
        await until(lambda: cluster.asked > asked)
        gateway.send(record(1))
        assert await take(subscription, 1) == [b"1"]
        assert subscription.counters.gaps == subscription.counters.moves == 0


async def test_a_refused_join_raises_what_the_gateway_says_and_the_others_stay(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    gateway.refuse[13] = ("OVERLOADED", "too many rooms")
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=1) as subscription:
        with pytest.raises(Overloaded, match="too many rooms"):
            await subscription.join(rooms=[13])
        assert subscription.rooms == {1}
        gateway.send(record(1))
        assert await take(subscription, 1) == [b"1"]


async def test_a_room_that_is_refused_for_good_ends_the_iteration(cluster: Any) -> None:
    await cluster.start(gateways=1)
    cluster.gateways[0].refuse[13] = ("INVALID_ARGUMENT", "room 13 is reserved")
    async with pixiu.connect(cluster.target) as px:
        subscription = px.subscribe(room=13)
        with pytest.raises(InvalidArgument, match="room 13 is reserved"):
            await anext(subscription)
        with pytest.raises(InvalidArgument, match="room 13 is reserved"):
            await subscription.join(rooms=[1])


@pytest.mark.slow
async def test_a_subscription_that_never_reaches_a_gateway_says_what_it_tried(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    await gateway.kill()
    async with pixiu.connect(cluster.target, connect_timeout_s=0.5) as px:
        with pytest.raises(Unavailable, match=rf"within 0.5 s \({gateway.address}: connection refused"):
            await anext(px.subscribe(room=1))
    cluster.gateways.clear()
    async with pixiu.connect(cluster.target, connect_timeout_s=0.3) as px:
        with pytest.raises(Unavailable, match="the cluster has no gateway"):
            await anext(px.subscribe(room=1))


async def test_a_gateway_that_forbids_it_ends_the_subscription(cluster: Any) -> None:
    await cluster.start(gateways=1)
    cluster.gateways[0].abort = grpc.StatusCode.PERMISSION_DENIED
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(Unavailable, match=r"refused the subscription.*PERMISSION_DENIED: as the test wants it"):
            await anext(px.subscribe(room=1))


async def test_closing_ends_a_waiting_iteration_and_frees_the_stream(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    async with pixiu.connect(cluster.target) as px:
        subscription = px.subscribe(room=1)
        reading = asyncio.create_task(take_all(subscription))
        await until(lambda: cluster.gateways[0].joined() == {1})
        await subscription.close()
        assert await reading == []
        await until(lambda: not cluster.gateways[0].streams)
        with pytest.raises(NotConnected):
            await subscription.join(rooms=[2])
        other = px.subscribe(room=2)
        reading = asyncio.create_task(take_all(other))
        await until(lambda: cluster.gateways[0].joined() == {2})
    assert await reading == [], "the client's end closes what is left"


async def take_all(subscription: Subscription) -> list[bytes]:
    return [message.payload async for message in subscription]


async def test_a_callback_that_fails_is_counted_and_disturbs_nothing(cluster: Any) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways

    def fail(count: int) -> None:
        raise RuntimeError(f"the application's fault: {count}")

    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42, on_dropped=fail) as subscription:
        gateway.push(wire_pb2.SubscribeReply(dropped=1))
        gateway.send(record(1))
        assert await take(subscription, 1) == [b"1"]
        assert subscription.counters.callback_errors == 1


@pytest.mark.slow
async def test_clients_spread_over_gateways_by_their_names_and_stay(cluster: Any) -> None:
    await cluster.start(gateways=3)
    chosen: dict[str, set[str]] = {}
    for _ in range(2):
        for number in range(60):  # the ports decide: of 12 clients one in forty runs had a gateway with none
            async with pixiu.connect(cluster.target, client=f"client {number}") as px, px.subscribe(room=1) as subscription:
                chosen.setdefault(px.name, set()).add(subscription.gateway)
    assert all(len(gateways) == 1 for gateways in chosen.values())
    assert len(set.union(*chosen.values())) == 3
    assert uin_of_name("client 1") != uin_of_name("client 2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"room": -1}, "RoomID"),
        ({"room": 0}, "RoomID"),
        ({"topic": "a/#/b"}, "the last one"),
        ({"topic": "a/#"}, "has no wildcards"),
        ({"topics": ["+/b"]}, "has no wildcards"),
        ({"topic": "$SYS/load"}, "belong to the server"),
        ({"topic": "a+/b"}, "whole level"),
        ({"topic": ""}, "at least one character"),
        ({"topic": "user/7"}, "not free topics"),
        ({"topics": "a/b"}, r"topics=\['a/b'\]"),
    ],
)
async def test_wrong_rooms_and_topics_are_refused_at_once(cluster: Any, arguments: dict[str, Any], text: str) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match=text):
            px.subscribe(**arguments)


async def test_a_second_task_that_iterates_one_subscription_is_refused(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=1) as subscription:
        reading = asyncio.ensure_future(anext(subscription))
        await until(lambda: subscription._taking)
        with pytest.raises(InvalidArgument, match="another task iterates"):
            await anext(subscription)
        gateway.send(record(1))
        assert (await reading).payload == b"1"
        gateway.send(record(2))
        assert (await anext(subscription)).payload == b"2", "one after the other may"


async def test_a_handler_gets_each_message_and_its_failures_are_counted(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    got: list[bytes] = []

    async def handle(message: pixiu.Message) -> None:
        got.append(message.payload)
        if message.payload == b"2":
            raise ValueError("mine")
        if message.payload == b"3":
            await subscription.close()

    async with pixiu.connect(cluster.target) as px, px.subscribe(room=1) as subscription:
        gateway.send(record(1), record(2), record(3))
        await subscription.run(handle)
        assert got == [b"1", b"2", b"3"]
        assert subscription.counters.handler_failures == 1
