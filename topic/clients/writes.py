"""Streams of writers: blocks in, results out, several in one reply.

    block ──▶ size, quota, rule ──▶ core ──▶ log ──▶ committed ──▶ result

Source: docs/topics.md, "Writing".
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, Final

from cluster.access.login_guard import LoginSession
from cluster.access.rules import PRODUCE
from cluster.core.turn import Turn
from cluster.rpc.served import ServedStream, ServedStreams
from pixiu.errors import InvalidArgument, PixiuError, RecordTooLarge, Refusal, Unavailable
from pixiu.rpc.duplex import Served
from pixiu.wire.block import HEAD_BYTES, MAX_BLOCK_BYTES, U32
from pixiu.wire.levels import Level
from pixiu.wire.v1 import topic_pb2 as pb
from topic import events as ev
from topic.clients.group import Group, refusal_of, require

MAX_CLIENT_BYTES: Final = 128
MAX_WRITERS: Final = 10_000
"""Streams of writers at one time. Policy: more are refused with OVERLOADED."""
MAX_BLOCKS: Final = 4096
"""Blocks of a stream that are not answered, or whose results wait for a writer that does not read them. Policy: it is not read
until there are fewer."""
FINISH_TIMEOUT_S: Final = 30.0
"""Time for which a writer that has ended its side is still answered, seconds."""
TOPIC_AT: Final = 12
COUNT_AT: Final = 20
"""Places of the topic and of the number of messages in a block's head."""

Handler = Served[pb.TopicWriteReply, pb.TopicWriteRequest]


class WriteStream:
    """One writer's process: its blocks that are not answered, and the reply that waits to leave.

    Args:
        handler: the stream's transport.
        writes: all streams.
    """

    def __init__(self, handler: Handler, writes: Writes) -> None:
        self.number = 0
        """0 until it is admitted."""
        self._writes = writes
        self.session: LoginSession | None = None
        self.opened = False
        self._reply = pb.TopicWriteReply()
        self._last = 0
        self._waiting: dict[int, tuple[int, int]] = {}
        """Own number of a block → the client's, and its size."""
        self._unanswered = 0
        """Bytes of these blocks."""
        self.served: ServedStream[pb.TopicWriteReply, pb.TopicWriteRequest] = ServedStream(
            handler, lambda request: writes.take(self, request), self, lambda: writes.over(self), FINISH_TIMEOUT_S
        )

    def number_of(self, request: int, size: int) -> int:
        """Note a block; returns the number by which the core answers it."""
        self._last += 1
        self._waiting[self._last] = request, size
        self._unanswered += size
        self.served.took()
        return self._last

    def answered(self, number: int, result: pb.TopicWriteResult, triple: pb.TopicTriple) -> None:
        """Take the result of a block."""
        found = self._waiting.pop(number, None)
        if found is not None:
            result.request = found[0]
            self._unanswered -= found[1]
            self._reply.results.append(result)
            self._reply.triple.CopyFrom(triple)
            self.served.changed()

    def say(self, reply: pb.TopicWriteReply) -> None:
        """Merge other fields into the next reply."""
        self._reply.MergeFrom(reply)
        self.served.changed()

    def end(self, why: pb.TopicRefusal) -> None:
        """End the stream with a reason, after what waits is written."""
        self.say(pb.TopicWriteReply(end=why))
        self.served.end(why.text or why.code)

    def login_over(self, text: str) -> None:
        """End the stream: its login has expired, or an operator ended it."""
        self.end(pb.TopicRefusal(code=Unavailable.code, text=text, retry_after_ms=100))

    # --- as `Pending`

    def unanswered(self) -> bool:
        """Return True while a block waits for its answer."""
        return bool(self._waiting)

    def full(self) -> bool:
        """Return True while the window is full, or too many blocks or results wait."""
        return self._unanswered >= self._writes.window or len(self._waiting) + len(self._reply.results) >= MAX_BLOCKS

    def give(self) -> pb.TopicWriteReply | None:
        """Next reply: everything that has come while the one before was written."""
        if not self._reply.ByteSize():
            return None
        reply, self._reply = self._reply, pb.TopicWriteReply()
        return reply


