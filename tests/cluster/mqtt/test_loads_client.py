"""The loads' MQTT client against a small server on a real socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import ConnackCode
from cluster.mqtt.reason_codes import ReasonCode
from pixiu.errors import NotConnected, Overloaded, PixiuError, Unavailable
from tests.support.waiting import until
from tools.load.mqtt import MAX_INFLIGHT, ConnectionRefused, MQTTClient, SubscriptionRefused

if TYPE_CHECKING:
    from tests.cluster.mqtt.conftest import Hub


class Listener:
    """A connected client and what it got."""

    def __init__(self, hub: Hub, name: str = "listener", keep_alive_s: int = 60) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.ends: list[PixiuError | None] = []
        self.client = MQTTClient(
            "127.0.0.1",
            hub.port,
            name,
            "7",
            keep_alive_s=keep_alive_s,
            on_message=lambda topic, payload: self.messages.append((topic, payload)),
            on_disconnect=self.ends.append,
        )


async def listener(hub: Hub, name: str = "listener") -> Listener:
    made = Listener(hub, name)
    await made.client.connect()
    return made


async def test_connect_subscribe_publish_receive_unsubscribe_close(hub: Hub) -> None:
    one = await listener(hub)
    assert [(each.client_id, each.connect.user_name) for each in hub.connected] == [("listener", "7")]
    await one.client.subscribe(["room/5", "news"])
    one.client.publish("room/5", b"zero")
    first = one.client.publish_with_ack("news", b"one")
    await one.client.publish_with_ack("room/5", b"two")
    assert first.done()
    await until(lambda: len(one.messages) == 3)
    assert one.messages == [("room/5", b"zero"), ("news", b"one"), ("room/5", b"two")]
    await one.client.unsubscribe(["room/5"])
    await one.client.publish_with_ack("room/5", b"nobody")
    await one.client.publish_with_ack("news", b"last")
    await until(lambda: len(one.messages) == 4)
    assert one.messages[-1] == ("news", b"last")
    await one.client.close()
    await one.client.close()
    assert one.ends == [None]
    await until(lambda: hub.closed == [CloseReason.CLIENT_DISCONNECTED])


@pytest.mark.slow
async def test_many_messages_between_many_clients_arrive_in_order(hub: Hub) -> None:
    listeners = [await listener(hub, f"listener-{number}") for number in range(10)]
    for one in listeners:
        await one.client.subscribe(["room/1"])
    publisher = await listener(hub, "publisher")
    for number in range(3000):
        publisher.client.publish("room/1", number.to_bytes(4, "big"))
        if number % 500 == 0:
            await publisher.client.drain()
    await until(lambda: all(len(one.messages) == 3000 for one in listeners))
    for one in listeners:
        assert [int.from_bytes(payload, "big") for _, payload in one.messages] == list(range(3000))
    for one in [*listeners, publisher]:
        await one.client.close()


async def test_what_is_published_before_close_is_written(hub: Hub) -> None:
    one = await listener(hub)
    await one.client.subscribe(["a"])
    two = await listener(hub, "two")
    for _ in range(100):
        two.client.publish("a", b"x" * 20_000)
    await two.client.close()
    await until(lambda: len(one.messages) == 100)
    await one.client.close()


async def test_refused_filters_are_named_and_the_others_are_granted(hub: Hub) -> None:
    one = await listener(hub)
    with pytest.raises(SubscriptionRefused, match="user/09") as caught:
        await one.client.subscribe(["user/09", "a", "$x"])
    assert caught.value.refused == ("user/09", "$x")
    await one.client.publish_with_ack("a", b"x")
    await until(lambda: one.messages == [("a", b"x")])
    await one.client.close()


async def test_long_lists_of_filters_go_in_several_packets(hub: Hub) -> None:
    one = await listener(hub)
    names = [f"room/{number}" for number in range(1, 1001)]
    await one.client.subscribe(names)
    assert sorted(hub.members) == sorted(names)
    with pytest.raises(SubscriptionRefused):
        await one.client.subscribe(["room/1001"])
    await one.client.unsubscribe(names)
    assert not any(hub.members.values())
    await one.client.close()


async def test_a_refused_connection_has_its_return_code(hub: Hub) -> None:
    hub.admit = lambda connect: ReasonCode.BAD_USER_NAME_OR_PASSWORD
    one = Listener(hub)
    with pytest.raises(ConnectionRefused, match="password") as caught:
        await one.client.connect()
    assert caught.value.return_code == ConnackCode.BAD_USER_NAME_OR_PASSWORD
    assert one.ends == []
    assert not one.client.connected


async def test_nobody_listens() -> None:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(Unavailable, match=f"127.0.0.1:{port}"):
        await MQTTClient("127.0.0.1", port, "a").connect()


async def test_a_server_that_closes_before_connack() -> None:
    class Rude(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.close()

    server = await asyncio.get_running_loop().create_server(Rude, "127.0.0.1", 0)
    try:
        with pytest.raises(Unavailable, match="was lost"):
            await MQTTClient("127.0.0.1", server.sockets[0].getsockname()[1], "a").connect()
    finally:
        server.close()
        await server.wait_closed()


async def test_a_lost_connection_fails_what_waits_and_is_told_once(hub: Hub) -> None:
    hub.confirm = False
    one = await listener(hub)
    waiting: list[asyncio.Future[Any]] = [
        asyncio.ensure_future(one.client.subscribe(["a"])),
        one.client.publish_with_ack("a", b"x"),
    ]
    await until(lambda: hub.connections[0].session.waiting == 2)
    transport = hub.connections[0].transport
    assert transport is not None
    transport.abort()
    for request in waiting:
        with pytest.raises(Unavailable, match="was lost"):
            await request
    assert len(one.ends) == 1
    assert isinstance(one.ends[0], Unavailable)
    with pytest.raises(NotConnected):
        one.client.publish("a", b"x")
    with pytest.raises(NotConnected):
        await one.client.drain()
    with pytest.raises(NotConnected):
        await one.client.connect()
    await one.client.close()
    assert len(one.ends) == 1


async def test_requests_need_a_connection(hub: Hub) -> None:
    client = MQTTClient("127.0.0.1", hub.port, "a")
    with pytest.raises(NotConnected):
        client.publish("a", b"")
    with pytest.raises(NotConnected):
        await client.subscribe(["a"])
    await client.close()
    with pytest.raises(NotConnected):
        await client.connect()


async def test_connect_can_be_given_up(hub: Hub) -> None:
    silent = await asyncio.get_running_loop().create_server(asyncio.Protocol, "127.0.0.1", 0)
    client = MQTTClient("127.0.0.1", silent.sockets[0].getsockname()[1], "a")
    task = asyncio.ensure_future(client.connect())
    await until(lambda: client._client.socket() is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client.connected
    assert client._timer is None or client._timer.cancelled()
    silent.close()
    await silent.wait_closed()


async def test_a_callback_that_raises_does_not_end_the_connection(hub: Hub) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    one = await listener(hub)

    def fail_once(topic: str, payload: bytes) -> None:
        one.messages.append((topic, payload))
        if len(one.messages) == 1:
            raise KeyError("the application's fault")

    one.client.on_message = fail_once
    await one.client.subscribe(["a"])
    one.client.publish("a", b"1")
    one.client.publish("a", b"2")
    await until(lambda: len(one.messages) == 2)
    assert [type(context["exception"]) for context in reported] == [KeyError]
    assert one.client.connected
    await one.client.close()


@pytest.mark.slow
async def test_an_idle_client_is_kept_alive_by_pings(hub: Hub) -> None:
    one = Listener(hub, keep_alive_s=1)
    await one.client.connect()
    session = hub.connections[0].session
    begun = asyncio.get_running_loop().time()
    await until(lambda: session.next_deadline() > begun + 2.6)
    assert one.client.connected
    assert hub.closed == []
    await one.client.close()


async def test_more_messages_without_an_answer_than_the_limit_are_refused(hub: Hub) -> None:
    hub.confirm = False
    one = await listener(hub)
    waiting = [one.client.publish_with_ack("a", b"x") for _ in range(MAX_INFLIGHT)]
    with pytest.raises(Overloaded, match="wait for the server"):
        one.client.publish_with_ack("a", b"x")
    await one.client.drain()
    await one.client.close()
    assert all(isinstance(answer.exception(), NotConnected) for answer in waiting)
