"""The verdict: which missing deliveries a death explains, and what breaks a promise."""

from __future__ import annotations

from pixiu.ids import UIN, RoomID
from tools.load.ledger import NOT_YET, Ledger, Missing
from tools.load.payload import encode_payload
from tools.load.verdict import IN_FLIGHT_US, Cause, Death, Hop, cause_of, implied_losses, judge, verdict_json

ROOM = RoomID(5)
A, B, C = UIN(1), UIN(2), UIN(3)
SECOND = 1_000_000


def missing(sent_us: int, acknowledged_us: int = NOT_YET, *, uin: UIN = B, refused: bool = False, whole: bool = True) -> Missing:
    return Missing(0, ROOM, uin, A, sent_us, acknowledged_us, refused, whole)


def death(at_us: int, rejoin_us: int | None, users: frozenset[UIN] = frozenset()) -> Death:
    return Death("broker 0/1", "broker", 0, 77, at_us, rejoin_us, users)


def test_a_death_explains_what_was_unacknowledged_then_or_sent_until_the_rejoin_and_nothing_else() -> None:
    window = [death(100 * SECOND, 110 * SECOND)]
    assert cause_of(missing(99 * SECOND), window)[0] is Cause.UNACKNOWLEDGED
    assert cause_of(missing(99 * SECOND, 101 * SECOND), window)[0] is Cause.UNACKNOWLEDGED
    assert cause_of(missing(99 * SECOND, 100 * SECOND - 1), window)[0] is Cause.UNEXPLAINED
    assert cause_of(missing(100 * SECOND, 101 * SECOND), window)[0] is Cause.BETWEEN
    assert cause_of(missing(110 * SECOND, 111 * SECOND), window)[0] is Cause.BETWEEN
    assert cause_of(missing(110 * SECOND + 1, 111 * SECOND), window)[0] is Cause.UNEXPLAINED


def test_without_a_rejoin_the_window_stays_open() -> None:
    assert cause_of(missing(900 * SECOND, 901 * SECOND), [death(1, None)])[0] is Cause.BETWEEN


def test_of_two_deaths_the_one_that_explains_is_named() -> None:
    first, second = death(10 * SECOND, 20 * SECOND), death(50 * SECOND, 60 * SECOND)
    assert cause_of(missing(55 * SECOND, 56 * SECOND), [first, second]) == (Cause.BETWEEN, second)
    assert cause_of(missing(30 * SECOND, 31 * SECOND), [first, second]) == (Cause.UNEXPLAINED, None)


def test_a_refused_message_is_told_and_not_unexplained() -> None:
    assert cause_of(missing(1, refused=True), [])[0] is Cause.REFUSED
    assert cause_of(missing(99 * SECOND, refused=True), [death(100 * SECOND, None)])[0] is Cause.UNACKNOWLEDGED


def test_a_gateways_death_explains_only_what_concerns_its_users() -> None:
    window = [death(100 * SECOND, 110 * SECOND, frozenset([B]))]
    accepted = 100 * SECOND - IN_FLIGHT_US
    assert cause_of(missing(accepted - 1, accepted), window)[0] is Cause.IN_FLIGHT
    assert cause_of(missing(accepted - 2, accepted - 1), window)[0] is Cause.UNEXPLAINED
    assert cause_of(missing(105 * SECOND, 106 * SECOND, uin=C), window)[0] is Cause.UNEXPLAINED
    published_there = [death(100 * SECOND, 110 * SECOND, frozenset([A]))]
    assert cause_of(missing(99 * SECOND, uin=C), published_there)[0] is Cause.UNACKNOWLEDGED


def test_implied_losses_count_records_not_deliveries() -> None:
    lost = [missing(1, uin=A), missing(1, uin=B), missing(1, uin=A, whole=False)._replace(number=1)]
    lost += [missing(1, uin=user, whole=False)._replace(number=2) for user in (A, B, C)]
    assert implied_losses(lost, lambda uin: int(uin) % 2) == (1, 3)


