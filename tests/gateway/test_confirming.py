"""Messages of QoS 1 on their way to the proxies: batches, order, and what becomes of what is lost or refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cluster.core.contract import NEVER, SendControl
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.confirming import FIRST_REST_S, MAX_BATCH_BYTES, MAX_BATCH_RECORDS, MAX_REST_S, SILENCE_S, WINDOW_BYTES, Confirming
from pixiu.errors import Overloaded, PixiuError
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import MAX_RECORD_BYTES, SNOWFLAKE_AT, Kind, encode, split
from pixiu.wire.uin_list import OVERHEAD as ADDRESSED_OVERHEAD

A, B = ev.Replica(EndpointID(101), 0), ev.Replica(EndpointID(102), 0)
ROOM, OTHER, BIG = 42, 44, 1001


class Bench:
    """A core with proxies, and what it sends and says."""

    def __init__(self, *proxies: ev.Replica) -> None:
        numbers, self.ids = itertools.count(1), itertools.count(1)
        self.core = Confirming(lambda: next(numbers), VRooms(1000, 1100), lambda: 1.0)
        self.outcomes: list[tuple[int, str]] = []
        """Message ID and error code of each; empty: accepted."""
        self.now = 1.0
        self.core.set_proxies(proxies)

    def offer(self, *keys: int, size: int = 1, sender: ev.Sender = ev.NO_SENDER) -> list[int]:
        """Publish a message to each key. Returns their IDs."""
        messages = []
        for key in keys:
            number = next(self.ids)
            record = encode(Kind.ROOM, key, bytes(size), SnowflakeID(number))
            messages.append(ev.Confirmable(self._resolved, 0, key, record, SnowflakeID(number), sender))
        self.core.offered(ev.PublishConfirmed(messages), self.now, [])
        return [message.snowflake for message in messages]

    def _resolved(self, message: ev.Confirmable, error: PixiuError | None) -> None:
        self.outcomes.append((message.snowflake, error.code if error is not None else ""))

    def flush(self) -> list[tuple[EndpointID, int, list[int]]]:
        """What leaves: the proxy, the number and the message IDs of each batch."""
        out: list[Any] = []
        self.core.flush(self.now, out)
        self._tell([effect for effect in out if isinstance(effect, ev.Resolved)])
        return [self._batch(effect) for effect in out if isinstance(effect, SendControl)]

    def _tell(self, effects: list[ev.Resolved]) -> None:
        for effect in effects:
            for message, error in effect.outcomes:
                message.resolved(error)

    def _batch(self, effect: SendControl) -> tuple[EndpointID, int, list[int]]:
        (message,) = effect.messages
        batch = control_pb2.Control.FromString(message).publish_batch
        assert batch.number == effect.token
        records = split(batch.records, batch.count)
        return effect.peer, batch.number, [int.from_bytes(each[SNOWFLAKE_AT : SNOWFLAKE_AT + 8], "little") for each in records]

    def answer(self, proxy: ev.Replica, number: int, *failures: tuple[int, int, str, int]) -> None:
        """A proxy resolves a batch, but for these positions."""
        out: list[Any] = []
        found = [ev.RecordFailure(first, last, code, "no", retry) for first, last, code, retry in failures]
        self.core.resolved(ev.BatchResolved(proxy.endpoint, number, found), self.now, out)
        self._tell(out)

    def lose(self, number: int) -> None:
        """The link lost a batch."""
        assert self.core.settled(number, False, self.now)

    def pass_time(self, seconds: float) -> None:
        """Until then, with the ticks that are due."""
        end = self.now + seconds
        while (due := self.core.next_deadline()) <= end:
            self.now = due
            self.core.expire(due)
        self.now = end


def test_a_turns_messages_leave_together_and_each_gets_its_outcome() -> None:
    bench = Bench(A)
    bench.offer(ROOM, OTHER, ROOM)
    assert bench.flush() == [(A.endpoint, 1, [1, 3, 2])], "by rooms, each in order"
    assert bench.core.settled(1, True, bench.now)
    bench.answer(A, 1, (2, 2, "DROPPED", 0))
    assert bench.outcomes == [(1, ""), (3, "DROPPED"), (2, "")]
    assert (bench.core.unresolved, bench.core.next_deadline(), bench.core._waiting) == (0, NEVER, {})


def test_a_refusal_keeps_its_time() -> None:
    bench = Bench(A)
    errors: list[PixiuError | None] = []
    message = ev.Confirmable(lambda _, error: errors.append(error), 0, ROOM, b"x", SnowflakeID(1))
    bench.core.offered(ev.PublishConfirmed([message]), 1.0, [])
    out: list[Any] = []
    bench.core.flush(1.0, out)
    bench.answer(A, 1, (1, 1, "OVERLOADED", 1500))
    (error,) = errors
    assert isinstance(error, Overloaded)
    assert error.retry_after_ms == 1500


def test_a_room_has_one_batch_at_a_time_and_no_other_waits_for_it() -> None:
    bench = Bench(A)
    bench.offer(ROOM)
    assert bench.flush() == [(A.endpoint, 1, [1])]
    bench.offer(ROOM, OTHER, ROOM)
    assert bench.flush() == [(A.endpoint, 2, [3])]
    bench.answer(A, 2)
    assert bench.flush() == []
    bench.answer(A, 1)
    assert bench.flush() == [(A.endpoint, 3, [2, 4])]


@pytest.mark.parametrize("how", ["lost", "gone", "silent"])
def test_what_is_not_answered_goes_again_in_order_before_the_rest(how: str) -> None:
    bench = Bench(A)
    bench.offer(ROOM, ROOM)
    bench.flush()
    bench.offer(ROOM)
    if how == "lost":
        bench.lose(1)
    elif how == "gone":
        bench.core.set_proxies((B,))
    else:
        bench.pass_time(SILENCE_S)
    proxy = B if how == "gone" else A
    assert bench.flush() == [(proxy.endpoint, 2, [1, 2, 3])]
    bench.answer(A, 1)
    assert bench.outcomes == [], "the first answer comes too late"
    bench.answer(proxy, 2)
    assert bench.outcomes == [(1, ""), (2, ""), (3, "")]
    assert bench.core.lost == 1


@pytest.mark.parametrize("how", ["waited", "lost", "gone"])
def test_what_waits_when_its_sender_is_over_leaves_no_more(how: str) -> None:
    """Its client may have sent later ones by another gateway, which must not be overtaken."""
    bench, left, other = Bench(A), ev.Sender(1), ev.Sender(2)
    bench.offer(ROOM, sender=other if how == "waited" else left)
    assert bench.flush() == [(A.endpoint, 1, [1])]
    bench.offer(ROOM, sender=left)
    bench.offer(ROOM, sender=other)
    bench.offer(OTHER, sender=left)
    left.until = bench.now
    if how == "waited":
        assert bench.flush() == []
        bench.answer(A, 1)
        proxy, ends = A, [(4, "DROPPED"), (1, ""), (2, "DROPPED")]
    else:
        if how == "lost":
            bench.lose(1)
        else:
            bench.core.set_proxies((B,))
        proxy, ends = B if how == "gone" else A, [(4, "DROPPED"), (1, "DROPPED"), (2, "DROPPED")]
    assert bench.flush() == [(proxy.endpoint, 2, [3])]
    assert sorted(bench.outcomes) == sorted(ends)
    bench.answer(proxy, 2)
    assert (bench.core.unresolved, bench.core._waiting) == (0, {})


@pytest.mark.parametrize("code", ["UNAVAILABLE", "OVERLOADED", "DRAINING", "DROPPED"])
def test_what_is_refused_for_now_takes_its_senders_messages_behind_it_along(code: str) -> None:
    """They left while it waited for its pause, were accepted, and it came out of order, or closed its client's connection."""
    bench, own, others = Bench(A), ev.Sender(1), ev.Sender(2)
    first = bench.offer(ROOM, sender=own) + bench.offer(ROOM, sender=others)
    assert bench.flush() == [(A.endpoint, 1, first)]
    behind, elsewhere = bench.offer(ROOM, ROOM, sender=own), bench.offer(OTHER, sender=own)
    stranger, nobodys = bench.offer(ROOM, sender=others), bench.offer(ROOM)
    assert bench.flush() == [(A.endpoint, 2, elsewhere)]
    bench.answer(A, 1, (1, 1, code, 100))
    assert bench.outcomes == [(first[0], code), (first[1], ""), *((number, "UNAVAILABLE") for number in behind)]
    assert bench.flush() == [(A.endpoint, 3, stranger + nobodys)]
    bench.answer(A, 2)
    bench.answer(A, 3, (2, 2, code, 100))
    assert bench.core.unresolved == 0
    assert bench.offer(ROOM)
    assert len(bench.flush()) == 1


