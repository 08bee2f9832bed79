"""The SDK's mail against real gRPC servers: confirmations, refusals, windows, streams that end, the synchronous twin."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import pixiu
from pixiu.errors import InboxFull, InvalidArgument, NotServed, OutcomeUnknown, Overloaded, TooManyReceivers, Unavailable
from pixiu.ids import snowflake_worker
from pixiu.wire.levels import Level
from pixiu.wire.record import Flag, Kind
from pixiu.wire.v1 import mail_pb2


async def test_mail_returns_when_it_is_confirmed(cluster: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    async with pixiu.connect(cluster.target, uin=5, client="post") as px:
        receipt = await px.user(7).mail(b"hi", level="persisted", lane=0, expire=timedelta(seconds=61), to=[8, 9, 8], type=3)
        assert (receipt.done, receipt.error, receipt.stored_as, receipt.replicas) == (True, None, 1000, 2)
        writer = px.mail_writer()
        assert writer.triples == {("pi", 0): pixiu.Triple(1, 3, 9)}
        assert writer.counters.confirmed == 1
    (record,) = mailer.records
    assert (record.kind, record.key, record.sender, record.flags, record.body) == (Kind.MAIL, 7, 5, 0, b"hi")
    assert (record.type, record.lane, record.lifetime_min, record.snowflake_id) == (3, 0, 2, receipt.id)
    assert (mailer.levels, mailer.more) == ([Level.PERSISTED.value], [[8, 9]])
    (hello,) = mailer.hellos
    assert (hello.client, hello.worker) == ("post", snowflake_worker(receipt.id))
    assert hello.generation > 100_000_000


async def test_a_derived_id_is_the_one_that_is_sent(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px, px.mail_writer() as writer:
        receipt = writer.send(7, b"row", derived_id=(1 << 63) - 1)
        own = writer.send(7, b"other")
        for wrong in (0, -1, 1 << 63):
            with pytest.raises(InvalidArgument, match="derived ID"):
                writer.send(7, b"row", derived_id=wrong)
    derived, plain = cluster.proxies[0].mailer.records
    assert (derived.snowflake_id, derived.flags, receipt.id) == ((1 << 63) - 1, Flag.DERIVED_ID, (1 << 63) - 1)
    assert (plain.snowflake_id, plain.flags) == (own.id, 0)


async def test_what_is_wrong_with_a_mail_shows_before_it_is_sent(cluster: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target) as px:
        user = px.user(7)
        for wrong in ({"lane": 2}, {"level": "sure"}, {"expire": timedelta()}, {"expire": timedelta(days=99)}, {"to": [0]}):
            with pytest.raises(InvalidArgument):
                await user.mail(b"x", **wrong)
        with pytest.raises(TooManyReceivers):
            await user.mail(b"x", to=range(1, 1002))
        with pytest.raises(pixiu.RecordTooLarge):
            await user.mail(bytes(1 << 20))
    assert not cluster.proxies[0].mailer.records


async def test_a_writer_sends_in_order_and_in_batches(cluster: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    async with pixiu.connect(cluster.target) as px, px.mail_writer() as writer:
        receipts = [writer.send(7, b"%d" % number) for number in range(3000)]
        await writer.wait_finished()
        assert all(receipt.done and receipt.error is None for receipt in receipts)
        assert [receipt.stored_as for receipt in receipts] == list(range(1000, 4000))
    assert mailer.bodies() == [b"%d" % number for number in range(3000)]
    assert mailer.batches < 300


async def test_flushed_sent_and_finished_are_three_things(cluster: Any, until: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    mailer.holding, mailer.taking = True, False
    async with pixiu.connect(cluster.target) as px, px.mail_writer() as writer:
        receipt = writer.send(7, b"a")
        await writer.flush()
        await until(lambda: mailer.records)
        sent, finished = asyncio.create_task(writer.wait_sent()), asyncio.create_task(writer.wait_finished())
        await asyncio.sleep(0.05)
        assert not sent.done()
        mailer.say(mail_pb2.MailReply(taken=1))
        await sent
        assert not finished.done()
        mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=1, count=1, copies=1, msg_ids=[5])]))
        await finished
        assert receipt.stored_as == 5


async def test_an_ended_stream_is_opened_again_and_everything_unconfirmed_sent_in_order(cluster: Any, until: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    mailer.holding = True
    async with pixiu.connect(cluster.target) as px, px.mail_writer() as writer:
        receipts = [writer.send(7, b"%d" % number) for number in range(50)]
        await until(lambda: len(mailer.records) == 50)
        mailer.holding = False
        mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=1, count=10, copies=1)]))
        mailer.say(mail_pb2.MailReply(end=mail_pb2.MailEnd(code="STALE_STREAM", text="the leader changed")))
        await until(lambda: len(mailer.hellos) == 2)
        receipts += [writer.send(7, b"%d" % number) for number in range(50, 60)]
        await writer.wait_finished()
        assert writer.counters.resent == 40
    assert mailer.bodies()[50:] == [b"%d" % number for number in range(10, 60)]
    assert len({record.snowflake_id for record in mailer.records}) == 60
    first, second = mailer.hellos
    assert second.generation > first.generation


async def test_a_proxy_that_dies_is_left_for_another_one(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=2)
    for proxy in cluster.proxies:
        proxy.mailer.holding = True
    async with pixiu.connect(",".join(proxy.address for proxy in cluster.proxies)) as px, px.mail_writer() as writer:
        receipts = [writer.send(7, b"%d" % number) for number in range(20)]
        await until(lambda: any(len(proxy.mailer.records) == 20 for proxy in cluster.proxies))
        used, other = sorted(cluster.proxies, key=lambda proxy: -len(proxy.mailer.records))
        other.mailer.holding = False
        await used.kill()
        await writer.wait_finished()
        assert [receipt.error for receipt in receipts] == [None] * 20
        assert other.mailer.bodies() == used.mailer.bodies()
        assert {record.snowflake_id for record in other.mailer.records} == {receipt.id for receipt in receipts}


async def test_a_proxy_that_drains_is_left_when_it_has_confirmed(cluster: Any, until: Any) -> None:
    await cluster.start(proxies=2)
    for proxy in cluster.proxies:
        proxy.mailer.holding = True
    async with pixiu.connect(cluster.target) as px, px.mail_writer() as writer:
        first = writer.send(7, b"first")
        writer.send(7, b"before")
        await until(lambda: any(len(proxy.mailer.records) == 2 for proxy in cluster.proxies))
        used, other = sorted(cluster.proxies, key=lambda proxy: -len(proxy.mailer.records))
        other.mailer.holding = False
        used.mailer.say(mail_pb2.MailReply(draining=True))
        used.mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=1, count=1, copies=1)]))
        await first  # what was said before that has come too
        writer.send(7, b"after")
        await asyncio.sleep(0.05)
        assert not other.mailer.records
        used.mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=2, count=1, copies=1)]))
        await writer.wait_finished()
    assert (used.mailer.bodies(), other.mailer.bodies()) == ([b"first", b"before"], [b"after"])


async def test_refusals_are_exceptions_of_their_own_and_the_first_one_shows_in_wait_finished(cluster: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    codes = ("ID_REUSED", "TOO_OLD", "DISK_FULL", "INBOX_FULL", "TOO_MANY_RECEIVERS", "RECORD_TOO_LARGE")
    mailer.codes = {code.encode(): code for code in codes}
    mailer.open = [9]
    async with pixiu.connect(cluster.target) as px:
        writer = px.mail_writer()
        await writer.space()
        receipts = [writer.send(7, body) for body in (b"good", *mailer.codes)]
        with pytest.raises(pixiu.IdReused):
            await writer.wait_finished()
        await writer.wait_finished()
        errors = [receipt.error for receipt in receipts]
        assert [error.code if error else "" for error in errors] == ["", *codes]
        with pytest.raises(InboxFull) as full:
            await receipts[4]
        assert full.value.open_inboxes == (9,)
        assert dict(writer.counters.failures_by_code) == dict.fromkeys(codes, 1)


async def test_who_keeps_no_mail_says_so_at_once(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].mailer.end = mail_pb2.MailEnd(code="NOT_SERVED", text="this cluster keeps no mail")
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(NotServed, match="keeps no mail"):
            await px.user(7).mail(b"x")
        await px.user(7).mail(b"y")


@pytest.mark.slow
async def test_mail_that_nobody_confirms_is_unknown_and_can_be_sent_again(cluster: Any, until: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    mailer.holding = True
    async with pixiu.connect(cluster.target, mail_timeout_s=0.6) as px:
        writer = px.mail_writer()
        await writer.space()
        receipt = writer.send(7, b"x", to=[8])
        await until(lambda: mailer.records)
        unknown = mail_pb2.MailResult(position=1, count=1, code="OUTCOME_UNKNOWN", text="some", open=[8])
        mailer.say(mail_pb2.MailReply(results=[unknown]))
        with pytest.raises(OutcomeUnknown, match="its outcome is unknown") as caught:
            await receipt
        assert caught.value.open_inboxes == (8,)
        mailer.holding = False
        assert writer.resend(receipt) is receipt
        await receipt
        assert {record.snowflake_id for record in mailer.records} == {receipt.id}
        with pytest.raises(InvalidArgument):
            writer.resend(receipt)


async def test_a_full_queue_refuses_and_room_waits(cluster: Any, until: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    mailer.holding = True
    async with pixiu.connect(cluster.target, queue_records=5) as px, px.mail_writer() as writer:
        for number in range(5):
            writer.send(7, b"%d" % number)
        with pytest.raises(Overloaded):
            writer.send(7, b"too much")
        space = asyncio.create_task(writer.space())
        await until(lambda: len(mailer.records) == 5)
        assert not space.done()
        mailer.holding = False
        mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=1, count=5, copies=1)]))
        await space
        writer.send(7, b"5")
        await writer.wait_finished()


async def test_space_is_for_a_whole_mail_and_not_for_a_part_of_one(cluster: Any, until: Any) -> None:
    await cluster.start()
    mailer = cluster.proxies[0].mailer
    mailer.holding = True
    async with pixiu.connect(cluster.target, max_record_bytes=1000, queue_bytes=1000) as px, px.mail_writer() as writer:
        for _ in range(2):
            writer.send(7, bytes(300))
        with pytest.raises(Overloaded):
            writer.send(7, bytes(300))
        space = asyncio.create_task(writer.space())
        await until(lambda: len(mailer.records) == 2)
        assert not space.done()
        mailer.holding = False
        mailer.say(mail_pb2.MailReply(results=[mail_pb2.MailResult(position=1, count=2, copies=1)]))
        await space
        writer.send(7, bytes(300))
        await writer.wait_finished()


@pytest.mark.slow
async def test_the_end_of_the_client_waits_for_mail_and_then_gives_it_up(cluster: Any) -> None:
    await cluster.start()
    cluster.proxies[0].mailer.holding = True
    async with pixiu.connect(cluster.target, mail_timeout_s=0.5) as px:
        writer = px.mail_writer()
        await writer.space()
        receipt = writer.send(7, b"x")
    assert isinstance(receipt.error, OutcomeUnknown)


@pytest.mark.slow
async def test_mail_that_never_left_says_that_it_was_not_sent(cluster: Any, until: Any) -> None:
    await cluster.start()
    async with pixiu.connect(cluster.target, mail_timeout_s=0.5) as px:
        writer = px.mail_writer()
        await writer.space()
        await cluster.proxies[0].kill()
        with pytest.raises((Unavailable, OutcomeUnknown)):
            await writer.send(7, b"x")


async def test_mail_is_spread_over_streams_with_a_worker_number_each(cluster: Any) -> None:
    await cluster.start(proxies=2)
    first, second = cluster.proxies
    async with pixiu.connect(cluster.target, mail_streams=2) as px, px.mail_writer() as writer:
        receipts = {uin: [writer.send(uin, b"%d" % number) for number in range(20)] for uin in (6, 7)}
        await writer.wait_finished()
        assert writer.counters.confirmed == 40
        assert writer.triples == {("pi", 0): pixiu.Triple(1, 3, 9)}
        first.mailer.codes = {b"bad": "ID_REUSED"}
        second.mailer.codes = {b"bad": "ID_REUSED"}
        bad = writer.send(7, b"bad")
        with pytest.raises(pixiu.IdReused):
            await bad
        with pytest.raises(pixiu.IdReused):
            await writer.wait_finished()
        first.mailer.codes = second.mailer.codes = {}
        await writer.resend(bad)
    for proxy in (first, second):
        (hello,) = proxy.mailer.hellos
        (uin,) = {record.key for record in proxy.mailer.records}
        assert {snowflake_worker(receipt.id) for receipt in receipts[uin]} == {hello.worker}
        assert [record.body for record in proxy.mailer.records][:20] == [b"%d" % number for number in range(20)]
    assert first.mailer.hellos[0].worker != second.mailer.hellos[0].worker


def test_the_synchronous_twin_sends_mail(empty_cluster: Any, background: Any) -> None:
    background.run(empty_cluster.start())
    mailer = empty_cluster.proxies[0].mailer
    mailer.codes = {b"bad": "ID_REUSED"}
    try:
        with pixiu.connect_sync(empty_cluster.target) as px:
            assert px.user(7).mail(b"one", lane=0).replicas == 2
            with px.mail_writer() as writer:
                receipts = [writer.send(7, b"%d" % number, to=[9]) for number in range(20)]
                writer.flush()
                writer.wait_sent()
                receipts[3].wait(timeout_s=10)
                writer.wait_finished()
                assert all(receipt.done and receipt.stored_as and receipt.id for receipt in receipts)
                bad = writer.send(7, b"bad")
                with pytest.raises(pixiu.IdReused):
                    bad.wait()
                assert isinstance(bad.error, pixiu.IdReused)
                with pytest.raises(pixiu.IdReused):
                    writer.wait_finished()
                mailer.codes = {}
                writer.resend(bad).wait()
                assert writer.counters.confirmed == 22
                assert writer.triples["pi", 0].epoch == 3
            with pytest.raises(pixiu.InvalidArgument):
                px.user(7).mail(b"x", lane=5)
    finally:
        background.run(empty_cluster.stop())
