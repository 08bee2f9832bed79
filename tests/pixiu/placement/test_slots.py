"""Slots and the lineage of parts: each slot has one open part and one past, through any splits, merges and moves."""

from __future__ import annotations

from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.errors import InvalidArgument
from pixiu.placement.slots import MAX_PARTS, SLOTS, Lineage, Part, Range, slot_of
from tests.support.effort import runs

EXAMPLES = runs("PIXIU_LINEAGE_EXAMPLES", local=60, ci=400)


def whole(group: int = 0) -> Lineage:
    return Lineage.new([Range(0, SLOTS, group)])


def test_the_slot_of_a_key_is_fixed() -> None:
    assert (slot_of(b""), slot_of(b"order-1"), slot_of(b"\0" * 300)) == (0x94C2, 10358, 24465)  # XXH3_64("") = 2d06800538d394c2
    assert slot_of(b"a") == xxhash.xxh3_64_intdigest(b"a") % 65536


def test_a_split_a_merge_and_a_move() -> None:
    split = whole().resized([1], [Range(0, 100, 0), Range(100, SLOTS, 1)])
    assert [part.number for part in split.open_parts()] == [2, 3]
    assert (split.open_part(99).number, split.open_part(100).number, split.open_part(SLOTS - 1).number) == (2, 3, 3)
    moved = split.resized([3], [Range(100, SLOTS, 2)])
    merged = moved.resized([2, 4], [Range(0, SLOTS, 0)])
    assert merged.open_part(0) == Part(5, 0, SLOTS, 0, (2, 4))
    assert [child.number for child in merged.children(1)] == [2, 3]
    assert [merged.parent(5, slot).number for slot in (99, 100)] == [2, 4]  # type: ignore[union-attr]
    assert merged.parent(1, 5) is None


def test_what_was_dropped_no_longer_holds_anybody_back() -> None:
    split = whole().resized([1], [Range(0, 100, 0), Range(100, SLOTS, 0)])
    merged = split.resized([2, 3], [Range(0, SLOTS, 0)])
    with pytest.raises(InvalidArgument, match="drop that one first"):
        merged.without(2)
    with pytest.raises(InvalidArgument, match="is open"):
        whole().without(1)
    dropped = merged.without(1).without(2)
    assert dropped.parent(4, 50) is None
    assert dropped.parent(4, 100) == merged.parts[3]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([Part(1, 0, 10, 0)], "open parts"),
        ([Part(1, 0, SLOTS, 0), Part(2, 5, 9, 0)], "open parts"),
        ([Part(1, 5, 5, 0), Part(2, 0, SLOTS, 0)], "do not exist"),
        ([Part(0, 0, SLOTS, 0)], "do not exist"),
        ([Part(1, 0, SLOTS, 0, sealed=True)], "children of the sealed part 1"),
        ([Part(2, 0, SLOTS, 0, (3,))], "cannot follow"),
        ([Part(1, 0, SLOTS, 0), Part(2, 0, SLOTS, 0, (1,))], "cannot follow"),
        ([Part(1, 0, 10, 0, sealed=True), Part(2, 0, SLOTS, 0, (1,))], "parents of part 2"),
        ([Part(1, 0, SLOTS, 0, sealed=True), Part(2, 0, 9, 0, (1,)), Part(3, 9, SLOTS, 0)], "children of the sealed part 1"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts: list[Part], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Lineage(parts)


def test_changes_that_do_not_fit_are_refused() -> None:
    for sealed, ranges in (([1], [Range(0, 9, 0)]), ([1], []), ([], [Range(0, SLOTS, 0)]), ([7], [Range(0, SLOTS, 0)])):
        with pytest.raises(InvalidArgument):
            whole().resized(sealed, ranges)
    with pytest.raises(InvalidArgument, match=f"at most {MAX_PARTS} parts"):
        Lineage.new([Range(at, at + 1, 0) for at in range(MAX_PARTS)] + [Range(MAX_PARTS, SLOTS, 0)])


@st.composite
def histories(draw: st.DrawFn) -> list[Lineage]:
    """A topic that is split, merged and moved at random, and loses its oldest parts."""
    found = [whole()]
    for _ in range(draw(st.integers(1, 8))):
        now = found[-1]
        parts = now.open_parts()
        first = draw(st.integers(0, len(parts) - 1))
        last = draw(st.integers(first, min(first + 2, len(parts) - 1)))
        low, high = parts[first].low, parts[last].high
        cuts = sorted(draw(st.sets(st.integers(low + 1, high - 1), max_size=3))) if high - low > 1 else []
        bounds = [low, *cuts, high]
        ranges = [Range(a, b, draw(st.integers(0, 3))) for a, b in pairwise(bounds)]
        found.append(now.resized([part.number for part in parts[first : last + 1]], ranges))
        oldest = min(found[-1].parts)
        if draw(st.booleans()) and found[-1].parts[oldest].sealed:
            found.append(found[-1].without(oldest))
    return found


@given(histories(), st.integers(0, SLOTS - 1))
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_slot_has_one_line_of_parts(found: list[Lineage], slot: int) -> None:
    now = found[-1]
    holders = {number for each in found for number, part in each.parts.items() if part.low <= slot < part.high}
    part, line = now.open_part(slot), list[int]()
    assert part.low <= slot < part.high
    while True:
        line.append(part.number)
        parent = now.parent(part.number, slot)
        if parent is None:
            break
        assert parent.number < part.number
        part = parent
    assert set(line) == {number for number in holders if number in now.parts}


@given(histories())
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_number_is_never_given_again(found: list[Lineage]) -> None:
    meaning: dict[int, tuple[int, int, int]] = {}
    for each in found:
        for number, part in each.parts.items():
            assert meaning.setdefault(number, part[1:4]) == part[1:4]
        assert each.next_number == max(meaning) + 1
