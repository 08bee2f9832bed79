"""Expressions: what they mean, that searching for bytes changes nothing, and where a mistake is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pixiu.errors import InvalidArgument
from pixiu.wire import block, cel, expressions
from pixiu.wire.expressions import Expression
from pixiu.wire.filters import parse, same

FULL = block.Message(
    b"body!", 7, key=b"k-1", headers=[("region", b"eu"), ("n", b"12"), ("region", b"us"), ("x-y", b"1.5"), ("raw", b"\xff")],
    event_at_us=1_767_225_600_000_000, tag="red", load_test=True,
)  # fmt: skip
BARE = block.Message(b"", 0)


def verdicts(text: str, *messages: block.Message) -> list[bool | None]:
    """For each message: whether it matches; None: the expression has no value."""
    found = list[bool | None]()
    for each in messages:
        filter_ = Expression(text)
        filter_.needles = ()  # every message is looked at
        whole = block.parse(block.encode([each], topic=1, part=1, writer=1, first=1))
        matches = filter_.matching(whole, 0, 1) == [0]
        found.append(None if filter_.errors else matches)
    return found


@pytest.mark.parametrize(
    ("text", "full", "bare"),
    [
        ('headers["region"] == "eu"', True, None),
        ("headers.region == 'eu' && size > 4", True, False),
        ('"x-y" in headers', True, False),
        ("has(headers.region) && has(key) && has(tag) && has(event_time)", True, False),
        ('has(headers["none"])', False, False),
        ('headers.none == "" || size >= 0', True, True),
        ('headers.none == "" && size < 0', False, False),
        ('headers.none == "" && size >= 0', None, None),
        ('!(headers.region != "eu")', True, None),
        ('headers.raw == "x"', None, None),
        ('headers["reg" + "ion"] == "eu"', True, None),
        ('tag in ["red", "blue",]', True, None),
        ("tag in [] || true", True, True),
        ('key.startsWith("k-") && key.endsWith("1") && key.contains("-")', True, None),
        ('key.matches("[0-9]") && !key.matches("^[0-9]") && key.matches("^k-[0-9]$")', True, None),
        ("int(headers.n) * 2 + 1 == 25", True, None),
        ("int(headers.region) == 1", None, None),
        ('double(headers["x-y"]) > 1 && double(headers["x-y"]) / 0.5 == 3.0', True, None),
        ("-7 / 2 == -3 && -7 % 2 == -1 && 7 / -2 == -3 && 0x10 == 16", True, True),
        ("size / 0 == 1", None, None),
        ("9223372036854775807 + size > 0", None, True),
        ("1 < 1.5 && 2.5e0 >= 2 && 1 == 1.0", True, True),
        ('event_time >= timestamp("2026-01-01T00:00:00Z") && event_time < timestamp("2026-01-01T01:00:01+01:00")', True, None),
        ('has(tag) ? tag == "red" : slot == 0', True, True),
        ('size(key) == 3 && "añ".size() == 2 && size(["a", "b"]) == 2', True, None),
        ("load_test", True, False),
        (r'"\x41\u00e9\n\\" == r"' + "A" + 'x" || "a" + \'b\' == "ab"  // both', True, True),
        ("size == 5 ? true : false", True, False),
        ("- size < 0 && !!true", True, False),
    ],
)
def test_each_means_what_it_says(text: str, full: bool | None, bare: bool | None) -> None:
    assert verdicts(text, FULL, BARE) == [full, bare]


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("", 1, "value is missing"),
        ("size >", 7, "value is missing"),
        ("size > 1 size", 10, "operator is missing"),
        ("(size > 1", 10, r"a \) is missing"),
        ('key == "a', 8, "not closed"),
        ("key = 1", 5, "no expression has"),
        ("colour == 1", 1, "no colour"),
        ("size", 1, "true or false"),
        ("key && true", 1, "&& needs a bool"),
        ("size == key", 6, "cannot be compared"),
        ("true < false", 6, "cannot be compared"),
        ("headers == headers", 9, "cannot be compared"),
        ('key["a"] == ""', 4, "only headers"),
        ("size + 1.0 > 1.0", 6, "two of one type"),
        ("key - key == key", 1, "- needs"),
        ("1.0 % 2.0 == 1.0", 1, "% needs"),
        ('key.matches(tag)', 5, "a pattern that stands there"),
        ('key.matches("(")', 13, "ends too early"),
        ('key.matches("^a|b")', 13, "alternatives"),
        ("key.reverse() == key", 5, "no reverse"),
        ("size.startsWith(key)", 1, "takes a string"),
        ('has("a")', 1, "has takes"),
        ("has(size)", 5, "has takes"),
        ('[1, "a"] == [1]', 1, "all of one type"),
        ("size in [key]", 6, "cannot be in"),
        ("size ? true : false", 1, "condition"),
        ("true ? 1 : key", 6, "one type"),
        ('timestamp("tomorrow") < event_time', 11, "a time is written"),
        ('timestamp("2026-01-01T00:00:00") < event_time', 11, "zone"),
        ("9223372036854775808 > 0", 1, "64 bits"),
        ('"\\ud800" == key', 2, "no character"),
        ("null == key", 1, "no value"),
        ("(" * 40 + "true" + ")" * 40, 33, "parentheses"),
        ("!" * 40 + "true", 32, "operators within"),
        ("1" + " - 1" * 40 + " == 0", 127, "operators within"),
        (" && ".join(["true"] * 300), 2049, "more than 256"),
        ("headers.a[0] == 1", 10, "only headers"),
        ("key.", 5, "name is missing"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_column(text: str, column: int, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what) as caught:
        Expression(text)
    assert f"column {column}:" in str(caught.value)


def test_a_long_one_and_half_a_character_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="4096 bytes"):
        Expression('key == "' + "ü" * 2100 + '"')
    with pytest.raises(InvalidArgument, match="half a character"):
        Expression('key == "\ud800"')
    with pytest.raises(InvalidArgument, match="line 2, column 4"):
        Expression("true &&\n   colour")


@pytest.mark.parametrize("size", [100, 2_400, 29_900, 65_535])
def test_a_piece_is_searched_in_linear_time(size: int) -> None:
    """CPython compares each pair of characters of such texts."""
    piece = "a" * 60 + "b" + "a" * 30
    for text in ("a" * size, "a" * (size - 91) + piece, "é" * (size - 95) + piece + "é"):
        assert expressions._contains(text, piece) is (piece in text)
    asked: list[int] = []

    class Text(str):
        def encode(self, *_: str) -> bytes:
            asked.append(len(self))
            return super().encode()

    expressions._contains(Text("a" * size), piece)
    assert bool(asked) is (size * len(piece) > expressions.PAIRS)


def test_what_it_looks_at_is_counted_and_a_sum_of_texts_is_short() -> None:
    long = block.parse(block.encode([block.Message(b"", 0, headers=[("p", b"a" * 30_000)])], topic=1, part=1, writer=1, first=1))
    for text in ("headers.p == 'x' || headers.p == 'y'", 'headers.p.contains("b") || headers.p.startsWith("b")'):
        found = Expression(text)
        assert found.matching(long, 0, 1) == []
        assert 60_000 <= found.work < 200_000
    some = parse('[{"header": "p", "glob": "x*"}, {"header": "p", "any_of": ["x", "y"]}]')
    joined = Expression('(headers.p + headers.p + headers.p).contains("aaa")')
    assert (joined.matching(long, 0, 1), joined.errors) == ([], 1)
    one = parse('[{"header": "p", "glob": "x*"}]')
    assert one.matching(long, 0, 1) == some.matching(long, 0, 1) == []
    assert one.work >= 30_000
    assert some.work > 0


def test_filters_are_conditions_or_expressions() -> None:
    assert isinstance(parse("size > 1"), Expression)
    assert not isinstance(parse(' [{"header": "a", "equal": "x"}]'), Expression)
    assert same("size>1 // big", "size > 1")
    assert not same("size > 1", "size > 2")
    assert not same("size > 1", '[{"header": "a", "equal": "x"}]')


# --- random ones, against a model

NO_VALUE = object()
Model = Callable[[block.Message], Any]


def text_of(data: bytes | None) -> Any:
    return NO_VALUE if data is None else data.decode()


def header(name: str) -> Model:
    return lambda message: text_of(next((value for each, value in message.headers if each == name), None))


class Draw:
    """Draws expressions, each with a model of it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def text(self) -> tuple[str, Model]:
        name = self.rng.choice(("a", "b"))
        return self.rng.choice(
            [(f'headers["{name}"]', header(name)), (f"headers.{name}", header(name)), ("key", lambda m: text_of(m.key)),
             ("tag", lambda m: NO_VALUE if m.tag is None else m.tag)]
        )  # fmt: skip

    def literal(self) -> str:
        return self.rng.choice(("", "x", "xy", "ü"))

    def bool(self, depth: int) -> tuple[str, Model]:
        kind = self.rng.choice(("&&", "||", "!", "?", "==", "==", "!=", "in", "has", "there", "starts", "size", "self"))
        if depth == 0 and kind in ("&&", "||", "!", "?"):
            kind = "=="
        if kind in ("&&", "||"):
            parts = [self.bool(depth - 1) for _ in range(self.rng.randint(2, 3))]
            decides = kind == "||"

            def joined(message: block.Message) -> Any:
                found = [model(message) for _, model in parts]
                return decides if decides in found else NO_VALUE if NO_VALUE in found else not decides

            return "(" + f" {kind} ".join(text for text, _ in parts) + ")", joined
        if kind == "!":
            text, model = self.bool(depth - 1)
            return f"!{text}", lambda m: NO_VALUE if (found := model(m)) is NO_VALUE else not found
        if kind == "?":
            (test, if_), (yes, then), (no, other) = (self.bool(depth - 1) for _ in range(3))
            return (
                f"({test} ? {yes} : {no})",
                lambda m: NO_VALUE if (found := if_(m)) is NO_VALUE else then(m) if found else other(m),
            )
        return self.leaf(kind)

    def leaf(self, kind: str) -> tuple[str, Model]:
        text, model = self.text()
        one, two = self.literal(), self.literal()
        if kind == "has":
            return f"has({text})", lambda m: model(m) is not NO_VALUE
        if kind == "there":
            return '("a" in headers)', lambda m: header("a")(m) is not NO_VALUE
        if kind == "size":
            return "(size > 1)", lambda m: len(m.body) > 1
        if kind == "self":
            other, its = self.text()

            def equal(message: block.Message) -> Any:
                found = model(message), its(message)
                return NO_VALUE if NO_VALUE in found else found[0] == found[1]

            return f"({text} == {other})", equal
        works: dict[str, tuple[str, Callable[[str], bool]]] = {
            "==": (f'({text} == "{one}")', lambda value: value == one),
            "!=": (f'({text} != "{one}")', lambda value: value != one),
            "in": (f'({text} in ["{one}", "{two}"])', lambda value: value in (one, two)),
            "starts": (f'{text}.startsWith("{one}")', lambda value: value.startswith(one)),
        }
        source, test = works[kind]
        return source, lambda m: NO_VALUE if (found := model(m)) is NO_VALUE else test(found)


