"""Whom a leader requires."""

from __future__ import annotations

from cluster.replication.core.insync import InSync
from cluster.replication.model import MemberID, PartitionState

A, B, C, D = (MemberID(number) for number in range(1, 5))


def test_the_maximal_set_is_a_frozenset_of_all_three_sets() -> None:
    # With the keys of `joining` as they are the union is a set, which compiled code refuses where a frozenset is said.
    in_sync = InSync(A, 1, PartitionState(1, A, 1, frozenset({A, B})))
    assert in_sync.maximal == {A, B}
    in_sync.join(C, 10)
    in_sync.join(D, 20)
    in_sync.next_proposal((), {C: 10, D: 10})
    found = in_sync.maximal
    assert found == {A, B, C, D}
    assert type(found) is frozenset
    in_sync.join(MemberID(5), 30)
    assert found == {A, B, C, D}, "what was given out does not change"
