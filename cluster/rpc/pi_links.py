"""Streams to the leaders of Pi, for relays and gateways. Every question is answered, at the latest when its stream is abandoned.

Source: docs/links.md, docs/delivery.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cluster.rpc.framed import Framed
from cluster.rpc.leader_stream import LeaderStream, Reply
from pixiu.discovery.view import View
from pixiu.errors import NotLeader, WrongPartition
from pixiu.wire.v1 import pi_pb2

MAX_UNANSWERED: Final = 1000
"""Limit of unanswered requests to one partition. Policy: further ones are answered with None at once."""
STALL_S: Final = 3.0
"""Time without an answer after which a leader's stream is replaced, seconds: it may no longer lead."""
CHECK_S: Final = 1.0

Answered = Callable[[pi_pb2.PiReply | None, int], None]
"""Called with the reply, None if the stream is gone, so that the outcome is unknown; and with the partition's number of
partitions, if it does not serve some of these users any more, or not yet, else 0. A reply with a code is a refusal."""


class _Partition:
    """One partition's stream, and its questions."""

    def __init__(
        self,
        number: int,
        view: Callable[[], View],
        crash: Callable[[BaseException], None],
        framed: Framed,
    ) -> None:
        self._unanswered: dict[int, tuple[float, Answered]] = {}
        self._request = 0
        self._closed = False
        self.stream = LeaderStream("pi", number, view, framed, up=self._up, reply=self._replied, down=self._down, crash=crash)

    def ask(self, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Answered) -> None:
        if self._closed or not self.stream.open or len(self._unanswered) >= MAX_UNANSWERED:
            answered(None, 0)
            return
        self._request += 1
        self._unanswered[self._request] = asyncio.get_running_loop().time(), answered
        self.stream.send(pi_pb2.PiRequest(request=self._request, operations=operations, reads=reads))

    def check(self, now: float) -> None:
        """Abandon a stream without answers."""
        if self._unanswered and next(iter(self._unanswered.values()))[0] + STALL_S <= now:
            self.stream.leave()

    def close(self) -> asyncio.Future[None]:
        self._closed = True
        self._down("")
        return asyncio.ensure_future(self.stream.close())

    def _up(self, epoch: int) -> None:
        """Nothing to do: questions may be asked."""

    def _replied(self, reply: Reply) -> None:
        _, answered = self._unanswered.pop(reply.request if isinstance(reply, pi_pb2.PiReply) else 0, (0.0, None))
        if answered is None or not isinstance(reply, pi_pb2.PiReply):
            return
        if reply.code == NotLeader.code:
            self.stream.leave()
        answered(reply, reply.server.partitions if reply.code == WrongPartition.code else 0)

    def _down(self, reason: str) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for _, answered in unanswered.values():
            answered(None, 0)


class PiLinks:
    """A stream to the leader of each partition.

    Args:
        view: returns the newest view of the cluster.
        crash: called with an error that is a bug here.
        framed: opens streams.
    """

    def __init__(
        self,
        view: Callable[[], View],
        crash: Callable[[BaseException], None],
        framed: Framed,
    ) -> None:
        self._view, self._crash, self._framed = view, crash, framed
        self._partitions: list[_Partition] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return len(self._partitions)

    @property
    def open(self) -> int:
        """Number of partitions with a known leader that is connected."""
        return sum(partition.stream.open for partition in self._partitions)

    def set_partitions(self, count: int) -> None:
        """Follow the layout. Requests to a removed partition are answered with None."""
        while len(self._partitions) > count:
            task = self._partitions.pop().close()
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        while len(self._partitions) < count:
            self._partitions.append(_Partition(len(self._partitions), self._view, self._crash, self._framed))
        if self._timer is None and count:
            self._check()

    def ask(self, partition: int, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Answered) -> None:
        """Ask a partition's leader; `answered` is called once, perhaps at once."""
        if partition >= len(self._partitions):
            answered(None, 0)
        else:
            self._partitions[partition].ask(operations, reads, answered)

    async def close(self) -> None:
        """End the streams to all partitions."""
        if self._timer is not None:
            self._timer.cancel()
        self.set_partitions(0)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(CHECK_S, self._check)
        for partition in self._partitions:
            partition.check(loop.time())
