"""The state on a real disk: transactions, snapshots, full disks, flipped bytes."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from cluster.replication.model import Entry
from pi.events import NO_DEVICE
from pi.inboxes.inbox import Head
from pi.keys import CHUNK_ENTRIES, CRC_BYTES, chunk_key
from pi.store.machine import Machine
from pi.store.store import FILE_NAME, LOCK_NAME, StateStore, install
from pixiu.errors import DiskFailed, DiskFull, PixiuError, StateDamaged
from pixiu.wire.inbox_operations import ENTRY_KIND, USER_DEVICE, Clock, Limits, OpenSessions, Operation, encode
from tests.pi.memory import START_S, at_us
from tests.support.disks import small_disk
from tests.support.pi import acknowledges, appends, message
from tests.support.waiting import until

UIN = 7
WAIT_S = 60.0


def entries(first: int, last: int, each: int = 10, users: int = 1) -> list[Entry]:
    """Of the log, with appends to one inbox, or to so many in turn."""
    found = []
    for counter in range(first, last + 1):
        pairs = ((message(number), UIN + number % users) for number in range(counter * each, counter * each + each))
        found.append(Entry(1, counter, ENTRY_KIND, at_us(START_S), encode([appends(1, *pairs)])))
    return found


@asynccontextmanager
async def machine(folder: Path, map_mb: int = 64, failed: list[PixiuError] | None = None) -> AsyncIterator[Machine]:
    made = Machine(folder, map_mb << 20, 100, 0.01, (failed if failed is not None else []).append)
    made.open()
    try:
        yield made
    finally:
        await made.close()


@contextmanager
def full_disk(one: Machine) -> Iterator[None]:
    """Every write of its state finds no space meanwhile."""

    def write(changes: object) -> None:
        raise DiskFull("no space")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one.store, "write", write)
        yield


async def test_writes_go_on_after_a_transaction_that_met_a_broken_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi.store.machine.DAMAGED_S", 0.01)
    failed: list[PixiuError] = []
    async with machine(tmp_path, failed=failed) as one:

        def write(changes: object) -> None:
            raise one.store.problem("written", lmdb.CorruptedError("a page"))

        one.start(0)
        with monkeypatch.context() as patch:
            patch.setattr(one.store, "write", write)
            one.apply(entries(1, 5))
            await until(lambda: len(failed) > 1)
            assert isinstance(failed[0], StateDamaged)
            assert "a page" in one.damaged
            assert one.flushed == 0
        await until(lambda: one.flushed == 5)


async def test_what_was_flushed_is_there_after_a_restart(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        one.start(100_000)
        one.apply(entries(1, 5))
        await until(lambda: one.flushed == 5)
        await until(lambda: one.scrubbed)
        assert one.damaged == ""
    async with machine(tmp_path) as again:
        assert (again.applied, again.flushed, again.state.inboxes.head(UIN, 1).last) == (5, 5, 50)


async def test_a_transaction_of_many_inboxes_takes_many_turns_and_entries_are_applied_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: Counter[int] = Counter()
    """By turn of the event loop."""
    turn, original = 0, Head.encode

    def counted(head: Head) -> bytes:
        encoded[turn] += 1
        return original(head)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    users = 5_000
    async with machine(tmp_path) as one:
        for counter in range(1, 6):
            one.apply(entries(counter, counter, each=users, users=users))
        monkeypatch.setattr(Head, "encode", counted)
        counting, flushing = asyncio.create_task(count_turns()), asyncio.create_task(one.flush())
        await until(lambda: encoded.total() or flushing.done())
        one.apply(entries(6, 6, users=users))
        await flushing
        counting.cancel()
        assert (one.flushed, one.applied, one.state.unwritten) == (5, 6, 10)
        assert encoded.total() == users
        assert max(encoded.values()) <= 600, "slices of 500, and the inboxes that an entry changes"
        monkeypatch.undo()
    async with machine(tmp_path) as again:
        assert (again.applied, [again.state.inboxes.head(UIN + number, 1).last for number in (0, 60)]) == (6, [5, 6])


async def test_a_snapshot_is_a_whole_state_and_can_be_put_in_the_place_of_another(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    async with machine(tmp_path / "a") as leader, machine(tmp_path / "b") as follower:
        leader.apply(entries(1, 5))
        leader.apply([Entry(1, 6, ENTRY_KIND, 0, encode([OpenSessions(USER_DEVICE.pack(UIN, 0))]))])
        assert await leader.snapshot(tmp_path / "snapshot") == 6
        leader.apply(entries(7, 7))
        follower.apply(entries(1, 2))
        await follower.load(tmp_path / "snapshot")
        assert (follower.applied, follower.flushed) == (6, 6)
        follower.apply(entries(7, 7))
        await leader.flush()
        await follower.flush()
        assert list(leader.store.scan(b"", b"\xff")) == list(follower.store.scan(b"", b"\xff"))
        assert leader.read(UIN, 0, 1, 1, None, 100) == follower.read(UIN, 0, 1, 1, None, 100)
        assert len(follower.read(UIN, 0, 1, 1, None, 100).entries) == 60


@contextmanager
def slow_install(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A snapshot that is installed meanwhile sets the first event, and waits for the second."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(file: Path, folder: Path) -> None:
        install(file, folder)
        begun.set()
        assert go_on.wait(WAIT_S)

    with monkeypatch.context() as patch:
        patch.setattr("pi.store.machine.install", slow)
        try:
            yield begun, go_on
        finally:
            go_on.set()


async def test_the_old_store_is_read_until_a_snapshot_has_taken_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    async with machine(tmp_path / "a") as leader, machine(tmp_path / "b") as follower:
        leader.apply(entries(1, 5))
        await leader.snapshot(tmp_path / "snapshot")
        follower.apply(entries(1, 2))
        await follower.flush()
        with slow_install(monkeypatch) as (begun, go_on):
            loading = asyncio.create_task(follower.load(tmp_path / "snapshot"))
            await until(begun.is_set)
            assert follower.applied == 2
            assert follower.store.bytes_used > follower.store.bytes_live > 0
            assert len(follower.read(UIN, NO_DEVICE, 1, 0, None, 100).entries) == 20
            go_on.set()
            while not loading.done():
                assert follower.store.bytes_used
                await asyncio.sleep(0)
        await loading
        assert (follower.applied, follower.flushed) == (5, 5)
        follower.apply(entries(6, 6))
        await follower.flush()
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == [FILE_NAME, LOCK_NAME]
    async with machine(tmp_path / "b") as again:
        assert again.applied == 6


async def test_a_snapshot_that_is_being_loaded_takes_its_place_before_a_process_that_ends_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "snapshot").mkdir()
    async with machine(tmp_path / "a") as leader, machine(tmp_path / "b") as follower:
        leader.apply(entries(1, 5))
        await leader.snapshot(tmp_path / "snapshot")
        with slow_install(monkeypatch) as (begun, go_on):
            loading = asyncio.create_task(follower.load(tmp_path / "snapshot"))
            await until(begun.is_set)
            loading.cancel()
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await loading
        assert follower.applied == 5
    async with machine(tmp_path / "b") as again:
        assert again.applied == 5


@pytest.mark.parametrize("how", ["a snapshot takes its place", "the process ends"])
async def test_a_store_that_is_being_copied_is_closed_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    begun, go_on, copy = threading.Event(), threading.Event(), StateStore.copy

    def slow(self: StateStore, path: Path) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        assert self.bytes_used, "it is open"
        copy(self, path)

    for name in ("received", "snapshot"):
        (tmp_path / name).mkdir()
    async with machine(tmp_path / "a") as one, machine(tmp_path / "b") as other:
        other.apply(entries(1, 5))
        await other.snapshot(tmp_path / "received")
        one.apply(entries(1, 2))
        with monkeypatch.context() as patch:
            patch.setattr(StateStore, "copy", slow)
            copying = asyncio.create_task(one.snapshot(tmp_path / "snapshot"))
            await until(begun.is_set)
            if how == "the process ends":
                copying.cancel()
            ending = asyncio.create_task(one.close() if how == "the process ends" else one.load(tmp_path / "received"))
            await asyncio.wait({ending}, timeout=0.1)
            assert one.store.bytes_used
            go_on.set()
            await asyncio.wait({copying})
        await ending
        assert copying.cancelled() or copying.result() == 2
        assert one.opened is (how != "the process ends"), "a store that is closed is not read for metrics"


async def test_a_broken_snapshot_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / FILE_NAME).write_bytes(b"no such thing" * 1000)
    async with machine(tmp_path / "a") as one:
        one.apply(entries(1, 1))
        with pytest.raises(PixiuError):
            await one.load(tmp_path / "snapshot")
        assert one.applied == 1
        assert one.state.inboxes.head(UIN, 1).last == 10


@pytest.mark.slow
async def test_a_full_disk_keeps_everything_in_memory_until_there_is_space(tmp_path: Path) -> None:
    failed: list[PixiuError] = []
    async with machine(tmp_path, failed=failed) as one:
        with full_disk(one):
            one.start(0)
            one.apply(entries(1, 3))
            await until(lambda: one.full)
            one.apply(entries(4, 4))
            assert (one.state.inboxes.head(UIN, 1).last, one.flushed) == (40, 0)
        await until(lambda: one.flushed == 4)
        assert one.full == ""
        assert not failed
    async with machine(tmp_path) as again:
        assert again.state.inboxes.head(UIN, 1).last == 40


@pytest.mark.slow
async def test_a_snapshot_that_writes_what_a_full_disk_did_not_take_says_that_there_is_space(tmp_path: Path) -> None:
    async with machine(tmp_path / "a") as one:
        with full_disk(one):
            one.start(0)
            one.apply(entries(1, 3))
            await until(lambda: one.full)
        (tmp_path / "snapshot").mkdir()
        assert await one.snapshot(tmp_path / "snapshot") == 3
        assert one.full == ""  # nothing is left for the next try to write
        with full_disk(one):
            one.apply(entries(4, 4))
            await until(lambda: one.full)
            await one.load(tmp_path / "snapshot")
            assert (one.applied, one.full) == (3, "")


async def test_a_replica_that_cannot_write_its_inboxes_applies_no_more_than_it_may_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pi.store.machine.MAX_CHANGES", 1000)
    async with machine(tmp_path) as one:
        with full_disk(one):
            one.start(0)
            counter = 0
            with pytest.raises(DiskFull):
                for counter in range(1, 200):
                    one.apply(entries(counter, counter, users=10_000))
            assert one.applied == counter - 1
            assert 1000 <= one.state.unwritten < 1100
        await until(lambda: not one.behind)
        one.apply(entries(counter, counter, users=10_000))
        assert one.applied == counter


@pytest.mark.process
async def test_a_write_that_was_taken_in_part_is_a_full_disk_if_the_disk_is_full(tmp_path: Path) -> None:
    short = lmdb.Error("mdb_txn_commit: Input/output error")  # all that LMDB says of a short write
    with small_disk(tmp_path / "small", "4m") as disk:
        async with machine(disk, map_mb=1) as one:
            assert isinstance(one.store.problem("written", short), DiskFailed)
            free = os.statvfs(disk)
            (disk / "ballast").write_bytes(bytes(free.f_bavail * free.f_frsize - (1 << 19)))
            assert isinstance(one.store.problem("written", short), DiskFull)
            (disk / "ballast").unlink()


@pytest.mark.process
async def test_a_disk_that_was_full_while_it_was_written_to_is_no_broken_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The log may let segments go before anybody looks what is left."""
    with small_disk(tmp_path / "small", "4m") as disk:
        async with machine(disk, map_mb=1) as one:
            free = os.statvfs(disk)
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(free.f_bavail * free.f_frsize - (1 << 19)))

            class Begins:
                """What LMDB says of a short write, and space by then."""

                def begin(self, **_: object) -> object:
                    ballast.unlink()
                    raise lmdb.Error("mdb_txn_commit: Input/output error")

            with monkeypatch.context() as patched:
                patched.setattr(one.store, "_db", Begins())
                with pytest.raises(DiskFull):
                    one.store.write({})


