"""Deliveries that failed or were not answered: time-outs, pauses, what is sent again and when."""

from __future__ import annotations

import pytest

from pixiu.wire.envelope import GAP, REDELIVERED
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.states import State
from relay.delivery.window import WINDOW_BYTES
from tests.relay.delivery.bench import GATEWAY, LIMITS, UIN, Bench, record


def test_an_answer_to_an_older_question_is_void() -> None:
    bench = Bench()
    bench.log_in(connection=1)
    old = bench.take(ev.OpenSessions)
    bench.log_in(connection=2)
    bench.tell(ev.Opened([(old.items[0], 5)]))
    assert bench.state() is State.ONLINE
    assert bench.table.counters.answers_late == 1


def test_an_answer_to_a_session_that_ended_is_void_for_the_next_one() -> None:
    bench = Bench()
    bench.log_in()
    old = bench.take(ev.OpenSessions)
    bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, 1)]))
    bench.log_in(connection=2)
    bench.tell(ev.Opened([(old.items[0], 5)]))
    assert bench.state() is State.ONLINE
    bench.answer_open(6)
    assert bench.table.sessions[ev.Device(UIN, 0)].number == 6


def test_an_answer_of_another_length_is_a_failure() -> None:
    bench = Bench()
    bench.log_in()
    bench.answer_open()
    asked = bench.take(ev.ReadInboxes).items[0][0]
    bench.tell(ev.Listed([(asked, [])]))
    assert (bench.state(), bench.table.busy) == (State.GETTING_IDS, 0)


@pytest.mark.parametrize("state", [State.ONLINE, State.GETTING_IDS, State.GETTING_MESSAGES])
def test_every_waiting_state_has_a_timeout_and_tries_again(state: State) -> None:
    bench = Bench()
    bench.inbox[1] = [1]
    bench.log_in()
    if state is not State.ONLINE:
        bench.answer_open()
    if state is State.GETTING_MESSAGES:
        bench.answer_read()
    assert bench.state() is state
    asked_at = bench.now
    bench.asked.clear()
    while not bench.asked:
        bench.tick()
        assert bench.table.busy == 0 or bench.asked  # the slot is free while it pauses
    assert LIMITS.call_timeout_s < bench.now - asked_at < LIMITS.call_timeout_s + LIMITS.max_pause_s
    assert bench.table.counters.failures == 1
    if state is State.ONLINE:
        bench.answer_open()
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1]


def test_pauses_grow_and_stay_bounded() -> None:
    bench = Bench()
    bench.log_in()
    pauses = []
    for _ in range(12):
        asked = bench.take(ev.OpenSessions).items[0]
        bench.tell(ev.Opened([(asked, ev.Failure.LATER)]))
        before = bench.now
        while bench.none(ev.OpenSessions):
            bench.tick()
        pauses.append(bench.now - before)
    assert LIMITS.pause_s / 2 <= pauses[0] <= LIMITS.pause_s
    assert LIMITS.max_pause_s / 2 <= pauses[-1] <= LIMITS.max_pause_s


@pytest.mark.parametrize("where", ["read", "save"])
def test_a_fenced_session_ends_and_a_heartbeat_begins_again_later(where: str) -> None:
    bench = Bench()
    bench.online(1)
    if where == "read":
        bench.notify(3)
        asked = bench.take(ev.ReadInboxes).items[0][0]
        bench.tell(ev.Listed([(asked, ev.Failure.FENCED)]))
    else:
        bench.acknowledge(1)
        bench.tick()
        bench.tell(ev.Saved(bench.take(ev.SaveCursors).number, [ev.Failure.FENCED]))
    assert bench.state() is State.OFFLINE
    assert bench.table.counters.fenced == 1
    again = [ev.Login(UIN, 0, GATEWAY, 1)]
    bench.tell(ev.StillThere(again), after=LIMITS.fenced_pause_s / 2)
    assert bench.state() is State.OFFLINE
    bench.tell(ev.StillThere(again), after=LIMITS.fenced_pause_s)
    assert bench.state() is State.ONLINE


def test_a_refusal_of_an_old_session_does_not_end_a_new_one() -> None:
    bench = Bench()
    bench.online(1)
    bench.acknowledge(1)
    bench.log_in(connection=2)
    save = bench.take(ev.SaveCursors)
    bench.answer_open(2)
    bench.tell(ev.Saved(save.number, [ev.Failure.FENCED]))
    assert bench.state() is State.GETTING_IDS


def test_what_is_not_yet_there_holds_its_lane_and_no_other() -> None:
    bench = Bench()
    bench.inbox[0], bench.inbox[1] = [1, 2, 3], [1]
    bench.log_in()
    bench.answer_open()
    bench.answer_read()
    asked, ids = bench.take(ev.FetchMessages).items[0]
    assert [msg_id & 3 for msg_id in ids] == [0, 0, 0, 1]
    bench.tell(ev.Fetched([(asked, [record(1, 0), ev.Missing.NOT_YET, record(3, 0), record(1, 1)])]))
    assert [(mail.lane, mail.seq) for mail in bench.delivered] == [(0, 1), (1, 1)]
    bench.notify(2, lane=1)
    assert bench.seqs() == [1, 1, 2]
    bench.tick()
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1, 1, 2, 2, 3]


