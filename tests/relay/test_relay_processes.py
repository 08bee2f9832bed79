"""Real relay processes beside a real ZooKeeper: starting up, carrying messages to users, ending and starting again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from cluster.membership.map.devices import connected
from pixiu.ids import gateway_msg_id
from pixiu.wire.record import Kind, encode
from tests.support.soft_processes import LIMIT_S, Cluster, cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

UIN = 7


async def carries(c: Cluster, relay: str, number: int) -> None:
    """A message to the user reaches the gateway through this relay, as soon as its links are there."""
    record = encode(Kind.CHAT, UIN, b"hello", number)
    node = c.node(relay)
    assert node is not None
    async with asyncio.timeout(LIMIT_S):
        while record not in c.gateway.records:
            c.proxy.endpoint.send_records(node.endpoint, [record])
            await asyncio.sleep(0.2)


async def test_every_replica_carries_messages_to_users_also_after_a_restart(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.start("relay-0")
        await c.running("relay-0")
        await c.say("relay-0", connected(gateway_msg_id(1, 1, 1), UIN, 70, 100, chat=True))
        # The second one has it from a snapshot.
        await c.start("relay-1")
        await c.running("relay-1")
        await carries(c, "relay-0", 1)
        await carries(c, "relay-1", 2)
        for name, number in (("relay-0", 3), ("relay-1", 4)):
            assert await c.kill(name, signal.SIGTERM) == 0
            await c.start(name)
            await c.running(name)
            await carries(c, name, number)
            assert "Traceback" not in c.log(name)
