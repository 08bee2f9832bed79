"""Several devices, unread counts, pages back in time, and what is deleted for all devices; the rest is compared with the model."""

from __future__ import annotations

import pytest

from pi.inboxes import ranges
from pi.inboxes.inbox import Head
from pi.inboxes.ranges import Ranges
from pi.inboxes.reading import unread_by
from pi.options import Options
from pi.store.digest import Digest
from pixiu.errors import MalformedData
from pixiu.wire.cursor import Cursor
from pixiu.wire.inbox_operations import (
    DEFAULT_LIMITS,
    DELETE,
    HEAD,
    LIMITS,
    TRIM,
    USER_DEVICE,
    AddDevice,
    Clock,
    Code,
    Deletes,
    Limits,
    Op,
    OpenSessions,
    Trims,
    decode,
    encode,
)
from relay.delivery import events as ev
from relay.delivery.window import Lane
from tests.pi.memory import HOUR, MemoryStore, Replica
from tests.support.pi import acknowledges, appends, message

UIN = 7
DAY = 24 * HOUR


def filled(count: int) -> Replica:
    """With so many entries and a session of device 0."""
    replica = Replica()
    replica.apply(appends(1, *((message(number), UIN) for number in range(1, count + 1))))
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, 0)))
    return replica


def delete(replica: Replica, first: int, last: int, lane: int = 1) -> int:
    return replica.apply(Deletes(DELETE.pack(UIN, lane, first, last)))[0][0]


def seqs(replica: Replica, session: int = 1, device: int = 0, start: int | None = None) -> list[int]:
    return [seq for seq, _ in replica.state.read(UIN, device, 1, session, start, 100).entries]


# --- new devices


@pytest.mark.parametrize("from_now", [0, 1])
def test_a_further_device_begins_with_the_history_or_from_now_on_as_the_leaders_limits_say(from_now: int) -> None:
    replica = filled(3)
    replica.apply(Clock(Limits(from_now=from_now)), AddDevice(UIN, b"tablet"), OpenSessions(USER_DEVICE.pack(UIN, 1)))
    found = replica.state.read(UIN, 1, 1, 2, None, 10)
    assert [seq for seq, _ in found.entries] == ([] if from_now else [1, 2, 3])
    assert (found.up_to, found.unread) == ((3, 0) if from_now else (0, 3))
    replica.apply(appends(1, (message(4), UIN)))
    assert seqs(replica, session=2, device=1)[-1] == 4
    replica.flush()
    replica.restart()
    assert replica.state.inboxes.limits.from_now == from_now
    assert replica.state.read(UIN, 1, 1, 2, None, 10).unread == (1 if from_now else 4)


@pytest.mark.parametrize("client_id", [b"", b"phone"])
def test_a_users_first_device_gets_what_came_before_it_in_any_case(client_id: bytes) -> None:
    replica = Replica()
    replica.apply(Clock(Limits(from_now=1)), appends(1, (message(1), UIN)))
    number = replica.apply(AddDevice(UIN, client_id))[0][0]
    replica.apply(OpenSessions(USER_DEVICE.pack(UIN, number)))
    assert seqs(replica, device=number) == [1]


def test_a_device_after_one_that_no_longer_counts_is_a_first_one() -> None:
    replica = Replica()
    replica.apply(Clock(Limits(from_now=1)), AddDevice(UIN, b"old"))
    replica.now_s += 31 * DAY
    replica.apply(appends(1, (message(1), UIN)), AddDevice(UIN, b"new"), OpenSessions(USER_DEVICE.pack(UIN, 2)))
    assert seqs(replica, device=2) == [1]


def test_options_say_it_and_limits_have_one_size() -> None:
    assert Options.__dataclass_fields__["new_device_history"].default is True
    packed = LIMITS.pack(*DEFAULT_LIMITS)
    assert Limits.decode(packed) == DEFAULT_LIMITS
    assert encode([Clock(DEFAULT_LIMITS)]) == HEAD.pack(Op.CLOCK, len(packed)) + packed
    other = Limits(from_now=1)
    assert decode(encode([Clock(other)])) == [Clock(other)]
    for body in (packed[:-1], packed + b"\1"):
        with pytest.raises(MalformedData):
            Limits.decode(body)


# --- unread counts and pages


