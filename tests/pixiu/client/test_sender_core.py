"""The sender's decisions: order, windows, another proxy, draining, time-outs. No sockets, the clock is a number.

They are of messages to rooms unless a test says that they are of both kinds; what is mail's alone is in `test_mail_core.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pixiu.client.mail.policy import STALL_S, MailTicket, mail_policy
from pixiu.client.options import ClientOptions
from pixiu.client.send.events import (
    ALWAYS,
    LOOKED,
    PERHAPS,
    TRANSITIONS,
    Batch,
    CloseStream,
    Effect,
    Failure,
    OpenStream,
    Outcome,
    ProxyState,
    RefreshCluster,
    Resolved,
    Ticket,
    Writable,
)
from pixiu.client.send.policy import room_policy
from pixiu.client.send.sender import Sender
from pixiu.errors import Draining, NotSent, OutcomeUnknown, Overloaded, all_errors
from pixiu.rpc.deadline_timer import NEVER
from pixiu.wire.inbox_operations import GENERATION_EPOCH_S
from pixiu.wire.levels import Level
from tests.support.effort import runs

A, B, C = "a:1", "b:2", "c:3"


MESSAGES, MAIL = "messages", "mail"
of_both_kinds = pytest.mark.parametrize("kind", [MESSAGES, MAIL])


def make(proxies: tuple[str, ...] = (A, B), kind: str = MESSAGES, **options: float) -> Sender:
    given = ClientOptions(**options)  # type: ignore[arg-type]
    policy = room_policy(given) if kind == MESSAGES else mail_policy(given, lambda: 3, lambda: GENERATION_EPOCH_S + 5000.0)
    return Sender(policy, proxies, lambda: 0.5)


def ticket(key: int, number: int, lane: int = 1, size: int = 100, kind: str = MESSAGES) -> Ticket:
    record = f"{key}:{number}:{lane};".encode().ljust(size, b".")
    made = Ticket(record, key, lane, number) if kind == MESSAGES else MailTicket(record, number, Level.REPLICATED)
    made.watched = True
    return made


def stream_to(effects: list[Effect], address: str) -> int:
    (found,) = [effect.stream for effect in effects if isinstance(effect, OpenStream) and effect.address == address]
    return found


def ids(batch: Batch | None) -> list[tuple[int, int]]:
    """(key, number) of a batch's records, read back from the bytes."""
    assert batch is not None
    heads = [part for part in batch.data.replace(b".", b"").split(b";") if part]
    assert len(heads) == batch.count
    return [(int(head.split(b":")[0]), int(head.split(b":")[1])) for head in heads]


def resolved(effects: list[Effect]) -> list[Ticket]:
    return [one for effect in effects if isinstance(effect, Resolved) for one in effect.tickets]


def test_the_proxy_of_a_key_is_key_modulo_proxies_and_streams_open_on_demand() -> None:
    core = make((A, B))
    assert core.offer(ticket(4, 1), 0) == [OpenStream(A, 1)]
    assert core.offer(ticket(5, 2), 0) == [OpenStream(B, 2)]
    assert core.offer(ticket(6, 3), 0) == []
    assert ids(core.next_batch(1, 0)) == [(4, 1), (6, 3)]
    assert ids(core.next_batch(2, 0)) == [(5, 2)]
    assert core.next_batch(1, 0) is None
    assert core.offer(ticket(4, 4), 0) == [Writable(1)]


def test_positions_are_dense_from_one_and_count_per_stream() -> None:
    core = make((A,))
    core.offer(ticket(1, 1), 0)
    first = core.next_batch(1, 0)
    core.offer(ticket(1, 2), 0)
    core.offer(ticket(1, 3), 0)
    second = core.next_batch(1, 0)
    core.offer(ticket(1, 4), 0)
    third = core.next_batch(1, 0)
    assert [(batch.position, batch.count) for batch in (first, second, third) if batch] == [(1, 1), (2, 2), (4, 1)]


