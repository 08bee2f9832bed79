"""Pi goes from one partition to two, and on to four, while mail is sent and read, and while leaders are killed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

import pixiu
from pixiu.client.inbox_view import InboxView
from pixiu.client.mail_writer import MailWriter
from pixiu.wire.v1 import doubling_pb2 as pb
from tests.history.checker import check, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.doubling import call
from tests.support.mail_history import Traffic
from tests.support.pi_doubling import PiDoubling
from tests.support.roles import Roles
from tests.support.stores import leader_of, wait_in_sync
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
USERS = tuple(range(8001, 8009))
PACE_S = 0.02
"""Between two mails: as fast as they can they leave the doubling no CPU."""
OTHERS = ("xiu-0", "proxy-0", "relay-0", "gateway-0", "router-0", "broker-0")


async def start_all(roles: Roles, *pis: str) -> None:
    """One of each other role, and partition 0 of Pi."""
    await roles.layout(proxy=1, gateway=1, relay=1, router=1, broker=1, xiu=1, pi=1)
    for name in OTHERS:
        roles.start(name, partition=-1 if name.startswith(("proxy", "gateway")) else 0)
    start_pi(roles, 0, *pis)
    await wait_in_sync(roles, *pis)
    await roles.running(*OTHERS)


def start_pi(roles: Roles, partition: int, *names: str) -> None:
    for name in names:
        roles.start(name, partition=partition, flush_interval_s=0.1, clock_interval_s=0.5)


class Conversation:
    """One writer that stays open and a device of each user that stays online, and how long each user's mail took."""

    def __init__(self, target: str) -> None:
        self._target = target
        self.got: dict[int, list[int]] = {uin: [] for uin in USERS}
        self.sent: dict[int, list[int]] = {uin: [] for uin in USERS}
        self.confirmed = 0
        self.longest_s = 0.0
        self._stopping = False

    async def run(self, writer: MailWriter) -> None:
        """Send to everybody in turn until told to end."""
        waiting: set[asyncio.Task[None]] = set()
        number = 0
        while not self._stopping:
            await writer.room()
            number += 1
            uin = USERS[number % len(USERS)]
            receivers = [uin, USERS[(number + 1) % len(USERS)]] if number % 7 == 0 else [uin]
            receipt = writer.send(uin, b"%d" % number, to=receivers[1:])
            for each in receivers:
                self.sent[each].append(receipt.id)
            task = asyncio.create_task(self._confirmed(receipt, time.monotonic()))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
            await asyncio.sleep(PACE_S)
        await writer.wait_finished()
        await asyncio.gather(*waiting)

    async def _confirmed(self, receipt: object, began: float) -> None:
        await receipt  # type: ignore[misc]
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self.confirmed += 1

    async def more(self, count: int) -> None:
        """So many mails are confirmed and delivered from now on."""
        confirmed, got = self.confirmed + count, self.delivered + count

        async def came() -> bool:
            return self.confirmed >= confirmed and self.delivered >= got

        await until(came, f"{count} more mails")

    @property
    def delivered(self) -> int:
        return sum(map(len, self.got.values()))

    def stop(self) -> None:
        self._stopping = True

    @contextlib.asynccontextmanager
    async def online(self) -> AsyncIterator[None]:
        """A device of everybody, over one connection each."""
        async with contextlib.AsyncExitStack() as stack:
            tasks = []
            for uin in USERS:
                px = await stack.enter_async_context(pixiu.connect(self._target, uin=uin))
                inbox = await stack.enter_async_context(px.inbox(device="phone"))
                await inbox.ready(timeout_s=60)
                tasks.append(asyncio.create_task(self._take(uin, inbox)))
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, uin: int, inbox: pixiu.Inbox) -> None:
        async for mail in inbox:
            self.got[uin].append(int(mail.message_id))
            mail.acknowledge()


