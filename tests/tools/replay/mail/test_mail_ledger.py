"""What is counted of mail, and which counts break a promise."""

from __future__ import annotations

import pytest

from pixiu.ids import UIN
from tools.replay.mail.ledger import MailLedger, MailOutcome, MissingMail, judge_mail

SEVEN, EIGHT = UIN(7), UIN(8)


def ledger_of(count: int, *, confirmed: bool = True) -> tuple[MailLedger, list[bytes]]:
    ledger = MailLedger(99)
    payloads = [ledger.sending(SEVEN, b"text %d" % number, 1000 * number) for number in range(count)]
    if confirmed:
        for number in range(count):
            ledger.answered(number, "")
    return ledger, payloads


def test_what_came_once_and_in_order_keeps_every_promise() -> None:
    ledger, payloads = ledger_of(3)
    assert ledger.waiting(SEVEN) == 3
    assert [ledger.delivered(SEVEN, payload, 10_000) for payload in payloads] == [MailOutcome.DELIVERED] * 3
    assert (ledger.waiting(SEVEN), ledger.waiting_users(), ledger.acknowledged) == (0, [], 3)
    verdict = judge_mail(ledger)
    assert (verdict.broken, verdict.exit_code, verdict.confirmed, verdict.missing) == ([], 0, 3, 0)
    assert 8.0 <= verdict.latency_p50_ms <= 10.0


def test_what_was_confirmed_and_never_came_is_missing_and_what_was_refused_is_not_owed() -> None:
    ledger, payloads = ledger_of(4)
    refused = ledger.sending(EIGHT, b"x", 0)
    ledger.answered(4, "INBOX_FULL")
    ledger.delivered(SEVEN, payloads[0], 1)
    ledger.delivered(SEVEN, payloads[1], 1)
    assert list(ledger.missing()) == [MissingMail(2, SEVEN), MissingMail(3, SEVEN)]
    verdict = judge_mail(ledger)
    assert verdict.broken == ["2 mails were confirmed to their senders, and their receivers have not acknowledged them"]
    assert (verdict.refused, verdict.refusals, verdict.exit_code) == (1, {"INBOX_FULL": 1}, 1)
    assert ledger.waiting_users() == [SEVEN]
    assert ledger.delivered(EIGHT, refused, 1) is MailOutcome.DELIVERED, "its outcome was unknown"


def test_an_unanswered_mail_may_come_and_is_told() -> None:
    ledger, payloads = ledger_of(1, confirmed=False)
    assert (ledger.unanswered, ledger.waiting(SEVEN), list(ledger.missing())) == (1, 1, [])
    assert judge_mail(ledger).broken == ["1 mails got neither a confirmation nor an error"]
    assert judge_mail(ledger, deaths=("proxy",)).broken == []
    assert ledger.delivered(SEVEN, payloads[0], 1) is MailOutcome.DELIVERED


@pytest.mark.parametrize(("again", "outcome"), [(False, MailOutcome.REPEATED), (True, MailOutcome.AGAIN)])
def test_what_comes_again_breaks_the_promise_unless_a_process_died(again: bool, outcome: MailOutcome) -> None:
    ledger, payloads = ledger_of(1)
    ledger.delivered(SEVEN, payloads[0], 1)
    assert ledger.delivered(SEVEN, payloads[0], 2, again=again) is outcome
    assert len(judge_mail(ledger).broken) == 1
    verdict = judge_mail(ledger, deaths=("relay 0.1",))
    assert (verdict.broken, verdict.outcomes[outcome.value], verdict.deaths) == ([], 1, ["relay 0.1"])


def test_order_owner_and_content_are_checked() -> None:
    ledger, payloads = ledger_of(3)
    ledger.delivered(SEVEN, payloads[1], 1)
    broken = bytearray(payloads[2])
    broken[-1] ^= 1
    stamped = bytearray(payloads[2])
    stamped[8] ^= 1
    outcomes = [
        ledger.delivered(SEVEN, payloads[0], 1),
        ledger.delivered(EIGHT, payloads[2], 1),
        ledger.delivered(SEVEN, bytes(broken), 1),
        ledger.delivered(SEVEN, bytes(stamped), 1),
    ]
    assert outcomes == [MailOutcome.OUT_OF_ORDER, MailOutcome.ALIEN, MailOutcome.DAMAGED, MailOutcome.DAMAGED]
    ledger.gaps = 1
    verdict = judge_mail(ledger, unread=2, failed_logins=3)
    assert len(verdict.broken) == 7, verdict.broken
    assert verdict.examples == [f"mail 2 to {SEVEN}"]


def test_mail_that_lay_there_before_is_nobodys_fault() -> None:
    ledger, payloads = ledger_of(1)
    other = MailLedger(98).sending(SEVEN, b"text 0", 0)
    assert [ledger.delivered(SEVEN, payload, 1) for payload in (other, b"short", payloads[0])] == [
        MailOutcome.FOREIGN, MailOutcome.FOREIGN, MailOutcome.DELIVERED,
    ]  # fmt: skip
    assert judge_mail(ledger).broken == []
