"""A cluster whose rooms' messages go through relays, and where a user has one login of each device class."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

import pixiu
from tests.e2e.test_chat import until_devices
from tests.e2e.test_clients_chat import paho_client
from tests.e2e.test_replay_and_faults import Replay, assert_exact
from tests.support.cluster import LocalCluster, running_cluster

WAIT_S = 60.0


@pytest.fixture(scope="module")
def through_relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = ("--set", "cluster.fanout=relay", "--set", "cluster.login_policy=newest_of_class")
    with running_cluster(tmp_path_factory.mktemp("relays"), *settings) as running:
        yield running


def test_the_sample_is_carried_exactly(through_relays: LocalCluster) -> None:
    with Replay(through_relays, 10) as replay:
        report = replay.report()
    assert_exact(report)
    assert {hop["to"] for hop in report["per_hop"] if hop["from"] == "broker"} == {"relay"}


async def test_a_room_of_many_members_on_both_gateways_gets_each_message_once(through_relays: LocalCluster) -> None:
    async with pixiu.connect(through_relays.target) as px:
        readers = [await px.subscribe(room=77).__aenter__() for _ in range(70)]
        try:
            for number in range(20):
                px.room(77).send_soon(b"%d" % number)
            expected = [b"%d" % number for number in range(20)]
            for reader in readers:
                async with asyncio.timeout(WAIT_S):
                    assert [(await anext(reader)).payload for _ in range(20)] == expected
        finally:
            for reader in readers:
                await reader.__aexit__(None, None, None)


async def test_a_message_does_not_overtake_those_before_it_by_the_relay_of_who_joined(through_relays: LocalCluster) -> None:
    """One member's relays are stopped while a message is on its way to them; another one's, on the same gateway, are not."""
    stopped = [relay["pid"] for relay in through_relays.processes("relay") if relay["partition"] == 0]
    async with AsyncExitStack() as stack:
        enter, target = stack.enter_async_context, through_relays.target
        px = await enter(pixiu.connect(target))
        first = await enter((await enter(pixiu.connect(target, uin=1000))).subscribe(room=78))
        for number in range(100):
            second = await enter((await enter(pixiu.connect(target, uin=1001, client=f"second-{number}"))).subscribe(room=79))
            if second.gateway == first.gateway:
                break
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            await px.room(78).send(b"1")
            await second.join([78])
            await px.room(78).send(b"2")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await anext(first)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            assert [(await anext(first)).payload for _ in range(2)] == [b"1", b"2"]


async def test_a_newer_login_of_a_class_replaces_the_older_one_which_is_told(through_relays: LocalCluster) -> None:
    target = through_relays.target
    async with (
        pixiu.connect(target, uin=900, device=1, device_class="phone") as old,
        pixiu.connect(target, uin=900, device=2, device_class="phone") as new,
        pixiu.connect(target, uin=900, device=3, device_class="desk") as desk,
        old.subscribe(chat=True) as first,
        desk.subscribe(chat=True) as other,
    ):
        await until_devices(desk, 900, 2)
        async with new.subscribe(chat=True) as second:
            with pytest.raises(pixiu.LoginReplaced, match="login_policy"):
                async with asyncio.timeout(WAIT_S):
                    await anext(first)
            await until_devices(desk, 900, 2)
            await desk.user(900).chat(b"who is there?")
            async with asyncio.timeout(WAIT_S):
                assert [(await anext(reader)).payload for reader in (second, other)] == [b"who is there?"] * 2


async def test_a_client_id_that_connects_elsewhere_ends_its_older_connection(through_relays: LocalCluster) -> None:
    first, second = through_relays.mqtt_ports()
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    with paho_client(first, "910", "one-phone") as (one, _, told_one):
        one.reconnect_delay_set(min_delay=60, max_delay=120)

        def ended(*_: object) -> None:
            loop.call_soon_threadsafe(gone.set)

        one.on_disconnect = ended
        one.subscribe("user/910")
        assert await asyncio.to_thread(told_one.get, timeout=WAIT_S) == "subscribed [0]"
        with paho_client(second, "910", "one-phone") as (two, inbox, told_two):
            two.subscribe("user/910")
            assert await asyncio.to_thread(told_two.get, timeout=WAIT_S) == "subscribed [0]"
            async with asyncio.timeout(WAIT_S):
                await gone.wait()
            async with pixiu.connect(through_relays.target) as px:
                await px.user(910).chat(b"here")
            assert await asyncio.to_thread(inbox.get, timeout=WAIT_S) == ("user/910", b"here")


async def test_a_signal_to_a_user_arrives_once_on_every_device_with_a_receipt(through_relays: LocalCluster) -> None:
    target = through_relays.target
    async with (
        pixiu.connect(target, uin=920, device=1, device_class="phone") as phone,
        pixiu.connect(target, uin=920, device=2, device_class="desk") as desk,
        phone.subscribe(chat=True) as at_phone,
        desk.subscribe(chat=True) as at_desk,
    ):
        for number in range(30):
            await phone.user(920).signal(b"%d" % number, receipt=True)
        await phone.user(920).signal(b"end")
        for reader in (at_phone, at_desk):
            async with asyncio.timeout(WAIT_S):
                got = [(await anext(reader)).payload for _ in range(31)]
            assert sorted(got) == sorted([b"%d" % number for number in range(30)] + [b"end"])
        with pytest.raises(pixiu.Offline):
            await phone.user(921).signal(b"nobody")