def test_lane_0_leaves_first() -> None:
    core = make((A,))
    core.offer(ticket(1, 1), 0)
    core.offer(ticket(1, 2), 0)
    core.offer(ticket(1, 3, lane=0), 0)
    assert ids(core.next_batch(1, 0)) == [(1, 3), (1, 1), (1, 2)]


def test_a_batch_is_bounded_in_bytes_and_records() -> None:
    core = make((A,), batch_bytes=250, batch_records=1000)
    for number in range(5):
        core.offer(ticket(1, number), 0)
    assert [ids(core.next_batch(1, 0)) for _ in range(3)] == [[(1, 0), (1, 1)], [(1, 2), (1, 3)], [(1, 4)]]
    core = make((A,), batch_records=3)
    for number in range(4):
        core.offer(ticket(1, number), 0)
    assert [len(ids(core.next_batch(1, 0))) for _ in range(2)] == [3, 1]


def test_a_record_larger_than_a_batch_or_the_window_goes_alone() -> None:
    core = make((A,), batch_bytes=150)
    core.offer(ticket(1, 1), 0)
    core.offer(ticket(1, 2, size=500), 0)
    core.offer(ticket(1, 3), 0)
    assert [ids(core.next_batch(1, 0)) for _ in range(3)] == [[(1, 1)], [(1, 2)], [(1, 3)]]
    core = make((A,), window_bytes=150)
    core.offer(ticket(1, 1, size=500), 0)
    core.offer(ticket(1, 2), 0)
    assert (ids(core.next_batch(1, 0)), core.next_batch(1, 0)) == ([(1, 1)], None), "it is larger than the window, too"


def test_the_window_holds_what_is_not_resolved_and_the_server_sets_it() -> None:
    core = make((A,), batch_records=2)
    for number in range(6):
        core.offer(ticket(1, number), 0)
    core.reply(1, 0, window_bytes=300)
    assert ids(core.next_batch(1, 0)) == [(1, 0), (1, 1)]
    assert ids(core.next_batch(1, 0)) == [(1, 2)]
    assert core.next_batch(1, 0) is None
    assert Writable(1) in core.reply(1, 0, up_to=2)
    assert ids(core.next_batch(1, 0)) == [(1, 3), (1, 4)]
    assert core.next_batch(1, 0) is None


def test_batches_are_no_larger_than_the_proxy_takes() -> None:
    core = make((A,))
    for number in range(6):
        core.offer(ticket(1, number), 0)
    core.reply(1, 0, window_bytes=1 << 20, batch_records=2)
    assert ids(core.next_batch(1, 0)) == [(1, 0), (1, 1)]
    core.reply(1, 0, window_bytes=1 << 20, batch_bytes=250)
    assert len(ids(core.next_batch(1, 0))) < 4


def test_the_window_is_also_bounded_in_records() -> None:
    core = make((A,), window_records=2)
    for number in range(3):
        core.offer(ticket(1, number), 0)
    assert len(ids(core.next_batch(1, 0))) == 2
    assert core.next_batch(1, 0) is None
    core.reply(1, 0, up_to=1)
    assert ids(core.next_batch(1, 0)) == [(1, 2)]


def test_a_batch_says_whether_another_one_follows_at_once() -> None:
    def follows(core: Sender) -> list[bool]:
        found: list[bool] = []
        while (batch := core.next_batch(1, 0)) is not None:
            found.append(batch.more)
        return found

    def with_five(**options: float) -> Sender:
        core = make((A,), MESSAGES, batch_records=2, **options)
        for number in range(5):
            core.offer(ticket(1, number), 0)
        return core

    assert follows(with_five()) == [True, True, False]
    assert follows(with_five(window_records=4)) == [True, False], "the third waits for an answer"
    core = with_five()
    core.reply(1, 0, window_bytes=300)
    assert follows(core) == [True, False]
    core.reply(1, 0, up_to=3)
    assert follows(core) == [False]


