"""Signals through real processes: once across gateways, across the restart of one, and while a proxy and a broker die."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import pixiu
from gateway.delivery.signal_table import folder_name
from pixiu.discovery.target import parse_address
from pixiu.ids import snowflake
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.cluster import LocalCluster, wait_for
from tests.support.waiting import until

WAIT_S = 60.0
NOBODYS_WORKER = 4000
"""Of the SnowflakeIDs that a test makes itself."""


async def take(subscription: pixiu.Subscription, number: int) -> list[pixiu.Message]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(subscription) for _ in range(number)]


async def nothing_more(px: pixiu.Client, room: int, *subscriptions: pixiu.Subscription) -> None:
    """What is sent last, by the same way, is what comes next."""
    await px.room(room).send(b"the end")
    for subscription in subscriptions:
        (message,) = await take(subscription, 1)
        assert (message.payload, message.signal) == (b"the end", False)


async def subscribed_at(target: str, address: str, room: int) -> tuple[pixiu.Client, pixiu.Subscription]:
    """A client of one gateway: by its name it chooses its gateway."""
    for number in range(100):
        client = await pixiu.connect(target, client=f"signals-{number}").open()
        subscription = client.subscribe(room=room)
        await subscription.ready(timeout_s=WAIT_S)
        if subscription.gateway == address:
            return client, subscription
        await client.close()
    raise AssertionError(f"no client chose gateway {address}")


async def test_signals_reach_clients_of_every_gateway_and_kind_once(cluster: LocalCluster) -> None:
    room, signals = 8042, 200
    got: queue.Queue[bytes] = queue.Queue()
    joined: queue.Queue[bool] = queue.Queue()
    mqtt = paho.Client(CallbackAPIVersion.VERSION2, client_id="signals")
    mqtt.on_message = lambda _c, _u, message: got.put(bytes(message.payload))
    mqtt.on_subscribe = lambda *_: joined.put(True)
    mqtt.connect("127.0.0.1", cluster.mqtt_ports()[0])
    mqtt.loop_start()
    try:
        mqtt.subscribe(f"room/{room}")
        await asyncio.to_thread(joined.get, timeout=WAIT_S)
        gateways = [process["client_address"] for process in cluster.processes("gateway")]
        clients = [await subscribed_at(cluster.target, address, room) for address in gateways]
        async with pixiu.connect(cluster.target) as px:
            receipts = [px.room(room).signal_soon(b"%d" % number, receipt=number % 2 == 0) for number in range(signals)]
            for receipt in receipts:
                await receipt
            assert len(gateways) == 2
            await until(lambda: all(receipt.gateways == 2 for receipt in receipts[::2]), "the second gateway's word")
            assert not any(receipt.gateways for receipt in receipts[1::2])
            expected = {b"%d" % number for number in range(signals)}
            for _, subscription in clients:
                found = await take(subscription, signals)
                assert {message.payload for message in found} == expected
                assert all(message.signal for message in found)
            await nothing_more(px, room, *(subscription for _, subscription in clients))
            payloads = [await asyncio.to_thread(got.get, timeout=WAIT_S) for _ in range(signals + 1)]
            assert (set(payloads[:-1]), payloads[-1]) == (expected, b"the end")
            assert px.stats().signals.delivered == signals // 2
        for client, _ in clients:
            await client.close()
    finally:
        mqtt.disconnect()
        mqtt.loop_stop()


async def test_a_signal_to_an_empty_room_is_told_from_one_that_was_delivered(cluster: LocalCluster) -> None:
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(pixiu.Undelivered, match="brokers have it"):
            await px.room(8043).signal(b"anybody?", receipt=True)


def test_the_command_line_sends_signals(cluster: LocalCluster) -> None:
    with cluster.start_pixiu("listen", "--room", "8044", "--count", "1", "--json") as listener:
        assert listener.stdout is not None

        def delivered() -> bool:
            return cluster.pixiu("send", "--room", "8044", "--signal", "--receipt", "go").returncode == 0

        wait_for(delivered, "a delivered signal")
        line = json.loads(listener.stdout.readline())
        assert (line["text"], line["signal"]) == ("go", True)
    assert "--signal" in cluster.pixiu("send", "--room", "8044", "--receipt", "go").stderr


class RawPublisher:
    """A publisher that chooses its IDs and copy numbers, on one stream to one proxy."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._requests: asyncio.Queue[wire_pb2.PublishRequest] = asyncio.Queue()
        self._requests.put_nowait(wire_pb2.PublishRequest(hello=wire_pb2.PublishHello(client="raw")))
        self._call: Any = wire_pb2_grpc.PublisherStub(self._channel).Publish(self._all())
        self._position = 0

    async def _all(self) -> AsyncIterator[wire_pb2.PublishRequest]:
        while True:
            yield await self._requests.get()

    async def until_delivered(self, record: bytes, copy: int) -> None:
        """Publish a signal's copy, again and again, until a gateway says that it was delivered."""
        number = int.from_bytes(record[16:24], "little")
        async with asyncio.timeout(WAIT_S):
            self._send(record, copy)
            while True:
                read = asyncio.ensure_future(self._call.read())
                while not (await asyncio.wait({read}, timeout=0.5))[0]:
                    self._send(record, copy)
                if number in read.result().delivered:
                    return

    def _send(self, record: bytes, copy: int) -> None:
        self._position += 1
        request = wire_pb2.PublishRequest(batch=record, count=1, position=self._position, copy=copy, receipt=True)
        self._requests.put_nowait(request)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def test_a_gateway_that_was_killed_delivers_nothing_twice(cluster: LocalCluster) -> None:
    """The same ID before and after kill -9: answered both times, delivered the first time only. Then a clean end."""
    room = 8045
    victim = cluster.processes("gateway")[0]
    host, _, port = victim["mqtt"].rpartition(":")
    table = Path("/dev/shm") / folder_name(parse_address(cluster.target).root, host, int(port))
    inode = table.stat().st_ino
    now_ms = time.time_ns() // 1_000_000
    old = encode(Kind.SIGNAL, room, b"old", snowflake(now_ms, NOBODYS_WORKER, 1), flags=Flag.TO_ROOM)
    new = encode(Kind.SIGNAL, room, b"new", snowflake(now_ms, NOBODYS_WORKER, 2), flags=Flag.TO_ROOM)
    publisher = RawPublisher(cluster.processes("proxy")[0]["client_address"])
    try:
        client, subscription = await subscribed_at(cluster.target, victim["client_address"], room)
        await publisher.until_delivered(old, copy=0)
        assert [message.payload for message in await take(subscription, 1)] == [b"old"]
        await client.close()
        os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.to_thread(cluster.wait_healthy)
        (again,) = [p for p in cluster.processes("gateway") if p["address"] == victim["address"]]
        assert again["pid"] != victim["pid"]
        client, subscription = await subscribed_at(cluster.target, again["client_address"], room)
        await publisher.until_delivered(old, copy=1)
        await publisher.until_delivered(new, copy=2)
        assert [message.payload for message in await take(subscription, 1)] == [b"new"]
        await nothing_more(client, room, subscription)
        await client.close()
    finally:
        await publisher.close()
    assert table.stat().st_ino == inode
    os.kill(again["pid"], signal.SIGTERM)
    await asyncio.to_thread(wait_for, lambda: not Path(f"/proc/{again['pid']}").exists(), "the end of the gateway")
    await asyncio.to_thread(cluster.wait_healthy)
    assert table.stat().st_ino != inode, "a gateway that ends in good order leaves no table to its successor"


