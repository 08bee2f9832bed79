"""The bookkeeping of a replay of mail, and the verdict: each mail once to the application, and acknowledged. Pure.

    sent ──▶ confirmed ──▶ delivered to the application, and acknowledged by it
      └────▶ refused: nobody is owed it

Source: docs/promises.md, docs/operations.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from pixiu.ids import UIN
from tools.load.histogram import Histogram
from tools.load.payload import HEAD, HEAD_BYTES, encode_payload

MAX_EXAMPLES: Final = 20
"""Limit of missing mails that a report lists."""
RUN_BYTES: Final = 8
"""Bytes of the replay's number before a letter's text."""


class MailOutcome(Enum):
    """Judgement of one delivered mail."""

    DELIVERED = "delivered"
    REPEATED = "repeated"
    """Delivered again after it was acknowledged, and not marked as redelivered."""
    AGAIN = "again"
    """Delivered again, marked as redelivered: its acknowledgement had not reached the cluster."""
    OUT_OF_ORDER = "out_of_order"
    """New, but after a later one of the same inbox."""
    ALIEN = "alien"
    """Mail for another user."""
    DAMAGED = "damaged"
    """Its content differs from what was sent."""
    FOREIGN = "foreign"
    """Not of this replay: it was in the inbox before."""


class MissingMail(NamedTuple):
    """A mail that was confirmed to its sender, and that its receiver has not acknowledged."""

    number: int
    to: UIN


class MailLedger:
    """Counts one replay of mail.

    Args:
        run: number of this replay, to recognize mail of other ones.
    """

    def __init__(self, run: int) -> None:
        self._run = run.to_bytes(RUN_BYTES, "little")
        self._to: list[UIN] = []
        self._text: list[bytes] = []
        self._sent_us: list[int] = []
        self._confirmed: set[int] = set()
        self._unanswered: set[int] = set()
        self._owed: dict[UIN, set[int]] = {}
        """Receiver → numbers of mails that may still arrive: neither refused nor acknowledged."""
        self._highest: dict[UIN, int] = {}
        self._acknowledged: set[int] = set()
        self.outcomes: Counter[MailOutcome] = Counter()
        self.refusals: Counter[str] = Counter()
        self.gaps = 0
        """Gaps reported to receivers."""
        self.latency_us = Histogram()
        """Time from the sender's call to the application's acknowledgement, which includes the users' absence."""

    def sending(self, to: UIN, text: bytes, now_us: int) -> bytes:
        """Make the payload of the next mail, which is on its way from now on."""
        number = len(self._to)
        text = self._run + text
        self._to.append(to)
        self._text.append(text)
        self._sent_us.append(now_us)
        self._unanswered.add(number)
        self._owed.setdefault(to, set()).add(number)
        return encode_payload(number, now_us, text)

    def answered(self, number: int, code: str) -> None:
        """Note the sender's result: stored (an empty code), or refused. Mail with an unknown outcome may arrive, and is not
        owed."""
        self._unanswered.discard(number)
        if not code:
            self._confirmed.add(number)
            return
        self.refusals[code] += 1
        self._owed[self._to[number]].discard(number)

    def delivered(self, uin: UIN, payload: bytes, now_us: int, *, again: bool = False) -> MailOutcome:
        """Note that a mail reached a user's application, which acknowledges it."""
        outcome = self._judge(uin, payload, again=again)
        self.outcomes[outcome] += 1
        if outcome in (MailOutcome.DELIVERED, MailOutcome.OUT_OF_ORDER):
            number = HEAD.unpack_from(payload)[0]
            self._owed[uin].discard(number)
            self._acknowledged.add(number)
            self._highest[uin] = max(self._highest.get(uin, -1), number)
            self.latency_us.add(now_us - self._sent_us[number])
        return outcome

    def _judge(self, uin: UIN, payload: bytes, *, again: bool) -> MailOutcome:
        if len(payload) < HEAD_BYTES + RUN_BYTES or payload[HEAD_BYTES : HEAD_BYTES + RUN_BYTES] != self._run:
            return MailOutcome.FOREIGN
        number, sent_us = HEAD.unpack_from(payload)
        if number >= len(self._to) or payload[HEAD_BYTES:] != self._text[number] or sent_us != self._sent_us[number]:
            return MailOutcome.DAMAGED
        if self._to[number] != uin:
            return MailOutcome.ALIEN
        if number in self._acknowledged:
            return MailOutcome.AGAIN if again else MailOutcome.REPEATED
        if number < self._highest.get(uin, -1):
            return MailOutcome.OUT_OF_ORDER
        return MailOutcome.DELIVERED

    @property
    def sent(self) -> int:
        """Number of mails sent so far."""
        return len(self._to)

    @property
    def confirmed(self) -> int:
        """Number of mails that are stored and were confirmed to their sender."""
        return len(self._confirmed)

    @property
    def unanswered(self) -> int:
        """Number of mails whose sender has no answer yet."""
        return len(self._unanswered)

    @property
    def acknowledged(self) -> int:
        """Number of mails that their receiver acknowledged."""
        return len(self._acknowledged)

    def waiting(self, uin: UIN) -> int:
        """Number of mails that may still come to a user."""
        return len(self._owed.get(uin, ()))

    def waiting_users(self) -> list[UIN]:
        """The users who may still get mail."""
        return [uin for uin, numbers in self._owed.items() if numbers]

    def missing(self) -> Iterator[MissingMail]:
        """Iterate over mail that was confirmed and is not acknowledged."""
        for uin, numbers in self._owed.items():
            for number in sorted(numbers & self._confirmed):
                yield MissingMail(number, uin)


