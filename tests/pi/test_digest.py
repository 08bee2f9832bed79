"""States in a few numbers: equal for equal states however they came to be, and different where one row is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from cluster.replication.model import Entry
from pi.inboxes import expiry
from pi.inboxes.chunk import Chunk
from pi.keys import chunk_key, deleted_key, head_key, seal, time_key, user_key, writer_key
from pi.state import State
from pi.store.digest import NOBODY, RANGES, Digest, range_of, range_of_user
from pi.store.machine import Machine
from pi.store.view import MARK_KIND, MAX_VIEWS, PART_ROWS, Views
from pixiu.errors import Overloaded, Unavailable
from pixiu.wire.inbox_operations import (
    DELETE,
    ENTRY_KIND,
    TRIM,
    USER_DEVICE,
    AddDevice,
    Clock,
    Deletes,
    DropDevices,
    Limits,
    OpenSessions,
    Operation,
    Trims,
    encode,
)
from tests.pi.memory import HOUR, START_S, MemoryStore, Replica, at_us
from tests.support.effort import runs
from tests.support.pi import acknowledges, appends, message

SEEDS = runs("PIXIU_PI_SEEDS", local=2, ci=20)


def of(values: dict[bytes, bytes]) -> list[int]:
    digest = Digest()
    digest.add(values.items())
    return digest.sums


def test_every_row_of_a_user_is_in_the_users_range_and_users_are_spread() -> None:
    for uin in (1, 7, 1 << 40, (1 << 63) - 1):
        keys = [chunk_key(uin, 1, 5), deleted_key(uin, 1), head_key(uin, 1), time_key(9, uin, 1), user_key(uin)]
        assert {range_of(key) for key in keys} == {range_of_user(uin)}
    assert [range_of(key) for key in (b"M", writer_key(3), b"E", b"?" * 20)] == [NOBODY] * 4
    for users in (range(1, 10_001), range(4, 40_004, 4), range(1 << 50, (1 << 50) + 10_000)):
        counts = [0] * RANGES
        for uin in users:
            counts[range_of_user(uin)] += 1
        assert max(counts) < 3 * 10_000 / RANGES


def a_chunk(uin: int, lane: int, seq: int, msg_id: int, at_s: int = 5, before: int = 1) -> tuple[bytes, bytes]:
    chunk, key = Chunk(seq), chunk_key(uin, lane, seq)
    chunk.before = {0: before}
    chunk.append(msg_id, at_s)
    return key, chunk.encode(key)


def test_a_row_that_is_changed_missing_or_more_is_found_in_its_range() -> None:
    rows = dict(a_chunk(uin, 1, seq, seq) for uin in range(1, 200) for seq in (1, 50, 100))
    rows |= {user_key(uin): seal(b"", b"%d" % uin) for uin in range(1, 200)}
    whole = Digest()
    whole.add(list(rows.items())[::-1])
    assert whole.rows == len(rows)
    assert whole.sums == of(rows)
    key = chunk_key(9, 1, 50)
    others = [dict([a_chunk(9, 1, *other)]) for other in ((50, 51), (51, 50), (50, 50, 6))]
    assert all(list(other) == [key] for other in others)
    others += [{user_key(9): seal(b"", b"?")}, {head_key(9, 2): b""}, {key: b"?"}]
    for other in (*({**rows, **other} for other in others), {k: v for k, v in rows.items() if k != key}):
        assert [place for place, one in enumerate(of(other)) if one != whole.sums[place]] == [range_of_user(9)]


def test_where_a_search_may_end_is_no_difference() -> None:
    (key, one), (_, other) = a_chunk(9, 1, 50, 51), a_chunk(9, 1, 50, 51, before=40)
    assert one != other
    assert of({key: one}) == of({key: other})


def some_operations(random: Random, sent: int) -> list[Operation]:
    uin = random.randint(1, 6)
    choices: list[Operation] = [
        appends(1, *((message(sent * 8 + number), random.randint(1, 6)) for number in range(random.randint(1, 8)))),
        OpenSessions(USER_DEVICE.pack(uin, random.randint(0, 3))),
        AddDevice(uin, b"%06d" % random.randint(0, 9)),
        DropDevices(USER_DEVICE.pack(uin, random.randint(1, 3))),
        acknowledges(uin, random.randint(1, 5), random.randint(0, 40), random.getrandbits(4), device=random.randint(0, 2)),
        Trims(TRIM.pack(uin, 1, random.randint(0, 30))),
        Deletes(DELETE.pack(uin, 1, sent % 30, sent % 30 + 2)),
        Clock(Limits(cap=20, dedupe_s=2 * HOUR, history_s=HOUR, age_s=30 * HOUR, device_age_s=40 * HOUR)),
    ]
    return random.choices(choices, [8, 1, 1, 1, 4, 1, 1, 2], k=random.randint(1, 3))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_replica_that_remembers_nothing_comes_to_the_same_state(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SWEEP_ENTRIES", 7)
    random = Random(seed)
    one, forgetful = Replica(), Replica()
    one.state = State(one.store)
    for sent in range(400):
        operations = some_operations(random, sent)
        one.now_s = forgetful.now_s = one.now_s + random.choice([0, 60, HOUR / 2])
        assert one.apply(*operations) == forgetful.apply(*operations)
        forgetful.flush()
        forgetful.restart()
        if sent % 40 == 39:
            one.flush()
            assert isinstance(one.store, MemoryStore)
            assert isinstance(forgetful.store, MemoryStore)
            assert one.store.values == forgetful.store.values, f"after {sent} entries"


def entries(first: int, last: int, mark_at: int, mark: int) -> list[Entry]:
    found = []
    for counter in range(first, last + 1):
        numbers = range(counter * 50, counter * 50 + 50)
        payload = encode([appends(1, *((message(number), 1 + number % 1000) for number in numbers))])
        if counter == mark_at:
            found.append(Entry(1, counter, MARK_KIND, at_us(START_S), mark.to_bytes(8, "little")))
        else:
            found.append(Entry(1, counter, ENTRY_KIND, at_us(START_S), payload))
    return found


def expected(up_to: int, mark: int) -> list[int]:
    """The digests of a state that was fed one entry after the other up to here."""
    store = MemoryStore()
    state = State(store)
    state.apply(entries(1, up_to, up_to, mark))
    store.write(state.freeze())
    return of(store.values)


@pytest.mark.parametrize("flushed", ["nothing", "before", "meanwhile", "after"])
async def test_a_view_is_of_the_state_behind_its_mark_whatever_is_written_later(tmp_path: Path, flushed: str) -> None:
    machine = Machine(tmp_path, 64 << 20, 100, 3600, lambda _: None)
    machine.open()
    log = entries(1, 60, 40, 77)
    machine.apply(log[:20])
    if flushed == "before":
        await machine.flush()
    flushing = asyncio.create_task(machine.flush()) if flushed == "meanwhile" else None
    if flushing is not None:
        await asyncio.sleep(0)  # what it writes is frozen now
    future = machine.views.expect(77)
    assert len(machine.apply(log[20:])) == 40
    view = await future
    assert view.position == 40
    if flushed == "after":
        await machine.flush()
    if flushing is not None:
        await flushing
        await machine.flush()
    digest = await machine.digest(view)
    assert digest.sums == expected(40, 77)
    assert digest.rows > PART_ROWS
    machine.views.forget(77)
    assert not machine.views
    await machine.close()


async def test_marks_that_nobody_waits_for_change_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 64 << 20, 100, 3600, lambda _: None)
    machine.open()
    future = machine.views.expect(5)
    machine.apply(entries(1, 10, 5, 77))
    assert machine.applied == 10
    assert not future.done()
    machine.views.forget(5)
    await machine.close()


async def test_a_view_ends_with_the_state_that_it_is_of(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "state", 64 << 20, 100, 3600, lambda _: None)
    machine.open()
    future = machine.views.expect(77)
    machine.apply(entries(1, 10, 10, 77))
    view = await future
    (tmp_path / "copy").mkdir()
    await machine.snapshot(tmp_path / "copy")
    await machine.load(tmp_path / "copy")
    with pytest.raises(Unavailable, match="snapshot"):
        await machine.digest(view)
    machine.views.forget(77)
    await machine.close()


async def test_few_views_are_waited_for_at_a_time() -> None:
    views = Views()
    for mark in range(1, MAX_VIEWS + 1):
        views.expect(mark)
    with pytest.raises(Overloaded):
        views.expect(MAX_VIEWS + 1)
    views.forget(1)
    with pytest.raises(Overloaded):
        views.expect(2)
    views.expect(MAX_VIEWS + 1)
