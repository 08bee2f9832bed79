"""The head of a datagram, its tag, and everything for which it is refused."""

from __future__ import annotations

import hmac

import pytest

from cluster.links.datagrams.head import (
    ACKNOWLEDGEMENT,
    CONTROL,
    FLAG_ANY_DESTINATION,
    FLAG_STREAM,
    HEAD,
    HEAD_SIZE,
    HEARTBEAT,
    LAST_SEQUENCE,
    RECORDS,
    Codec,
    DatagramRefusal,
    join_control,
    split_control,
)
from cluster.trust.key_ring import TAG_SIZE, KeyRing, key_byte
from pixiu.ids import EndpointID
from tests.cluster.links.world import ring_of

ALICE, BOB, CAROL = EndpointID(0x1111111122222222), EndpointID(0x3333333344444444), EndpointID(0x5555555566666666)
TWIN = EndpointID(BOB ^ (1 << 40))
KEY = b"a key of the cluster"
ITEM = bytes(40)


def codec(own: EndpointID, key: bytes | None = KEY, limit: int = 8192) -> Codec:
    return Codec(own, limit, 300_000, ring_of(key), "router")


def plain(**fields: int) -> bytes:
    """A datagram from ALICE to BOB without a tag, with fields of the head replaced."""
    values = {"magic": b"PX", "version": 1, "type": RECORDS, "key": 0, "flags": 0, "count": 1, "sender": ALICE, "sequence": 1}
    values |= {"layout": 0, "word": BOB & 0xFFFFFFFF}
    values |= fields
    return HEAD.pack(*values.values()) + ITEM


def test_the_head_is_the_32_bytes_of_the_design() -> None:
    data = codec(ALICE, None).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    assert len(data) == HEAD_SIZE + 40
    assert data[:8] == b"PX\x01\x01\x00\x00\x01\x00"
    assert data[8:16] == ALICE.to_bytes(8, "little")
    assert data[16:24] == (7).to_bytes(8, "little")
    assert data[24:28] == (3).to_bytes(4, "little")
    assert data[28:32] == BOB.to_bytes(8, "little")[:4]


@pytest.mark.parametrize("key", [None, KEY, b"k" * 64])
def test_what_was_packed_is_unpacked(key: bytes | None) -> None:
    data = codec(ALICE, key).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    head = codec(BOB, key).unpack(data, False)
    assert head[2:9] == (RECORDS, key_byte(1, "router") if key else 0, 0, 1, ALICE, 7, 3)
    assert len(data) == HEAD_SIZE + 40 + (TAG_SIZE if key else 0)


def test_every_changed_byte_is_refused_by_the_tag_or_the_key() -> None:
    data = codec(ALICE).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    bob = codec(BOB)
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]
        assert bob.unpack(changed, False) == (DatagramRefusal.KEY if at == 4 else DatagramRefusal.TAG)


def test_a_forged_tag_and_another_clusters_key_are_refused() -> None:
    data = codec(ALICE, b"another key, as long").pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    assert codec(BOB).unpack(data, False) == DatagramRefusal.TAG
    assert codec(BOB).unpack(data[:-TAG_SIZE] + bytes(TAG_SIZE), False) == DatagramRefusal.TAG


def test_a_tag_is_an_hmac_of_what_is_before_it_and_of_the_destination() -> None:
    data = codec(ALICE).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    key = KeyRing({1: KEY}, 1).derive(1, "router", "router")
    assert data[-TAG_SIZE:] == hmac.digest(key, data[:-TAG_SIZE] + BOB.to_bytes(8, "little"), "sha256")[:TAG_SIZE]


def test_with_and_without_keys_do_not_talk() -> None:
    assert codec(BOB).unpack(codec(ALICE, None).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM]), False) == DatagramRefusal.KEY
    assert codec(BOB, None).unpack(codec(ALICE).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM]), False) == DatagramRefusal.KEY


