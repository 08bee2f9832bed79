"""Partitions double while a proxy and a gateway see nothing of it: they are told, and nothing is lost meanwhile. So it is when a
broker and a gateway see nothing of a new proxy and a new broker."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import pixiu
from pixiu.discovery import paths
from pixiu.discovery.view import Layout, RoleLayout
from registry.layout import read_layout
from tests.support.roles import WAIT_S, Roles, at_least
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300)]

ROOMS = range(1, 9)


async def write(roles: Roles, n: int, following: int) -> Layout:
    """As a doubling of brokers and routers does at its beginning and at its end."""
    layout = await read_layout(roles.zookeeper, paths.DEFAULT_ROOT)
    assert layout is not None
    wanted = {role: RoleLayout(n, following, 1, ("a" * 16,)) for role in ("router", "broker")}
    newer = replace(layout, version=layout.version + 1, roles={**layout.roles, **wanted})
    await roles.zookeeper.set(paths.layout(paths.DEFAULT_ROOT), newer.to_json())
    return newer


async def test_a_proxy_and_a_gateway_without_watches_lose_nothing_and_learn_of_a_doubling(roles: Roles) -> None:
    await roles.layout(router=1, broker=1)
    roles.start("router-0", partition=0)
    roles.start("broker-0", partition=0)
    await roles.running("router-0", "broker-0")
    await write(roles, 1, 2)
    roles.start("router-1", partition=1)
    roles.start("broker-1", partition=1)
    await roles.running("router-1", "broker-1")
    roles.start("gateway-0", deaf=True)
    await roles.running("gateway-0")
    roles.start("proxy-0", deaf=True)
    gateway, proxy, broker, router = await roles.running("gateway-0", "proxy-0", "broker-0", "router-0")

    async with pixiu.connect(proxy.client_address, connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=ROOMS) as subscription:
        sent: dict[int, list[bytes]] = {room: [] for room in ROOMS}

        async def send(times: int) -> None:
            """To each room; returns when all of it is accepted."""
            for _ in range(times):
                for room in ROOMS:
                    sent[room].append(b"%d" % len(sent[room]))
                    px.room(room).send_soon(sent[room][-1])
            await px.flush()

        await send(5)
        newest = await write(roles, 2, 2)
        # Until the proxy knows of it, and beyond.
        await until(lambda: at_least(roles.metric(broker, "layout_version"), newest.version), "the brokers know")
        await send(50)
        await until(lambda: at_least(roles.metric(proxy, "layout_version"), newest.version), "the proxy knows")
        await send(50)
        assert px.stats().failed == 0
        got: dict[int, list[bytes]] = {room: [] for room in ROOMS}
        async with asyncio.timeout(WAIT_S):
            for _ in range(sum(map(len, sent.values()))):
                message = await anext(subscription)
                got[message.room].append(message.payload)
        assert got == sent, "each once, in order"
        assert await roles.metric(broker, "records_passed_on_total") > 0
        assert await roles.metric(broker, "records_unroutable_total") == 0
        assert await roles.metric(proxy, "layout_refreshes_total") == 1

        # A room of the router partition that the gateway does not know of as its room's.
        await until(lambda: at_least(roles.metric(router, "layout_version"), newest.version), "the routers know")
        async with px.subscribe(room=11) as late:
            await until(lambda: at_least(roles.metric(gateway, "layout_version"), newest.version), "the gateway knows")
            assert await roles.metric(router, "messages_stale_sender_total") > 0
            await px.room(11).send(b"to the new partition")
            async with asyncio.timeout(WAIT_S):
                assert (await anext(late)).payload == b"to the new partition"


async def test_nothing_is_lost_where_processes_do_not_know_a_new_one_yet(roles: Roles) -> None:
    await roles.layout(router=1, broker=1)
    roles.start("router-0", partition=0)
    await roles.running("router-0")
    roles.start("gateway-0", deaf=True)
    await roles.running("gateway-0")
    roles.start("broker-0", partition=0, deaf=True)
    await roles.running("broker-0")
    roles.start("proxy-0")
    (proxy,) = await roles.running("proxy-0")
    async with pixiu.connect(proxy.client_address, connect_timeout_s=WAIT_S) as px:
        for _ in range(10):
            px.room(1).send_soon(b"x")
        await px.flush()
        assert px.stats().failures_by_code == {}
        async with px.subscribe(room=1) as subscription:
            roles.start("broker-1", partition=0)
            await roles.running("broker-1")
            for number in range(20):  # some by each of the brokers, where the proxy knows both
                px.room(1).send_soon(b"%d" % number)
            async with asyncio.timeout(WAIT_S):
                assert [int((await anext(subscription)).payload) for _ in range(20)] == [*range(20)]
        assert px.stats().failures_by_code == {}