async def test_beyond_its_bound_everything_is_applied_until_what_is_acknowledged_has_made_space(tmp_path: Path) -> None:
    """Nothing makes space where acknowledgements and the sweeps' entries find none."""
    counter = 0

    async def applied(*operations: Operation, at_s: float = START_S) -> int:
        nonlocal counter
        counter += 1
        ((*_, (result,)),) = one.apply([Entry(1, counter, ENTRY_KIND, at_us(at_s), encode(operations))])
        await one.flush()
        return result

    async with machine(tmp_path / "a", map_mb=1) as one:
        session, sent = await applied(OpenSessions(USER_DEVICE.pack(UIN, 0))), 0
        while not one.beyond:
            one.apply(entries(counter + 1, counter + 1, each=1000))
            counter, sent = counter + 1, sent + 1000
            await one.flush()
        assert "pi.store_mb is 1:" in one.beyond
        assert one.full == ""
    async with machine(tmp_path / "a", map_mb=1) as one:
        assert one.beyond, "a restart changes nothing"
        assert await applied(acknowledges(UIN, session, sent)) == 0
        assert one.beyond, "senders may still repeat what they sent"
        while one.beyond:
            assert await applied(Clock(Limits()), at_s=START_S + Limits().dedupe_s + 2 * 3600) == 0
            assert counter < sent
        assert one.full == ""
        assert one.store.bytes_live < 1 << 20 < one.store.bytes_used


