"""An entry that meets a broken value stops the state, and nothing else: reads go on, a drop ends it, all replicas agree."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lmdb
import pytest

from cluster.process.context import Context
from cluster.replication.model import Entry
from cluster.replication.replica import Replica
from pi.early import EARLY_KIND, encode_early
from pi.keys import CHUNK_ENTRIES, META_KEY, chunk_key, cursor_key, deleted_key, head_key, time_key, user_key, writer_key
from pi.store import repairer as repairer_module
from pi.store.machine import Machine
from pi.store.repairer import Repairer
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.view import Layout, View
from pixiu.errors import PixiuError, StateDamaged
from pixiu.wire.inbox_operations import (
    DEFAULT_LIMITS,
    DELETE,
    ENTRY_KIND,
    TRIM,
    U64,
    USER_DEVICE,
    AddDevice,
    Clock,
    Deletes,
    DropDevices,
    Fanout,
    GiveUp,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    encode,
)
from tests.pi.memory import HOUR, START_S, at_us
from tests.support.pi import acknowledges, appends, message
from tests.support.zookeeper import make_node

UIN, OTHER = 7, 9
LAST = 2 * CHUNK_ENTRIES + 10
DAY = 24 * HOUR
FIRST, MIDDLE, NEWEST = (chunk_key(UIN, 1, seq) for seq in range(1, LAST, CHUNK_ENTRIES))
HEAD, DELETED, CURSOR, DEVICES = head_key(UIN, 1), deleted_key(UIN, 1), cursor_key(UIN, 0, 1), user_key(UIN)
VALUES = {
    "first chunk": FIRST, "middle chunk": MIDDLE, "newest chunk": NEWEST, "head": HEAD, "deleted": DELETED, "cursor": CURSOR,
    "devices": DEVICES, "hour": time_key(START_S // HOUR, UIN, 1), "writer": writer_key(1), "position": META_KEY,
}  # fmt: skip
OPERATIONS: dict[str, tuple[int, list[Operation]]] = {
    "new mail": (0, [appends(1, (message(200), UIN))]),
    "repeats": (0, [appends(1, (message(LAST), UIN), (message(CHUNK_ENTRIES + 3), UIN), (message(3), UIN))]),
    "a fan-out": (0, [Fanout(Writer(1, 1, 1), message(300), U64.pack(OTHER) + U64.pack(UIN))]),
    "acknowledge": (0, [acknowledges(UIN, 1, LAST - 5)]),
    "acknowledge, a day later": (25 * HOUR, [acknowledges(UIN, 1, LAST - 5)]),
    "open a session": (0, [OpenSessions(USER_DEVICE.pack(UIN, 0))]),
    "add a device": (0, [AddDevice(UIN, b"phone")]),
    "drop a device": (25 * HOUR, [DropDevices(USER_DEVICE.pack(UIN, 0))]),
    "trim": (25 * HOUR, [Trims(TRIM.pack(UIN, 1, LAST - 3))]),
    "delete": (0, [Deletes(DELETE.pack(UIN, 1, 9, 12))]),
    "the near sweep": (2 * DAY, [Clock(DEFAULT_LIMITS)]),
    "the far sweep": (31 * DAY, [Clock(DEFAULT_LIMITS)]),
}
STOPS = {
    "first chunk": {"repeats", "acknowledge, a day later", "drop a device", "trim", "the near sweep", "the far sweep"},
    "middle chunk": {"repeats", "trim", "the far sweep"},
    "newest chunk": {"repeats", "the far sweep"},
    "writer": set(OPERATIONS),
}
"""What must stop at these, at least: whoever mends one of them away has to look here."""


class Side:
    """One replica's state, which is given a log as replication gives it."""

    def __init__(self, folder: Path, log: list[Entry]) -> None:
        self.folder, self.log = folder, log
        self.said: list[PixiuError] = []
        self.open()

    def open(self) -> None:
        self.machine = Machine(self.folder, 16 << 20, 100, 3600.0, self.said.append)
        self.set_aside = self.machine.open()

    async def again(self, *broken: bytes, gone: bool = False) -> None:
        """A restart; these values are other ones meanwhile."""
        await self.machine.close()
        if broken:
            with lmdb.open(str(self.folder), map_size=16 << 20, max_dbs=0) as db, db.begin(write=True) as transaction:
                for key in broken:
                    value = transaction.get(key)
                    assert value is not None
                    if gone:
                        transaction.delete(key)
                    else:
                        transaction.put(key, bytes((value[0] ^ 0x10,)) + bytes(value[1:]))
        self.open()

    def run(self) -> bool:
        """Apply the log. Whether all of it is applied."""
        looked = False
        while self.machine.applied < len(self.log):
            before = self.machine.applied
            try:
                self.machine.apply(self.log[before:])
            except StateDamaged:
                if looked and self.machine.applied == before:
                    return False
                self.machine.look_ahead(self.log[before:])
                looked = True
        return True

    def others(self) -> list[tuple[int, int]]:
        return self.machine.read(OTHER, 0, 1, 1, None, 100).entries

    async def drop(self) -> None:
        """What an operator has a leader do."""
        keys = await self.machine.broken()
        if self.machine.stop.at:
            self.log.append(Entry(1, len(self.log) + 1, EARLY_KIND, self.log[-1].at_us, encode_early(self.machine.stop.at, keys)))
        elif keys:
            self.log.append(Entry(1, len(self.log) + 1, ENTRY_KIND, self.log[-1].at_us, encode([GiveUp(tuple(keys))])))

    async def digest(self) -> list[int]:
        await self.machine.flush()
        view = self.machine.view()
        found = await self.machine.digest(view)
        view.close()
        return found.sums


