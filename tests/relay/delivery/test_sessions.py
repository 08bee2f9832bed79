"""Sessions in their table, event by event; what faults make of them is in tests/sim/delivery."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pixiu.errors import ConfigurationError
from pixiu.wire.envelope import REDELIVERED, Delivery
from pixiu.wire.record import MAX_RECORD_BYTES
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.session import TABLE
from relay.delivery.states import Cause, State
from relay.delivery.window import WINDOW_BYTES
from tests.relay.delivery.bench import GATEWAY, LIMITS, UIN, Bench, record
from tests.support.effort import portion
from tests.support.for_each import for_each


@for_each("seed", portion(range(20)))
def test_a_notice_of_several_entries_does_what_notices_of_one_do(seed: int) -> None:
    rng = random.Random(seed)
    together, apart = Bench(), Bench()
    for bench in (together, apart):
        bench.online(1, 2)
    newest = longest = 0
    for number in range(300):
        newest = max(newest, 2)
        first = newest + 1 if rng.random() < 0.9 else rng.randrange(1, newest + 3)
        count = rng.choice((1, 2, 5, 20, 90))
        records = [
            b"" if rng.random() < 0.02 else record(seq, 1, 2000 if rng.random() < 0.02 else rng.choice((0, 900)))
            for seq in range(first, first + count)
        ]
        newest = max(newest, first + count - 1)
        run = ev.Notice(UIN, 1, first, [seq << 8 | 1 for seq in range(first, first + count)], records)
        for bench, notices in ((together, [run]), (apart, [run.part(at, at + 1) for at in range(count)])):
            bench.inbox[1] += range(max(first, bench.inbox[1][-1] + 1), first + count)
            bench.delivered.clear()
            bench.tell(ev.Notified(5, number, notices))
            longest = max(longest, len(bench.delivered))
        up_to, bits = newest - rng.randrange(90), rng.getrandbits(64)
        for bench in (together, apart):
            bench.take(ev.ConfirmNotices)
            bench.acknowledge(up_to, bits)
            while any(isinstance(each, ev.ReadInboxes | ev.FetchMessages) for each in bench.asked):
                if not bench.none(ev.ReadInboxes):
                    bench.answer_read()
                else:
                    bench.answer_fetch()
            if number % 10 == 0:
                bench.tick()
            bench.asked.clear()
        assert together.delivered == apart.delivered
        assert together.state() == apart.state()
        assert together.table.counters == apart.table.counters
        assert together.table.next_deadline() == apart.table.next_deadline()
    assert longest > 10
    assert together.table.counters.from_notices > 1000


def test_a_login_opens_reads_every_lane_and_sends_lane_0_first() -> None:
    bench = Bench()
    bench.inbox[0], bench.inbox[1] = [1], [3, 4]
    bench.log_in()
    assert bench.state() is State.ONLINE
    bench.answer_open(9)
    assert bench.state() is State.GETTING_IDS
    reads = bench.answer_read()
    assert [(session, [read.lane for read in each]) for _, session, each in reads.items] == [(9, [0, 1, 2, 3])]
    assert bench.state() is State.GETTING_MESSAGES
    bench.answer_fetch()
    assert bench.state() is State.SENDING
    assert bench.delivered == [
        Delivery(1 << 8, 1, UIN, 9, 0, 0, 0, record(1, 0)),
        Delivery(3 << 8 | 1, 3, UIN, 9, 0, 1, 0, record(3)),
        Delivery(4 << 8 | 1, 4, UIN, 9, 0, 1, 0, record(4)),
    ]


def test_a_session_that_is_caught_up_sends_from_the_notify_alone() -> None:
    bench = Bench()
    bench.online(1)
    bench.notify(2)
    bench.notify(3)
    assert bench.seqs() == [1, 2, 3]
    assert bench.asked == []
    assert bench.table.counters.from_notices == 2


@pytest.mark.parametrize("size", [0, LIMITS.record_bytes + 1])
def test_a_record_that_is_not_in_the_notify_or_too_large_for_it_is_fetched_and_pi_is_not_read(size: int) -> None:
    bench = Bench()
    bench.online(1)
    bench.tell(ev.Notified(5, 1, [ev.Notice(UIN, 1, 2, [2 << 8 | 1], [bytes(size)])]))
    assert bench.state() is State.GETTING_MESSAGES
    assert bench.none(ev.ReadInboxes)
    bench.answer_fetch()
    assert bench.seqs() == [1, 2]
    assert bench.state() is State.SENDING


def test_after_a_gap_the_inbox_is_read() -> None:
    bench, seq = Bench(), 3
    bench.online(1)
    bench.inbox[1].append(2)
    bench.notify(seq)
    assert bench.seqs() == [1]
    reads = bench.answer_read()
    assert reads.items[0][2] == [ev.Read(1, 1, min(64, 1 + 63 - 1))]
    bench.answer_fetch()
    assert bench.seqs() == list(range(1, seq + 1))


def test_a_notify_that_comes_again_is_nothing_new() -> None:
    bench = Bench()
    bench.online(1, 2)
    bench.notify(2)
    assert bench.seqs() == [1, 2]
    assert bench.asked == []


def test_a_notify_during_a_fetch_makes_another_one_follow() -> None:
    bench = Bench()
    bench.online()
    bench.inbox[1] = [1]
    bench.notify(2)
    bench.answer_read()
    bench.notify(3)  # not in what is being fetched
    assert bench.seqs() == []
    bench.answer_fetch()
    assert bench.seqs() == [1, 2]
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1, 2, 3]


def test_the_window_closes_and_an_acknowledgement_opens_it() -> None:
    bench = Bench()
    bench.online(*range(1, 101))
    assert bench.seqs() == list(range(1, 65))
    bench.notify(101)
    assert bench.none(ev.ReadInboxes)
    bench.acknowledge(40)
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [*range(1, 101), 101]
    bench.tick()
    assert bench.take(ev.SaveCursors).items == [ev.Acknowledgement(UIN, 0, 1, 1, 40, 0)]


def test_the_window_closes_at_so_many_bytes_too_and_the_rest_is_not_fetched_in_vain() -> None:
    bench = Bench()
    bench.body_bytes = WINDOW_BYTES // 4
    bench.online(*range(1, 41))
    assert [item.seq for item in bench.delivered] == [1, 2, 3]
    assert bench.none(ev.ReadInboxes)
    for up_to in range(1, 38):
        bench.acknowledge(up_to)
        bench.inbox[1] = list(range(up_to + 1, 41))
        reads = bench.answer_read().items[0][2]
        assert [(read.start, read.num) for read in reads] == [(up_to + 2, 1)]
        bench.answer_fetch()
        assert [item.seq for item in bench.delivered] == list(range(1, up_to + 4))
        assert bench.none(ev.ReadInboxes)


def test_the_largest_records_go_one_by_one() -> None:
    bench = Bench()
    bench.body_bytes = MAX_RECORD_BYTES - 100
    bench.online(1, 2)
    assert [item.seq for item in bench.delivered] == [1]
    bench.acknowledge(1)
    bench.inbox[1] = [2]
    bench.answer_read()
    bench.answer_fetch()
    assert [item.seq for item in bench.delivered] == [1, 2]


def test_what_is_redelivered_has_a_window_of_its_own_and_notices_keep_to_it() -> None:
    bench = Bench()
    bench.body_bytes = WINDOW_BYTES // 2 - 1024
    bench.online(1, 2)
    assert [item.seq for item in bench.delivered] == [1, 2]
    for seq in range(3, 30):
        notice = ev.Notice(UIN, 1, seq, [seq << 8 | 1], [record(seq, 1, 900)])
        bench.inbox[1].append(seq)
        bench.tell(ev.Notified(5, seq, [notice]))
        if not bench.none(ev.FetchMessages):
            bench.body_bytes = 900
            bench.answer_fetch()
    assert [item.seq for item in bench.delivered] == [1, 2, 3, 4]
    assert bench.none(ev.ReadInboxes)
    bench.body_bytes = WINDOW_BYTES // 2 - 1024
    while bench.none(ev.ReadInboxes):
        bench.tick()
    bench.answer_read()
    bench.answer_fetch()
    assert [item.seq for item in bench.delivered][4:] == [1, 2]


def test_what_is_acknowledged_just_before_a_logout_is_saved_though_the_logout_overtakes_it() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    bench.acknowledge(1, 0b10)
    bench.acknowledge(2, session=7)
    bench.acknowledge(2, lane=9)
    bench.tick()
    assert bench.take(ev.SaveCursors).items == [ev.Acknowledgement(UIN, 0, 1, 1, 1, 0b10)]
    assert bench.table.counters.acknowledgements_old == 2
    bench.acknowledge(9, 0b11)
    bench.acknowledge(1)
    bench.acknowledge(1, lane=0)
    bench.tick()
    assert bench.take(ev.SaveCursors).items == [ev.Acknowledgement(UIN, 0, 1, 1, 3, 0)], "not beyond what was sent, and not back"


def test_an_acknowledgement_of_another_session_or_lane_is_refused() -> None:
    bench = Bench()
    bench.online(1)
    bench.acknowledge(1, session=2)
    bench.acknowledge(1, lane=9)
    assert bench.table.counters.acknowledgements_old == 2
    assert bench.table.unsaved == 0


@pytest.mark.parametrize("logged_out", [False, True])
def test_a_gateway_acknowledges_nothing_for_a_device_at_another_one_though_it_guesses_the_session(logged_out: bool) -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    if logged_out:
        bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    bench.acknowledge(3, gateway=GATEWAY + 1, written=3)
    bench.tick()
    assert bench.none(ev.SaveCursors)
    assert (bench.table.unsaved, bench.table.counters.acknowledgements_of_others) == (0, 1)
    bench.acknowledge(1)
    bench.tick()
    assert bench.take(ev.SaveCursors).items == [ev.Acknowledgement(UIN, 0, 1, 1, 1, 0)]


def test_a_logout_saves_what_was_acknowledged_and_not_what_was_sent() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    bench.acknowledge(1)
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    assert bench.state() is State.OFFLINE
    assert bench.take(ev.SaveCursors).items == [ev.Acknowledgement(UIN, 0, 1, 1, 1, 0)]


def test_what_is_acknowledged_behind_a_logout_does_not_count_when_the_device_is_back() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    bench.log_in(connection=2)
    bench.acknowledge(3)
    assert bench.table.counters.acknowledgements_old == 1, "Pi would refuse it"


def test_of_the_devices_that_logged_out_the_last_ones_are_remembered() -> None:
    bench = Bench(Limits(max_leaving=1))
    bench.online(1)
    bench.tell(ev.LoggedIn([ev.Login(8, 0, GATEWAY, 1)]))
    bench.tell(ev.Opened([(bench.take(ev.OpenSessions).items[0], 5)]))
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    bench.tell(ev.LoggedOut([ev.Login(8, 0, GATEWAY, 1)]))
    bench.acknowledge(1)
    assert bench.table.counters.acknowledgements_old == 1


def test_a_newer_connection_opens_a_new_session_and_what_it_gets_again_is_marked() -> None:
    bench = Bench()
    bench.online(1, 2)
    bench.acknowledge(1)
    bench.inbox[1] = [2, 3]
    bench.log_in(connection=2)
    assert [type(effect) for effect in bench.asked] == [ev.SaveCursors, ev.OpenSessions]
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))  # of the old connection
    bench.log_in(connection=1)
    bench.answer_open(2)
    bench.answer_read()
    bench.answer_fetch()
    assert [(mail.seq, mail.session, mail.flags) for mail in bench.delivered[2:]] == [(2, 2, REDELIVERED), (3, 2, 0)]


def test_a_device_that_is_there_and_gets_no_mail_is_told_of_to_pi_now_and_then() -> None:
    bench = Bench(replace(LIMITS, seen_s=600.0))
    bench.online()
    told: list[float] = []
    end = bench.now + 2000.0
    while bench.now < end:
        bench.tick()
        if not bench.none(ev.ReadInboxes):
            bench.answer_read()
        if not bench.none(ev.SaveCursors):
            save = bench.take(ev.SaveCursors)
            assert save.items == [ev.Acknowledgement(UIN, 0, 1, 0, 0, 0)]
            bench.tell(ev.Saved(save.number, [None]))
            told.append(bench.now)
    assert len(told) == 3
    assert bench.state() is State.SENDING


@pytest.mark.slow
def test_thousands_that_log_in_at_once_go_a_few_at_a_time_in_batches() -> None:
    bench = Bench(Limits(opening=50))
    bench.tell(ev.LoggedIn([ev.Login(uin, 0, GATEWAY, 1) for uin in range(1, 3001)]))
    opened: list[int] = []
    rounds = 0
    while not bench.none(ev.OpenSessions):
        items = bench.take(ev.OpenSessions).items
        assert len(items) <= 50
        assert bench.table.busy <= 50
        opened += [asked.uin for asked in items]
        bench.tell(ev.Opened([(asked, 1) for asked in items]))
        bench.answer_read()
        rounds += 1
    assert (opened, rounds) == (list(range(1, 3001)), 60)
    assert bench.table.waiting == 0


def test_an_open_session_does_not_wait_behind_logins() -> None:
    bench = Bench(Limits(opening=1))
    bench.online(1)
    bench.tell(ev.LoggedIn([ev.Login(uin, 0, GATEWAY, 1) for uin in range(100, 200)]))
    bench.take(ev.OpenSessions)
    bench.notify(3)
    assert not bench.none(ev.ReadInboxes)


def test_a_user_who_is_served_elsewhere_is_left_alone() -> None:
    bench = Bench()
    bench.online(1)
    bench.acknowledge(1)
    bench.mine = False
    bench.tell(ev.OwnersChanged())
    assert bench.state() is State.OFFLINE
    assert len(bench.take(ev.SaveCursors).items) == 1
    bench.log_in(connection=5)
    assert bench.state() is State.OFFLINE
    bench.tell(ev.Notified(5, 77, [ev.Notice(UIN, 1, 2, [2 << 8], [b""])]))
    assert bench.take(ev.ConfirmNotices) == ev.ConfirmNotices(5, 77, (UIN,))


def test_a_gateways_end_and_a_drain_end_sessions() -> None:
    bench = Bench()
    bench.online(1)
    bench.tell(ev.GatewayLost(GATEWAY + 1))
    assert bench.state() is State.SENDING
    bench.tell(ev.GatewayLost(GATEWAY))
    assert bench.state() is State.OFFLINE
    bench.log_in(connection=2)
    bench.tell(ev.Stopping())
    assert (bench.state(), bench.table.busy, bench.table.waiting) == (State.OFFLINE, 0, 0)


def test_every_device_of_a_user_gets_a_notify() -> None:
    bench = Bench()
    for device in (0, 1):
        bench.log_in(device=device)
        bench.answer_open()
        bench.answer_read()
    bench.notify(1)
    assert [(mail.device, mail.seq) for mail in bench.delivered] == [(0, 1), (1, 1)]


def test_a_login_beyond_the_bound_is_refused() -> None:
    bench = Bench(Limits(max_sessions=1))
    bench.log_in(device=0)
    bench.log_in(device=1)
    assert (len(bench.table.sessions), bench.table.counters.refused) == (1, 1)


def test_what_is_remembered_of_the_gone_is_bounded() -> None:
    bench = Bench(Limits(max_remembered=2))
    logins = [ev.Login(UIN, device, GATEWAY, 1) for device in range(5)]
    bench.tell(ev.LoggedIn(logins))
    bench.tell(ev.LoggedOut(logins))
    assert len(bench.table._remembered) == 2


def test_every_state_can_end_and_every_waiting_state_can_fail() -> None:
    for state in set(State) - {State.OFFLINE}:
        for cause in (Cause.LOGOUT, Cause.FENCED, Cause.REFUSED):
            assert TABLE[state, cause][0] is State.OFFLINE
        assert TABLE[state, Cause.LOGIN][0] is State.ONLINE
    for state in (State.ONLINE, State.GETTING_IDS, State.GETTING_MESSAGES):
        assert (state, Cause.FAILED) in TABLE
    assert {cause for state, cause in TABLE if state is State.OFFLINE} == {Cause.LOGIN, Cause.HEARTBEAT}
    assert {cause for _, cause in TABLE} == set(Cause)


def test_limits_name_what_is_wrong() -> None:
    Limits().validate()
    with pytest.raises(ConfigurationError, match="fetching = 0"):
        Limits(fetching=0).validate()


def test_a_notice_without_a_number_is_a_read_at_once_and_another_one_a_moment_later() -> None:
    bench = Bench()
    bench.online(1)
    some = ev.Notified(5, 9, [ev.Notice(UIN, 1, 0, [2 << 8 | 1], [b""])])
    bench.tell(some)
    assert bench.take(ev.ConfirmNotices) == ev.ConfirmNotices(5, 9, ())
    bench.answer_read()  # the entry is not in the inbox yet
    assert bench.state() is State.SENDING
    bench.inbox[1].append(2)
    assert bench.table.next_deadline() == bench.now + LIMITS.reread_s
    bench.tick()
    bench.answer_read()
    bench.answer_fetch()
    assert [delivery.seq for delivery in bench.delivered] == [1, 2]
    assert bench.table.next_deadline() > bench.now + LIMITS.reread_s


def test_a_notice_without_a_number_counts_whatever_the_session_does() -> None:
    bench = Bench()
    some = ev.Notified(5, 9, [ev.Notice(UIN, 1, 0, [2 << 8 | 1], [b""])])
    bench.log_in()
    bench.tell(some)
    bench.answer_open()
    bench.tell(some)
    bench.inbox[1] = [1]
    bench.answer_read()
    bench.tell(some)
    bench.answer_fetch()
    assert bench.state() is State.GETTING_IDS  # what came while it fetched may not have been in what it read
    bench.answer_read()
    bench.tick()
    assert not bench.none(ev.ReadInboxes)


def test_a_session_that_was_taken_over_reads_once_more() -> None:
    bench = Bench()
    bench.tell(ev.LoggedIn([ev.Login(UIN, 0, GATEWAY, 1)], taken_over=True))
    bench.answer_open()
    bench.answer_read()
    assert bench.state() is State.SENDING
    bench.inbox[1] = [1]  # the former owner was told
    bench.tick()
    assert bench.now == 100.0 + LIMITS.settle_s
    bench.answer_read()
    bench.answer_fetch()
    assert [delivery.seq for delivery in bench.delivered] == [1]
    bench.tell(ev.LoggedIn([ev.Login(UIN, 0, GATEWAY, 2)]))
    bench.answer_open()
    bench.answer_read()
    bench.answer_fetch()
    (session,) = bench.table.sessions.values()
    assert session.deadline > bench.now + LIMITS.settle_s
