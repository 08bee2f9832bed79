"""Requests and replies of Pi on the wire."""

from __future__ import annotations

from pi.events import NO_DEVICE, ReadFound, Reply
from pi.inboxes.notes import NoteFound
from pi.streams.streams import level_of, message_of, reads_of
from pixiu.wire.levels import Level, Triple
from pixiu.wire.v1 import pi_pb2


def test_reads_of_a_request_are_bounded_together() -> None:
    request = pi_pb2.PiRequest(reads=[pi_pb2.PiRead(uin=7, num=5000) for _ in range(60)])
    request.reads[1].start = 3
    found = reads_of(request)
    assert [read.num for read in found] == [1000] * 50 + [0] * 10
    assert (found[0].start, found[1].start) == (None, 3)


def test_who_peeks_is_no_device() -> None:
    (found,) = reads_of(pi_pb2.PiRequest(reads=[pi_pb2.PiRead(uin=7, device=3, lane=1, num=5, peek=True)]))
    assert (found.device, found.start, found.num) == (NO_DEVICE, None, 5)
    assert not found.notes
    (noted,) = reads_of(pi_pb2.PiRequest(reads=[pi_pb2.PiRead(uin=7, peek=True, notes=True)]))
    assert noted.notes
    (named,) = reads_of(pi_pb2.PiRequest(reads=[pi_pb2.PiRead(uin=7, device=3)]))
    assert named.device == 3


def test_an_unknown_level_is_the_safest() -> None:
    assert level_of(pi_pb2.PiRequest()) is Level.REPLICATED
    assert level_of(pi_pb2.PiRequest.FromString(b"\x18\x63")) is Level.REPLICATED
    assert level_of(pi_pb2.PiRequest(level=Level.ACCEPTED.value)) is Level.ACCEPTED


def test_a_reply_travels_whole() -> None:
    reply = Reply(
        1, 9, Triple(3, 5, 100), results=[1, -2], copies=2, server=(1, 2, "a:1"),
        reads=[ReadFound([(4, 44)], 3, 2, 4, 2, 1, notes=[NoteFound(2, 7, b"value")], generation=8)],
    )  # fmt: skip
    message = message_of(reply)
    assert (message.request, list(message.results), message.copies) == (9, [1, -2], 2)
    assert (message.layout_version, message.epoch, message.committed) == (3, 5, 100)
    assert (message.server.partition, message.server.partitions, message.server.address) == (1, 2, "a:1")
    read = message.reads[0]
    assert read.up_to == 1
    assert [(note.name, note.generation, note.value) for note in read.notes] == [(2, 7, b"value")]
    assert read.notes_generation == 8
    assert (list(read.seqs), list(read.msg_ids), read.floor, read.gap, read.last, read.dropped) == ([4], [44], 3, 2, 4, 2)
