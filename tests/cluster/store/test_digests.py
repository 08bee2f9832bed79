"""Comparison of two states by their digests."""

from __future__ import annotations

from cluster.store.repair.digests import Digests


def test_ranges_that_one_state_lacks_or_has_otherwise_differ() -> None:
    one = Digests(9, {0: 1, 65536: 2})
    assert one.differing(Digests(9, {0: 1, 65536: 2})) == []
    assert one.differing(Digests(9, {0: 1, 65536: 3})) == [65536]
    assert one.differing(Digests(9, {0: 1})) == Digests(9, {0: 1}).differing(one) == [65536]


def test_ranges_that_one_state_has_begun_to_remove_are_not_compared() -> None:
    one = Digests(9, {0: 1, 65536: 2, 131072: 4})
    assert one.differing(Digests(9, {65536: 9, 131072: 4}, floor=70_000)) == []
    assert one.differing(Digests(9, {131072: 5}, floor=70_000)) == [131072]
    assert one._replace(floor=70_000).differing(Digests(9, {65536: 9, 131072: 4}, floor=70_000)) == [0, 65536]