def entry(log: list[Entry], operations: Iterable[Operation], later_s: int = 0) -> Entry:
    return Entry(1, len(log) + 1, ENTRY_KIND, at_us(START_S + later_s), encode(list(operations)))


def begun() -> list[Entry]:
    """Two whole chunks and a third of a user, 4 acknowledged, 7 deleted; and another user."""
    log: list[Entry] = []
    steps: list[list[Operation]] = [
        [appends(1, *((message(number), UIN) for number in range(1, LAST + 1)), (message(1), OTHER))],
        [OpenSessions(USER_DEVICE.pack(UIN, 0) + USER_DEVICE.pack(OTHER, 0)), acknowledges(UIN, 1, 4)],
        [Deletes(DELETE.pack(UIN, 1, 7, 7))],
    ]
    for operations in steps:
        log.append(entry(log, operations))
    return log


async def play(folder: Path, what: str, value: bytes, other: bytes | None, gone: bool = False) -> bool:
    """One operation meets one broken value on one replica; on the other nothing is broken, or another value. Whether it stood."""
    log = begun()
    one, two = Side(folder / "one", log), Side(folder / "two", log)
    for side in (one, two):
        assert side.run()
        await side.machine.flush()
    await one.again(value, gone=gone)
    if other is not None:
        await two.again(other)
    later_s, operations = OPERATIONS[what]
    log.append(entry(log, operations, later_s))
    log.append(entry(log, [appends(1, (message(400), OTHER))], later_s))
    stood = not one.run()
    if stood:
        for _ in range(2):  # in the next life it is the same
            at = one.machine.stop.at
            assert at in (len(log) - 1, len(log))
            assert (one.machine.applied, one.machine.stands) == (at - 1, True)
            assert one.machine.read(OTHER, 0, 1, 1, None, 100).last == 1, "reads go on"
            assert [type(each) for each in one.said] == [StateDamaged]
            with pytest.raises(StateDamaged, match=f"entry {at} of the log cannot be applied"):
                await one.machine.verify()
            await one.machine.flush()
            one.said.clear()
            await one.again()
            assert not one.run()
    elif gone:  # a comparison finds it, or whoever needs it
        for side in (one, two):
            await side.machine.close()
        return False
    await one.drop()
    assert one.run(), one.machine.stop.text
    assert await one.machine.verify() > 0
    assert message(400) in dict(one.others()).values(), "what came behind it is applied"
    await one.machine.flush()
    if not two.run():  # it had what the first one gave up, or stands before its own: it takes another state
        two.machine.mark_damaged(two.machine.stop.text)
        await two.again()
        assert two.set_aside
        if not two.run():  # a word that it hears of only now
            two.machine.mark_damaged(two.machine.stop.text)
            await two.again()
        assert two.run(), two.machine.stop.text
    elif other is not None:
        with pytest.raises(StateDamaged):
            await two.machine.verify()
        two.machine.mark_damaged("its own")
        await two.again()
        assert two.run() or stood
        if two.machine.stop.at:
            two.machine.mark_damaged(two.machine.stop.text)
            await two.again()
            assert two.run()
    assert await one.digest() == await two.digest(), "both are the same"
    for side in (one, two):
        await side.machine.close()
    return stood


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "both"),
    [*((name, False) for name in VALUES), *((name, True) for name in ("first chunk", "middle chunk", "head", "writer"))],
)
async def test_every_operation_that_meets_a_broken_value_waits_and_goes_on_when_it_is_given_up(
    tmp_path: Path, name: str, both: bool
) -> None:
    other = (MIDDLE if VALUES[name] != MIDDLE else FIRST) if both else None
    stood = {what for what in OPERATIONS if await play(tmp_path / what, what, VALUES[name], other)}
    assert stood >= STOPS.get(name, set())


