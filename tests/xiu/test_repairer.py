"""A Xiu's repair of itself: what it says when it cannot be, and that it waits for another replica that comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.process.context import Context
from cluster.replication.replica import Replica
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import DiskFull, Unavailable
from tests.support.zookeeper import make_node
from tests.xiu.parts import mail, store
from xiu.state.state import State
from xiu.store import repairer as repairer_module
from xiu.store.machine import Machine
from xiu.store.repairer import Repairer

OWN, OTHER = 1, 2
ROWS = 0
"""The store is whole: a repair takes no row from the other replica."""


class Log:
    """Takes what is logged."""

    def __init__(self) -> None:
        self.peers: list[object] = []
        """Whom repairs have asked."""

    def warning(self, event: str, **fields: object) -> None:
        if "peer" in fields:
            self.peers.append(fields["peer"])

    error = warning


class Xiu:
    """A repairer over a real store, in a registry whose view the test changes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.own = make_node("xiu", port=7000, member=OWN, state=NodeState.RUNNING)
        self.other = make_node("xiu", port=7001, member=OTHER, state=NodeState.RUNNING)
        options = SimpleNamespace(partition=0)
        self.context = SimpleNamespace(role="xiu", options=options, view=View(Layout(), (self.own,)), log=Log(), tls=None)
        self.replica = SimpleNamespace(others_in_sync={OTHER})
        self.repairer = Repairer(
            cast("Context[Any]", self.context), machine, cast("Replica", self.replica), lambda _: True, lambda: None
        )

    def sees_other(self) -> None:
        """The view has the other replica again."""
        self.context.view = View(Layout(), (self.own, self.other))


@pytest.fixture
async def xiu(tmp_path: Path) -> Any:
    """With something stored and flushed."""
    machine = Machine(tmp_path / "store", 1 << 20, 1 << 20, lambda _: "", lambda: None)
    await machine.open()
    state = State(0, machine.store, machine.store.head)
    for counter in (1, 2):
        machine.store.write([state.decide(store(counter, mail(counter)))])
    await machine.flush()
    yield Xiu(machine)
    await machine.close()


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is waited for as long as in earnest."""
    monkeypatch.setattr(repairer_module, "BEHIND_S", 0.3)
    monkeypatch.setattr(repairer_module, "BEHIND_POLL_S", 0.01)
    return iter(())


async def test_a_full_disk_is_said_although_the_other_replica_is_not_in_the_view_yet(
    xiu: Xiu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again just now: in sync by its leader's word, and not yet in the view."""
    monkeypatch.setattr(xiu.machine, "free_bytes", lambda: 0)
    with pytest.raises(DiskFull):
        await xiu.repairer.repair()
    assert xiu.repairer.counters.repairs_failed == 1


async def test_a_repair_waits_for_the_other_replica_to_be_in_the_view(xiu: Xiu) -> None:
    asyncio.get_running_loop().call_later(0.05, xiu.sees_other)
    assert await xiu.repairer.repair() == ROWS
    assert (xiu.repairer.counters.repairs, xiu.repairer.counters.repairs_failed) == (1, 0)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("order", [1, -1])
async def test_a_repair_asks_the_other_replica_as_it_runs_now(xiu: Xiu, order: int) -> None:
    """A run that is over may be in the view for a minute."""
    over = make_node("xiu", port=7001, replica=1, member=OTHER, member_incarnation=1, endpoint=11, state=NodeState.RUNNING)
    now = make_node("xiu", port=7002, replica=2, member=OTHER, member_incarnation=2, endpoint=12, state=NodeState.RUNNING)
    if order < 0:  # sequences of ZooKeeper begin anew with the folder that they are in
        over, now = replace(over, replica=2), replace(now, replica=1)
    xiu.context.view = View(Layout(), (xiu.own, over, now))
    await xiu.repairer.repair()
    assert xiu.context.log.peers == [now.address]


async def test_a_repair_waits_for_the_other_replica_to_be_in_sync(xiu: Xiu) -> None:
    xiu.sees_other()
    xiu.replica.others_in_sync.remove(OTHER)
    asyncio.get_running_loop().call_later(0.05, xiu.replica.others_in_sync.add, OTHER)
    assert await xiu.repairer.repair() == ROWS


async def test_a_repair_that_waits_does_not_keep_a_process_from_ending(xiu: Xiu) -> None:
    waiting = asyncio.create_task(xiu.repairer.repair())
    await asyncio.sleep(0)
    await xiu.repairer.close()
    with pytest.raises(Unavailable):
        await waiting


@pytest.mark.usefixtures("brief")
@pytest.mark.slow
async def test_a_repair_that_nobody_can_help_with_says_so_after_a_while(xiu: Xiu) -> None:
    with pytest.raises(Unavailable, match="no other replica of this partition is in sync"):
        await xiu.repairer.repair()
    assert (xiu.repairer.counters.repairs, xiu.repairer.counters.repairs_failed) == (0, 1)
