"""Requests that are sent again happen once, within bounds."""

from __future__ import annotations

import pytest

from gateway.http.answers import Refused
from gateway.http.idempotency import KEPT_S, MAX_BYTES, MAX_OF_USER, Idempotency, derived_id


def test_a_request_that_is_sent_again_gets_its_first_answer() -> None:
    memory = Idempotency()
    assert memory.begin("ann", "1", b"a", 0.0) is None
    with pytest.raises(Refused, match="still under way"):
        memory.begin("ann", "1", b"a", 0.0)
    memory.end("ann", "1", 200, b"{}")
    found = memory.begin("ann", "1", b"a", 1.0)
    assert found is not None
    assert (found.status, found.body, memory.repeated) == (200, b"{}", 1)
    with pytest.raises(Refused, match="another request"):
        memory.begin("ann", "1", b"b", 1.0)
    assert memory.begin("ben", "1", b"b", 1.0) is None, "keys are of one user"
    assert memory.begin("ann", "1", b"b", KEPT_S) is None, "it is forgotten in the end"


@pytest.mark.parametrize("status", [0, 401, 403, 429, 500, 503, 504])
def test_a_request_without_a_final_answer_can_be_tried_again(status: int) -> None:
    memory = Idempotency()
    memory.begin("ann", "1", b"a", 0.0)
    memory.end("ann", "1", status, b"")
    assert memory.begin("ann", "1", b"a", 0.0) is None


@pytest.mark.parametrize("key", ["", "x" * 129, "ä", "a\n"])
def test_a_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(Refused, match="printable"):
        Idempotency().begin("ann", key, b"a", 0.0)


def test_a_user_pushes_out_only_requests_of_its_own() -> None:
    memory = Idempotency()
    memory.begin("ben", "1", b"a", 0.0)
    memory.end("ben", "1", 200, b"kept")
    for number in range(MAX_OF_USER + 10):
        memory.begin("ann", str(number), b"a", 0.0)
        memory.end("ann", str(number), 200, b"")
    assert len(memory) == MAX_OF_USER + 1
    assert memory.begin("ben", "1", b"a", 0.0) is not None
    assert memory.begin("ann", "0", b"a", 0.0) is None


def test_the_bytes_of_answers_are_bounded() -> None:
    memory = Idempotency()
    for number in range(5):
        memory.begin("ann", str(number), b"a", 0.0)
        memory.end("ann", str(number), 200, bytes(MAX_BYTES // 4))
    assert len(memory) == 4


def test_derived_ids_differ_and_repeat() -> None:
    found = {derived_id(user, key, index) for user in ("a", "b") for key in ("1", "2") for index in range(3)}
    assert len(found) == 12
    assert derived_id("a", "1", 0) in found
