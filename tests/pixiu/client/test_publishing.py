"""Publishing over real gRPC streams: acceptance, batching, dying and draining proxies, back-pressure, worker numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

import pixiu
from pixiu.client.send.streams import Receipt
from pixiu.errors import InvalidArgument, NotConnected, NotSent, OutcomeUnknown, Overloaded, RecordTooLarge
from pixiu.ids import snowflake_time_ms, snowflake_worker, topic_room
from pixiu.wire.record import Flag, Kind
from pixiu.wire.v1 import wire_pb2
from tests.support.clock_steps import IN_2018_MS, NOW_MS, STEPS_MS

Until = Callable[[Callable[[], object]], Awaitable[None]]


async def test_a_message_arrives_as_it_was_sent_and_its_receipt_says_that_it_was_accepted(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, uin=7, client="tests") as px:
        receipt = px.room(42).send_soon(b"hello", type=5, lifetime_min=3, extension=b'{"a":1}', first_lane=True)
        await receipt
        assert receipt.done
        assert receipt.error is None
        (record,) = cluster.proxies[0].records
        assert (record.kind, record.flags, record.key, record.sender) == (Kind.ROOM, Flag.TO_ROOM, 42, 7)
        assert (record.body, record.extension, record.type, record.lane) == (b"hello", b'{"a":1}', 5, 0)
        assert (record.lifetime_min, record.snowflake_id) == (3, receipt.id)
        assert px.stats().accepted == 1
    assert cluster.proxies[0].hellos[0].client == "tests"


async def test_a_topic_message_carries_its_name_and_goes_to_the_room_of_its_first_level(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        await px.topic("weather/shenzhen").send(b"rain")
    (record,) = cluster.proxies[0].records
    assert record.flags == Flag.TO_ROOM | Flag.TOPIC
    assert record.topic_and_payload() == ("weather/shenzhen", b"rain")
    assert record.key == topic_room("weather/else")
    assert record.lane == 1


async def test_what_is_queued_together_leaves_together(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        await px.room(1).send(b"first")
        for number in range(500):
            px.room(number + 1).send_soon(b"x")
        await px.flush()
        assert px.stats().unresolved == 0
    assert len(cluster.proxies[0].records) == 501
    assert len(cluster.proxies[0].batches) <= 3


async def test_keys_spread_over_the_proxies_that_the_cluster_tells(cluster: Any) -> None:
    await cluster.start(proxies=3)
    async with pixiu.connect(cluster.target) as px:
        for room in range(1, 10):
            px.room(room).send_soon(b"x")
        await px.flush()
    assert [{record.key % 3 for record in proxy.records} for proxy in cluster.proxies] == [{0}, {1}, {2}]


async def test_a_proxy_killed_with_messages_under_way_loses_none_and_keeps_ids_and_order(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    first, second = cluster.proxies
    async with pixiu.connect(f"{first.address},{second.address}") as px:
        await px.room(1).send(b"warm")
        first.holding = True
        receipts = [px.room(2).send_soon(f"{number}".encode()) for number in range(50)]
        await until(lambda: len(first.records) == 50)
        await first.kill()
        receipts += [px.room(2).send_soon(f"{number}".encode()) for number in range(50, 60)]
        for receipt in receipts:
            await receipt
        assert 50 <= px.stats().resent <= 60, "what was written to the dead stream goes once more"
    arrived = [record for record in second.records if record.key == 2]
    assert [record.body for record in arrived] == [f"{number}".encode() for number in range(60)]
    assert [record.snowflake_id for record in arrived] == [receipt.id for receipt in receipts]
    assert [record.snowflake_id for record in first.records] == [receipt.id for receipt in receipts[:50]]


async def test_a_proxy_that_comes_back_is_used_again(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    first = cluster.proxies[0]
    async with pixiu.connect(f"{cluster.target},{cluster.proxies[1].address}", backoff_s=0.01, max_backoff_s=0.05) as px:
        await px.room(2).send(b"1")
        await first.kill()
        await px.room(2).send(b"2")
        await first.start()

        async def sent_to_first() -> bool:
            await px.room(2).send(b"3")
            return b"3" in first.payloads()

        while not await sent_to_first():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_hung_proxy_is_left_in_time(cluster: Any) -> None:
    await cluster.start(proxies=2)
    cluster.proxies[0].holding = True
    async with pixiu.connect(f"{cluster.target},{cluster.proxies[1].address}", publish_timeout_s=2.0) as px:
        await px.room(2).send(b"x")
    assert cluster.proxies[1].payloads() == [b"x"]


async def test_a_draining_proxy_finishes_what_it_has_and_new_messages_go_elsewhere(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    first, second = cluster.proxies
    async with pixiu.connect(f"{first.address},{second.address}") as px:
        await px.room(2).send(b"before")
        cluster.hidden.add(first.address)
        first.drain()
        await until(lambda: px.cluster().proxies == (second.address,))
        await px.room(2).send(b"after")
        assert px.stats().resent == 0
        assert px.stats().failed == 0
    assert first.payloads() == [b"before"]
    assert second.payloads() == [b"after"]


async def test_a_draining_proxy_is_left_by_idle_clients_so_that_it_can_end(cluster: Any, until: Until) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    async with pixiu.connect(cluster.target, backoff_s=1.0) as px:
        await px.room(2).send(b"x")
        assert len(proxy._tell) == 2, "one stream for messages, one for the worker number"
        lease = next(iter(hello for hello in proxy.hellos if hello.lend_worker))
        assert not lease.returned_until_ms
        proxy.drain()
        await until(lambda: not proxy._tell)


async def test_refused_messages_raise_what_the_proxy_said_and_others_do_not(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].failing = lambda record: (
        wire_pb2.PublishFailure(code="OVERLOADED", text="room 2 sends too fast", retry_after_ms=250) if record.key == 2 else None
    )
    async with pixiu.connect(cluster.target) as px:
        good, bad = px.room(1).send_soon(b"x"), px.room(2).send_soon(b"x")
        await good
        with pytest.raises(Overloaded, match="too fast") as caught:
            await bad
        assert caught.value.retry_after_ms == 250
        with pytest.raises(Overloaded):
            await bad
        await px.flush()
        assert px.stats().failures_by_code == {"OVERLOADED": 1}


@pytest.mark.slow
async def test_when_no_proxy_confirms_the_outcome_is_said_to_be_unknown(cluster: Any, until: Until) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, publish_timeout_s=1.0, backoff_s=0.05) as px:
        cluster.proxies[0].holding = True
        receipt = px.room(1).send_soon(b"x")
        await until(lambda: cluster.proxies[0].records)
        await cluster.proxies[0].kill()
        with pytest.raises(OutcomeUnknown, match=r"outcome is unknown"):
            await receipt
        late = px.room(1).send_soon(b"y")
        with pytest.raises(NotSent, match=r"was not sent within its time \(1 s.*connection refused"):
            await late


async def test_send_waits_for_space_in_the_bounded_queue_and_goes_on_when_there_is_some(cluster: Any, until: Until) -> None:
    await cluster.start()
    proxy = cluster.proxies[0]
    async with pixiu.connect(cluster.target, queue_records=10) as px:
        await px.room(1).send(b"warm")
        proxy.holding = True
        for number in range(10):
            px.room(1).send_soon(f"{number}".encode())
        with pytest.raises(Overloaded, match="await send"):
            px.room(1).send_soon(b"x")
        waiting = [asyncio.create_task(px.room(1).send(f"{number}".encode())) for number in range(10, 30)]
        cancelled = waiting.pop(5)
        await until(lambda: len(proxy.records) == 11)
        assert not any(task.done() for task in waiting)
        cancelled.cancel()
        proxy.holding = False
        for queue in proxy._tell:
            queue.put_nowait(wire_pb2.PublishReply(up_to=11))
        for task in waiting:
            await task
        assert px.stats().unresolved == 0
    assert proxy.payloads()[1:] == [f"{number}".encode() for number in range(30) if number != 15]


async def test_a_receipt_can_be_awaited_by_several_and_one_giving_up_disturbs_none(cluster: Any, until: Until) -> None:
    await cluster.start()
    proxy = cluster.proxies[0]
    async with pixiu.connect(cluster.target) as px:
        await px.room(1).send(b"warm")
        proxy.holding = True
        receipt = px.room(1).send_soon(b"x")

        async def wait(one: Receipt) -> str:
            await one
            return "accepted"

        quitter, stayer = asyncio.create_task(wait(receipt)), asyncio.create_task(wait(receipt))
        await until(lambda: len(proxy.records) == 2)
        quitter.cancel()
        await asyncio.gather(quitter, return_exceptions=True)
        for queue in proxy._tell:
            queue.put_nowait(wire_pb2.PublishReply(up_to=2))
        assert await stayer == "accepted"


async def test_message_ids_use_the_lent_worker_number_which_is_given_back_at_the_end(cluster: Any, until: Until) -> None:
    await cluster.start()
    proxy = cluster.proxies[0]
    before_ms = time.time_ns() // 1_000_000
    async with pixiu.connect(cluster.target) as px:
        assert not [hello for hello in proxy.hellos if hello.lend_worker], "who only subscribes needs no number"
        receipts = [px.room(1).send_soon(b"x") for _ in range(3000)]
        await px.flush()
    assert len({receipt.id for receipt in receipts}) == 3000
    assert {snowflake_worker(receipt.id) for receipt in receipts} == {1}
    assert [receipt.id for receipt in receipts] == sorted(receipt.id for receipt in receipts)
    await until(lambda: proxy.returned)
    assert proxy.returned == [max(snowflake_time_ms(receipts[-1].id), proxy.returned[0])]
    assert proxy.returned[0] >= before_ms
    await until(lambda: proxy.clean_ends == 2)


@pytest.mark.slow
async def test_the_worker_number_is_renewed_before_its_time_is_over(cluster: Any, until: Until) -> None:
    await cluster.start()
    proxy = cluster.proxies[0]
    proxy.lend_for_ms = 1_000
    async with pixiu.connect(cluster.target, publish_timeout_s=2.0) as px:
        receipts = [px.room(1).send_soon(b"x")]
        await until(lambda: proxy.renewals >= 3)
        receipts.append(px.room(1).send_soon(b"x"))
        await px.flush()
        assert px.stats().failed == 0
    assert {snowflake_worker(receipt.id) for receipt in receipts} == {1}
    assert sum(hello.lend_worker for hello in proxy.hellos) == 1


@pytest.mark.parametrize("step_ms", STEPS_MS)
async def test_after_a_step_of_both_clocks_messages_go_on_at_once(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, step_ms: int
) -> None:
    now_ms = NOW_MS

    def clock_ms() -> int:
        return now_ms

    monkeypatch.setattr("pixiu.client.client.time", SimpleNamespace(time=lambda: now_ms / 1000, time_ns=lambda: now_ms * 1_000_000))
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.clock_ms = clock_ms
    async with pixiu.connect(cluster.target) as px:
        first = await px.room(1).send(b"x")
        now_ms += step_ms
        second = await px.room(1).send(b"y")
        assert second.id > first.id
        assert proxy.renewals == (step_ms > 0), "an answer to whoever waits, not by the next renewal, which the old clock named"
        now_ms -= step_ms
        assert (await px.room(1).send(b"z")).id > second.id


async def test_a_clock_before_2020_is_named(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pixiu.client.client.time", SimpleNamespace(time=lambda: IN_2018_MS / 1000, time_ns=lambda: IN_2018_MS * 1_000_000)
    )
    await cluster.start()
    cluster.proxies[0].clock_ms = lambda: IN_2018_MS
    async with pixiu.connect(cluster.target, publish_timeout_s=0.2) as px:
        with pytest.raises(NotSent, match="before 2020: set it"):
            await px.room(1).send_soon(b"x")


async def test_when_the_lender_dies_another_proxy_lends_and_hears_what_was_held(cluster: Any, until: Until) -> None:
    await cluster.start(proxies=2)
    async with pixiu.connect(",".join(proxy.address for proxy in cluster.proxies), backoff_s=0.01) as px:
        await px.room(1).send(b"x")
        (lender,) = [proxy for proxy in cluster.proxies if any(hello.lend_worker for hello in proxy.hellos)]
        (other,) = [proxy for proxy in cluster.proxies if proxy is not lender]
        await lender.kill()
        await until(lambda: any(hello.lend_worker for hello in other.hellos))
        await px.room(1).send(b"y")
        (hello,) = [hello for hello in other.hellos if hello.lend_worker]
        assert hello.returned_worker == 1
        assert hello.returned_until_ms > time.time_ns() // 1_000_000


@pytest.mark.slow
async def test_without_a_worker_number_sending_fails_with_what_to_check(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].lend_for_ms = 0
    async with pixiu.connect(cluster.target, publish_timeout_s=1.0) as px:
        with pytest.raises(NotSent, match=r"no proxy lent a worker number.*lent no worker number.*clock"):
            await px.room(1).send_soon(b"x")
        with pytest.raises(NotSent, match="no worker number was held"):
            await px.room(1).send(b"x", timeout_s=0.05)
        with pytest.raises(NotSent, match="no worker number for its ID"):
            await px.room(1).signal(b"x", timeout_s=0.05)


async def test_closing_waits_for_what_was_sent(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        for number in range(2000):
            px.room(number + 1).send_soon(b"x" * 1000)
    assert len(cluster.proxies[0].records) == 2000
    assert px.stats().accepted == 2000
    with pytest.raises(NotConnected):
        await px.room(1).send(b"x")
    with pytest.raises(NotConnected):
        px.room(1).send_soon(b"x")


async def test_a_proxy_that_stops_reading_pushes_back_without_losing_anything(cluster: Any, until: Until) -> None:
    await cluster.start()
    proxy = cluster.proxies[0]
    async with pixiu.connect(cluster.target, publish_timeout_s=30.0) as px:
        await px.room(1).send(b"warm")
        proxy.reading = False
        for number in range(300):
            px.room(number + 1).send_soon(bytes(20_000))
        assert px.stats().unresolved > 0
        proxy.reading = True
        await px.flush()
        assert px.stats().accepted == 301
    assert len(proxy.records) == 301


async def test_wrong_arguments_are_refused_where_they_are_given(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, max_record_bytes=1000) as px:
        with pytest.raises(RecordTooLarge, match=r"1040 bytes.*limit of 1000"):
            px.room(1).send_soon(bytes(1000))
        with pytest.raises(InvalidArgument, match="0 to 63"):
            px.room(1).send_soon(b"", type=64)
        with pytest.raises(InvalidArgument, match="lifetime_min"):
            px.room(1).send_soon(b"", lifetime_min=65536)
        with pytest.raises(InvalidArgument, match="65535"):
            px.room(1).send_soon(b"", extension=bytes(65536))
        with pytest.raises(InvalidArgument, match=r"\.encode\(\)"):
            px.room(1).send_soon("text")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"\.encode\(\)"):
            await px.room(1).send("text")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="RoomID"):
            px.room(1 << 62)
        with pytest.raises(InvalidArgument, match="wildcard"):
            px.topic("a/#")
        with pytest.raises(InvalidArgument, match=r"use room\("):
            px.topic("room/42")
        assert px.stats().sent == 0
