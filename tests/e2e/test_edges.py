"""Big rooms, and a cluster at its edges: who sends too fast, reads too slowly or only connects hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import pixiu
from pixiu.errors import InvalidArgument, Overloaded
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.alerts import firing
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.waiting import until
from tools.cli.http import samples
from tools.load.mqtt import ConnectionRefused, MQTTClient, SubscriptionRefused

WAIT_S = 60.0
BIG = 1000
SLOW = 6
"""Clients that do not read."""
FLOOD = 1500
"""Messages to each of them."""
PENDING = 100
SETTINGS = (
    "cluster.big_rooms=[1000,1010]",
    "cluster.topic_rooms=devices=2:64",
    "proxy.big_room_vrooms_per_s=400",
    f"gateway.max_pending_connections={PENDING}",
    "gateway.connection_buffer_bytes=524288",
    "gateway.slow_consumer_timeout_s=2",
)
LIMITS = (
    "proxy.publisher_messages_per_s=1000",
    "gateway.client_messages_per_s=200",
    "gateway.connect_rate_per_s=5",
    "gateway.connect_burst=5",
)


@contextmanager
def edges_cluster(folder: Path, settings: tuple[str, ...], gateways: int) -> Iterator[LocalCluster]:
    """One router, two brokers."""
    arguments = ["--broker-replicas", "1", "--routers", "1", "--router-replicas", "1", "--gateways", str(gateways)]
    for setting in settings:
        arguments += ["--set", setting]
    with running_cluster(folder, *arguments, layout="nodes") as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With big rooms, and bounds that a test can reach."""
    with edges_cluster(tmp_path_factory.mktemp("edges"), SETTINGS, 2) as running:
        yield running


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """With rates that a test can exceed."""
    with edges_cluster(tmp_path_factory.mktemp("limited"), LIMITS, 1) as running:
        yield running