class Writes:
    """The streams of all writers.

    Args:
        group: the replica.
        turn: of the process's clients.
        window: bytes of blocks that may be unanswered on one stream.
    """

    def __init__(self, group: Group, turn: Turn, window: int) -> None:
        self._group, self._turn, self.window = group, turn, window
        self.streams: ServedStreams[WriteStream] = ServedStreams(MAX_WRITERS, "this replica has %d streams of writers")
        self.refused = 0
        """Blocks that were refused before the core saw them."""

    def open(self, handler: Handler) -> WriteStream:
        """Make a stream. It is not admitted yet."""
        return WriteStream(handler, self)

    def admit(self, stream: WriteStream) -> None:
        """Number a stream. Raises Draining, Overloaded."""
        stream.number = self.streams.enter(stream)

    def over(self, stream: WriteStream) -> None:
        """Forget a stream that is over."""
        if stream.session is not None:
            stream.session.close()
        self.streams.pop(stream.number, None)

    @property
    def unanswered(self) -> bool:
        """True while a block waits for its answer."""
        return any(stream.unanswered() for stream in self.streams.values())

    def drain(self) -> None:
        """Ask all writers to find the next leader."""
        self.streams.draining = True
        for stream in list(self.streams.values()):
            stream.say(pb.TopicWriteReply(draining=True))

    def stop(self) -> None:
        """End all streams."""
        for stream in list(self.streams.values()):
            stream.served.end("this replica stops")

    def take(self, stream: WriteStream, request: pb.TopicWriteRequest) -> Awaitable[Any] | None:
        """Take a request of a stream."""
        if stream.opened:
            return self._block(stream, request)
        self._hello(stream, request)
        return None

    def _hello(self, stream: WriteStream, request: pb.TopicWriteRequest) -> None:
        stream.opened = True
        if request.block or len(request.client.encode()) > MAX_CLIENT_BYTES:
            text = f"a stream begins with a request without a block, and a client's name has at most {MAX_CLIENT_BYTES} bytes"
            stream.end(refusal_of(self._group, InvalidArgument(text)))
        else:
            stream.say(pb.TopicWriteReply(window_bytes=self.window))

    async def _block(self, stream: WriteStream, request: pb.TopicWriteRequest) -> None:
        session, block = stream.session, request.block
        number = stream.number_of(request.request, len(block))
        try:
            if len(block) > MAX_BLOCK_BYTES:
                raise RecordTooLarge(f"a block has at most {MAX_BLOCK_BYTES} bytes, this one {len(block)}")
            if len(block) < HEAD_BYTES:
                raise InvalidArgument(f"a block has at least {HEAD_BYTES} bytes, this one {len(block)}")
            if session is not None:
                if session.spend(int(U32.unpack_from(block, COUNT_AT)[0]), len(block)):
                    await session.hold()
                topic = self._group.store.state.topics.get(int(U32.unpack_from(block, TOPIC_AT)[0]))
                if topic is not None:  # else the core knows no such part
                    await require(session, PRODUCE, topic.name)
        except PixiuError as problem:
            self.refused += 1
            self._refuse(stream, number, Refusal.of(problem))
        else:
            sender = session.identity.uin if session is not None else 0
            stored = request.level == Level.STORED.value
            level = Level.STORED if stored else Level.from_wire(request.level) or Level.REPLICATED
            event = ev.WriteRequested(stream.number, number, sender, block, level, request.epoch)
            await self._turn.run(partial(self._write, stream, event), len(block))
        if (space := stream.served.space()) is not None:
            await space

    def _write(self, stream: WriteStream, event: ev.WriteRequested) -> None:
        if stream.number in self.streams:
            self._group.step(event)

    def _refuse(self, stream: WriteStream, number: int, refusal: Refusal) -> None:
        result = pb.TopicWriteResult(verdict=pb.WRITE_REFUSED, base=-1, refusal=refusal_of(self._group, refusal))
        stream.answered(number, result, pb.TopicTriple())

    def answer(self, effect: ev.WriteReply) -> None:
        """Pass an answer of the core to its stream, if that is open."""
        stream = self.streams.get(effect.stream)
        if stream is None:
            return
        triple = pb.TopicTriple(version=effect.triple.layout_version, epoch=effect.triple.epoch, committed=effect.triple.committed)
        result = pb.TopicWriteResult(position=effect.position, base=effect.base)
        if effect.refusal is not None or effect.verdict is None:
            result.verdict = pb.WRITE_REFUSED
            if effect.refusal is not None:
                result.refusal.CopyFrom(refusal_of(self._group, effect.refusal))
        else:
            result.verdict = pb.WriteVerdict.ValueType(effect.verdict)
            for number, low, high, group in effect.children:
                result.children.add(number=number, low=low, high=high, group=group)
        stream.answered(effect.request, result, triple)
