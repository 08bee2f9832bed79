"""Inputs of requests: what is too long, too large or of another kind is refused before it is parsed."""

from __future__ import annotations

from typing import Any

import pytest

from ops.console.inputs import MAX_BODY_BYTES, MAX_FIELDS, MAX_LIST, MAX_TEXT, Inputs, body_of
from pixiu.errors import InvalidArgument


def test_fields_that_are_right() -> None:
    inputs = Inputs({"name": "orders", "count": "7", "more": 8, "force": True, "offsets": [1, 2], "sort": "b"})
    assert (inputs.text("name"), inputs.number("count"), inputs.number("more"), inputs.flag("force")) == ("orders", 7, 8, True)
    assert inputs.numbers("offsets") == [1, 2]
    assert inputs.one_of("sort", ("a", "b")) == "b"
    assert (inputs.text("other", ""), inputs.number("other", 3), inputs.flag("other"), inputs.numbers("other")) == (
        "",
        3,
        False,
        [],
    )
    assert Inputs({}).one_of("sort", ("a", "b")) == "a"


@pytest.mark.parametrize(
    "value", ["x" * (MAX_TEXT + 1), "", "a\nb", "a\x00", "\u202eabc", "\ud800", 7, None, ["a"], {"a": 1}], ids=repr
)
def test_a_text_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="name: "):
        Inputs({"name": value}).text("name")


@pytest.mark.parametrize("value", ["9" * 20, "9" * 1000, "-1", "1.5", "٣", "x", 10**30, -1, 1.5, True, [1], None, ""], ids=repr)
def test_a_number_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="count: "):
        Inputs({"count": value}).number("count")


def test_a_number_out_of_its_range() -> None:
    with pytest.raises(InvalidArgument, match="from 1 to 5"):
        Inputs({"count": "6"}).number("count", 1, 1, 5)


@pytest.mark.parametrize("value", [[1] * (MAX_LIST + 1), "1,2", ["x"], [[1]], {"1": 2}], ids=lambda value: repr(value)[:12])
def test_a_list_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="offsets: "):
        Inputs({"offsets": value}).numbers("offsets")


@pytest.mark.parametrize("value", ["yes", 2, [], {}], ids=repr)
def test_a_flag_that_cannot_be(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="force: "):
        Inputs({"force": value}).flag("force")


def test_one_of_others() -> None:
    with pytest.raises(InvalidArgument, match="one of a, b"):
        Inputs({"sort": "c"}).one_of("sort", ("a", "b"))


def test_too_many_fields() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        Inputs({str(number): "" for number in range(MAX_FIELDS + 1)})


@pytest.mark.parametrize(
    "data", [b"x" * (MAX_BODY_BYTES + 1), b"[" * 10_000, b"[1]", b"7", b"{", b"\xff", b'{"a":' * 5 + b"1" + b"}" * 5],
    ids=lambda data: repr(data)[:12],
)  # fmt: skip
def test_a_body_that_cannot_be(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        body_of(data)


def test_a_body() -> None:
    assert body_of(b'{"name": "orders", "offsets": [1]}').text("name") == "orders"
    assert body_of(b"").text("name", "") == ""