def metrics_page(process: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(f"{process['http']}/metrics", timeout=WAIT_S) as reply:
        found: bytes = reply.read()
        return found


def metrics(process: dict[str, Any]) -> dict[str, float]:
    """What a process counts. The labels that all samples have are left out."""
    return {name + said(labels): value for name, labels, value in samples(metrics_page(process))}


def said(labels: dict[str, str]) -> str:
    own = [f'{name}="{text}"' for name, text in labels.items() if name not in ("role", "partition")]
    return f"{{{','.join(own)}}}" if own else ""


def metric(process: dict[str, Any], name: str) -> float:
    """One of them; 0 where nothing was counted yet."""
    return metrics(process).get(f"pixiu_{process['role']}_{name}", 0.0)


def resident_bytes(process: dict[str, Any]) -> int:
    """The memory that a process has."""
    return int(Path(f"/proc/{process['pid']}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Member:
    """An MQTT client that keeps what it gets."""

    def __init__(self, port: int, uin: int) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.client = MQTTClient("127.0.0.1", port, f"edges-{uin}-{port}", str(uin))
        self.client.on_message = lambda topic, payload: self.messages.append((topic, payload))


@asynccontextmanager
async def members(ports: list[int], topic: str, uins: range) -> AsyncIterator[list[Member]]:
    """Clients on all gateways, subscribed."""
    found = [Member(ports[number % len(ports)], uin) for number, uin in enumerate(uins)]
    try:
        for start in range(0, len(found), 50):
            part = found[start : start + 50]
            await asyncio.gather(*(member.client.connect() for member in part))
            await asyncio.gather(*(member.client.subscribe([topic]) for member in part))
        yield found
    finally:
        await asyncio.gather(*(member.client.close() for member in found))


async def test_a_big_room_reaches_every_member_once_and_in_order(cluster: LocalCluster) -> None:
    """Members in all VRooms, on two gateways, by MQTT and by the SDK; publishers of all kinds."""
    ports = cluster.mqtt_ports()
    async with (
        members(ports, f"room/{BIG}", range(10_000, 10_150)) as found,
        pixiu.connect(cluster.target, uin=77) as px,
        px.subscribe(room=BIG) as subscription,
    ):
        await asyncio.wait_for(found[0].client.publish_with_ack(f"room/{BIG}", b"mqtt, acknowledged"), WAIT_S)
        found[1].client.publish(f"room/{BIG}", b"mqtt")
        for number in range(20):
            px.room(BIG).send_soon(b"sdk %d" % number)
        await px.flush()
        await px.room(BIG).signal(b"a signal", receipt=True)
        sent = [b"mqtt, acknowledged", b"mqtt", b"a signal", *(b"sdk %d" % number for number in range(20))]
        expected = sorted(sent)
        await until(lambda: all(len(member.messages) >= len(sent) for member in found), "not everybody got everything")
        for member in found:
            assert sorted(payload for _, payload in member.messages) == expected
            assert {topic for topic, _ in member.messages} == {f"room/{BIG}"}
            assert [payload for _, payload in member.messages if payload.startswith(b"sdk")] == [b"sdk %d" % n for n in range(20)]
        got: list[tuple[int, bytes]] = []
        async with asyncio.timeout(WAIT_S):
            async for message in subscription:
                assert message.room is not None
                got.append((message.room, message.payload))
                if len(got) == len(sent):
                    break
        assert sorted(got) == [(BIG, payload) for payload in expected]


async def test_topics_by_two_levels_reach_who_asked_and_no_other_gateway(cluster: LocalCluster) -> None:
    """By MQTT and by the SDK, from both; a gateway whose clients asked for one device gets nothing of another."""
    rooms = TopicRooms("devices=2:64")
    mine, other = (
        "devices/7/telemetry",
        next(
            topic
            for number in range(8, 99)
            if rooms.room(topic := f"devices/{number}/telemetry") != rooms.room("devices/7/telemetry")
        ),
    )
    ports = cluster.mqtt_ports()
    async with (
        members(ports[:1], mine, range(20_000, 20_002)) as near,
        members(ports[1:2], other, range(20_010, 20_012)) as far,
        pixiu.connect(cluster.target, uin=78) as px,
        px.subscribe(topics=[mine]) as subscription,
    ):
        before = [metric(gateway, "without_members_total") for gateway in cluster.processes("gateway")]
        for number in range(10):
            for topic in (mine, other):
                await asyncio.wait_for(near[0].client.publish_with_ack(topic, b"mqtt %d" % number), WAIT_S)
                px.topic(topic).send_soon(b"sdk %d" % number)
            far[0].client.publish(mine, b"quick %d" % number)
        await px.flush()
        await until(lambda: all(len(one.messages) >= 30 for one in near) and all(len(one.messages) >= 20 for one in far))
        expected = {b"%s %d" % (who, number) for who in (b"mqtt", b"sdk", b"quick") for number in range(10)}
        assert all({payload for _, payload in one.messages} == expected and len(one.messages) == 30 for one in near)
        assert all({topic for topic, _ in one.messages} == {other} and len(one.messages) == 20 for one in far)
        got: list[tuple[str | None, bytes]] = []
        async with asyncio.timeout(WAIT_S):
            async for message in subscription:
                got.append((message.topic, message.payload))
                if len(got) == 30:
                    break
        assert sorted(got) == sorted((mine, payload) for payload in expected)
        # By the first level alone each gateway would have got, and dropped, what the other one's clients asked for.
        assert [metric(gateway, "without_members_total") for gateway in cluster.processes("gateway")] == before


async def test_a_vrooms_own_number_is_refused_everywhere(cluster: LocalCluster) -> None:
    vroom = BIG * 64 + 5
    async with pixiu.connect(cluster.target, uin=77) as px:
        with pytest.raises(InvalidArgument, match=f"publish to the big room {BIG}"):
            await px.room(vroom).send(b"x", timeout_s=WAIT_S)
        with pytest.raises(InvalidArgument, match=f"join the big room {BIG}"):
            async with px.subscribe(room=vroom):
                pass
    member = Member(cluster.mqtt_ports()[0], 5)
    await member.client.connect()
    with pytest.raises(SubscriptionRefused):
        await member.client.subscribe([f"room/{vroom}"])
    await member.client.close()


def deaf_client(port: int, room: int) -> socket.socket:
    """An MQTT client that subscribes to a room and then reads nothing more."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect(("127.0.0.1", port))
    name, topic = b"deaf-%d" % room, b"room/%d" % room
    hello = b"\x00\x04MQTT\x04\x02\x00\x00" + struct.pack(">H", len(name)) + name
    sock.sendall(bytes((0x10, len(hello))) + hello)
    filters = b"\x00\x01" + struct.pack(">H", len(topic)) + topic + b"\x00"
    sock.sendall(bytes((0x82, len(filters))) + filters)
    got = b""
    while len(got) < 9:
        got += sock.recv(9 - len(got))
    assert got == b"\x20\x02\x00\x00\x90\x03\x00\x01\x00"
    return sock


async def test_qos_2_is_served_once_and_no_reason_to_connect_again(cluster: LocalCluster) -> None:
    port = cluster.mqtt_ports()[0]
    async with members([port], "room/497", range(30_000, 30_001)) as (member,):
        sock = await asyncio.to_thread(deaf_client, port, 496)
        with sock:
            sock.settimeout(WAIT_S)
            message = b"\x00\x08room/497" + b"\x00\x05" + b"once"
            for first in (0x34, 0x3C):  # the second with DUP
                sock.sendall(bytes((first, len(message))) + message)
                assert await asyncio.to_thread(sock.recv, 4) == b"\x50\x02\x00\x05"
            sock.sendall(b"\x62\x02\x00\x05")
            assert await asyncio.to_thread(sock.recv, 4) == b"\x70\x02\x00\x05"
            await asyncio.wait_for(member.client.publish_with_ack("room/497", b"end"), WAIT_S)
            await until(lambda: (("room/497", b"end")) in member.messages)
            assert [payload for _, payload in member.messages] == [b"once", b"end"]


async def test_clients_that_do_not_read_slow_nobody_and_memory_stays_bounded(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[0]
    page = metrics_page(gateway)
    port = int(gateway["mqtt"].rpartition(":")[2])
    deaf = [await asyncio.to_thread(deaf_client, port, 500 + number) for number in range(SLOW)]
    before = resident_bytes(gateway)
    most = before
    try:
        async with members([port], "room/499", range(1, 6)) as found, members([port], "room/498", range(9, 10)) as (sender,):
            for number in range(FLOOD):
                for room in range(500, 500 + SLOW):
                    sender.client.publish(f"room/{room}", b"x" * 8000)
                sender.client.publish("room/499", b"%d" % number)
                if number % 20 == 19:  # what is faster than the cluster may be dropped, whoever reads: QoS 0
                    await sender.client.drain()
                    await until(
                        lambda sent=number + 1: all(len(member.messages) == sent for member in found),  # type: ignore[misc]
                        "honest clients lost messages",
                    )
                    most = max(most, resident_bytes(gateway))
            expected = [b"%d" % number for number in range(FLOOD)]
            assert all([payload for _, payload in member.messages] == expected for member in found)
            most = max(most, resident_bytes(gateway))
            await until(
                lambda: metric(gateway, 'connections_closed_total{reason="slow_consumer"}') == SLOW,
                "the deaf clients are still there",
            )
            assert all(member.client.connected for member in found)
        for sock in deaf:
            # An ordinary close would keep in the kernel what they did not take, for minutes.
            with pytest.raises(ConnectionResetError):
                while await asyncio.to_thread(sock.recv, 1 << 16):
                    pass
    finally:
        for sock in deaf:
            sock.close()
    assert "PixiuSlowClients" in firing({"gateway": page}, {"gateway": metrics_page(gateway)})
    counted = metrics(gateway)
    # How many are dropped before they are disconnected is a matter of how fast this machine sends.
    assert counted["pixiu_gateway_slow_consumer_dropped_total"] > 10 * SLOW
    assert counted['pixiu_gateway_connections_behind_total{grade="stalled"}'] >= SLOW
    assert counted['pixiu_gateway_connections_behind{grade="stalled"}'] == 0
    # 72 MB were sent to those that do not read; each may keep half a megabyte waiting.
    assert most - before < 40 << 20


async def test_a_stream_that_is_not_read_is_told_and_ended(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[0]
    port = int(gateway["mqtt"].rpartition(":")[2])
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with grpc.aio.insecure_channel(gateway["client_address"], options=options) as channel:
        call = wire_pb2_grpc.SubscriberStub(channel).Subscribe()
        await call.write(wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(client="deaf"), join_rooms=[497], request=1))
        while True:
            reply = await asyncio.wait_for(call.read(), WAIT_S)
            assert isinstance(reply, wire_pb2.SubscribeReply)
            if reply.request == 1:
                break
        closed = metric(gateway, 'connections_behind_total{grade="stalled"}')
        async with members([port], "room/496", range(9, 10)) as (sender,):

            async def flood() -> None:
                while metric(gateway, 'connections_behind_total{grade="stalled"}') == closed or metric(
                    gateway, 'connections_behind{grade="stalled"}'
                ):
                    for _ in range(50):
                        sender.client.publish("room/497", b"x" * 8000)
                    await sender.client.drain()
                    await asyncio.sleep(0.05)

            await asyncio.wait_for(flood(), WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async with asyncio.timeout(WAIT_S):
                while await call.read():
                    pass
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "does not read" in (raised.value.details() or "")


@pytest.mark.parametrize(
    ("role", "method"), [("proxy", "Publisher/Publish"), ("proxy", "Mailer/Send"), ("gateway", "Subscriber/Subscribe")]
)
async def test_garbage_on_a_stream_is_the_callers_fault(cluster: LocalCluster, role: str, method: str) -> None:
    async with grpc.aio.insecure_channel(cluster.processes(role)[0]["client_address"]) as channel:
        call: Any = channel.stream_stream(f"/pixiu.v1.{method}")()
        await call.write(b"\xff" * 40)
        async with asyncio.timeout(WAIT_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "not a message of this method" in str(await call.details())


async def test_a_storm_of_pings_holds_up_nobody_and_leaves_no_lines_in_the_log(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[0]
    port = int(gateway["mqtt"].rpartition(":")[2])

    def storm(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock, contextlib.suppress(OSError):
            name = b"storm%03d" % number
            sock.sendall(b"\x10\x14\x00\x04MQTT\x04\x02\x00\x3c\x00\x08" + name)
            assert sock.recv(4) == b"\x20\x02\x00\x00"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.settimeout(3)
            sock.sendall(b"\xc0\x00" * 400_000)

    async with members([port], "room/495", range(1, 3)) as (sender, receiver):
        storms = asyncio.gather(*(asyncio.to_thread(storm, number) for number in range(8)))
        for number in range(100):
            sender.client.publish("room/495", b"%d" % number)
            await sender.client.drain()
            await until(lambda sent=number + 1: len(receiver.messages) == sent, "an innocent client lost a message")  # type: ignore[misc]
        await storms
        assert sender.client.connected
    logs = list((cluster.folder / "run/logs").glob("node-*.log"))
    assert logs
    assert not [path for path in logs if b"socket.send() raised" in path.read_bytes()]


async def test_a_storm_of_half_open_connections_keeps_nobody_out(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[1]
    port = int(gateway["mqtt"].rpartition(":")[2])
    half_open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    async with members([port], "room/480", range(1, 2)) as (early,):
        try:
            for _ in range(300):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"\x10")  # the first byte of a CONNECT, and never the rest
                half_open.append((reader, writer))
            async with members([port], "room/480", range(2, 22)) as late:
                for number, member in enumerate(late):
                    await asyncio.wait_for(member.client.publish_with_ack("room/480", b"%d" % number), WAIT_S)
                everybody = [early, *late]
                await until(lambda: all(len(member.messages) == 20 for member in everybody), "somebody was not heard")
            assert metric(gateway, "connections_evicted_total") >= 300 - PENDING
            assert metric(gateway, "connections_pending") <= PENDING
            for reader, _ in half_open[: 300 - PENDING]:
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        finally:
            for _, writer in half_open:
                writer.close()


async def test_a_publisher_over_its_rate_is_told_when_to_try_again(limited: LocalCluster) -> None:
    async with pixiu.connect(limited.target, uin=77) as px:
        receipts = [px.room(42).send_soon(b"%d" % number) for number in range(6000)]
        results = await asyncio.wait_for(asyncio.gather(*receipts, return_exceptions=True), WAIT_S)
        refused = [result for result in results if result is not None]
        assert refused
        assert len(refused) < len(results)
        assert all(isinstance(error, Overloaded) and error.retry_after_ms > 0 for error in refused)
        assert "sends faster than proxy.publisher_messages_per_s" in str(refused[0])
        await px.room(42).send(b"again", timeout_s=WAIT_S)  # after as long as the refusal says


async def test_a_clients_name_exempts_it_from_no_rate(limited: LocalCluster) -> None:
    """A client that takes a gateway's name has the rates of a client."""
    (gateway,), (proxy, *_) = limited.processes("gateway"), limited.processes("proxy")
    batches, records = 4, [encode(Kind.ROOM, 42, b"x", 1000 + number, flags=Flag.TO_ROOM) for number in range(3000)]
    async with grpc.aio.insecure_channel(proxy["client_address"]) as channel:
        call: Any = wire_pb2_grpc.PublisherStub(channel).Publish()
        hello = wire_pb2.PublishHello(client=f"gateway-{gateway['endpoint']}")
        await call.write(wire_pb2.PublishRequest(hello=hello))
        await call.read()
        for batch in range(batches):
            position = 1 + batch * len(records)
            await call.write(wire_pb2.PublishRequest(batch=b"".join(records), count=len(records), position=position))
        failed: list[str] = []
        async with asyncio.timeout(WAIT_S):
            while (reply := await call.read()) is not grpc.aio.EOF:
                failed += [failure.code for failure in reply.failures]
                if reply.up_to >= batches * len(records):
                    break
        call.cancel()
    assert set(failed) == {"OVERLOADED"}


async def test_an_mqtt_client_over_its_rate_waits_at_qos_1_and_loses_qos_0(limited: LocalCluster) -> None:
    (gateway,) = limited.processes("gateway")
    port = int(gateway["mqtt"].rpartition(":")[2])
    async with members([port], "room/43", range(1, 2)) as (reader,), members([port], "room/44", range(2, 3)) as (sender,):
        answers = [sender.client.publish_with_ack("room/43", b"%d" % number) for number in range(600)]
        await asyncio.wait_for(asyncio.gather(*answers), WAIT_S)
        await until(lambda: len(reader.messages) == 600, "a message of QoS 1 was lost")
        assert [payload for _, payload in reader.messages] == [b"%d" % number for number in range(600)]
        assert metric(gateway, "publish_over_rate_held_total") > 0
        for number in range(2000):
            sender.client.publish("room/43", b"%d" % number)
        await asyncio.wait_for(sender.client.publish_with_ack("room/43", b"end"), WAIT_S)
        await until(lambda: any(payload == b"end" for _, payload in reader.messages), "the last message is missing")
        dropped = metric(gateway, "publish_over_rate_dropped_total")
        assert dropped > 0
        await until(lambda: len(reader.messages) == 600 + 2000 + 1 - dropped, "what was not dropped did not all arrive")


async def test_a_storm_of_clients_is_let_in_at_the_rate_and_told_so(limited: LocalCluster) -> None:
    (gateway,) = limited.processes("gateway")
    port = int(gateway["mqtt"].rpartition(":")[2])
    refused: list[ConnectionRefused] = []

    async def come_in(number: int) -> MQTTClient:
        while True:
            client = MQTTClient("127.0.0.1", port, f"storm-{number}", str(5000 + number))
            try:
                await client.connect()
            except ConnectionRefused as error:
                refused.append(error)
            else:
                return client

    clients = await asyncio.wait_for(asyncio.gather(*(come_in(number) for number in range(20))), WAIT_S)
    try:
        assert refused
        assert {error.return_code for error in refused} == {3}
        assert metric(gateway, "connections_refused_total") >= len(refused)
        async with grpc.aio.insecure_channel(gateway["client_address"]) as channel:
            stub = wire_pb2_grpc.SubscriberStub(channel)
            told: list[grpc.aio.AioRpcError] = []

            async def subscribe(uin: int) -> None:
                hello = wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(uin=uin))
                try:
                    async for _ in stub.Subscribe(iter([hello])):
                        pass
                except grpc.aio.AioRpcError as error:
                    told.append(error)

            await asyncio.wait_for(asyncio.gather(*(subscribe(uin) for uin in range(1, 30))), WAIT_S)
            assert told
            assert {error.code() for error in told} == {grpc.StatusCode.UNAVAILABLE}
            for error in told:
                assert int(error.trailing_metadata()["grpc-retry-pushback-ms"]) >= 500
    finally:
        await asyncio.gather(*(client.close() for client in clients))
