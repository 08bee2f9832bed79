"""The seal of a segmented log lags: a power cut leaves an old one, and nothing that was acknowledged is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.replication.model import Position
from cluster.replication.storage.entry import encode
from cluster.replication.storage.label import SEAL_LAG_S, Label
from cluster.replication.storage.log import SegmentedLog
from pixiu.errors import DiskFailed
from tests.cluster.replication.log_files import entries, everything, flip, segments
from tests.support.clock import Clock
from tests.support.platter import Platter


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def platter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platter:
    """What a power cut leaves of `lagging`."""
    return Platter(tmp_path / "log", tmp_path / "after the power cut", monkeypatch)


@pytest.fixture
def lagging(platter: Platter, clock: Clock) -> Iterator[SegmentedLog]:
    """A log of 40 entries in several segments; the seal that a power cut leaves is 5."""
    opened = SegmentedLog(platter.folder, segment_bytes=300, clock=clock)
    opened.append(entries(1, 1, 5))
    opened.sync()
    opened.sync_seal()
    for first in range(6, 40, 5):
        opened.append(entries(1, first, first + 4))
        opened.sync()
    yield opened
    opened.close()


def seal_in(directory: Path) -> Position:
    label = Label.decode((directory / "label").read_bytes())
    assert label is not None
    return label.seal


def test_groups_cost_one_sync_each_and_the_label_one_in_a_tenth_of_a_second(
    log: SegmentedLog, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.close()
    log = SegmentedLog(log.directory, clock=clock)
    log.next_incarnation()
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).suffix)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for number in range(1, 1001):
        log.append(entries(1, number, number))
        assert log.sync() == (1, number)
        assert seal_in(log.directory) == (1, number)
        clock.now += SEAL_LAG_S / 50
    assert synced.count(".log") == 1000
    assert 18 <= synced.count("") <= 20
    log.close()


def test_a_group_that_comes_alone_costs_one_sync(lagging: SegmentedLog, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    lagging.sync_seal()
    monkeypatch.setattr(os, "fdatasync", synced.append)
    clock.now += 60.0
    lagging.append(entries(1, 41, 41))
    lagging.sync()
    assert len(synced) == 1


def test_a_power_cut_leaves_an_old_seal_and_everything_that_was_acknowledged(lagging: SegmentedLog, platter: Platter) -> None:
    assert (seal_in(platter.folder), seal_in(platter.shadow)) == ((1, 40), (1, 5))
    dark = SegmentedLog(platter.shadow, segment_bytes=300)
    assert (everything(dark), dark.seal, dark.damage, dark.torn_bytes) == (entries(1, 1, 40), (1, 40), None, 0)
    dark.append(entries(2, 41, 42))
    assert dark.sync() == (2, 42)
    dark.close()


def test_a_torn_write_behind_an_old_seal_is_cut_alone(lagging: SegmentedLog, platter: Platter) -> None:
    with segments(platter.shadow)[-1].open("ab") as newest:
        newest.write(encode(entries(1, 41, 41))[:-1])
    dark = SegmentedLog(platter.shadow, segment_bytes=300)
    assert (everything(dark), dark.damage, dark.torn_bytes) == (entries(1, 1, 40), None, 41)
    dark.close()


def test_damage_before_an_old_seal_is_reported_and_behind_it_taken_for_torn(lagging: SegmentedLog, platter: Platter) -> None:
    for counter, found in ((5, Position(1, 4)), (12, None)):
        image = platter.shadow.with_name(f"{counter}")
        shutil.copytree(platter.shadow, image)
        flip(segments(image)[(counter - 1) // 10], (counter - 1) % 10 * 42 + 20)
        dark = SegmentedLog(image, segment_bytes=300)
        assert (dark.damage.position if dark.damage else None, dark.last.counter) == (found, counter - 1)
        dark.close()


def test_a_kill_leaves_the_exact_seal(lagging: SegmentedLog, tmp_path: Path) -> None:
    shutil.copytree(lagging.directory, tmp_path / "killed")
    os.truncate(segments(tmp_path / "killed")[-1], 0)
    again = SegmentedLog(tmp_path / "killed", segment_bytes=300)
    assert again.damage is not None
    assert again.damage.sealed == (1, 40)
    again.close()


def test_whatever_ends_an_opening_with_an_old_seal_loses_nothing(
    lagging: SegmentedLog, platter: Platter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for die_at in range(100):
        left = tmp_path / f"{die_at}"
        shutil.copytree(platter.shadow, left)
        calls = 0

        def dies(real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object) -> object:
                nonlocal calls
                calls += 1
                if calls > die_at:  # noqa: B023 (called within this turn only)
                    raise KeyboardInterrupt
                return real(*arguments)

            return call

        with monkeypatch.context() as patched:
            for name in ("pwrite", "fdatasync", "ftruncate", "fsync"):
                patched.setattr(os, name, dies(getattr(os, name)))
            try:
                SegmentedLog(left, segment_bytes=300).close()
            except KeyboardInterrupt:
                pass
            else:
                assert die_at > 8
                return
        again = SegmentedLog(left, segment_bytes=300)
        assert (everything(again), again.damage) == (entries(1, 1, 40), None)
        again.close()
    pytest.fail("it never opened")


def _promise(log: SegmentedLog) -> None:
    log.promise(9)
    log.sync()


def _mark(log: SegmentedLog) -> None:
    log.set_unclean(True)
    log.sync()


def _reset(log: SegmentedLog) -> None:
    log.reset(Position(3, 50))


def _cut(log: SegmentedLog) -> None:
    log.cut(7)


@pytest.mark.parametrize(
    "change", [_promise, _mark, _reset, _cut, SegmentedLog.next_incarnation, SegmentedLog.sync_seal, SegmentedLog.close]
)
def test_what_is_more_than_a_rise_is_synced_at_once(
    lagging: SegmentedLog, platter: Platter, change: Callable[[SegmentedLog], object]
) -> None:
    assert lagging.seal_lags
    change(lagging)
    assert not lagging.seal_lags
    assert (platter.shadow / "label").read_bytes() == (platter.folder / "label").read_bytes()


def test_the_seal_is_lowered_durably_before_anything_is_cut_off(
    lagging: SegmentedLog, platter: Platter, monkeypatch: pytest.MonkeyPatch
) -> None:
    lagging.append(entries(1, 41, 45))
    lagging.sync()  # the label may be on the disk by now, or not
    shutil.copyfile(platter.folder / "label", platter.shadow / "label")
    seen: list[Position] = []
    real = os.ftruncate

    def ftruncate(fd: int, length: int) -> None:
        seen.append(seal_in(platter.shadow))
        real(fd, length)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    lagging.cut(43)
    assert seen == [(1, 43)]


@pytest.mark.parametrize("late", [True, False])
def test_a_label_that_cannot_be_synced_fails_the_log(
    lagging: SegmentedLog, clock: Clock, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("label"):
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fdatasync)
        if late:
            clock.now += SEAL_LAG_S
            lagging.append(entries(1, 41, 41))
        with pytest.raises(DiskFailed, match="label: Input/output"):
            lagging.sync() if late else lagging.sync_seal()
    new = entries(1, lagging.last.counter + 1, lagging.last.counter + 1)
    for call in (lagging.sync, lagging.sync_seal, lambda: lagging.append(new)):
        with pytest.raises(DiskFailed):
            call()
