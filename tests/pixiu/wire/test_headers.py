"""Headers in a record's extension: what goes in comes out, and what anybody else put there is none."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixiu.client.messages.drafts import ROOM_KIND, draft, encode
from pixiu.client.messages.message import message_of
from pixiu.errors import InvalidArgument
from pixiu.wire.headers import MAX_HEADER_NAME_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, decode_headers, encode_headers

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(st.dictionaries(NAME, TEXT, max_size=MAX_HEADERS))
def test_what_goes_in_comes_out(headers: dict[str, str]) -> None:
    made = draft(ROOM_KIND, 42, b"x", 1 << 20, headers=headers)
    message = message_of(encode(made, 1, 7, 1 << 20))
    assert message.headers == headers
    assert (message.extension == b"") == (headers == {})


@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: json.dumps({"a": text, "b": [text]}).encode()))
def test_other_formats_are_no_headers_and_their_bytes_are_there(extension: bytes) -> None:
    message = message_of(encode(draft(ROOM_KIND, 42, b"x", 1 << 20, extension=extension), 1, 7, 1 << 20))
    assert all(isinstance(value, str) for value in message.headers.values())
    assert message.extension == extension


@pytest.mark.parametrize(
    "extension",
    [b"", b"{", b"[]", b"null", b'{"a": 1}', b'{"a": null}', b'{"a": {"b": "c"}}', b"\xff", b"{" * 60_000, b'{"a":' * 10_000],
)
def test_what_is_no_object_of_texts_is_no_headers(extension: bytes) -> None:
    assert decode_headers(extension) == {}


def test_more_headers_than_may_be_are_not_read() -> None:
    assert decode_headers(json.dumps({str(number): "" for number in range(MAX_HEADERS + 1)}).encode()) == {}


@pytest.mark.parametrize(
    ("headers", "text"),
    [
        ({str(number): "" for number in range(MAX_HEADERS + 1)}, "at most 64"),
        ({"": "x"}, "1 to 128 bytes"),
        ({"é" * MAX_HEADER_NAME_BYTES: "x"}, "1 to 128 bytes"),
        ({"a": 1}, "headers map names to texts"),
        ({1: "a"}, "headers map names to texts"),
        ({"a": b"b"}, "headers map names to texts"),
        ({"a": "\ud800"}, "surrogate"),
        ({"a": "x" * MAX_HEADERS_BYTES}, "at most 65535 bytes"),
    ],
)
def test_what_cannot_be_a_header_is_refused(headers: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        encode_headers(headers)


def test_headers_are_the_extension() -> None:
    with pytest.raises(InvalidArgument, match="not both"):
        draft(ROOM_KIND, 42, b"x", 1 << 20, extension=b"{}", headers={"a": "b"})
    assert draft(ROOM_KIND, 42, b"x", 1 << 20, headers={"k": "é"}).extension == '{"k":"é"}'.encode()
    with pytest.raises(TypeError):
        decode_headers(b'{"a":"b"}')["a"] = "c"  # type: ignore[index]


def test_what_is_no_extension_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="an extension is bytes, not dict; a mapping of texts goes into headers="):
        draft(ROOM_KIND, 42, b"x", 1 << 20, extension={})  # type: ignore[arg-type]
