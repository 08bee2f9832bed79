"""docs/refusals.md has every refusal of the stores, as the cores and a proxy treat it."""

from __future__ import annotations

from tests.proxy.refusals import PAGE, page, rows


def test_the_page_shows_what_the_cores_say() -> None:
    assert PAGE.read_text() == page(), "python -m tests.proxy.refusals"


def test_every_refusal_has_a_code_and_says_what_is_wrong() -> None:
    assert [row for row in rows() if not row.why.code or len(row.why.text) < 10] == []
