"""Mail through a real gateway to gRPC and stock MQTT clients; the test plays the relay that delivers it."""

from __future__ import annotations

import asyncio
import queue
import struct
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from cluster.membership.map.devices import device_key
from cluster.mqtt.mail import packet_id_of
from cluster.rpc.framed import FramedCall
from cluster.rpc.methods import DELIVER
from cluster.wire.v1 import delivery_pb2, membership_pb2, membership_pb2_grpc
from pixiu.discovery.node import Node
from pixiu.ids import device_class_of_name, device_of_name
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery, encode, split
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.framed import framed_of
from tests.support.roles import WAIT_S, Roles, at_least
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
RELAY = 0xFEED
NUMBER = 3
"""What Pi calls the device."""


def mail(uin: int, seq: int, *, session: int = 1, lane: int = 1, flags: int = 0, body: bytes = b"") -> bytes:
    record = b"" if flags & GAP else record_of(Kind.MAIL, uin, body or b"mail %d" % seq, 1000 + seq)
    return encode(5000 + seq, seq, uin, session, NUMBER, lane, flags, record)


class Relay:
    """One stream of deliveries."""

    def __init__(self, gateway: Node, endpoint: int = RELAY) -> None:
        self._call: FramedCall[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]
        self._call = framed_of("relay", endpoint).call(gateway, DELIVER, delivery_pb2.DeliveryReply.FromString)
        self._endpoint = endpoint
        self.got: list[tuple[int, int, int, int, int, int]] = []

    async def open(self) -> None:
        """Until the gateway takes deliveries."""
        await self._call.write(delivery_pb2.DeliveryBatch(relay=self._endpoint))
        async with asyncio.timeout(WAIT_S):
            reply = await self._call.read()
            assert reply is not None
            assert reply.ready

    async def send(self, *deliveries: bytes, devices: Sequence[delivery_pb2.MailDevice] = ()) -> None:
        """One batch."""
        batch = delivery_pb2.DeliveryBatch(devices=devices, deliveries=b"".join(deliveries), count=len(deliveries))
        await self._call.write(batch)

    async def acknowledged(self, *wanted: tuple[int, int, int, int]) -> None:
        """Until (session, lane, UpTo, map) are among what was acknowledged."""
        async with asyncio.timeout(WAIT_S):
            while not set(wanted) <= {item[2:] for item in self.got}:
                reply = await self._call.read()
                assert reply is not None
                self.got += [
                    (item.uin, item.device, item.session, item.lane, item.up_to, item.bits) for item in reply.acknowledgements
                ]

    async def status(self) -> str:
        """How the gateway ended the stream."""
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(StreamEnded) as ended:
                while await self._call.read() is not None:
                    pass
        return str(ended.value)