def drawn_message(rng: random.Random) -> block.Message:
    values = (b"", b"x", b"xy", "ü".encode())
    headers = [(name, rng.choice(values)) for name in ("a", "b", "a", "c") if rng.random() < 0.4]
    body = rng.choice((b"", b"b", b"\x01\x01\x00ax", b"\x01\x02\x00bxy\x01\x00x"))
    key, tag = rng.choice((None, *values)), rng.choice((None, "x", "ü"))
    return block.Message(body, 1, key=key, headers=headers, tag=tag, event_at_us=rng.choice((None, 5)))


def test_random_ones_match_as_a_model_says_and_the_search_for_bytes_changes_nothing() -> None:
    rng = random.Random(11)
    searched = 0
    for _ in range(400):
        text, model = Draw(rng).bool(3)
        if len(text) > cel.MAX_EXPRESSION_BYTES:
            continue
        messages = [drawn_message(rng) for _ in range(rng.randint(1, 12))]
        whole = block.parse(block.encode(messages, topic=1, part=1, writer=1, first=1))
        low = rng.randrange(len(messages))
        high = rng.randint(low + 1, len(messages))
        expected = [at for at in range(low, high) if model(messages[at]) is True]
        filter_ = Expression(text)
        searched += bool(filter_.needles)
        assert filter_.matching(whole, low, high) == expected, text
        filter_.needles, filter_.errors = (), 0
        assert filter_.matching(whole, low, high) == expected, text
        assert filter_.errors == sum(model(messages[at]) is NO_VALUE for at in range(low, high)), text
    assert searched > 40


@pytest.mark.parametrize(
    ("text", "needles"),
    [
        ('headers["region"] == "eu" && size > 3', [b"\x06\x02\x00regioneu"]),
        ('key in ["a", "bc"] || tag == "t"', [b"\x01\x00a", b"\x02\x00bc", b"\x01t"]),
        ('headers.path.startsWith("/a/")', [b"path/a/"]),
        ('int(headers.n) > 3 && headers.region != "eu"', [b"n"]),
        ('"region" in headers', [b"region"]),
        ("size > 3", []),
        ('headers.a == "x" || size > 3', []),
        ('!(headers.a == "x" || true)', []),
        ("has(headers.a) == false", []),
    ],
)
def test_it_knows_bytes_that_must_be_there(text: str, needles: list[bytes]) -> None:
    assert list(Expression(text).needles) == needles