def test_replies_resolve_ranges_and_failures_name_theirs() -> None:
    core = make((A,))
    sent = [ticket(1, number) for number in range(6)]
    for one in sent:
        core.offer(one, 0)
    core.next_batch(1, 0)
    why = Failure("OVERLOADED", "too fast", 250)
    effects = core.reply(1, 0, up_to=4, outcomes=[Outcome(2, 2, why)])
    assert resolved(effects) == sent[:4]
    assert [one.failure for one in sent] == [None, why, why, None, None, None]
    assert [one.resolved for one in sent] == [True] * 4 + [False] * 2
    error = why.error()
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms == 250
    assert core.counters.confirmed == 2
    assert core.counters.failures_by_code == {"OVERLOADED": 2}
    assert core.unresolved == 2


def test_a_failure_told_before_its_position_is_reached_counts_at_once() -> None:
    core = make((A,))
    sent = [ticket(1, number) for number in range(3)]
    for one in sent:
        core.offer(one, 0)
    core.next_batch(1, 0)
    core.reply(1, 0, up_to=1, outcomes=[Outcome(3, 1, Failure("OVERLOADED", "no"))])
    assert [one.resolved for one in sent] == [True, False, True]
    core.reply(1, 0, up_to=3)
    assert [one.failure is None for one in sent] == [True, True, False]


def test_what_its_only_proxy_could_pass_on_to_nobody_was_certainly_not_sent() -> None:
    why = Failure("UNAVAILABLE", "no broker")
    core = make((A,))
    once = ticket(0, 1)
    core.offer(once, 0)
    core.next_batch(1, 0)
    core.reply(1, 0, up_to=1, outcomes=[Outcome(1, 1, why)])
    assert once.failure == Failure("NOT_SENT", "no broker")
    twice = ticket(0, 2)
    core.offer(twice, 0)
    core.next_batch(1, 0)
    core.stream_died(1, 0, "reset")
    core.tick(9)
    core.next_batch(2, 9)
    core.reply(2, 9, up_to=1, outcomes=[Outcome(1, 1, why)])
    assert twice.failure is not None
    assert (twice.attempts, twice.failure.code) == (2, "OUTCOME_UNKNOWN"), "the first proxy may have passed it on before it died"


@of_both_kinds
@pytest.mark.parametrize(
    "answer",
    [
        lambda core: core.reply(1, 0, up_to=9),
        lambda core: core.reply(1, 0, outcomes=[Outcome(1, 9, Failure("X", "y"))]),
        lambda core: core.reply(1, 0, outcomes=[Outcome(1, 1 << 40, None)]),
    ],
)
def test_an_impossible_reply_is_counted_and_ends_the_stream(kind: str, answer: Callable[[Sender], list[Effect]]) -> None:
    core = make((A, B), kind)
    core.offer(ticket(2, 1, kind=kind), 0)
    core.next_batch(1, 0)
    effects = answer(core)
    assert core.counters.malformed_replies == 1
    assert CloseStream(1) in effects
    assert ids(core.next_batch(stream_to(effects, B), 0)) == [(2, 1)]


@of_both_kinds
def test_repeated_replies_and_late_ones_of_a_dead_stream_change_nothing(kind: str) -> None:
    core = make((A, B), kind)
    first, second = ticket(2, 0, kind=kind), ticket(2, 1, kind=kind)
    core.offer(first, 0)
    core.offer(second, 0)
    core.next_batch(1, 0)
    for outcome in (Outcome(0, 0, None), Outcome(2, 1, None), Outcome(2, 1, None)):
        core.reply(1, 0, outcomes=[outcome])
    assert (first.resolved, second.resolved, core.unresolved) == (False, True, 1)
    core.stream_died(1, 0, "gone")
    assert core.reply(1, 0, up_to=1) == []
    assert core.reply(77, 0, up_to=1) == []
    assert not first.resolved


def test_when_a_stream_dies_the_unresolved_go_elsewhere_in_order_before_newer_ones() -> None:
    core = make((A, B))
    for number in range(4):
        core.offer(ticket(2, number), 0)
    core.offer(ticket(3, 100), 0)  # B's own
    core.next_batch(1, 0)
    core.offer(ticket(2, 4), 0)  # queued, never sent
    core.reply(1, 0, up_to=1)
    effects = core.stream_died(1, 1, "gone")
    assert RefreshCluster() in effects
    core.offer(ticket(2, 5), 1)
    assert ids(core.next_batch(2, 1)) == [(2, 1), (2, 2), (2, 3), (2, 4), (3, 100), (2, 5)]
    assert core.counters.resent == 3
    assert core.counters.streams_died == 1


