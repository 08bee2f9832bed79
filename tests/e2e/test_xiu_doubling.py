"""A Xiu takes no number of partitions to which no doubling led."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pixiu.discovery import paths
from pixiu.discovery.node import Node
from pixiu.discovery.operations import Set
from pixiu.discovery.view import Layout, RoleLayout
from tests.support.roles import Roles
from tests.support.stores import leader_of
from tests.support.waiting import until
from tests.xiu.writer import Writer, mails

pytestmark = pytest.mark.e2e
ROOT = "/pubsub"


async def led(roles: Roles, name: str) -> Node:
    """The node of a replica, once it leads."""
    await until(lambda: leads(roles, name), f"{name} leads")
    (node,) = await roles.running(name)
    return node


async def leads(roles: Roles, name: str) -> bool:
    return bool(await leader_of(roles, name))


async def test_a_layout_that_no_doubling_led_to_is_not_taken(roles: Roles) -> None:
    await roles.layout(ROOT, xiu=1)
    roles.start("xiu-0", partition=0)
    await roles.running("xiu-0")
    node = await led(roles, "xiu-0")
    data, stat = await roles.zookeeper.get(paths.layout(ROOT))
    layout = Layout.from_json(data)
    by_hand = replace(layout, version=layout.version + 1, roles={**layout.roles, "xiu": RoleLayout(2, 2, 1)})
    await roles.zookeeper.transaction([Set(paths.layout(ROOT), by_hand.to_json(), stat.version)])
    await until(lambda: "layout_refused" in roles.log("xiu-0"), "the layout is refused")
    async with Writer(node) as writer:
        assert [code for code, _ in await writer.store(mails(0, 2, key=5))] == ["", ""]
