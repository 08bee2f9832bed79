"""Export of a Pi: rows are what the state holds, parts go on behind a key, users are looked up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.replication.model import Entry
from cluster.store.export.export import Part
from pi.keys import EPOCH_S, chunk_key
from pi.store.machine import Machine
from pi.streams import export as export_module
from pi.streams.export import Export
from pixiu.errors import StateDamaged
from pixiu.wire.export_tables import columns_of
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    ENTRY_KIND,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    OpenSessions,
    Operation,
    encode,
)
from tests.pi.memory import START_S, at_us
from tests.pi.test_machine import machine
from tests.support.pi import appends, message

USERS = (3, 7, 1 << 62)


def filled(one: Machine) -> None:
    pairs = [(message(number * 10 + uin % 10), uin) for uin in USERS for number in range(1, 6)]
    operations: list[Operation] = [appends(1, *pairs), AddDevice(7, b"phone"), OpenSessions(USER_DEVICE.pack(7, 1))]
    one.apply([Entry(1, 1, ENTRY_KIND, at_us(START_S), encode(operations))])


def export(one: Machine, table: str, users: tuple[int, ...] = (), after: bytes = b"") -> list[Part]:
    found = Export(2, lambda: one.store, table, columns_of(table, ()), frozenset(users), after)
    parts = [found.part()]
    while not parts[-1].last:
        parts.append(found.part())
    return parts


def rows_of(parts: list[Part]) -> list[dict[str, Any]]:
    return [row for part in parts if part.batch is not None for row in part.batch.to_pylist()]


async def test_rows_are_what_the_state_holds(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        filled(one)
        await one.flush()
        entries = rows_of(export(one, "inboxes"))
        assert [(row["uin"], row["lane"], row["inbox_seq"]) for row in entries] == [
            (uin, entries[0]["lane"], seq) for uin in USERS for seq in range(1, 6)
        ]
        lane = entries[0]["lane"]
        for row in entries:
            assert row["pi_partition"] == 2
            assert one.state.peek(row["uin"], lane, row["inbox_seq"] - 1, 1).entries == [(row["inbox_seq"], row["msg_id"])]
            assert round(row["appended_at"].timestamp()) == START_S + EPOCH_S
        heads = rows_of(export(one, "heads"))
        assert [(row["uin"], row["last"], row["floor"], row["dropped"]) for row in heads] == [(uin, 5, 0, 0) for uin in USERS]
        (device,) = rows_of(export(one, "devices"))
        assert (device["uin"], device["client_id"]) == (7, b"phone")
        item = ACKNOWLEDGE.pack(7, device["device"], lane, device["session"], 2, 2)
        ((result,),) = one.apply([Entry(1, 2, ENTRY_KIND, at_us(START_S), encode([Acknowledges(item)]))])
        assert result == [0]
        await one.flush()
        (cursor,) = rows_of(export(one, "acknowledgements"))
        assert (cursor["uin"], cursor["device"], cursor["lane"]) == (7, device["device"], lane)
        assert (cursor["up_to"], cursor["map"]) == (2, 2)


async def test_parts_go_on_behind_a_key_and_users_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "PAGE_ROWS", 3)
    monkeypatch.setattr(export_module, "PART_ROWS", 3)
    async with machine(tmp_path) as one:
        filled(one)
        await one.flush()
        parts = export(one, "inboxes")
        everything = rows_of(parts)
        assert len(parts) > 3
        assert len(everything) == 15
        for index, part in enumerate(parts):
            assert rows_of(export(one, "inboxes", after=part.after)) == rows_of(parts[index + 1 :])
        for users in ((7,), (1, 7, 8), (3, 1 << 62), (99,)):
            assert rows_of(export(one, "inboxes", users)) == [row for row in everything if row["uin"] in users]


async def test_a_broken_value_is_told(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        filled(one)
        await one.flush()
        lane = rows_of(export(one, "inboxes"))[0]["lane"]
        one.store.write({chunk_key(7, lane, 3): b"x" * 16})
        with pytest.raises(StateDamaged):
            export(one, "inboxes")
