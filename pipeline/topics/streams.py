"""Streams of blocks to the leaders of a topic's groups: sent within each leader's window, all answered in one queue.

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import grpc

from pipeline.topics.client import Again, TopicClient, error_of
from pipeline.topics.epochs import Outgoing
from pixiu.errors import (
    InvalidArgument,
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    RecordTooLarge,
    error_of_code,
)
from pixiu.wire.v1 import level_pb2, topic_pb2, topic_pb2_grpc

ANSWER_S: Final = 30.0
"""Time limit for the next answer while blocks are unanswered, seconds; then the positions are asked for again."""
FIRST_WINDOW: Final = 1 << 20
"""Bytes that may be unanswered before a leader has said how many may be."""
_FATAL: Final = frozenset(
    kind.code for kind in (InvalidArgument, MalformedData, NotAllowed, NotAuthenticated, RecordTooLarge)
)  # fmt: skip
_VERDICTS: Final = {
    topic_pb2.WRITE_TOO_MANY_WRITERS: "it knows as many writers as it may",
    topic_pb2.WRITE_FULL: "it has no offsets left, and has to be split or moved",
}


class _Stream:
    """A stream to one leader; its answers come from a thread."""

    def __init__(self, topic: TopicClient, address: str, client: str, answers: queue.SimpleQueue[Any]) -> None:
        self.address, self._answers = address, answers
        self._requests: queue.SimpleQueue[topic_pb2.TopicWriteRequest | None] = queue.SimpleQueue()
        self.window, self.unanswered = FIRST_WINDOW, dict[int, int]()
        """Request → size of its block."""
        self._requests.put(topic_pb2.TopicWriteRequest(client=client))
        stub: Any = topic_pb2_grpc.TopicLogStub(topic.channel(address))  # type: ignore[no-untyped-call, unused-ignore]
        self._call = stub.Write(iter(self._requests.get, None), metadata=topic.metadata())
        self._thread = threading.Thread(target=self._take, name="pixiu-answers", daemon=True)
        self._thread.start()

    def _take(self) -> None:
        try:
            for reply in self._call:
                self._answers.put((self, reply))
            self._answers.put((self, Again(f"{self.address}: it ended the stream")))
        except grpc.RpcError as error:
            self._answers.put((self, error_of(error, self.address)))

    def send(self, number: int, block: bytes) -> None:
        self.unanswered[number] = len(block)
        self._requests.put(topic_pb2.TopicWriteRequest(request=number, block=block, level=level_pb2.REPLICATED))

    def close(self) -> None:
        self._requests.put(None)
        self._call.cancel()
        self._thread.join()


class Streams:
    """The streams of one task: `with Streams(topic, "spark-…") as streams`."""

    def __init__(self, topic: TopicClient, client: str) -> None:
        self._topic, self._client = topic, client
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._last = 0

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams; what they have not answered may be stored or not."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def store(self, blocks: Sequence[Outgoing]) -> None:
        """Send blocks and wait until all are stored. Raises Again if one is not, or it is not known; the positions show what is
        stored then. Raises what a leader refuses for good.
        """
        try:
            for each in blocks:
                stream = self._stream(each.group)
                while stream.unanswered and sum(stream.unanswered.values()) + len(each.block) > stream.window:
                    self._take()
                self._last += 1
                stream.send(self._last, each.block)
            while any(stream.unanswered for stream in self._streams.values()):
                self._take()
        except BaseException:
            self.close()
            raise

    def _stream(self, group: int) -> _Stream:
        if group not in self._streams:
            addresses = self._topic.addresses(group)
            if not addresses:
                raise Again(f"no replica of topic group {group} is known")
            self._streams[group] = _Stream(self._topic, addresses[0], self._client, self._answers)
        return self._streams[group]

    def _take(self) -> None:
        """Take one reply, of any stream that is still in use."""
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                stream, reply = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise Again(f"no answer for {ANSWER_S:g} s") from None
            if stream in self._streams.values():
                break
        if isinstance(reply, Exception):
            raise reply
        stream.window = reply.window_bytes or stream.window
        for result in reply.results:
            stream.unanswered.pop(result.request, None)
            if result.verdict != topic_pb2.WRITE_STORED:
                _raise(result, stream.address)
        if reply.HasField("end"):
            _refused(reply.end, stream.address)
        if reply.draining:
            raise Again(f"{stream.address}: it is draining")


def _raise(result: topic_pb2.TopicWriteResult, address: str) -> None:
    """Raise for a block that is not stored now: another attempt has stored it, a block before it is lost, its part is sealed …"""
    if result.verdict == topic_pb2.WRITE_REFUSED:
        _refused(result.refusal, address)
    raise Again(f"{address}: {_VERDICTS.get(result.verdict, topic_pb2.WriteVerdict.Name(result.verdict))}")


def _refused(refusal: topic_pb2.TopicRefusal, address: str) -> None:
    if refusal.code in _FATAL:
        raise error_of_code(refusal.code, f"{address}: {refusal.text}")
    raise Again(f"{address}: {refusal.text or refusal.code}")