def test_what_is_gone_is_told_by_a_marker() -> None:
    bench = Bench()
    bench.inbox[1] = [1, 2, 3]
    bench.log_in()
    bench.answer_open()
    bench.answer_read()
    bench.answer_fetch({2: ev.Missing.GONE})
    assert [(mail.seq, mail.flags, mail.record) for mail in bench.delivered] == [
        (1, 0, record(1)),
        (2, GAP, b""),
        (3, 0, record(3)),
    ]
    assert bench.table.counters.gaps == 1


@pytest.mark.parametrize("rest", [[], [ev.Missing.FULL, ev.Missing.FULL]])
def test_an_answer_that_was_full_is_asked_for_again_from_there(rest: list[bytes | ev.Missing]) -> None:
    bench = Bench()
    bench.inbox[1] = [1, 2, 3]
    bench.log_in()
    bench.answer_open()
    bench.answer_read()
    asked, _ = bench.take(ev.FetchMessages).items[0]
    bench.tell(ev.Fetched([(asked, [record(1), *rest])]))
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1, 2, 3]


def test_a_broken_stream_holds_everything_and_then_sends_it_again() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    bench.acknowledge(1)
    bench.tell(ev.StreamBroken(GATEWAY))
    bench.notify(4)
    assert bench.none(ev.ReadInboxes)
    bench.tell(ev.StreamReady(GATEWAY))
    bench.answer_read()
    bench.answer_fetch()
    assert [(mail.seq, mail.flags) for mail in bench.delivered[3:]] == [(2, REDELIVERED), (3, REDELIVERED), (4, 0)]


def test_a_stream_of_which_nothing_is_heard_is_tried_again() -> None:
    bench = Bench(Limits(resend_s=5.0, hold_s=20.0))
    bench.online(1)
    bench.tell(ev.StreamBroken(GATEWAY))
    broken_at = bench.now
    while bench.none(ev.ReadInboxes):
        bench.tick()
    assert 20.0 <= bench.now - broken_at <= 120.0


def test_what_is_not_acknowledged_is_sent_again_ever_more_seldom() -> None:
    bench = Bench()
    bench.online(1)
    times = []
    for _ in range(5):
        before = bench.now
        while bench.none(ev.FetchMessages):
            bench.tick()
            if not bench.none(ev.ReadInboxes):
                bench.answer_read()
        bench.answer_fetch()
        times.append(bench.now - before)
    assert [round(each) for each in times] == [10, 20, 40, 60, 60]
    assert bench.seqs() == [1] * 6
    assert {mail.flags for mail in bench.delivered[1:]} == {REDELIVERED}


def test_a_gateway_that_is_asked_says_what_is_missing_and_nothing_else_is_sent_again() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    asked_at = bench.now
    while bench.none(ev.AskWritten):
        bench.tick()
    assert bench.take(ev.AskWritten) == ev.AskWritten(GATEWAY, [ev.DeviceLane(UIN, 0, 1, 1)])
    assert bench.now - asked_at == LIMITS.resend_s / 2
    bench.acknowledge(0, written=2)
    while bench.none(ev.ReadInboxes):
        bench.tick()
    assert bench.now - asked_at == LIMITS.resend_s
    bench.answer_read()
    bench.answer_fetch()
    assert [(mail.seq, mail.flags) for mail in bench.delivered[3:]] == [(3, REDELIVERED)]
    assert bench.table.counters.asked == 1


def test_a_device_that_acknowledges_nothing_costs_no_fetch_while_it_is_connected() -> None:
    bench = Bench()
    bench.online(1, 2, 3)
    end = bench.now + 1000.0
    asked = 0
    while bench.now < end:
        bench.tick()
        if not bench.none(ev.AskWritten):
            bench.take(ev.AskWritten)
            asked += 1
            bench.acknowledge(0, written=3)
        if not bench.none(ev.ReadInboxes):  # by the poll
            bench.answer_read()
        assert bench.none(ev.FetchMessages)
    assert bench.seqs() == [1, 2, 3]
    assert 10 <= asked <= 20, "ever more seldom"
    bench.notify(4)
    bench.acknowledge(4)
    assert bench.seqs() == [1, 2, 3, 4]


def test_a_device_that_let_its_connection_end_without_an_acknowledgement_is_sent_little_until_it_acknowledges() -> None:
    bench = Bench()
    bench.body_bytes = WINDOW_BYTES // 4
    bench.online(*range(1, 9))
    assert bench.seqs() == [1, 2, 3]
    silent_until = bench.now + LIMITS.resend_s
    while bench.now < silent_until:
        bench.tick()
        if not bench.none(ev.AskWritten):
            bench.take(ev.AskWritten)
            bench.acknowledge(0, written=3)
    for connection in (2, 3):
        bench.tell(ev.LoggedOut([ev.Login(UIN, 0, GATEWAY, connection - 1)]))
        bench.delivered.clear()
        bench.log_in(connection)
        bench.answer_open(connection)
        bench.answer_read()
        bench.answer_fetch()
        assert bench.seqs() == [1], "and no more while it is silent, however often it connects"
        assert bench.none(ev.ReadInboxes)
    bench.acknowledge(1, session=3)
    bench.inbox[1] = list(range(2, 9))
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1, 2, 3, 4]


def test_a_lost_notify_is_found_by_a_poll() -> None:
    bench = Bench()
    bench.online()
    bench.inbox[1] = [1]
    read_at = bench.now
    while bench.none(ev.ReadInboxes):
        bench.tick()
    assert LIMITS.poll_s / 2 <= bench.now - read_at <= LIMITS.poll_s
    bench.answer_read()
    bench.answer_fetch()
    assert bench.seqs() == [1]
