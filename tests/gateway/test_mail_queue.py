"""Mail that waits for a slow connection, in the queue, in a Subscribe stream, and before an MQTT transport."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import Connack, ConnackCode, Connect, Publish, Side
from cluster.mqtt.server import ServerSession
from gateway.clients.backlog import Backlog
from gateway.grpc.subscriber import MAX_BATCH_BYTES, _Stream
from gateway.mail.queue import MAX_RANGES, MAX_WAITING, OVERRUN, MailQueue, acknowledged_ranges
from gateway.mqtt.connection import WRITE_BYTES, MQTTConnection
from pixiu.errors import InvalidArgument
from pixiu.rpc.duplex import Duplex
from pixiu.wire.envelope import REDELIVERED, Delivery, split
from pixiu.wire.record import Kind, encode
from pixiu.wire.v1 import wire_pb2
from tests.gateway.world import World, runs_of
from tests.support.caller import Caller


def item(seq: int, size: int = 10, flags: int = 0) -> Delivery:
    return Delivery(5000 + seq, seq, 7, 1, 3, 1, flags, encode(Kind.MAIL, 7, bytes(size), 100 + seq))


def said(lane: int, first: int, last: int) -> wire_pb2.MailAcknowledgement:
    return wire_pb2.MailAcknowledgement(lane=lane, first=first, last=last)


def test_what_waits_leaves_in_order_a_batch_at_a_time_and_at_least_one() -> None:
    queue = MailQueue()
    assert queue.put([(b"a" * 60, 3), (b"b" * 60, 1), (b"c" * 60, 2)], anew=False)
    assert len(queue) == 6
    assert queue.take(120) == (b"a" * 60 + b"b" * 60, 4)
    assert queue.take(1) == (b"c" * 60, 2)
    assert (queue.take(1), len(queue)) == ((b"", 0), 0)


def test_a_new_session_takes_the_place_of_what_waits() -> None:
    queue = MailQueue()
    queue.put([(b"old", 1)] * 100, anew=False)
    assert queue.put([(b"new", 1)], anew=True)
    assert queue.take(1000) == (b"new", 1)


def test_more_than_the_windows_hold_is_an_overrun() -> None:
    queue = MailQueue()
    assert queue.put([(b"x", MAX_WAITING)], anew=False)
    assert not queue.put([(b"x", 1)], anew=False)


@pytest.mark.parametrize("wrong", [(4, 1, 1), (0, 0, 1), (1, 5, 4)])
def test_a_range_that_is_none_is_refused(wrong: tuple[int, int, int]) -> None:
    assert acknowledged_ranges([said(3, 5, 5), said(0, 1, 9)]) == [(3, 5, 5), (0, 1, 9)]
    with pytest.raises(InvalidArgument, match="lane"):
        acknowledged_ranges([said(0, 1, 1), said(*wrong)])


def test_ranges_without_end_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="send several"):
        acknowledged_ranges([said(0, 1, 1)] * (MAX_RANGES + 1))


async def test_a_subscribe_stream_joins_what_came_while_the_client_did_not_read() -> None:
    stream, call = _Stream(World().clients, ""), Caller(last=False)
    duplex: Duplex[wire_pb2.SubscribeReply, wire_pb2.SubscribeRequest] = Duplex(call, lambda _: None, stream.give, work=stream.work)
    running = asyncio.create_task(duplex.run())
    stream.deliver_mail(runs_of([item(1)]), True)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for seq in range(2, 65):
        stream.deliver_mail(runs_of([item(seq, MAX_BATCH_BYTES // 40)]), False)
    for _ in range(4):
        call.reads.release()
    async with asyncio.timeout(30):
        while len(call.got) < 3:
            await asyncio.sleep(0)
    found = [split(reply.mail, reply.mail_count) for reply in call.got]
    assert len(found[0]) == 1
    assert [one.seq for batch in found for one in batch] == list(range(1, 65))
    assert max(len(reply.mail) for reply in call.got) <= MAX_BATCH_BYTES
    stream.deliver_mail(runs_of([item(seq) for seq in range(100, 101 + MAX_WAITING)]), False)
    assert stream.closing == OVERRUN
    duplex.end("")
    call.reads.release()
    await running


class Transport:
    """Takes what is written until it has `most` bytes."""

    def __init__(self, connection: MQTTConnection, most: int) -> None:
        self.connection, self.most = connection, most
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data
        if len(self.data) >= self.most:
            self.connection.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


def mqtt_client(most: int) -> tuple[MQTTConnection, Transport, World]:
    world = World()
    connection = MQTTConnection(world.clients)
    transport: Any = Transport(connection, most)
    connection.uin = 7
    connection._transport = transport
    connection._session = session = ServerSession(0.0, "assigned")
    session.receive(codec.encode(Connect("phone", False, 0, "7")), 0.0)
    return connection, transport, world


def packets(data: bytes) -> list[Publish]:
    decoder = codec.Decoder(Side.CLIENT)
    decoder.feed(codec.encode(Connack(False, ConnackCode.ACCEPTED)))
    return [packet for packet in decoder.feed(data) if isinstance(packet, Publish)]


async def test_mail_waits_for_an_mqtt_client_that_does_not_read_and_none_of_it_is_dropped() -> None:
    connection, transport, world = mqtt_client(100)
    connection.deliver_mail(runs_of([item(seq, 1000, REDELIVERED if seq == 3 else 0) for seq in range(1, 65)]), True)
    connection.deliver_mail(runs_of([item(seq, 1000) for seq in range(65, 129)]), False)
    first = len(packets(transport.data))
    assert 0 < first <= WRITE_BYTES // 1000
    assert not connection._backlog, "its own queue"
    transport.most = 1 << 30
    connection.resume_writing()
    got = packets(transport.data)
    assert [packet.packet_id for packet in got] == [1 << 12 | seq + 1 for seq in range(1, 129)]
    assert [packet.packet_id for packet in got if packet.dup] == [1 << 12 | 4]
    assert {(packet.topic, packet.qos, packet.payload) for packet in got} == {("user/7", 1, bytes(1000))}
    assert world.closed_for == []


async def test_an_overrun_ends_an_mqtt_connection() -> None:
    connection, transport, world = mqtt_client(1)
    connection.deliver_mail(runs_of([item(5000)]), True)
    assert transport.data
    connection.deliver_mail(runs_of([item(seq) for seq in range(1, MAX_WAITING + 2)]), False)
    assert world.closed_for == [CloseReason.MAIL_OVERRUN.value]
    connection.deliver_mail(runs_of([item(1)]), False)
    assert isinstance(connection._backlog, Backlog)
    assert not connection._backlog
