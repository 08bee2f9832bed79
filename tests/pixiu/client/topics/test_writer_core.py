"""The core of a topic writer, against the real rules of parts: nothing is lost, stored twice or out of order."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from pixiu.client.options import ClientOptions
from pixiu.client.topics.writing.resumed import Resumed, Stored
from pixiu.client.topics.writing.writer_core import LINGER_S, WriterCore
from pixiu.client.topics.writing.writer_events import (
    CloseStream,
    OpenStream,
    RefreshTopic,
    Request,
    Resolved,
    Result,
    TopicTicket,
    Verdict,
)
from pixiu.errors import InvalidArgument, NotAllowed, OutcomeUnknown, Refusal, StaleWriter
from pixiu.placement.slots import SLOTS, Lineage, Range
from pixiu.wire.block import Message, encode_message, parse
from pixiu.wire.levels import Level
from tests.pixiu.client.topics.groups import Cluster, Network
from tests.support.for_each import for_each

OPTIONS = ClientOptions(topic_timeout_s=100_000.0)
SLOTS_USED = (0, 1, 9_999, 20_000, 32_767, 32_768, 40_000, 65_535)


def ticket(slot: int, body: bytes, progress: int = 0) -> TopicTicket:
    found = TopicTicket(encode_message(Message(body, slot)), Level.REPLICATED, progress)
    found.watched = True
    return found


def resized(cluster: Cluster, rng: random.Random) -> None:
    """A split, a merge or a move."""
    parts = cluster.lineage.open_parts()
    first = rng.randrange(len(parts))
    last = min(first + rng.choice((0, 0, 1, 2)), len(parts) - 1)
    cuts = [parts[first].low, parts[last].high]
    if rng.random() < 0.6 and len(parts) < 6:
        inside = [slot for slot in SLOTS_USED if cuts[0] < slot < cuts[1]]
        if inside:
            cuts.insert(1, rng.choice(inside))
    ranges = [Range(low, high, rng.randrange(cluster.groups)) for low, high in pairwise(cuts)]
    cluster.resize([part.number for part in parts[first : last + 1]], ranges)


@for_each("seed", range(60))
def test_everything_is_stored_once_and_in_the_order_of_its_slot(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng.choice((1, 2, 4)), rng.choice((1, 2, 3)))
    cluster.names_children = bool(seed % 2)
    core = WriterCore(OPTIONS, cluster.topic(), 5, rng.random)
    network = Network(cluster, core, rng)
    sent: dict[int, list[TopicTicket]] = {slot: [] for slot in SLOTS_USED}
    bodies: dict[int, list[bytes]] = {slot: [] for slot in SLOTS_USED}
    for turn in range(1_500):
        if rng.random() < 0.4:
            slot = rng.choice(SLOTS_USED)
            several = [b"%d.%d" % (turn, number) for number in range(rng.choice((1, 1, 1, 3)))]
            found = [ticket(slot, body) for body in several]
            sent[slot] += found
            bodies[slot] += several
            offer_all = len(found) > 1
            network.apply(core.offer_all(found, slot, network.now) if offer_all else core.offer(found[0], network.now))
        if rng.random() < 0.004:
            resized(cluster, rng)
        if rng.random() < 0.01:
            core.flush()
        network.turn()
    network.faults = False
    for _ in range(30_000):
        if not core.unresolved:
            break
        network.turn()
    assert core.unresolved == core.unresolved_bytes == 0
    for slot in SLOTS_USED:
        assert cluster.in_order(slot) == bodies[slot]
        for each, body in zip(sent[slot], bodies[slot], strict=True):
            assert each.failure is None
            assert each.offset < 0 or cluster.stored[each.part].log[each.offset] == (slot, body)
    assert len(network.resolved) == core.counters.offered  # each told once
    assert core.counters.confirmed == core.counters.offered


@for_each("seed", range(60))
def test_a_named_writer_that_restarts_stores_nothing_twice(seed: int) -> None:
    """It begins after its `progress`, with the same rows in the same order, and the topic is resized between and meanwhile."""
    rng = random.Random(seed)
    cluster = Cluster(rng.choice((1, 2, 4)), 2)
    cluster.names_children = bool(seed % 2)
    rows = {number: rng.choice(SLOTS_USED) for number in range(1, 400)}
    for life in range(8):
        stored = {
            number: Stored(known.position, known.progress) if (known := each.part.writers.get(9)) else Stored()
            for number, each in cluster.stored.items()
        }
        core = WriterCore(OPTIONS, cluster.topic(), 9, rng.random, stored)
        assert core.resumed is not None
        network = Network(cluster, core, rng)
        done = core.resumed.progress
        for slot in SLOTS_USED:
            missing = [number for number, each in rows.items() if each == slot and b"%d" % number not in cluster.in_order(slot)]
            assert not missing or min(missing) > done
        left = [(number, slot) for number, slot in rows.items() if number > done]
        for _ in range(100_000 if life == 7 else rng.randint(50, 600)):
            if left and rng.random() < 0.5:
                number, slot = left.pop(0)
                network.apply(core.offer(ticket(slot, b"%d" % number, number), network.now))
            if rng.random() < 0.003:
                resized(cluster, rng)
            network.turn()
            if not left and not core.unresolved:
                break
        for stream in list(network.streams):
            network.late(stream)
    for slot in SLOTS_USED:
        assert cluster.in_order(slot) == [b"%d" % number for number, each in rows.items() if each == slot]


def test_a_named_writer_ends_when_another_process_uses_its_name() -> None:
    """Both would store the same rows: the one that finds the other's messages says so, and takes nothing more."""
    cluster, rng = Cluster(1, 1), random.Random(1)
    first, second = (WriterCore(OPTIONS, cluster.topic(), 9, rng.random, {}) for _ in range(2))
    for core in (first, second):
        network = Network(cluster, core, rng)
        network.faults = False
        for number in range(1, 20):
            if core.failed is None:
                network.apply(core.offer(ticket(0, b"%d" % number, number), network.now))
        for _ in range(200):
            network.turn()
        assert not core.unresolved
    assert first.failed is None
    assert second.failed is not None
    assert "another process" in second.failed.text
    assert cluster.in_order(0) == [b"%d" % number for number in range(1, 20)]
    with pytest.raises(InvalidArgument, match="another process"):
        second.offer(ticket(0, b"later", 50), 0.0)


