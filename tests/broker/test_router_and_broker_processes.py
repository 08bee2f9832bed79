"""Real router and broker processes beside a real ZooKeeper; the test plays a gateway and a proxy over real links."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from cluster.links.api import PeerState
from cluster.routers.kept_client import KeptClient
from cluster.wire.v1 import kept_pb2
from pixiu.wire.record import Flag
from tests.support.lossy import OUTSIDE, LossyNetwork
from tests.support.soft_processes import cluster

LATE_S = 0.3

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


async def test_joins_are_confirmed_and_served_while_routers_die_and_come_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        # A broker waits in Init until there is a router.
        await c.start("broker-0")
        await c.until("broker-0 in Init", lambda: c.view.of_role("broker"))
        assert not c.view.running("broker")
        await c.start("router-0")
        await c.running("router-0", "broker-0")
        await c.start("router-1")
        await c.start("broker-1")
        await c.running("router-1", "broker-1")

        await c.join("router-0", 41)
        await c.join("router-1", 42)
        for broker in ("broker-0", "broker-1"):
            await c.served(broker, 41, 42)
            assert not await c.reaches_gateway(broker, 43)

        # A router dies: the other one confirms, the brokers move to it.
        await c.kill("router-0")
        await c.join("router-1", 43)
        await c.join("router-1", 41, login=False)
        for broker in ("broker-0", "broker-1"):
            await c.served(broker, 42, 43)
            assert not await c.reaches_gateway(broker, 41)

        # It comes back with what it missed, and the other one dies.
        await c.start("router-0")
        await c.running("router-0")
        await c.kill("router-1")
        await c.join("router-0", 44)
        for broker in ("broker-0", "broker-1"):
            await c.served(broker, 42, 43, 44)
            assert not await c.reaches_gateway(broker, 41)

        # A session keeps a filter: when that is confirmed, every broker knows the room.
        routers = KeptClient(lambda: c.view, lambda _endpoint: PeerState.ALIVE)
        kept = kept_pb2.KeptEntry(room=42, session=9, filter="room/42", version=1, until_ms=1 << 48)
        assert (await routers.put([kept]))[0].error is None
        for broker in ("broker-0", "broker-1"):
            assert not (await c.send(broker, 42))[1]
            assert (await c.send(broker, 42, Flag.TO_ROOM | Flag.KEPT))[1]
        await c.kill("router-0")

        # No router at all: the brokers serve on; then the Router DB is all there is, and a new broker learns from it.
        await c.served("broker-0", 43, 44)
        await c.start("router-0")
        await c.running("router-0")
        await c.kill("broker-1")
        await c.start("broker-2")
        await c.running("broker-2")
        await c.served("broker-2", 43, 44)
        assert not await c.reaches_gateway("broker-2", 41)
        assert not (await c.send("broker-2", 42))[1]
        assert await routers.match([kept_pb2.KeptQuestion(room=42, topic=b"room/42")]) == [[9]]
        await routers.close()
        assert await c.kill("broker-2", signal.SIGTERM) == 0
        assert await c.kill("router-0", signal.SIGTERM) == 0
        for name in ("router-0", "router-1", "broker-0", "broker-2"):
            assert "handler_failed" not in c.log(name), c.log(name)
            assert "Traceback" not in c.log(name), c.log(name)


async def test_a_join_is_confirmed_when_the_broker_has_it_whichever_router_it_subscribed_to(tmp_path: Path) -> None:
    """What routers send the broker comes late, and what is published does not: it must find the member."""
    async with cluster(tmp_path) as c:
        network = LossyNetwork(c.registry, seed=1)
        await asyncio.to_thread(network.start)
        try:
            for name in ("router-0", "router-1", "broker-0"):
                await c.start(name, advertised_udp_host=OUTSIDE)
            await c.running("router-0", "router-1", "broker-0")
            network.delay({("router", "broker"): LATE_S})
            for room, router in enumerate(("router-0", "router-1"), start=41):
                await c.join(router, room)
                assert await c.reaches_gateway("broker-0", room), f"the broker has not heard of a join that {router} confirmed"
        finally:
            await asyncio.to_thread(network.stop)
