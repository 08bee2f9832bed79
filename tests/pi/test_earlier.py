"""A state of the earlier form is what it was when it is opened, wherever that was broken off."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pi import earlier
from pi.chunk import ENTRY
from pi.comparing import ReplicasService
from pi.digest import Digest
from pi.doubling import Record
from pi.earlier import check_form, convert
from pi.keys import CHUNK_ENTRIES, CHUNK_KEY, CRC_BYTES, META_KEY, META_VERSION, chunk_key, seal
from pi.learning import Learning
from pi.state import EARLY, State
from pi.store import FILE_NAME, StateStore
from pixiu.errors import DiskFull, StateDamaged, Unavailable
from pixiu.wire.inbox_operations import DELETE, USER_DEVICE, Clock, Deletes, Limits, OpenSessions
from pixiu.wire.v1 import pi_replicas_pb2 as pb
from tests.pi.memory import HOUR, MemoryStore, Replica, entries_in
from tests.pi.test_machine import machine
from tests.support.pi import acknowledges, appends, message

UINS = (7, 8, 300)
COUNT = 3 * CHUNK_ENTRIES + 5
MAP_BYTES = 64 << 20


def filled() -> Replica:
    """Inboxes of a few chunks, out of order, one of which has lost its beginning."""
    replica = Replica()
    numbers = [number ^ 1 for number in range(2, COUNT + 2)]
    replica.apply(appends(1, *((message(number), uin) for number in numbers for uin in UINS)))
    replica.apply(OpenSessions(b"".join(USER_DEVICE.pack(uin, 0) for uin in UINS)))
    replica.apply(Deletes(DELETE.pack(8, 1, 40, 50)), acknowledges(7, 1, CHUNK_ENTRIES + 9))
    replica.now_s += 26 * HOUR
    replica.apply(Clock(Limits()))
    replica.flush()
    return replica


def earlier_form(values: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """What the earlier program would have stored."""
    found = {key: value for key, value in values.items() if key[:1] != b"K"}
    meta = found[META_KEY]
    found[META_KEY] = seal(META_KEY, b"\1" + meta[1 : -CRC_BYTES - EARLY.size])
    for (uin, lane, seq), (msg_id, at_s) in entries_in(values).items():
        key, index = CHUNK_KEY.pack(b"E", uin, lane, seq), CHUNK_KEY.pack(b"I", uin, lane, msg_id)
        found[key], found[index] = seal(key, ENTRY.pack(msg_id, at_s)), seal(index, struct.pack("<Q", seq))
    return found


def values_of(replica: Replica) -> dict[bytes, bytes]:
    assert isinstance(replica.store, MemoryStore)
    return replica.store.values


def digest_of(values: Mapping[bytes, bytes]) -> list[int]:
    digest = Digest()
    digest.add(values.items())
    return digest.sums


def test_what_is_opened_has_the_same_entries_and_goes_on_as_if_it_had_always_had_them(tmp_path: Path) -> None:
    native = filled()
    wanted = values_of(native)
    assert native.state.inboxes.head(7, 1).base == CHUNK_ENTRIES + 9
    store = StateStore(tmp_path, MAP_BYTES)
    store.write(earlier_form(wanted))
    store.renew()
    with pytest.raises(StateDamaged, match="version 1"):
        State(store)
    assert convert(store) == len(entries_in(wanted))
    assert convert(store) == 0
    values = dict(store.scan(b"", b"\xff"))
    assert entries_in(values) == entries_in(wanted)
    assert values.keys() == wanted.keys()
    assert digest_of(values) == digest_of(wanted)
    converted = Replica(store)
    converted.now_s = native.now_s
    for numbers in ((3, CHUNK_ENTRIES + 8, 2, 0, COUNT + 1), range(COUNT, COUNT + 3 * CHUNK_ENTRIES), (1, COUNT + 9, 60)):
        operation = appends(1, *((message(number), uin) for number in numbers for uin in UINS))
        assert converted.apply(operation) == native.apply(operation)
        store.write(converted.state.freeze())
        store.renew()
        converted.state.table.thawed()
        native.flush()
        assert digest_of(dict(store.scan(b"", b"\xff"))) == digest_of(values_of(native))
    store.close()


@pytest.mark.parametrize("rows", [1, 7, CHUNK_ENTRIES, 100])
def test_a_process_that_is_killed_meanwhile_goes_on_where_it_was(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(earlier, "ROWS", rows)
    wanted = values_of(filled())
    before = earlier_form(wanted)
    stray = CHUNK_KEY.pack(b"I", 9, 1, 5)
    store = StateStore(tmp_path, MAP_BYTES)
    store.write(before | {stray: seal(stray, struct.pack("<Q", 5))})
    store.renew()
    write, transactions, opened = store.write, 0, False
    while not opened:
        left = 1 + transactions % 3

        def some(changes: Mapping[bytes, bytes | None]) -> None:
            nonlocal left, transactions
            if not left:
                raise DiskFull("killed here")
            left, transactions = left - 1, transactions + 1
            write(changes)

        monkeypatch.setattr(store, "write", some)
        try:
            convert(store)
            opened = True
        except DiskFull:
            store.renew()
            meta = store.get(META_KEY)
            assert meta is not None
            assert meta[0] == META_VERSION, "the earlier program does not take what is half done for whole"
    values = dict(store.scan(b"", b"\xff"))
    assert transactions >= len(entries_in(wanted)) // rows
    assert values.keys() == wanted.keys()
    assert digest_of(values) == digest_of(wanted)
    store.close()


def test_a_broken_entry_is_a_broken_chunk_and_the_rest_is_served(tmp_path: Path) -> None:
    wanted = values_of(filled())
    before, key = earlier_form(wanted), CHUNK_KEY.pack(b"E", 8, 1, 2 * CHUNK_ENTRIES + 3)
    gone = CHUNK_KEY.pack(b"E", 300, 1, 7)
    before[key] = bytes((before[key][0] ^ 1,)) + before[key][1:]
    del before[gone]
    store = StateStore(tmp_path, MAP_BYTES)
    store.write(before)
    store.renew()
    convert(store)
    broken: list[bytes] = []
    store.verify(b"", 1000, broken)
    assert broken == [chunk_key(8, 1, 2 * CHUNK_ENTRIES + 3), chunk_key(300, 1, 7)]
    state = State(store)
    assert len(state.peek(8, 1, 0, CHUNK_ENTRIES).entries) == CHUNK_ENTRIES
    assert len(state.peek(300, 1, 3 * CHUNK_ENTRIES, 100).entries) == 5
    with pytest.raises(StateDamaged):
        state.peek(8, 1, 2 * CHUNK_ENTRIES, 1)
    assert not [*store.scan(b"E", b"F"), *store.scan(b"I", b"J")]
    store.close()


async def test_a_snapshot_of_an_earlier_replica_is_taken(tmp_path: Path) -> None:
    native = filled()
    folder = tmp_path / "snapshot"
    store = StateStore(folder, MAP_BYTES)
    store.write(earlier_form(values_of(native)))
    store.sync()
    store.close()
    async with machine(tmp_path / "a") as one:
        await one.check(folder)
        await one.load(folder)
        assert one.applied == native.state.applied.counter
        assert one.state.peek(300, 1, 0, 1000) == native.state.peek(300, 1, 0, 1000)
        assert (folder / FILE_NAME).exists()
    async with machine(tmp_path / "a") as again:
        assert again.state.peek(8, 1, 0, 1000) == native.state.peek(8, 1, 0, 1000)


class Aborted(Exception):
    """What a call was refused with."""


async def _abort(code: object, text: str) -> None:
    raise Aborted(text)


async def test_replicas_of_two_forms_are_not_compared_and_a_child_does_not_learn_from_a_parent_of_another() -> None:
    context: Any = SimpleNamespace(abort=_abort)
    nothing: Any = None
    with pytest.raises(Aborted, match="form 1"):
        await ReplicasService(nothing, nothing).Digest(pb.PiDigestRequest(mark=5, form=1), context)
    child: Any = SimpleNamespace(record=Record())
    with pytest.raises(Unavailable, match="form 0"):
        next(Learning(child).take(pb.PiLearnReply(snapshot=True)))
    check_form(META_VERSION)
