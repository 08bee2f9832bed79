"""The synchronous client, against servers in another thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest

import pixiu
from pixiu.errors import InvalidArgument, NotConnected, OutcomeUnknown, Overloaded, Unavailable
from pixiu.ids import snowflake
from pixiu.wire.record import Flag, Kind, encode
from pixiu.wire.v1 import wire_pb2

LIMIT_S = 30.0


def record(number: int, room: int) -> bytes:
    return encode(Kind.ROOM, room, str(number).encode(), snowflake(1_700_000_000_000, 1, number), flags=Flag.TO_ROOM)


@pytest.fixture(name="served")
def served_fixture(background: Any, request: pytest.FixtureRequest) -> Any:
    made = request.getfixturevalue("empty_cluster")
    background.run(made.start(proxies=2, gateways=1))
    yield made
    background.run(made.stop())


def test_messages_are_sent_in_order_and_receipts_can_be_waited_for(served: Any) -> None:
    with pixiu.connect_sync(served.target, client="sync", uin=5) as px:
        assert px.name == "sync"
        for number in range(3000):
            px.room(2).send_soon(str(number).encode())
        receipt = px.topic("a/b").send(b"x")
        assert receipt.done
        assert receipt.error is None
        assert receipt.id
        px.flush()
        assert px.stats().accepted == 3001
        assert len(px.cluster().proxies) == 2
    proxy = served.proxies[0]
    assert [one.body for one in proxy.records if one.key == 2] == [str(number).encode() for number in range(3000)]
    assert len(proxy.batches) < 1000
    assert threading.active_count() == len(threading.enumerate())
    assert not [thread for thread in threading.enumerate() if thread.name == "pixiu-client"]


@pytest.mark.slow
def test_failures_raise_in_the_callers_thread(served: Any, background: Any) -> None:
    def refuse(one: Any) -> Any:
        return wire_pb2.PublishFailure(code="OVERLOADED", text="slower", retry_after_ms=90_000) if one.key == 4 else None

    served.proxies[0].failing = refuse
    with pixiu.connect_sync(served.target, publish_timeout_s=5.0) as px:
        with pytest.raises(InvalidArgument):
            px.room(1).send_soon(b"", type=99)
        with pytest.raises(Overloaded, match="slower"):
            px.room(4).send_soon(b"x").wait()
        with pytest.raises(Overloaded, match="slower"):
            px.room(4).send(b"x", timeout_s=20)  # too late for another attempt
        px.room(2).send(b"x", timeout_s=20)
        background.call(lambda: setattr(served.proxies[0], "holding", True))
        with pytest.raises(TimeoutError):
            px.room(2).send_soon(b"x").wait(timeout_s=0.1)
        with pytest.raises(OutcomeUnknown):
            px.room(2).send(b"x", timeout_s=1.0)
        background.run(served.stop())


@pytest.mark.slow
def test_more_than_the_queue_holds_blocks_the_thread_and_loses_nothing(served: Any, background: Any) -> None:
    proxy = served.proxies[0]
    with pixiu.connect_sync(served.target, queue_records=100) as px:
        px.room(2).send(b"warm")
        background.call(lambda: setattr(proxy, "reading", False))
        done = threading.Event()

        def send() -> None:
            for number in range(5000):
                px.room(2).send_soon(str(number).encode())
            done.set()

        thread = threading.Thread(target=send)
        thread.start()
        assert not done.wait(0.3)
        background.call(lambda: setattr(proxy, "reading", True))
        thread.join(20)
        assert done.is_set()
    assert proxy.payloads() == [b"warm", *(str(number).encode() for number in range(5000))]


def test_a_for_loop_over_a_subscription(served: Any, background: Any) -> None:
    (gateway,) = served.gateways
    with pixiu.connect_sync(served.target) as px, px.subscribe(room=42) as subscription:
        subscription.join(rooms=[43], topics=["a/b"])
        subscription.leave(rooms=[42])
        assert background.call(gateway.joined) == {43}
        assert background.call(gateway.topics) == {"a/b"}
        assert subscription.gateway == gateway.address
        background.call(lambda: gateway.send(record(1, 43), record(2, 43), record(3, 43)))
        background.call(lambda: gateway.send(record(4, 43)))
        seen = []
        for message in subscription:
            seen.append(message.payload)
            if len(seen) == 2:
                break
        assert seen == [b"1", b"2"]
        batches = subscription.batches()
        assert [[message.payload for message in next(batches)] for _ in range(2)] == [[b"3"], [b"4"]]
        assert subscription.counters.received == 4
        threading.Timer(0.05, subscription.close).start()
        assert list(subscription) == []


def test_connecting_errors_and_use_after_the_end(served: Any, background: Any) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        pixiu.connect_sync("nowhere")
    background.run(served.proxies[1].kill())
    with pytest.raises(Unavailable, match="connection refused"):
        pixiu.connect_sync(served.proxies[1].address, connect_timeout_s=0.3).open()
    px = pixiu.connect_sync(served.target)
    with pytest.raises(NotConnected, match=r"with pixiu\.connect_sync"):
        px.room(1)
    with px:
        room = px.room(1)
    with pytest.raises(NotConnected):
        room.send(b"x")
    px.close()


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (pixiu.SyncClient, pixiu.Client),
        (pixiu.SyncRoom, pixiu.Room),
        (pixiu.SyncUser, pixiu.User),
        (pixiu.SyncSubscription, pixiu.Subscription),
        (pixiu.SyncInbox, pixiu.Inbox),
        (pixiu.SyncMailWriter, pixiu.MailWriter),
        (pixiu.SyncInboxView, pixiu.InboxView),
    ],
)
def test_a_twin_takes_the_arguments_of_its_original_and_says_what_it_does(twin: type, original: type) -> None:
    for name, method in vars(twin).items():
        if name.startswith("_") or isinstance(method, property) or not callable(method):
            continue
        documented = inspect.getdoc(method) or ""
        assert len(documented.split()) > 2, name
        assert not documented.startswith("As `"), name
        there = getattr(original, name, None)
        if there is not None and hasattr(method, "__wrapped__"):
            assert list(inspect.signature(method).parameters)[1:] == list(inspect.signature(there).parameters)[1:], name


ONLY_ASYNCHRONOUS = {
    pixiu.Client: {
        "mails",
        "submit",
        "submit_soon",
        "send",
        "send_many",
        "request",
        "signal",
        "signal_soon",
        "mail",
        "mail_soon",
        "options",
        "reports",
    },
    pixiu.Room: {"draft"},
    pixiu.Topic: {"draft"},
    pixiu.Subscription: {"next_batch", "what"},
    pixiu.Inbox: {"next", "next_mail", "give_back", "closed", "what"},
    pixiu.MailWriter: {"space"},
}
"""What the parts of the SDK call, and what iterating does in a thread."""


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (pixiu.SyncClient, pixiu.Client),
        (pixiu.SyncRoom, pixiu.Room),
        (pixiu.SyncTopic, pixiu.Topic),
        (pixiu.SyncUser, pixiu.User),
        (pixiu.SyncWriter, pixiu.Writer),
        (pixiu.SyncReceipt, pixiu.Receipt),
        (pixiu.SyncMailReceipt, pixiu.MailReceipt),
        (pixiu.SyncSignalReceipt, pixiu.SignalReceipt),
        (pixiu.SyncSubscription, pixiu.Subscription),
        (pixiu.SyncInbox, pixiu.Inbox),
        (pixiu.SyncMailWriter, pixiu.MailWriter),
    ],
)
def test_a_twin_has_every_name_of_its_original(twin: type, original: type) -> None:
    names = {name for name in dir(original) if not name.startswith("_")} - ONLY_ASYNCHRONOUS.get(original, set())
    if original in (pixiu.Receipt, pixiu.MailReceipt):
        names = {"id", "done", "error", "wait", "outcome"}
    if original is pixiu.SignalReceipt:
        names = {"id", "done", "error", "wait", "outcome", "gateways"}
    assert names - set(dir(twin)) == set()


def test_what_a_thread_sends_stays_in_order_whichever_way_it_waits(served: Any) -> None:
    found: list[pixiu.SendFailure] = []
    served.proxies[0].failing = lambda one: wire_pb2.PublishFailure(code="DROPPED", text="lost") if one.key == 4 else None
    with pixiu.connect_sync(served.target, on_failure=found.append) as px:
        for number in range(0, 300, 3):
            px.room(2).send_soon(b"%d" % number)
            assert px.room(2).send(b"%d" % (number + 1)).done
            with px.room(2).writer() as writer:
                writer.send(b"%d" % (number + 2))
        assert len(px.room(2).send_many([b"x", b"y"])) == 2
        px.room(4).send_soon(b"nobody looks")
        assert isinstance(px.room(4).send_soon(b"looked at").outcome(), pixiu.Dropped)
    assert [one.body for one in served.proxies[0].records if one.key == 2] == [*(b"%d" % n for n in range(300)), b"x", b"y"]
    assert [failure.error.code for failure in found] == ["DROPPED"]


def test_a_user_takes_signals_from_a_thread_too(served: Any) -> None:
    with pixiu.connect_sync(served.target) as px:
        px.user(7).signal(b"now", type=3, timeout_s=20)
    # Its copies go by several proxies; the receipt waits for the first one.
    copies = [one for proxy in served.proxies for one in proxy.records]
    assert {(one.key, one.body, one.kind) for one in copies} == {(7, b"now", Kind.SIGNAL)}


def test_iterations_end_after_the_client_was_closed(served: Any) -> None:
    with pixiu.connect_sync(served.target) as px:
        subscription = px.subscribe(room=42)
        subscription.ready()
        inbox = px.inbox(uin=7, device="phone")
        inbox.ready()
    assert not list(subscription)
    assert not list(subscription.batches())
    assert not list(inbox)


def test_receipts_tell_their_outcome_after_the_client_was_closed(served: Any) -> None:
    def refuse(one: Any) -> Any:
        return wire_pb2.PublishFailure(code="INVALID", text="bad") if one.key == 4 else None

    served.proxies[0].failing = refuse
    with pixiu.connect_sync(served.target) as px:
        good, bad = px.room(2).send_soon(b"x"), px.room(4).send_soon(b"y")
    good.wait()
    assert good.outcome() is None
    with pytest.raises(pixiu.PixiuError, match="bad"):
        bad.wait()
    assert "bad" in str(bad.outcome())


def test_who_waits_while_the_client_is_closed_is_told(served: Any) -> None:
    waits = threading.Event()

    async def for_ever() -> None:
        waits.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(NotConnected):
            px.run(for_ever())
        ended.append(True)

    ended: list[bool] = []
    with pixiu.connect_sync(served.target) as px:
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert waits.wait(LIMIT_S)
    thread.join(LIMIT_S)
    assert ended == [True]


@pytest.mark.slow
def test_threads_that_send_while_the_client_is_closed_end(served: Any) -> None:
    def send(px: pixiu.SyncClient) -> None:
        try:
            while True:
                begun.release()
                px.room(2).send_soon(b"x").wait()
                px.room(2).send(b"y")
        except NotConnected:
            ended.release()

    for _ in range(30):
        begun, ended = threading.Semaphore(0), threading.Semaphore(0)
        with pixiu.connect_sync(served.target, queue_records=10) as px:
            for _ in range(4):
                threading.Thread(target=send, args=(px,), daemon=True).start()
            for _ in range(40):
                assert begun.acquire(timeout=LIMIT_S)
        for _ in range(4):
            assert ended.acquire(timeout=LIMIT_S)
