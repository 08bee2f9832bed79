"""A Xiu's state machine around its store: what goes on while another store takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from tests.xiu.parts import mail, store
from xiu.machine import Machine
from xiu.repair import Row
from xiu.state import State


def nobody(begin: bytes) -> Iterator[Row]:
    """Another replica that has nothing to give."""
    return iter(())


async def opened(folder: Path) -> Machine:
    machine = Machine(folder / "store", 1 << 20, 1 << 20, lambda _: "", lambda: None)
    await machine.open()
    return machine


async def test_the_disk_is_watched_and_writes_go_on_when_a_store_that_was_built_anew_took_the_old_ones_place(
    tmp_path: Path,
) -> None:
    machine = await opened(tmp_path)
    state = State(0, machine.store, machine.store.head)
    for counter in (1, 2):
        machine.store.write([state.decide(store(counter, mail(counter)))])
    adopted = asyncio.Event()
    assert await machine.rebuild(lambda _: nobody, adopted.set) == 0
    assert adopted.is_set()
    assert machine.free_bytes() > 0
    assert (machine.applied, machine.flushed) == (2, 2)
    machine.store.write([state.decide(store(3, mail(3)))])
    await machine.flush()
    await machine.close()
    again = await opened(tmp_path)
    assert again.applied == 3
    await again.close()