def test_while_a_proxy_is_down_only_its_keys_move() -> None:
    core = make((A, B, C))
    for key in (3, 4, 5):
        core.offer(ticket(key, key), 0)
    core.stream_died(1, 0, "gone")
    assert core.states() == {A: ProxyState.DOWN, B: ProxyState.OPEN, C: ProxyState.OPEN}
    core.offer(ticket(4, 10), 0)
    core.offer(ticket(5, 11), 0)
    assert (4, 10) in ids(core.next_batch(2, 0))
    assert (5, 11) in ids(core.next_batch(3, 0))


def test_a_key_stays_with_the_proxy_that_has_its_messages_until_they_are_resolved() -> None:
    core = make((A, B), backoff_s=0.1)
    core.offer(ticket(2, 1), 0)
    effects = core.stream_died(1, 0, "refused")
    on_b = stream_to(effects, B)
    assert ids(core.next_batch(on_b, 0)) == [(2, 1)]
    core.tick(1.0)
    assert core.states()[A] is ProxyState.IDLE
    assert core.offer(ticket(2, 2), 1.0) == [Writable(on_b)], "A is back, but key 2 has an unresolved message with B"
    assert ids(core.next_batch(on_b, 1.0)) == [(2, 2)]
    core.reply(on_b, 1.0, up_to=2)
    assert stream_to(core.offer(ticket(2, 3), 1.0), A)


def test_a_draining_proxy_finishes_and_its_keys_wait_for_that() -> None:
    core = make((A, B))
    core.offer(ticket(2, 1), 0)
    core.next_batch(1, 0)
    assert RefreshCluster() in core.reply(1, 0, draining=True)
    assert core.states()[A] is ProxyState.DRAINING
    assert core.offer(ticket(2, 2), 0) == [], "key 2 waits"
    assert stream_to(core.offer(ticket(4, 3), 0), B), "key 4 has nothing under way and goes elsewhere at once"
    assert core.next_batch(1, 0) is None
    effects = core.reply(1, 0, up_to=1)
    assert CloseStream(1) in effects
    assert ids(core.next_batch(2, 0)) == [(2, 2), (4, 3)]
    assert core.counters.resent == 0


def test_what_a_draining_proxy_refuses_goes_to_another_one() -> None:
    core = make((A, B))
    sent = [ticket(2, number) for number in range(3)]
    for one in sent:
        core.offer(one, 0)
    core.next_batch(1, 0)
    effects = core.reply(1, 0, up_to=3, outcomes=[Outcome(2, 2, Failure(Draining.code, "going"))])
    assert sent[0].resolved
    assert ids(core.next_batch(stream_to(effects, B), 0)) == [(2, 1), (2, 2)]
    core.reply(2, 0, up_to=2, outcomes=[Outcome(1, 2, Failure("OFFLINE", "nobody"))])
    assert sent[2].failure == Failure("OFFLINE", "nobody"), "the first proxy refused it unseen"


@of_both_kinds
def test_after_an_attempt_without_an_answer_only_a_look_or_a_limit_of_the_cluster_settles_a_message(kind: str) -> None:
    certain, again = PERHAPS | LOOKED | ALWAYS, Draining.code if kind == MESSAGES else OutcomeUnknown.code
    for code in sorted({error.code for error in all_errors()} - {again}):
        for attempts in (1, 2):
            core, one = make((A, B), kind), ticket(2, 1, kind=kind)
            if attempts == 1 and kind == MESSAGES and code == "UNAVAILABLE":
                continue  # it was certainly not sent
            core.offer(one, 0)
            core.next_batch(1, 0)
            if attempts == 2:  # the proxy is gone: it may have passed the message on
                core.next_batch(stream_to(core.stream_died(1, 0, "gone"), B), 0)
            core.reply(attempts, 0, outcomes=[Outcome(1, 1, Failure(code, "no", 50))])
            assert one.failure is not None
            assert one.failure.code == (code if code in certain or attempts == 1 else "OUTCOME_UNKNOWN")
            assert ("no" in one.failure.text, one.failure.retry_after_ms) == (True, 50)
            assert code in (one.failure.code, one.failure.text.split(":")[0])


