"""Big rooms in the proxy: 64 copies, their pace, what is refused, and when a publisher is told (PiXiu §2.2.2)."""

from __future__ import annotations

import pytest

from cluster.core.contract import NEVER, SendRecords, Settled, Tick
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VROOMS, VRooms, vrooms_of
from pixiu.wire.record import Kind, encode, with_key
from proxy import events as ev
from proxy.core import Core
from proxy.records.big_rooms import MAX_SWEEP_BYTES
from tests.proxy.driver import forward, publish, replies, sends, settle

A, B = EndpointID(1001), EndpointID(1002)
BROKERS = ev.BrokersChanged(2, (ev.Replica(A, 0), ev.Replica(B, 1)))
BIG = 1000


def room(key: int, number: int, type: int = 64, body: bytes = b"payload") -> bytes:
    return encode(Kind.ROOM, key, body, number, type=type)


def core_with(brokers: ev.BrokersChanged = BROKERS, vrooms_per_s: float = 250.0) -> Core:
    core = Core(max_record_bytes=1 << 20, vrooms=VRooms(BIG, BIG + 10), vrooms_per_s=vrooms_per_s)
    core.step(brokers, 0.0)
    core.step(ev.PublisherOpened(1), 0.0)
    return core


def run(
    core: Core, effects: list[ev.Effect], now: float = 0.0, handled: bool = True
) -> tuple[list[tuple[float, SendRecords]], float]:
    """Let time pass until nothing is left to do. Returns what was sent and when, and the end; settles at once."""
    sent: list[tuple[float, SendRecords]] = []
    for _ in range(100_000):
        found = sends(effects)
        sent += [(now, send) for send in found]
        if found:
            effects = settle(core, found, now, handled=handled)
            run_replies.extend(replies(effects))
            continue
        due = core.next_deadline()
        if due == NEVER:
            return sent, now
        now = max(due, now)
        effects = core.step(Tick(), now)
        run_replies.extend(replies(effects))
    raise AssertionError("it does not end")


run_replies: list[ev.Reply] = []


@pytest.fixture(autouse=True)
def _no_replies() -> None:
    run_replies.clear()


def test_a_message_leaves_once_for_each_vroom_with_the_same_id() -> None:
    core, record = core_with(), room(BIG, 7)
    sent, _ = run(core, publish(core, [record]))
    copies = [copy for _, send in sent for copy in send.records]
    assert copies == [with_key(record, vroom) for vroom in vrooms_of(BIG)]
    assert all(send.peer == (A, B)[int.from_bytes(send.records[0][24:32], "little") % 2] for _, send in sent)
    assert run_replies == [ev.Reply(1, 1, [])]
    assert core.under_way == 0


def test_the_publisher_is_told_when_all_copies_are_settled_and_not_before() -> None:
    core = core_with()
    effects = publish(core, [room(BIG, 7)])
    tokens: list[int] = []
    now = 0.0
    while (due := core.next_deadline()) != NEVER:
        now = due
        tokens += [send.token for send in sends(effects)]
        effects = core.step(Tick(), now)
    tokens += [send.token for send in sends(effects)]
    assert len(tokens) == VROOMS
    assert core.step(Settled([(token, True) for token in tokens[1:]]), now) == []
    assert core.step(Settled([(tokens[0], True)]), now) == [ev.Reply(1, 1, [])]


def test_copies_keep_the_pace_and_other_rooms_overtake_them() -> None:
    core = core_with(vrooms_per_s=250.0)
    effects = publish(core, [room(BIG, 1), room(4, 2)])
    assert next(send.records for send in sends(effects)) == [room(4, 2)]
    assert len(sends(effects)) == 2
    (ordinary,) = sends(publish(core, [room(5, 3)], 3, now=0.001))
    assert ordinary.records == [room(5, 3)]
    sent, end = run(core, effects)
    assert end == pytest.approx(VROOMS / 250.0, rel=0.1)
    for start in range(0, 250, 10):
        window = [at for at, send in sent if start / 1000 <= at < start / 1000 + 0.1]
        assert len(window) <= 0.1 * 250 + 3


def test_a_late_timer_does_not_bring_a_burst() -> None:
    core = core_with(vrooms_per_s=250.0)
    publish(core, [room(BIG, 1)])
    assert len(sends(core.step(Tick(), 100.0))) <= 2


def test_messages_that_wait_share_a_sweep_and_keep_their_order() -> None:
    core = core_with()
    records = [room(BIG, number) for number in range(1, 21)]
    effects = publish(core, records[:1])
    for number in range(1, 20):
        effects += publish(core, [records[number]], number + 1)
    sent, end = run(core, effects)
    for vroom in vrooms_of(BIG):
        got = [copy for _, send in sent for copy in send.records if copy[24:32] == vroom.to_bytes(8, "little")]
        assert got == [with_key(record, vroom) for record in records]
    assert end < 3 * VROOMS / 250.0
    assert run_replies[-1] == ev.Reply(1, 20, [])


