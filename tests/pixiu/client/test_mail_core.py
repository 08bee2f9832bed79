"""What the sender does with mail alone: levels, generations, a writer's order. The rest is in `test_sender_core.py`."""

from __future__ import annotations

import pytest

from pixiu.client.mail.policy import MAX_BACKOFF_S, MailTicket, mail_policy
from pixiu.client.options import ClientOptions
from pixiu.client.send.events import CloseStream, Effect, Failure, OpenStream, Outcome, Resolved, Writable
from pixiu.client.send.sender import HOPELESS, Sender
from pixiu.ids import snowflake
from pixiu.wire.inbox_operations import GENERATION_EPOCH_S
from pixiu.wire.levels import Level
from pixiu.wire.record import Kind, encode

PROXIES = ("a:1", "b:1")
CLOCK_S = GENERATION_EPOCH_S + 5000.0


class Sending:
    """A core, its time, and who it says it is."""

    def __init__(self, **options: float) -> None:
        self.now = 100.0
        self.worker = 3
        policy = mail_policy(ClientOptions(**options), lambda: self.worker, lambda: CLOCK_S + self.now - 100)  # type: ignore[arg-type]
        self.core = Sender(policy, PROXIES, lambda: 0.5)
        self._made = 0

    def ticket(self, level: Level = Level.REPLICATED, size: int = 10) -> MailTicket:
        """A mail that somebody waits for."""
        self._made += 1
        identity = snowflake(1_750_000_000_000, 3, self._made)
        found = MailTicket(encode(Kind.MAIL, 7, bytes(size), identity), identity, level)
        found.watched = True
        return found

    def offer(self, *levels: Level) -> list[MailTicket]:
        """Some mails."""
        tickets = [self.ticket(level) for level in levels or (Level.REPLICATED,)]
        for ticket in tickets:
            self.core.offer(ticket, self.now)
        return tickets

    def sent(self, stream: int) -> list[tuple[int, int]]:
        """(position, count) of every batch that leaves now."""
        found = []
        while (batch := self.core.next_batch(stream, self.now)) is not None:
            found.append((batch.position, batch.count))
        return found

    def confirm(self, stream: int, position: int, count: int) -> list[Effect]:
        """A proxy confirms."""
        return self.core.reply(stream, self.now, outcomes=[Outcome(position, count, None, 2, range(count))])


def opened(effects: list[Effect]) -> OpenStream:
    """The only stream that is to be opened."""
    (found,) = (effect for effect in effects if isinstance(effect, OpenStream))
    return found


def test_the_first_mail_opens_a_stream_and_further_ones_wake_it() -> None:
    sending = Sending()
    effect = opened(sending.core.offer(sending.ticket(), sending.now))
    assert (effect.stream, effect.worker, effect.generation) == (1, 3, 5000)
    assert sending.core.offer(sending.ticket(), sending.now) == []
    assert sending.sent(1) == [(1, 2)]
    assert sending.core.offer(sending.ticket(), sending.now) == [Writable(1)]


def test_a_batch_has_one_level() -> None:
    sending = Sending()
    levels = (Level.REPLICATED, Level.REPLICATED, Level.ACCEPTED, Level.REPLICATED)
    sending.offer(*levels)
    assert sending.sent(1) == [(1, 2), (3, 1), (4, 1)]


def test_confirmed_out_of_order_and_the_rest_again_in_order() -> None:
    sending = Sending()
    tickets = sending.offer(*[Level.REPLICATED] * 5)
    sending.sent(1)
    (resolved,) = (effect for effect in sending.confirm(1, 3, 2) if isinstance(effect, Resolved))
    assert resolved.tickets == (tickets[2], tickets[3])
    effects = sending.core.ended(1, sending.now, Failure("STALE_STREAM", "x"))
    assert effects[0] == CloseStream(1)
    again = opened(effects)
    assert again.generation == 5001
    (newest,) = sending.offer()
    batch = sending.core.next_batch(again.stream, sending.now)
    assert batch is not None
    wanted = [ticket.record for ticket in (tickets[0], tickets[1], tickets[4], newest)]
    assert (batch.data, batch.position) == (b"".join(wanted), 1)
    assert sending.core.counters.resent == 3
    assert sending.confirm(1, 1, 5) == []


def test_a_broken_stream_goes_to_the_next_proxy_and_the_longest_rest_is_that_of_mail() -> None:
    sending = Sending(mail_timeout_s=1000, max_backoff_s=100 * MAX_BACKOFF_S)
    effects = sending.core.offer(sending.ticket(), sending.now)
    addresses = set[str]()
    for _ in range(16):
        begun, addresses = sending.now, addresses | {opened(effects).address}
        effects = sending.core.stream_died(opened(effects).stream, sending.now, "gone")
        if not any(isinstance(effect, OpenStream) for effect in effects):
            sending.now = sending.core.next_deadline()
            effects += sending.core.tick(sending.now)
        assert sending.now <= begun + MAX_BACKOFF_S
    assert addresses == set(PROXIES)
    assert opened(effects).generation > 5015


@pytest.mark.parametrize(("code", "elsewhere"), [("STALE_STREAM", False), ("TOO_FEW_IN_SYNC", False), ("OVERLOADED", True)])
def test_a_stream_that_its_proxy_ended_goes_on_there_or_elsewhere_and_not_before_the_time_that_it_names(
    code: str, elsewhere: bool
) -> None:
    sending = Sending()
    sending.core.offer(sending.ticket(), sending.now)
    effects = sending.core.ended(1, sending.now, Failure(code, "x", 2000))
    assert not any(isinstance(effect, OpenStream) for effect in effects)
    assert sending.core.next_deadline() == sending.now + (0.075 if elsewhere else 2)
    assert not any(isinstance(effect, OpenStream) for effect in _later(sending, 1.9))
    assert (opened(_later(sending, 0.2)).address == PROXIES[1]) is elsewhere