def test_messages_expire_and_the_text_says_whether_they_may_have_been_delivered() -> None:
    core = make((A,), publish_timeout_s=10)
    sent = ticket(1, 1)
    core.offer(sent, 0)
    core.next_batch(1, 0)
    core.stream_died(1, 1.0, "connection refused")
    never = ticket(1, 2)
    core.offer(never, 2.0)
    assert resolved(core.tick(9.9)) == []
    assert resolved(core.tick(10.0)) == [sent]
    core.stream_died(2, 11.0, "connection refused")
    assert resolved(core.tick(12.0)) == [never]
    assert sent.failure is not None
    assert never.failure is not None
    assert isinstance(sent.failure.error(), OutcomeUnknown)
    assert isinstance(never.failure.error(), NotSent)
    assert "outcome is unknown" in sent.failure.text
    assert "a:1: connection refused" in sent.failure.text
    assert "was not sent within its time (10 s" in never.failure.text
    assert core.counters.expired == 2
    assert core.unresolved == core.unresolved_bytes == 0


def test_an_expired_message_keeps_its_position_in_the_stream() -> None:
    core = make((A,), publish_timeout_s=10)
    early, late = ticket(1, 1), ticket(1, 2)
    core.offer(early, 0)
    core.next_batch(1, 0)
    core.offer(late, 4.9)
    core.next_batch(1, 4.9)
    core.reply(1, 4.95, up_to=0)
    core.tick(4.99)
    assert resolved(core.reply(1, 9.0, up_to=1)) == [early]
    assert resolved(core.reply(1, 9.0, up_to=2)) == [late]
    assert late.failure is None


@pytest.mark.parametrize(("kind", "stall_s"), [(MESSAGES, 5.0), (MAIL, STALL_S)])
def test_a_silent_proxy_is_left(kind: str, stall_s: float) -> None:
    core = make((A, B), kind, publish_timeout_s=10, mail_timeout_s=1000)
    core.offer(ticket(2, 1, kind=kind), 0)
    core.next_batch(1, 0)
    assert core.next_deadline() == stall_s
    assert core.tick(stall_s - 0.1) == []
    effects = core.tick(stall_s)
    assert CloseStream(1) in effects
    assert ids(core.next_batch(stream_to(effects, B), stall_s)) == [(2, 1)]
    assert core.next_deadline() < NEVER


def test_an_idle_stream_is_not_taken_for_a_silent_one() -> None:
    core = make((A,), publish_timeout_s=10)
    core.offer(ticket(1, 1), 0)
    core.next_batch(1, 0)
    core.reply(1, 0.1, up_to=1)
    assert core.next_deadline() == NEVER
    assert core.tick(1000.0) == []
    core.offer(ticket(1, 2), 1000.0)
    assert core.tick(1000.1) == []
    assert ids(core.next_batch(1, 1000.1)) == [(1, 2)]


def test_back_off_doubles_up_to_its_maximum_and_ends_with_an_answer() -> None:
    core = make((A,), backoff_s=1.0, max_backoff_s=4.0, publish_timeout_s=1000)
    core.offer(ticket(1, 1), 0)
    waits = []
    now = 0.0
    for stream in range(1, 6):
        core.stream_died(stream, now, "refused")
        due = core.next_deadline()
        waits.append(due - now)
        now = due
        assert stream_to(core.tick(now), A) == stream + 1
    assert waits == [0.75, 1.5, 3.0, 3.0, 3.0]


def test_an_empty_list_of_proxies_changes_nothing() -> None:
    core = make((A, B))
    assert core.set_proxies((), 0) == []
    assert core.set_proxies((A, B), 0) == []
    assert set(core.states()) == {A, B}


