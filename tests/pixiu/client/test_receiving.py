"""Receiving mail over real gRPC streams: acknowledged, handled, given up; connections lost, moved, replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import pixiu
from pixiu.client.inbox.dead_letters import dead_letter_uin, decode
from pixiu.client.inbox.inbox import Inbox
from pixiu.client.inbox.mail import Mail
from pixiu.errors import InvalidArgument, LoginReplaced, NotConnected, NotServed, OutcomeUnknown, Overloaded, Unavailable
from pixiu.ids import MAX_ID, snowflake, uin_of_name
from pixiu.wire.record import Kind
from pixiu.wire.record import encode as record_of
from pixiu.wire.v1 import wire_pb2
from tests.pixiu.client.fake_inboxes import SENT_MS, WINDOW

Until = Callable[[Callable[[], object]], Awaitable[None]]
PHONE = ("phone", 0)
QUICK: dict[str, Any] = {"backoff_s": 0.01, "max_backoff_s": 0.05}


async def take(inbox: Inbox, count: int) -> list[Mail]:
    return [await anext(inbox) for _ in range(count)]


def payloads(mails: list[Mail]) -> list[bytes]:
    return [mail.payload for mail in mails]


async def test_mail_has_all_that_the_sender_said_and_its_place(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    msg = cluster.inboxes.put(7, b"hi", extension=b"{}", lifetime_min=0)
    async with pixiu.connect(cluster.target, client="reader") as px, px.inbox(uin=7, device="phone") as inbox:
        (mail,) = await take(inbox, 1)
        assert (mail.payload, mail.sender, mail.extension, mail.type) == (b"hi", 9, b"{}", 0)
        assert (mail.lane, mail.seq, mail.msg_id, mail.redelivered, mail.acknowledged) == (1, 1, msg, False, False)
        assert (mail.sent_at_ms, mail.message_id) == (SENT_MS, snowflake(SENT_MS, 3, 1))
        assert mail.message.payload == b"hi"
        assert repr(mail) == f"Mail(lane=1, seq=1, msg_id={msg:016x}, bytes=2)", "and not what is in it"
        (hello,) = cluster.gateways[0].hellos
        assert (hello.uin, hello.client, hello.mail, hello.chat, hello.device) == (7, "phone", True, False, 0)
        assert (inbox.uin, inbox.gateway) == (7, cluster.gateways[0].address)
        mail.acknowledge()
        mail.acknowledge()
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [])
        assert cluster.inboxes.ranges == [(1, 1, 1)]
    await until(lambda: not cluster.gateways[0].streams)


async def test_a_window_of_each_lane_and_no_more_until_it_is_acknowledged(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    for number in range(200):
        cluster.inboxes.put(7, b"%d" % number)
    cluster.inboxes.put(7, b"first", lane=0)
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        await until(lambda: inbox.unacknowledged == WINDOW + 1)
        (first, *rest) = await take(inbox, WINDOW + 1)
        assert (first.payload, payloads(rest)) == (b"first", [b"%d" % number for number in range(WINDOW)])
        first.acknowledge()
        more = asyncio.ensure_future(anext(inbox))
        await until(lambda: inbox.unacknowledged == WINDOW)
        assert not more.done()
        rest[0].acknowledge()
        assert (await more).payload == b"%d" % WINDOW
        for mail in rest:
            mail.acknowledge()
        (await more).acknowledge()
        for number in range(WINDOW + 1, 200):
            (mail,) = await take(inbox, 1)
            assert mail.payload == b"%d" % number
            mail.acknowledge()
        await inbox.flush()
        assert cluster.inboxes.missing(7, PHONE) == []
        assert len(cluster.inboxes.ranges) < 150, "many go together"


async def test_flush_waits_until_the_gateway_has_what_was_acknowledged(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    (gateway,) = cluster.gateways
    cluster.inboxes.put(7, b"x")
    async with pixiu.connect(cluster.target, **QUICK) as px, px.inbox(uin=7, device="phone") as inbox:
        (mail,) = await take(inbox, 1)
        gateway.confirming = False
        mail.acknowledge()
        flushing = asyncio.create_task(inbox.flush())
        await until(lambda: gateway.unconfirmed)
        assert not flushing.done()
        assert cluster.inboxes.missing(7, PHONE) == []
        gateway.confirm()
        await flushing
        gateway.confirming = False
        with pytest.raises(Unavailable, match=rf"within 0.1 s \(gateway {gateway.address} did not answer\)"):
            await inbox.flush(timeout_s=0.1)
        flushing = asyncio.create_task(inbox.flush())
        await until(lambda: len(gateway.unconfirmed) == 2)
        gateway.unconfirmed.clear()
        gateway.confirming = True
        gateway.push(None)
        with pytest.raises(OutcomeUnknown, match="is redelivered, and is acknowledged again"):
            await flushing
        await inbox.flush()


async def test_flushes_that_nobody_answers_are_bounded(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start(gateways=1)
    monkeypatch.setattr("pixiu.client.receive.gateway_stream.MAX_UNCONFIRMED", 3)
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        cluster.gateways[0].confirming = False
        for _ in range(3):
            with pytest.raises(Unavailable):
                await inbox.flush(timeout_s=0.01)
        with pytest.raises(Overloaded, match="await each flush"):
            await inbox.flush()
        cluster.gateways[0].confirm()


async def test_what_was_not_acknowledged_comes_again_in_the_next_process_marked(cluster: Any) -> None:
    await cluster.start(gateways=1)
    for number in range(4):
        cluster.inboxes.put(7, b"%d" % number)
    async with pixiu.connect(cluster.target, uin=7, client="phone") as px, px.inbox() as inbox:
        mails = await take(inbox, 4)
        assert [mail.redelivered for mail in mails] == [False] * 4
        mails[0].acknowledge()
        mails[2].acknowledge()
    assert cluster.inboxes.missing(7, PHONE) == [2, 4], "closing sends what was acknowledged"
    with pytest.raises(NotConnected, match=r"the inbox is closed.*redelivered"):
        mails[1].acknowledge()
    mails[0].acknowledge()
    async with pixiu.connect(cluster.target, uin=7, client="phone") as px, px.inbox() as inbox:
        assert [(mail.payload, mail.redelivered) for mail in await take(inbox, 2)] == [(b"1", True), (b"3", True)]


async def test_two_devices_each_get_everything(cluster: Any) -> None:
    await cluster.start(gateways=2)
    for number in range(3):
        cluster.inboxes.put(7, b"%d" % number)
    async with (
        pixiu.connect(cluster.target, uin=7) as px,
        px.inbox(device="phone") as phone,
        px.inbox(device="desk") as desk,
    ):
        for inbox in (phone, desk):
            mails = await take(inbox, 3)
            assert payloads(mails) == [b"0", b"1", b"2"]
            for mail in mails:
                mail.acknowledge()
            await inbox.flush()
    assert cluster.inboxes.missing(7, PHONE) == cluster.inboxes.missing(7, ("desk", 0)) == []


async def test_a_lost_connection_repeats_nothing_and_its_acknowledgements_are_said_again(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    for number in range(5):
        cluster.inboxes.put(7, b"%d" % number)
    async with pixiu.connect(cluster.target, **QUICK) as px, px.inbox(uin=7, device="phone") as inbox:
        mails = await take(inbox, 3)
        cluster.inboxes.deaf = True
        mails[0].acknowledge()
        mails[2].acknowledge()
        await until(lambda: len(cluster.inboxes.ranges) == 2)
        cluster.inboxes.deaf = False
        (served,) = [gateway for gateway in cluster.gateways if gateway.streams]
        await served.kill()
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [2, 4, 5])
        assert inbox.gateway != served.address
        mails[1].acknowledge()
        assert payloads(await take(inbox, 2)) == [b"3", b"4"]
        cluster.inboxes.put(7, b"5")
        assert payloads(await take(inbox, 1)) == [b"5"]
        await inbox.flush()
        assert cluster.inboxes.missing(7, PHONE) == [4, 5, 6]
        assert (inbox.counters.reconnects, inbox.counters.received) == (1, 6)
        assert inbox.counters.repeated >= 3


@pytest.mark.slow
async def test_a_move_from_a_draining_gateway_loses_and_repeats_nothing(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=2)
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        (old,) = [gateway for gateway in cluster.gateways if gateway.streams]
        (new,) = [gateway for gateway in cluster.gateways if gateway is not old]
        cluster.inboxes.put(7, b"0")
        (first,) = await take(inbox, 1)
        new.confirming = False
        old.push(wire_pb2.SubscribeReply(draining=True))
        await until(lambda: new.unconfirmed)
        # The login at the new one replaces the old one, which says so.
        cluster.inboxes.put(7, b"1")
        old.push(wire_pb2.SubscribeReply(error_code="LOGIN_REPLACED", error_text="the same device connected elsewhere"))
        first.acknowledge()
        new.confirm()
        assert payloads(await take(inbox, 1)) == [b"1"]
        await until(lambda: inbox.gateway == new.address)
        cluster.inboxes.put(7, b"2")
        (last,) = await take(inbox, 1)
        last.acknowledge()
        await inbox.flush()
        await until(lambda: not old.streams)
        assert (last.payload, cluster.inboxes.missing(7, PHONE)) == (b"2", [2])
        assert (inbox.counters.moves, inbox.counters.received) == (1, 3)


async def test_the_same_device_elsewhere_ends_the_inbox(cluster: Any) -> None:
    await cluster.start(gateways=1)
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        cluster.inboxes.put(7, b"0")
        (mail,) = await take(inbox, 1)
        text = "the same device connected elsewhere"
        cluster.gateways[0].push(wire_pb2.SubscribeReply(error_code="LOGIN_REPLACED", error_text=text))
        with pytest.raises(LoginReplaced, match=text):
            await anext(inbox)
        with pytest.raises(LoginReplaced):
            await inbox.flush()
        mail.acknowledge()
    assert cluster.inboxes.missing(7, PHONE) == [1]


async def test_damaged_mail_is_fetched_again_by_another_connection(cluster: Any) -> None:
    await cluster.start(gateways=1)
    cluster.inboxes.damage = 2
    for number in range(3):
        cluster.inboxes.put(7, b"%d" % number)
    async with pixiu.connect(cluster.target, **QUICK) as px, px.inbox(uin=7, device="phone") as inbox:
        assert payloads(await take(inbox, 3)) == [b"0", b"1", b"2"]
        assert inbox.counters.damaged >= 1
        cluster.gateways[0].push(wire_pb2.SubscribeReply(mail=b"rubbish", mail_count=4_000_000_000))
        cluster.inboxes.put(7, b"3")
        assert payloads(await take(inbox, 1)) == [b"3"]
        assert inbox.counters.gaps == 0


async def test_gaps_are_told_in_their_place_and_a_callback_that_fails_disturbs_nothing(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    told: list[pixiu.MailGap] = []

    def on_gap(gap: pixiu.MailGap) -> None:
        told.append(gap)
        raise RuntimeError("the application's fault")

    cluster.inboxes.entry(7, 1, 99, b"")
    cluster.inboxes.put(7, b"old", lifetime_min=1)
    cluster.inboxes.put(7, b"new")
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone", on_gap=on_gap) as inbox:
        assert payloads(await take(inbox, 1)) == [b"new"]
        assert [(gap.lane, gap.up_to, gap.reason.value) for gap in told] == [(1, 1, "gone"), (1, 2, "expired")]
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [3])
        assert (inbox.counters.callback_errors, inbox.counters.gaps, inbox.counters.expired) == (2, 2, 1)


async def test_run_acknowledges_what_the_handler_took(cluster: Any) -> None:
    await cluster.start(gateways=1)
    for number in range(300):
        cluster.inboxes.put(7, b"%d" % number, lane=number % 2)
    got: list[list[int]] = [[], []]
    async with pixiu.connect(cluster.target) as px:
        inbox = px.inbox(uin=7, device="phone")

        async def handler(mail: Mail) -> None:
            await asyncio.sleep(0)
            got[mail.lane].append(int(mail.payload))
            if len(got[0]) + len(got[1]) == 300:
                asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(inbox.close()))

        await inbox.run(handler)
        assert got == [list(range(0, 300, 2)), list(range(1, 300, 2))]
        assert cluster.inboxes.missing(7, PHONE, 0) == cluster.inboxes.missing(7, PHONE, 1) == []


async def test_a_handler_that_fails_is_called_again_and_its_lane_waits(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    calls: list[bytes] = []

    def handler(mail: Mail) -> None:
        calls.append(mail.payload)
        if mail.payload == b"bad" and calls.count(b"bad") < 3:
            raise RuntimeError("not yet")

    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        for payload in (b"a", b"bad", b"c"):
            cluster.inboxes.put(7, payload)
        running = asyncio.create_task(inbox.run(handler, retries=2, backoff_s=0.01))
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [])
        assert calls == [b"a", b"bad", b"bad", b"bad", b"c"]
        assert (inbox.counters.retries, inbox.counters.dead_letters) == (2, 0)
        with pytest.raises(InvalidArgument, match="takes this inbox's mail already"):
            await inbox.run(handler)
        with pytest.raises(InvalidArgument, match="`run` consumes this inbox's mail"):
            await anext(inbox)
        await inbox.close()
        await running


async def test_what_is_given_up_is_a_dead_letter_before_it_is_acknowledged(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    mailer = cluster.proxies[0].mailer
    mailer.holding = True

    def handler(mail: Mail) -> None:
        if mail.payload == b"bad":
            raise KeyError("no such account")

    msg = cluster.inboxes.put(7, b"bad")
    cluster.inboxes.put(7, b"behind")
    cluster.inboxes.put(7, b"other lane", lane=0)
    async with pixiu.connect(cluster.target, mail_timeout_s=5.0) as px, px.inbox(uin=7, device="phone") as inbox:
        running = asyncio.create_task(inbox.run(handler, retries=1, backoff_s=0.01))
        await until(lambda: mailer.records)
        await until(lambda: cluster.inboxes.missing(7, PHONE, 0) == [])
        assert cluster.inboxes.missing(7, PHONE) == [1, 2], "not before the dead letter is confirmed"
        mailer.holding = False
        mailer.say(None)
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [])
        assert {record.key for record in mailer.records} == {dead_letter_uin(7)}
        assert len({record.snowflake_id for record in mailer.records}) == 1, "sent again with the same ID"
        assert set(mailer.levels) == {0}
        letter = decode(mailer.records[-1].body)
        assert (letter.uin, letter.msg_id, letter.seq, letter.lane, letter.attempts) == (7, msg, 1, 1, 2)
        assert letter.reason == "KeyError: 'no such account'"
        assert letter.record == cluster.inboxes.entries[7, 1][0][1]
        assert (inbox.counters.dead_letters, inbox.counters.retries) == (1, 1)
        await inbox.close()
        await running


async def test_a_dead_letter_is_sent_until_the_cluster_has_it(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    mailer = cluster.proxies[0].mailer
    record = record_of(Kind.MAIL, 7, b"x" * 2000, snowflake(SENT_MS, 3, 9), type=64)
    cluster.inboxes.entry(7, 1, 5, record)
    refusals: dict[bytes, str] = {}

    def handler(mail: Mail) -> None:
        raise RuntimeError("never")

    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        seen = 0

        class Codes(dict[bytes, str]):
            """What the cluster says to each body: full, then too large, then yes."""

            def get(self, body: bytes, default: Any = None) -> Any:
                nonlocal seen
                seen += 1
                code = {1: "INBOX_FULL", 2: "RECORD_TOO_LARGE"}.get(seen, "")
                refusals[body] = code
                return code

        mailer.codes = Codes()
        running = asyncio.create_task(inbox.run(handler, retries=0, backoff_s=0.01))
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [])
        assert list(refusals.values()) == ["RECORD_TOO_LARGE", ""]
        letter = decode(mailer.records[-1].body)
        assert (letter.record, letter.record_size, letter.msg_id) == (b"", len(record), 5)
        assert (inbox.counters.dead_letters, inbox.counters.dead_letter_failures) == (1, 2)
        await inbox.close()
        await running


async def test_a_run_that_is_cancelled_leaves_its_mail_to_the_next_one(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    cluster.inboxes.put(7, b"0")
    cluster.inboxes.put(7, b"1")
    began: list[bytes] = []

    async def stuck(mail: Mail) -> None:
        began.append(mail.payload)
        await asyncio.Event().wait()

    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        running = asyncio.create_task(inbox.run(stuck))
        await until(lambda: began)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cluster.inboxes.ranges == []
        assert payloads(await take(inbox, 2)) == [b"0", b"1"]


async def test_a_handler_that_acknowledged_and_then_fails_is_not_called_again(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)
    calls: list[bytes] = []

    def handler(mail: Mail) -> None:
        calls.append(mail.payload)
        mail.acknowledge()
        raise RuntimeError("afterwards")

    cluster.inboxes.put(7, b"0")
    cluster.inboxes.put(7, b"1")
    async with pixiu.connect(cluster.target) as px, px.inbox(uin=7, device="phone") as inbox:
        running = asyncio.create_task(inbox.run(handler, backoff_s=0.01))
        await until(lambda: cluster.inboxes.missing(7, PHONE) == [])
        assert (calls, inbox.counters.retries, inbox.counters.dead_letters) == ([b"0", b"1"], 0, 0)
        await inbox.close()
        await running


async def test_closing_ends_who_waits_and_the_client_closes_what_is_left(cluster: Any, until: Until) -> None:
    await cluster.start(gateways=1)

    async def all_of(inbox: Inbox) -> list[bytes]:
        return [mail.payload async for mail in inbox]

    async with pixiu.connect(cluster.target) as px:
        one, other = px.inbox(uin=7, device="phone"), px.inbox(uin=8, device="phone")
        reading = [asyncio.create_task(all_of(one)), asyncio.create_task(other.run(lambda mail: None))]
        await until(lambda: one.gateway and other.gateway)
        await one.close()
        await one.close()
        assert one.closed
        assert await reading[0] == []
        for work in (one.ready(), one.flush(), one.run(lambda mail: None)):
            with pytest.raises(NotConnected, match="the inbox is closed"):
                await work
    await reading[1]
    await until(lambda: not cluster.gateways[0].streams)


async def test_what_a_user_can_get_wrong_is_said_at_once(cluster: Any) -> None:
    await cluster.start(gateways=1)
    with pytest.raises(NotConnected):
        pixiu.connect(cluster.target).inbox(uin=7, device="phone")
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(InvalidArgument, match=r"inbox\(uin=…\)"):
            px.inbox(device="phone")
        with pytest.raises(InvalidArgument, match="2\\^63-1"):
            px.inbox(uin=MAX_ID + 1, device="phone")
        with pytest.raises(InvalidArgument, match=r"stays the same: inbox\(device=…\)"):
            px.inbox(uin=7)
        with pytest.raises(InvalidArgument, match="at most 128 bytes"):
            px.inbox(uin=7, device="é" * 65)
        inbox = px.inbox(uin=7, device="phone")
        for wrong in ({"retries": -1}, {"retries": 1001}, {"backoff_s": 0.0}, {"backoff_s": 2.0, "max_backoff_s": 1.0}):
            with pytest.raises(InvalidArgument):
                await inbox.run(lambda mail: None, **wrong)
    async with pixiu.connect(cluster.target, uin=7, device=5, client="reader") as px, px.inbox():
        assert [(hello.uin, hello.device, hello.client) for hello in cluster.gateways[0].hellos] == [(7, 5, "reader")]
    assert uin_of_name("phone") != uin_of_name("desk")


@pytest.mark.slow
async def test_a_cluster_that_delivers_no_mail_says_so(cluster: Any) -> None:
    await cluster.start(gateways=1)
    cluster.gateways[0].relays = False
    async with pixiu.connect(cluster.target) as px:
        with pytest.raises(NotServed, match="no relays"):
            async with px.inbox(uin=7, device="phone"):
                raise AssertionError("it must not begin")
        with pytest.raises(NotServed, match="no relays"):
            await anext(px.inbox(uin=7, device="desk"))
    await cluster.gateways[0].kill()
    cluster.gateways.clear()
    async with pixiu.connect(cluster.target, connect_timeout_s=0.3) as px:
        with pytest.raises(Unavailable, match=r"no gateway accepted the inbox within 0.3 s \(the cluster has no gateway"):
            await anext(px.inbox(uin=7, device="phone"))


def test_the_synchronous_twin(empty_cluster: Any, background: Any) -> None:
    cluster = empty_cluster
    background.run(cluster.start(gateways=1))
    try:
        for number in range(3):
            background.call(lambda number=number: cluster.inboxes.put(7, b"%d" % number))
        with pixiu.connect_sync(cluster.target, uin=7) as px:
            with px.inbox(device="phone") as inbox:
                mails = [next(inbox) for _ in range(2)]
                assert payloads(mails) == [b"0", b"1"]
                for mail in mails:
                    mail.acknowledge()
                inbox.flush()
                assert background.call(lambda: cluster.inboxes.missing(7, PHONE)) == [3]
                assert (inbox.uin, inbox.unacknowledged, inbox.counters.acknowledged) == (7, 1, 2)
                assert inbox.gateway == cluster.gateways[0].address
                third = next(inbox)
            with pytest.raises(NotConnected, match="the inbox is closed"):
                third.acknowledge()
            assert list(inbox) == []
            got: list[bytes] = []
            with px.inbox(device="phone") as inbox:

                def handler(mail: Mail) -> None:
                    got.append(mail.payload)
                    if len(got) < 2:
                        raise RuntimeError("once more")
                    mail.acknowledge()
                    inbox.close()

                inbox.run(handler, backoff_s=0.01)
            assert got == [b"2", b"2"]
            assert background.call(lambda: cluster.inboxes.missing(7, PHONE)) == []
    finally:
        background.run(cluster.stop())
