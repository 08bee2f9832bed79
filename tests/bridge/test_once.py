"""Positions of messages that a target has, as a text that Kafka keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.connectors.once import MAX_STATE_BYTES, Once, decode, encode
from pixiu.errors import MalformedData

positions = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 40)) | st.tuples(st.integers(0, 1 << 31), st.integers(0, 1 << 47)))


@given(positions)
def test_a_state_is_read_as_it_was_written(found: set[tuple[int, int]]) -> None:
    assert decode(encode(found)) == found


@given(st.text(alphabet="0123456789abcdef:;,-x", max_size=30))
def test_any_other_text_is_refused_or_is_bounded(text: str) -> None:
    try:
        assert len(decode(text)) < 10_000_000
    except MalformedData:
        pass


def test_ranges_are_short_and_what_does_not_fit_waits() -> None:
    assert encode([(1, offset) for offset in range(1000, 2000)]) == "1:3e8-3e7"
    once = Once()
    scattered = [(1, offset) for offset in range(0, 40_000, 7)]
    now = once.fitting(scattered)
    assert 0 < len(now) < len(scattered)
    assert len(once.with_(now)) <= MAX_STATE_BYTES
    once.wrote(now)
    assert once.has(now[-1])
    again = Once(once.with_(()))
    again.settled(now[1:])
    assert again.written == {now[0]}


@pytest.mark.parametrize("text", ["1", "1:", "x:1", "1:1-fffffffff"])
def test_damage_is_noticed(text: str) -> None:
    with pytest.raises(MalformedData):
        decode(text)
