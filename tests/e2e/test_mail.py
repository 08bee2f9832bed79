"""Mail in a real cluster: to one and to many, and through kill -9 of the leaders of Xiu and Pi and of the proxies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

import pixiu
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.writer import MailWriter
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.roles import Roles
from tests.support.waiting import until
from tools.cli.inbox import InboxEntry, read_inbox

pytestmark = pytest.mark.e2e
SMALL = [f"--{name}=1" for name in ("gateways", "brokers", "broker-replicas", "routers", "router-replicas")]
USERS = tuple(range(2001, 2013))
SEVERAL = 7
"""Every so many mails one goes to three users."""
PAGE = 1000


@pytest.fixture(scope="module")
def mailing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two proxies, two replicas of one partition of Xiu and of Pi; mail goes between them by framed streams."""
    folder = tmp_path_factory.mktemp("mailing")
    stores = ["--xius=1", "--xiu-replicas=2", "--pis=1", "--pi-replicas=2", "--relays=0", "--proxies=2"]
    with running_cluster(folder, *SMALL, *stores, layout="nodes") as cluster:
        cluster.wait_healthy()
        yield cluster


async def everything(cluster: LocalCluster, uin: int, lane: int = 1) -> list[InboxEntry]:
    """An inbox."""
    found: list[InboxEntry] = []
    while True:
        after = found[-1].seq if found else 0
        (page,) = await read_inbox(cluster.target, uin, (lane,), after, PAGE, peek=True)
        found += page.entries
        if not page.entries:
            return found


def ids_of(entries: list[InboxEntry]) -> list[int]:
    """SnowflakeIDs, in the inbox's order, which is dense."""
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    assert not [entry.code for entry in entries if entry.code]
    return [entry.message.message_id for entry in entries if entry.message is not None]


def test_mail_is_sent_and_listed_by_the_commands(mailing: LocalCluster) -> None:
    sent = mailing.pixiu("send", "--mail", "--user", "7", "--to", "8", "--to", "9", "--uin", "5", "hello there", "--json")
    assert sent.returncode == 0, sent.stderr
    assert json.loads(sent.stdout)["replicated"] == 1
    assert mailing.pixiu("send", "--mail", "--user", "7", "--level", "accepted", "again").stdout == "accepted: 1 mail\n"
    texts: dict[int, list[str]] = {}
    for uin in (7, 8, 9):
        listed = mailing.pixiu("inbox list", str(uin), "--json")
        assert listed.returncode == 0, listed.stderr
        lanes = json.loads(listed.stdout)["lanes"]
        assert [lane["last"] for lane in lanes] == [0, 2 if uin == 7 else 1]
        texts[uin] = [entry["text"] for entry in lanes[1]["entries"]]
        assert lanes[1]["entries"][0]["sender"] == 5
    assert texts == {7: ["hello there", "again"], 8: ["hello there"], 9: ["hello there"]}
    shown = mailing.pixiu("inbox list", "7", "--count", "1").stdout
    assert "hello there" in shown
    assert "lane 1: 1 more: --lane 1 --after 1" in shown
    refused = mailing.pixiu("send", "--mail", "--room", "7", "x")
    assert (refused.returncode, "--mail needs --user UIN" in refused.stderr) == (2, True)


async def test_the_three_levels_lanes_and_many_receivers(mailing: LocalCluster) -> None:
    async with pixiu.connect(mailing.target, uin=3) as px:
        first = await px.user(20).mail(b"one", level="accepted")
        await px.user(20).mail(b"two", level="persisted", lane=0)
        last = await px.user(20).mail(b"three", to=range(21, 1020))
        assert (first.replicas, last.replicas) == (1, 2)
        with pytest.raises(pixiu.TooManyReceivers):
            await px.user(20).mail(b"no", to=range(21, 1021))
        for uin in (20, 500, 1019):
            entry = (await everything(mailing, uin))[-1]
            assert entry.msg_id == last.stored_as
            assert entry.message is not None
            assert entry.message.payload == b"three"
        assert [entry.message.payload for entry in await everything(mailing, 20, 0) if entry.message] == [b"two"]


class Load:
    """Mail without end, some of it to three users at once, and what became of it."""

    def __init__(self, writer: MailWriter) -> None:
        self._writer = writer
        self.sent: list[tuple[MailReceipt, tuple[int, ...]]] = []
        self.ending = False

    async def run(self) -> None:
        """Send until told to end."""
        number = 0
        while not self.ending:
            for _ in range(10):
                number += 1
                uin = USERS[number % len(USERS)]
                to = (USERS[(number + 1) % len(USERS)], USERS[(number + 5) % len(USERS)]) if number % SEVERAL == 0 else ()
                await self._writer.space()
                self.sent.append((self._writer.send(uin, b"mail %d" % number, to=to), (uin, *to)))
            await asyncio.sleep(0.01)

    async def more(self, count: int = 100) -> None:
        """Until mail that was sent from now on is confirmed."""
        begin = len(self.sent)

        async def confirmed() -> bool:
            return sum(receipt.done and receipt.error is None for receipt, _ in self.sent[begin:]) >= count

        await until(confirmed, "mail is confirmed")


def framed_streams(cluster: LocalCluster, role: str) -> int:
    """How many framed streams a role's processes serve now; each must offer them."""
    served = 0
    for process in cluster.processes(role):
        with urllib.request.urlopen(f"{process['http']}/health", timeout=30) as reply:
            streams = json.load(reply)["streams"]
        assert streams["port"] > 0
        served += streams["open"]
    return served


async def test_confirmed_mail_is_in_the_inboxes_once_and_in_order_whoever_is_killed(mailing: LocalCluster) -> None:
    async with pixiu.connect(mailing.target, mail_timeout_s=110.0) as px, px.mail_writer() as writer:
        load = Load(writer)
        running = asyncio.create_task(load.run())
        await load.more()
        for role in ("xiu", "pi"):
            assert await asyncio.to_thread(framed_streams, mailing, role) > 0
        killed: set[int] = set()
        for role in ("xiu", "pi"):
            pid = await asyncio.to_thread(mailing.wait_leader, role)
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            await load.more()
        for pid in [int(process["pid"]) for process in await asyncio.to_thread(mailing.processes, "proxy")]:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            await load.more()
        load.ending = True
        await running
        await writer.wait_finished()
        assert len(killed) == 4
        assert writer.counters.streams_opened > 1
        assert writer.counters.resent > 0
        assert writer.triples["pi", 0].epoch > 1
        assert writer.triples["xiu", 0].epoch > 1
    wanted: dict[int, list[int]] = {uin: [] for uin in USERS}
    for receipt, receivers in load.sent:
        assert receipt.error is None
        for uin in receivers:
            wanted[uin].append(receipt.id)
    for uin in USERS:
        assert ids_of(await everything(mailing, uin)) == wanted[uin]


async def test_a_proxy_that_takes_rooms_alone_refuses_mail(roles: Roles) -> None:
    await roles.layout(proxy=1, xiu=1, pi=1)
    roles.start("proxy-0", kinds='["room", "chat"]')
    (node,) = await roles.running("proxy-0")
    async with pixiu.connect(node.client_address) as px:
        with pytest.raises(pixiu.NotServed, match=r"proxy\.kinds"):
            await px.user(7).mail(b"x")
