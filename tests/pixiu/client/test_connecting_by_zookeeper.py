"""The client finds the cluster in a real ZooKeeper."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

import pixiu
from pixiu.discovery.node import NodeState
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import RegistryUnavailable, Unavailable
from registry.membership import Membership
from tests.support.zookeeper import make_node

Until = Callable[[Callable[[], object]], Awaitable[None]]


async def register(zookeeper: ZooKeeper, root: str, role: str, port: int, state: NodeState = NodeState.RUNNING) -> Membership:
    member = Membership(zookeeper, root)
    await member.register(replace(make_node(role, port=port, client_port=port), state=state))
    return member


async def test_running_proxies_and_gateways_are_used_in_the_order_of_their_registration(
    cluster: Any, until: Until, zookeeper: ZooKeeper, root: str
) -> None:
    await cluster.start(proxies=2, gateways=1)
    second, first = cluster.proxies
    first_member = await register(zookeeper, root, "proxy", first.port)
    second_member = await register(zookeeper, root, "proxy", second.port, NodeState.INIT)
    gateway_member = await register(zookeeper, root, "gateway", cluster.gateways[0].port)
    async with pixiu.connect(f"zk://{zookeeper.hosts}{root}", connect_timeout_s=20.0) as px:
        await until(lambda: px.cluster().gateways == (cluster.gateways[0].address,))
        assert px.cluster().proxies == (first.address,)
        await px.room(1).send(b"to the only one that runs")
        await second_member.set_state(NodeState.RUNNING)
        await until(lambda: px.cluster().proxies == (first.address, second.address))
        await px.room(1).send(b"to the second one")
        async with px.subscribe(room=1):
            assert cluster.gateways[0].joined() == {1}
        await first_member.set_state(NodeState.DRAINING)
        await until(lambda: px.cluster().proxies == (second.address,))
        await px.room(2).send(b"to the one that is left")
    assert first.payloads() == [b"to the only one that runs"]
    assert second.payloads() == [b"to the second one", b"to the one that is left"]
    assert cluster.asked == 0
    for member in (first_member, second_member, gateway_member):
        await member.unregister()


async def test_a_root_without_proxies_is_named(zookeeper: ZooKeeper, root: str) -> None:
    with pytest.raises(Unavailable, match=rf"{zookeeper.hosts} answers, but no Running proxy is registered below {root}"):
        await pixiu.connect(f"zk://{zookeeper.hosts}{root}", connect_timeout_s=3.0).open()


async def test_a_connection_that_breaks_while_the_registry_is_read_is_waited_for(
    cluster: Any, zookeeper: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.start()
    member = await register(zookeeper, root, "proxy", cluster.proxies[0].port)
    read, broken = ZooKeeper.get, 0

    async def breaks_twice(self: ZooKeeper, path: str, watch: Any = None) -> Any:
        nonlocal broken
        if "/proxy/" in path and broken < 2:
            broken += 1
            raise RegistryUnavailable("the connection to ZooKeeper broke")
        return await read(self, path, watch)

    monkeypatch.setattr(ZooKeeper, "get", breaks_twice)
    async with pixiu.connect(f"zk://{zookeeper.hosts}{root}", connect_timeout_s=60.0) as px:
        await px.room(1).send(b"after all")
    assert broken == 2
    assert cluster.proxies[0].payloads() == [b"after all"]
    await member.unregister()


async def test_a_client_whose_proxies_had_all_left_the_registry_is_lent_a_worker_number_again(
    cluster: Any, until: Until, zookeeper: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lends the numbers ended for good when it looked for a proxy just then; minutes later nothing could be sent any more."""
    await cluster.start()
    (proxy,) = cluster.proxies
    member = await register(zookeeper, root, "proxy", proxy.port)
    async with pixiu.connect(f"zk://{zookeeper.hosts}{root}", connect_timeout_s=10.0) as px:
        await px.room(1).send(b"before")
        directory: Any = px._directory
        worker: Any = px._worker
        proxies, looked = worker._proxies, 0
        directory._discovery._reducer._hold_s = 1.0  # a minute in service

        def looked_for() -> Any:
            nonlocal looked
            looked += 1
            return proxies()

        monkeypatch.setattr(worker, "_proxies", looked_for)
        await member.unregister()
        await until(lambda: not directory._discovery.view.running("proxy"))
        await proxy.kill()
        await until(lambda: looked)
        await proxy.start()
        again = await register(zookeeper, root, "proxy", proxy.port)
        await until(lambda: sum(hello.lend_worker for hello in proxy.hellos) == 2)
        await px.room(1).send(b"after")
    assert proxy.payloads() == [b"before", b"after"]
    await again.unregister()
