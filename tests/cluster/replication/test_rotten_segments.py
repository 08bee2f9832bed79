"""A segment of the log that only a lagging follower needs, and that the disk has changed: it goes, and the replica goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.replication.core import events as ev
from cluster.replication.core.core import Core
from cluster.replication.core.messages import Append, Appended, Mismatch
from cluster.replication.core.states import State
from cluster.replication.model import Position, Presence
from cluster.replication.options import ReplicationOptions
from cluster.replication.storage.log import SegmentedLog
from cluster.replication.storage.scrub import Scrub
from cluster.replication.storage.segment import Segment
from tests.cluster.replication.log_files import flip
from tests.cluster.replication.replica import OPTIONS, A, B, Replica, entries, sent, state
from tests.support.unreadable import Unreadable
from tests.support.waiting import until

END = 60


class DiskLog(SegmentedLog):
    """A real log with the twin's way to be synced."""

    issued = 0

    def sync(self, up_to: int = 0) -> Position:
        return super().sync()


def written(folder: Path) -> list[Path]:
    """Sixty entries of epoch 1 in segments of five to seven; the files."""
    log = SegmentedLog(folder, segment_bytes=250)
    log.promise(1)
    for first in range(1, END, 2):
        log.append(entries(1, first, first + 1))
    log.sync()
    log.close()
    return sorted(folder.glob("*.log"))


Rot = Callable[[Path], None]


@pytest.fixture(params=["flipped", "unreadable"])
def rot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rot:
    """What a disk does to a byte of a segment: it changes it, or cannot read it."""
    if request.param == "flipped":
        return flip
    disk = Unreadable(monkeypatch)
    return lambda path: disk.spoil(path, 100)


class OnDisk(Replica):
    """A core over a log in files, whose state is flushed."""

    scans = True

    def __init__(self, folder: Path, flushed: int = END, options: ReplicationOptions = OPTIONS) -> None:
        super().__init__(A)
        self.log = log = DiskLog(folder, segment_bytes=250, verify_from=flushed)  # type: ignore[assignment]
        assert log.damage is None
        self.core = Core(member=A, incarnation=1, log=log, options=options, applied=flushed, now=self.now)
        self.step(ev.SessionStarted(1, 1))
        self.step(ev.PresenceChanged((Presence(1, A, 1),)))

    def step(self, event: ev.Event) -> list[ev.Effect]:
        """Old segments are read when that is asked for, unless the test has it later."""
        done = super().step(event)
        asked = [effect.counter for effect in done if isinstance(effect, ev.ScanSegment)]
        return done + self.scan(asked[0]) if asked and self.scans else done

    def scan(self, counter: int) -> list[ev.Effect]:
        assert isinstance(self.log, SegmentedLog)
        rotten = self.log.scan(counter)
        return self.step(ev.SegmentScanned() if rotten is None else ev.SegmentRotten(rotten))


@pytest.fixture
def leader(tmp_path: Path, rot: Rot) -> OnDisk:
    """The only one in sync, with a bit flipped in its second segment."""
    files = written(tmp_path / "log")
    assert len(files) > 6
    rot(files[1])
    return leading(tmp_path / "log")


def leading(folder: Path, options: ReplicationOptions = OPTIONS) -> OnDisk:
    replica = OnDisk(folder, options=options)
    replica.read(5, state(1, B, A))
    replica.wait(3.0)
    replica.step(ev.Swapped(1, ev.CompareAndSetOutcome.OK))
    assert replica.core.state is State.LEADING
    return replica


def test_a_leader_whose_old_segment_is_broken_sends_a_snapshot_instead_of_it(leader: OnDisk) -> None:
    leader.present(B)
    said = leader.wait(1.0)
    said += leader.step(ev.Received(Mismatch(leader.core.epoch, B, 1, 12, leader.now)))
    said += leader.wait(2.0)
    assert leader.core.state is State.LEADING
    assert [effect.member for effect in said if isinstance(effect, ev.SendSnapshot)] == [B]
    assert [effect for effect in said if isinstance(effect, ev.LogDropped)]
    assert leader.log.first.counter > 12
    assert any(isinstance(effect, ev.Accepted) for effect in leader.propose(b"x"))


def test_a_leader_has_an_old_segment_read_beside_its_work_before_it_sends_from_it(tmp_path: Path) -> None:
    written(tmp_path / "log")
    leader = leading(tmp_path / "log")
    leader.scans = False
    leader.present(B)
    leader.wait(1.0)
    said = leader.step(ev.Received(Mismatch(leader.core.epoch, B, 1, 12, leader.now)))
    assert ev.ScanSegment(12) in said
    assert [message.previous for message in sent(said, Append)] == [None], "a heartbeat that needs nothing of the log"
    leader.appended(B, 0)
    later = leader.wait(1.0)
    assert {message.previous for message in sent(later, Append)} == {None}
    assert not any(segment.scanned for segment in leader.log._segments[:-2])  # type: ignore[attr-defined]
    said = leader.scan(12)
    assert [message.previous for message in sent(said, Append)] == [Position(1, 12)]
    assert leader.log.is_ready(12)
    leader.scans = True
    said = leader.appended(B, 12)
    got = [entry.counter for message in sent(said, Append) for entry in message.entries]
    assert got == list(range(13, leader.log.last.counter + 1))


