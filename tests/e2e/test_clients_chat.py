"""Stock MQTT clients, the SDK and the command line chat with each other across gateways, through the whole chain."""

from __future__ import annotations

import asyncio
import queue
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

import pixiu
from tests.support.cluster import LocalCluster, wait_for

LAYOUT = "nodes"
WAIT_S = 60.0


@contextmanager
def paho_client(
    port: int, user: str, client_id: str = ""
) -> Iterator[tuple[paho.Client, queue.Queue[tuple[str, bytes]], queue.Queue[str]]]:
    """A connected paho client, its messages, and what it was told (subscribed, published)."""
    messages: queue.Queue[tuple[str, bytes]] = queue.Queue()
    told: queue.Queue[str] = queue.Queue()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=client_id or f"chat-{user}-{port}")
    client.username_pw_set(user)
    client.on_message = lambda _c, _u, message: messages.put((message.topic, bytes(message.payload)))
    client.on_subscribe = lambda _c, _u, _m, codes, _p: told.put(f"subscribed {[c.value for c in codes]}")
    client.on_publish = lambda _c, _u, _m, _r, _p: told.put("published")
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        yield client, messages, told
    finally:
        client.disconnect()
        client.loop_stop()


@pytest.mark.parametrize("topic", ["room/42", "home/kitchen"])
def test_paho_clients_on_two_gateways_chat(cluster: LocalCluster, topic: str) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "7") as (anna, to_anna, told_anna), paho_client(second, "8") as (bert, to_bert, told_bert):
        for client, told in ((anna, told_anna), (bert, told_bert)):
            client.subscribe(topic, qos=1)
            assert told.get(timeout=WAIT_S) == "subscribed [1]"
        for number in range(20):
            anna.publish(topic, b"from anna %d" % number, qos=1)
            bert.publish(topic, b"from bert %d" % number, qos=0)
        expected = {b"from %s %d" % (who, n) for who in (b"anna", b"bert") for n in range(20)}
        for inbox in (to_anna, to_bert):
            got = [inbox.get(timeout=WAIT_S) for _ in range(40)]
            assert {name for name, _ in got} == {topic}
            assert {payload for _, payload in got} == expected
            for who in (b"anna", b"bert"):
                assert [p for _, p in got if who in p] == [b"from %s %d" % (who, n) for n in range(20)]
        assert [told_anna.get(timeout=WAIT_S) for _ in range(20)] == ["published"] * 20


def test_mqtt_5_reaches_every_dialect_on_another_gateway_with_its_qos_and_properties(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    received: queue.Queue[tuple[str, paho.MQTTMessage]] = queue.Queue()
    answers: queue.Queue[object] = queue.Queue()
    dialects = {"v31": paho.MQTTv31, "v311": paho.MQTTv311, "v5": paho.MQTTv5, "publisher": paho.MQTTv5}
    clients: dict[str, paho.Client] = {}
    for number, (name, protocol) in enumerate(dialects.items()):
        client = clients[name] = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=protocol)
        client.username_pw_set(str(700 + number))
        client.on_message = lambda _c, name, message: received.put((name, message))
        client.user_data_set(name)
        client.on_subscribe = lambda _c, _u, _m, codes, _p: answers.put([code.value for code in codes])
        client.on_publish = lambda _c, _u, _m, reason, _p: answers.put(reason.value)
        client.connect("127.0.0.1", first if name == "publisher" else second)
        client.loop_start()
    try:
        for name in ("v31", "v311"):
            clients[name].subscribe("plant/heat", qos=2)
        identifier: Any = Properties(PacketTypes.SUBSCRIBE)  # type: ignore[no-untyped-call]
        identifier.SubscriptionIdentifier = 77
        clients["v5"].subscribe("plant/heat", options=SubscribeOptions(2), properties=identifier)
        assert [answers.get(timeout=WAIT_S) for _ in range(3)] == [[2]] * 3
        said: Any = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        said.ContentType, said.ResponseTopic, said.MessageExpiryInterval = "text/plain", "plant/answers", 600
        said.UserProperty = [("unit", "C"), ("unit", "K")]
        for qos in (2, 1, 0):
            clients["publisher"].publish("plant/heat", b"%d" % qos, qos=qos, properties=said)
            assert answers.get(timeout=WAIT_S) == 0
        got = [received.get(timeout=WAIT_S) for _ in range(9)]
        for name in ("v31", "v311", "v5"):
            mine = {(message.payload, message.qos) for who, message in got if who == name}
            assert mine == {(b"%d" % qos, qos) for qos in (2, 1, 0)}, "those of other QoS may overtake"
        for message in (message for who, message in got if who == "v5"):
            properties: Any = message.properties
            assert (properties.ContentType, properties.ResponseTopic) == ("text/plain", "plant/answers")
            assert properties.UserProperty == [("unit", "C"), ("unit", "K")]
            assert properties.SubscriptionIdentifier == [77]
            assert 500 < properties.MessageExpiryInterval <= 600
    finally:
        for client in clients.values():
            client.disconnect()
            client.loop_stop()


