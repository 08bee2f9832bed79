"""The proxy's own writer of mail: one stream at a time, and what it did not answer again on the next, in order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.core.contract import NEVER, TICK
from pixiu.errors import Refusal
from pixiu.wire.inbox_operations import MAX_GENERATION
from proxy import kept_events as ev
from proxy import mail_events as mail_ev
from proxy.kept.writer import MAX_PAUSE_S, PAUSE_S, KeptWriter


class Writer:
    """A writer with a worker number, and what it did."""

    def __init__(self, *, lent: bool = True) -> None:
        self.numbers = 0
        self.core = KeptWriter(self._next)
        self.now = 100.0
        self.effects: list[ev.WriterEffect] = []
        if lent:
            self.step(ev.WriterLent(12, 80))

    def _next(self) -> int:
        self.numbers += 1
        return self.numbers

    def step(self, event: ev.WriterEvent) -> list[ev.WriterEffect]:
        self.effects = self.core.step(event, self.now)
        return self.effects

    def store(self, *numbers: int, until: float = 104.0) -> list[ev.WriterEffect]:
        mails = [mail_ev.RoomMail(40, b"%d" % number, [7]) for number in numbers]
        return self.step(ev.StoreKept([ev.KeptMail(*each, until) for each in zip(numbers, mails, strict=True)]))

    def end(self, code: str = "STALE_STREAM", retry_ms: int = 0) -> list[ev.WriterEffect]:
        return self.step(mail_ev.EndWriter(self.core.stream, Refusal(code, "says the test", retry_ms)))

    def answer(self, *results: mail_ev.Result, stream: int = 0) -> list[ev.WriterEffect]:
        return self.step(mail_ev.Answer(stream or self.core.stream, results, {}, 0))

    def rest(self) -> list[ev.WriterEffect]:
        """The pause is over."""
        self.now = self.core.next_deadline()
        return self.step(TICK)


def sent(effects: Sequence[ev.WriterEffect]) -> list[tuple[int, list[int]]]:
    """First position, and numbers, of what is written."""
    found = [effect for effect in effects if isinstance(effect, mail_ev.RoomMailReceived)]
    return [(each.position, [int(mail.record) for mail in each.mails]) for each in found]


def streams(effects: Sequence[ev.WriterEffect]) -> list[tuple[int, int, int]]:
    found = [effect for effect in effects if isinstance(effect, mail_ev.WriterOpened)]
    assert all(each.own for each in found)
    return [(each.stream, each.worker, each.generation) for each in found]


def outcomes(effects: Sequence[ev.WriterEffect]) -> list[tuple[int, str]]:
    found = [outcome for effect in effects if isinstance(effect, ev.KeptStored) for outcome in effect.outcomes]
    return [(number, why.code if why is not None else "") for number, why in found]


def test_a_stream_opens_with_the_first_mail_and_positions_go_on() -> None:
    writer = Writer()
    assert writer.core.next_deadline() == NEVER
    effects = writer.store(1, 2)
    assert (streams(effects), sent(effects)) == ([(1, 12, 80)], [(1, [1, 2])])
    assert sent(writer.store(3)) == [(3, [3])]
    assert outcomes(writer.answer(mail_ev.Result(1, 2), mail_ev.Result(3, 1))) == [(1, ""), (2, ""), (3, "")]
    assert writer.core.idle


def test_mail_waits_for_a_worker_number() -> None:
    writer = Writer(lent=False)
    assert not writer.store(1)
    assert not writer.store(2)
    assert sent(writer.step(ev.WriterLent(12, 80))) == [(1, [1, 2])]


def test_what_a_stream_did_not_answer_goes_first_on_the_next_one_which_has_a_higher_generation() -> None:
    writer = Writer()
    writer.store(1, 2, 3)
    writer.answer(mail_ev.Result(2, 1))
    writer.end()
    assert not writer.store(4)
    assert writer.core.next_deadline() == writer.now + PAUSE_S
    effects = writer.rest()
    assert (streams(effects), sent(effects)) == ([(2, 12, 81)], [(1, [1, 3, 4])])
    assert not writer.answer(mail_ev.Result(1, 1), stream=1), "the former stream's word does not count"
    assert outcomes(writer.answer(mail_ev.Result(1, 3))) == [(1, ""), (3, ""), (4, "")]


def test_an_unknown_outcome_is_no_outcome() -> None:
    writer = Writer()
    writer.store(1, 2)
    assert not outcomes(writer.answer(mail_ev.Result(1, 1, code="OUTCOME_UNKNOWN", open=[7])))
    writer.end()
    assert sent(writer.rest()) == [(1, [1, 2])]


def test_nobody_waits_for_what_is_too_late() -> None:
    writer = Writer()
    writer.store(1, until=100.01)
    writer.store(2)
    writer.end()
    assert sent(writer.rest()) == [(1, [2])]
    writer.end(retry_ms=60_000)
    assert writer.core.next_deadline() == writer.now + MAX_PAUSE_S
    writer.now = 110.0
    assert not writer.step(TICK)
    assert writer.core.next_deadline() == NEVER
    assert sent(writer.store(3, until=114.0)) == [(1, [3])]


def test_pauses_double_until_something_is_stored() -> None:
    writer = Writer()
    writer.store(1, until=NEVER)
    pauses = []
    for _ in range(7):
        writer.end()
        pauses.append(round(writer.core.next_deadline() - writer.now, 3))
        writer.rest()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    writer.store(2, until=NEVER)
    writer.answer(mail_ev.Result(1, 1))
    writer.end()
    assert writer.core.next_deadline() - writer.now == pytest.approx(PAUSE_S)


def test_a_stale_writer_leaps_over_the_number_s_former_holder() -> None:
    writer = Writer()
    writer.store(1, until=NEVER)
    generations = []
    for _ in range(4):
        writer.end("STALE_WRITER")
        generations += [generation for _, _, generation in streams(writer.rest())]
    assert generations == [82, 86, 94, 110]
    writer.step(ev.WriterLent(13, MAX_GENERATION))
    writer.end("STALE_WRITER")
    assert streams(writer.rest()) == [(6, 13, MAX_GENERATION)]


def test_a_session_s_full_inbox_refuses_nothing_and_is_counted() -> None:
    writer = Writer()
    writer.store(1)
    assert outcomes(writer.answer(mail_ev.Result(1, 1, code="INBOX_FULL", open=[7, 8]))) == [(1, "")]
    assert writer.core.inboxes_full == 2


@pytest.mark.parametrize(
    ("code", "reported", "retry"),
    [("DISK_FULL", "OVERLOADED", True), ("OVERLOADED", "OVERLOADED", True), ("ID_REUSED", "ID_REUSED", False)],
)
def test_what_a_store_refuses_is_reported(code: str, reported: str, retry: bool) -> None:
    writer = Writer()
    writer.store(1)
    (effect,) = writer.answer(mail_ev.Result(1, 1, code=code))
    assert isinstance(effect, ev.KeptStored)
    ((number, why),) = effect.outcomes
    assert why is not None
    assert (number, why.code, bool(why.retry_after_ms)) == (1, reported, retry)


def test_without_stores_everything_is_refused() -> None:
    writer = Writer()
    writer.store(1, 2)
    assert outcomes(writer.end("NOT_SERVED")) == [(1, "UNAVAILABLE"), (2, "UNAVAILABLE")]
    assert writer.core.idle
    assert writer.core.next_deadline() == NEVER