class Subscriber:
    """A gRPC client."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = wire_pb2_grpc.SubscriberStub(channel).Subscribe()
        self.mails: list[Delivery] = []

    async def open(self, uin: int, *, take_mail: bool = True) -> wire_pb2.SubscribeReply:
        """Say hello; the reply says who it is. The next one answers the request."""
        hello = wire_pb2.SubscribeHello(uin=uin, device=7, device_class="desk", mail=take_mail)
        await self._call.write(wire_pb2.SubscribeRequest(hello=hello, request=1 if take_mail else 0))
        return await self.read()

    async def read(self) -> wire_pb2.SubscribeReply:
        async with asyncio.timeout(WAIT_S):
            reply: wire_pb2.SubscribeReply = await self._call.read()
        return reply

    async def take(self, number: int) -> list[Delivery]:
        """The next mails."""
        while len(self.mails) < number:
            reply = await self.read()
            self.mails += split(reply.mail, reply.mail_count)
        taken, self.mails = self.mails[:number], self.mails[number:]
        return taken

    async def acknowledge(self, *ranges: tuple[int, int, int], request: int = 0) -> None:
        said = [wire_pb2.MailAcknowledgement(lane=lane, first=first, last=last) for lane, first, last in ranges]
        await self._call.write(wire_pb2.SubscribeRequest(mail_acknowledgements=said, request=request))

    def leave(self) -> None:
        """End the stream."""
        self._call.cancel()


class Stage:
    """The processes, and what a relay has to know of them."""

    def __init__(self, roles: Roles, gateway: Node, relay: Node, channel: grpc.aio.Channel) -> None:
        self.roles, self.gateway, self.relay, self.channel = roles, gateway, relay, channel

    async def device(self, uin: int, key: int, *, after: int = 0) -> delivery_pb2.MailDevice:
        """The connection of a device that takes mail, as relays know it. The test is no relay that the registry has: a guest.

        after: connect time of an earlier connection, which the relay may still know.
        """
        found: list[delivery_pb2.MailDevice] = []

        async def known() -> bool:
            async with grpc.aio.insecure_channel(f"{self.relay.host}:{self.relay.port}") as channel:
                request = membership_pb2.SnapshotRequest(endpoint=RELAY, role="relay", partition=0, partitions=1)
                async for chunk in membership_pb2_grpc.MembershipStub(channel).Snapshot(request):
                    values = [value for (value,) in struct.iter_unpack("<Q", chunk.values)]
                    for entry, value in zip(struct.iter_unpack("<QQQ", chunk.entries), values, strict=True):
                        if entry[:2] == (uin, key) and value & 4 and value >> 3 > after:
                            found.append(delivery_pb2.MailDevice(uin=uin, key=key, connect_time=value >> 3, device=NUMBER))
            return bool(found)

        await until(known, "a relay knows the device")
        return found[-1]

    async def metric(self, name: str) -> float:
        return await self.roles.metric(self.gateway, name)


@pytest.fixture
async def stage(roles: Roles) -> AsyncIterator[Stage]:
    """A gateway, the relay that confirms its devices, and Pi, which keeps the sessions of MQTT clients; of Xiu there is the layout
    alone. So all inboxes stay empty, and that relay delivers nothing."""
    await roles.layout(router=1, relay=1, broker=1, xiu=1, pi=1)
    for name in ("router-0", "relay-0", "pi-0"):
        roles.start(name, partition=0, cluster_guests=True)
    roles.start("gateway-0", drain_jitter_s=0.1, cluster_guests=True)
    _, relay, gateway, _ = await roles.running("router-0", "relay-0", "gateway-0", "pi-0")
    async with grpc.aio.insecure_channel(gateway.client_address) as channel:
        yield Stage(roles, gateway, relay, channel)


async def test_a_grpc_client_gets_mail_in_batches_and_its_acknowledgements_reach_the_relay(stage: Stage) -> None:
    uin, key = 77, device_key(7, device_class_of_name("desk"))
    client, relay = Subscriber(stage.channel), Relay(stage.gateway)
    assert (await client.open(uin)).uin == uin
    assert (await client.read()).request == 1
    device = await stage.device(uin, key)
    await relay.open()
    sent = [mail(uin, seq) for seq in range(1, 65)] + [mail(uin, 1, lane=0), mail(uin, 9, lane=2, flags=GAP)]
    await relay.send(*sent, devices=[device])
    got = await client.take(66)
    assert b"".join(encode(*item) for item in got) == b"".join(sent)
    await client.acknowledge((1, 3, 4), (0, 1, 1), (1, 10, 10))
    await relay.acknowledged((1, 1, 0, 0b1000001100), (1, 0, 1, 0))
    await client.acknowledge((1, 1, 2), (2, 9, 9), (3, 1, 1))
    await relay.acknowledged((1, 1, 4, 0b100000), (1, 2, 9, 0))
    assert {item[:2] for item in relay.got} == {(uin, NUMBER)}
    assert (await stage.metric("mail_delivered_total"), await stage.metric("mail_unacknowledged")) == (65, 59)
    assert await stage.metric("mail_acknowledgements_unknown_total") == 1

    # Another relay took over: a higher session begins anew, what comes again is marked, the older session is refused.
    other = Relay(stage.gateway, RELAY + 1)
    await other.open()
    await other.send(mail(uin, 5, session=2), mail(uin, 65, session=2), devices=[device])
    again = await client.take(2)
    assert [(item.seq, item.session, item.flags) for item in again] == [(5, 2, REDELIVERED), (65, 2, 0)]
    await relay.send(mail(uin, 66))
    await other.send(mail(uin, 5, session=2, flags=REDELIVERED))
    await other.acknowledged((2, 1, 4, ((1 << 59) - 1) << 1))
    await client.acknowledge((1, 5, 65))
    await other.acknowledged((2, 1, 65, 0))
    assert await stage.metric("mail_sessions_refused_total") == 1
    assert await stage.metric("mail_repeats_dropped_total") == 1

    # A gateway that ends in good order ends the streams, and first waits for its clients to move.
    client.leave()
    await stage.roles.end("gateway-0")
    assert [(await each.status()).partition(":")[0] for each in (relay, other)] == ["UNAVAILABLE"] * 2


async def test_what_a_gateway_cannot_take_is_refused_with_a_clear_code(stage: Stage) -> None:
    client = Subscriber(stage.channel)
    await client.open(5, take_mail=False)
    await client.acknowledge((1, 1, 1), request=9)
    refused = await client.read()
    assert (refused.request, refused.error_code, "takes no mail" in refused.error_text) == (9, "INVALID_ARGUMENT", True)
    for batch, text in (
        (delivery_pb2.DeliveryBatch(relay=RELAY, deliveries=mail(5, 1)[:-1], count=1), "ends within a record"),
        (delivery_pb2.DeliveryBatch(relay=RELAY, deliveries=mail(5, 1, lane=4), count=1), "lane 4"),
        (delivery_pb2.DeliveryBatch(deliveries=mail(5, 1), count=1), "names the relay"),
    ):
        relay = Relay(stage.gateway)
        await relay._call.write(batch)
        status = await relay.status()
        assert (status.startswith("INVALID_ARGUMENT: "), text in status) == (True, True), status
    assert await stage.metric("mail_streams_refused_total") == 3
    assert stage.roles.log("gateway-0").count("mail_stream_refused") == 2, "once for each relay"
    older, newer = Relay(stage.gateway), Relay(stage.gateway)
    await older.open()
    await newer.open()
    assert (await older.status()).startswith("UNAVAILABLE: ")
    await newer.send(mail(5, 1))
    await until(lambda: at_least(stage.metric("mail_without_connection_total"), 1), "it is dropped")

    # Of a cluster that keeps no mail.
    await stage.roles.layout("/none", router=1, broker=1)
    stage.roles.start("gateway-none", "/none", drain_jitter_s=0.1)
    (gateway,) = await stage.roles.running("gateway-none")
    async with grpc.aio.insecure_channel(gateway.client_address) as channel:
        client = Subscriber(channel)
        await client.open(5)
        refused = await client.read()
    assert (refused.request, refused.error_code) == (1, "NOT_SERVED")
    assert "--pis 1" in refused.error_text


class Stock:
    """A stock MQTT client that acknowledges when it is told to."""

    def __init__(self, name: str, uin: int, *, clean: bool) -> None:
        self.client = paho.Client(CallbackAPIVersion.VERSION2, name, clean_session=clean, manual_ack=True)
        self.client.username_pw_set(str(uin))
        self.present: queue.Queue[bool] = queue.Queue()
        self.granted: queue.Queue[list[int]] = queue.Queue()
        self.messages: queue.Queue[tuple[str, bytes, int, int, bool]] = queue.Queue()
        self.client.on_connect = lambda _c, _u, flags, *_: self.present.put(flags.session_present)
        self.client.on_subscribe = lambda _c, _u, _m, codes, _p: self.granted.put([code.value for code in codes])
        self.client.on_message = lambda _c, _u, m: self.messages.put((m.topic, bytes(m.payload), m.qos, m.mid, m.dup))

    def connect(self, gateway: Node, *, present: bool = False) -> None:
        self.client.connect(gateway.mqtt_host, gateway.mqtt_port, keepalive=60)
        self.client.loop_start()
        assert self.present.get(timeout=WAIT_S) is present

    def subscribe(self, topic: str, qos: int) -> list[int]:
        self.client.subscribe(topic, qos)
        return self.granted.get(timeout=WAIT_S)

    def take(self, number: int) -> list[tuple[str, bytes, int, int, bool]]:
        return [self.messages.get(timeout=WAIT_S) for _ in range(number)]

    def end(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


def packet(uin: int, seq: int, *, lane: int = 1, dup: bool = False) -> tuple[str, bytes, int, int, bool]:
    return f"user/{uin}", b"mail %d" % seq, 1, packet_id_of(lane, seq), dup


async def test_a_stock_mqtt_client_gets_mail_with_qos_1_and_acknowledges_it_in_any_order(stage: Stage) -> None:
    uin, name = 88, "phone:one"
    key = device_key(device_of_name(name), device_class_of_name("phone"))
    stock, relay = Stock(name, uin, clean=False), Relay(stage.gateway)
    await relay.open()
    try:
        await asyncio.to_thread(stock.connect, stage.gateway)
        assert await asyncio.to_thread(stock.subscribe, f"user/{uin}", 0) == [0], "chat alone"
        assert await asyncio.to_thread(stock.subscribe, f"user/{uin}", 1) == [1]
        device = await stage.device(uin, key)
        sent = [mail(uin, seq) for seq in range(4_093, 4_099)]
        await relay.send(*sent, mail(uin, 4_099, flags=GAP), mail(uin, 1, lane=0), devices=[device])
        got = await asyncio.to_thread(stock.take, 7)
        assert got == [*(packet(uin, seq) for seq in range(4_093, 4_099)), packet(uin, 1, lane=0)]
        for seq in (4_096, 4_093):
            stock.client.ack(packet_id_of(1, seq), 1)
        stock.client.ack(packet_id_of(0, 1), 1)
        stock.client.ack(packet_id_of(2, 1), 1)
        # 4,099 is the gap marker, which the gateway acknowledges for the client.
        await relay.acknowledged((1, 1, 4_093, 0b100100), (1, 0, 1, 0))
        assert await stage.metric("mail_gaps_untold_total") == 1

        # The relay opened another session: what is unacknowledged comes again, marked by it or by the gateway.
        again = [mail(uin, seq, session=2, flags=REDELIVERED if seq == 4_094 else 0) for seq in (4_094, 4_095, 4_097, 4_098)]
        await relay.send(*again, mail(uin, 4_100, session=2), mail(uin, 4_094, session=2, flags=REDELIVERED))
        got = await asyncio.to_thread(stock.take, 5)
        seqs = (4_094, 4_095, 4_097, 4_098)
        assert got == [*(packet(uin, seq, dup=True) for seq in seqs), packet(uin, 4_100)]
        for seq in (4_100, 4_097, 4_094, 4_095, 4_098):
            stock.client.ack(packet_id_of(1, seq), 1)
        await relay.acknowledged((2, 1, 4_100, 0))
        assert await stage.metric("mail_unacknowledged") == 0

        # It ends in the same breath as it acknowledges.
        await relay.send(mail(uin, 4_101, session=2))
        await asyncio.to_thread(stock.take, 1)
        stock.client.ack(packet_id_of(1, 4_101), 1)
        await asyncio.to_thread(stock.end)
        await relay.acknowledged((2, 1, 4_101, 0))

        # The session that Pi kept is present: mail comes again without a SUBSCRIBE.
        await asyncio.to_thread(partial(stock.connect, stage.gateway, present=True))
        device = await stage.device(uin, key, after=device.connect_time)
        await relay.send(mail(uin, 4_102, session=3), devices=[device])
        assert await asyncio.to_thread(stock.take, 1) == [packet(uin, 4_102)]
        stock.client.ack(packet_id_of(1, 4_102), 1)
        await relay.acknowledged((3, 1, 4_102, 0))
    finally:
        await asyncio.to_thread(stock.end)


async def test_who_wants_no_session_or_no_qos_1_takes_no_mail(stage: Stage) -> None:
    stocks = [Stock("none", 90, clean=True), Stock("zero", 90, clean=False)]
    try:
        for stock, qos in zip(stocks, (1, 0), strict=True):
            await asyncio.to_thread(stock.connect, stage.gateway)
            assert await asyncio.to_thread(stock.subscribe, "user/90", qos) == [0]
        assert await asyncio.to_thread(stocks[1].subscribe, "user/90", 2) == [1]
        assert await stage.metric("mail_connections") == 1
        assert await asyncio.to_thread(stocks[1].subscribe, "user/90", 0) == [0]
        assert await stage.metric("mail_connections") == 0
        assert await asyncio.to_thread(stocks[1].subscribe, "room/90", 1) == [1]
        assert await stage.metric("mail_connections") == 0
    finally:
        for stock in stocks:
            await asyncio.to_thread(stock.end)
