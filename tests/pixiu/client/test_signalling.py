"""The SDK's signals against real gRPC servers: copies, receipts, repeats, failures, the synchronous twin, subscribers."""

from __future__ import annotations

from typing import Any

import pytest

import pixiu
from pixiu.errors import InvalidArgument, NotConnected, RecordTooLarge, Undelivered
from pixiu.ids import snowflake
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import wire_pb2


def copies(cluster: Any) -> list[int]:
    return sorted(copy for proxy in cluster.proxies for copy in proxy.copies)


async def test_three_copies_of_one_record_go_through_three_proxies(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=3)
    async with pixiu.connect(cluster.target, uin=7) as px:
        receipt = await px.room(42).signal(b"go", type=5, first_lane=True)
        await until(lambda: len(copies(cluster)) == 3)
        assert [len(proxy.copies) for proxy in cluster.proxies] == [1, 1, 1]
        assert copies(cluster) == [0, 1, 2]
        (record,) = {record for proxy in cluster.proxies for record in proxy.records}
        assert (record.kind, record.flags, record.key, record.sender) == (Kind.SIGNAL, Flag.TO_ROOM, 42, 7)
        assert (record.body, record.type, record.snowflake_id) == (b"go", 5, receipt.id)
        stats = px.stats()
        assert (stats.signals.sent, stats.signals.accepted, stats.sent) == (1, 1, 0)


@pytest.mark.parametrize("proxies", [1, 2])
async def test_with_fewer_proxies_all_there_are_carry_the_three_copies(cluster: Any, until: Any, proxies: int) -> None:
    await cluster.start(proxies=proxies)
    async with pixiu.connect(cluster.target) as px:
        await px.room(42).signal(b"go")
        await until(lambda: copies(cluster) == [0, 1, 2])
        assert min(len(proxy.copies) for proxy in cluster.proxies) >= 1


async def test_a_receipt_is_a_gateways_word_by_any_proxy(cluster: Any) -> None:
    await cluster.start(proxies=3)
    for proxy in cluster.proxies[:2]:
        proxy.delivering = False
        proxy.holding = True
    async with pixiu.connect(cluster.target, publish_timeout_s=1.0) as px:
        receipts = [px.room(42).signal_soon(b"%d" % number, receipt=True) for number in range(20)]
        for receipt in receipts:
            await receipt
            assert receipt.done
            assert receipt.error is None
        assert px.stats().signals.delivered == 20


async def test_a_receipt_says_how_many_gateways_delivered(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=3)
    for proxy, gateways in zip(cluster.proxies, ([1, 2], [2, 3], [1]), strict=True):
        proxy.gateways = gateways
    async with pixiu.connect(cluster.target) as px:
        receipt = await px.room(42).signal(b"go", receipt=True)
        await until(lambda: receipt.gateways == 3)
        assert (await px.room(42).signal(b"go")).gateways == 0
        for proxy in cluster.proxies:
            proxy.gateways = []
        receipt = await px.room(42).signal(b"go", receipt=True)
        assert receipt.gateways == 1, "a proxy that names none speaks for one"


@pytest.mark.slow
async def test_without_a_gateways_word_it_is_sent_four_times_and_fails(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=3)
    for proxy in cluster.proxies:
        proxy.delivering = False
    async with pixiu.connect(cluster.target) as px:
        receipt = px.room(42).signal_soon(b"go", receipt=True)
        with pytest.raises(Undelivered, match="sent 4 times"):
            await receipt
        assert isinstance(receipt.error, Undelivered)
        await until(lambda: copies(cluster) == [0] * 4 + [1] * 4 + [2] * 4)
        assert {record.snowflake_id for proxy in cluster.proxies for record in proxy.records} == {receipt.id}


async def test_a_repeat_that_a_gateway_answers_resolves_it(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=2)
    for proxy in cluster.proxies:
        proxy.delivering = False
    async with pixiu.connect(cluster.target) as px:
        receipt = px.room(42).signal_soon(b"go", receipt=True)
        await until(lambda: len(copies(cluster)) == 3)
        cluster.proxies[1].delivering = True
        await receipt
        assert px.stats().signals.repeated >= 1


async def test_a_dead_proxy_holds_up_no_signal(cluster: Any) -> None:
    await cluster.start(proxies=3)
    async with pixiu.connect(cluster.target) as px:
        await px.room(42).signal(b"before", receipt=True)
        await cluster.proxies[2].kill()
        for number in range(10):
            await px.room(42).signal(b"%d" % number, receipt=True)
        assert px.stats().signals.delivered == 11


async def test_what_every_proxy_refuses_fails_with_its_words(cluster: Any) -> None:
    await cluster.start(proxies=2)
    for proxy in cluster.proxies:
        proxy.delivering = False
        proxy.failing = lambda record: wire_pb2.PublishFailure(code="RECORD_TOO_LARGE", text="too large here")
    async with pixiu.connect(cluster.target) as px:
        for asks in (False, True):
            with pytest.raises(RecordTooLarge, match="too large here"):
                await px.room(42).signal(b"go", receipt=asks)


async def test_closing_waits_for_receipts_and_a_closed_client_sends_none(cluster: Any) -> None:
    await cluster.start(proxies=1)
    async with pixiu.connect(cluster.target) as px:
        room = px.room(42)
        receipts = [room.signal_soon(b"go", receipt=asks) for asks in (True, False)]
        await px.flush()
        assert all(receipt.done for receipt in receipts)
        late = room.signal_soon(b"late", receipt=True)
    assert late.done
    await late
    with pytest.raises(NotConnected):
        await room.signal(b"too late")
    with pytest.raises(InvalidArgument):
        await room.signal("text")  # type: ignore[arg-type]


async def test_a_subscription_gives_a_signal_once_whatever_its_gateways_send(cluster: Any) -> None:
    await cluster.start(proxies=1, gateways=1)
    signals = [encode(Kind.SIGNAL, 42, b"s%d" % n, snowflake(1_700_000_000_000, 1, n), flags=Flag.TO_ROOM) for n in range(3)]
    message = encode(Kind.ROOM, 42, b"m", snowflake(1_700_000_000_000, 1, 9), flags=Flag.TO_ROOM)
    async with pixiu.connect(cluster.target) as px, px.subscribe(room=42) as subscription:
        cluster.gateways[0].send(signals[0], signals[0], signals[1])
        cluster.gateways[0].send(signals[1])
        cluster.gateways[0].send(signals[0], message, signals[2])
        got = [await anext(subscription) for _ in range(4)]
        assert [(one.payload, one.signal) for one in got] == [(b"s0", True), (b"s1", True), (b"m", False), (b"s2", True)]


@pytest.mark.slow
def test_the_synchronous_twin(background: Any, request: pytest.FixtureRequest) -> None:
    cluster = request.getfixturevalue("empty_cluster")
    background.run(cluster.start(proxies=2))
    try:
        with pixiu.connect_sync(cluster.target) as px:
            receipt = px.room(42).signal_soon(b"go", receipt=True)
            receipt.wait(timeout_s=10.0)
            assert receipt.id
            for proxy in cluster.proxies:
                proxy.delivering = False
            with pytest.raises(Undelivered):
                px.room(42).signal(b"go", receipt=True)
    finally:
        background.run(cluster.stop())
