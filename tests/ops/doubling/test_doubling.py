"""What the tool that doubles a role does next: from what is there alone, so that one that was killed leaves nothing to know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.wire.v1 import doubling_pb2 as pb
from ops.doubling.doubling import (
    Action,
    Advance,
    Begin,
    Commit,
    Finished,
    Phase,
    Seen,
    Wait,
    check_take_back,
    chosen,
    decide,
    phases,
    start_commands,
    unfinished,
    unnamed,
)
from pixiu.discovery.view import Layout, RoleLayout
from pixiu.errors import InvalidArgument, Unavailable
from tests.support.doublings import Stores

ID, OTHER = "00000000000000aa", "00000000000000bb"
TWO, BEGUN, FOUR = RoleLayout(2, 2, 1), RoleLayout(2, 4, 1, (ID,)), RoleLayout(4, 4, 1, (ID,))


def soft(layout: RoleLayout, running: int = 4, behind: tuple[str, ...] = ()) -> Seen:
    return Seen("router", layout, ID, dict.fromkeys(range(running), 1), {}, behind)


def stored(layout: RoleLayout, stores: Stores, running: int = 4) -> Seen:
    statuses = {p: stores.said(p) for p in range(max(layout.n, layout.next)) if p not in stores.silent}
    return Seen("pi", layout, ID, dict.fromkeys(range(running), 1), statuses)


def carried_out(layout: RoleLayout, stores: Stores, action: Action) -> RoleLayout:
    if isinstance(action, Begin):
        return replace(layout, next=2 * layout.n, doublings=(ID,))
    if isinstance(action, Commit):
        return replace(layout, n=layout.next)
    if isinstance(action, Advance):
        for partition in action.partitions:
            stores.go_to(partition, int(ID, 16), action.phase)
    return layout


def test_a_soft_role_flips_when_every_new_replica_runs_and_is_done_when_all_follow() -> None:
    assert decide(soft(TWO)) == (Phase.BEGIN, Begin())
    waits = decide(soft(BEGUN, running=3))
    assert waits == (Phase.START, Wait(("router partition 3: 0 of 1 replicas Running",)))
    assert decide(soft(replace(BEGUN, replicas=2))) == (
        Phase.START,
        Wait(tuple(f"router partition {p}: 1 of 2 replicas Running" for p in (2, 3))),
    )
    assert decide(soft(BEGUN)) == (Phase.COMMIT, Commit())
    assert decide(soft(FOUR, behind=("proxy 0",))) == (Phase.FOLLOW, Wait(("proxy 0",)))
    assert decide(soft(FOUR)) == (Phase.DONE, Finished())


@pytest.mark.parametrize("entries", [0, 50_000])
def test_a_role_with_logs_is_cut_in_the_order_that_loses_nothing(entries: int) -> None:
    stores, layout, seen = Stores(2, entries), TWO, []
    for _ in range(1000):
        phase, action = decide(stored(layout, stores))
        seen += [phase] if phase not in seen else []
        if isinstance(action, Finished):
            break
        layout = carried_out(layout, stores, action)
        stores.go_on()
    assert phase is Phase.DONE
    assert layout == FOUR
    assert seen == [phase for phase in phases("pi") if phase not in (Phase.START, Phase.FOLLOW)], "each once, in order"
    assert [phase for _, phase in stores.history] == [
        *[pb.DOUBLING_LEARNING] * 2,
        *[pb.DOUBLING_SPLIT] * 2,
        *[pb.DOUBLING_OPEN] * 2,
        *[pb.DOUBLING_CLEANING] * 2,
    ]
    assert all(one.phase == pb.DOUBLING_NONE and one.keys == 0 for number, one in stores.partitions.items() if number < 2)


def test_parents_are_split_together_and_only_when_their_children_are_close() -> None:
    stores = Stores(2, 50_000)
    decided = decide(stored(BEGUN, stores))
    assert decided == (Phase.LEARN, Advance((2, 3), pb.DOUBLING_LEARNING))
    carried_out(BEGUN, stores, decided[1])
    stores.child(0).learned = 49_950
    bare = Wait(("pi partition 3: takes over what partition 1 has",))
    assert decide(stored(BEGUN, stores)) == (Phase.LEARN, bare)
    stores.partitions[1].committed = 20
    assert decide(stored(BEGUN, stores)) == (Phase.LEARN, bare), "few entries may hold much: the snapshot comes first"
    stores.partitions[1].committed = 50_000
    stores.child(1).learned = 49_500
    assert decide(stored(BEGUN, stores)) == (Phase.LEARN, Wait(("pi partition 3: 500 entries behind",)))
    stores.child(1).learned = 49_950
    assert decide(stored(BEGUN, stores)) == (Phase.SPLIT, Advance((0, 1), pb.DOUBLING_SPLIT))


def test_a_child_of_xiu_has_nothing_to_learn_before_the_cut() -> None:
    stores = Stores(2, 50_000)
    for child in (2, 3):
        stores.go_to(child, int(ID, 16), pb.DOUBLING_LEARNING)
    assert decide(replace(stored(BEGUN, stores), role="xiu")) == (Phase.SPLIT, Advance((0, 1), pb.DOUBLING_SPLIT))


def test_once_one_parent_is_split_nothing_holds_the_others_up() -> None:
    stores = Stores(2, 100)
    for partition in (2, 3):
        stores.go_to(partition, int(ID, 16), pb.DOUBLING_LEARNING)
    stores.go_to(0, int(ID, 16), pb.DOUBLING_SPLIT)
    stores.partitions[1].committed = 90_000
    assert decide(stored(BEGUN, stores, running=3)) == (Phase.SPLIT, Advance((1,), pb.DOUBLING_SPLIT))


def test_what_another_doubling_left_in_the_logs_is_not_taken_for_this_one() -> None:
    stores = Stores(2, 100)
    for partition, phase in enumerate((pb.DOUBLING_NONE, pb.DOUBLING_OPEN, pb.DOUBLING_OPEN, pb.DOUBLING_LEARNING)):
        stores.partitions[partition].doubling, stores.partitions[partition].phase = int(OTHER, 16), phase
    assert decide(stored(BEGUN, stores)) == (Phase.LEARN, Advance((2, 3), pb.DOUBLING_LEARNING))


def test_without_a_leader_nothing_is_decided_for_the_others() -> None:
    stores = Stores(2, 100)
    stores.silent.add(1)
    assert decide(stored(BEGUN, stores)) == (Phase.LEARN, Wait(("pi partition 1: no leader answers",)))
    assert decide(stored(FOUR, stores)) == (Phase.CLEAN, Wait(("pi partition 1: no leader answers",)))


def test_nothing_is_deleted_where_parent_and_child_do_not_agree() -> None:
    stores = Stores(2, 100)
    for number, one in stores.partitions.items():
        one.doubling, one.digest = int(ID, 16), 5 + number
        one.phase = pb.DOUBLING_SPLIT if number < 2 else pb.DOUBLING_OPEN
    with pytest.raises(Unavailable, match="partitions 0 and 2 do not agree"):
        decide(stored(FOUR, stores))
    stores.partitions[2].digest, stores.partitions[3].digest = 5, 6
    assert decide(stored(FOUR, stores)) == (Phase.CLEAN, Advance((0, 1), pb.DOUBLING_CLEANING))


def test_nothing_is_deleted_that_nobody_has_compared() -> None:
    stores = Stores(2, 100)
    for number, one in stores.partitions.items():
        one.doubling, one.phase = int(ID, 16), pb.DOUBLING_SPLIT if number < 2 else pb.DOUBLING_OPEN
        one.digest = 5 + number % 2
    stores.partitions[0].digest = stores.partitions[3].digest = 0
    waits = (
        "pi partition 0: reads what moved, to compare it",
        "pi partition 3: reads what it had at the cut, to compare it",
    )
    assert decide(stored(FOUR, stores)) == (Phase.CLEAN, Wait(waits))
    stores.partitions[0].digest = 5
    stores.partitions[3].phase = pb.DOUBLING_NONE
    with pytest.raises(Unavailable, match=r"partition 3 no longer knows what .* --force"):
        decide(stored(FOUR, stores))
    forced = decide(replace(stored(FOUR, stores), force=True))[1]
    assert isinstance(forced, Advance)
    assert (forced.partitions, forced.forced[:14]) == ((0, 1), "pi partition 3")
    stores.partitions[2].digest = 9
    with pytest.raises(Unavailable, match="do not agree"):
        decide(replace(stored(FOUR, stores), force=True))


@pytest.mark.parametrize("role", ["pi", "xiu"])
def test_the_last_copy_is_not_deleted_where_the_child_lost_its_disks(role: str) -> None:
    stores = Stores(2, 100)
    for number in range(4):
        stores.partitions[number].doubling, stores.partitions[number].digest = int(ID, 16), 5
        stores.partitions[number].phase = pb.DOUBLING_SPLIT if number < 2 else pb.DOUBLING_OPEN
    seen = replace(stored(FOUR, stores), role=role)
    assert decide(seen) == (Phase.CLEAN, Advance((0, 1), pb.DOUBLING_CLEANING))
    for nothing in (pb.DoublingStatus(), pb.DoublingStatus(doubling=int(ID, 16), phase=pb.DOUBLING_LEARNING)):
        with pytest.raises(Unavailable, match="partition 2 knows nothing of this doubling"):
            decide(replace(seen, statuses={**seen.statuses, 2: nothing}))


def test_a_child_opens_when_the_split_is_committed_and_not_when_it_is_appended() -> None:
    stores = Stores(2, 100)
    for number, phase in enumerate((pb.DOUBLING_SPLIT, pb.DOUBLING_SPLIT, pb.DOUBLING_LEARNING, pb.DOUBLING_LEARNING)):
        stores.partitions[number].doubling, stores.partitions[number].phase = int(ID, 16), phase
        stores.partitions[number].learned = 100
    assert isinstance(decide(stored(BEGUN, stores))[1], Wait)


def test_a_split_that_the_layout_does_not_name_is_taken_up_again_under_its_id() -> None:
    stores, layout = Stores(2, 100), Layout(1, {"pi": TWO})
    assert unnamed({0: stores.said(0)}, TWO) == ""
    stores.go_to(1, int(OTHER, 16), pb.DOUBLING_SPLIT)
    said = {number: stores.said(number) for number in range(2)}
    assert unnamed(said, TWO) == OTHER
    assert unnamed(said, replace(BEGUN, doublings=(OTHER,))) == ""
    assert chosen(layout, "pi", 0, False, ID, OTHER) == OTHER
    with pytest.raises(InvalidArgument, match=f"takes {OTHER} up again"):
        chosen(Layout(1, {"pi": BEGUN}), "pi", 0, False, ID, OTHER)


def test_a_doubling_is_taken_back_until_the_first_cut() -> None:
    stores = Stores(2, 100)
    check_take_back(stored(BEGUN, stores))
    stores.go_to(3, int(ID, 16), pb.DOUBLING_LEARNING)
    check_take_back(stored(BEGUN, stores))
    stores.go_to(1, int(ID, 16), pb.DOUBLING_SPLIT)
    with pytest.raises(InvalidArgument, match="was split already"):
        check_take_back(stored(BEGUN, stores))
    with pytest.raises(InvalidArgument, match="nothing to take back"):
        check_take_back(soft(FOUR))


def test_which_doubling_is_carried_out() -> None:
    layout = Layout(1, {"router": TWO, "pi": TWO, "proxy": RoleLayout()})
    for to in (0, 4):
        assert chosen(layout, "router", to, False, OTHER) == OTHER
        assert chosen(Layout(2, {"router": BEGUN}), "router", to, False, OTHER) == ID
    assert chosen(layout, "router", 2, False, OTHER) is None
    assert chosen(Layout(2, {"pi": FOUR}), "pi", 4, True, OTHER) == ID, "what moved is not deleted yet"
    assert chosen(Layout(2, {"pi": FOUR}), "pi", 0, False, OTHER) == OTHER
    for role, to, there, text in [
        ("proxy", 0, layout, "has no partitions"),
        ("broker", 0, layout, "the cluster has no broker"),
        ("router", 8, layout, "doubles to 4, not to 8"),
        ("router", 8, Layout(2, {"router": BEGUN}), "end it before one to 8"),
        ("router", 0, Layout(2, {"router": TWO, "pi": BEGUN}), "pi is being doubled"),
        ("router", 0, Layout(2, {"router": RoleLayout(2, 4)}), "write next 2 back"),
        ("router", 0, Layout(2, {"router": RoleLayout(128, 128)}), "the most there can be"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            chosen(there, role, to, False, OTHER)
    with pytest.raises(InvalidArgument, match="has not deleted what moved"):
        chosen(Layout(2, {"pi": FOUR}), "pi", 8, True, OTHER)


def test_a_doubling_is_unfinished_while_a_parent_deletes() -> None:
    stores = Stores(2, 100)
    said = {0: stores.said(0)}
    assert not unfinished(said, TWO)
    assert not unfinished(said, FOUR)
    stores.partitions[0].doubling, stores.partitions[0].phase = int(ID, 16), pb.DOUBLING_CLEANING
    assert unfinished({0: stores.said(0)}, FOUR)


def test_the_commands_that_start_replicas_name_registry_and_partition() -> None:
    assert start_commands("pi", [(2, 1), (3, 2)], "zk://h:1/r") == [
        "python -m pi --config FILE --set registry=zk://h:1/r --set partition=2",
        "python -m pi --config FILE --set registry=zk://h:1/r --set partition=3      # 2 times, each with its own data_dir",
    ]
