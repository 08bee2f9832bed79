"""Inboxes in a real cluster: several devices, history, deletion and dead letters, by the commands and the SDK."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import pixiu
from pixiu.client.inbox.dead_letters import dead_letter_uin, encode
from pixiu.client.messages.load_test import LoadTest
from pixiu.client.stores.view import InboxView
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.e2e
SMALL = [f"--{name}=1" for name in ("gateways", "brokers", "broker-replicas", "routers", "router-replicas")]


@pytest.fixture(scope="module")
def mailing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One Xiu, two replicas of one partition of Pi, which keep what was acknowledged for an hour."""
    folder = tmp_path_factory.mktemp("inboxes")
    stores = ["--xius=1", "--pis=1", "--pi-replicas=2", "--relays=1", "--relay-replicas=1", "--proxies=1"]
    stores += ["--set", "pi.history_s=3600", "--set", "pi.new_device_history=false"]
    with running_cluster(folder, *SMALL, *stores, layout="nodes") as cluster:
        cluster.wait_healthy()
        yield cluster


def told(cluster: LocalCluster, command: str, *arguments: str) -> Any:
    """What a subcommand of `pixiu inbox` prints as JSON."""
    done = cluster.pixiu(f"inbox {command}", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_devices_history_and_deletion_through_a_change_of_leaders(mailing: LocalCluster) -> None:
    async with pixiu.connect(mailing.target, uin=5) as px, InboxView(mailing.target) as view:
        for number in range(1, 10):
            await px.user(7).mail(b"mail %d" % number)
        first = await view.acknowledge(7, 1, 9, "desk")
        assert (first.unread, first.up_to) == (0, 9), "a first device gets what was there"
        (back,) = await view.page(7, (1,), before=view.NEWEST, count=3)
        assert [entry.message and entry.message.payload for entry in back.entries] == [b"mail 9", b"mail 8", b"mail 7"]
        assert await view.delete(7, 1, 4, 6) == 3
        assert told(mailing, "delete", "7", "8", "--lane", "1", "--yes")["deleted"] == 1
        refused = mailing.pixiu("inbox acknowledge", "7", "99", "--lane", "1", "--device", "desk")
        assert (refused.returncode, "no such entry" in refused.stderr) == (2, True)

        os.kill(await asyncio.to_thread(mailing.wait_leader, "pi"), signal.SIGKILL)
        (shown,) = await view.page(7, (1,))
        assert [entry.seq for entry in shown.entries] == [1, 2, 3, 7, 9], "the other replica has the same, and the history"
        further = await view.acknowledge(7, 1, 1, "tablet")
        assert (further.unread, further.up_to) == (0, 9), "a further device begins from now on, as configured"
        await px.user(7).mail(b"mail 10")
        lanes = told(mailing, "unread", "7")["lanes"]
        assert {device["name"]: device["unread"] for device in lanes[1]["devices"]} == {"desk": 1, "tablet": 1}
        assert told(mailing, "drop-device", "7", str(further.number)) == {"uin": 7, "dropped_device": further.number}
        assert "desk" in mailing.pixiu("inbox devices", "7").stdout
        assert f"lane 1: 6 can be read, the newest is number 10; unread: device {first.number}: 1" in (
            mailing.pixiu("inbox unread", "7").stdout
        )
        texts = [entry["text"] for entry in told(mailing, "list", "7", "--lane", "1", "--before", "10")["lanes"][0]["entries"]]
        assert texts == ["mail 9", "mail 7", "mail 3", "mail 2", "mail 1"]


async def test_a_device_that_comes_later_is_told_of_a_gap_where_mail_was_deleted(mailing: LocalCluster) -> None:
    gaps: list[pixiu.MailGap] = []
    async with pixiu.connect(mailing.target, uin=5) as px, InboxView(mailing.target) as view:
        for number in range(1, 5):
            await px.user(9).mail(b"mail %d" % number)
        assert await view.delete(9, 1, 2, 3) == 2
        got: list[bytes] = []
        async with px.inbox(uin=9, device="phone", on_gap=gaps.append) as inbox:
            async for mail in inbox:
                got.append(mail.payload)
                mail.acknowledge()
                if len(got) == 2:
                    break
        assert got == [b"mail 1", b"mail 4"]
        assert [gap.up_to for gap in gaps] == [2, 3]

        async def saved() -> bool:
            return [device.unread for lane in await view.unread(9) for device in lane.devices] == [0, 0]

        await until(saved, "Pi has the acknowledgements, of what was deleted too")
        (back,) = await view.page(9, (1,), before=view.NEWEST)
        assert [entry.seq for entry in back.entries] == [4, 1]


def test_mentions_are_played_as_mail_to_users_who_come_and_go(mailing: LocalCluster, tmp_path: Path) -> None:
    rows = [f"{1_000_000 + 50 * n},{n},room,s{n % 5},u{n % 11 * n % 7}" for n in range(150)]
    file = tmp_path / "mentions.csv"
    file.write_text("\n".join(["ts_ms,line,room,user,to_user", *rows, ""]))
    played = mailing.pixiu("replay", str(file), "--mail", "--seconds", "6", "--cycle", "3", "--json")
    assert played.returncode == 0, played.stdout + played.stderr
    found = json.loads(played.stdout)
    assert (found["sent"], found["confirmed"], found["delivered"], found["unread"], found["repeated"]) == (150, 150, 150, 0, 0)
    assert found["logins"] >= found["receivers"] > 1


async def test_dead_letters_are_listed_sent_again_and_dropped(mailing: LocalCluster) -> None:
    async with pixiu.connect(mailing.target, uin=5) as px, InboxView(mailing.target) as view:
        for number in range(1, 4):
            await px.user(8).mail(b"for eight %d" % number, type=3)
        (lane,) = await view.page(8, (1,))
        dead = dead_letter_uin(8)
        for entry in lane.entries:
            assert entry.record
            body = encode(8, entry.msg_id, entry.seq, 1, 5, 1_750_000_000_000, f"failed at {entry.seq}", entry.record)
            await px.user(dead).mail(body)
        letters = told(mailing, "dead", "8")["dead_letters"]
        assert [(each["reason"], each["attempts"], each["original"]["sender"]) for each in letters] == [
            (f"failed at {seq}", 5, 5) for seq in (1, 2, 3)
        ]
        assert "for eight 2" in mailing.pixiu("inbox dead", "8").stdout
        assert told(mailing, "drop", "8", letters[0]["id"], "--yes")["deleted"] == 1
        assert told(mailing, "resend", "8", letters[1]["id"]) == {"uin": 8, "sent": 1, "unreadable": 0}
        assert told(mailing, "resend", "8", "all")["sent"] == 1
        missing = mailing.pixiu("inbox resend", "8", letters[1]["id"])
        assert (missing.returncode, "has no dead letter" in missing.stderr) == (2, True)
        assert told(mailing, "dead", "8")["dead_letters"] == []
        (lane,) = await view.page(8, (1,), after=3)
        again = [entry.message for entry in lane.entries if entry.message]
        assert [(each.payload, each.sender, each.type) for each in again] == [(b"for eight 2", 5, 3), (b"for eight 3", 5, 3)]


async def test_load_tests_come_only_to_those_who_ask_for_them(mailing: LocalCluster) -> None:
    """To a room, a topic, a user and by signal; and a mail, of which a handler makes another message."""
    places = ("room", "topic", "chat", "signal")
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        px = await stack.enter_async_context(pixiu.connect(mailing.target, uin=31))
        wanted: dict[LoadTest, list[bool]] = {"block": [False], "pass": [True, False], "only": [True]}
        subscriptions = dict[LoadTest, pixiu.Subscription]()
        for each in wanted:
            device = await stack.enter_async_context(pixiu.connect(mailing.target, uin=31, client=each))
            subscription = device.subscribe(room=42, topic="tested", chat=True, load_test=each)
            subscriptions[each] = await stack.enter_async_context(subscription)
        for marked in (True, False):
            body = b"load" if marked else b"real"
            await px.room(42).send(b"room " + body, load_test=marked)
            await px.topic("tested").send(b"topic " + body, load_test=marked)
            await px.user(31).chat(b"chat " + body, load_test=marked)
            await px.room(42).signal(b"signal " + body, load_test=marked)
        for name, subscription in subscriptions.items():
            found = [await anext(subscription) for _ in range(len(places) * len(wanted[name]))]
            assert sorted((each.payload.decode(), each.load_test) for each in found) == sorted(
                (f"{place} {'load' if marked else 'real'}", marked) for place in places for marked in wanted[name]
            )

        async def handle(mail: pixiu.Mail) -> None:
            await px.room(42).send(b"from " + mail.payload)

        async with px.inbox(device="plain") as plain, px.inbox(device="testing", load_test="only") as testing:
            await px.user(31).mail(b"load", load_test=True)
            await px.user(31).mail(b"real")
            real = await anext(plain)
            assert (real.payload, plain.counters.load_test_blocked) == (b"real", 1)
            real.acknowledge()
            running = asyncio.ensure_future(testing.run(handle))
            assert (await anext(subscriptions["only"])).payload == b"from load"
            await until(lambda: blocked(testing), "the other mail acknowledged")
        await running

    async def read() -> bool:
        lanes = (await asyncio.to_thread(told, mailing, "unread", "31"))["lanes"]
        return {device["name"]: device["unread"] for device in lanes[1]["devices"]} == {"plain": 0, "testing": 0}

    await until(read, "everything acknowledged")


async def blocked(inbox: pixiu.Inbox) -> bool:
    return inbox.counters.load_test_blocked == 1