async def test_writers_and_receivers_go_on_through_two_doublings(roles: Roles) -> None:
    await start_all(roles, "pi-0")
    names: dict[int, tuple[str, ...]] = {0: ("pi-0",)}
    conversation = Conversation(roles.target())
    async with pixiu.connect(roles.target(), uin=1) as px, px.mail_writer() as writer, conversation.online():
        sending = asyncio.create_task(conversation.run(writer))
        await conversation.more(300)
        async with InboxView(roles.target()) as view:
            for count in (2, 4):
                children: dict[int, tuple[str, ...]] = {partition: (f"pi-{partition}",) for partition in range(count // 2, count)}
                names |= children
                doubling = PiDoubling(roles, names, doubling=0xD0 + count)
                await doubling.begin()
                for partition, own in children.items():
                    start_pi(roles, partition, *own)
                await doubling.learn()
                await conversation.more(100)
                conversation.longest_s = 0.0
                await doubling.cut()
                await conversation.more(200)
                held = [
                    [await roles.metric((await roles.running(name))[0], metric) for metric in ("held_total", "held_too_long_total")]
                    for own in children.values() for name in own
                ]  # fmt: skip
                longest = f"the longest wait of a mail {conversation.longest_s * 1000:.0f} ms"
                print(f"{count} partitions: {longest}; requests that children held, and too long: {held}")
                lanes = await view.page(USERS[0], (1,), before=view.NEWEST)
                assert lanes[0].last, "who looks is told where"
                for parent, child in await doubling.digests():
                    assert parent == child
                await doubling.commit()
                await conversation.more(200)
                await doubling.clean()
                await conversation.more(200)
        conversation.stop()
        await sending
        assert writer.counters.streams == 1, "no stream of a writer ended"

        async def all_there() -> bool:
            return conversation.got == conversation.sent

        await until(all_there, "everything once and in order")
    # What moved is gone from its parents.
    for partition, own in names.items():
        (node,) = await roles.running(*own)
        assert await roles.metric(node, "leads") == 1, partition


async def test_nothing_is_lost_when_leaders_are_killed_in_a_doubling(roles: Roles, tmp_path: Path) -> None:
    history = History(path=tmp_path / "history.jsonl")
    names: dict[int, tuple[str, ...]] = {0: ("pi-a", "pi-b"), 1: ("pi-c", "pi-d")}
    await start_all(roles, *names[0])
    began = time.monotonic()
    async with Traffic(roles.target(), history, seed=3, users=6, pace_s=2 * PACE_S) as traffic:
        await traffic.more(200)
        doubling = PiDoubling(roles, names)
        await doubling.begin()
        start_pi(roles, 1, *names[1])
        await wait_in_sync(roles, *names[1])
        await doubling.advance(1, pb.DOUBLING_LEARNING)
        await kill_leader(roles, history, 1, *names[1])
        await doubling.learn()
        await traffic.more(50)
        await doubling.advance(0, pb.DOUBLING_SPLIT)
        await kill_leader(roles, history, 0, *names[0])
        await doubling.cut()
        await traffic.more(100)
        await kill_leader(roles, history, 1, *names[1])
        await traffic.more(50)
        await doubling.commit()
        await doubling.advance(0, pb.DOUBLING_CLEANING)
        await kill_leader(roles, history, 0, *names[0])
        await doubling.clean()
        await traffic.more(100)
        await traffic.settle()
    history.close()
    print(f"{time.monotonic() - began:.0f} s; {dict(traffic.counts)}")
    found = check(history, Limits(sends=200, deliveries=500, acknowledgements=500, faults=4))
    assert not found, report(history, found)


async def kill_leader(roles: Roles, history: History, partition: int, *names: str) -> None:
    """Kill who leads, once both are in sync, and start it again."""
    leader = await wait_in_sync(roles, *names)
    history.fault(Fault("kill", leader))
    await roles.kill(leader)
    start_pi(roles, partition, leader)

    async def led() -> bool:
        return bool(await leader_of(roles, *names))

    await until(led, f"partition {partition} has a leader")
    history.fault(Fault("kill", leader, heals=True))


async def test_a_request_that_cannot_be_is_refused_in_words(roles: Roles) -> None:
    await start_all(roles, "pi-0")
    node = await roles.node("pi-0")
    assert node is not None
    sound: dict[str, Any] = {"doubling": 7, "partitions": 2, "phase": pb.DOUBLING_SPLIT, "operator": "a test"}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"phase": 9}, "goes on to a phase"),
        ({"phase": pb.DOUBLING_NONE}, "goes on to a phase"),
        ({"operator": "x" * 513}, "characters"),
    ]
    for change, text in changes:
        with pytest.raises(grpc.aio.AioRpcError, match=f"INVALID_ARGUMENT.*{text}"):
            await call(node.address, pb.DoublingAdvanceRequest(**sound | change))
