"""Protocols of the load of durable topics: what Kafka is sent and what it answers, byte by byte."""

from __future__ import annotations

import struct

from comparison.cases import CASES
from comparison.servers import PEERS, SYNCED, TOPICS
from comparison.topics.kafka import BATCH_OVERHEAD, CRC_FROM, HEAD, batch, crc32c, messages_in, varint
from comparison.topics.load import CLIENTS


def test_the_crc_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_numbers_are_zigzag() -> None:
    assert [varint(number) for number in (0, -1, 1, 63, 64)] == [b"\0", b"\1", b"\2", b"\x7e", b"\x80\1"]


def test_a_batch_says_its_size_and_its_crc() -> None:
    data = batch(3, 100)
    _, length, _, magic, crc, _, last, *_, messages = HEAD.unpack_from(data)
    assert (length, magic, last, messages) == (len(data) - BATCH_OVERHEAD, 2, 2, 3)
    assert crc & 0xFFFFFFFF == crc32c(data[CRC_FROM:])


def test_only_complete_batches_of_a_fetch_count() -> None:
    first, second = batch(3, 10), struct.pack(">q", 3) + batch(2, 10)[8:]
    assert messages_in(first + second) == (5, 5)
    assert messages_in(first + second[:-1]) == (3, 3)
    assert messages_in(first[:20]) == (0, 0)


def test_each_topic_case_has_a_peer_that_promises_the_same() -> None:
    for name in TOPICS:
        peers = [peer for peer in PEERS.values() if peer.cases is None or name in peer.cases]
        assert peers, name
        assert all(peer.wire in CLIENTS for peer in peers), name
        assert name not in SYNCED or any(peer.name.endswith("-synced") for peer in peers)
        assert CASES[name].act == "write" or CASES[name].prefilled
