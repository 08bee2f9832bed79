"""Random and damaged expressions: each is refused with a sentence, or looks at any message without another error."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pixiu.errors import InvalidArgument
from pixiu.wire.block import Message, encode, parse
from pixiu.wire.expressions import Expression
from pixiu.wire.filters import same
from tests.support.effort import runs

EXAMPLES = runs("PIXIU_FUZZ_EXAMPLES", local=150, ci=1000)
pytestmark = pytest.mark.fuzz

WORDS = (
    "headers", "key", "tag", "size", "slot", "event_time", "load_test", "has", "int", "double", "timestamp", "true", "false", "in",
    "||", "&&", "==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "%", "!", "?", ":", ".", ",", "(", ")", "[", "]", '["a"]',
    ".a", ".startsWith(", ".matches(", ".contains(", '"a"', "'12'", '"[0-9]+"', 'r"\\d"', "0", "1", "-1", "1.5", "1e308",
    "9223372036854775807",
    '"2026-01-01T00:00:00Z"', "//", "\\", '"', "\n",
)  # fmt: skip
PIECES = (
    'headers["a"] == "x"', "size > 1", "has(key)", "int(headers.a) / size == 1", 'key.matches("a+")', "size * size * size > 1",
    "double(key) * 1e308 > 1.0", "int(double(key) * 1e300) == 0", "-size - 9223372036854775807 < 0", "event_time == event_time",
)  # fmt: skip
MESSAGES = [
    Message(b"", 0),
    Message(b"abc", 1, b"12", [("a", b"-9223372036854775808"), ("b", b"")], 5, None, 3, "x"),
    Message(b"abc", 1, b"\xff", [("a", b"\xff")], 5),
    Message(b"x" * 3000, 1, b"1" * 60, [("a", b"a" * 5000)], (1 << 64) - 1),
]
WHOLE = parse(encode(MESSAGES, topic=1, part=1, writer=1, first=1))


def look(text: str) -> None:
    try:
        found = Expression(text)
    except InvalidArgument:
        return
    matches = found.matching(WHOLE, 0, WHOLE.count)
    found.needles = ()
    assert found.matching(WHOLE, 0, WHOLE.count) == matches
    assert same(text, f" {text} // again")


@given(st.lists(st.sampled_from(WORDS), max_size=30), st.sampled_from(("", " ")))
@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_words_in_any_order(words: list[str], between: str) -> None:
    look(between.join(words))


@given(st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from(("&&", "||", "==", "!=", "? true :"))), max_size=40), st.data())
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
def test_damaged_ones(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    text = " ".join(f"({piece}) {sign}" for piece, sign in pieces) + " true"
    look(text)
    at = data.draw(st.integers(0, len(text)))
    look(text[:at] + data.draw(st.text(max_size=3)) + text[at + data.draw(st.integers(0, 3)) :])


@given(st.text(max_size=60))
@settings(max_examples=EXAMPLES, deadline=None)
def test_noise(text: str) -> None:
    look(text)
