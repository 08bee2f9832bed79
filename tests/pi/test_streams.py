"""One caller's stream: what is read from it, and what of its reads."""

from __future__ import annotations

import asyncio

import pytest

from pi.events import NO_DEVICE, ReadFound, Reply
from pi.streams import streams
from pi.streams.streams import Stream, level_of, message_of, reads_of
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
    (named,) = reads_of(pi_pb2.PiRequest(reads=[pi_pb2.PiRead(uin=7, device=3)]))
    assert named.device == 3


def test_an_unknown_level_is_the_safest() -> None:
    assert level_of(pi_pb2.PiRequest()) is Level.REPLICATED
    assert level_of(pi_pb2.PiRequest.FromString(b"\x18\x63")) is Level.REPLICATED
    assert level_of(pi_pb2.PiRequest(level=Level.ACCEPTED.value)) is Level.ACCEPTED


def test_a_reply_travels_whole() -> None:
    reply = Reply(
        1, 9, Triple(3, 5, 100), results=[1, -2], reads=[ReadFound([(4, 44)], 3, 2, 4, 2, 1)], copies=2, server=(1, 2, "a:1")
    )
    message = message_of(reply)
    assert (message.request, list(message.results), message.copies) == (9, [1, -2], 2)
    assert (message.layout_version, message.epoch, message.committed) == (3, 5, 100)
    assert (message.server.partition, message.server.partitions, message.server.address) == (1, 2, "a:1")
    read = message.reads[0]
    assert read.up_to == 1
    assert (list(read.seqs), list(read.msg_ids), read.floor, read.gap, read.last, read.dropped) == ([4], [44], 3, 2, 4, 2)


@pytest.mark.parametrize(("limit", "value"), [("WINDOW_REQUESTS", 2), ("WINDOW_BYTES", 10)])
async def test_who_does_not_read_replies_is_not_read_from(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(streams, limit, value)
    caller = Caller(5)
    taken: list[int] = []

    def take(request: pi_pb2.PiRequest) -> None:
        taken.append(request.request)
        stream.answer(pi_pb2.PiReply(request=request.request))

    stream = Stream(caller, take, lambda: taken.append(0))
    running = asyncio.create_task(stream.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert taken == [1, 2]  # the first reply is on its way, and is not read
    caller.reads.set()
    async with asyncio.timeout(10):
        await running
    assert caller.got == [1, 2, 3, 4, 5]
    assert taken == [1, 2, 3, 4, 5, 0]


class Caller:
    """Sends some requests, then its last word; reads replies when it is told to."""

    serves = True

    def __init__(self, requests: int) -> None:
        self._requests = [pi_pb2.PiRequest(request=number) for number in range(1, requests + 1)]
        self.reads = asyncio.Event()
        self.got: list[int] = []

    async def opened(self, timeout_s: float) -> None: ...
    async def done_writing(self) -> None: ...

    async def read(self) -> pi_pb2.PiRequest | None:
        return self._requests.pop(0) if self._requests else None

    async def write(self, message: pi_pb2.PiReply) -> None:
        await self.reads.wait()
        self.got.append(message.request)
