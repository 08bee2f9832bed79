"""Batches of those who have logged in: senders are forced, what may not be published is marked, bodies stay as they are."""

from __future__ import annotations

import random

from cluster.access.rules import Target
from cluster.trust.loans import Lent, Loan, prove
from pixiu.ids import snowflake, topic_room
from pixiu.wire.record import Flag, Kind, crc_ok, decode, encode, split, with_topic
from proxy.publishers.permits import NOT_ALLOWED, NOT_LENT, permitted

TOPIC = Flag.TO_ROOM | Flag.TOPIC


class Allowed:
    """Allows what it was told."""

    def __init__(self, *allowed: tuple[str, Target]) -> None:
        self._allowed = set(allowed)

    def allows(self, action: str, target: Target) -> bool:
        return (action, target) in self._allowed


def kinds(data: bytes, count: int) -> list[int]:
    return [record[4] for record in split(data, count)]


def test_a_batch_that_is_right_is_the_same_object() -> None:
    data = encode(Kind.ROOM, 42, b"x", 1, sender=7, flags=Flag.TO_ROOM) * 3
    assert permitted(data, 3, Allowed(("publish", 42)), 7) is data


def test_the_sender_is_who_has_logged_in() -> None:
    data = b"".join(encode(Kind.ROOM, 42, b"x", at, sender=sender, flags=Flag.TO_ROOM) for at, sender in enumerate((0, 7, 8), 1))
    forced = permitted(data, 3, Allowed(("publish", 42)), 7)
    assert [decode(record).sender for record in split(forced, 3)] == [7, 7, 7]
    assert [decode(record).sender for record in split(permitted(data, 3, Allowed(("publish", 42)), None), 3)] == [0, 7, 8]


def test_each_kind_has_its_action_and_target() -> None:
    cases: list[tuple[bytes, tuple[str, Target]]] = [
        (encode(Kind.ROOM, 42, b"x", 1, flags=Flag.TO_ROOM), ("publish", 42)),
        (encode(Kind.ROOM, topic_room("a/b"), with_topic("a/b", b"x"), 2, flags=TOPIC), ("publish", "a/b")),
        (encode(Kind.ROOM, topic_room("a/b"), with_topic("a/b", b"x"), 3, flags=TOPIC, extension=b"{}"), ("publish", "a/b")),
        (encode(Kind.CHAT, 8, b"x", 4), ("publish", -8)),
        (encode(Kind.SIGNAL, 42, b"x", 5, flags=Flag.TO_ROOM), ("signal", 42)),
        (encode(Kind.SIGNAL, 8, b"x", 6), ("signal", -8)),
        (encode(Kind.MAIL, 8, b"x", 7), ("mail", -8)),
    ]
    data = b"".join(record for record, _ in cases)
    for only in range(len(cases)):
        marked = permitted(data, len(cases), Allowed(cases[only][1]), 0)
        passed = [at for at, kind in enumerate(kinds(marked, len(cases))) if kind != NOT_ALLOWED]
        assert passed == [at for at, (_, needed) in enumerate(cases) if needed == cases[only][1]]
        assert all(crc_ok(record) for record in split(marked, len(cases)))


def test_a_topics_message_goes_to_the_topics_own_room() -> None:
    for key in (42, topic_room("other")):
        data = encode(Kind.ROOM, key, with_topic("a/b", b"x"), 1, flags=TOPIC)
        assert kinds(permitted(data, 1, Allowed(("publish", "a/b"), ("publish", key)), 0), 1) == [NOT_ALLOWED]
    bare = encode(Kind.ROOM, topic_room("a/b"), b"x", 1, flags=Flag.TO_ROOM)
    assert kinds(permitted(bare, 1, Allowed(("publish", topic_room("a/b"))), 0), 1) == [NOT_ALLOWED]


def test_mail_to_many_needs_every_receiver() -> None:
    data = encode(Kind.MAIL, 8, b"x", 1) * 2
    access = Allowed(("mail", -8), ("mail", -9))
    assert kinds(permitted(data, 2, access, 0, {0: [9, 10], 1: [9]}), 2) == [NOT_ALLOWED, Kind.MAIL]


def test_what_is_malformed_is_left_to_who_routes_it() -> None:
    rng = random.Random(5)
    whole = b"".join(
        encode(Kind.ROOM, 42, b"x" * at, at + 1, flags=Flag.TO_ROOM | (Flag.TOPIC if at % 2 else 0)) for at in range(8)
    )
    for _ in range(3000):
        data = bytearray(whole[: rng.randrange(len(whole) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        found = permitted(bytes(data), rng.randrange(12), Allowed(("publish", 42)), 7)
        assert len(found) == len(data)


NOW = 1_800_000_000_000


def test_ids_that_were_not_lent_are_marked_and_derived_ones_are_for_those_who_may() -> None:
    ids = [snowflake(NOW, 5, 0), snowflake(NOW, 6, 0), snowflake(NOW + 1, 7, 9), snowflake(NOW - 1, 5, 0), 12345]
    flags = [Flag.TO_ROOM] * 4 + [Flag.TO_ROOM | Flag.DERIVED_ID]
    data = b"".join(encode(Kind.ROOM, 42, b"x", id_, sender=7, flags=flag) for id_, flag in zip(ids, flags, strict=True))
    for may_derive in (False, True):
        lent = Lent(b"7 alice", may_derive)
        lent.show((b"k",), [prove(b"k", Loan(worker, NOW, NOW + 10), b"7 alice") for worker in (7, 5)])
        marked = permitted(data, 5, Allowed(("publish", 42)), 7, None, lent)
        assert kinds(marked, 5) == [Kind.ROOM, NOT_LENT, Kind.ROOM, NOT_LENT, Kind.ROOM if may_derive else NOT_LENT]
        assert lent.refused == (2 if may_derive else 3)
    assert permitted(data, 5, Allowed(("publish", 42)), 7) is data
    assert kinds(permitted(data, 5, Allowed(("publish", 42)), 7, None, Lent(b"7 alice", False)), 5) == [NOT_LENT] * 5
