"""The syncs of a replica's log: what gathers, the seal, by the kernel or in a thread."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cluster.replication.model import Entry, Position
from cluster.replication.storage.disk import Syncer
from cluster.replication.storage.kernel_sync import KernelSync
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.segment import Segment
from pixiu.errors import DiskFailed


class HeldKernel:
    """Syncs when the test says so, with the error that it says."""

    def __init__(self, refuses: bool = False) -> None:
        self.wanted: list[tuple[int, Callable[[int], None]]] = []
        self.refuses, self.closed = refuses, False

    def begin(self, fd: int, done: Callable[[int], None]) -> bool:
        if not self.refuses:
            self.wanted.append((fd, done))
        return not self.refuses

    def answer(self, number: int = 0) -> int:
        """Answer the oldest one; returns its file."""
        fd, done = self.wanted.pop(0)
        done(number)
        return fd

    async def close(self) -> None:
        self.closed = True


class SlowLog:
    """Syncs when the test says so."""

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.broken = False
        self.seal_lags = self.seal_overdue = False
        self.seals = 0

    def begin_sync(self) -> list[Segment]:
        return []

    def finish_sync(self, dirty: Sequence[Segment]) -> None:
        assert self.may.acquire(timeout=30)
        if self.broken:
            raise DiskFailed("gone")
        self.seal_lags = True

    def begin_seal(self) -> int:
        return -1

    def sync_seal(self) -> None:
        self.seals += 1
        if self.broken:
            raise DiskFailed("the label is gone")
        self.seal_lags = False


async def test_what_gathers_while_a_sync_runs_is_one_sync() -> None:
    told: list[tuple[int, str]] = []
    log, syncer = SlowLog(), Syncer(lambda ticket, failure: told.append((ticket, failure)))
    syncer._kernel = HeldKernel(refuses=True)  # type: ignore[assignment]
    syncer.start(log)  # type: ignore[arg-type]
    syncer.want(1)
    for ticket in (2, 3, 4):
        syncer.want(ticket)
    assert syncer.hung_s(float("inf")) > 0
    assert [syncer.report_once(), syncer.report_once()] == [True, False]
    log.may.release(2)
    async with asyncio.timeout(30):
        while len(told) < 2:
            await asyncio.sleep(0.01)
    assert told == [(1, ""), (4, "")]
    assert syncer.hung_s(float("inf")) == 0
    log.broken = True
    syncer.want(5)
    log.may.release()
    async with asyncio.timeout(30):
        while len(told) < 3:
            await asyncio.sleep(0.01)
    assert told[2] == (5, "gone")
    await syncer.close()


async def test_the_seal_is_synced_when_no_group_came_for_a_while_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.replication.storage.disk.SEAL_LAG_S", 0.02)
    told: list[tuple[int, str]] = []
    log, syncer = SlowLog(), Syncer(lambda ticket, failure: told.append((ticket, failure)))
    syncer._kernel = HeldKernel(refuses=True)  # type: ignore[assignment]
    syncer.start(log)  # type: ignore[arg-type]
    log.may.release(3)
    async with asyncio.timeout(30):
        for ticket in (1, 2):
            syncer.want(ticket)
            while len(told) < ticket:
                await asyncio.sleep(0)
            assert log.seal_lags
        while log.seal_lags:
            await asyncio.sleep(0.01)
        assert (told, syncer.syncs, log.seals) == ([(1, ""), (2, "")], 2, 1)
        syncer.want(3)
        while len(told) < 3:
            await asyncio.sleep(0)
        log.broken = True
        while len(told) < 4:
            await asyncio.sleep(0.01)
    assert told[3] == (3, "the label is gone")
    await syncer.close()


async def test_closing_syncs_the_seal_and_leaves_no_timer() -> None:
    told: list[tuple[int, str]] = []
    log, syncer = SlowLog(), Syncer(lambda ticket, failure: told.append((ticket, failure)))
    syncer._kernel = HeldKernel(refuses=True)  # type: ignore[assignment]
    syncer.start(log)  # type: ignore[arg-type]
    log.may.release()
    syncer.want(1)
    async with asyncio.timeout(30):
        while not told:
            await asyncio.sleep(0)
        assert syncer._seal_timer.is_set
        await syncer.close()
    assert (log.seals, log.seal_lags, syncer._seal_timer.is_set, told) == (1, False, False, [(1, "")])


# --- by the kernel


class Synced:
    """A log on a disk that syncs when the test says so, and what its syncer has reported."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.log = SegmentedLog(folder, segment_bytes=64, clock=lambda: self.now)
        self.told: list[tuple[int, str]] = []
        self.syncer, self.kernel = Syncer(lambda ticket, failure: self.told.append((ticket, failure))), HeldKernel()
        self.syncer._kernel = self.kernel  # type: ignore[assignment]
        self.syncer.start(self.log)

    def append(self, ticket: int) -> int:
        """Append an entry and want it synced; returns its segment's file."""
        counter = self.log.last.counter + 1
        self.log.append([Entry(1, counter, 2, 0, bytes(60))])
        self.syncer.want(ticket)
        return self.log._segments[-1].fd

    async def close(self) -> None:
        """Close the syncer, with a kernel that answers."""
        closing = asyncio.create_task(self.syncer.close())
        await asyncio.sleep(0)
        while self.kernel.wanted:
            self.kernel.answer()
        await closing

    async def wait_told(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.told) < count:
                await asyncio.sleep(0)


