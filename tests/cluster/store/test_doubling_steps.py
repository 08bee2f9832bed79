"""The doubling of a stored role: what fits after what, in which order a partition is cut, what takes it back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.replication.model import Entry
from cluster.store.doubling.phases import (
    DOUBLING_KIND,
    Command,
    Cut,
    Doubling,
    Phase,
    Record,
    Step,
    counted,
    cut_in,
    fence_body,
    reached,
    taken,
    unpacked,
    why_not,
)
from cluster.store.doubling.steps import EndTurn, Standing, Write, is_home, problem_of, status_of, steps_back, steps_to
from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, MalformedData, Unavailable

DOUBLING = Doubling(0xAA, 4, 3)
OTHER = Doubling(0xBB, 4, 3)
NEXT = Doubling(0xBB, 8, 5)
ID = f"{0xAA:016x}"
BEGUN, FOUR, TWO = RoleLayout(2, 4, 1, (ID,)), RoleLayout(4, 4, 1, (ID,)), RoleLayout(2, 2, 1)
PARENT = Standing("pi", 1, Record(), BEGUN)
SPLIT = Record(Phase.SPLIT, DOUBLING, split_at=9)
LEARNING, OPEN = Record(Phase.LEARNING, DOUBLING), Record(Phase.OPEN, DOUBLING)
OVER = Record(Phase.NONE, DOUBLING)
NOTHING = pb.DoublingStatus()
BACK = pb.DoublingTakeBackRequest(doubling=DOUBLING.number, partitions=4, operator="test")


def to(phase: pb.DoublingPhase.ValueType, fence: int = 0) -> pb.DoublingAdvanceRequest:
    return pb.DoublingAdvanceRequest(doubling=DOUBLING.number, partitions=4, phase=phase, operator="test", fence=fence)


def command(step: Step, doubling: Doubling = DOUBLING, fence: int = 0) -> Command:
    return Command(step, doubling, fence_body(fence) if step is Step.SPLIT else b"")


def test_each_phase_follows_from_the_one_before_and_is_kept() -> None:
    parent = Record()
    for step, phase in ((Step.SPLIT, Phase.SPLIT), (Step.CLEAN, Phase.CLEANING), (Step.CLEAN, Phase.CLEANING)):
        made = taken(parent, command(step), 9)
        assert made == Record(phase, DOUBLING, 9)
        parent = made
        assert reached(parent, DOUBLING, phase)
    child = Record()
    for step, phase in ((Step.BEGIN, Phase.LEARNING), (Step.OPEN, Phase.OPEN), (Step.END, Phase.NONE)):
        made = taken(child, command(step), 9)
        assert made == Record(phase, DOUBLING)
        child = made
    assert reached(child, DOUBLING, Phase.LEARNING)
    assert reached(child, DOUBLING, Phase.OPEN)
    for record in (parent, child):
        assert unpacked(record._packed()) == (record.phase, record.doubling, record.split_at, record.fence)


def test_who_came_from_a_doubling_is_split_by_the_next() -> None:
    for before in (OVER, OPEN):
        assert taken(before, command(Step.SPLIT, NEXT), 7) == Record(Phase.SPLIT, NEXT, 7)
    assert taken(LEARNING, command(Step.BEGIN, OTHER), 7) == Record(Phase.LEARNING, OTHER)


@pytest.mark.parametrize(
    ("before", "step", "doubling"),
    [
        (Record(), Step.OPEN, DOUBLING),
        (Record(), Step.CLEAN, DOUBLING),
        (Record(), Step.END, DOUBLING),
        (LEARNING, Step.OPEN, OTHER),
        (LEARNING, Step.CLEAN, DOUBLING),
        (LEARNING, Step.SPLIT, NEXT),
        (LEARNING, Step.BEGIN, DOUBLING),
        (OPEN, Step.BEGIN, OTHER),
        (OPEN, Step.CLEAN, DOUBLING),
        (OVER, Step.BEGIN, NEXT),
        (OVER, Step.SPLIT, OTHER),
        (OVER, Step.SPLIT, Doubling(0xBB, 16, 9)),
        (SPLIT, Step.SPLIT, NEXT),
        (SPLIT, Step.BEGIN, OTHER),
        *((record, Step.TAKE_BACK, DOUBLING) for record in (SPLIT, replace(SPLIT, phase=Phase.CLEANING), OVER)),
    ],
)
def test_what_does_not_fit_has_no_effect(before: Record, step: Step, doubling: Doubling) -> None:
    assert why_not(before, command(step, doubling))
    assert taken(before, command(step, doubling), 99) is None


def test_what_was_taken_back_is_not_split_by_what_was_asked_for_before() -> None:
    assert steps_back(PARENT, BACK) == (Write(command(Step.TAKE_BACK)),)
    whole = taken(Record(), command(Step.TAKE_BACK), 20)
    assert whole == Record(fence=20)
    assert "taken back" in why_not(whole, command(Step.SPLIT))
    assert taken(whole, command(Step.SPLIT, fence=20), 22) == Record(Phase.SPLIT, DOUBLING, 22, 20)
    fenced = PARENT._replace(record=whole)
    assert status_of(fenced, 20, NOTHING).fence == 20
    with pytest.raises(Unavailable, match="was taken back since"):
        steps_to(fenced, to(pb.DOUBLING_SPLIT))
    assert len(steps_to(fenced, to(pb.DOUBLING_SPLIT, fence=20))) == 2
    for over in (SPLIT, replace(SPLIT, phase=Phase.CLEANING), OVER):
        with pytest.raises(InvalidArgument, match="was split by it already"):
            steps_back(PARENT._replace(record=over), BACK)
    assert taken(replace(SPLIT, doubling=OTHER), command(Step.TAKE_BACK), 23) is not None, "another one split it"


def test_what_came_in_the_same_turn_stands_before_the_split() -> None:
    assert steps_to(PARENT, to(pb.DOUBLING_SPLIT)) == (EndTurn(), Write(command(Step.SPLIT)))


def test_nothing_is_deleted_before_the_layout_has_flipped() -> None:
    with pytest.raises(Unavailable, match="has 2 partitions of pi, not 4"):
        steps_to(PARENT._replace(record=SPLIT), to(pb.DOUBLING_CLEANING))
    flipped = PARENT._replace(record=SPLIT, layout=FOUR)
    assert steps_to(flipped, to(pb.DOUBLING_CLEANING)) == (Write(command(Step.CLEAN)),)
    with pytest.raises(InvalidArgument, match="in phase NONE"):
        steps_to(flipped._replace(record=Record()), to(pb.DOUBLING_CLEANING))


def test_a_phase_that_was_reached_is_answered_and_one_that_does_not_fit_is_refused() -> None:
    assert steps_to(PARENT._replace(record=SPLIT), to(pb.DOUBLING_SPLIT)) == ()
    with pytest.raises(InvalidArgument, match="a parent has no phase OPEN"):
        steps_to(PARENT, to(pb.DOUBLING_OPEN))
    with pytest.raises(Unavailable, match="does not name doubling"):
        steps_to(PARENT._replace(layout=TWO), to(pb.DOUBLING_SPLIT))
    with pytest.raises(InvalidArgument, match="no part in"):
        steps_to(Standing("pi", 5, Record(), BEGUN), to(pb.DOUBLING_LEARNING))


def test_a_child_opens_whatever_the_layout_is_by_then() -> None:
    child = Standing("xiu", 3, LEARNING, TWO)
    assert steps_to(child, to(pb.DOUBLING_OPEN), b"cut") == (Write(Command(Step.OPEN, DOUBLING, b"cut")),)
    assert [is_home(record, FOUR) for record in (OPEN, LEARNING, OVER)] == [True, False, False]
    assert not is_home(OPEN, BEGUN)


def test_a_split_counts_from_its_append_on() -> None:
    cut = PARENT._replace(cut=Cut(9, DOUBLING))
    said = status_of(cut, 8, NOTHING)
    assert (said.doubling, said.phase, said.split_at, said.partitions) == (0xAA, pb.DOUBLING_SPLIT, 0, 4)
    assert status_of(PARENT._replace(record=SPLIT), 9, pb.DoublingStatus(keys=7)).keys == 7
    with pytest.raises(Unavailable, match="is being split"):
        steps_back(cut, BACK)
    with pytest.raises(Unavailable, match="is being split"):
        steps_to(cut, to(pb.DOUBLING_SPLIT))


def test_a_split_that_the_layout_does_not_name_is_said() -> None:
    assert "which the layout does not name" in problem_of("pi", SPLIT, TWO)
    assert not any(problem_of("pi", SPLIT, layout) for layout in (BEGUN, FOUR))
    assert not problem_of("pi", Record(), TWO)


def test_by_how_many_partitions_a_partition_counts() -> None:
    assert [counted(Record(), layout) for layout in (0, 2)] == [0, 2]
    assert counted(Record(), 2) <= 3, "nothing was learned yet: nobody's"
    for layout in (0, 2, 4):
        assert counted(LEARNING, layout) == 2
        assert [counted(record, layout) for record in (OPEN, SPLIT, OVER)] == [4, 4, 4]
    assert counted(Record(), 2, appended=4) == 4, "from the moment at which SPLIT is in the log"


def test_a_new_leader_finds_a_cut_in_its_log() -> None:
    split = Entry(1, 5, DOUBLING_KIND, 0, command(Step.SPLIT).encode())
    hold = Entry(1, 6, DOUBLING_KIND, 0, Command(Step.HOLD, DOUBLING, b"1234").encode())
    assert cut_in([]) is cut_in([hold]) is None
    assert cut_in([split, hold]) == Cut(5, DOUBLING)


NO_COMMANDS = [b"", bytes(13), *(Command(Step.END, Doubling(1, *wrong)).encode() for wrong in ((3, 2), (4, 1), (4, 4)))]


@pytest.mark.parametrize("payload", NO_COMMANDS)
def test_what_is_no_command_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedData):
        Command.decode(payload)
