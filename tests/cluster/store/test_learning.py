"""What leaders decide of the copying in a doubling: what a child is told, and what is left to do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.replication.model import START, Entry, EntryKind, Position
from cluster.store.doubling.copied import Record, followed
from cluster.store.doubling.learning import Lesson, Work, check_pupil, work_of
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step, fence_body
from cluster.store.doubling.steps import Standing, Write, steps_to
from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.discovery.view import RoleLayout
from pixiu.errors import NotYet, Unavailable

DOUBLING = Doubling(0xAA, 4, 3)
BEGUN, TWO = RoleLayout(2, 4, 1, (f"{0xAA:016x}",)), RoleLayout(2, 2, 1)
SPLIT = Record(Phase.SPLIT, DOUBLING, split_at=9)


def test_a_child_opens_when_it_has_what_its_parent_had_at_the_cut() -> None:
    request = pb.DoublingAdvanceRequest(doubling=0xAA, partitions=4, phase=pb.DOUBLING_OPEN, operator="test")
    child = Standing("pi", 3, Record(Phase.LEARNING, DOUBLING, learned=Position(1, 8)), BEGUN)
    with pytest.raises(NotYet, match="learned up to 8 of the cut, which is not made"):
        steps_to(child, request)
    whole = child._replace(record=replace(child.record, split_at=8))
    assert steps_to(whole, request) == (Write(Command(Step.OPEN, DOUBLING)),)


def test_a_split_without_effect_is_settled() -> None:
    assert work_of(Record(), BEGUN, has_view=False, unsettled=True) is Work.SETTLE


def all_of_it(_kind: int, payload: bytes, _doubling: Doubling) -> bytes:
    return payload


class Log:
    """Entries 1 to 9, of which 9 is a SPLIT; the first is trimmed."""

    first, last = Position(1, 1), Position(1, 9)

    def read(self, after: int, max_entries: int, max_bytes: int) -> list[Entry]:
        kinds = {9: (DOUBLING_KIND, Command(Step.SPLIT, DOUBLING, fence_body(0)).encode())}
        entries = [Entry(1, counter, *self._of(kinds, counter)) for counter in range(after + 1, 10)]
        return entries[:max_entries]

    @staticmethod
    def _of(kinds: dict[int, tuple[int, bytes]], counter: int) -> tuple[int, int, bytes]:
        kind, payload = kinds.get(counter, (EntryKind.DATA, b""))
        return kind, 0, payload

    def epoch_at(self, counter: int) -> int:
        return 1


def test_a_child_is_told_what_is_committed_and_nothing_more() -> None:
    lesson = Lesson(DOUBLING, Log(), Position(1, 3), all_of_it)
    assert lesson.goes_on(8)
    assert [entry.counter for entry in followed(lesson.next(8, 8).entries)] == [4, 5, 6, 7, 8]
    assert lesson.next(8, 8).entries == b"", "SPLIT is in the log, and not committed"
    assert [entry.counter for entry in followed(lesson.next(9, 9).entries)] == [9]


def test_a_child_of_another_history_begins_again() -> None:
    for learned, applied in ((START, 8), (Position(2, 3), 8), (Position(1, 3), 2)):
        assert not Lesson(DOUBLING, Log(), learned, all_of_it).goes_on(applied)
    with pytest.raises(Unavailable, match="no longer has"):
        Lesson(DOUBLING, Log(), Position(1, 0), all_of_it).next(8, 8)


def test_a_child_is_told_nothing_once_its_doubling_was_taken_back() -> None:
    check_pupil("pi", 1, Record(), BEGUN, DOUBLING)
    check_pupil("pi", 1, SPLIT, BEGUN, DOUBLING)
    with pytest.raises(Unavailable, match="does not name"):
        check_pupil("pi", 1, Record(), TWO, DOUBLING)
    with pytest.raises(Unavailable, match="in another doubling"):
        check_pupil("pi", 1, replace(SPLIT, doubling=Doubling(0xBB, 4, 3)), BEGUN, DOUBLING)
