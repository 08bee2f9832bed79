"""Mail to devices in a real cluster: at once, after a time away, and whoever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

import pixiu
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.mail.writer import MailWriter
from pixiu.wire.envelope import GAP, REDELIVERED, split
from pixiu.wire.record import decode
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc
from tests.support.cluster import LocalCluster, running_cluster, wait_for
from tests.support.waiting import until
from tools.cli.inbox import read_inbox

pytestmark = pytest.mark.e2e
SMALL = [f"--{name}=1" for name in ("gateways", "proxies", "brokers", "broker-replicas", "routers", "router-replicas")]
USERS = tuple(range(3001, 3009))
AWAY = 3100
LANE = 1
CHANNEL = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def delivering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One gateway, two relays for the same users, one Xiu, two replicas of one Pi."""
    folder = tmp_path_factory.mktemp("delivering")
    stores = ["--xius=1", "--xiu-replicas=1", "--pis=1", "--pi-replicas=2", "--relays=1", "--relay-replicas=2"]
    with running_cluster(folder, *SMALL, *stores) as cluster:
        cluster.wait_healthy()
        yield cluster


class Device:
    """A device that takes mail, and acknowledges what it gets."""

    def __init__(self, uin: int) -> None:
        self.uin = uin
        self.got: dict[int, bytes] = {}
        """InboxSeq → record, in the order in which they came."""
        self.order: list[int] = []
        self.flags: list[int] = []
        """Of each copy; REDELIVERED of first ones alone, since what is acknowledged late comes again."""
        self.sessions: set[int] = set()

    async def run(self, channel: grpc.aio.Channel, online: asyncio.Event) -> None:
        """Until it is cancelled."""
        call: Any = wire_pb2_grpc.SubscriberStub(channel).Subscribe()  # type: ignore[no-untyped-call, unused-ignore]
        try:
            await call.write(wire_pb2.SubscribeRequest(hello=wire_pb2.SubscribeHello(uin=self.uin, device=9, mail=True), request=1))
            while isinstance(reply := await call.read(), wire_pb2.SubscribeReply):
                assert not reply.error_code, reply
                if reply.request == 1:
                    online.set()
                said = self._take(reply)
                if said:
                    await call.write(wire_pb2.SubscribeRequest(mail_acknowledgements=said))
            raise AssertionError(f"the stream ended: {await call.details()}")
        finally:
            call.cancel()

    def _take(self, reply: wire_pb2.SubscribeReply) -> list[wire_pb2.MailAcknowledgement]:
        said: list[wire_pb2.MailAcknowledgement] = []
        for mail in split(reply.mail, reply.mail_count):
            assert mail.uin == self.uin
            self.sessions.add(mail.session)
            first = mail.lane == LANE and mail.seq not in self.got
            self.flags.append(mail.flags if first else mail.flags & ~REDELIVERED)
            if first:
                self.got[mail.seq] = mail.record
                self.order.append(mail.seq)
            said.append(wire_pb2.MailAcknowledgement(lane=mail.lane, first=mail.seq, last=mail.seq))
        return said

    @property
    def ids(self) -> list[int]:
        """SnowflakeIDs, in the order of their first coming."""
        return [decode(self.got[seq]).snowflake_id for seq in self.order]


@asynccontextmanager
async def online(cluster: LocalCluster, *devices: Device) -> AsyncIterator[None]:
    """They take mail while the block runs."""
    (gateway,) = await asyncio.to_thread(cluster.processes, "gateway")
    async with grpc.aio.insecure_channel(gateway["client_address"], options=CHANNEL) as channel:
        events = [asyncio.Event() for _ in devices]
        tasks = [asyncio.create_task(device.run(channel, event)) for device, event in zip(devices, events, strict=True)]
        try:

            async def there() -> bool:
                for task in tasks:
                    if task.done():
                        task.result()
                return all(event.is_set() for event in events)

            await until(there, "the devices are online")
            yield
            for task in tasks:
                assert not task.done() or task.result() is None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def delivered(device: Device, count: int) -> None:
    """Until a device has so many."""

    async def enough() -> bool:
        return len(device.got) >= count

    await until(enough, f"{count} mails at {device.uin}")


async def acknowledged(cluster: LocalCluster, uin: int) -> None:
    """Until Pi has the device's cursor at the inbox's end: nothing is left that a device lacks."""

    async def nothing_left() -> bool:
        (lane,) = await read_inbox(cluster.target, uin, (LANE,), 0, 1, peek=False)
        return lane.floor == lane.last > 0

    await until(nothing_left, f"the cursor of {uin} at the end")


async def away(px: pixiu.Client, uin: int) -> None:
    """Until relays know that a user has no device there: what they send to one comes again."""

    async def gone() -> bool:
        return not any(user.online for user in await px.presence([uin]))

    await until(gone, f"{uin} is away")