def test_unread_counts_leave_out_what_is_in_the_map_gone_or_deleted() -> None:
    replica = filled(10)
    replica.apply(acknowledges(UIN, 1, 2, 0b1010))
    assert replica.state.read(UIN, 0, 1, 1, None, 0).unread == 6
    assert delete(replica, 4, 7) == 4
    assert replica.state.read(UIN, 0, 1, 1, None, 0).unread == 4, "3, 8, 9, 10"
    replica.apply(Trims(TRIM.pack(UIN, 1, 3)))
    assert replica.state.read(UIN, 0, 1, 1, None, 0).unread == 3
    assert replica.state.read(UIN, 0, 0, 1, None, 0).unread == 0, "of each lane"


def test_unread_counts_are_arithmetic_over_a_long_inbox() -> None:
    head, deleted = Head(), Ranges()
    head.last, head.floor = 10**12, 5
    deleted.add(60, 10**11)
    assert unread_by(Cursor(10, 1 << 49 | 1 << 63), head, deleted) == 10**12 - 10 - (10**11 - 59) - 0
    assert unread_by(Cursor(10, 1 << 48), head, deleted) == 10**12 - 10 - (10**11 - 59) - 1
    assert unread_by(Cursor(10**12), head, deleted) == 0


def test_who_looks_is_told_of_each_device_where_it_is() -> None:
    replica = filled(5)
    replica.apply(acknowledges(UIN, 1, 2, 0b10), AddDevice(UIN, b"tablet"))
    found = replica.state.peek(UIN, 1, 0, 0, devices=True)
    assert found.unread == 3, "the floor is at 2"
    assert [(d.number, d.client_id, d.counts, d.up_to, d.bits, d.unread) for d in found.devices] == [
        (0, b"", True, 2, 0b10, 2), (1, b"tablet", True, 0, 0, 3),
    ]  # fmt: skip
    replica.now_s += 31 * DAY
    replica.apply(Clock(Limits()))
    assert [device.counts for device in replica.state.peek(UIN, 1, 0, 0, devices=True).devices] == [False, False]
    assert replica.state.peek(UIN + 1, 1, 0, 0, devices=True).devices == []


def test_pages_go_back_in_time_over_what_was_acknowledged_and_is_kept() -> None:
    replica = Replica()
    replica.apply(Clock(Limits(history_s=DAY)))
    replica.apply(appends(1, *((message(number), UIN) for number in range(1, 8))), OpenSessions(USER_DEVICE.pack(UIN, 0)))
    replica.apply(acknowledges(UIN, 1, 7))
    state, pages, before = replica.state, [], 1 << 63
    while page := state.read(UIN, 0, 1, 1, None, 3, before).entries:
        pages.append([seq for seq, _ in page])
        before = page[-1][0]
    assert pages == [[7, 6, 5], [4, 3, 2], [1]]
    assert state.peek(UIN, 1, 0, 2, 4).entries == [(3, message(3)), (2, message(2))]
    assert state.peek(UIN, 1, 0, 2, 1).entries == []
    replica.apply(Trims(TRIM.pack(UIN, 1, 5)))
    assert [seq for seq, _ in state.peek(UIN, 1, 0, 9, 99).entries] == [7, 6]


# --- deleting


def test_what_is_deleted_nobody_reads_and_it_keeps_its_number_and_its_message_id() -> None:
    replica = filled(5)
    replica.apply(AddDevice(UIN, b"tablet"), OpenSessions(USER_DEVICE.pack(UIN, 1)))
    assert [delete(replica, 3, 4), delete(replica, 4, 9), delete(replica, 4, 9)] == [2, 1, 0]
    state = replica.state
    assert [seq for seq, _ in state.peek(UIN, 1, 0, 9).entries] == [1, 2]
    assert [seq for seq, _ in state.peek(UIN, 1, 0, 9, 99).entries] == [2, 1]
    for device, session in ((0, 1), (1, 2)):
        assert state.read(UIN, device, 1, session, None, 9).entries == [(1, message(1)), (2, message(2)), (3, 0), (4, 0), (5, 0)]
        assert state.read(UIN, device, 1, session, None, 9, 99).entries == [(2, message(2)), (1, message(1))]
    assert replica.apply(appends(1, (message(3), UIN), (message(6), UIN))) == [[3, 6]], "a repeat does not bring it back"
    assert delete(replica, 1, 1, lane=4) == -Code.INVALID_ARGUMENT
    assert [delete(replica, 0, 1), delete(replica, 2, 1)] == [-Code.INVALID_ARGUMENT] * 2