async def test_a_proxy_and_a_broker_die_during_signals_with_receipts(cluster: LocalCluster) -> None:
    room, before, after = 8046, 100, 300
    cluster.wait_healthy()
    found: Counter[bytes] = Counter()
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=room) as subscription:

        async def collect() -> None:
            async for message in subscription:
                found[message.payload] += 1

        collecting = asyncio.create_task(collect())
        receipts = []
        for number in range(before + after):
            if number == before:
                for role in ("proxy", "broker"):
                    os.kill(cluster.processes(role)[0]["pid"], signal.SIGKILL)
            receipts.append(px.room(room).signal_soon(b"%d" % number, receipt=True))
            await asyncio.sleep(0.01)
        unknown = set()
        for number, receipt in enumerate(receipts):
            try:
                await receipt
            except pixiu.Undelivered:  # a machine that stands still for 0.8 s while processes start: the outcome is unknown
                unknown.add(b"%d" % number)
        assert len(unknown) < after
        await px.room(room).send(b"the end")
        async with asyncio.timeout(WAIT_S):
            confirmed = False
            while not confirmed:
                with contextlib.suppress(pixiu.Undelivered):
                    await px.room(room).signal_soon(b"again", receipt=True)
                    confirmed = True
            while not found[b"the end"]:
                await asyncio.sleep(0.01)
        collecting.cancel()
    del found[b"the end"], found[b"again"]
    numbers = {b"%d" % number for number in range(before + after)}
    assert numbers - unknown <= found.keys() <= numbers
    assert set(found.values()) == {1}
    await asyncio.to_thread(cluster.wait_healthy)
