"""The phases of a partition that is doubled: what fits behind what, and whose mail is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest

from cluster.wire.v1 import doubling_pb2
from cluster.wire.v1.xiu_partitions_pb2 import AskReply, AskRequest
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.ids import snowflake
from xiu.doubling.answering import Answers, Known, Look, Wanted, check_question, status_of
from xiu.state.doubling import (
    ASK_US,
    NO_DOUBLING,
    Change,
    Doubling,
    Phase,
    after,
    counted,
    is_asked,
    parent_of,
    problem_of,
    reached,
    takes,
)
from xiu.state.state import Head

ID, OTHER = 0xA1, 0xB2
AT_US = 1_750_000_000_000_000


def taken(partition: int, *steps: Change) -> Doubling:
    now = NO_DOUBLING
    for at, step in enumerate(steps):
        assert problem_of(now, step, partition) == ""
        now = after(now, step, partition, 10 + at, AT_US + at)
        assert reached(now, step)
    return now


LEARNING, SPLIT, CLEANING = (Change(phase, ID, 4) for phase in (Phase.LEARNING, Phase.SPLIT, Phase.CLEANING))
OPEN = Change(Phase.OPEN, ID, 4, split_at=77, split_us=AT_US)


def test_a_parent_is_split_and_counts_by_the_new_number_for_ever() -> None:
    assert counted(NO_DOUBLING, 2) == 2
    split = taken(1, SPLIT)
    assert split == Doubling(ID, 4, Phase.SPLIT, 10, AT_US)
    assert [takes(split, 1, key) for key in (1, 3, 5)] == [True, False, True]
    over = taken(1, SPLIT, CLEANING)
    assert (over.phase, over.split_at, counted(over, 2)) == (Phase.NONE, 10, 4)
    assert taken(1, SPLIT, CLEANING, Change(Phase.SPLIT, OTHER, 8)).partitions == 8


def test_a_child_takes_nothing_before_it_is_open_whatever_the_layout_says() -> None:
    learning = taken(3, LEARNING)
    assert [counted(learning, layout) for layout in (2, 4)] == [2, 2]
    assert not takes(learning, 3, 7)
    opened = taken(3, LEARNING, OPEN)
    assert (opened.cut_us, opened.split_at, counted(opened, 2), takes(opened, 3, 7)) == (AT_US, 77, 4, True)
    assert taken(3, LEARNING, OPEN, CLEANING, Change(Phase.SPLIT, OTHER, 8)).cut_us == AT_US
    assert taken(3, LEARNING, OPEN, Change(Phase.SPLIT, OTHER, 8)).cut_us == AT_US


def test_a_child_learns_anew_when_a_doubling_was_taken_back() -> None:
    assert taken(3, LEARNING, Change(Phase.LEARNING, OTHER, 4)).id == OTHER


def test_what_was_taken_back_is_not_split_by_what_was_asked_for_before() -> None:
    back = Change(Phase.NONE, ID, 4)
    whole = after(NO_DOUBLING, back, 1, 20, AT_US)
    assert whole == Doubling(fence=20)
    assert Doubling.decode(whole.encode()) == whole
    assert "taken back" in problem_of(whole, SPLIT, 1)
    assert after(whole, SPLIT, 1, 21, AT_US) == whole
    again = after(whole, replace(SPLIT, fence=20), 1, 22, AT_US)
    assert (again.phase, again.fence) == (Phase.SPLIT, 20)
    other = after(again, Change(Phase.NONE, OTHER, 4), 1, 23, AT_US)
    assert other == replace(again, fence=23), "of another doubling, which is taken back"


def test_a_split_counts_from_its_append_on() -> None:
    split = Doubling(ID, 4, Phase.SPLIT, 30, AT_US)
    said = status_of(1, NO_DOUBLING, split, committed=29, learned=0, layout=2)
    assert (said.doubling, said.phase, said.split_at) == (ID, doubling_pb2.DOUBLING_SPLIT, 0)
    assert status_of(1, split, split, 30, 0, 2).split_at == 30


class Knows(NamedTuple):
    """Who has stored some SnowflakeIDs."""

    ids: dict[int, tuple[int, int]]

    def known(self, wanted: Wanted) -> Known:
        return [self.ids.get(one) for one, _ in wanted]

    @property
    def copies(self) -> int:
        return 2


def test_a_parent_answers_what_it_is_sure_of() -> None:
    request, two = AskRequest(child=3, snowflakes=[1 << 62, 5], derived=[0]), RoleLayout(2, 4, 1, (f"{ID:016x}",))
    ids, split = Knows({5: (77, 1)}), Head(doubling=taken(1, SPLIT))
    with pytest.raises(Unavailable):
        Answers().look(request, split, ids, two, lease=False)
    said = Answers().look(request, split, ids, two, lease=True).reply([])
    assert (said.doubling, list(said.msg_ids), said.copies) == (ID, [0, 77], 2)
    asked = [((None, (77, 1)), None, 2), ((None, (77, 1)), (76, 1), 1), ((None, None), (76, 1), 1), ((None, None), None, 0)]
    for here, above, copies in asked:
        assert Look(ID, 0, 0, list(here), [0], (), 2).reply([above], 1).copies == copies, "only of those that have something"
    assert Answers().look(request, Head(), ids, two, lease=True).reply([]) == AskReply(), "it is not split"
    with pytest.raises(InvalidArgument):
        check_question(0, request)


def test_a_parent_that_lost_its_disks_knows_what_it_does_not_have() -> None:
    request, four = AskRequest(child=3, snowflakes=[1 << 62], derived=[0]), RoleLayout(4, 4, 1, (f"{OTHER:016x}", f"{ID:016x}"))
    said = Answers().look(request, Head(), Knows({}), four, lease=True).reply([])
    assert (said.doubling, said.split_at, list(said.msg_ids)) == (ID, 0, [0])
    assert Answers().look(request, Head(below=9), Knows({}), four, lease=True).doubling == 0, "it is being restored"


@pytest.mark.parametrize(
    ("partition", "before", "step"),
    [
        (1, [], LEARNING),
        (1, [], OPEN),
        (3, [], SPLIT),
        (3, [], OPEN),
        (3, [LEARNING], Change(Phase.OPEN, OTHER, 4)),
        (1, [SPLIT], Change(Phase.SPLIT, OTHER, 8)),
        (1, [SPLIT, CLEANING], Change(Phase.SPLIT, OTHER, 4)),
        (1, [SPLIT, CLEANING], Change(Phase.SPLIT, OTHER, 16)),
        (3, [LEARNING, OPEN], Change(Phase.LEARNING, OTHER, 4)),
        (3, [LEARNING], CLEANING),
        (1, [], CLEANING),
        (1, [], Change(Phase.SPLIT, ID, 3)),
        (1, [], Change(Phase.SPLIT, 0, 4)),
        (4, [], Change(Phase.SPLIT, ID, 4)),
        (3, [], Change(Phase.NONE, ID, 4)),
        (1, [SPLIT], Change(Phase.NONE, ID, 4)),
        (1, [SPLIT, CLEANING], Change(Phase.NONE, ID, 4)),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(partition: int, before: list[Change], step: Change) -> None:
    now = taken(partition, *before)
    assert problem_of(now, step, partition)
    assert after(now, step, partition, 99, AT_US) == now


def test_a_step_that_was_taken_is_taken_no_second_time() -> None:
    for partition, steps in ((1, [SPLIT, CLEANING]), (3, [LEARNING, OPEN, CLEANING])):
        end = taken(partition, *steps)
        for step in steps:
            assert reached(end, step)
            assert after(end, step, partition, 99, AT_US + 99) == end


def test_the_parent_is_asked_for_what_it_may_have() -> None:
    child = taken(3, LEARNING, OPEN)
    ms = AT_US // 1000
    asked = [is_asked(child, AT_US, snowflake(ms + ahead, 1, 1), False) for ahead in (-1000, 119_000, 121_000)]
    assert asked == [True, True, False]
    assert is_asked(child, AT_US, 1 << 62, True)
    assert not is_asked(child, AT_US + ASK_US, 1 << 62, True)
    assert not is_asked(NO_DOUBLING, AT_US, snowflake(ms, 1, 1), False)


def test_a_partition_came_from_the_one_half_the_number_below() -> None:
    assert [parent_of(partition) for partition in range(1, 9)] == [0, 0, 1, 0, 1, 2, 3, 0]


def test_what_is_written_is_read_again() -> None:
    for now in (NO_DOUBLING, taken(1, SPLIT), taken(3, LEARNING, OPEN, CLEANING)):
        assert Doubling.decode(now.encode()) == now
    for change in (OPEN, Change(Phase.OPEN, ID, 4, 77, AT_US, b"readers")):
        assert Change.decode(change.encode()) == change