@dataclass(slots=True)
class MailVerdict:
    """The result of a replay of mail; `broken` describes every broken promise."""

    sent: int = 0
    confirmed: int = 0
    refused: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    unanswered: int = 0
    acknowledged: int = 0
    missing: int = 0
    unread: int = 0
    """Number of mails that Pi counts as not acknowledged by the replay's devices, at the end."""
    gaps: int = 0
    failed_logins: int = 0
    deaths: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    latency_p50_ms: float = 0.0
    latency_p99_ms: float = 0.0
    examples: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0: every promise kept; 1: one is broken."""
        return 1 if self.broken else 0


def judge_mail(ledger: MailLedger, *, unread: int = 0, failed_logins: int = 0, deaths: tuple[str, ...] = ()) -> MailVerdict:
    """Judge a finished replay.

    A mail that is delivered again after a process died between two acknowledgements breaks no promise; without a death it does.
    """
    missing = list(ledger.missing())
    outcomes = ledger.outcomes
    verdict = MailVerdict(
        sent=ledger.sent,
        confirmed=ledger.confirmed,
        refused=sum(ledger.refusals.values()),
        refusals=dict(sorted(ledger.refusals.items())),
        unanswered=ledger.unanswered,
        acknowledged=ledger.acknowledged,
        missing=len(missing),
        unread=unread,
        gaps=ledger.gaps,
        failed_logins=failed_logins,
        deaths=list(deaths),
        outcomes={outcome.value: outcomes[outcome] for outcome in MailOutcome},
        latency_p50_ms=ledger.latency_us.percentile(50) / 1000,
        latency_p99_ms=ledger.latency_us.percentile(99) / 1000,
        examples=[f"mail {each.number} to {each.to}" for each in missing[:MAX_EXAMPLES]],
    )
    repeated = outcomes[MailOutcome.REPEATED] + outcomes[MailOutcome.AGAIN]
    for count, text in (
        (len(missing), "mails were confirmed to their senders, and their receivers have not acknowledged them"),
        (0 if deaths else repeated, "mails came to the application again after it had acknowledged them"),
        (outcomes[MailOutcome.OUT_OF_ORDER], "mails arrived after a later one of the same inbox"),
        (outcomes[MailOutcome.ALIEN], "mails went to somebody else"),
        (outcomes[MailOutcome.DAMAGED], "mails had another content than what was sent"),
        (ledger.gaps, "gaps were reported, though nothing was to be dropped"),
        (unread, "mails are unread in Pi, though their receivers acknowledged them all"),
        (0 if deaths else ledger.unanswered, "mails got neither a confirmation nor an error"),
        (0 if deaths else failed_logins, "logins were not confirmed"),
    ):
        if count:
            verdict.broken.append(f"{count} {text}")
    return verdict
