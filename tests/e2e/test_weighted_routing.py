"""A broker that answers late gets fewer rooms, and gets them back; nobody's messages suffer."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import pytest

import pixiu
from tests.support.roles import WAIT_S, Roles, at_least
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300)]

ROOMS = range(1, 41)
STOPPED_S, RUNNING_S = 0.12, 0.08


async def test_a_broker_that_is_short_of_cpu_has_less_weight_until_it_is_well_again(roles: Roles) -> None:
    await roles.layout(router=1, broker=1)
    for name in ("router-0", "broker-0", "broker-1"):
        roles.start(name, partition=0, cluster_weighted_routing=True)
    roles.start("gateway-0", cluster_weighted_routing=True)
    roles.start("proxy-0", cluster_weighted_routing=True)
    proxy, *_ = await roles.running("proxy-0", "broker-0", "broker-1", "router-0", "gateway-0")
    await until(lambda: at_least(roles.metric(proxy, "broker_weight"), 2.0), "the proxy sees both brokers")
    assert await roles.metric(proxy, "broker_weight") == 2.0

    async def starve() -> None:
        try:
            while True:
                roles.send_signal("broker-0", signal.SIGSTOP)
                await asyncio.sleep(STOPPED_S)
                roles.send_signal("broker-0", signal.SIGCONT)
                await asyncio.sleep(RUNNING_S)
        finally:
            roles.send_signal("broker-0", signal.SIGCONT)

    async with pixiu.connect(roles.target(), connect_timeout_s=WAIT_S) as px, px.subscribe(rooms=ROOMS) as subscription:
        sent: dict[int, list[bytes]] = {room: [] for room in ROOMS}

        async def weighs(most: float) -> bool:
            """Sends to every room meanwhile."""
            for room in ROOMS:
                sent[room].append(b"%d" % len(sent[room]))
                px.room(room).send_soon(sent[room][-1])
            return await roles.metric(proxy, "broker_weight") <= most

        starving = asyncio.create_task(starve())
        await until(lambda: weighs(1.5), "the starved broker weighs half")
        starving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starving
        await until(lambda: at_least(roles.metric(proxy, "broker_weight"), 2.0), "it weighs as much as the other again")
        await weighs(2.0)
        await px.flush()
        assert px.stats().failed == 0
        got: dict[int, list[bytes]] = {room: [] for room in ROOMS}
        async with asyncio.timeout(WAIT_S):
            for _ in range(sum(map(len, sent.values()))):
                message = await anext(subscription)
                got[message.room].append(message.payload)
        assert got == sent, "each once, in order"
    assert await roles.metric(proxy, "broker_weight_changes_total") >= 2
