"""S13: who chooses what is in a map makes another one of equal digests, unless these have a key; keys change while all runs."""

from __future__ import annotations

import random

import pytest
import xxhash

from cluster.membership.map.anti_entropy import Puller, Source
from cluster.membership.map.digest import ALL_GROUPS, ENTRY, UNKEYED, Digest, DigestKey, DigestRule, digest_key
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id

ROOM, INSTANCE, SOURCE = 77, 3, EndpointID(5)
OLD, NEW = digest_key(b"a secret of the cluster"), digest_key(b"another one, the next")


def login(member: int, counter: int, room: int = ROOM) -> Update:
    return Update(gateway_msg_id(INSTANCE, 1, counter), room, member, True)


def hashed(change: Update) -> int:
    return xxhash.xxh3_64_intdigest(ENTRY.pack(change.group, change.member, change.id))


def crafted() -> tuple[list[Update], list[Update]]:
    """Two sets of as many logins, of equal XOR: of 65 pairs of logins, whose 65 differences have 64 bits, some are dependent."""
    pairs = [(login(1000 + at, 2 * at + 1), login(2000 + at, 2 * at + 2)) for at in range(65)]
    basis: dict[int, tuple[int, int]] = {}
    for at, (one, other) in enumerate(pairs):
        value, made_of = hashed(one) ^ hashed(other), 1 << at
        while value and (known := basis.get(value.bit_length())) is not None:
            value, made_of = value ^ known[0], made_of ^ known[1]
        if not value:
            chosen = [at for at in range(65) if made_of >> at & 1]
            return [pairs[at][0] for at in chosen], [pairs[at][1] for at in chosen]
        basis[value.bit_length()] = value, made_of
    raise AssertionError("65 vectors of 64 bits are dependent")


def filled(changes: list[Update], *keys: DigestKey) -> LwwMap:
    membership = LwwMap()
    membership.set_digest_keys(keys or (UNKEYED,))
    assert len(membership.apply(changes, 0.0).changes) == len(changes)
    return membership


def healed(theirs: LwwMap, mine: LwwMap, beats: int = 6) -> Puller:
    """So many heartbeats of one that pulls from the other; everything arrives."""
    source, puller = Source(theirs, lambda *_: 0), Puller(mine, 1.0)
    for beat in range(beats):
        now = float(beat)
        digest = source.digest(ALL_GROUPS, key=mine.digest.first.key.number)
        asked = puller.on_digest(SOURCE, digest, now) if digest is not None else []
        while asked:
            answers = [answer for each in asked for answer in source.answer(control_pb2.Control.FromString(each))]
            asked = [
                each for answer in answers for each in puller.take(SOURCE, control_pb2.Control.FromString(answer), now).messages
            ]
    return puller


@pytest.mark.parametrize("keys", [(UNKEYED,), (OLD,)])
def test_maps_that_an_insider_made_equal_to_xxh3_are_found_different_by_a_key(keys: tuple[DigestKey, ...]) -> None:
    one, other = crafted()
    theirs, mine = filled(one, *keys), filled(other, *keys)
    puller = healed(theirs, mine)
    lacks = [change for change in one if mine.get(change.group, change.member, INSTANCE) is None]
    if keys == (UNKEYED,):  # what the attack did before: it is why there are keys
        assert theirs.digest.first.buckets(INSTANCE, ALL_GROUPS) == mine.digest.first.buckets(INSTANCE, ALL_GROUPS)
        assert (puller.counters.digests_equal, lacks) == (6, one)
    else:
        assert puller.counters.digests_differing > 0
        assert lacks == []


def test_maps_with_other_keys_compare_nothing_and_ask_for_nothing() -> None:
    changes = [login(member, member + 1) for member in range(50)]
    theirs, mine = filled(changes, OLD), filled(changes[:20], NEW)
    puller = healed(theirs, mine, beats=50)
    assert (puller.counters.digests_equal, puller.counters.digests_differing, puller.counters.pages_applied) == (0, 0, 0)
    # Told by a key that it has not, it asks for nothing either.
    digest = Source(theirs, lambda *_: 0).digest(ALL_GROUPS, key=OLD.number)
    assert digest is not None
    assert puller.on_digest(SOURCE, digest, 60.0) == []
    assert puller.counters.digests_of_other_keys == 1
    mine.set_digest_keys((NEW, OLD))
    while mine.digest.building:
        mine.build_digest(7)
    assert puller.on_digest(SOURCE, digest, 61.0) != []


def test_each_may_change_to_the_next_key_at_any_time_and_differences_are_found_all_along() -> None:
    """The order of docs/security.md: accepted everywhere, used by one after the other, then the old one dropped likewise."""
    changes = [login(member, member + 1, 1 + member % 9) for member in range(300)]
    theirs, mine = filled(changes[:200], OLD), filled(changes[:200], OLD)
    counter = 200
    for their_keys, my_keys in [
        ((OLD, NEW), (OLD,)), ((OLD, NEW), (OLD, NEW)), ((NEW, OLD), (OLD, NEW)), ((NEW, OLD), (NEW, OLD)),
        ((NEW,), (NEW, OLD)), ((NEW,), (NEW,)),
    ]:  # fmt: skip
        for membership, keys in ((theirs, their_keys), (mine, my_keys)):
            membership.set_digest_keys(keys)
            while membership.digest.building:
                membership.build_digest(20)
        theirs.apply(changes[counter : counter + 10], 0.0)
        counter += 10
        puller = healed(theirs, mine)
        assert len(mine) == len(theirs) == counter
        assert puller.counters.digests_equal > 0


def test_sums_that_are_made_while_the_map_changes_are_those_of_the_map() -> None:
    rng = random.Random(5)
    for _ in range(30):
        membership = filled([login(member, member + 1, 1 + member % 17) for member in range(200)])
        membership.set_digest_keys((OLD, UNKEYED))
        counter = 1000
        while membership.digest.building:
            assert membership.digest.first.key == UNKEYED
            for _ in range(5):
                counter += 1
                change = login(rng.randrange(200), counter, rng.randrange(1, 20))
                membership.apply([change._replace(login=rng.random() < 0.5)], 0.0)
            membership.build_digest(rng.randrange(1, 30))
        entries = [(room, *each) for room in range(1, 20) for each in membership._entries(room)]
        for key in (OLD, UNKEYED):
            whole = Digest()
            whole.set_keys((key,))
            for room, member, instance, id_ in entries:
                whole.add(room, member, instance, id_)
            made = membership.digest.of(key.number)
            assert made is not None
            for rule in (ALL_GROUPS, DigestRule(3, 8)):
                assert made.total(rule) == whole.first.total(rule)
                assert made.buckets(INSTANCE, rule) == whole.first.buckets(INSTANCE, rule)
        assert membership.digest.first.key == OLD


def test_what_people_see_of_a_digest_with_a_key_adds_up_to_nothing() -> None:
    """Else /health would tell what each entry adds, and crafting needed no key."""
    one, two = login(1, 1), login(2, 2)
    shown = [int(filled(part, OLD).digest.first.shown(ALL_GROUPS).partition("/")[0], 16) for part in ([], [one], [two], [one, two])]
    assert shown[0] ^ shown[1] ^ shown[2] ^ shown[3] != 0
    assert len(set(shown)) == 4
    assert filled([one], OLD).digest.first.shown(ALL_GROUPS) == filled([one], OLD).digest.first.shown(ALL_GROUPS)
    assert "secret" not in repr(OLD)