def test_a_stale_writer_jumps_over_whoever_has_its_number_with_a_higher_generation() -> None:
    sending = Sending(mail_timeout_s=1000)
    generation = opened(sending.core.offer(sending.ticket(), sending.now)).generation
    jumps = []
    for stream in range(1, 12):
        effects = sending.core.ended(stream, sending.now, Failure("STALE_WRITER", "x"))
        sending.now += 2
        found = opened(effects + sending.core.tick(sending.now)).generation
        jumps.append(found - generation)
        generation = found
    assert jumps == sorted(jumps)
    assert sum(jumps) > 1000


def test_another_worker_number_begins_another_stream() -> None:
    sending = Sending()
    sending.offer()
    sending.sent(1)
    sending.worker = 4
    effects = sending.core.offer(sending.ticket(), sending.now)
    assert effects[0] == CloseStream(1)
    assert (opened(effects).worker, opened(effects).stream) == (4, 2)
    assert sending.sent(2) == [(1, 2)]


def test_what_expires_in_flight_is_not_sent_again() -> None:
    sending = Sending(mail_timeout_s=5)
    (old,) = sending.offer()
    sending.sent(1)
    sending.now += 3
    (young,) = sending.offer()
    sending.now += 2
    effects = sending.core.tick(sending.now)
    assert effects[0] == Resolved((old,))
    assert old.failure is not None
    assert old.failure.code == "OUTCOME_UNKNOWN"
    again = opened(sending.core.ended(1, sending.now, Failure("OVERLOADED", "busy", 0)))
    batch = sending.core.next_batch(again.stream, sending.now)
    assert batch is not None
    assert batch.data == young.record
    sending.now += 5
    sending.core.tick(sending.now)
    assert young.failure is not None
    assert young.failure.code == "OUTCOME_UNKNOWN", "it had left before the refusals, and nobody answered it"
    assert "OVERLOADED: busy" in young.failure.text
    assert (sending.core.unresolved, sending.core.unresolved_bytes) == (0, 0)


def test_a_range_that_begins_with_an_expired_one_confirms_the_others() -> None:
    sending = Sending(mail_timeout_s=5)
    sending.offer()
    sending.now += 3
    others = sending.offer(Level.REPLICATED, Level.REPLICATED)
    assert sending.sent(1) == [(1, 3)]
    sending.now += 2
    sending.core.tick(sending.now)
    sending.confirm(1, 1, 3)
    assert [(ticket.resolved, ticket.failure, ticket.msg_id) for ticket in others] == [(True, None, 1), (True, None, 2)]


def test_what_waits_ask_for_is_told_of_each_number() -> None:
    sending = Sending(batch_records=1, window_records=2)
    sending.offer(*[Level.REPLICATED] * 3)
    core = sending.core
    assert [core.flushed(number) for number in (1, 2, 3)] == [False] * 3
    sending.sent(1)
    assert [core.flushed(number) for number in (1, 2, 3)] == [True, True, False]
    core.reply(1, sending.now, taken=1)
    assert [core.sent(number) for number in (1, 2)] == [True, False]
    sending.confirm(1, 1, 1)
    core.ended(1, sending.now, Failure("STALE_STREAM", "x"))
    assert [core.flushed(2), core.sent(2), core.sent(1)] == [True, False, True]


def test_what_was_answered_before_it_is_sent_again_is_no_doubt() -> None:
    sending = Sending()
    (ticket,) = sending.offer()
    for position, code in ((1, "DISK_FULL"), (2, "CHECKSUM_WRONG")):
        assert sending.sent(1) == [(position, 1)]
        sending.core.reply(1, sending.now, outcomes=[Outcome(position, 1, Failure(code, "no"), 0, ())])
        assert ticket.failure == Failure(code, "no")
        sending.core.offer(ticket, sending.now)


@pytest.mark.parametrize("code", sorted(HOPELESS))
def test_the_end_of_a_stream_is_no_answer_to_what_had_left_before(code: str) -> None:
    sending = Sending()
    (old,) = sending.offer()
    sending.sent(1)
    again = opened(sending.core.stream_died(1, sending.now, "gone"))
    (young,) = sending.offer()
    sending.core.next_batch(again.stream, sending.now)
    (never,) = sending.offer()
    sending.core.ended(again.stream, sending.now, Failure(code, "no"))
    failures = [ticket.failure for ticket in (old, young, never)]
    assert [failure and failure.code for failure in failures] == ["OUTCOME_UNKNOWN", code, code]

    sending = Sending(batch_records=1)
    first, second = sending.offer(), sending.offer()
    sending.sent(1)  # two batches: which one is it about?
    sending.core.ended(1, sending.now, Failure(code, "no"))
    certain = code if code == "NOT_SERVED" else "OUTCOME_UNKNOWN"
    assert [ticket.failure and ticket.failure.code for ticket in (*first, *second)] == [certain] * 2

    sending = Sending()
    (taken,) = sending.offer()
    sending.sent(1)
    sending.core.reply(1, sending.now, taken=1)
    sending.core.ended(1, sending.now, Failure(code, "no"))
    assert taken.failure is not None
    assert taken.failure.code == "OUTCOME_UNKNOWN"


def _later(sending: Sending, seconds: float) -> list[Effect]:
    sending.now += seconds
    return sending.core.tick(sending.now)