def test_a_follower_has_an_old_segment_read_beside_its_work_before_it_compares(tmp_path: Path) -> None:
    written(tmp_path / "log")
    follower = OnDisk(tmp_path / "log")
    follower.scans = False
    old = follower.log._segments[:-2]  # type: ignore[attr-defined]
    said = follower.append(5, B, (1, 12), entries(1, 13, 16), end=END)
    assert ev.ScanSegment(12) in said
    (answer,) = sent(said, Appended)
    assert (answer.epoch, answer.matched, answer.sent_at) == (5, 0, follower.now), "the leader keeps its lease"
    assert not any(segment.scanned for segment in old)
    follower.scan(12)
    assert [each.matched for each in sent(follower.append(5, B, (1, 12), entries(1, 13, 14), end=END), Appended)] == [14]
    said = follower.append(5, B, (1, 14), entries(1, 15, 40), end=END)
    (scan,) = [effect for effect in said if isinstance(effect, ev.ScanSegment)]
    assert scan.counter == 40, "where the entries end"
    assert [each.matched for each in sent(said, Appended)] == [14]


def test_a_follower_that_lags_holds_back_so_many_bytes_of_the_log_and_no_more(tmp_path: Path) -> None:
    files = written(tmp_path / "log")
    leader = leading(tmp_path / "log", replace(OPTIONS, max_kept_bytes=600))
    leader.present(B)
    leader.wait(1.0)
    leader.step(ev.Received(Mismatch(leader.core.epoch, B, 1, 12, leader.now)))
    leader.appended(B, 12)  # it takes what is sent to it, and does not acknowledge it
    leader.step(ev.Flushed(END))
    assert 12 < leader.log.first.counter < END
    kept = sum(path.stat().st_size for path in files if path.exists())
    assert 250 < kept <= 600 + 250, "a segment more at most"
    said = leader.wait(3.0) + leader.appended(B, 12) + leader.wait(2.0)
    assert [effect.member for effect in said if isinstance(effect, ev.SendSnapshot)] == [B]


def test_a_segment_that_is_trimmed_while_it_is_read_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "log")
    log = OnDisk(tmp_path / "log").log
    assert isinstance(log, SegmentedLog)
    whole = Segment.scan

    def trimmed(segment: Segment) -> str | None:
        log.trim(30)
        return whole(segment)

    monkeypatch.setattr(Segment, "scan", trimmed)
    assert log.scan(12) is None
    assert log.first.counter > 12
    assert log.scan(12) is None


def test_a_follower_whose_old_segment_is_broken_answers_for_what_is_behind_it(tmp_path: Path, rot: Rot) -> None:
    files = written(tmp_path / "log")
    rot(files[1])
    follower = OnDisk(tmp_path / "log")
    said = follower.append(2, B, (1, 10), [], committed=END, end=END)
    said += follower.append(2, B, (1, 10), [], committed=END, end=END)
    assert follower.core.state is State.FOLLOWING
    answers = [effect.message for effect in said if isinstance(effect, ev.Send)]
    assert isinstance(answers[-1], Appended)
    assert answers[-1].matched == 10
    assert not [effect for effect in said if isinstance(effect, ev.Send) and isinstance(effect.message, Append)]


def test_a_segment_that_the_state_needs_is_damage(tmp_path: Path, rot: Rot) -> None:
    files = written(tmp_path / "log")
    rot(files[-2])
    log = SegmentedLog(tmp_path / "log", segment_bytes=250, verify_from=20)
    assert log.damage is not None
    log.close()


async def test_the_scrub_finds_what_nobody_reads_and_it_is_dropped(tmp_path: Path, rot: Rot) -> None:
    files = written(tmp_path / "log")
    replica = OnDisk(tmp_path / "log")
    found: list[int] = []
    assert isinstance(replica.log, SegmentedLog)
    scrub = Scrub(found.append, bytes_per_s=1 << 30, pause_s=0.001)
    scrub.start(replica.log)
    await until(lambda: scrub.passes > 0)
    assert found == []
    rot(files[2])
    await until(lambda: found)
    await scrub.close()
    (out,) = replica.step(ev.SegmentRotten(found[0]))
    assert isinstance(out, ev.LogDropped)
    assert replica.log.first.counter == found[0]
    assert any(isinstance(effect, ev.Sync) for effect in replica.append(2, B, (1, END), entries(2, END + 1, END + 1)))
    replica.log.close()


def test_a_label_that_cannot_be_read_is_damage_and_not_the_end_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "log")
    with monkeypatch.context() as patched:
        Unreadable(patched).spoil(tmp_path / "log" / "label", 0)
        log = SegmentedLog(tmp_path / "log", segment_bytes=250)
    assert log.damage is not None
    assert "label" in log.damage.reason
    assert log.unclean
    log.close()