def test_lane_0_leaves_first() -> None:
    core = core_with()
    publish(core, [room(BIG, 1)])
    publish(core, [room(BIG, 2)], 2)
    effects = publish(core, [room(BIG, 3, type=0)], 3)
    sent, _ = run(core, effects)
    last = [send for _, send in sent][-2:]
    assert [(send.lane, len(send.records)) for send in last] == [(0, 1), (1, 1)]


def test_big_rooms_take_turns() -> None:
    core = core_with()
    effects = publish(core, [room(BIG, number) for number in range(1, 11)])
    effects += publish(core, [room(BIG + 1, 11)], 11)
    sent, _ = run(core, effects)
    other = [at for at, send in sent if send.records[0][24:32] == ((BIG + 1) * VROOMS + 63).to_bytes(8, "little")]
    assert other
    assert other[0] < 2.2 * VROOMS / 250.0


def test_a_copy_that_is_lost_makes_the_position_fail_once() -> None:
    core = core_with()
    effects = publish(core, [room(BIG, 1), room(4, 2), room(BIG, 3)])
    run(core, effects, handled=False)
    assert [reply.up_to for reply in run_replies] == [3]
    assert [(f.first, f.last, f.code) for f in run_replies[0].failures] == [(2, 2, "DROPPED"), (1, 1, "DROPPED"), (3, 3, "DROPPED")]
    assert core.counters.records_dropped == 3


def test_what_has_no_broker_is_told() -> None:
    core = core_with(ev.BrokersChanged(2, (ev.Replica(A, 0),)))
    sent, _ = run(core, publish(core, [room(BIG, 1)]))
    assert len(sent) == VROOMS // 2
    assert [f.code for f in run_replies[0].failures] == ["DROPPED"]
    (reply,) = replies(publish(core_with(ev.BrokersChanged(2, ())), [room(BIG, 1)]))
    assert reply.failures[0].code == "UNAVAILABLE"


def test_a_vrooms_own_number_is_refused_also_when_the_room_is_busy() -> None:
    core = core_with()
    run(core, publish(core, [room(BIG, 1)]))
    (reply,) = replies(publish(core, [room(BIG * VROOMS + 5, 2)], 2))
    assert [(f.first, f.code) for f in reply.failures] == [(2, "INVALID_ARGUMENT")]
    assert f"publish to the big room {BIG}" in reply.failures[0].text


def test_a_large_message_is_refused_and_the_rest_of_the_batch_goes_on() -> None:
    core = core_with()
    effects = publish(core, [room(BIG, 1, body=b"x" * MAX_SWEEP_BYTES), room(BIG, 2)])
    run(core, effects)
    assert [(f.first, f.last, f.code) for f in run_replies[0].failures] == [(1, 1, "RECORD_TOO_LARGE")]


def test_too_much_is_refused_with_a_retry_after_and_another_room_still_gets_in() -> None:
    core = core_with()
    effects = publish(core, [room(BIG, number, body=b"x" * 8000) for number in range(1, 31)])
    assert 0 < core.counters.records_over_rate < 30
    before = core.counters.records_over_rate
    effects += publish(core, [room(BIG + 1, 31)], 31)
    _, end = run(core, effects)
    assert core.counters.records_over_rate == before
    first = run_replies[0].failures[-1]
    assert (first.last, first.code) == (30, "OVERLOADED")
    assert first.retry_after_ms > 0
    assert f"try again in {first.retry_after_ms} ms" in first.text
    assert end < 4.0


def test_what_gateways_forward_is_split_too_and_nobody_is_told() -> None:
    core, record = core_with(), room(BIG, 1)
    sent, _ = run(core, forward(core, record))
    assert sum(len(send.records) for _, send in sent) == VROOMS
    assert run_replies == []


def test_copies_wait_for_a_change_of_routes_and_go_to_the_new_brokers() -> None:
    core = core_with(ev.BrokersChanged(1, (ev.Replica(A, 0),)))
    (first, *_) = sends(publish(core, [room(BIG, 1)]))
    core.step(ev.BrokersChanged(1, (ev.Replica(A, 0), ev.Replica(B, 0))), 0.01)
    assert sends(core.step(Tick(), 0.05)) == []
    effects = settle(core, [first], 0.06)
    sent, _ = run(core, effects, now=0.06)
    assert {send.peer for _, send in sent} == {A, B}
    assert first.records[0] not in [copy for _, send in sent for copy in send.records]
