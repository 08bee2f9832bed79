"""A running process tells the registry that it is Init again, and Running again; the newest state wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from cluster.process.restate import Restate
from pixiu.discovery.node import Node, NodeState
from pixiu.errors import InvalidArgument
from pixiu.ids import EndpointID

NODE = Node(
    role="router", partition=0, replica=1, state=NodeState.RUNNING, host="127.0.0.1", port=1, http_port=2,
    endpoint=EndpointID(5), incarnation=1, version="1", wire_hash="x", started_ms=0,
)  # fmt: skip


class Registered:
    """A place in the registry that takes its time."""

    def __init__(self, node: Node | None) -> None:
        self.node = node
        self.told: list[NodeState] = []
        self.answer = asyncio.Event()

    async def set_state(self, state: NodeState) -> bool:
        """Waits for `answer`."""
        if self.node is None:
            raise InvalidArgument("not registered")
        self.told.append(state)
        await self.answer.wait()
        self.node = replace(self.node, state=state)
        return True

    def before_registering_again(self, renew: Callable[[Node], Awaitable[Node]]) -> None:
        """Not used here."""
        raise AssertionError

    async def register(self, node: Node) -> Node:
        """Not used here."""
        raise AssertionError

    async def update(self, node: Node) -> bool:
        """Not used here."""
        raise AssertionError

    async def unregister(self) -> bool:
        """Not used here."""
        raise AssertionError


async def settled(restate: Restate) -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_newest_state_is_told_after_the_one_under_way() -> None:
    place, failures = Registered(NODE), list[BaseException]()
    restate = Restate(place, failures.append)
    restate.set(NodeState.INIT)
    await settled(restate)
    restate.set(NodeState.RUNNING)
    restate.set(NodeState.INIT)
    restate.set(NodeState.RUNNING)
    place.answer.set()
    await settled(restate)
    assert place.told == [NodeState.INIT, NodeState.RUNNING]
    assert place.node is not None
    assert place.node.state is NodeState.RUNNING
    assert not failures
    await restate.close()


@pytest.mark.parametrize("node", [None, replace(NODE, state=NodeState.DRAINING)])
async def test_a_process_that_drains_or_is_gone_stays_so(node: Node | None) -> None:
    place, failures = Registered(node), list[BaseException]()
    restate = Restate(place, failures.append)
    restate.set(NodeState.RUNNING)
    await settled(restate)
    assert (place.told, failures) == ([], [])
    await restate.close()


async def test_what_the_registry_refuses_is_passed_on() -> None:
    class Refusing(Registered):
        async def set_state(self, state: NodeState) -> bool:
            raise InvalidArgument("no")

    failures: list[BaseException] = []
    restate = Restate(Refusing(NODE), failures.append)
    restate.set(NodeState.INIT)
    await settled(restate)
    assert [type(failure) for failure in failures] == [InvalidArgument]
    await restate.close()
    await restate.close()