async def test_a_map_that_is_full_says_which_option_to_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pi.store.machine.RESERVE_BYTES", 0)
    async with machine(tmp_path / "a", map_mb=1) as one:
        one.apply(entries(1, 1000, users=10_000))
        with pytest.raises(DiskFull, match=r"raise pi\.store_mb"):
            await one.flush()
    async with machine(tmp_path / "a", map_mb=64) as again:
        assert again.applied == 0


async def test_a_check_counts_every_value_once(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        assert await one.verify() == 0
        counted = 0
        for begin, end in ((1, 3), (4, 60), (61, 200)):
            one.apply(entries(begin, end, users=10_000))
            await one.flush()
            found = await one.verify()
            assert found == one.store.count_from(b"")
            assert found >= counted + 3 * 10 * (end - begin + 1)
            counted = found


async def test_a_check_counts_what_was_applied_and_not_written_yet(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        one.apply(entries(1, 3, users=30))
        assert await one.verify() > 30


async def test_every_flipped_byte_of_a_chunk_in_the_file_is_found(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        one.apply(entries(1, 10))
        one.apply([Entry(1, 11, ENTRY_KIND, 0, encode([OpenSessions(USER_DEVICE.pack(UIN, 0))]))])
    file = tmp_path / FILE_NAME
    whole = file.read_bytes()
    key, first, size = chunk_key(UIN, 1, CHUNK_ENTRIES + 1), CHUNK_ENTRIES + 1, 2 + 9 + 12 * CHUNK_ENTRIES + CRC_BYTES
    assert whole.count(key) >= 1
    for at in (*range(2 + 9 + 12), *range(size - 12 - CRC_BYTES, size)):
        broken = bytearray(whole)
        place = broken.rfind(key)
        while place >= 0:  # in every page that ever had it
            broken[place + len(key) + at] ^= 0x10
            place = broken.rfind(key, 0, place)
        file.write_bytes(broken)
        async with machine(tmp_path) as one:
            assert len(one.read(UIN, 0, 1, 1, None, CHUNK_ENTRIES).entries) == CHUNK_ENTRIES
            with pytest.raises(StateDamaged):
                one.read(UIN, 0, 1, 1, None, first)
            assert len(one.read(UIN, 0, 1, 1, 2 * CHUNK_ENTRIES, 100).entries) == 100 - 2 * CHUNK_ENTRIES
            with pytest.raises(StateDamaged):
                await one.verify()
            one.start(1_000_000)
            await until(lambda: one.damaged)


def rot(file: Path, uin: int = UIN, seq: int = 17) -> None:
    """A byte of an entry's chunk is another one, in every page that ever had it."""
    broken, key = bytearray(file.read_bytes()), chunk_key(uin, 1, seq)
    place = broken.rfind(key)
    assert place >= 0
    while place >= 0:
        broken[place + len(key)] ^= 0x10
        place = broken.rfind(key, 0, place)
    file.write_bytes(broken)


async def test_no_snapshot_is_made_of_a_state_with_a_broken_value_and_the_damage_is_told(tmp_path: Path) -> None:
    failed: list[PixiuError] = []
    async with machine(tmp_path / "a") as one:
        one.apply(entries(1, 3))
    rot(tmp_path / "a" / FILE_NAME)
    (tmp_path / "snapshot").mkdir()
    async with machine(tmp_path / "a", failed=failed) as one:
        with pytest.raises(StateDamaged, match="lane 1 of inbox 0000000000000007"):
            await one.snapshot(tmp_path / "snapshot")
        assert f"entries 1 to {CHUNK_ENTRIES}" in one.damaged
    assert [each.code for each in failed] == [StateDamaged.code]


async def test_a_snapshot_with_a_broken_value_is_refused_before_it_takes_the_place_of_anything(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    async with machine(tmp_path / "a") as leader, machine(tmp_path / "b") as follower:
        leader.apply(entries(1, 5))
        follower.apply(entries(1, 1))
        await leader.snapshot(tmp_path / "snapshot")
        await follower.check(tmp_path / "snapshot")
        rot(tmp_path / "snapshot" / FILE_NAME)
        with pytest.raises(StateDamaged):
            await follower.check(tmp_path / "snapshot")


async def test_a_state_that_cannot_be_marked_as_damaged_is_not_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with machine(tmp_path) as one:
        one.apply(entries(1, 5))
        await one.flush()
        monkeypatch.setattr("pi.store.store.os.fsync", full)
        with pytest.raises(DiskFull, match="free some space"):
            one.mark_damaged("a byte")
        monkeypatch.undo()
    again = Machine(tmp_path, 64 << 20, 100, 0.01, lambda _: None)
    assert not again.open()
    assert again.applied == 5
    await again.close()


@pytest.mark.parametrize("how", ["broken", "unreadable"])
async def test_a_file_that_does_not_open_is_set_aside_and_made_again_from_the_log(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine(tmp_path) as one:
        one.apply(entries(1, 3))
    if how == "broken":
        (tmp_path / FILE_NAME).write_bytes(b"\x5a" * 8192)
    real, failed = lmdb.open, list[str]()

    def opening(path: str, **options: Any) -> lmdb.Environment:
        if how == "unreadable" and not failed:
            failed.append(path)
            raise lmdb.Error(f"{path}: {os.strerror(errno.EIO)}")
        return real(path, **options)

    monkeypatch.setattr(lmdb, "open", opening)
    again = Machine(tmp_path, 64 << 20, 100, 0.01, lambda _: None)
    assert again.open(), "it was set aside"
    assert again.applied == 0
    again.apply(entries(1, 3))
    assert (tmp_path / f"{FILE_NAME}.damaged").exists()
    await again.close()


async def test_a_page_that_cannot_be_read_is_damage_and_one_that_cannot_be_written_is_not(tmp_path: Path) -> None:
    async with machine(tmp_path) as one:
        error = lmdb.Error(f"mdb_get: {os.strerror(errno.EIO)}")
        assert isinstance(one.store.problem("read", error), StateDamaged)
        assert isinstance(one.store.problem("synced", error), DiskFailed)