@pytest.fixture
def synced(tmp_path: Path) -> Iterator[Synced]:
    made = Synced(tmp_path / "log")
    yield made
    made.log.close()


async def test_a_group_is_reported_in_the_turn_in_which_the_kernel_has_synced_it(synced: Synced) -> None:
    fd = synced.append(1)
    assert (synced.told, synced.log.seal.counter) == ([], 0)
    assert synced.kernel.answer() == fd
    assert (synced.told, synced.log.seal, synced.log.seal_lags) == ([(1, "")], Position(1, 1), True)
    assert synced.syncer.hung_s(float("inf")) == 0
    await synced.close()
    assert (synced.log.seal_lags, synced.kernel.closed) == (False, True)


async def test_what_comes_during_a_sync_of_the_kernel_waits_for_the_next_which_syncs_each_segment(synced: Synced) -> None:
    files = [synced.append(ticket) for ticket in (1, 2, 3)]
    assert len(synced.kernel.wanted) == 1
    assert synced.kernel.answer() == files[0]
    assert (synced.told, synced.log.seal.counter) == ([(1, "")], 1)
    assert synced.kernel.answer() == files[1]
    assert (len(synced.told), synced.log.seal.counter) == (1, 1)
    assert synced.kernel.answer() == files[2]
    assert (synced.told, synced.log.seal.counter) == ([(1, ""), (3, "")], 3)
    await synced.close()


async def test_what_is_cut_off_during_a_sync_of_the_kernel_is_not_sealed(synced: Synced) -> None:
    synced.append(1)
    synced.kernel.answer()
    synced.append(2)
    synced.log.cut(1)
    synced.kernel.answer()
    assert (synced.told, synced.log.seal.counter) == ([(1, ""), (2, "")], 1)
    await synced.close()


async def test_a_seal_that_has_lagged_for_long_is_synced_by_the_kernel_before_the_next_group(synced: Synced) -> None:
    synced.append(1)
    synced.kernel.answer()
    synced.now += 1.0
    synced.append(2)
    synced.append(3)
    synced.kernel.answer()
    assert (synced.told, synced.log.seal.counter, synced.log.seal_lags) == ([(1, ""), (2, "")], 2, True)
    assert synced.kernel.answer() == synced.log.begin_seal()
    assert not synced.log.seal_lags
    synced.kernel.answer()
    assert synced.told[2] == (3, "")
    await synced.close()


async def test_a_seal_that_the_kernel_cannot_sync_ends_all_promises(synced: Synced) -> None:
    synced.append(1)
    synced.now += 1.0
    synced.kernel.answer()
    synced.now += 1.0
    synced.append(2)
    synced.kernel.answer()
    synced.kernel.answer(errno.EIO)
    assert "label: Input/output error" in synced.told[-1][1]
    with pytest.raises(DiskFailed, match="Input/output error"):
        synced.log.append([Entry(1, 3, 2, 0, b"")])
    await synced.close()


async def test_a_seal_that_the_kernel_syncs_is_not_taken_for_one_that_was_written_meanwhile(synced: Synced) -> None:
    synced.append(1)
    synced.kernel.answer()
    synced.log.begin_seal()
    synced.log.append([Entry(1, 2, 2, 0, b"")])
    for segment in synced.log.begin_sync():
        segment.sync()
    assert synced.log.end_sync()
    synced.log.end_seal()
    assert synced.log.seal_lags
    await synced.close()


