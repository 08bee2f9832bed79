"""Users: sending to them, taking what is sent to oneself, and who is online."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import pixiu
from pixiu.client.sync.client import SyncUser
from pixiu.errors import InvalidArgument, NotConnected, Offline, Unavailable
from pixiu.ids import snowflake
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

Until = Callable[[Callable[[], object]], Awaitable[None]]


class FakePresence(wire_pb2_grpc.PresenceServicer):
    """Two devices for each even UIN."""

    async def Query(self, request: wire_pb2.PresenceRequest, context: Any) -> wire_pb2.PresenceReply:
        return wire_pb2.PresenceReply(users=[wire_pb2.UserPresence(uin=uin, devices=2 * (uin % 2 == 0)) for uin in request.uins])


async def test_a_message_to_a_user_is_a_chat_record_of_the_sender(cluster: Any, until: Until) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, uin=9) as px:
        user = px.user(7)
        assert user.uin == 7
        user.chat_soon(b"one", type=5, first_lane=True)
        await user.chat(b"two")
        await user.chat_soon(b"three")
    records = cluster.proxies[0].records
    assert [(r.kind, r.flags, r.key, r.sender, r.body) for r in records] == [
        (Kind.CHAT, 0, 7, 9, payload) for payload in (b"one", b"two", b"three")
    ]
    assert (records[0].lane, records[0].type & 63) == (0, 5)


async def test_a_user_who_is_offline_shows_in_the_receipt(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].failing = lambda record: wire_pb2.PublishFailure(code="OFFLINE", text="nobody there")
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(Offline, match="nobody there"):
            await px.user(7).chat(b"x")
        assert px.stats().failures_by_code == {"OFFLINE": 1}


@pytest.mark.parametrize("uin", [0, -1, 1 << 63])
async def test_impossible_users_are_refused(cluster: Any, uin: int) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match="from 1 to"):
            px.user(uin)
        with pytest.raises(InvalidArgument, match="from 1 to"):
            await px.presence([uin])


async def test_own_messages_come_with_their_user_once_the_gateway_has_confirmed(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    gateway.confirming = False
    async with pixiu.connect(cluster.target, uin=7) as px:
        subscription = px.subscribe(room=42, chat=True)
        with pytest.raises(Unavailable, match="did not confirm"):
            await subscription.ready(timeout_s=0.2)
        await until(lambda: len(gateway.unconfirmed) == 2)
        gateway.confirm()
        await subscription.ready()
        assert (gateway.hellos[0].uin, gateway.hellos[0].chat) == (7, True)
        gateway.send(encode(Kind.CHAT, 7, b"hi", snowflake(1_700_000_000_000, 3, 1), sender=9))
        message = await anext(subscription)
        assert message.destination == "user/7"
        assert (message.user, message.room, message.topic, message.sender, message.payload) == (7, 0, None, 9, b"hi")


async def test_a_cluster_without_relays_refuses_own_messages(cluster: Any) -> None:
    await cluster.start(gateways=1)
    cluster.gateways[0].relays = False
    async with pixiu.connect(cluster.target, uin=7) as px:
        with pytest.raises(InvalidArgument, match="no relays"):
            await px.subscribe(chat=True).ready()
        with pytest.raises(InvalidArgument, match="no relays"):
            await anext(px.subscribe(chat=True))


async def test_own_messages_need_a_user(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match="uin=UIN"):
            px.subscribe(chat=True)


async def test_presence_is_asked_of_any_proxy_that_can_tell(cluster: Any) -> None:
    await cluster.start(proxies=2)
    deaf, telling = cluster.proxies
    await telling.kill()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    wire_pb2_grpc.add_PublisherServicer_to_server(telling, server)
    wire_pb2_grpc.add_PresenceServicer_to_server(FakePresence(), server)
    assert server.add_insecure_port(telling.address)
    await server.start()
    try:
        async with pixiu.connect(deaf.address) as px:
            found = await px.presence([*range(1, 1502), 4])
            assert [user.uin for user in found] == [*range(1, 1502), 4]
            assert [user.online for user in found[:4]] == [False, True, False, True]
            assert found[-1] == pixiu.UserPresence(4, 2)
    finally:
        await server.stop(None)
    async with pixiu.connect(deaf.address) as px:
        with pytest.raises(Unavailable, match="no proxy could answer"):
            await px.presence([1])
    with pytest.raises(NotConnected):
        await px.presence([1])


def test_the_synchronous_twin_chats_too(empty_cluster: Any, background: Any) -> None:
    background.run(empty_cluster.start())
    try:
        with pixiu.connect_sync(empty_cluster.target, uin=9) as px:
            user: SyncUser = px.user(7)
            user.chat_soon(b"one")
            user.chat(b"two")
            with pytest.raises(Unavailable, match="no proxy could answer"):
                px.presence([7])
        assert empty_cluster.proxies[0].payloads() == [b"one", b"two"]
    finally:
        background.run(empty_cluster.stop())


async def test_a_device_has_a_name(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match="a device has a name, not 5"):
            px.inbox(uin=7, device=5)  # type: ignore[arg-type]
