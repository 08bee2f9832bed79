"""Mail received with the SDK from a real cluster: while away, once, in order, by two devices, through a gateway's death."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

import pixiu
from pixiu.client.inbox.dead_letters import dead_letter_uin, decode
from pixiu.client.inbox.inbox import Inbox
from pixiu.client.inbox.mail import Mail
from tests.support.cluster import LocalCluster, running_cluster
from tests.support.effort import portion
from tests.support.waiting import until
from tools.cli.inbox import read_inbox

pytestmark = pytest.mark.e2e
SMALL = [f"--{name}=1" for name in ("proxies", "brokers", "broker-replicas", "routers", "router-replicas")]
PATIENT_S = 110.0


@pytest.fixture(scope="module")
def receiving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three gateways, one relay, one Xiu, one Pi."""
    folder = tmp_path_factory.mktemp("receiving")
    stores = ["--xius=1", "--xiu-replicas=1", "--pis=1", "--pi-replicas=1", "--relays=1", "--relay-replicas=1", "--gateways=3"]
    with running_cluster(folder, *SMALL, *stores, layout="nodes") as cluster:
        cluster.wait_healthy()
        yield cluster


def connected(cluster: LocalCluster, **options: float) -> pixiu.Client:
    return pixiu.connect(cluster.target, mail_timeout_s=PATIENT_S, join_timeout_s=PATIENT_S, **options)  # type: ignore[arg-type]


async def take(inbox: Inbox, count: int) -> list[Mail]:
    async with asyncio.timeout(PATIENT_S):
        return [await anext(inbox) for _ in range(count)]


async def saved(cluster: LocalCluster, uin: int, lane: int = 1) -> None:
    """Until Pi has the cursor of the user's only device at the inbox's end."""

    async def nothing_left() -> bool:
        (found,) = await read_inbox(cluster.target, uin, (lane,), 0, 1, peek=False)
        return found.floor == found.last > 0

    await until(nothing_left, f"the cursor of {uin} at the end")


async def test_mail_sent_while_away_comes_at_the_login_once_and_in_order(receiving: LocalCluster) -> None:
    uin = 4001
    async with connected(receiving) as px:
        async with px.inbox(uin=uin, device="phone"):
            pass  # the device is known from now on
        for number in range(100):
            await px.user(uin).mail(b"%d" % number, level="persisted")
        await px.user(uin).mail(b"first", lane=0)
        async with px.inbox(uin=uin, device="phone") as inbox:
            found: dict[int, list[bytes]] = {0: [], 1: []}
            while len(found[1]) < 100 or not found[0]:
                (mail,) = await take(inbox, 1)
                found[mail.lane].append(mail.payload)
                mail.acknowledge()
            assert found == {0: [b"first"], 1: [b"%d" % number for number in range(100)]}
            await inbox.flush()
        await saved(receiving, uin)
        await px.user(uin).mail(b"after")
        async with px.inbox(uin=uin, device="phone") as inbox:
            (mail,) = await take(inbox, 1)
            assert (mail.payload, mail.redelivered, mail.seq) == (b"after", False, 101)
            assert inbox.counters.received == 1, "what was acknowledged does not come again"


async def test_what_was_not_acknowledged_comes_again_marked(receiving: LocalCluster) -> None:
    uin = 4002
    async with connected(receiving) as px:
        async with px.inbox(uin=uin, device="phone") as inbox:
            for number in range(5):
                await px.user(uin).mail(b"%d" % number)
            mails = await take(inbox, 5)
            mails[0].acknowledge()
            mails[3].acknowledge()
            await inbox.flush()

            async def kept() -> bool:
                (lane,) = await read_inbox(receiving.target, uin, (1,), 0, 10, peek=False)
                return lane.floor >= 1

            await until(kept, "the first one is acknowledged to Pi")
        async with px.inbox(uin=uin, device="phone") as inbox:
            again = await take(inbox, 3)
            assert [(mail.payload, mail.redelivered) for mail in again] == [(b"1", True), (b"2", True), (b"4", True)]


async def test_two_devices_each_get_everything(receiving: LocalCluster) -> None:
    uin = 4003
    async with (
        connected(receiving) as px,
        px.inbox(uin=uin, device="phone") as phone,
        px.inbox(uin=uin, device="desk") as desk,
    ):
        for number in range(20):
            await px.user(uin).mail(b"%d" % number, level="persisted")
        for inbox in (phone, desk):
            mails = await take(inbox, 20)
            assert [mail.payload for mail in mails] == [b"%d" % number for number in range(20)]
            for mail in mails:
                mail.acknowledge()
            await inbox.flush()


async def test_a_handler_that_fails_ends_in_the_dead_letter_inbox(receiving: LocalCluster) -> None:
    uin = 4004
    handled: list[bytes] = []

    async def handler(mail: Mail) -> None:
        if mail.payload == b"bad":
            raise ValueError("no such account")
        handled.append(mail.payload)

    async with connected(receiving, uin=5) as px, px.inbox(uin=uin, device="worker") as inbox:
        running = asyncio.create_task(inbox.run(handler, retries=1, backoff_s=0.05))
        for payload in (b"good", b"bad", b"better"):
            last = await px.user(uin).mail(payload)
            if payload == b"bad":
                bad = last

        async def done() -> bool:
            return handled == [b"good", b"better"]

        await until(done, "all is handled")
        await saved(receiving, uin)
        assert (inbox.counters.dead_letters, inbox.counters.retries) == (1, 1)
        async with px.inbox(uin=dead_letter_uin(uin), device="operator") as dead:
            (mail,) = await take(dead, 1)
            letter = decode(mail.payload)
            assert (letter.uin, letter.msg_id, letter.attempts) == (uin, bad.stored_as, 2)
            assert letter.reason == "ValueError: no such account"
            mail.acknowledge()
        await inbox.close()
        await running


@pytest.mark.parametrize(("uin", "number_of_signal"), portion([(4005, signal.SIGTERM), (4006, signal.SIGKILL)]))
async def test_a_gateway_that_goes_while_mail_flows(receiving: LocalCluster, uin: int, number_of_signal: signal.Signals) -> None:
    total = 400
    got: list[bytes] = []
    async with connected(receiving) as px, px.inbox(uin=uin, device="phone") as inbox:

        async def read() -> None:
            while len(got) < total:
                (mail,) = await take(inbox, 1)
                got.append(mail.payload)
                mail.acknowledge()

        reading = asyncio.create_task(read())
        async with px.mail_writer() as writer:
            for number in range(total):
                await writer.space()
                writer.send(uin, b"%d" % number, level="persisted")
                await asyncio.sleep(0.005)
                if number == total // 2:
                    found = await asyncio.to_thread(receiving.processes, "gateway")
                    (served,) = [process for process in found if process["client_address"] == inbox.gateway]
                    os.kill(served["pid"], number_of_signal)
            await writer.wait_finished()
        await reading
        assert got == [b"%d" % number for number in range(total)], "each once, in order"
        assert inbox.counters.moves if number_of_signal is signal.SIGTERM else inbox.counters.reconnects
        assert inbox.counters.gaps == 0
        await saved(receiving, uin)
