"""Xiu from one partition to two and to four while mail flows and leaders are killed: every mail once, in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.discovery.zookeeper import Set
from pixiu.ids import msg_partition
from pixiu.wire.v1 import doubling_pb2, doubling_pb2_grpc, xiu_partitions_pb2_grpc
from pixiu.wire.v1.xiu_partitions_pb2 import AskRequest
from registry.layout import begin_doubling, commit_doubling
from tests.history.checker import check, counts, report
from tests.history.record import Fault, History
from tests.history.violation import Limits
from tests.support.doubling import CLEANING, LEARNING, OPEN, SPLIT, advance, call
from tests.support.mail_history import Traffic
from tests.support.roles import Roles
from tests.support.stores import leader_of, scan, wait_in_sync
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

pytestmark = pytest.mark.e2e
ROOT = "/pubsub"
ONE, TWO = "00000000000000a1", "00000000000000b2"
OTHERS = ("pi-0", "router-0", "relay-0", "broker-0", "gateway-0", "proxy-0")
MORE = 60


async def led_by(roles: Roles, *names: str) -> str:
    """Who leads, once somebody does."""
    found = ""

    async def leads() -> bool:
        nonlocal found
        found = await leader_of(roles, *names)
        return bool(found)

    await until(leads, f"a leader of {names}")
    return found


async def led(roles: Roles, *names: str) -> Node:
    """The node of who leads."""
    node = await roles.node(await led_by(roles, *names))
    assert node is not None
    return node


async def kill(roles: Roles, history: History, names: set[str]) -> str:
    """The leader of these."""
    name = await led_by(roles, *sorted(names))
    history.fault(Fault("kill", name))
    await roles.kill(name)
    names.discard(name)
    return name


def back(roles: Roles, history: History, names: set[str], name: str, partition: int) -> None:
    """A process that was killed is started again."""
    roles.start(name, partition=partition)
    names.add(name)
    history.fault(Fault("kill", name, heals=True))


async def resend(child: Node, known: list[tuple[int, bytes]], child_of: Any) -> int:
    """Send to a child what was stored elsewhere for its users; how much that was. All of it is answered with its old MsgID."""
    wanted = [(number, record) for number, record in known if child_of(int.from_bytes(record[24:32], "little"))]
    async with Writer(child) as writer:
        answers = await writer.store([record for _, record in wanted])
    assert answers == [("", number) for number, _ in wanted]
    return len(wanted)


async def a_question_waits_for_the_split(parent: Node, child: int) -> None:
    """Moved users wait for a child that learns: its parent keeps the question, and answers what comes behind it meanwhile."""
    async with grpc.aio.insecure_channel(parent.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        partitions: Any = xiu_partitions_pb2_grpc.XiuPartitionsStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        doubling: Any = doubling_pb2_grpc.DoublingStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

        async def kept() -> bool:
            question = asyncio.ensure_future(partitions.Ask(AskRequest(child=child, wait_ms=500), timeout=10))
            for _ in range(5):  # one may be answered before what was asked just before it
                await doubling.Status(doubling_pb2.DoublingStatusRequest(doubling=int(TWO, 16)), timeout=10)
            found = not question.done()
            assert not (await question).doubling, "it is not split, and says so in the end"
            return found

        await until(kept, f"a question of partition {child} that waits")


@pytest.mark.timeout(240)
async def test_every_mail_is_stored_once_and_in_order_while_xiu_is_doubled_twice(roles: Roles, tmp_path: Path) -> None:
    history = History(path=tmp_path / "history.jsonl")
    await roles.layout(ROOT, **dict.fromkeys(("pi", "xiu", "router", "relay", "broker", "gateway", "proxy"), 1))
    parent, child = {"xiu-0a", "xiu-0b"}, {"xiu-1a", "xiu-1b"}
    for name in (*parent, *OTHERS):
        roles.start(name, partition=0 if name.split("-")[0] not in ("proxy", "gateway") else -1)
    await roles.running(*OTHERS)
    await wait_in_sync(roles, *sorted(parent))
    async with Traffic(roles.target(), history, 1, pace_s=0.04) as traffic:
        await traffic.more(MORE)
        await one_to_two(roles, history, traffic, parent, child)
        early = await scan(await led(roles, *sorted(parent)))
        assert await resend(await led(roles, *sorted(child)), early, lambda uin: uin % 2 == 1)
        await two_to_four(roles, history, traffic, parent, child)
        assert await resend(await led(roles, "xiu-3"), early, lambda uin: uin % 4 == 3), "a grandchild asks through its parent"
        await traffic.more(MORE)
        await traffic.settle()
    history.close()
    print(f"{dict(traffic.counts)}; {counts(history)}")
    found = check(history, Limits(sends=200, deliveries=200, acknowledgements=200, faults=2))
    assert not found, report(history, found)
    for names in (parent, child, {"xiu-2"}, {"xiu-3"}):
        stored = await scan(await led(roles, *sorted(names)))
        assert stored, f"nothing was stored by {names}"
        assert len({msg_partition(number) for number, _ in stored}) == 1


async def test_a_layout_that_no_doubling_led_to_is_not_taken(roles: Roles) -> None:
    await roles.layout(ROOT, xiu=1)
    roles.start("xiu-0", partition=0)
    await roles.running("xiu-0")
    node = await led(roles, "xiu-0")
    data, stat = await roles.zookeeper.get(paths.layout(ROOT))
    layout = Layout.from_json(data)
    by_hand = Layout(layout.version + 1, {**layout.roles, "xiu": RoleLayout(2, 2, 1)})
    await roles.zookeeper.transaction([Set(paths.layout(ROOT), by_hand.to_json(), stat.version)])
    await until(lambda: "layout_refused" in roles.log("xiu-0"), "the layout is refused")
    async with Writer(node) as writer:
        assert [code for code, _ in await writer.store(mails(0, 2, key=5))] == ["", ""]


async def one_to_two(roles: Roles, history: History, traffic: Traffic, parent: set[str], child: set[str]) -> None:
    """The child's leader is killed while it is LEARNING, the parent's right after SPLIT."""
    await begin_doubling(roles.zookeeper, ROOT, "xiu", ONE)
    for name in sorted(child):
        roles.start(name, partition=1)
    await wait_in_sync(roles, *sorted(child))
    early = doubling_pb2.DoublingAdvanceRequest(doubling=int(ONE, 16), partitions=2, phase=OPEN, operator="a test")
    node = await led(roles, *sorted(child))
    with pytest.raises(grpc.aio.AioRpcError, match=r"partition 0 is not split|LEARNING"):
        await call(node.address, early)
    learning = await advance(roles, child, ONE, 2, LEARNING)
    assert (learning.phase, learning.learned) == (LEARNING, 0)
    killed = await kill(roles, history, child)
    await traffic.more(MORE)
    split = await advance(roles, parent, ONE, 2, SPLIT)
    assert split.phase == SPLIT
    killed_parent = await kill(roles, history, parent)
    opened = await advance(roles, child, ONE, 2, OPEN)
    assert (opened.phase, opened.learned) == (OPEN, split.split_at)
    back(roles, history, child, killed, 1)
    back(roles, history, parent, killed_parent, 0)
    await traffic.more(MORE)
    await commit_doubling(roles.zookeeper, ROOT, "xiu", ONE)
    for names in (parent, child):
        ended = await advance(roles, names, ONE, 2, CLEANING)
        assert (ended.phase, ended.partitions) == (doubling_pb2.DOUBLING_NONE, 2)
    await asyncio.gather(wait_in_sync(roles, *sorted(parent)), wait_in_sync(roles, *sorted(child)))
    await traffic.more(MORE)


async def two_to_four(roles: Roles, history: History, traffic: Traffic, parent: set[str], child: set[str]) -> None:
    """One parent after the other; mail flows while one of them is split and the other is not."""
    await begin_doubling(roles.zookeeper, ROOT, "xiu", TWO)
    for partition in (2, 3):
        roles.start(f"xiu-{partition}", partition=partition)
    await roles.running("xiu-2", "xiu-3")
    for name in ("xiu-2", "xiu-3"):
        await advance(roles, {name}, TWO, 4, LEARNING)
    for names, name in ((parent, "xiu-2"), (child, "xiu-3")):
        await a_question_waits_for_the_split(await led(roles, *sorted(names)), int(name[-1]))
        split = await advance(roles, names, TWO, 4, SPLIT)
        again = await advance(roles, names, TWO, 4, SPLIT)
        assert again.split_at == split.split_at, "a phase that was reached is answered as it stands"
        await advance(roles, {name}, TWO, 4, OPEN)
        await traffic.more(MORE // 2)
    await commit_doubling(roles.zookeeper, ROOT, "xiu", TWO)
    for names in (parent, child, {"xiu-2"}, {"xiu-3"}):
        await advance(roles, names, TWO, 4, CLEANING)
