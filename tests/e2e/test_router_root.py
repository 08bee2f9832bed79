"""Two broker clusters, each below a root of its own, on the routers and gateways of one."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import pixiu
from pixiu.discovery import paths
from tests.support.forks import fork_pixiu
from tests.support.roles import WAIT_S, Roles, at_least
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(300)]

FIRST, SECOND = "/pubsub", "/pubsub2"
ROOMS = range(1, 7)


async def test_what_is_published_in_one_cluster_reaches_the_gateways_of_the_other(roles: Roles) -> None:
    await roles.layout(FIRST, router=2, broker=1)
    await roles.layout(SECOND, broker=2)
    for number in range(2):
        roles.start(f"router-{number}", FIRST, partition=number, cluster_guests="true")
        roles.start(f"broker-second-{number}", SECOND, partition=number, cluster_router_root=FIRST)
    roles.start("broker-first", FIRST, partition=0)
    roles.start("gateway-0", FIRST, cluster_guests="true")
    roles.start("proxy-first", FIRST)
    roles.start("proxy-second", SECOND, cluster_router_root=FIRST)
    roles.start("broker-other-settings", "/pubsub3", partition=0, cluster_router_root=FIRST, cluster_push_back_ms=300)
    brokers = await roles.running("broker-second-0", "broker-second-1", "broker-first")
    await roles.running("gateway-0", "proxy-first", "proxy-second")

    async with (
        pixiu.connect(roles.target(FIRST), connect_timeout_s=WAIT_S) as first,
        pixiu.connect(roles.target(SECOND), connect_timeout_s=WAIT_S) as second,
        first.subscribe(rooms=ROOMS) as subscription,
    ):
        sent: list[tuple[int, bytes]] = []
        for number in range(20):
            for room in ROOMS:
                for name, sender in (("first", first), ("second", second)):
                    sent.append((room, f"{name} {number}".encode()))
                    sender.room(room).send_soon(sent[-1][1])
        sent.append((1, secrets.token_bytes(300 << 10)))  # by stream, to a gateway that is registered below another root
        second.room(1).send_soon(sent[-1][1])
        await second.room(1).signal(b"go")
        sent.append((1, b"go"))
        await asyncio.gather(first.flush(), second.flush())
        assert first.stats().failed == second.stats().failed == 0
        async with asyncio.timeout(WAIT_S):
            got = [await anext(subscription) for _ in sent]
        assert sorted((message.room, message.payload) for message in got) == sorted(sent), "each once"
        assert len({message.message_id for message in got}) == len(sent)
        with pytest.raises(pixiu.errors.InvalidArgument, match="router_root"):
            await second.room(1).signal(b"whose receipt nobody would bring", receipt=True)

    status = await asyncio.to_thread(fork_pixiu, "status", "--target", roles.target(SECOND), "--json")
    assert status.returncode == 0, status.stdout

    # The routers tell the brokers of both clusters who has left.
    for broker in brokers:
        await until(lambda broker=broker: _has_none(roles.metric(broker, "members")), "nobody is left")  # type: ignore[misc]
        assert await at_least(roles.metric(broker, "records_in_total"), 1)
    # Numbers of workers, which make SnowflakeIDs unique, come from one place.
    assert await roles.zookeeper.children(paths.workers(FIRST))
    assert await roles.zookeeper.exists(paths.workers(SECOND)) is None
    assert "clusters that share routers have the same [cluster] table" in await roles.refused("broker-other-settings")


async def _has_none(found: object) -> bool:
    return await found == 0  # type: ignore[misc, no-any-return]