def test_what_is_sent_right_after_the_suback_arrives(cluster: LocalCluster) -> None:
    """On the other gateway and in many rooms, so that every partition and replica is met."""
    first, second = cluster.mqtt_ports()
    with paho_client(second, "8") as (bert, to_bert, told_bert), paho_client(first, "9") as (carl, _, _):
        for room in range(1000, 1050):
            bert.subscribe(f"room/{room}")
            assert told_bert.get(timeout=WAIT_S) == "subscribed [0]"
            carl.publish(f"room/{room}", b"at once", qos=1)
            assert to_bert.get(timeout=WAIT_S) == (f"room/{room}", b"at once")


def test_nothing_comes_after_unsubscribing(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "7") as (anna, to_anna, told), paho_client(second, "8") as (bert, to_bert, told_bert):
        left: queue.Queue[bool] = queue.Queue()
        anna.on_unsubscribe = lambda *_: left.put(True)
        for client, asked in ((anna, told), (bert, told_bert)):
            client.subscribe("room/77")
            asked.get(timeout=WAIT_S)
        anna.unsubscribe("room/77")
        assert left.get(timeout=WAIT_S)
        bert.publish("room/77", b"later", qos=1)
        assert to_bert.get(timeout=WAIT_S) == ("room/77", b"later")
        assert to_anna.empty()


@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="mosquitto-clients are not installed")
def test_mosquitto_clients_chat_across_gateways(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    command = ["stdbuf", "-oL", "mosquitto_sub", "-d", "-v", "-p", str(first), "-C", "2", "-W", "60"]
    command += ["-t", "room/4711", "-t", "news/today"]
    subscriber = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1)
    try:
        assert subscriber.stdout is not None
        seen = ""
        while "Subscribed" not in seen:
            line = subscriber.stdout.readline()
            assert line, seen
            seen += line
        for topic, qos in (("room/4711", "1"), ("news/today", "0")):
            command = ["mosquitto_pub", "-p", str(second), "-t", topic, "-m", f"hello {topic}", "-q", qos]
            assert subprocess.run(command, timeout=WAIT_S, check=False).returncode == 0
        output, _ = subscriber.communicate(timeout=WAIT_S)
        assert subscriber.returncode == 0
        assert {"room/4711 hello room/4711", "news/today hello news/today"} <= set((seen + output).splitlines())
    finally:
        subscriber.kill()
        subscriber.wait()


async def test_the_sdk_and_mqtt_meet_in_a_room(cluster: LocalCluster) -> None:
    port = cluster.mqtt_ports()[0]
    async with pixiu.connect(cluster.target, uin=99) as px, px.subscribe(room=43) as messages:
        with paho_client(port, "7") as (anna, to_anna, told):
            anna.subscribe("room/43")
            await asyncio.to_thread(told.get, timeout=WAIT_S)
            await px.room(43).send(b"from the sdk")
            assert await asyncio.to_thread(to_anna.get, timeout=WAIT_S) == ("room/43", b"from the sdk")
            anna.publish("room/43", b"from mqtt", qos=1)
            got = []
            async with asyncio.timeout(WAIT_S):
                async for message in messages:
                    got.append((message.room, message.sender, message.payload))
                    if len(got) == 2:
                        break
            assert got == [(43, 99, b"from the sdk"), (43, 7, b"from mqtt")]


