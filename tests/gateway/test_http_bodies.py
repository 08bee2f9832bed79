"""Bodies of the HTTP API: what is accepted becomes messages, everything else a refusal that says what is wrong."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.answers import STATUS, TEXTS, Refused, answer_of
from gateway.http.bodies import MAX_BATCH, decoded, entry_of, items_of, mailing_of, publication_of, shown, topic_of
from pixiu.errors import LimitError, LocalError, PixiuError, Unreachable, all_errors
from tests.support.openapi import OPENAPI, problem

PARSERS: dict[str, Callable[[Any], Any]] = {"Publication": publication_of, "Mailing": mailing_of, "Entry": entry_of}
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 70_000), st.just(2**63), st.floats(allow_nan=False), st.text(max_size=5),
    st.sampled_from(["room/7", "user/9", "room/0", "$SYS/a", "a/+", "persisted", base64.b64encode(b"\xff").decode()]),
    st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=3), st.integers()), max_size=2),
    st.lists(st.integers(0, 5), max_size=3),
)  # fmt: skip


def refusal(parse: Callable[[Any], Any], fields: Any) -> str:
    """Why a parser refuses something; empty if it does not."""
    try:
        parse(fields)
    except Refused as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
def test_what_is_accepted_is_what_the_description_allows(name: str, data: st.DataObject) -> None:
    """The description cannot say which topics are reserved, what is base64, or that a header is Unicode."""
    schema = OPENAPI["components"]["schemas"][name]
    fields = data.draw(st.dictionaries(st.sampled_from([*schema["properties"], "other"]), VALUES, max_size=4))
    fields = decoded(json.dumps(fields).encode())
    described = not problem(schema, fields)
    refused = refusal(PARSERS[name], fields)
    if refused:
        assert not described or any(word in refused for word in ("topic", "base64", "Unicode"))
    else:
        assert described or None in fields.values() or 1.0 in fields.values()


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"messages": []}', "1 to 1000"),
        (b'{"messages": [1]}', "1 to 1000"),
        (json.dumps({"messages": [{}] * (MAX_BATCH + 1)}).encode(), "1 to 1000"),
        (b'{"messages": [{}], "topic": "a"}', "no field 'topic'"),
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes, wrong: str) -> None:
    with pytest.raises(Refused, match=wrong):
        items_of(decoded(body))


@pytest.mark.parametrize(
    ("name", "found"), [("room/42", (42, "", 0)), ("user/7", (0, "", 7)), ("weather/north", (0, "weather/north", 0))]
)
def test_topics_are_rooms_users_or_free(name: str, found: tuple[int, str, int]) -> None:
    assert topic_of(name) == found


@pytest.mark.parametrize("name", ["", "room/0", "room/x", "user/0", "$SYS/x", "a/#", "a\0", "x" * 5000, "\ud800", 7, None])
def test_topics_that_nobody_may_use_are_refused(name: object) -> None:
    with pytest.raises(Refused, match="topic"):
        topic_of(name)


@given(st.binary(max_size=20))
def test_a_payload_comes_out_as_it_went_in(payload: bytes) -> None:
    assert entry_of(json.loads(json.dumps(shown(payload)))).payload == payload


def test_every_error_has_a_status_and_a_text_that_tells_nothing_of_the_inside() -> None:
    for kind in (kind for kind in all_errors() if kind.__module__ == PixiuError.__module__):
        answer = answer_of(kind("10.0.0.1:7002 said no"))
        assert 400 <= answer.status <= 599
        assert str(answer.status) in OPENAPI["components"]["responses"]
        own = issubclass(kind, LocalError | LimitError) and answer.status not in (500, 503)
        assert own or "10.0.0.1" not in answer.text
    assert set(STATUS.values()) - {400, 401, 403, 413} <= set(TEXTS)
    assert answer_of(Unreachable("10.0.0.1:7002: refused")).retry_after_s == 1