def test_what_a_refusal_for_good_leaves_behind_goes_on() -> None:
    bench, own = Bench(A), ev.Sender(1)
    bench.offer(ROOM, sender=own)
    bench.flush()
    behind = bench.offer(ROOM, sender=own)
    bench.answer(A, 1, (1, 1, "NOT_ALLOWED", 0))
    assert bench.flush() == [(A.endpoint, 2, behind)]


def test_an_answer_of_another_proxy_counts_for_nothing() -> None:
    bench = Bench(A, B)
    bench.offer(ROOM)
    bench.flush()
    bench.answer(B, 1)
    assert bench.outcomes == []


def test_failures_outside_of_the_batch_are_ignored() -> None:
    bench = Bench(A)
    bench.offer(ROOM, ROOM)
    bench.flush()
    bench.answer(A, 1, (0, 1, "DROPPED", 0), (3, 1 << 31, "DROPPED", 0))
    assert bench.outcomes == [(1, "DROPPED"), (2, "")]


def test_rooms_are_divided_among_the_proxies_that_are_usable() -> None:
    bench = Bench(A, B)
    bench.offer(ROOM, ROOM + 1)
    assert bench.flush() == [(A.endpoint, 1, [1]), (B.endpoint, 2, [2])]
    bench.core.set_proxies((A, ev.Replica(B.endpoint, 0, usable=False)))
    bench.offer(ROOM + 3, ROOM + 1)
    assert bench.flush() == [(A.endpoint, 3, [3])], "the room is still with the other one"
    bench.answer(B, 2)
    assert bench.flush() == [(A.endpoint, 4, [4])]


