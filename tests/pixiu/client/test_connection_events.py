"""Connection events: of the publisher, of subscriptions and inboxes; by callback and by iterating."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import pixiu
from pixiu.client.connection_events import MAX_WAITING_EVENTS, ConnectionEvents, ConnectionState
from pixiu.errors import PixiuError
from pixiu.wire.v1 import wire_pb2

Until = Callable[[Callable[[], object]], Awaitable[None]]


def shown(events: list[pixiu.ConnectionEvent]) -> list[tuple[str, str, str]]:
    return [(event.what, event.state.value, event.address) for event in events]


async def test_a_subscription_tells_of_its_gateways_and_of_its_end(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    events: list[pixiu.ConnectionEvent] = []
    async with pixiu.connect(cluster.target, on_connection=events.append, backoff_s=0.01, max_backoff_s=0.02) as px:
        iterated = px.connection_events()
        subscription = px.subscribe(room=42)
        await subscription.ready()
        await gateway.kill()
        await until(lambda: len(events) == 2)
        await gateway.start()
        await until(lambda: len(events) == 3)
        await subscription.close()
        await subscription.close()
    here = gateway.address
    assert shown(events) == [
        ("subscription", "connected", here),
        ("subscription", "reconnecting", here),
        ("subscription", "connected", here),
        ("subscription", "closed", here),
        ("publisher", "closed", ""),
    ]
    assert here in events[1].reason
    assert [event.source for event in events] == [subscription] * 4 + [px]
    assert [event async for event in iterated] == events


async def test_a_move_of_a_draining_gateway_and_a_refusal_are_told(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    events: list[pixiu.ConnectionEvent] = []
    async with pixiu.connect(cluster.target, on_connection=events.append) as px:
        inbox = px.inbox(uin=7, device="phone")
        await inbox.ready()
        old, new = sorted(cluster.gateways, key=lambda gateway: gateway.address != inbox.gateway)
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: len(events) == 2)
        new.push(wire_pb2.SubscribeReply(error_code="LOGIN_REPLACED", error_text="the device connected elsewhere"))
        with pytest.raises(PixiuError):
            await anext(inbox)
    told = shown(events)
    assert told[:2] == [("inbox", "connected", old.address), ("inbox", "moved", new.address)]
    assert told[2:] == [("inbox", "closed", new.address), ("publisher", "closed", "")], "once, although the client closes it, too"
    assert old.address in events[1].reason
    assert "elsewhere" in events[2].reason


async def test_the_publisher_tells_of_each_proxy(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=1)
    (proxy,) = cluster.proxies
    events: list[pixiu.ConnectionEvent] = []
    async with pixiu.connect(cluster.target, on_connection=events.append, backoff_s=0.01, max_backoff_s=0.02) as px:
        await px.room(1).send(b"a")
        await proxy.kill()
        await until(lambda: len(events) == 2)
        await proxy.start()
        await px.room(1).send(b"b")
        proxy.drain()
        await until(lambda: len(events) == 4)
    here = proxy.address
    assert shown(events[:4]) == [
        ("publisher", "connected", here),
        ("publisher", "reconnecting", here),
        ("publisher", "connected", here),
        ("publisher", "moved", here),
    ]


async def test_a_callback_that_raises_and_an_iteration_that_lags_harm_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: pixiu.ConnectionEvent) -> None:
        raise ValueError("the application's")

    events = ConnectionEvents(fails)
    stream = events.stream()
    for number in range(MAX_WAITING_EVENTS + 5):
        events.tell(pixiu.ConnectionEvent(pixiu.ConnectionState.CONNECTED, "inbox", None, str(number)))
    events.end()
    found = [event.address async for event in stream]
    assert (len(found), found[0], stream.dropped) == (MAX_WAITING_EVENTS, "5", 5)
    assert "on_connection_callback_failed" in caplog.text


def test_a_thread_iterates_until_the_client_is_closed(background: Any, empty_cluster: Any) -> None:
    background.run(empty_cluster.start())
    found: list[pixiu.ConnectionEvent] = []
    with pixiu.connect_sync(empty_cluster.target) as px:
        events = px.connection_events()
        reader = threading.Thread(target=lambda: found.extend(events), daemon=True)
        reader.start()
        px.room(1).send(b"x")
    reader.join(20)
    assert [event.state.value for event in found] == ["connected", "closed"]
    background.run(empty_cluster.stop())


def test_events_that_nobody_took_in_time_are_there_when_the_client_is_closed(background: Any, empty_cluster: Any) -> None:
    background.run(empty_cluster.start())
    with pixiu.connect_sync(empty_cluster.target) as px:
        events = px.connection_events()
        px.room(1).send(b"x")
    assert [event.state.value for event in events] == ["connected", "closed"]
    assert not list(events)
    background.run(empty_cluster.stop())


@pytest.mark.parametrize("served", [True, False])
async def test_a_connection_that_breaks_names_tls_only_before_the_first_answer(cluster: Any, until: Any, served: bool) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    target, cut = gateway.port, asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not served:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", target)
        writers.extend((writer, back))
        copies = [asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))]
        await cut.wait()
        writer.transport.abort()
        for task in copies:
            task.cancel()
        await asyncio.gather(*copies, return_exceptions=True)

    events: list[pixiu.ConnectionEvent] = []
    between = await asyncio.start_server(relay, "127.0.0.1", 0)
    gateway.port = between.sockets[0].getsockname()[1]
    try:
        async with pixiu.connect(cluster.target, on_connection=events.append, connect_timeout_s=1.0) as px:
            subscription = px.subscribe(room=42)
            if served:
                await subscription.ready()
                cut.set()
                await until(lambda: any(event.state is ConnectionState.RECONNECTING for event in events))
                (reason,) = [event.reason for event in events if event.state is ConnectionState.RECONNECTING][:1]
                assert "the process ended, or the connection to it broke" in reason
            else:
                with pytest.raises(pixiu.Unreachable, match="does it speak TLS"):
                    await subscription.ready()
    finally:
        cut.set()
        for writer in writers:
            writer.transport.abort()
        between.close()
        gateway.port = target