def test_a_proxy_that_is_no_longer_listed_finishes_and_is_forgotten() -> None:
    core = make((A, B))
    core.offer(ticket(2, 1), 0)
    core.next_batch(1, 0)
    core.offer(ticket(2, 2), 0)
    core.set_proxies((B,), 0)
    assert core.states()[A] is ProxyState.DRAINING
    effects = core.reply(1, 0, up_to=1)
    assert ids(core.next_batch(stream_to(effects, B), 0)) == [(2, 2)]
    core.tick(1000)
    assert set(core.states()) == {B}


def test_a_new_proxy_takes_keys_that_have_nothing_under_way() -> None:
    core = make((A,))
    core.offer(ticket(1, 1), 0)
    core.next_batch(1, 0)
    core.set_proxies((A, B), 0)
    assert core.offer(ticket(1, 2), 0) == [Writable(1)]
    assert stream_to(core.offer(ticket(3, 1), 0), B)


@of_both_kinds
def test_when_every_proxy_refuses_the_login_what_waits_fails_at_once_and_what_may_have_left_is_unknown(kind: str) -> None:
    core = make((A, B), kind)
    old, young = ticket(2, 1, kind=kind), ticket(2, 2, kind=kind)
    core.offer(old, 0)
    core.next_batch(1, 0)
    core.reply(1, 0, window_bytes=1 << 20)
    effects = core.stream_died(1, 0, "reset")  # it had been taken
    core.offer(young, 0)
    second = stream_to(effects, B)
    core.next_batch(second, 0)
    assert not resolved(core.stream_died(second, 0, "UNAUTHENTICATED: over", "over")), "the other proxy may take it"
    effects = core.tick(1)
    while not (failed := resolved(effects)):  # a writer asks the same one first
        (opening,) = (effect for effect in effects if isinstance(effect, OpenStream))
        core.next_batch(opening.stream, 1)
        effects = core.stream_died(opening.stream, 1, "UNAUTHENTICATED: over", "over")
    assert set(failed) == {old, young}
    assert old.failure is not None
    assert old.failure.code == "OUTCOME_UNKNOWN"
    assert young.failure == Failure("UNAUTHENTICATED", "over")
    later = ticket(2, 3, kind=kind)
    core.offer(later, 2, 0.5)
    core.tick(2.5)
    assert later.failure == Failure("UNAUTHENTICATED", "over"), "also where its time is over before a proxy is asked again"


def test_messages_wait_while_every_proxy_is_down() -> None:
    core = make((A, B), backoff_s=1.0, max_backoff_s=1.0)
    core.offer(ticket(2, 1), 0)
    core.offer(ticket(3, 1), 0)
    core.stream_died(1, 0, "x")
    core.stream_died(2, 0, "x")
    core.offer(ticket(2, 2), 0)
    effects = core.tick(10.0 - 0.1)
    batches = [ids(core.next_batch(effect.stream, 9.9)) for effect in effects if isinstance(effect, OpenStream)]
    assert sorted(number for batch in batches for number in batch) == [(2, 1), (2, 2), (3, 1)]


def test_flush_groups_end_when_all_before_are_resolved() -> None:
    core = make((A, B))
    assert core.close_group() is None
    core.offer(ticket(2, 1), 0)
    core.next_batch(1, 0)
    first = core.close_group()
    core.offer(ticket(3, 2), 0)
    core.next_batch(2, 0)
    second = core.close_group()
    assert first is not None
    assert second is not None
    core.reply(2, 0, up_to=1)
    assert not core.group_done(second), "the first group is not resolved yet"
    core.reply(1, 0, up_to=1)
    assert core.group_done(first)
    assert core.group_done(second)
    assert core.close_group() is None


def test_the_queue_is_bounded_in_bytes_and_records() -> None:
    core = make((A,), queue_records=2, queue_bytes=2 << 20)
    core.offer(ticket(1, 1), 0)
    assert core.has_space(100)
    assert not core.has_space(2 << 20)
    assert not core.has_space(100, reserved_records=1)
    core.offer(ticket(1, 2), 0)
    assert not core.has_space(1)


