"""Messages that concern some members only: filters, tags, marks of load tests, delays and expiry."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.topics import entries as en
from cluster.topics.entries import Settlement
from pixiu.wire import block
from tests.topic.builders import CHANNEL, PART, TOPIC, said
from tests.topic.dispatch.test_dispatcher import Bench
from topic.dispatch import dispatcher, ready
from topic.events import LoadTest
from topic.storage.compacting import write_copy

EU = '[{"header": "region", "equal": "eu"}]'


class Sorting(Bench):
    """A channel of a topic whose messages have fields."""

    def __init__(self, *fields: dict[str, Any], **settings: object) -> None:
        super().__init__(**settings)
        self.last = 0
        self.say(*fields)

    def say(self, *fields: dict[str, Any]) -> None:
        self.log.apply(en.BLOCK, en.encode_block(42, said(*fields, first=self.last + 1)))
        self.last += len(fields)
        self.dispatcher.wake(PART)

    @property
    def floor(self) -> int:
        return self.log.store.state.progress[CHANNEL, PART].acks.floor


def header(value: str) -> dict[str, Any]:
    return {"headers": [("region", value.encode())]}


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_filter_does_not_want_is_acknowledged_by_one_entry(ordered: bool) -> None:
    bench = Sorting(header("us"), header("eu"), {}, header("us"), header("eu"), {}, filter=EU, ordered=ordered)
    assert (bench.pump(), bench.floor) == ([], 0)
    bench.join(1)
    assert bench.pump() == [(1, [1, 4])]
    bench.commit(bench.report(1, 1, 4))
    assert bench.floor == 0
    assert bench.dispatcher.next_deadline() == dispatcher.SKIPPED_S
    assert bench.tick(dispatcher.SKIPPED_S) == [Settlement(CHANNEL, PART, [(0, 1), (2, 4), (5, 6)])]


def test_an_expression_chooses_and_messages_without_a_value_are_counted() -> None:
    fields = [{**header("eu"), "key": b"7"}, {**header("us"), "key": b"7"}, {**header("eu"), "key": b"x"}, header("eu"), {}]
    bench = Sorting(*fields, filter='headers.region == "eu" && int(key) > 5')
    bench.join(1)
    assert bench.pump() == [(1, [0])]
    assert bench.tick(dispatcher.SKIPPED_S) == [Settlement(CHANNEL, PART, [(1, 5)])]
    view = bench.dispatcher.describe(bench.log.store.state.parts[PART])
    assert view.filter_errors == 2  # the last one has no bytes of the header, and is not looked at


@pytest.mark.parametrize("ordered", [False, True])
def test_what_compaction_has_removed_is_acknowledged_and_not_given(ordered: bool) -> None:
    bench = Sorting({}, {}, {}, {}, {}, ordered=ordered)
    store = bench.log.store
    store.flush()
    bench.log.apply(en.COMPACT, en.Compaction(PART, [(0, 2), (3, 4)]).encode())
    bench.say({})
    store.flush()
    store.logs[PART].roll()
    bench.say({})
    store.flush()
    (job,) = store.compacting.jobs(store.logs)
    assert store.take_copy(job, write_copy(store.files, job))
    bench.log.apply(en.SEEK, en.encode_seek(CHANNEL, PART, 0))
    bench.again(0.0)
    bench.join(1)
    assert bench.pump() == [(1, [2, 4, 5, 6])]
    assert bench.tick(dispatcher.SKIPPED_S) == [Settlement(CHANNEL, PART, [(0, 2), (3, 4)])]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_was_looked_at_and_is_removed_then_is_not_given(ordered: bool) -> None:
    bench = Sorting(*[{"tag": "t"}] * 4, ordered=ordered)
    bench.join(1, credit=1, tag="t")
    assert bench.pump() == [(1, [0])]
    bench.log.apply(en.COMPACT, en.Compaction(PART, [(1, 3)]).encode())
    bench.commit(bench.report(1, 0))
    bench.dispatcher.wake(PART)
    assert bench.pump() == [(1, [3])]


def test_many_unwanted_messages_are_acknowledged_at_once_and_all_in_a_sealed_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "SKIPPED_ENOUGH", 3)
    bench = Sorting({}, {}, {}, filter=EU)
    bench.join(1)
    assert (bench.pump(), bench.floor) == ([], 3)
    bench.say({})
    assert (bench.pump(), bench.floor) == ([], 3)
    bench.log.apply(en.SEAL, en.encode_seal(PART, ()))
    bench.dispatcher.wake(PART)
    assert (bench.pump(), bench.floor) == ([], 4)


def test_a_settlement_of_unwanted_messages_that_was_refused_is_made_again() -> None:
    bench = Sorting({}, {}, filter=EU)
    bench.join(1)
    bench.pump()
    (pending,) = bench.dispatcher.tick(1.0)
    bench.dispatcher.refused(pending, 1.0)
    assert bench.tick(2.0) == [Settlement(CHANNEL, PART, [(0, 2)])]


def test_only_some_messages_are_looked_at_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "LOOKED", 3)
    monkeypatch.setattr(ready, "READ", 2)
    bench = Sorting(*[{}] * 7, header("eu"), filter=EU)
    bench.join(1)
    assert (bench.pump(), bench.dispatcher.more) == ([], True)
    assert (bench.pump(), bench.dispatcher.more) == ([(1, [7])], False)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_filter_looks_at_some_bytes_in_a_turn(monkeypatch: pytest.MonkeyPatch, ordered: bool) -> None:
    monkeypatch.setattr(dispatcher, "WORK", 200_000)
    long = {"headers": [("region", b"a" * 40_000)]}
    bench = Sorting(long, long, long, long, header("eu"), filter='headers.region.contains("eu")', ordered=ordered)
    bench.join(1)
    assert (bench.pump(), bench.dispatcher.more) == ([], True)
    assert bench.dispatcher.queues[PART].ready.skipped.count == 3
    assert (bench.pump(), bench.dispatcher.more) == ([(1, [4])], False)


def test_another_filter_sorts_what_was_not_given_again() -> None:
    for ordered in (False, True):
        bench = Sorting(header("eu"), header("us"), header("eu"), filter=EU, ordered=ordered)
        bench.join(1, credit=1)
        assert bench.pump() == [(1, [0])]
        bench.dispatcher.update(bench.dispatcher.settings._replace(filter=EU.replace("eu", "us")))
        bench.dispatcher.members.set_credit(1, 10)
        assert bench.pump() == []
        assert bench.tick(1.0) == [Settlement(CHANNEL, PART, [(1, 3)])]


def test_a_filter_that_cannot_be_read_holds_everything() -> None:
    bench = Sorting({}, filter="[")
    bench.join(1)
    assert bench.pump() == []
    (view,) = [bench.dispatcher.describe(part) for part in bench.log.store.state.parts.values()]
    assert "filter cannot be read" in view.stuck[0]


@pytest.mark.parametrize("ordered", [False, True])
def test_tagged_messages_go_to_members_with_the_tag(ordered: bool) -> None:
    fields: list[dict[str, Any]] = [{"tag": "a", "slot": 1}, {"slot": 2}, {"tag": "b", "slot": 3}, {"tag": "a", "slot": 4}]
    bench = Sorting(*fields, ordered=ordered)
    bench.join(1, tag="a")
    assert bench.pump() == [(1, [0, 3])]
    (view,) = [bench.dispatcher.describe(part) for part in bench.log.store.state.parts.values()]
    assert view.stuck == ["2 messages wait for a member without a tag that has room"]
    bench.join(2)
    assert bench.pump() == [(2, [1, 2])]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_a_tagged_member_had_goes_to_others_when_it_leaves(ordered: bool) -> None:
    bench = Sorting({"tag": "a", "slot": 1}, {"tag": "a", "slot": 2}, ordered=ordered)
    bench.join(1, tag="a", credit=1)
    bench.join(2)
    assert bench.pump() == [(1, [0])]
    for pending in bench.dispatcher.leave(1):
        bench.commit(pending)
    assert bench.pump() == [(2, [0, 1])]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_member_with_a_tag_gets_what_nobody_has_had_yet(ordered: bool) -> None:
    bench = Sorting({"slot": 1}, {"tag": "a", "slot": 2}, {"tag": "a", "slot": 3}, ordered=ordered)
    bench.join(1, credit=1)
    assert bench.pump() == [(1, [0])]
    bench.join(2, tag="a")
    assert bench.pump() == [(2, [1, 2])]


@pytest.mark.parametrize("ordered", [False, True])
def test_nobody_gets_more_than_its_credit_of_what_was_looked_at(ordered: bool) -> None:
    fields: list[dict[str, Any]] = [{"tag": "a", "slot": 1}, {"slot": 2}] * 20
    bench = Sorting(*fields, ordered=ordered)
    bench.join(1, tag="a")
    bench.pump()
    bench.join(2, 3, credit=3)
    assert [(member, len(offsets)) for member, offsets in bench.pump()] == [(2, 3), (3, 3)][: 1 if ordered else 2]


@pytest.mark.parametrize("ordered", [False, True])
def test_members_with_one_tag_share_its_messages(ordered: bool) -> None:
    bench = Sorting(*({"tag": "a", "slot": slot} for slot in range(4)), ordered=ordered)
    bench.join(1, 2, tag="a", credit=2)
    bench.join(3)
    assert sorted(bench.pump()) == [(1, [0, 1]), (2, [2, 3])]


def test_a_lane_goes_on_with_the_member_whose_turn_it_is() -> None:
    bench = Sorting({}, {"tag": "a"}, {}, ordered=True)
    bench.join(1, tag="a")
    bench.join(2)
    assert bench.pump() == [(2, [0])]
    bench.commit(bench.report(2, 0))
    assert bench.pump() == [(1, [1])]
    bench.commit(bench.report(1, 1))
    assert bench.pump() == [(2, [2])]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("what", LoadTest)
def test_messages_of_load_tests_are_for_who_asks_for_them(what: LoadTest, ordered: bool) -> None:
    bench = Sorting({"load_test": True}, {}, {"load_test": True}, ordered=ordered)
    bench.join(1, load_test=what)
    given = {LoadTest.BLOCK: [1], LoadTest.PASS: [0, 1, 2], LoadTest.ONLY: [0, 2]}[what]
    assert bench.pump() == [(1, given)]
    bench.commit(bench.report(1, *given))
    others = [(low, high) for each in bench.tick(1.0) for low, high in each.acknowledged]
    assert sorted({0, 1, 2} - {offset for low, high in others for offset in range(low, high)}) == given


def test_a_message_waits_for_its_time_and_holds_up_nobody_else() -> None:
    bench = Sorting({"deliver_at_us": 5_001_000}, {}, {"deliver_at_us": 3_001_000})
    bench.join(1)
    assert bench.pump(0.0) == [(1, [1])]
    assert bench.dispatcher.next_deadline() == 3.0
    assert bench.pump(3.0) == [(1, [2])]
    assert bench.pump(5.0) == [(1, [0])]
    assert bench.log.store.state.progress[CHANNEL, PART].waiting == {}


def test_in_an_ordered_channel_it_holds_up_its_slot() -> None:
    bench = Sorting({"deliver_at_us": 5_001_000}, {}, {"slot": 2}, ordered=True)
    bench.join(1)
    assert bench.pump(0.0) == [(1, [2])]
    assert bench.dispatcher.next_deadline() == 5.0
    assert bench.pump(5.0) == [(1, [0, 1])]


@pytest.mark.parametrize("ordered", [False, True])
def test_what_has_expired_is_acknowledged(ordered: bool) -> None:
    bench = Sorting({"expires_in_s": 2}, {"expires_in_s": 9}, {}, ordered=ordered)
    bench.join(1)
    assert bench.pump(3.0) == [(1, [1, 2])]
    assert bench.tick(4.0) == [Settlement(CHANNEL, PART, [(0, 1)])]


def test_what_comes_again_may_have_expired() -> None:
    bench = Sorting({"expires_in_s": 2})
    bench.join(1)
    assert bench.pump(0.0) == [(1, [0])]
    bench.commit(bench.report(1, refused=[(0, 3.0)]))
    assert bench.pump(3.0) == []
    assert bench.tick(4.0) == [Settlement(CHANNEL, PART, [(0, 1)])]


def test_what_is_due_comes_behind_any_number_that_is_not() -> None:
    far = {"deliver_at_us": 900_000_001_000}
    bench = Sorting(*({"deliver_at_us": 900_000_001_000 + number * 1_000} for number in range(300)))
    bench.say(far, {"deliver_at_us": 2_001_000, "event_at_us": 1}, {}, far)
    bench.join(1)
    assert bench.pump(0.0) == [(1, [302])]
    assert bench.pump(2.0) == [(1, [301])]
    assert bench.pump(3.0) == []


@pytest.mark.parametrize("bodies", [(b"x",) * 9, tuple(b"x" * number for number in range(9))])
def test_messages_that_are_due_much_later_are_looked_at_again_then(bodies: tuple[bytes, ...]) -> None:
    hours = (0.0, 5.0, 2.0, 3.0, 0.5, 2.0, 9.0, 4.0, 4.0)
    due_us = [1_000 + int(each * 3_600_000_000) for each in hours]
    messages = [block.Message(body, 1, deliver_at_us=due) for body, due in zip(bodies, due_us, strict=True)]
    bench = Bench()
    bench.log.apply(en.BLOCK, en.encode_block(42, block.encode(messages, topic=TOPIC, part=1, writer=9, first=1)))
    bench.dispatcher.wake(PART)
    bench.join(1)
    given, now = dict[int, float](), 0.0
    while len(given) < len(hours):
        for _, offsets in bench.pump(now):
            given |= dict.fromkeys(offsets, now)
            bench.commit(bench.report(1, *offsets), now)
        now = max(now, bench.dispatcher.next_deadline())
    assert [round(given[offset], 2) for offset in range(len(hours))] == [each * 3_600 for each in hours]


def test_millions_that_are_due_much_later_take_an_entry_a_block() -> None:
    bench = Sorting(*({"deliver_at_us": 90_000_000_000 + number} for number in range(500)))
    bench.join(1)
    assert bench.pump(0.0) == []
    assert bench.dispatcher.next_deadline() > 80_000
    queue = bench.dispatcher.queues[PART]
    assert isinstance(queue.ready, ready.AnyOrder)
    assert queue.ready.delayed == 1
