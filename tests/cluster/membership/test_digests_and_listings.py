"""Digests, listings, and the exchange that makes maps equal: properties over everything that messages may have lost."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.membership.map.anti_entropy import (
    MAX_ASKED,
    PAGE_ENTRIES,
    PAGES_AN_ANSWER,
    Puller,
    Source,
    Verified,
    is_anti_entropy,
    rule_of,
)
from cluster.membership.map.digest import BUCKETS, SLOTS, Digest, DigestRule, Sum, bucket_of, common_rule
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import ENTRY, Listing, Update
from cluster.wire.v1 import control_pb2
from pixiu.errors import MalformedData
from pixiu.ids import EndpointID, gateway_msg_id

GATEWAY, ROUTER = EndpointID(1), EndpointID(2)
INSTANCE = 5
ALL = DigestRule(0, 1)

ROOMS = st.integers(0, 9) | st.integers(0, (1 << 63) - 1)
OPERATIONS = st.lists(st.tuples(ROOMS, st.integers(0, 3), st.booleans()), max_size=40)


def history(operations: list[tuple[int, int, bool]], instance: int = INSTANCE) -> list[Update]:
    """What a gateway said, in order."""
    return [Update(gateway_msg_id(instance, 1, n + 1), room, uin, login) for n, (room, uin, login) in enumerate(operations)]


def live(membership: LwwMap, instance: int = INSTANCE) -> set[tuple[int, int, int]]:
    return {entry for bucket in range(BUCKETS) for entry in membership.bucket_entries(ALL, instance, bucket)}


def recomputed(membership: LwwMap, instances: tuple[int, ...]) -> Digest:
    digest = Digest()
    for instance in instances:
        for room, uin, id_ in live(membership, instance):
            digest.add(room, uin, instance, id_)
    return digest


@dataclass
class Pair:
    """A puller and a source without a network."""

    puller: Puller
    source: Source
    endpoint: EndpointID
    as_of: int = 0
    own_word: bool = False
    sent: list[control_pb2.Control] = field(default_factory=list)

    def heartbeat(self, now: float, lose: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """One, and all that follows; messages whose numbers are in `lose` are lost."""
        digest = self.source.digest(self.puller.rule or ALL, self.as_of)
        assert digest is not None
        asked = self.puller.on_digest(self.endpoint, digest, now)
        while asked:
            answers = [answer for data in asked for answer in self.source.answer(self._carry(data)) if self._number() not in lose]
            asked = []
            for data in answers:
                asked += self.puller.take(self.endpoint, self._carry(data), now, own_word=self.own_word).messages

    def _carry(self, data: bytes) -> control_pb2.Control:
        assert len(data) < 1300, "it does not fit one datagram"
        control = control_pb2.Control.FromString(data)
        assert is_anti_entropy(control)
        self.sent.append(control)
        return control

    def _number(self) -> int:
        return len(self.sent)


def gateway_pair(own: LwwMap, mine: LwwMap, as_of: int) -> Pair:
    puller = Puller(mine, 1.0)
    puller.rule = ALL
    return Pair(puller, Source(own, lambda instance, _: as_of if instance == INSTANCE else 0), GATEWAY, as_of, True)


@given(OPERATIONS, OPERATIONS, st.sampled_from([1, 2, 8, 128]), st.data())
def test_a_digest_kept_up_to_date_is_the_one_computed_anew(
    one: list[tuple[int, int, bool]], other: list[tuple[int, int, bool]], partitions: int, data: st.DataObject
) -> None:
    membership = LwwMap()
    changes = data.draw(st.permutations(history(one, 1) + history(other, 2)))
    membership.apply(changes, 0.0)
    if data.draw(st.booleans()):
        membership.raise_floor(1, 2)
    if data.draw(st.booleans()):
        membership.purge_partition(0, 2)
    while membership.purging:
        membership.purge_some(data.draw(st.integers(1, 100)))
    anew = recomputed(membership, (1, 2))
    rule = DigestRule(data.draw(st.integers(0, partitions - 1)), partitions)
    assert membership.digest.first.total(rule) == anew.first.total(rule)
    assert membership.digest.first.roots(rule) == anew.first.roots(rule)
    for instance in (1, 2):
        assert membership.digest.first.buckets(instance, rule) == anew.first.buckets(instance, rule)
    assert membership.members_by_instance() == {i: len(live(membership, i)) for i in (1, 2) if live(membership, i)}


@given(OPERATIONS, st.sampled_from([1, 2, 4, 64]))
def test_partitions_buckets_and_instances_add_up(operations: list[tuple[int, int, bool]], partitions: int) -> None:
    membership = LwwMap()
    membership.apply(history(operations), 0.0)
    whole = membership.digest.first.total(ALL)
    xor, count = 0, 0
    for partition in range(partitions):
        for bucket in membership.digest.first.buckets(INSTANCE, DigestRule(partition, partitions)):
            xor ^= bucket.xor
            count += bucket.entries
    assert Sum(xor, count) == whole == membership.digest.first.root(INSTANCE, ALL)


def test_rooms_of_a_partition_fall_into_all_buckets() -> None:
    for partition in range(8):
        assert len({bucket_of(room) for room in range(partition, 128 * 64, 128)}) > BUCKETS * 3 // 4


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [((0, 1), (3, 4), (3, 4)), ((3, 4), (1, 2), (3, 4)), ((3, 4), (0, 2), None), ((5, 4), (1, 4), (1, 4))],
)
def test_the_rooms_of_two_rules(one: tuple[int, int], other: tuple[int, int], common: tuple[int, int] | None) -> None:
    assert common_rule(DigestRule(*one), DigestRule(*other)) == common


def test_a_rule_from_the_network_is_checked() -> None:
    assert rule_of(3, 2) == (1, 2)
    assert [rule_of(0, count) for count in (0, 3, SLOTS * 2)] == [None] * 3


@settings(deadline=None)
@given(OPERATIONS, st.data())
def test_a_map_that_differs_anyhow_becomes_what_the_gateway_has_and_nothing_newer_is_lost(
    operations: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    said = history(operations)
    known = data.draw(st.integers(0, len(said)))
    own, mine = LwwMap(tombstone_s=0.0), LwwMap(tombstone_s=data.draw(st.sampled_from([0.0, 600.0])))
    own.apply(said[:known], 0.0)
    as_of = gateway_msg_id(INSTANCE, 1, known)
    heard = data.draw(st.lists(st.sampled_from(said), max_size=60)) if said else []
    for change in heard:
        mine.apply([change], 0.0)
        mine.expire(0.0)
    newer = {entry for entry in live(mine) if entry[2] > as_of}
    touched_later = {(change.group, change.member) for change in said[known:]}
    pair = gateway_pair(own, mine, as_of)
    for second in range(3):
        pair.heartbeat(float(second))
    assert newer <= live(mine)
    settled = {entry for entry in live(mine) if entry[:2] not in touched_later}
    assert settled == {entry for entry in live(own) if entry[:2] not in touched_later}
    if not touched_later:
        assert pair.puller.verified.as_of(INSTANCE, 0) == as_of


@settings(deadline=None)
@given(OPERATIONS, OPERATIONS, st.data())
def test_a_broker_becomes_equal_by_what_its_router_verified(
    one: list[tuple[int, int, bool]], other: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    said = history(one)
    foreign = history(other, 7)
    own, routers, brokers = LwwMap(), LwwMap(tombstone_s=0.0), LwwMap(tombstone_s=0.0)
    own.apply(said, 0.0)
    for membership in (routers, brokers):
        membership.apply(data.draw(st.lists(st.sampled_from(said + foreign), max_size=60)) if said + foreign else [], 0.0)
        membership.expire(0.0)
    before = _keys(brokers, 7)
    up = gateway_pair(own, routers, gateway_msg_id(INSTANCE, 1, len(said)))
    down = Pair(Puller(brokers, 1.0), Source(routers, up.puller.verified.as_of), ROUTER)
    for second in range(4):
        up.heartbeat(float(second))
        down.heartbeat(float(second))
    assert live(routers) == live(brokers) == live(own)
    # Of a gateway that the router has not compared itself with, its listings remove nothing.
    assert before <= _keys(brokers, 7)
    assert _keys(routers, 7) <= _keys(brokers, 7)


def _keys(membership: LwwMap, instance: int) -> set[tuple[int, int]]:
    return {(room, uin) for room, uin, _ in live(membership, instance)}


def test_nothing_is_listed_before_a_bucket_differed_at_two_heartbeats() -> None:
    own, mine = LwwMap(), LwwMap()
    own.apply(history([(1, 1, True)]), 0.0)
    pair = gateway_pair(own, mine, gateway_msg_id(INSTANCE, 1, 1))
    pair.heartbeat(0.0)
    pair.heartbeat(0.1)  # the same heartbeat, repeated by the network
    assert {control.WhichOneof("body") for control in pair.sent} == {"digest_request", "bucket_digests"}
    pair.heartbeat(1.0)
    assert live(mine) == live(own)
    pair.sent.clear()
    pair.heartbeat(2.0)
    assert pair.sent == []


def test_a_difference_that_was_gone_between_does_not_count() -> None:
    own, mine = LwwMap(), LwwMap()
    first, second = history([(1, 1, True), (2, 1, True)])
    own.apply([first], 0.0)
    pair = gateway_pair(own, mine, first.id)
    pair.heartbeat(0.0)
    mine.apply([first], 0.5)
    pair.heartbeat(1.0)
    own.apply([second], 1.5)
    pair.as_of = second.id
    pair.heartbeat(2.0)
    assert live(mine) < live(own)


def test_a_listing_that_loses_pages_is_finished_at_later_heartbeats() -> None:
    """Thousands of entries in one room: one bucket of more pages than one answer has, a third of them lost."""
    own, mine = LwwMap(), LwwMap()
    changes = history([(1, uin, True) for uin in range(PAGE_ENTRIES * PAGES_AN_ANSWER + 300)])
    own.apply(changes, 0.0)
    mine.apply([Update(gateway_msg_id(INSTANCE, 1, 1), 1, uin, True) for uin in range(100_000, 100_200)], 0.0)
    pair = gateway_pair(own, mine, changes[-1].id)
    for second in range(40):
        pair.heartbeat(float(second), {number for number in range(100_000) if number % 3 == second % 3 and number % 7})
        if live(mine) == live(own):
            break
    assert live(mine) == live(own)
    assert any(control.listing_page.more for control in pair.sent)


def test_many_instances_have_their_turns() -> None:
    theirs, mine = LwwMap(), LwwMap()
    for instance in range(1, 3 * MAX_ASKED):
        theirs.apply([Update(gateway_msg_id(instance, 1, 1), 1, 7, True)], 0.0)
    pair = Pair(Puller(mine, 1.0), Source(theirs, lambda *_: 0), ROUTER)
    for second in range(12):
        pair.heartbeat(float(second))
    assert mine.instances() == theirs.instances()
    assert max(len(control.digest_request.instances) for control in pair.sent) == MAX_ASKED


def test_a_listing_as_of_leaves_what_is_newer_and_what_is_outside() -> None:
    membership = LwwMap()
    ids = [gateway_msg_id(INSTANCE, 1, n) for n in range(10)]
    inside, newer, before, after = (1, 5), (1, 6), (1, 1), (1, 9)
    membership.apply([Update(ids[1], *inside, True), Update(ids[8], *newer, True)], 0.0)
    membership.apply([Update(ids[2], *before, True), Update(ids[3], *after, True)], 0.0)
    listing = Listing(ALL, INSTANCE, bucket_of(1), ids[5], (1, 2), (1, 9), ENTRY.pack(1, 7, ids[4]))
    applied = membership.apply_listing(listing, 0.0, own_word=True)
    assert {entry[:2] for entry in live(membership)} == {newer, before, after, (1, 7)}
    # The removal is a logout like any other, so that it can be passed on.
    assert set(applied.changes) == {Update(ids[4], 1, 7, True), Update(ids[5], *inside, False)}
    assert membership.get(*inside, INSTANCE) == (ids[5], False)


def test_only_the_gateways_own_listing_removes_and_revives() -> None:
    ids = [gateway_msg_id(INSTANCE, 1, n) for n in range(10)]
    listed = ENTRY.pack(1, 1, ids[1])

    def after(as_of: int, own_word: bool) -> set[tuple[int, int]]:
        membership = LwwMap()
        membership.apply([Update(ids[3], 1, 1, False), Update(ids[2], 1, 2, True)], 0.0)
        membership.apply_listing(Listing(ALL, INSTANCE, bucket_of(1), as_of, (0, 0), None, listed), 0.0, own_word=own_word)
        return _keys(membership, INSTANCE)

    assert after(0, False) == {(1, 2)}
    assert after(ids[5], False) == set()
    assert after(ids[5], True) == {(1, 1)}


def test_feedback_removes_only_what_is_not_newer() -> None:
    membership = LwwMap()
    ids = [gateway_msg_id(INSTANCE, 1, n) for n in range(10)]
    other = gateway_msg_id(6, 1, 1)
    membership.apply([Update(ids[2], 1, 1, True), Update(ids[6], 1, 2, True), Update(ids[1], 2, 1, True)], 0.0)
    membership.apply([Update(other, 1, 1, True)], 0.0)
    applied = membership.absent(ids[4], [1, 99], 0.0)
    assert applied.changes == [Update(ids[4], 1, 1, False)]
    assert _keys(membership, INSTANCE) == {(1, 2), (2, 1)}
    assert _keys(membership, 6) == {(1, 1)}
    # The login that it removed does not come back by a copy of its datagram.
    assert not membership.apply([Update(ids[2], 1, 1, True)], 0.0).changes


def test_verified_only_rises() -> None:
    verified = Verified()
    verified.whole(1, 10)
    verified.bucket(1, 3, 5)
    assert verified.as_of(1, 3) == 10
    verified.bucket(1, 3, 12)
    assert (verified.as_of(1, 3), verified.as_of(1, 4), verified.as_of(2, 3)) == (12, 10, 0)
    verified.whole(1, 11)
    assert (verified.as_of(1, 3), verified.as_of(1, 4)) == (12, 11)
    verified.clear()
    assert verified.as_of(1, 3) == 0


@pytest.mark.parametrize(
    "control",
    [
        control_pb2.Control(bucket_digests=control_pb2.BucketDigests(partitions=1, buckets=b"short")),
        control_pb2.Control(bucket_digests=control_pb2.BucketDigests(partitions=3, buckets=bytes(768))),
        control_pb2.Control(instance_roots=control_pb2.InstanceRoots(partitions=1, roots=b"x")),
        control_pb2.Control(instance_roots=control_pb2.InstanceRoots(partitions=1, first=5, last=4)),
        control_pb2.Control(listing_page=control_pb2.ListingPage(partitions=1, last=True, entries=b"x")),
        control_pb2.Control(listing_page=control_pb2.ListingPage(partitions=1, last=True, bucket=64)),
        control_pb2.Control(listing_page=control_pb2.ListingPage(partitions=1, last=True, as_of=1 << 63)),
        control_pb2.Control(listing_page=control_pb2.ListingPage(partitions=0, last=True)),
    ],
)
def test_answers_that_make_no_sense_are_counted(control: control_pb2.Control) -> None:
    membership = LwwMap()
    puller = Puller(membership, 1.0)
    outcome = puller.take(ROUTER, control, 0.0)
    assert (outcome.messages, outcome.applied.changes, len(membership)) == ([], [], 0)
    assert puller.counters.healing_malformed == 1


@pytest.mark.parametrize(
    "control",
    [
        control_pb2.Control(digest_request=control_pb2.DigestRequest(partitions=5)),
        control_pb2.Control(digest_request=control_pb2.DigestRequest(partitions=1, instances=[1 << 20])),
        control_pb2.Control(listing_request=control_pb2.ListingRequest(partitions=0)),
        control_pb2.Control(listing_request=control_pb2.ListingRequest(partitions=1, instance=1 << 20)),
        control_pb2.Control(listing_request=control_pb2.ListingRequest(partitions=1, buckets=[control_pb2.BucketFrom(bucket=64)])),
        control_pb2.Control(),
    ],
)
def test_requests_that_make_no_sense_get_no_answer(control: control_pb2.Control) -> None:
    assert Source(LwwMap(), lambda *_: 0).answer(control) == []


def test_a_listing_of_a_wrong_size_changes_nothing() -> None:
    membership = LwwMap()
    membership.apply(history([(1, 1, True)]), 0.0)
    with pytest.raises(MalformedData):
        membership.apply_listing(Listing(ALL, INSTANCE, bucket_of(1), 1 << 60, (0, 0), None, b"x"), 0.0, own_word=True)
    assert len(membership) == 1


# --- what makes repair need fewer messages


def digest_of(pair: Pair) -> control_pb2.Digest:
    digest = pair.source.digest(DigestRule(0, 1))
    assert digest is not None
    return digest


def routers_differ() -> tuple[Pair, list[control_pb2.Control]]:
    """A broker that lacks what its router has, and what it says at the second heartbeat before anything is answered."""
    held, mine = LwwMap(), LwwMap()
    held.apply(history([(1, 1, True)]) + history([(2, 1, True)], 7), 0.0)
    mine.apply(history([(2, 1, True)], 7), 0.0)
    pair = Pair(Puller(mine, 1.0), Source(held, lambda instance, bucket: 0), ROUTER)
    pair.heartbeat(0.0)
    asked = pair.puller.on_digest(ROUTER, digest_of(pair), 1.0)
    return pair, [control_pb2.Control.FromString(data) for data in asked]


def test_what_differed_at_the_heartbeat_before_is_asked_for_without_a_round_for_the_roots() -> None:
    _, asked = routers_differ()
    assert [list(control.digest_request.instances) for control in asked] == [[], [INSTANCE]], "not those that were equal"


def test_a_listing_that_was_lost_is_asked_for_again_at_the_next_heartbeat() -> None:
    pair, asked = routers_differ()
    (buckets,) = (control_pb2.Control.FromString(data) for data in pair.source.answer(asked[1]))
    lost = [control_pb2.Control.FromString(data) for data in pair.puller.take(ROUTER, buckets, 1.0).messages]
    assert [control.WhichOneof("body") for control in lost] == ["listing_request"]
    again = pair.puller.on_digest(ROUTER, digest_of(pair), 2.0)
    assert control_pb2.Control.FromString(again[-1]) == lost[0]


def test_a_listing_that_came_is_not_asked_for_again() -> None:
    pair, _ = routers_differ()
    for second in (1.0, 2.0):
        pair.heartbeat(second)
    pair.sent.clear()
    pair.heartbeat(3.0)
    assert pair.sent == []