def in_order(device: Device) -> bool:
    """Whether everything came once, densely, in order of InboxSeq."""
    return device.order == list(range(1, len(device.order) + 1)) and not any(flags & GAP for flags in device.flags)


async def test_mail_comes_at_once_at_every_level_and_is_acknowledged(delivering: LocalCluster) -> None:
    device = Device(AWAY + 1)
    async with online(delivering, device), pixiu.connect(delivering.target) as px:
        ids = [
            (await px.user(device.uin).mail(b"one")).id,
            (await px.user(device.uin).mail(b"x" * 5000)).id,
        ]
        await delivered(device, 2)
        for level in ("persisted", "accepted"):
            ids.append((await px.user(device.uin).mail(b"sooner", level=level)).id)
            await delivered(device, len(ids))
        await acknowledged(delivering, device.uin)
    assert device.ids == ids
    assert in_order(device)


async def test_what_came_while_a_device_was_away_comes_at_its_login(delivering: LocalCluster) -> None:
    device = Device(AWAY)
    async with online(delivering, device), pixiu.connect(delivering.target) as px:
        ids = [(await px.user(AWAY).mail(b"hello")).id]
        await delivered(device, 1)
        await acknowledged(delivering, AWAY)
    async with pixiu.connect(delivering.target) as px, px.mail_writer() as writer:
        await away(px, AWAY)
        receipts = [writer.send(AWAY, b"away %d" % number) for number in range(150)]
        await writer.wait_finished()
        ids += [receipt.id for receipt in receipts]
    assert len(device.got) == 1
    async with online(delivering, device):
        await delivered(device, len(ids))
        await acknowledged(delivering, AWAY)
    assert device.ids == ids
    assert in_order(device)
    assert not any(flags & REDELIVERED for flags in device.flags)
    assert len(device.sessions) == 2


class Load:
    """Mail to everybody, without end."""

    def __init__(self, writer: MailWriter) -> None:
        self._writer = writer
        self.sent: dict[int, list[MailReceipt]] = {uin: [] for uin in USERS}
        self.ending = False

    async def run(self) -> None:
        """Until told to end."""
        while not self.ending:
            for uin in USERS:
                await self._writer.space()
                self.sent[uin].append(self._writer.send(uin, b"mail"))
            await asyncio.sleep(0.02)

    async def more(self, devices: list[Device]) -> None:
        """Until every device has mail that was sent from now on."""
        wanted = {uin: len(sent) + 10 for uin, sent in self.sent.items()}

        async def there() -> bool:
            return all(len(device.got) >= wanted[device.uin] for device in devices)

        await until(there, "new mail at every device")


def sessions(process: dict[str, Any]) -> int:
    """How many devices a relay delivers to."""
    with urllib.request.urlopen(f"{process['http']}/health", timeout=30) as reply:
        return int(json.load(reply)["service"]["mail"]["sessions"])


def busiest(cluster: LocalCluster) -> int:
    """The process ID of the relay with most sessions, once both replicas have some or all."""

    def find() -> int:
        found = sorted((sessions(process), int(process["pid"])) for process in cluster.processes("relay"))
        return found[-1][1] if len(found) == 2 and sum(count for count, _ in found) >= len(USERS) else 0

    return wait_for(find, "relays with sessions for everybody")


async def test_nothing_is_lost_when_owner_relays_end_or_leaders_are_killed(delivering: LocalCluster) -> None:
    devices = [Device(uin) for uin in USERS]
    async with pixiu.connect(delivering.target, mail_timeout_s=110.0) as px, px.mail_writer() as writer:
        load = Load(writer)
        async with online(delivering, *devices):
            running = asyncio.create_task(load.run())
            await load.more(devices)
            for number in (signal.SIGKILL, signal.SIGTERM):
                os.kill(await asyncio.to_thread(busiest, delivering), number)
                await load.more(devices)
            os.kill(await asyncio.to_thread(delivering.wait_leader, "pi"), signal.SIGKILL)
            await load.more(devices)
            (xiu,) = await asyncio.to_thread(delivering.processes, "xiu")
            os.kill(int(xiu["pid"]), signal.SIGKILL)
            await load.more(devices)
            load.ending = True
            await running
            await writer.wait_finished()
            for device in devices:
                await delivered(device, len(load.sent[device.uin]))
                await acknowledged(delivering, device.uin)
    assert writer.triples["pi", 0].epoch > 1
    assert writer.triples["xiu", 0].epoch > 1
    for device in devices:
        sent = load.sent[device.uin]
        assert [receipt.error for receipt in sent] == [None] * len(sent)
        assert device.ids == [receipt.id for receipt in sent]
        assert in_order(device)
    assert max(len(device.sessions) for device in devices) > 1
