"""Requests to drain, through a real registry: heard by the run of a process that they name, and by no other."""

from __future__ import annotations

import asyncio

import pytest

from onebox.embedded import EmbeddedZooKeeper
from ops.drain_command import drain_process
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import Unavailable
from registry.mailbox import Mailbox
from registry.membership import Membership
from tests.support.zookeeper import PATIENCE_S, connected, expire, make_node


class Process:
    """A registration that leaves when it is asked to."""

    def __init__(self, zookeeper: ZooKeeper, root: str, port: int) -> None:
        self.asked: list[str] = []
        self.heard = asyncio.Event()
        self.node = make_node(port=port, state=NodeState.RUNNING)
        self.membership = Membership(zookeeper, root, on_drain=self._asked)

    def _asked(self, by: bytes) -> None:
        if by:
            self.asked.append(by.decode())
            self.heard.set()

    async def start(self) -> Process:
        self.node = await self.membership.register(self.node)
        return self

    async def leave_when_asked(self) -> None:
        await self.heard.wait()
        await self.membership.unregister()


async def test_a_request_reaches_the_process_that_it_names_and_goes_with_it(zookeeper: ZooKeeper, root: str) -> None:
    one, other = await Process(zookeeper, root, 7000).start(), await Process(zookeeper, root, 7010).start()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(drain_process(zookeeper, root, [one.node], "ann@desk", PATIENCE_S), one.leave_when_asked())
    assert set(one.asked) == {"ann@desk"}
    assert other.asked == []
    assert await zookeeper.children(f"{root}/drain") == []
    await other.membership.unregister()


async def test_a_process_whose_session_was_lost_still_hears(
    zookeeper_server: EmbeddedZooKeeper, zookeeper: ZooKeeper, root: str
) -> None:
    session = await connected(zookeeper_server)
    heard = asyncio.Event()
    requests = Mailbox(session, paths.drain(root, 77), lambda by: heard.set() if by else None)
    requests.start()
    await expire(session)
    await zookeeper.create(paths.drain(root, 77), b"ann", ephemeral=True, make_parents=True)
    async with asyncio.timeout(PATIENCE_S):
        await heard.wait()
    await requests.stop()
    await session.close()


async def test_one_that_does_not_go_is_named_with_what_to_do_and_the_request_is_taken_back(zookeeper: ZooKeeper, root: str) -> None:
    process = await Process(zookeeper, root, 7000).start()
    with pytest.raises(Unavailable, match=r"router at 127.0.0.1:7000 has not left after 0.5 s: its log says why"):
        await drain_process(zookeeper, root, [process.node], "ann", 0.5)
    assert await zookeeper.children(f"{root}/drain") == []
    await process.membership.unregister()


async def test_two_tools_do_not_drain_the_same_process(zookeeper: ZooKeeper, root: str) -> None:
    process = await Process(zookeeper, root, 7000).start()
    await zookeeper.create(paths.drain(root, process.node.endpoint), b"bob", ephemeral=True, make_parents=True)
    with pytest.raises(Unavailable, match="by another command already"):
        await drain_process(zookeeper, root, [process.node], "ann", PATIENCE_S)
    await process.membership.unregister()