@pytest.mark.parametrize("why", ["a promise", "somebody writes the label"])
async def test_a_label_that_must_be_synced_is_left_to_the_thread(synced: Synced, why: str) -> None:
    synced.append(1)
    synced.kernel.answer()
    synced.append(2)
    if why == "a promise":
        synced.log.promise(7)
    else:
        synced.log._label_lock.acquire()
    synced.kernel.answer()
    assert synced.told == [(1, "")]
    if why != "a promise":
        await asyncio.sleep(0.01)
        assert synced.told == [(1, "")]
        synced.log._label_lock.release()
    await synced.wait_told(2)
    assert (synced.told[1], synced.log.seal.counter) == ((2, ""), 2)
    assert synced.log.seal_lags is (why != "a promise")
    await synced.close()


async def test_a_promise_without_entries_is_left_to_the_thread(synced: Synced) -> None:
    synced.log._segments[-1].dirty = False
    synced.log.promise(7)
    synced.syncer.want(1)
    assert not synced.kernel.wanted
    await synced.wait_told(1)
    await synced.close()


async def test_after_a_sync_of_the_kernel_that_failed_nothing_is_durable(synced: Synced) -> None:
    synced.append(1)
    synced.kernel.answer(errno.EIO)
    assert synced.told[0][0] == 1
    assert "Input/output error" in synced.told[0][1]
    with pytest.raises(DiskFailed, match="Input/output error"):
        synced.log.append([Entry(1, 2, 2, 0, b"")])
    synced.syncer.want(2)
    assert synced.told[1] == (2, synced.told[0][1])
    assert synced.log.seal.counter == 0
    await synced.close()


async def test_a_kernel_that_hangs_holds_nobody_up(synced: Synced, monkeypatch: pytest.MonkeyPatch) -> None:
    synced.append(1)
    synced.append(2)
    assert synced.syncer.hung_s(float("inf")) > 0
    assert [synced.syncer.report_once(), synced.syncer.report_once()] == [True, False]
    waited = asyncio.wait

    async def wait_briefly(futures: set[asyncio.Future[None]], timeout: float) -> object:
        return await waited(futures, timeout=timeout / 1000)

    monkeypatch.setattr(asyncio, "wait", wait_briefly)
    await synced.syncer.close()
    assert (synced.told, synced.kernel.closed) == ([], True)


async def test_where_the_kernel_syncs_nothing_a_thread_does(synced: Synced) -> None:
    synced.kernel.refuses = True
    synced.append(1)
    await synced.wait_told(1)
    assert (synced.told, synced.log.seal.counter, synced.kernel.wanted) == ([(1, "")], 1, [])
    await synced.close()


# --- the kernel itself


async def sync_of(kernel: KernelSync, fd: int) -> int:
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    if not kernel.begin(fd, done.set_result):
        pytest.skip("this kernel offers no asynchronous syncs")
    async with asyncio.timeout(30):
        return await done


async def test_the_kernel_syncs_one_file_after_the_other(tmp_path: Path) -> None:
    kernel = KernelSync()
    with (tmp_path / "file").open("wb") as file:
        for _ in range(100):
            os.write(file.fileno(), b"something")
            assert await sync_of(kernel, file.fileno()) == 0
    await kernel.close()


async def test_what_the_kernel_cannot_sync_is_left_to_a_thread(tmp_path: Path) -> None:
    kernel = KernelSync()
    reading, writing = os.pipe()
    assert not kernel.begin(writing, lambda _number: None)
    os.close(reading)
    os.close(writing)
    with (tmp_path / "file").open("wb") as file:
        assert not kernel.begin(file.fileno(), lambda _number: None)
    await kernel.close()


async def test_nothing_is_reported_after_the_end(tmp_path: Path) -> None:
    kernel, told = KernelSync(), list[int]()
    with (tmp_path / "file").open("wb") as file:
        os.write(file.fileno(), b"something")
        kernel.begin(file.fileno(), told.append)
        await kernel.close()
        assert not kernel.begin(file.fileno(), told.append)
    await asyncio.sleep(0.01)
    assert told == []


async def test_a_processor_that_is_not_known_has_no_such_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "vax")
    kernel = KernelSync()
    with (tmp_path / "file").open("wb") as file:
        assert not kernel.begin(file.fileno(), lambda _number: None)
    await kernel.close()
