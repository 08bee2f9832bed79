"""Servers that say when to try again are left alone until then, and others are asked first."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import pixiu
from pixiu.errors import InvalidArgument, NotConnected, Overloaded
from pixiu.rpc.backoff import PROVEN_S, Backoff, Reconnects, Resting
from pixiu.rpc.grpc_streams import MAX_PUSHBACK_MS, PUSHBACK
from pixiu.wire.record import Flag, Kind, encode

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
        subscription, began = px.subscribe(room=42), loop.time()
        ready = asyncio.create_task(subscription.ready())
        await until(lambda: gateway.calls == 1)
        gateway.abort = None
        await ready
        assert (gateway.calls, loop.time() - began >= 0.9 * WAIT_MS / 1000) == (2, True)


def test_waits_grow_until_a_connection_has_proved_itself() -> None:
    reconnects = Reconnects(Backoff(0.1, 5.0, lambda: 1.0))
    short = [reconnects.lost(PROVEN_S - 0.1, True) for _ in range(4)]
    refused = [reconnects.lost(PROVEN_S, False) for _ in range(4)]
    assert [*short, *refused] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert [reconnects.lost(PROVEN_S, True), reconnects.lost(0.0, False)] == [0.1, 0.2]


@pytest.mark.parametrize("greeted", [True, False])
async def test_a_gateway_that_ends_every_stream_is_left_alone_longer_and_longer(
    cluster: Any, until: Until, monkeypatch: pytest.MonkeyPatch, greeted: bool
) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    waits: list[float] = []

    async def pause(_: object, seconds: float) -> None:
        if seconds:
            waits.append(seconds)

    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42):
        monkeypatch.setattr("pixiu.client.receive.gateway_connection.GatewayConnection._pause", pause)
        if greeted:
            gateway.refuse[42] = ("LIMIT", "no space")
        else:
            gateway.abort = grpc.StatusCode.UNAVAILABLE
        for queue in list(gateway.streams):
            queue.put_nowait(None)
        await until(lambda: len(waits) >= 8)
    # A fixed part of each is certain, whatever the random part of the client is.
    assert all(0.05 * 2**number <= wait <= 0.1 * 2**number for number, wait in enumerate(waits[:6]))
    assert all(2.5 <= wait <= 5.0 for wait in waits[6:8])


async def test_a_join_that_is_refused_for_now_is_asked_for_again_on_the_same_stream(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    async with pixiu.connect(cluster.target, **FAST) as px, px.subscribe(rooms=[42, 43]) as subscription:
        gateway.refuse[42], gateway.retry_after_ms = ("OVERLOADED", "too many join"), 20
        gateway.send(encode(Kind.ROOM, 43, b"before", 1, flags=Flag.TO_ROOM))
        assert (await anext(subscription)).payload == b"before"
        for queue in list(gateway.streams):
            queue.put_nowait(None)
        await until(lambda: gateway.refusals >= 3)
        assert gateway.calls == 2, "one for the lost stream, and none for the refusals"
        gateway.refuse.clear()
        await until(lambda: gateway.joined() == {42, 43})
        gateway.send(encode(Kind.ROOM, 42, b"after", 2, flags=Flag.TO_ROOM))
        assert (await anext(subscription)).payload == b"after"
        assert gateway.calls == 2
        gateway.refuse[44] = ("OVERLOADED", "too many join")
        with pytest.raises(Overloaded, match="too many join") as refused:
            await subscription.join(rooms=[44])
        assert refused.value.retry_after_ms == 20


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
