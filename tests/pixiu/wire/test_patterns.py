"""Patterns: the same languages as `re` and `fnmatch`, and what would cost too much or is not known is refused."""

from __future__ import annotations

import fnmatch
import itertools
import random
import re

import pytest

from pixiu.errors import InvalidArgument
from pixiu.wire.patterns import MAX_PATTERN, MAX_STATES, glob, regex

TEXTS = ["".join(signs) for size in range(5) for signs in itertools.product("abc.1", repeat=size)]


def made_up(rng: random.Random, depth: int = 0) -> str:
    """A pattern that `re` knows too."""
    kind = 0.0 if depth > 3 else rng.random()
    if kind < 0.35:
        return rng.choice(["a", "b", "c", ".", "[ab]", "[^a]", "\\d", "\\W", "\\.", "[a-c1]"])
    if kind < 0.6:
        return made_up(rng, depth + 1) + made_up(rng, depth + 1)
    if kind < 0.75:
        return f"({made_up(rng, depth + 1)}|{made_up(rng, depth + 1)})"
    return f"(?:{made_up(rng, depth + 1)})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,}"])


def test_expressions_match_what_re_matches() -> None:
    rng = random.Random(5)
    for _ in range(150):
        text = made_up(rng)
        pattern, known = regex(text), re.compile(text, re.DOTALL | re.ASCII)
        for each in rng.sample(TEXTS, 80):
            assert pattern.matches(each) == bool(known.fullmatch(each)), (text, each)


@pytest.mark.parametrize("text", ["a*b", "*", "?b*", "[ab]*c", "[!a]*", "a.b", "", "a[b-c]?"])
def test_globs_match_what_fnmatch_matches(text: str) -> None:
    pattern = glob(text)
    assert [each for each in TEXTS if pattern.matches(each)] == [each for each in TEXTS if fnmatch.fnmatchcase(each, text)]


def test_ends_may_be_written() -> None:
    assert regex("^ab$").matches("ab")
    assert regex("ab\\$").matches("ab$")
    assert not regex("ab").matches("xab")


def test_nested_repetitions_cost_a_step_a_character() -> None:
    pattern = regex("((a*)*|(a|aa)+)*b")
    assert not pattern.matches("a" * 5000)
    assert pattern.matches("a" * 5000 + "b")
    assert len(pattern._steps) < 20


@pytest.mark.parametrize(
    "text",
    ["(a", "a)", "*a", "a**", "(?=a)", "(?i)a", "\\1", "\\b", "[a", "a{3,1}", "a{x}", "a{600}", "((a{30}){30}){30}", "a^b", "[z-a]",
     "(" * 30 + ")" * 30, "a" * (MAX_PATTERN + 1), f"(a{{{MAX_STATES}}})b", "\\"],
)  # fmt: skip
def test_what_is_not_known_or_too_large_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="pattern"):
        regex(text)


def test_empty_groups_count_as_signs() -> None:
    with pytest.raises(InvalidArgument, match="signs with its repetitions"):
        regex("((){512}){512}")
