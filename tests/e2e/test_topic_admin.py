"""Topics by clients, proxies, admins and groups as processes: whoever dies meanwhile, a change takes effect once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

import pixiu
from pixiu.discovery.topics import TopicNode, read_topic
from pixiu.errors import InvalidArgument, LimitError, NotAllowed, OutcomeUnknown, PixiuError, TopicInUse, Unavailable, UnknownTopic
from pixiu.placement.slots import SLOTS
from tests.support.alerts import firing, moment, until_firing
from tests.support.logins import Logins
from tests.support.roles import Roles
from tests.support.waiting import until

ADMINS = ("admin-a", "admin-b")
GROUPS = ("topic-a", "topic-b")
RULES = """
[[rule]]
allow = ["topics", "channel"]
users = ["operator"]
topics = ["orders"]

[[rule]]
allow = ["consume"]
users = ["reader"]
topics = ["orders"]
"""


async def start(roles: Roles, *, access_file: str = "", **settings: Any) -> None:
    await roles.layout(topic=2)
    for partition, name in enumerate(GROUPS):
        roles.start(name, partition=partition, access_file=access_file, **settings)
    for name in ADMINS:
        roles.start(name, **settings)
    roles.start("proxy-a", access_file=access_file, **settings)
    await roles.running(*GROUPS, *ADMINS, "proxy-a")


async def settled(roles: Roles, name: str) -> TopicNode:
    """A topic in the registry, once all groups have confirmed it."""
    found: list[TopicNode] = []

    async def look() -> bool:
        node = await read_topic(roles.zookeeper, "/pubsub", name)
        if node is not None and node[0].settled == node[0].version:
            found.append(node[0])
        return bool(found)

    await until(look, f"topic {name} settles")
    return found[-1]


async def leads(roles: Roles) -> str:
    """The admin that leads."""
    nodes = dict(zip(ADMINS, await roles.running(*ADMINS), strict=True))
    found: list[str] = []

    async def look() -> bool:
        for name, node in nodes.items():
            if await roles.metric(node, "leads"):
                found.append(name)
        return bool(found)

    await until(look, "an admin leads")
    return found[0]


async def again(work: Callable[[], Awaitable[object]]) -> None:
    """Ask until the cluster takes it, or says that it is under way or done: an admin that died may have recorded it."""
    async with asyncio.timeout(120):
        while True:
            try:
                await work()
            except TopicInUse:
                return
            except (Unavailable, OutcomeUnknown):
                await asyncio.sleep(0.2)
            else:
                return


async def test_topics_are_made_changed_and_removed(roles: Roles) -> None:
    await start(roles)
    async with pixiu.connect(roles.target()) as px:
        with pytest.raises(UnknownTopic, match="pixiu topic create orders"):
            await px.topics.describe("orders")
        made = await px.topics.create("orders")
        assert [(part.number, part.group) for part in made.parts] == [(1, 0), (2, 1)]
        await px.topics.set_channel("orders", "billing")
        await px.durable_topic("orders").send(b"hello", key="k")
        split = await px.topics.resize("orders", [1], bounds=[100, 200])
        assert [(part.low, part.high) for part in split.open_parts][:1] == [(SLOTS // 2, SLOTS)]
        await px.topics.resize("orders", [3, 4, 5])
        with pytest.raises(InvalidArgument, match="colour"):
            await px.topics.set_channel("orders", "broken", filter='[{"colour": "red"}]')
        with pytest.raises(LimitError, match="4,096 parts"):
            await px.topics.create("big", parts=5_000)
        with pytest.raises(InvalidArgument, match="first slots must rise"):
            await px.topics.resize("orders", [2], bounds=[1])
        state = await px.topics.channel_state("orders", "billing")
        assert sum(part.unacknowledged for part in state) == 1
        async with px.durable_topic("orders").channel("billing") as messages:
            async for message in messages:
                with pytest.raises(TopicInUse, match="1 member reads topic orders"):
                    await px.topics.delete("orders")
                await message.ack()
                break
        await px.topics.delete("orders", force=True)
        assert await px.topics.list() == []
        assert [topic.name for topic in await px.topics.list(deleted=True)] == ["orders"]
        await px.topics.restore("orders")
        assert (await settled(roles, "orders")).channel("billing") is not None
        await px.topics.delete("orders", now=True)
        assert await px.topics.list(deleted=True) == []
        # A name is free again, for another topic.
        assert (await px.topics.create("orders", parts=1)).id == 2


async def test_writers_wait_for_the_rate_of_their_topic(roles: Roles) -> None:
    await start(roles)
    async with pixiu.connect(roles.target()) as px:
        made = await px.topics.create("slow", parts=2, messages_per_s=20)
        assert (made.messages_per_s, made.bytes_per_s) == (20, 0)
        async with px.durable_topic("slow").writer() as writer:
            for count in (12, 3):
                await writer.send_many([b"x"] * count, key="k")
        nodes = await roles.running(*GROUPS)
        assert sum([await roles.metric(node, "refused_total") for node in nodes]) >= 1
        assert (await px.topics.alter("slow", read_messages_per_s=20)).messages_per_s == 0
        async with px.durable_topic("slow").reader() as reader, px.durable_topic("slow").channel("paced") as member:
            assert [(await anext(reader)).offset for _ in range(15)] == list(range(15))
            async for message in member:
                await message.ack()
                if message.offset == 14:
                    break
        described = await px.topics.describe("slow")
        assert (described.read_messages_per_s, described.read_bytes_per_s) == (20, 0)
        await px.topics.set_channel("slow", "seen")
        assert sum(part.unacknowledged for part in await px.topics.channel_state("slow", "seen")) == 15


async def test_an_admin_that_is_killed_is_replaced_and_its_changes_end(roles: Roles) -> None:
    await start(roles)
    async with pixiu.connect(roles.target()) as px:
        await px.topics.create("orders", parts=8)
        nodes = dict(zip(ADMINS, await roles.running(*ADMINS), strict=True))
        del nodes[await leads(roles)]
        assert "PixiuNoAdmin" in firing(await moment(**nodes))
        await roles.zookeeper.create("/pubsub/topics/torn", b"{")
        for part in (1, 2):
            leader = await leads(roles)
            task = asyncio.create_task(px.topics.resize("orders", [part], bounds=[8_192 * part - 4_096]))
            await asyncio.sleep(0)
            await roles.kill(leader)
            roles.start(leader)
            with contextlib.suppress(PixiuError):
                await task
            await again(partial(px.topics.resize, "orders", [part], bounds=[8_192 * part - 4_096]))
            node = await settled(roles, "orders")
            sealed = node.part(part)
            assert sealed is not None
            assert sealed.state.value == "sealed"
            await roles.running(*ADMINS)
        opened = sum(part.high - part.low for part in node.parts if part.state.value == "open")
        assert opened == SLOTS
        receipts = [px.durable_topic("orders").send(b"x", key=str(number)) for number in range(100)]
        await asyncio.gather(*receipts)
        nodes = dict(zip(ADMINS, await roles.running(*ADMINS), strict=True))
        well = await moment(**nodes)
        assert firing(well) & {"PixiuNoAdmin", "PixiuTopicUnsettled", "PixiuTopicsDiffer"} == {"PixiuTopicsDiffer"}
        await roles.kill("topic-b")
        task = asyncio.create_task(px.topics.create("late", parts=2))
        await until_firing(well, nodes, "PixiuTopicUnsettled")
        roles.start("topic-b", partition=1)
        with contextlib.suppress(OutcomeUnknown):
            await task
        await settled(roles, "late")


async def test_rules_say_who_may_do_what_with_a_topic(roles: Roles) -> None:
    logins = Logins(roles.folder)
    logins.write_rules(RULES)
    await start(roles, access_file=str(logins.file), cluster_key_dir=logins.keys)
    async with pixiu.connect(roles.target(), token=logins.token("operator", None)) as px:
        await px.topics.create("orders", parts=1)
        with pytest.raises(NotAllowed):
            await px.topics.create("other")
        await px.topics.set_channel("orders", "billing")
        await px.topics.seek("orders", "billing", to="end")
    async with pixiu.connect(roles.target(), token=logins.token("reader", 7)) as px:
        assert (await px.topics.describe("orders")).name == "orders"
        assert [topic.name for topic in await px.topics.list()] == ["orders"]
        with pytest.raises(NotAllowed):
            await px.topics.delete("orders")
        with pytest.raises(NotAllowed):
            await px.topics.set_channel("orders", "mine")
    async with pixiu.connect(roles.target(), token=logins.token("stranger", 8)) as px:
        assert await px.topics.list() == []
        with pytest.raises(NotAllowed):
            await px.topics.describe("orders")
    audited = "".join(path.read_text() for path in roles.folder.rglob("audit/*.log"))
    lines = [line for line in map(json.loads, audited.splitlines()) if line.get("topic") == "orders"]
    changes = {(line["kind"], line.get("change", line.get("what"))) for line in lines}
    assert changes == {("topic_change", "create"), ("topic_change", "set_channel"), ("topic_channel", "seek")}