def test_what_is_deleted_at_the_floor_raises_it_and_is_not_counted_as_dropped() -> None:
    replica = filled(9)
    assert delete(replica, 3, 4) == 2
    assert replica.state.inboxes.head(UIN, 1).floor == 0
    assert delete(replica, 1, 2) == 2
    head = replica.state.inboxes.head(UIN, 1)
    assert (head.floor, head.gap, head.dropped) == (4, 0, 0)
    assert delete(replica, 6, 6) == 1
    replica.apply(acknowledges(UIN, 1, 5))
    assert replica.state.inboxes.head(UIN, 1).floor == 6
    assert delete(replica, 8, 8) == 1
    replica.apply(Trims(TRIM.pack(UIN, 1, 8)))
    assert (head.floor, head.gap, head.dropped) == (8, 8, 1), "7 was dropped, 8 was not"


def test_what_was_deleted_goes_from_the_store_behind_the_dedupe_window() -> None:
    replica = filled(4)
    delete(replica, 2, 3)
    replica.flush()
    store = replica.store
    assert isinstance(store, MemoryStore)
    assert sum(key.startswith(b"D") for key in store.values) == 1
    digest, restored = Digest(), Replica(store)
    digest.add(store.values.items())
    assert [seq for seq, _ in restored.state.peek(UIN, 1, 0, 9).entries] == [1, 4]
    replica.apply(acknowledges(UIN, 1, 4))
    replica.now_s += DAY + 2 * HOUR
    replica.apply(Clock(Limits()))
    replica.flush()
    assert not [key for key in store.values if key[:1] in (b"D", b"K")]
    other = Digest()
    other.add(store.values.items())
    assert digest.sums != other.sums


def test_too_many_separate_deletions_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MAX_RANGES", 2)
    replica = filled(9)
    assert [delete(replica, seq, seq) for seq in (2, 4, 6)] == [1, 1, -Code.TOO_MANY_DELETIONS]
    assert [seq for seq, _ in replica.state.peek(UIN, 1, 0, 9).entries] == [1, 3, 5, 6, 7, 8, 9]
    assert delete(replica, 2, 6) == 3


# --- how a relay takes it


def listing(replica: Replica, start: int | None, num: int) -> ev.Listing:
    read = replica.state.read(UIN, 0, 1, 1, start, num)
    return ev.Listing(read.entries, read.floor, read.gap, read.last, read.up_to)


def test_a_relay_tells_a_gap_for_what_was_deleted_and_its_device_comes_over_it() -> None:
    replica, lane = filled(8), Lane()
    plan = lane.plan(1, listing(replica, None, 3), 3, 64)
    assert [seq for seq, _ in plan.items] == [1, 2, 3]
    lane.sent_up_to(plan.end)
    assert delete(replica, 2, 2) + delete(replica, 5, 6) == 3
    plan = lane.plan(1, listing(replica, lane.sent, 64), 64, 64)
    assert plan.items == [(4, message(4)), (5, 0), (6, 0), (7, message(7)), (8, message(8))]
    lane.sent_up_to(plan.end)
    lane.acknowledge(8, 0)
    assert replica.apply(acknowledges(UIN, 1, lane.cursor.up_to, lane.cursor.bits)) == [[0]]
    assert replica.state.read(UIN, 0, 1, 1, None, 9).unread == 0


def test_a_relay_that_sends_again_after_a_deletion_sends_a_gap_and_a_new_session_does_not_take_it_for_acknowledged() -> None:
    replica, lane = filled(4), Lane()
    lane.sent_up_to(lane.plan(1, listing(replica, None, 64), 64, 64).end)
    delete(replica, 2, 2)
    lane.rewind()
    assert lane.plan(1, listing(replica, lane.sent, 64), 64, 64).items[1] == (2, 0)
    fresh = Lane()
    assert fresh.plan(1, listing(replica, None, 64), 64, 64).items[1] == (2, 0)
    assert (fresh.cursor.up_to, fresh.cursor.bits) == (0, 0)


def test_a_device_that_has_something_is_told_once_of_all_that_was_deleted_at_its_floor() -> None:
    replica, lane = filled(100), Lane()
    replica.apply(acknowledges(UIN, 1, 3))
    assert delete(replica, 4, 90) == 87
    plan = lane.plan(1, listing(replica, None, 64), 64, 64)
    assert plan.items[0] == (90, 0)
    assert plan.items[1:] == [(seq, message(seq)) for seq in range(91, 101)]