def test_without_a_proxy_everything_waits_for_one() -> None:
    bench = Bench()
    bench.offer(ROOM, OTHER)
    assert bench.flush() == []
    bench.core.set_proxies((A,))
    assert bench.flush() == [(A.endpoint, 1, [1, 2])]


def test_a_proxy_that_loses_batches_in_a_row_rests_and_the_others_get_its_rooms() -> None:
    bench = Bench(A, B)
    bench.offer(ROOM)
    bench.flush()
    bench.lose(1)
    assert bench.flush() == [(A.endpoint, 2, [1])], "one loss is nothing"
    bench.lose(2)
    assert bench.flush() == [(B.endpoint, 3, [1])]
    bench.answer(B, 3)
    bench.offer(ROOM)
    bench.pass_time(FIRST_REST_S)
    assert bench.flush() == [(A.endpoint, 4, [2])]


def test_rests_double_up_to_a_bound_and_an_answer_ends_them() -> None:
    bench = Bench(A)
    bench.offer(ROOM)
    rests = []
    for number in range(1, 12):
        before = bench.now
        while not (sent := bench.flush()):
            bench.now = bench.core.next_deadline()
            bench.core.expire(bench.now)
        rests.append(bench.now - before)
        assert sent == [(A.endpoint, number, [1])]
        bench.lose(number)
    assert rests[:5] == pytest.approx([0, 0, FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S])
    assert rests[-1] == pytest.approx(MAX_REST_S)
    bench.pass_time(MAX_REST_S)
    ((_, number, _),) = bench.flush()
    bench.answer(A, number)
    bench.offer(ROOM)
    ((_, number, _),) = bench.flush()
    bench.lose(number)
    assert bench.flush()


def test_batches_have_bounds_and_a_large_record_goes_alone() -> None:
    bench = Bench(A)
    bench.offer(*range(1, MAX_BATCH_RECORDS + 2))
    assert [len(ids) for _, _, ids in bench.flush()] == [MAX_BATCH_RECORDS, 1]
    bench = Bench(A)
    bench.offer(ROOM, OTHER, 46, size=MAX_BATCH_BYTES)
    assert [ids for _, _, ids in bench.flush()] == [[1], [2], [3]]


def test_a_proxy_has_a_window_and_big_rooms_have_their_own() -> None:
    bench = Bench(A)
    size = WINDOW_BYTES // 4
    bench.offer(*range(1, 11), size=size)
    sent = bench.flush()
    assert len(sent) == 4
    bench.offer(BIG)
    assert [ids for _, _, ids in bench.flush()] == [[11]]
    bench.answer(A, sent[0][1])
    assert [ids for _, _, ids in bench.flush()] == [[5]]


def test_big_rooms_have_batches_of_their_own() -> None:
    bench = Bench(A)
    bench.offer(ROOM, BIG, OTHER)
    assert [ids for _, _, ids in bench.flush()] == [[1, 3], [2]]


def test_the_largest_record_fits_into_a_control_message_of_a_link() -> None:
    numbers = itertools.count((1 << 64) - 1)
    core = Confirming(lambda: next(numbers), VRooms(), lambda: 0.0)
    core.set_proxies((A,))
    message = ev.Confirmable(lambda *_: None, 0, ROOM, bytes(MAX_RECORD_BYTES), SnowflakeID(1))
    core.offered(ev.PublishConfirmed([message]), 1.0, [])
    out: list[Any] = []
    core.flush(1.0, out)
    assert len(out[0].messages[0]) <= MAX_RECORD_BYTES + ADDRESSED_OVERHEAD, "as `cluster.settings.options` has it for links"
