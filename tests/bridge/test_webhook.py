"""What the answers of a webhook mean: a wrong message is a dead letter, everything else waits and says what to do."""

from __future__ import annotations

import pytest

from bridge.connector import Verdict
from bridge.connectors.webhook import outcome_of


@pytest.mark.parametrize(
    ("status", "verdict", "text"),
    [
        (200, Verdict.DONE, ""),
        (204, Verdict.DONE, ""),
        (413, Verdict.SPLIT, "send it again when the endpoint takes it"),
        (422, Verdict.SPLIT, "send it again when the endpoint takes it"),
        (401, Verdict.AGAIN, "give its token_file"),
        (403, Verdict.AGAIN, "give its token_file"),
        (404, Verdict.AGAIN, "check url and what runs there; nothing is lost"),
        (308, Verdict.AGAIN, "give the final address as url"),
        (503, Verdict.AGAIN, "it is tried again"),
    ],
)
def test_each_answer_has_a_fate_and_a_sentence(status: int, verdict: Verdict, text: str) -> None:
    found = outcome_of(status, "", 0.0)
    assert (found.verdict, text in found.why) == (verdict, True)


@pytest.mark.parametrize(
    ("after", "seconds"),
    [("7", 7.0), ("99999", 3600.0), ("Thu, 01 Jan 1970 00:02:00 GMT", 110.0), ("soon", 0.0), ("-5", 0.0), ("9" * 400, 3600.0)],
)
def test_the_wait_that_an_endpoint_asks_for_is_kept_within_an_hour(after: str, seconds: float) -> None:
    assert outcome_of(429, after, 10.0).after_s == seconds
