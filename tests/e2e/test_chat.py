"""Chat, presence and relays with real processes: devices on both gateways, kills, and a cluster without relays."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import pixiu
from tests.e2e.test_clients_chat import paho_client
from tests.support.cluster import LocalCluster, running_cluster, wait_for

WAIT_S = 60.0


async def until_devices(px: pixiu.Client, uin: int, devices: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await px.presence([uin]))[0].devices != devices:
            await asyncio.sleep(0.05)


async def payloads(messages: pixiu.Subscription, count: int) -> list[bytes]:
    async with asyncio.timeout(WAIT_S):
        return [(await anext(messages)).payload for _ in range(count)]


async def test_every_device_of_a_user_gets_a_message_once(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "700") as (one, to_one, told_one), paho_client(second, "700") as (two, to_two, told_two):
        for client, told in ((one, told_one), (two, told_two)):
            client.subscribe("user/700")
            assert await asyncio.to_thread(told.get, timeout=WAIT_S) == "subscribed [0]"
        async with pixiu.connect(cluster.target, uin=700) as px, px.subscribe(chat=True) as mine:
            assert (await px.presence([700, 701]))[0].devices == 3
            for number in range(50):
                px.user(700).chat_soon(b"%d" % number)
            await px.flush()
            assert px.stats().failed == 0
            expected = [b"%d" % number for number in range(50)]
            assert await payloads(mine, 50) == expected
            for inbox in (to_one, to_two):
                got = [await asyncio.to_thread(inbox.get, timeout=WAIT_S) for _ in range(50)]
                assert got == [("user/700", payload) for payload in expected]
                assert inbox.empty()


async def test_mqtt_clients_write_to_users_and_read_only_their_own_messages(cluster: LocalCluster) -> None:
    first, second = cluster.mqtt_ports()
    with paho_client(first, "711") as (anna, to_anna, told_anna), paho_client(second, "712") as (bert, to_bert, told_bert):
        anna.subscribe([("user/712", 0), ("user/711", 1), ("room/711", 0)])
        assert await asyncio.to_thread(told_anna.get, timeout=WAIT_S) == "subscribed [128, 0, 0]"
        bert.subscribe("user/711")
        assert await asyncio.to_thread(told_bert.get, timeout=WAIT_S) == "subscribed [128]"
        bert.publish("user/711", b"hello", qos=1)
        assert await asyncio.to_thread(told_bert.get, timeout=WAIT_S) == "published"
        bert.publish("user/711", b"again", qos=0)
        assert [await asyncio.to_thread(to_anna.get, timeout=WAIT_S) for _ in range(2)] == [
            ("user/711", b"hello"),
            ("user/711", b"again"),
        ]
        # A user who is not there: MQTT has no word for it, and the connection goes on.
        anna.publish("user/799", b"nobody", qos=1)
        assert await asyncio.to_thread(told_anna.get, timeout=WAIT_S) == "published"
        anna.unsubscribe("user/711")
        async with pixiu.connect(cluster.target) as px:
            async with asyncio.timeout(WAIT_S):
                while not await offline(px, 711):
                    await asyncio.sleep(0.05)
        assert to_bert.empty()


async def offline(px: pixiu.Client, uin: int) -> bool:
    try:
        await px.user(uin).chat(b"are you there?")
    except pixiu.Offline:
        return True
    return False


def test_send_listen_and_presence_by_hand(cluster: LocalCluster) -> None:
    assert "no device online" in cluster.pixiu("send", "--user", "720", "hello").stderr
    listener = cluster.start_pixiu("listen", "--user", "720", "--count", "1", "--json")
    try:
        wait_for(lambda: cluster.pixiu("presence", "720", "721").stdout == "720: online, 1 device\n721: offline\n", "presence")
        wait_for(lambda: cluster.pixiu("send", "--user", "720", "hello").returncode == 0, "acceptance")
        output, errors = listener.communicate(timeout=WAIT_S)
        assert '"user": 720' in output, errors
        assert '"hello"' in output
    finally:
        listener.kill()
        listener.wait()


def test_the_synchronous_sdk_chats(cluster: LocalCluster) -> None:
    with pixiu.connect_sync(cluster.target, uin=730) as px, px.subscribe(chat=True) as mine:
        px.user(730).chat(b"note to self")
        assert next(iter(mine)).payload == b"note to self"
        with pytest.raises(pixiu.Offline):
            px.user(731).chat(b"x")


async def test_a_user_who_moves_between_gateways_is_reached_at_once_both_times(cluster: LocalCluster) -> None:
    ports = cluster.mqtt_ports()
    async with pixiu.connect(cluster.target) as px:
        for move, port in enumerate([*ports, *ports]):
            with paho_client(port, "740") as (client, inbox, told):
                client.subscribe("user/740")
                assert await asyncio.to_thread(told.get, timeout=WAIT_S) == "subscribed [0]"
                await px.user(740).chat(b"%d" % move)
                assert await asyncio.to_thread(inbox.get, timeout=WAIT_S) == ("user/740", b"%d" % move)


async def test_chat_goes_on_when_relays_are_killed_and_come_back(cluster: LocalCluster) -> None:
    """Each replica of one partition in turn, so that the second comes to what the first learned by its snapshot."""
    async with pixiu.connect(cluster.target, uin=750) as px, px.subscribe(chat=True) as mine:
        partition = 750 % 2
        for turn in range(2):
            victim = next(p for p in cluster.processes("relay") if p["partition"] == partition)
            os.kill(victim["pid"], signal.SIGKILL)
            payload = b"turn %d" % turn
            async with asyncio.timeout(WAIT_S):
                while True:
                    try:
                        await px.user(750).chat(payload)
                        break
                    except (pixiu.Dropped, pixiu.Unavailable):
                        await asyncio.sleep(0.1)
            assert await payloads(mine, 1) == [payload]
            await asyncio.to_thread(cluster.wait_healthy)
        assert (await px.presence([750]))[0].devices == 1


async def test_the_users_of_a_killed_gateway_are_offline(cluster: LocalCluster) -> None:
    gateway = cluster.processes("gateway")[0]
    port = int(gateway["mqtt"].rpartition(":")[2])
    async with pixiu.connect(cluster.target) as px:
        with paho_client(port, "760") as (client, _, told):
            client.subscribe("user/760")
            assert await asyncio.to_thread(told.get, timeout=WAIT_S) == "subscribed [0]"
            client.reconnect_delay_set(600, 600)
            os.kill(gateway["pid"], signal.SIGKILL)
            await until_devices(px, 760, 0)
            assert await offline(px, 760)
    await asyncio.to_thread(cluster.wait_healthy)
    assert port in cluster.mqtt_ports(), "clients find the gateway that was started again at its port"


async def test_a_cluster_of_rooms_alone_says_what_is_missing(tmp_path: Path) -> None:
    with running_cluster(tmp_path, "--relays=0", layout="small") as cluster:
        async with pixiu.connect(cluster.target, uin=7) as px:
            async with px.subscribe(room=1) as room:
                await px.room(1).send(b"hi")
                assert await payloads(room, 1) == [b"hi"]
            for attempt in (px.user(8).chat(b"x"), px.presence([8]), px.subscribe(chat=True).ready()):
                with pytest.raises(pixiu.PixiuError, match="no relays"):
                    await attempt
        with paho_client(cluster.mqtt_ports()[0], "7") as (client, _, told):
            client.subscribe("user/7")
            assert await asyncio.to_thread(told.get, timeout=WAIT_S) == "subscribed [128]"
        refused = await asyncio.to_thread(cluster.pixiu, "send", "--mail", "--user", "7", "x")
        assert refused.returncode == 2
        assert "this cluster keeps no mail: it has no Xiu or no Pi" in refused.stderr
        assert "this cluster keeps no inboxes" in (await asyncio.to_thread(cluster.pixiu, "inbox list", "7")).stderr