def opened(core: WriterCore, level: Level = Level.REPLICATED) -> int:
    """Offer a message, and open the stream that it asks for."""
    first = ticket(0, b"first")
    first.level = level
    (opening,) = [each for each in core.offer(first, 0.0) if isinstance(each, OpenStream)]
    core.opened(opening.stream, 1 << 20, 0.0)
    return opening.stream


def asked(core: WriterCore, stream: int, now: float) -> Request:
    request = core.next_request(stream, now)
    assert request is not None
    return request


def test_a_message_leaves_at_once_and_those_after_it_share_a_block() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5)
    stream = opened(core)
    assert parse(asked(core, stream, 0.0).data).count == 1
    for _ in range(10):
        core.offer(ticket(0, b"more"), 0.001)
    assert core.next_request(stream, 0.002) is None
    assert core.next_deadline() <= 0.001 + LINGER_S
    block = parse(asked(core, stream, 0.001 + LINGER_S).data)
    assert (block.first, block.count) == (2, 10)


def test_a_flush_lets_messages_leave_without_waiting_for_others() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5)
    stream = opened(core)
    asked(core, stream, 0.0)
    core.offer(ticket(0, b"more"), 0.001)
    number = core.flush()
    assert not core.sent(number)
    assert parse(asked(core, stream, 0.001).data).count == 1
    assert core.sent(number)


def test_levels_are_of_whole_blocks() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5)
    stream = opened(core)
    fast = ticket(0, b"fast")
    fast.level = Level.ACCEPTED
    core.offer(fast, 0.0)
    assert [asked(core, stream, 1.0).level for _ in range(2)] == [Level.REPLICATED, Level.ACCEPTED]


def test_what_was_confirmed_at_a_lower_level_and_lost_does_not_hold_up_what_follows() -> None:
    cluster = Cluster(1, 1)
    core = WriterCore(OPTIONS, cluster.topic(), 1, lambda: 0.5)
    stream = opened(core, level=Level.ACCEPTED)
    first = asked(core, stream, 0.0)
    core.results(stream, [Result(first.request, Verdict.STORED, 1, 0)], 0.0)  # the leader dies with it
    core.offer(ticket(0, b"second"), 0.0)
    second = asked(core, stream, 0.0)
    core.results(stream, [cluster.write(0, second)], 0.0)
    again = asked(core, stream, 0.0)
    assert parse(again.data).first == 1
    assert cluster.write(0, again).verdict is Verdict.STORED


def test_a_former_leader_that_knows_less_than_what_was_confirmed_is_left() -> None:
    cluster = Cluster(1, 1)
    core = WriterCore(OPTIONS, cluster.topic(), 1, lambda: 0.5)
    stream = opened(core)
    first = asked(core, stream, 0.0)
    core.results(stream, [cluster.write(0, first)], 0.0)
    core.offer(ticket(0, b"second"), 0.0)
    second = asked(core, stream, 0.0)
    assert CloseStream(stream) in core.results(stream, [Result(second.request, Verdict.HOLE, 0)], 0.0)
    (again,) = [each for each in core.tick(1.0) if isinstance(each, OpenStream)]
    core.opened(again.stream, 1 << 20, 1.0)
    assert parse(asked(core, again.stream, 1.0).data).first == 2