async def test_the_sdk_finds_the_cluster_through_any_proxy(cluster: LocalCluster) -> None:
    address = cluster.processes("proxy")[0]["client_address"]
    async with pixiu.connect(address) as px, px.subscribe(room=44) as messages:
        for number in range(500):
            px.room(44).send_soon(b"%d" % number)
        await px.flush()
        async with asyncio.timeout(WAIT_S):
            got = [message.payload async for message, _ in _first(messages, 500)]
    assert got == [b"%d" % number for number in range(500)]


async def _first(messages: pixiu.Subscription, count: int):  # type: ignore[no-untyped-def]
    number = 0
    async for message in messages:
        number += 1
        yield message, number
        if number == count:
            return


def test_the_synchronous_sdk(cluster: LocalCluster) -> None:
    with pixiu.connect_sync(cluster.target) as px, px.subscribe(room=45) as messages:
        px.room(45).send(b"hello")
        assert next(iter(messages)).payload == b"hello"


def test_send_and_listen_by_hand(cluster: LocalCluster) -> None:
    listener = cluster.start_pixiu("listen", "--room", "46", "--count", "1", "--json")
    try:

        def heard() -> bool:
            assert cluster.pixiu("send", "--room", "46", "hello").returncode == 0
            return listener.poll() is not None

        wait_for(heard, "the message")
        output, errors = listener.communicate(timeout=WAIT_S)
        assert '"hello"' in output, errors
    finally:
        listener.kill()
        listener.wait()


def test_a_large_message_crosses_the_cluster_by_stream(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    large = bytes(range(256)) * 2000
    with paho_client(first, "7") as (anna, _, _), paho_client(second, "8") as (bert, to_bert, told):
        bert.subscribe("room/48")
        told.get(timeout=WAIT_S)
        for payload in (b"before", large, b"after"):
            anna.publish("room/48", payload, qos=1)
        assert [to_bert.get(timeout=WAIT_S)[1] for _ in range(3)] == [b"before", large, b"after"]


def test_broken_clients_and_noise_hurt_nobody(cluster: LocalCluster) -> None:
    """Malformed MQTT closes its own connection; random datagrams are counted; honest clients go on."""
    ports = cluster.mqtt_ports()
    with paho_client(ports[0], "7") as (anna, to_anna, told):
        anna.subscribe("room/49")
        told.get(timeout=WAIT_S)
        for noise in (
            b"GET / HTTP/1.0\r\n\r\n",
            b"\x00" * 100,
            b"\x10\xff\xff\xff\xff\x01",
            b"\x30\x05\x00\x01a",
            b"\x10\x0c\x00\x04MQTT\x04\x03",
        ):
            with socket.create_connection(("127.0.0.1", ports[0]), timeout=WAIT_S) as sock:
                sock.sendall(noise)
                sock.settimeout(WAIT_S)
                assert sock.recv(100) in (b"", b"\x20\x02\x00\x01")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for process in cluster.status()["processes"]:
                host, _, port = process["address"].rpartition(":")
                for noise in (
                    b"",
                    b"PX",
                    b"PX" + b"\xff" * 30,
                    b"PX\x01\x01" + bytes(28),
                    bytes(1400),
                    b"PX\x01\x03" + b"\x7f" * 100,
                ):
                    sock.sendto(noise, (host, int(port)))
        anna.publish("room/49", b"still here", qos=1)
        assert to_anna.get(timeout=WAIT_S) == ("room/49", b"still here")
    assert all(process["healthy"] for process in cluster.status()["processes"])
