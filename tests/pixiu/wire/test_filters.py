"""Filters on headers: which messages match, also where the bytes of a header are in a body by chance, and what is refused."""

from __future__ import annotations

import fnmatch
import json
import random
import re

import pytest

from pixiu.errors import InvalidArgument
from pixiu.wire import block
from pixiu.wire.filters import MAX_CONDITIONS, MAX_VALUES, parse, same

TESTS: list[dict[str, object]] = [
    {"header": "region", "equal": "eu"},
    {"header": "region", "any_of": ["eu", "us", "ü"]},
    {"header": "region", "glob": "e*"},
    {"header": "region", "regex": "[a-f]u|us"},
    {"header": "region", "not": {"equal": "eu"}},
    {"header": "kind", "not": {"regex": "a+"}},
    {"header": "kind", "any_of": ["a", ""]},
]
VALUES = {"region": ["eu", "us", "ü", "asia", "e" * 1025], "kind": ["a", "aa", ""]}


def holds(test: dict[str, object], headers: list[tuple[str, bytes]]) -> bool:
    """The rule in plain words, with `re` and `fnmatch` for patterns."""
    name, inner = test["header"], {key: value for key, value in test.items() if key != "header"}
    values = [value.decode() for each, value in headers if each == name]
    ((kind, wanted),) = inner.items()
    if kind == "not":
        return bool(values) and not holds({"header": name, **wanted}, headers)  # type: ignore[dict-item]
    if kind == "equal":
        return wanted in values
    if kind == "any_of":
        return any(value in wanted for value in values)  # type: ignore[operator]
    assert isinstance(wanted, str)
    short = [value for value in values if len(value.encode()) <= 1024]
    return any(fnmatch.fnmatchcase(value, wanted) if kind == "glob" else re.fullmatch(wanted, value) for value in short)


def test_messages_match_as_the_conditions_say() -> None:
    rng = random.Random(3)
    for _ in range(120):
        tests = rng.sample(TESTS, rng.randint(1, 3))
        messages = []
        for number in range(rng.randint(1, 30)):
            names = [name for name in ("region", "region", "kind", "other") if rng.random() < 0.5]
            headers = [(name, rng.choice(VALUES.get(name, ["eu"])).encode()) for name in names]
            body = b"\x06\x02\x00regioneu" if rng.random() < 0.3 else b"x"
            fields = {"key": b"k"} if rng.random() < 0.3 else {"tag": "t", "expires_in_s": 9} if rng.random() < 0.3 else {}
            messages.append(block.Message(body, number, headers=headers, **fields))
        whole = block.parse(block.encode(messages, topic=1, part=1, writer=1, first=1))
        low = rng.randrange(len(messages))
        high = rng.randint(low + 1, len(messages))
        expected = [at for at in range(low, high) if all(holds(test, list(messages[at].headers)) for test in tests)]
        assert parse(json.dumps(tests)).matching(whole, low, high) == expected, tests


def test_a_message_without_the_header_never_matches() -> None:
    whole = block.parse(
        block.encode([block.Message(b"x", 1), block.Message(b"x", 1, headers=[("b", b"")])], topic=1, part=1, writer=1, first=1)
    )
    for test in ({"equal": "x"}, {"not": {"equal": "x"}}, {"glob": "*"}):
        assert parse(json.dumps([{"header": "a", **test}])).matching(whole, 0, 2) == []
    assert parse('[{"header": "b", "not": {"equal": "x"}}]').matching(whole, 0, 2) == [1]


@pytest.mark.parametrize(
    "found",
    [{}, [], "x", [{}], [{"header": "a"}], [{"header": "", "equal": "x"}], [{"header": "a", "equal": 1}],
     [{"header": "a", "like": "x"}], [{"header": "a", "any_of": []}], [{"header": "a", "any_of": ["x"] * (MAX_VALUES + 1)}],
     [{"header": "a", "not": {"not": {"equal": "x"}}}], [{"header": "a", "not": "x"}], [{"header": "a", "regex": "("}],
     [{"header": "a", "equal": "x", "glob": "y"}], [{"header": "a", "equal": "x"}] * (MAX_CONDITIONS + 1),
     [{"header": "a", "equal": "x" * 9000}], [{"header": 3, "equal": "x"}]],
)  # fmt: skip
def test_what_is_no_filter_is_refused(found: object) -> None:
    with pytest.raises(InvalidArgument):
        parse(json.dumps(found))


def test_filters_are_the_same_if_they_say_the_same() -> None:
    assert same('[{"header": "a", "equal": "x"}]', '[{"equal":"x","header":"a"}]')
    assert not same('[{"header": "a", "equal": "x"}]', "")
    with pytest.raises(InvalidArgument, match="JSON"):
        same("[", "[]")


@pytest.mark.parametrize("test", ['"equal":"\\ud800"', '"any_of":["a","\\ud800"]', '"not":{"glob":"\\ud800"}', '"regex":"\\ud800"'])
def test_half_a_character_is_refused(test: str) -> None:
    with pytest.raises(InvalidArgument, match="JSON"):
        parse('[{"header":"a",' + test + "}]")
