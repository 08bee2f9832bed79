"""What sending waits for, what becomes of failures that nobody awaits, and many messages at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import pixiu
from pixiu.errors import Dropped, InvalidArgument, NotAuthenticated, NotSent, OutcomeUnknown, Overloaded, RecordTooLarge
from pixiu.wire.record import Record
from pixiu.wire.v1 import wire_pb2

Until = Callable[[Callable[[], object]], Awaitable[None]]


def refusing(*keys: int, code: str = "RECORD_TOO_LARGE", times: int = 1 << 30, retry_after_ms: int = 0) -> Callable[[Record], Any]:
    """Refuse messages of some keys, so many times, and say when to come again."""
    left = [times]

    def answer(record: Record) -> wire_pb2.PublishFailure | None:
        if record.key not in keys or not left[0]:
            return None
        left[0] -= 1
        return wire_pb2.PublishFailure(code=code, text=f"refused {record.key}", retry_after_ms=retry_after_ms)

    return answer


async def test_send_returns_when_the_message_is_accepted_and_raises_why_it_was_not(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.failing = refusing(2)
    async with pixiu.connect(cluster.target) as px:
        receipt = await px.room(1).send(b"x")
        assert (receipt.done, receipt.error, receipt.id) == (True, None, proxy.records[0].snowflake_id)
        with pytest.raises(RecordTooLarge, match="refused 2"):
            await px.room(2).send(b"x")
        receipt = px.room(2).send_soon(b"x")
        assert not receipt.done
        assert isinstance(await receipt.outcome(), RecordTooLarge)


async def test_what_is_refused_for_now_is_sent_again_with_its_id_after_the_time_that_the_cluster_names(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.failing = refusing(1, code="OVERLOADED", times=2, retry_after_ms=30)
    loop = asyncio.get_running_loop()
    async with pixiu.connect(cluster.target) as px:
        begun = loop.time()
        receipt = await px.room(1).send(b"x")
        assert loop.time() - begun >= 0.06
        assert {record.snowflake_id for record in proxy.records} == {receipt.id}
        assert len(proxy.records) == 3
        proxy.failing = refusing(1, code="OVERLOADED", retry_after_ms=60_000)
        with pytest.raises(Overloaded):
            await px.room(1).send(b"x", timeout_s=20)


async def test_what_was_dropped_on_the_way_is_sent_again_with_its_id_before_the_next_message_of_its_sender(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.failing = refusing(1, code="DROPPED", times=2)
    async with pixiu.connect(cluster.target, backoff_s=0.01) as px:
        receipts = [await px.room(1).send(b"%d" % number) for number in range(2)]
        assert proxy.payloads() == [b"0", b"0", b"0", b"1"]
        assert [record.snowflake_id for record in proxy.records] == [receipts[0].id] * 3 + [receipts[1].id]
        proxy.failing = refusing(1, code="DROPPED")
        proxy.records.clear()
        assert isinstance(await px.room(1).send_soon(b"y").outcome(), Dropped)  # others may have followed it: the program knows
        assert proxy.payloads() == [b"y"]
    async with pixiu.connect(cluster.target, backoff_s=100, max_backoff_s=100) as px:
        with pytest.raises(Dropped):
            await px.room(1).send(b"x")  # to wait that long for the next try is more than `send` takes


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda px: px.presence(7), r"uins is a list of UINs, not 7; write presence\(\[7\]\)"),
        (lambda px: px.user(1).mail(b"x", expire=5), "expire is a timedelta, not 5"),
        (lambda px: px.user(1).mail(b"x", to=8), "to is a list of UINs, not 8"),
        (lambda px: px.user(1).mail(b"x", priority=3), "no option 'priority'.*lane"),
        (lambda px: px.room(1).send(b"x", priority=3), "no option 'priority'.*first_lane"),
        (lambda px: px.room(1).signal(b"x", priority=3), "no option 'priority'"),
        (lambda px: px.subscribe(room=1, rooms="42"), "rooms is a list of RoomIDs, not '42'"),
        (lambda px: px.subscribe(rooms=42), "rooms is a list of RoomIDs, not 42"),
        (lambda px: px.subscribe(rooms=[[42]]), r"a RoomID is from 1 to 2\^62-1, not \[42\]"),
        (lambda px: anext(px.subscribe()), "nothing is subscribed to"),
    ],
)
async def test_wrong_arguments_are_named(cluster: Any, call: Callable[[Any], Any], text: str) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match=text):
            await call(px)


async def test_receipts_say_what_became_of_them(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    proxy.failing = refusing(2)
    async with pixiu.connect(cluster.target) as px:
        good, bad, mail = px.room(1).send_soon(b"x"), px.room(2).send_soon(b"x"), px.user(7).mail_soon(b"x")
        assert "unresolved" in repr(good)
        await good.wait()
        await bad.outcome()
        await mail.wait()
        assert repr(good) == f"<Receipt id={good.id:016x} done>"
        assert repr(bad) == f"<Receipt id={bad.id:016x} failed RECORD_TOO_LARGE>"
        assert repr(mail) == f"<MailReceipt id={mail.id:016x} done>"


async def test_a_login_that_ended_is_said_at_once_and_is_no_unknown_outcome(cluster: Any) -> None:
    await cluster.start(proxies=2)
    async with pixiu.connect(",".join(proxy.address for proxy in cluster.proxies), token="once") as px:
        writer = px.mail_writer()
        await writer.space()
        for proxy in cluster.proxies:
            proxy.refuses_logins = proxy.mailer.refuses_logins = True
        with pytest.raises(NotAuthenticated, match="the token has expired"):
            await px.room(1).send(b"x", timeout_s=60)
        with pytest.raises(NotAuthenticated, match="the token has expired"):
            await px.user(7).mail(b"x")
        for proxy in cluster.proxies:
            proxy.refuses_logins = proxy.mailer.refuses_logins = False
        await px.room(1).send(b"y")  # a function may give another token for the next stream
        await px.user(7).mail(b"y")


@pytest.mark.slow
async def test_a_call_may_have_a_time_of_its_own_and_says_whether_the_message_may_have_been_delivered(
    cluster: Any, until: Until
) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    async with pixiu.connect(cluster.target, publish_timeout_s=2.0, backoff_s=5.0) as px:
        await px.room(1).send(b"warm")
        proxy.holding = True
        with pytest.raises(OutcomeUnknown, match="its outcome is unknown"):
            await px.room(1).send(b"x", timeout_s=0.05)
        with pytest.raises(TimeoutError):
            await px.room(1).send_soon(b"x", timeout_s=0.05)
        with pytest.raises(OutcomeUnknown):
            await px.room(1).signal(b"x", timeout_s=0.05)
        with pytest.raises(OutcomeUnknown, match="still unresolved"):
            px.room(1).send_soon(b"x")
            await px.flush(timeout_s=0.05)
        await proxy.kill()
        await until(lambda: px.stats().streams_died)
        with pytest.raises(ConnectionError, match="was not sent"):
            await px.room(1).send(b"x", timeout_s=0.05)
        assert px.stats().failures_by_code["NOT_SENT"] == 1


async def test_failures_that_nobody_looks_at_reach_the_callback_and_others_do_not(cluster: Any, until: Until) -> None:
    await cluster.start()
    cluster.proxies[0].failing = refusing(2)
    found: list[pixiu.SendFailure] = []
    async with pixiu.connect(cluster.target, on_failure=found.append) as px:
        await px.room(1).send(b"a number for IDs")
        lost = px.room(2).send_soon(b"x").id
        await px.flush()
        await until(lambda: found)
        assert [(failure.id, type(failure.error)) for failure in found] == [(lost, RecordTooLarge)]
        kept = px.room(2).send_soon(b"x")
        await px.flush()
        with pytest.raises(RecordTooLarge):
            await kept
        seen = px.room(2).send_soon(b"x")
        await px.flush()
        assert isinstance(seen.error, RecordTooLarge)
        del kept, seen
        px.room(2).signal_soon(b"x")
        await until(lambda: len(found) == 2)
    assert len(found) == 2


async def test_without_a_callback_they_are_logged_each_code_once(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    await cluster.start()
    cluster.proxies[0].failing = refusing(2)

    def broken(_: pixiu.SendFailure) -> None:
        raise ValueError("mine")

    with caplog.at_level(logging.WARNING, "pixiu.client"):
        async with pixiu.connect(cluster.target) as px:
            for _ in range(10):
                px.room(2).send_soon(b"x")
        assert [record.message.split()[0] for record in caplog.records] == ["sent_in_vain"]
        assert "RECORD_TOO_LARGE" in caplog.text
        async with pixiu.connect(cluster.target, on_failure=broken) as px:
            px.room(2).send_soon(b"x")
        assert "on_failure_callback_failed" in caplog.text


async def test_what_is_sent_before_a_number_for_ids_is_held_leaves_first_and_in_order(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        receipts = [px.room(1).send_soon(b"%d" % number) for number in range(50)]
        assert not any(receipt.id for receipt in receipts)
        await px.room(1).send(b"50")
        px.room(1).send_soon(b"51")
        signal, mail = px.room(1).signal_soon(b"signal"), px.user(7).mail_soon(b"mail")
        await signal
        await mail
        await px.flush()
        assert all(receipt.id and receipt.error is None for receipt in receipts)
    assert [record.body for record in cluster.proxies[0].records if record.key == 1 and record.kind == 1] == [
        b"%d" % number for number in range(52)
    ]
    assert [record.body for record in cluster.proxies[0].mailer.records] == [b"mail"]


async def test_early_sends_of_all_kinds_are_bounded_and_fail_when_the_client_closes(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].lend_for_ms = 0
    async with pixiu.connect(cluster.target, queue_records=3, publish_timeout_s=0.2) as px:
        receipts: list[Any] = [px.room(1).send_soon(b"x"), px.room(1).signal_soon(b"x"), px.user(7).mail_soon(b"x")]
        with pytest.raises(Overloaded, match="worker number"):
            px.room(1).send_soon(b"x")
        with pytest.raises(RecordTooLarge):
            px.user(7).mail_soon(bytes(1 << 20))
        for receipt in receipts:
            with pytest.raises(NotSent):
                await receipt


@pytest.mark.slow
async def test_many_messages_at_once_stay_in_order_and_the_first_failure_is_raised(cluster: Any) -> None:
    await cluster.start()
    (proxy,) = cluster.proxies
    async with pixiu.connect(cluster.target, queue_records=10) as px:
        receipts = await px.room(1).send_many([b"%d" % number for number in range(100)], type=3)
        assert [receipt.id for receipt in receipts] == [record.snowflake_id for record in proxy.records]
        assert proxy.payloads() == [b"%d" % number for number in range(100)]
        async with px.topic("a/b").writer() as writer:
            for number in range(100):
                await writer.send(b"%d" % number)
        assert px.stats().unresolved == 0
        proxy.failing = refusing(2)
        with pytest.raises(RecordTooLarge):
            await px.room(2).send_many([b"x"] * 20)
        with pytest.raises(RecordTooLarge):
            async with px.room(2).writer() as writer:
                for _ in range(20):
                    await writer.send(b"x")
        assert px.stats().accepted == 200
    async with pixiu.connect(cluster.target, publish_timeout_s=2.0) as px:
        proxy.holding = True
        with pytest.raises(OutcomeUnknown, match="1 messages"):
            writer = px.room(1).writer()
            await writer.send(b"x")
            await writer.wait_finished(timeout_s=0.05)


async def test_a_writer_raises_its_first_failure_and_the_others_are_reported(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].failing = refusing(2)
    found: list[pixiu.SendFailure] = []
    async with pixiu.connect(cluster.target, on_failure=found.append) as px:
        with pytest.raises(RecordTooLarge):
            async with px.room(2).writer() as writer:
                for _ in range(3):
                    await writer.send(b"x")
                await px.flush()
    assert [failure.error.code for failure in found] == [RecordTooLarge.code] * 2


def test_every_option_is_in_the_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sdk.md").read_text()
    assert [option.name for option in fields(pixiu.ClientOptions) if f"\n| `{option.name}` |" not in page] == []