def ledger_with(delivered: int, of: int = 10) -> Ledger:
    ledger = Ledger()
    for uin in (A, B):
        ledger.joining(ROOM, uin, 0)
        ledger.joined(ROOM, uin)
    for number in range(of):
        ledger.send(number, ROOM, A, b"x", 100 + number)
        ledger.acknowledged(number, 200)
        if number < delivered:
            for uin in (A, B):
                ledger.deliver(ROOM, uin, encode_payload(number, 100 + number, b"x"), 5_100 + number)
    return ledger


def test_a_whole_run_keeps_every_promise() -> None:
    verdict = judge(ledger_with(10))
    assert (verdict.sent, verdict.expected, verdict.delivered, verdict.lost, verdict.exit_code) == (10, 20, 20, 0, 0)
    assert 4.9 <= verdict.latency_p50_ms <= 5.2


def test_unexplained_losses_break_the_promise_and_are_named() -> None:
    verdict = judge(ledger_with(9))
    assert (verdict.lost, verdict.exit_code) == (2, 1)
    assert verdict.causes["unexplained"] == 2
    assert verdict.examples == ["message 9 to 1", "message 9 to 2"]


def test_losses_that_the_links_counted_are_reported_as_such() -> None:
    counted = judge(ledger_with(9), hops=[Hop("proxy", "broker", 10, 9, 1)])
    assert (counted.exit_code, counted.causes["link_gap"]) == (0, 2)
    elsewhere = judge(ledger_with(8), hops=[Hop("proxy", "broker", 10, 9, 1)])
    assert (elsewhere.exit_code, elsewhere.causes["unexplained"]) == (1, 4), "two records were lost, one was counted"


def test_a_death_explains_a_run_and_the_report_counts_by_process() -> None:
    window = death(105, 300)
    verdict = judge(ledger_with(8), [window])
    assert verdict.exit_code == 0
    report = verdict_json(verdict)
    assert report["lost"] == report["explained"] == 4
    assert report["deaths"][0]["missing"] == {"between": 4}  # type: ignore[index]


def test_repeated_alien_and_damaged_deliveries_break_promises_even_with_a_death() -> None:
    for number, uin, text in ((0, A, b"x"), (0, C, b"x"), (0, A, b"y")):
        ledger = ledger_with(10)
        ledger.deliver(ROOM, uin, encode_payload(number, 100, text), 9_000)
        assert judge(ledger, [death(1, None)]).exit_code == 1


def test_unanswered_messages_break_the_promise_only_without_a_death() -> None:
    ledger = ledger_with(10)
    ledger.send(10, ROOM, A, b"x", 500)
    for uin in (A, B):
        ledger.deliver(ROOM, uin, encode_payload(10, 500, b"x"), 600)
    assert judge(ledger).broken == ["1 messages got neither an acceptance nor an error"]
    assert judge(ledger, [death(1, None)]).exit_code == 0


def test_accepted_mail_must_arrive_whoever_dies_and_refused_mail_need_not() -> None:
    ledger = ledger_with(8)
    ledger.send(10, ROOM, A, b"x", 500)
    ledger.refused(10, "INBOX_FULL")
    ledger.send(11, ROOM, A, b"x", 500)
    verdict = judge(ledger, [death(1, None)], mail=True)
    assert verdict.broken == ["4 deliveries were accepted and have not arrived"]
    assert (verdict.confirmed, verdict.refused, verdict.unacknowledged) == (10, 1, 1)
    assert [verdict.causes[cause.value] for cause in (Cause.REFUSED, Cause.UNACKNOWLEDGED, Cause.UNEXPLAINED)] == [2, 2, 4]
    assert judge(ledger, mail=True).broken[-1] == "1 messages got neither an acceptance nor an error"


def test_mail_that_comes_again_breaks_the_promise_unless_a_process_died() -> None:
    for again in (False, True):
        ledger = ledger_with(10)
        ledger.deliver(ROOM, A, encode_payload(3, 103, b"x"), 9_000, again=again)
        assert judge(ledger, mail=True).broken == ["1 deliveries came more than once"]
        assert judge(ledger, [death(1, None)], mail=True).broken == []


def test_gaps_and_unread_mail_break_promises_even_with_a_death() -> None:
    assert len(judge(ledger_with(10), [death(1, None)], mail=True, unread=2, gaps=1).broken) == 2
