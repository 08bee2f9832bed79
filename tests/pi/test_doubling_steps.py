"""What leaders of Pi decide of a doubling: in which order a partition is cut, what a child is told, what takes it back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.replication.model import START, Entry, Position
from cluster.wire.v1 import doubling_pb2 as pb
from pi.doubling.learning import Lesson, check_pupil
from pi.doubling.phases import DOUBLING_KIND, Command, Cut, Doubling, Phase, Record, Step, fence_body, followed
from pi.doubling.steps import EndTurn, Standing, Work, Write, problem_of, status_of, steps_back, steps_to, work_of
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, NotYet, Unavailable
from pixiu.wire.inbox_operations import ENTRY_KIND

DOUBLING = Doubling(0xAA, 4, 3)
ID = f"{0xAA:016x}"
BEGUN, FOUR, TWO = RoleLayout(2, 4, 1, (ID,)), RoleLayout(4, 4, 1, (ID,)), RoleLayout(2, 2, 1)
PARENT = Standing(1, Record(), BEGUN)
SPLIT = Record(Phase.SPLIT, DOUBLING, split_at=9)


def to(phase: pb.DoublingPhase.ValueType, fence: int = 0) -> pb.DoublingAdvanceRequest:
    return pb.DoublingAdvanceRequest(doubling=DOUBLING.number, partitions=4, phase=phase, operator="test", fence=fence)


BACK = pb.DoublingTakeBackRequest(doubling=DOUBLING.number, partitions=4, operator="test")


def test_what_came_in_the_same_turn_stands_before_the_split() -> None:
    assert steps_to(PARENT, to(pb.DOUBLING_SPLIT)) == (EndTurn(), Write(Command(Step.SPLIT, DOUBLING, fence_body(0))))


def test_nothing_is_deleted_before_the_layout_has_flipped() -> None:
    with pytest.raises(Unavailable, match="has 2 partitions of pi, not 4"):
        steps_to(PARENT._replace(record=SPLIT), to(pb.DOUBLING_CLEANING))
    flipped = PARENT._replace(record=SPLIT, layout=FOUR)
    assert steps_to(flipped, to(pb.DOUBLING_CLEANING)) == (Write(Command(Step.CLEAN, DOUBLING)),)
    with pytest.raises(InvalidArgument, match="not split by this doubling"):
        steps_to(flipped._replace(record=Record()), to(pb.DOUBLING_CLEANING))


def test_a_phase_that_was_reached_is_answered_and_one_that_does_not_fit_is_refused() -> None:
    assert steps_to(PARENT._replace(record=SPLIT), to(pb.DOUBLING_SPLIT)) == ()
    with pytest.raises(InvalidArgument, match="a parent has no phase OPEN"):
        steps_to(PARENT, to(pb.DOUBLING_OPEN))
    with pytest.raises(Unavailable, match="does not name doubling"):
        steps_to(PARENT._replace(layout=TWO), to(pb.DOUBLING_SPLIT))
    child = Standing(3, Record(Phase.LEARNING, DOUBLING, Position(1, 8)), BEGUN)
    with pytest.raises(NotYet, match="learned up to 8 of the cut, which is not made"):
        steps_to(child, to(pb.DOUBLING_OPEN))
    whole = child._replace(record=replace(child.record, split_at=8))
    assert steps_to(whole, to(pb.DOUBLING_OPEN)) == (Write(Command(Step.OPEN, DOUBLING)),)
    with pytest.raises(InvalidArgument, match="no part in"):
        steps_to(Standing(5, Record(), BEGUN), to(pb.DOUBLING_LEARNING))


def test_a_split_counts_from_its_append_on() -> None:
    cut = PARENT._replace(cut=Cut(9, DOUBLING))
    said = status_of(cut, 8, (0, 0))
    assert (said.doubling, said.phase, said.split_at, said.partitions) == (0xAA, pb.DOUBLING_SPLIT, 0, 4)
    with pytest.raises(Unavailable, match="is being split"):
        steps_back(cut, BACK)
    with pytest.raises(Unavailable, match="is being split"):
        steps_to(cut, to(pb.DOUBLING_SPLIT))
    assert work_of(cut, has_view=False, unsettled=True) is Work.SETTLE


def test_what_was_taken_back_is_not_split_by_what_was_asked_for_before() -> None:
    assert steps_back(PARENT, BACK) == (Write(Command(Step.TAKE_BACK, DOUBLING)),)
    fenced = PARENT._replace(record=Record(fence=20))
    assert status_of(fenced, 20, (0, 0)).fence == 20
    with pytest.raises(Unavailable, match="was taken back since"):
        steps_to(fenced, to(pb.DOUBLING_SPLIT))
    assert len(steps_to(fenced, to(pb.DOUBLING_SPLIT, fence=20))) == 2
    for over in (SPLIT, replace(SPLIT, phase=Phase.CLEANING), replace(SPLIT, phase=Phase.NONE)):
        with pytest.raises(InvalidArgument, match="was split by doubling"):
            steps_back(PARENT._replace(record=over), BACK)
    other = replace(SPLIT, doubling=Doubling(0xBB, 4, 3))
    assert len(steps_back(PARENT._replace(record=other), BACK)) == 1, "another one split it"


def test_a_split_that_the_layout_does_not_name_is_said() -> None:
    assert "which the layout does not name" in problem_of(Standing(1, SPLIT, TWO))
    assert not any(problem_of(Standing(1, SPLIT, layout)) for layout in (BEGUN, FOUR))
    assert not problem_of(PARENT._replace(layout=TWO))


class Log:
    """Entries 1 to 9, of which 9 is a SPLIT; the first is trimmed."""

    first, last = Position(1, 1), Position(1, 9)

    def read(self, after: int, max_entries: int, max_bytes: int) -> list[Entry]:
        kinds = {9: (DOUBLING_KIND, Command(Step.SPLIT, DOUBLING, fence_body(0)).encode())}
        entries = [Entry(1, counter, *self._of(kinds, counter)) for counter in range(after + 1, 10)]
        return entries[:max_entries]

    @staticmethod
    def _of(kinds: dict[int, tuple[int, bytes]], counter: int) -> tuple[int, int, bytes]:
        kind, payload = kinds.get(counter, (ENTRY_KIND, b""))
        return kind, 0, payload

    def epoch_at(self, counter: int) -> int:
        return 1


def test_a_child_is_told_what_is_committed_and_nothing_more() -> None:
    lesson = Lesson(DOUBLING, Log(), Position(1, 3))
    assert lesson.goes_on(8)
    assert [entry.counter for entry in followed(lesson.next(8, 8).entries)] == [4, 5, 6, 7, 8]
    assert lesson.next(8, 8).entries == b"", "SPLIT is in the log, and not committed"
    assert [entry.counter for entry in followed(lesson.next(9, 9).entries)] == [9]


def test_a_child_of_another_history_begins_again() -> None:
    for learned, applied in ((START, 8), (Position(2, 3), 8), (Position(1, 3), 2)):
        assert not Lesson(DOUBLING, Log(), learned).goes_on(applied)
    with pytest.raises(Unavailable, match="no longer has"):
        Lesson(DOUBLING, Log(), Position(1, 0)).next(8, 8)


def test_a_child_is_told_nothing_once_its_doubling_was_taken_back() -> None:
    check_pupil(1, Record(), BEGUN, DOUBLING)
    check_pupil(1, SPLIT, BEGUN, DOUBLING)
    with pytest.raises(Unavailable, match="does not name"):
        check_pupil(1, Record(), TWO, DOUBLING)
    with pytest.raises(Unavailable, match="in another doubling"):
        check_pupil(1, replace(SPLIT, doubling=Doubling(0xBB, 4, 3)), BEGUN, DOUBLING)
