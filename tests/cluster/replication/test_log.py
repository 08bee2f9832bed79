"""The segmented log on real files."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.replication.model import START, Entry, Position
from cluster.replication.storage import segment as segment_module
from cluster.replication.storage.entry import MAX_PAYLOAD_BYTES, decode, encode
from cluster.replication.storage.label import Label, LabelFile
from cluster.replication.storage.log import SegmentedLog
from pixiu.errors import DiskFailed, DiskFull, LogDamaged, MalformedData
from tests.cluster.replication.log_files import entries, everything, flip, segments
from tests.sim.replication.disk import Disk, MemoryLog
from tests.support.disks import small_disk
from tests.support.platter import Platter
from tests.support.unreadable import Unreadable


def reopen(log: SegmentedLog, segment_bytes: int = 300) -> SegmentedLog:
    log.close()
    return SegmentedLog(log.directory, segment_bytes=segment_bytes)


# --- entries as bytes


def test_an_entry_has_the_documented_form() -> None:
    data = encode([Entry(7, 9, 2, 11, b"abc")])
    body = struct.pack("<IB3xQQ", 7, 2, 9, 11) + b"abc"
    assert data == struct.pack("<II", 4 + len(body), zlib.crc32(body)) + body


def test_every_flipped_bit_and_every_cut_of_an_entry_is_seen() -> None:
    data = encode(entries(1, 1, 1))
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(MalformedData):
            decode(bytes(broken), 10)
    for end in range(1, len(data)):
        with pytest.raises(MalformedData):
            decode(data[:end], 10)


def test_more_entries_than_allowed_and_larger_ones_are_refused() -> None:
    with pytest.raises(MalformedData, match="more than 2"):
        decode(encode(entries(1, 1, 3)), 2)
    with pytest.raises(ValueError, match="above the limit"):
        encode([Entry(1, 1, 2, 0, bytes(MAX_PAYLOAD_BYTES + 1))])


# --- what was written is there


def test_entries_come_back_over_segments_and_openings(log: SegmentedLog) -> None:
    written = [*entries(1, 1, 20), *entries(3, 21, 45), *entries(4, 46, 50)]
    for begin in range(0, 50, 5):
        log.append(written[begin : begin + 5])
    assert log.sync() == Position(4, 50)
    again = reopen(log)
    assert everything(again) == written
    assert len(segments(log.directory)) > 4
    assert (again.first, again.last, again.seal, again.damage, again.torn_bytes) == (START, (4, 50), (4, 50), None, 0)
    assert [again.epoch_at(counter) for counter in (0, 1, 20, 21, 45, 46, 50, 51)] == [0, 1, 1, 3, 3, 4, 4, None]
    assert again.start_of_epoch(50) in range(46, 51)
    again.close()


def test_a_read_keeps_to_its_limits_but_gives_one_entry(log: SegmentedLog) -> None:
    log.append(entries(1, 1, 6, size=100))
    log.sync()
    again = reopen(log, segment_bytes=10_000)
    for source in (log, again):
        assert [entry.counter for entry in source.read(2, 2, 10_000)] == [3, 4]
        assert [entry.counter for entry in source.read(2, 9, 1)] == [3]
        assert not source.read(6, 9, 10_000)
    again.close()


def test_entries_that_do_not_follow_the_end_are_a_bug(log: SegmentedLog) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        log.append(entries(1, 2, 2))


def test_promise_mark_and_incarnation_are_kept(log: SegmentedLog) -> None:
    member, incarnation = log.member, log.incarnation
    assert log.next_incarnation() == incarnation + 1
    log.promise(9)
    log.promise(4)
    log.sync()
    again = reopen(log)
    assert (again.member, again.incarnation, again.promised, again.unclean) == (member, incarnation + 1, 9, False)
    again.close()


def test_two_directories_are_two_members(tmp_path: Path) -> None:
    one, two = SegmentedLog(tmp_path / "one"), SegmentedLog(tmp_path / "two")
    assert one.member != two.member
    one.close()
    two.close()


def test_the_same_calls_leave_the_same_log_as_in_memory(tmp_path: Path) -> None:
    rng = random.Random(5)
    log: SegmentedLog = SegmentedLog(tmp_path / "log", segment_bytes=400)
    disk = Disk()
    memory = MemoryLog(disk)
    epoch = 1
    for _ in range(600):
        what = rng.randrange(12)
        if what < 6:
            epoch += rng.random() < 0.2
            new = entries(epoch, memory.last.counter + 1, memory.last.counter + rng.randint(1, 6), rng.randint(0, 60))
            log.append(new)
            memory.append(new)
        elif what == 6:
            after = rng.randint(memory.first.counter, memory.last.counter)
            log.cut(after)
            memory.cut(after)
        elif what == 7 and rng.random() < 0.2:
            position = Position(epoch, memory.last.counter + rng.randint(1, 9))
            log.reset(position)
            memory.reset(position)
        elif what == 8:
            log.trim(rng.randint(0, memory.last.counter))
            memory.trim(log.first.counter)
        elif what == 9:
            log.sync()
            memory.sync(memory.issued)
            log.close()
            log = SegmentedLog(tmp_path / "log", segment_bytes=400, verify_from=rng.choice((0, memory.last.counter)))
            assert (log.damage, log.torn_bytes) == (None, 0)
        assert (log.first, log.last) == (memory.first, memory.last)
        if rng.random() < 0.2:
            assert everything(log) == memory.entries
            counter = rng.randint(memory.first.counter, memory.last.counter + 1)
            assert log.epoch_at(counter) == memory.epoch_at(counter)
    log.close()


# --- cutting, replacing, trimming


def test_a_cut_takes_the_seal_along(log: SegmentedLog) -> None:
    log.append(entries(1, 1, 9))
    log.append(entries(1, 10, 20))
    log.sync()
    log.cut(4)
    again = reopen(log)
    assert (again.last, again.seal, again.damage) == ((1, 4), (1, 4), None)
    again.append(entries(2, 5, 6))
    assert again.sync() == Position(2, 6)
    assert [entry.epoch for entry in everything(again)] == [1, 1, 1, 1, 2, 2]
    again.close()


def test_a_sync_seals_nothing_that_is_cut_off_meanwhile(log: SegmentedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(entries(1, 1, 5))
    real = segment_module.Segment.sync

    def sync(segment: segment_module.Segment) -> None:
        monkeypatch.setattr(segment_module.Segment, "sync", real)
        real(segment)
        log.cut(3)
        log.append(entries(2, 4, 9))

    monkeypatch.setattr(segment_module.Segment, "sync", sync)
    assert log.sync() == Position(1, 3)
    assert log.sync() == Position(2, 9)


def test_a_reset_goes_on_after_its_position(log: SegmentedLog) -> None:
    log.append(entries(1, 1, 20))
    log.sync()
    log.reset(Position(3, 40))
    log.append(entries(3, 41, 42))
    log.sync()
    again = reopen(log)
    assert (again.first, again.last, again.epoch_at(40), again.damage) == ((3, 40), (3, 42), 3, None)
    again.close()


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_reset_that_was_interrupted_is_ended_at_the_next_opening(
    log: SegmentedLog, removed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (1, 9, 17):
        log.append(entries(1, first, first + 7, size=40))
    log.sync()
    kept = {path.name: path.read_bytes() for path in segments(log.directory)[removed:]}
    writes: list[bytes] = []
    real = LabelFile.write

    def write(file: LabelFile, label: Label) -> None:
        writes.append(label.encode())
        real(file, label)

    with monkeypatch.context() as patched:
        patched.setattr(LabelFile, "write", write)
        log.reset(Position(3, 40))
    log.close()
    for path in segments(log.directory):
        path.unlink()
    for name, data in kept.items():
        (log.directory / name).write_bytes(data)
    (log.directory / "label").write_bytes(writes[0])
    again = SegmentedLog(log.directory)
    assert (again.first, again.last, again.damage) == ((3, 40), (3, 40), None)
    again.close()


def test_trimming_takes_whole_segments_from_the_front(log: SegmentedLog) -> None:
    for first in range(1, 50, 7):
        log.append(entries(1, first, first + 6))
    log.sync()
    before = len(segments(log.directory))
    log.trim(25)
    assert 0 < log.first.counter <= 25
    assert len(segments(log.directory)) < before
    log.trim(10_000)
    assert len(segments(log.directory)) == 1
    again = reopen(log)
    assert (again.last, again.damage) == ((1, 49), None)
    again.close()


# --- torn writes and damage


def test_a_torn_tail_beyond_the_seal_is_cut(log: SegmentedLog, tmp_path: Path) -> None:
    log.append(entries(1, 1, 3))
    log.sync()
    sealed = segments(log.directory)[0].stat().st_size
    log.append(entries(1, 4, 6))
    log.close()
    whole = segments(log.directory)[0].stat().st_size
    for size in range(sealed, whole):
        image = tmp_path / f"{size}"
        shutil.copytree(log.directory, image)
        os.truncate(segments(image)[0], size)
        again = SegmentedLog(image)
        assert again.damage is None
        assert again.last.counter == 3 + (size - sealed) * 3 // (whole - sealed)
        assert again.torn_bytes == (size - sealed) % ((whole - sealed) // 3)
        again.append(entries(2, again.last.counter + 1, again.last.counter + 1))
        again.close()


def test_what_a_killed_process_wrote_is_durable_before_the_next_one_says_that_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platter = Platter(tmp_path / "log", tmp_path / "after the power cut", monkeypatch)
    log = SegmentedLog(tmp_path / "log", segment_bytes=300)
    log.append(entries(1, 1, 2))
    log.sync()
    for first in range(3, 40, 6):  # the page cache has these, in several segments
        log.append(entries(1, first, first + 5))
    log.close()
    again = SegmentedLog(tmp_path / "log", segment_bytes=300)
    assert again.sync() == again.last == Position(1, 44)
    dark = SegmentedLog(platter.shadow, segment_bytes=300)
    assert (everything(dark), dark.seal, dark.damage) == (entries(1, 1, 44), (1, 44), None)
    dark.close()
    again.close()


def test_without_space_to_write_it_again_nothing_is_cut_off(log: SegmentedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(entries(1, 1, 2))
    log.sync()
    for first in (3, 10, 17):
        log.append(entries(1, first, first + 6))
    log.close()
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if len(data) != 512 and offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        with pytest.raises(DiskFull, match="free some"):
            SegmentedLog(log.directory, segment_bytes=300)
    again = SegmentedLog(log.directory, segment_bytes=300)
    assert (everything(again), again.seal, again.damage) == (entries(1, 1, 23), (1, 23), None)
    again.close()


@pytest.mark.slow
def test_damage_before_the_seal_is_reported_with_its_position_and_never_cut_silently(log: SegmentedLog, tmp_path: Path) -> None:
    log.append(entries(1, 1, 6))
    log.sync()
    log.close()
    path = segments(log.directory)[0]
    for offset in range(path.stat().st_size):
        image = tmp_path / f"{offset}"
        shutil.copytree(log.directory, image)
        flip(segments(image)[0], offset)
        again = SegmentedLog(image)
        assert again.damage is not None
        assert again.unclean
        assert again.damage.position.counter == offset // 42 == again.last.counter
        assert again.damage.sealed == (1, 6)
        assert (image / f"{path.name}.damaged").stat().st_size == path.stat().st_size
        again.close()
        third = SegmentedLog(image)  # the mark stays until a leader has given what is missing
        assert third.unclean
        assert third.damage is not None
        third.set_unclean(False)
        third.sync()
        third.close()
        fourth = SegmentedLog(image)
        assert (fourth.unclean, fourth.damage) == (False, None)
        fourth.close()


def _cut_tail(directory: Path) -> None:
    os.truncate(segments(directory)[-1], 10)


def _drop_last(directory: Path) -> None:
    segments(directory)[-1].unlink()


def _drop_middle(directory: Path) -> None:
    segments(directory)[1].unlink()


def _drop_all(directory: Path) -> None:
    for path in segments(directory):
        path.unlink()


def _drop_label(directory: Path) -> None:
    (directory / "label").unlink()


def _flip_label(directory: Path) -> None:
    flip(directory / "label", 20)


def _drop_member(directory: Path) -> None:
    (directory / "member").unlink()


def _drop_all_but_member(directory: Path) -> None:
    _drop_all(directory)
    _drop_label(directory)


@pytest.mark.parametrize(
    "destroy", [_cut_tail, _drop_last, _drop_middle, _drop_all, _drop_label, _flip_label, _drop_member, _drop_all_but_member]
)
def test_what_is_missing_is_noticed(log: SegmentedLog, destroy: object) -> None:
    for first in range(1, 40, 8):
        log.append(entries(1, first, first + 7))
    log.sync()
    incarnation = log.incarnation
    log.close()
    assert callable(destroy)
    destroy(log.directory)
    again = SegmentedLog(log.directory)
    assert again.unclean
    assert again.damage is not None
    assert again.incarnation >= incarnation
    assert everything(again) == entries(1, 1, again.last.counter)
    again.append(entries(2, again.last.counter + 1, again.last.counter + 1))
    again.sync()
    again.close()


def test_older_segments_are_checked_when_they_are_read(log: SegmentedLog) -> None:
    for first in range(1, 40, 8):
        log.append(entries(1, first, first + 7))
    log.sync()
    log.close()
    flip(segments(log.directory)[0], 50)
    again = SegmentedLog(log.directory, verify_from=39)
    assert again.damage is None
    assert again.read(38, 5, 1000)
    with pytest.raises(LogDamaged):
        again.read(0, 5, 1000)
    with pytest.raises(LogDamaged):
        again.verify(0, 40)
    again.close()


def test_the_scrub_finds_what_rots_while_the_log_is_open(log: SegmentedLog) -> None:
    log.append(entries(1, 1, 20))
    log.sync()
    log.verify(0, 20)
    flip(segments(log.directory)[0], 100)
    with pytest.raises(LogDamaged, match="entry 3 is broken"):
        log.verify(0, 20)


# --- full and failing disks


def test_a_full_disk_refuses_and_goes_on_when_there_is_space(log: SegmentedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(entries(1, 1, 3))
    real = os.pwrite
    full = [True]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if not full[0] or len(data) == 512:
            return real(fd, data, offset)
        if len(data) > 20:
            return real(fd, data[:20], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    for _ in range(2):
        with pytest.raises(DiskFull, match="free some"):
            log.append(entries(1, 4, 4, size=1))
    assert everything(log) == entries(1, 1, 3)
    full[0] = False
    log.append(entries(1, 4, 5))
    assert log.sync() == Position(1, 5)
    again = reopen(log)
    assert (again.last, again.damage, again.torn_bytes) == ((1, 5), None, 0)
    again.close()


def test_after_a_failed_sync_nothing_is_promised(log: SegmentedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(entries(1, 1, 3))

    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(DiskFailed, match="Input/output"):
            log.sync()
    for call in (log.sync, lambda: log.append(entries(1, 4, 4)), lambda: log.cut(1)):
        with pytest.raises(DiskFailed):
            call()
    assert everything(log) == entries(1, 1, 3)


@pytest.mark.parametrize("call", ["unlink", "ftruncate"])
def test_an_error_of_the_system_is_an_error_of_the_disk(log: SegmentedLog, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (1, 9, 17):
        log.append(entries(1, first, first + 7, size=40))
    log.sync()

    def fails(*arguments: object, **options: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    again = reopen(log)
    calls: dict[str, Callable[[], object]] = {
        "unlink": lambda: again.trim(20),
        "ftruncate": lambda: again.cut(20),
    }
    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(DiskFailed, match="Input/output"):
            calls[call]()
    with pytest.raises(DiskFailed):
        again.append(entries(1, again.last.counter + 1, again.last.counter + 1))
    again.close()


def test_a_read_that_fails_is_damage_and_promises_go_on(log: SegmentedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (1, 9, 17):
        log.append(entries(1, first, first + 7, size=40))
    log.sync()
    again = reopen(log)
    with monkeypatch.context() as patched:
        Unreadable(patched).spoil(segments(again.directory)[0], 0)
        with pytest.raises(LogDamaged, match="cannot read byte 0: Input/output"):
            again.read(0, 9, 1000)
        with pytest.raises(LogDamaged):
            again.verify(0, 5)
    again.append(entries(1, 25, 25))
    assert again.sync() == Position(1, 25)
    again.close()


@pytest.mark.process
def test_a_small_file_system_fills_and_recovers(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "256k") as mount:
        log = SegmentedLog(mount / "log", segment_bytes=64_000)
        ballast = mount / "ballast"
        ballast.write_bytes(bytes(100_000))
        counter = 0
        with pytest.raises(DiskFull):
            while True:
                log.append(entries(1, counter + 1, counter + 5, size=1000))
                counter += 5
        assert log.sync() == Position(1, counter)
        assert len(everything(log)) == counter
        ballast.unlink()
        log.append(entries(1, counter + 1, counter + 5, size=1000))
        assert log.sync() == Position(1, counter + 5)
        log.close()
        again = SegmentedLog(mount / "log")
        assert (again.last.counter, again.damage) == (counter + 5, None)
        again.close()


# --- kill -9

WRITER = """
import sys
from pathlib import Path
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.model import Entry
log = SegmentedLog(Path(sys.argv[1]), segment_bytes=20_000)
assert log.damage is None, log.damage
while True:
    last = log.last.counter
    log.append([Entry(1, last + i, 2, 0, b"%d" % (last + i) * 9) for i in range(1, 8)])
    if last % 3 == 0:
        log.cut(log.last.counter - 2)
    print(log.sync().counter, flush=True)
    if log.last.counter % 11 == 0:
        log.trim(log.last.counter - 2000)
"""


@pytest.mark.process
def test_a_killed_writer_leaves_everything_that_it_called_synced(tmp_path: Path) -> None:
    rng = random.Random(1)
    reached = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]
        )
        assert writer.stdout is not None
        for _ in range(rng.randint(1, 60)):
            reached = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        reached = int(rest[-1]) if rest else reached
        log = SegmentedLog(tmp_path / "log")
        assert log.damage is None
        assert log.last.counter >= reached
        assert all(entry.payload == b"%d" % entry.counter * 9 for entry in everything(log))
        log.close()