@pytest.mark.parametrize("key", [FIRST, MIDDLE, DELETED], ids=["first chunk", "middle chunk", "deleted"])
async def test_what_is_missing_is_given_up_as_what_is_broken_is(tmp_path: Path, key: bytes) -> None:
    assert [what for what in OPERATIONS if await play(tmp_path / what, what, key, None, gone=True)]


async def repaired(side: Side, meanwhile: Callable[[], Awaitable[None]]) -> list[BaseException]:
    """Report a replica's damage; the other one is whole when it has checked itself. With what the process ends.

    meanwhile: what happens until its answer comes.
    """

    class Asking(Repairer):
        async def whole_one(self) -> Node | None:
            await meanwhile()
            return other

    other = make_node("pi", port=7001, member=2, state=NodeState.RUNNING)
    ends: list[BaseException] = []
    context = SimpleNamespace(role="pi", options=SimpleNamespace(partition=0), view=View(Layout(), (other,)), crash=ends.append)
    replica = SimpleNamespace(others_in_sync={2}, is_leader=True)
    tasks: list[asyncio.Task[None]] = []

    def spawn(task: Coroutine[Any, Any, None]) -> None:
        tasks.append(asyncio.create_task(task))

    repairer = Asking(cast("Context[Any]", context), side.machine, cast("Replica", replica), spawn)
    repairer.damaged("a broken value")
    await asyncio.gather(*tasks)
    return ends


@pytest.mark.parametrize("what", ["repeats", "new mail"], ids=["stands", "scrubbed"])
async def test_a_replica_whose_values_are_given_up_while_it_asks_another_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The other one is whole by the same entry; before that neither was."""
    monkeypatch.setattr(repairer_module, "STANDSTILL_S", 0.1)
    log = begun()
    side = Side(tmp_path / "one", log)
    assert side.run()
    await side.machine.flush()
    await side.again(FIRST)
    log.append(entry(log, OPERATIONS[what][1]))
    assert side.run() == (what == "new mail")

    async def nothing() -> None:
        pass

    async def drop() -> None:
        await side.drop()
        assert side.run()

    assert not await repaired(side, drop)
    assert not await repaired(side, nothing), "the store still holds what was given up"
    await side.machine.flush()
    assert await repaired(side, nothing), "other damage is repaired as before"
    await side.again()
    assert side.set_aside
    await side.machine.close()
