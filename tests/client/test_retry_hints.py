"""Servers that say when to try again are left alone until then, and others are asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import pixiu
from pixiu.errors import InvalidArgument, NotConnected
from pixiu.rpc.backoff import Resting
from pixiu.rpc.grpc_streams import MAX_PUSHBACK_MS, PUSHBACK

Until = Callable[[Callable[[], object]], Awaitable[None]]
FAST: dict[str, Any] = {"backoff_s": 0.01, "max_backoff_s": 0.02}
WAIT_MS = 600


def test_addresses_that_rest_come_after_the_others() -> None:
    resting = Resting()
    assert resting.usable(["a", "b"], 0.0) == ["a", "b"]
    resting.refused("a", 5.0, 0.0)
    assert (resting.usable(["a", "b"], 1.0), resting.left_s("a", 1.0)) == (["b"], 4.0)
    resting.refused("b", 2.0, 1.0)
    assert resting.usable(["a", "b"], 1.0) == ["b"]
    assert resting.usable(["a", "b"], 6.0) == ["a", "b"]
    resting.refused("b", 0.0, 1.0)
    assert resting.left_s("b", 1.0) == 0.0
    assert resting.usable([], 1.0) == []


@pytest.mark.slow
async def test_a_gateway_that_is_overloaded_is_asked_again_after_its_time(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    gateway.abort, gateway.pushback = grpc.StatusCode.UNAVAILABLE, ((PUSHBACK, str(WAIT_MS)),)
    loop = asyncio.get_running_loop()
    async with pixiu.connect(cluster.target, **FAST) as px:
        subscription = px.subscribe(room=42)
        ready = asyncio.create_task(subscription.ready())
        await until(lambda: gateway.calls == 1)
        began, gateway.abort = loop.time(), None
        await ready
        assert (gateway.calls, loop.time() - began >= 0.9 * WAIT_MS / 1000) == (2, True)


async def test_another_gateway_is_asked_at_once(cluster: Any) -> None:
    await cluster.start(gateways=2)
    for gateway in cluster.gateways:
        gateway.pushback = ((PUSHBACK, str(MAX_PUSHBACK_MS)),)
    async with pixiu.connect(cluster.target, **FAST) as px:
        async with px.subscribe(room=42) as first:
            chosen = next(gateway for gateway in cluster.gateways if gateway.address == first.gateway)
        chosen.abort = grpc.StatusCode.UNAVAILABLE
        async with px.subscribe(room=42) as second:
            assert second.gateway not in ("", chosen.address)


@pytest.mark.parametrize("value", ["-1", "soon", "", "+5"])
async def test_a_hint_that_is_none_changes_nothing(cluster: Any, until: Until, value: str) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    gateway.abort, gateway.pushback = grpc.StatusCode.UNAVAILABLE, ((PUSHBACK, value),)
    async with pixiu.connect(cluster.target, **FAST) as px:
        subscription = px.subscribe(room=42)
        ready = asyncio.create_task(subscription.ready())
        await until(lambda: gateway.calls > 2)
        gateway.abort = None
        await ready


@pytest.mark.slow
async def test_a_proxy_that_lends_no_worker_number_is_asked_again_after_its_time(cluster: Any, until: Until) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.no_worker_for_ms = WAIT_MS
    loop = asyncio.get_running_loop()
    async with pixiu.connect(cluster.target, **FAST) as px:
        receipt = px.room(1).send_soon(b"x")
        await until(lambda: proxy.hellos)
        began, proxy.no_worker_for_ms = loop.time(), 0
        await receipt
        assert loop.time() - began >= 0.9 * WAIT_MS / 1000
        assert sum(hello.lend_worker for hello in proxy.hellos) == 2


def test_the_blocking_view_of_inboxes_says_what_is_wrong() -> None:
    view = pixiu.SyncInboxView("127.0.0.1:1")
    with pytest.raises(NotConnected, match="SyncInboxView"):
        view.unread(7)
    with pytest.raises(InvalidArgument, match="zk://"), view:
        pass