def test_a_final_refusal_fails_its_block_alone() -> None:
    cluster = Cluster(1, 1)
    core = WriterCore(OPTIONS, cluster.topic(), 1, lambda: 0.5)
    stream = opened(core)
    first = asked(core, stream, 0.0)
    core.offer(ticket(0, b"second"), 0.0)
    second = asked(core, stream, 1.0)
    refused = Result(first.request, Verdict.REFUSED, refusal=Refusal(NotAllowed.code, "no rule allows it"))
    (found, *_) = core.results(stream, [refused, cluster.write(0, second)], 1.0)
    assert isinstance(found, Resolved)
    assert [each.failure.code for each in found.tickets if each.failure] == [NotAllowed.code]
    again = asked(core, stream, 1.0)
    assert core.results(stream, [cluster.write(0, again)], 1.0)
    assert core.unresolved == 0
    assert cluster.in_order(0) == [b"second"]


def test_a_writer_whose_name_another_process_opened_is_told_so() -> None:
    cluster = Cluster(1, 1)
    core = WriterCore(OPTIONS, cluster.topic(), 1, lambda: 0.5)
    stream = opened(core)
    first = asked(core, stream, 0.0)
    core.offer(ticket(0, b"second"), 0.0)
    second = asked(core, stream, 1.0)
    refused = Result(second.request, Verdict.REFUSED, refusal=Refusal(StaleWriter.code, "another process"))
    found = [each for each in core.results(stream, [refused], 1.0) if isinstance(each, Resolved)]
    codes = [each.failure.code for some in found for each in some.tickets if each.failure]
    assert codes == [OutcomeUnknown.code, StaleWriter.code], "what was sent before may be stored"
    assert core.failed is not None
    assert core.failed.code == StaleWriter.code
    assert first.request != second.request


def test_a_message_whose_time_is_over_keeps_its_position_if_it_was_sent() -> None:
    cluster = Cluster(1, 1)
    core = WriterCore(ClientOptions(topic_timeout_s=1.0), cluster.topic(), 1, lambda: 0.5)
    stream = opened(core)
    first = asked(core, stream, 0.0)
    core.offer(ticket(0, b"second"), 0.9)
    (found, *_) = core.tick(1.0)
    assert isinstance(found, Resolved)
    assert [each.failure.code for each in found.tickets if each.failure] == [OutcomeUnknown.code]
    second = asked(core, stream, 1.0)
    core.results(stream, [cluster.write(0, first), cluster.write(0, second)], 1.0)
    assert (core.unresolved, cluster.in_order(0)) == (0, [b"first", b"second"])


def test_the_named_leader_is_asked_at_once_and_others_after_a_while() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5)
    stream = opened(core)
    (again,) = core.stream_died(stream, 0.0, "not me", "g0b")
    assert again == OpenStream("g0b", again.stream if isinstance(again, OpenStream) else 0)
    assert isinstance(again, OpenStream)
    assert core.stream_died(again.stream, 0.0, "broken") == [RefreshTopic()]
    assert core.tick(0.0) == []  # it rests
    (last,) = core.tick(1.0)
    assert isinstance(last, OpenStream)


def test_progress_has_to_rise() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5, {})
    core.offer(ticket(0, b"", 5), 0.0)
    with pytest.raises(InvalidArgument, match="5 follows 5"):
        core.offer(ticket(0, b"", 5), 0.0)


def test_progress_of_a_merged_part_is_that_of_each_parent() -> None:
    cluster = Cluster(2, 1)
    cluster.resize([1, 2], [Range(0, SLOTS, 0)])
    resumed = Resumed(cluster.lineage, {1: Stored(3, 10), 2: Stored(1, 4), 3: Stored(0, 10)})
    assert (resumed.of_slot(0), resumed.of_slot(SLOTS - 1), resumed.progress) == (10, 4, 4)
    resumed = Resumed(cluster.lineage, {1: Stored(3, 500), 2: Stored(1, 300), 3: Stored(2, 350)})
    assert (resumed.of_slot(0), resumed.of_slot(SLOTS - 1), resumed.progress) == (500, 350, 350)


def test_progress_of_parents_that_are_gone_is_the_least_of_theirs() -> None:
    cluster = Cluster(2, 1)
    cluster.resize([1, 2], [Range(0, SLOTS, 0)])
    left = Lineage([cluster.lineage.parts[3]])
    inherited = {1: 500, 2: 300}
    assert Resumed(left, {3: Stored(0, 500, inherited)}).progress == 300
    assert Resumed(left, {3: Stored(2, 350, inherited)}).progress == 350


def test_a_block_that_waits_for_the_window_has_not_left() -> None:
    core = WriterCore(OPTIONS, Cluster(1, 1).topic(), 1, lambda: 0.5)
    stream = opened(core)
    core.opened(stream, 1, 0.0)
    core.offer(ticket(0, b"first"), 0.0)
    assert core.next_request(stream, 0.0) is not None
    core.offer(ticket(0, b"second"), 0.0)
    number = core.flush()
    assert core.next_request(stream, 1.0) is None
    assert not core.sent(number)
