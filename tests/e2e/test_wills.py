"""Wills of a stock client on real processes: its connection breaks, it disconnects, its gateway is killed."""

from __future__ import annotations

import os
import queue
import signal
import urllib.request
from collections.abc import Iterator
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.e2e.test_clients_chat import WAIT_S, paho_client
from tests.support.cluster import LocalCluster, running_cluster, wait_for


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    layout = ("--gateways", "2", "--relays", "1", "--relay-replicas", "2")
    with running_cluster(tmp_path_factory.mktemp("wills"), *layout) as running:
        yield running


def client_with_will(
    port: int, user: str, topic: str, payload: bytes, *, delay_s: int | None = None, retain: bool = False
) -> paho.Client:
    """`delay_s`: by MQTT 5."""
    connected: queue.Queue[int] = queue.Queue()
    five = delay_s is not None
    version = MQTTProtocolVersion.MQTTv5 if five else MQTTProtocolVersion.MQTTv311
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id=f"sensor-{user}", protocol=version, reconnect_on_failure=False)
    client.username_pw_set(user)
    make: Any = Properties
    properties, session = (make(PacketTypes.WILLMESSAGE), make(PacketTypes.CONNECT)) if five else (None, None)
    if properties is not None and session is not None:
        properties.WillDelayInterval = delay_s
        session.SessionExpiryInterval = 3600
    client.will_set(topic, payload, qos=1, retain=retain, properties=properties)
    client.on_connect = lambda _c, _u, _f, code, _p: connected.put(code.value)
    client.connect("127.0.0.1", port, properties=session)
    client.loop_start()
    assert connected.get(timeout=WAIT_S) == 0
    return client


def break_off(client: paho.Client) -> None:
    """End a connection without a DISCONNECT."""
    client.loop_stop()
    sock = client.socket()
    assert sock is not None
    sock.close()


def kept_by_relays(cluster: LocalCluster, count: int) -> bool:
    """Whether each relay keeps so many wills."""
    found: list[float] = []
    for relay in cluster.processes("relay"):
        with urllib.request.urlopen(f"{relay['http']}/metrics", timeout=WAIT_S) as reply:
            lines = reply.read().decode().splitlines()
        found += [float(line.rpartition(" ")[2]) for line in lines if line.startswith("pixiu_relay_wills{")]
    return found == [count] * 2


def test_a_will_is_published_once_when_the_connection_or_its_gateway_is_lost(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "7") as (watcher, messages, told):
        watcher.subscribe([("alarms/gone", 1), ("room/300", 1), ("alarms/end", 1)])
        assert told.get(timeout=WAIT_S) == "subscribed [1, 1, 1]"

        left = client_with_will(second, "100", "alarms/gone", b"left")
        broken = client_with_will(second, "101", "alarms/gone", b"broken")
        broken_in_a_room = client_with_will(second, "102", "room/300", b"broken")
        wait_for(lambda: kept_by_relays(cluster, 3), "wills at the relays")
        left.disconnect()
        for client in (broken, broken_in_a_room):
            break_off(client)
        assert sorted(messages.get(timeout=WAIT_S) for _ in range(2)) == [("alarms/gone", b"broken"), ("room/300", b"broken")]
        wait_for(lambda: kept_by_relays(cluster, 0), "relays without wills")

        client_with_will(second, "103", "alarms/gone", b"killed")
        client_with_will(second, "104", "alarms/gone", b"left in time").disconnect()
        wait_for(lambda: kept_by_relays(cluster, 1), "wills at the relays")
        victim = next(p for p in cluster.processes("gateway") if int(p["mqtt"].rpartition(":")[2]) == second)
        os.kill(int(victim["pid"]), signal.SIGKILL)
        assert messages.get(timeout=WAIT_S) == ("alarms/gone", b"killed")
        wait_for(lambda: kept_by_relays(cluster, 0), "relays without wills")
        watcher.publish("alarms/end", b"end", qos=1)
        assert messages.get(timeout=WAIT_S) == ("alarms/end", b"end")
    cluster.wait_healthy()


def test_a_delayed_will_waits_for_its_client_and_a_retained_one_for_subscribers(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "7") as (watcher, messages, told):
        watcher.subscribe([("later/#", 1)])
        assert told.get(timeout=WAIT_S) == "subscribed [1]"
        back, lost = (client_with_will(second, user, f"later/{user}", b"late", delay_s=2, retain=True) for user in ("200", "201"))
        wait_for(lambda: kept_by_relays(cluster, 2), "wills at the relays")
        break_off(back)
        break_off(lost)
        again = client_with_will(first, "200", "later/again", b"late", delay_s=2)
        assert messages.get(timeout=WAIT_S) == ("later/201", b"late")
        again.disconnect()
        wait_for(lambda: kept_by_relays(cluster, 0), "relays without wills")
        watcher.publish("later/end", b"end", qos=1)
        assert messages.get(timeout=WAIT_S) == ("later/end", b"end")
    with paho_client(second, "8") as (late, messages, told):
        late.subscribe([("later/#", 1)])
        assert told.get(timeout=WAIT_S) == "subscribed [1]"
        assert messages.get(timeout=WAIT_S) == ("later/201", b"late")
