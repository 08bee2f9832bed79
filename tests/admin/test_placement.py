"""Groups for new parts: the one with the fewest parts, and of those the one with the fewest bytes."""

from __future__ import annotations

import pytest

from admin.placement import MAX_GROUP_PARTS, Places
from pixiu.errors import InvalidArgument, LimitError, Unavailable


def test_new_parts_go_where_there_is_most_room() -> None:
    places = Places([0, 1, 2, 3], {0, 1, 2}, {0: 2, 1: 1, 2: 1}, {1: 500, 2: 100})
    assert places.choose(5) == [2, 1, 0, 2, 1]
    assert places.choose(2, avoid=[0]) == [2, 1]
    assert places.each() == [0, 1, 2]


def test_what_has_no_place_says_why() -> None:
    with pytest.raises(Unavailable, match="no groups"):
        Places([], set(), {}, {}).choose(1)
    with pytest.raises(Unavailable, match="is running"):
        Places([0], set(), {}, {}).choose(1)
    with pytest.raises(InvalidArgument, match="no other group"):
        Places([0], {0}, {}, {}).choose(1, avoid=[0])
    with pytest.raises(InvalidArgument, match="no group 7"):
        Places([0], {0}, {}, {}).take([7])
    with pytest.raises(LimitError, match="1,000 parts"):
        Places([0], {0}, {0: MAX_GROUP_PARTS}, {}).choose(1)