def test_the_tag_covers_the_whole_destination() -> None:
    data = codec(ALICE).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    assert codec(TWIN).unpack(data, False) == DatagramRefusal.TAG
    assert codec(CAROL).unpack(data, False) == DatagramRefusal.TAG


def test_without_keys_the_low_half_of_the_destination_is_checked() -> None:
    data = codec(ALICE, None).pack(RECORDS, 0, 1, 7, 3, BOB, [ITEM])
    assert codec(CAROL, None).unpack(data, False) == DatagramRefusal.DESTINATION


def test_a_heartbeat_may_be_for_any_destination_and_nothing_else_may() -> None:
    alice = codec(ALICE)
    for reader in (codec(BOB), codec(CAROL)):
        assert not isinstance(reader.unpack(alice.pack(HEARTBEAT, FLAG_ANY_DESTINATION, 0, 1, 0, BOB, []), False), str)
        for type_ in (RECORDS, CONTROL, ACKNOWLEDGEMENT):
            data = alice.pack(type_, FLAG_ANY_DESTINATION, 1, 1, 0, BOB, [ITEM])
            assert reader.unpack(data, False) == DatagramRefusal.FLAGS


def test_a_streams_frame_is_not_taken_from_a_datagram_nor_the_other_way_round() -> None:
    alice, bob = codec(ALICE), codec(BOB)
    frame = alice.pack(RECORDS, FLAG_STREAM, 1, 1, 0, BOB, [ITEM])
    datagram = alice.pack(RECORDS, 0, 1, 1, 0, BOB, [ITEM])
    assert bob.unpack(frame, False) == DatagramRefusal.FLAGS
    assert bob.unpack(datagram, True) == DatagramRefusal.FLAGS
    assert not isinstance(bob.unpack(frame, True), str)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"magic": b"XP"}, DatagramRefusal.MAGIC),
        ({"version": 2}, DatagramRefusal.VERSION),
        ({"type": 0}, DatagramRefusal.TYPE),
        ({"type": 7}, DatagramRefusal.TYPE),
        ({"flags": 16}, DatagramRefusal.FLAGS),
        ({"count": 0}, DatagramRefusal.COUNT),
        ({"count": 2}, DatagramRefusal.COUNT),
        ({"type": CONTROL, "count": 11}, DatagramRefusal.COUNT),
        ({"sender": 0}, DatagramRefusal.SENDER),
        ({"sender": 1 << 63}, DatagramRefusal.SENDER),
        ({"sender": BOB}, DatagramRefusal.SENDER),
        ({"sequence": 0}, DatagramRefusal.SEQUENCE),
        ({"sequence": LAST_SEQUENCE + 1}, DatagramRefusal.SEQUENCE),
        ({"word": 1}, DatagramRefusal.DESTINATION),
        ({"key": 7}, DatagramRefusal.KEY),
    ],
)
def test_a_wrong_field_is_refused_by_reason(fields: dict[str, int], reason: str) -> None:
    bob = codec(BOB, None)
    assert not isinstance(bob.unpack(plain(), False), str)
    assert bob.unpack(plain(**fields), False) == reason


def test_short_and_oversized_datagrams_are_refused() -> None:
    bob = codec(BOB, None, limit=200)
    for size in range(HEAD_SIZE):
        assert bob.unpack(plain()[:size], False) == DatagramRefusal.SHORT
    assert bob.unpack(plain() + bytes(200), False) == DatagramRefusal.OVERSIZED


def test_control_messages_are_framed_and_truncations_found() -> None:
    messages = [b"", b"a", b"bc" * 100]
    data = b"head" + b"".join(join_control(messages))
    assert split_control(data, 4, len(data), 3) == messages
    for end in range(4, len(data)):
        assert split_control(data, 4, end, 3) is None
    assert split_control(data, 4, len(data), 2) is None
    assert split_control(data, 4, len(data), 4) is None