def test_closing_fails_everything_with_the_text() -> None:
    core = make((A, B))
    sent = [ticket(2, 1), ticket(3, 1), ticket(2, 2)]
    core.offer(sent[0], 0)
    core.next_batch(1, 0)
    core.offer(sent[1], 0)
    core.offer(sent[2], 0)
    effects = core.abandon("closed")
    assert sorted(resolved(effects), key=sent.index) == sent
    assert {effect.stream for effect in effects if isinstance(effect, CloseStream)} == {1, 2}
    assert core.unresolved == 0


def test_a_publisher_without_proxies_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        make(())


def test_every_state_can_be_left() -> None:
    assert {state for state, _ in TRANSITIONS} == set(ProxyState)


class Cluster:
    """Proxies that take batches, answer some of them, die, drain and come back, as a seed says."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.addresses = (A, B, C)
        options = ClientOptions(batch_records=4, window_bytes=800, backoff_s=0.1, max_backoff_s=0.3, publish_timeout_s=1000)
        self.core = Sender(room_policy(options), self.addresses, self.random.random)
        self.now = 0.0
        self.taken: dict[int, list[tuple[int, int]]] = {}
        self.told: dict[int, int] = {}
        self.arrivals: list[tuple[int, int]] = []
        self.sent: list[Ticket] = []

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, OpenStream):
                self.taken[effect.stream] = []
                self.told[effect.stream] = 0
            elif isinstance(effect, CloseStream):
                self.taken.pop(effect.stream, None)

    def act(self) -> None:
        self.now += self.random.random() * 0.1
        choice = self.random.random()
        streams = list(self.taken)
        if choice < 0.4:
            key = self.random.randrange(6)
            made = ticket(key, len(self.sent))
            self.sent.append(made)
            self.apply(self.core.offer(made, self.now))
        elif choice < 0.45:
            count = self.random.randrange(1, 4)
            self.apply(self.core.set_proxies(self.random.sample(self.addresses, count), self.now))
        elif choice < 0.5 or not streams:
            self.apply(self.core.tick(self.now))
        else:
            self.turn(self.random.choice(streams), choice)

    def turn(self, stream: int, choice: float) -> None:
        if choice < 0.75:
            batch = self.core.next_batch(stream, self.now)
            if batch is not None:
                assert batch.position == len(self.taken[stream]) + 1
                self.taken[stream] += ids(batch)
                self.arrivals += ids(batch)
        elif choice < 0.95:
            self.told[stream] = self.random.randint(self.told[stream], len(self.taken[stream]))
            self.apply(self.core.reply(stream, self.now, up_to=self.told[stream], draining=self.random.random() < 0.05))
        else:
            self.apply(self.core.stream_died(stream, self.now, "killed"))
            self.taken.pop(stream, None)

    def finish(self) -> None:
        for _ in range(2000):
            self.now += 0.5
            self.apply(self.core.tick(self.now))
            for stream in list(self.taken):
                batch = self.core.next_batch(stream, self.now)
                if batch is not None:
                    self.taken[stream] += ids(batch)
                    self.arrivals += ids(batch)
                self.apply(self.core.reply(stream, self.now, up_to=len(self.taken[stream])))
            if not self.core.unresolved:
                return


@settings(max_examples=runs("PIXIU_EXAMPLES", local=25, ci=150), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_through_deaths_drains_and_changes_nothing_is_lost_and_first_arrivals_keep_the_order_of_their_key(seed: int) -> None:
    cluster = Cluster(seed)
    for _ in range(200):
        cluster.act()
    cluster.finish()
    assert cluster.core.unresolved == 0
    assert cluster.core.unresolved_bytes == 0
    assert all(one.resolved and one.failure is None for one in cluster.sent)
    firsts = list(dict.fromkeys(cluster.arrivals))
    assert len(firsts) == len(cluster.sent)
    for key in range(6):
        numbers = [number for found, number in firsts if found == key]
        assert numbers == sorted(numbers), f"key {key} arrived as {numbers}"
