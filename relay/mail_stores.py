"""A relay's streams to the leaders of Pi. Every question is answered, at the latest when its stream is given up.

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
from pixiu.rpc.channels import Channels
from pixiu.wire.v1 import pi_pb2

MAX_UNANSWERED: Final = 1000
"""Requests to one partition. Policy: further ones are answered at once, with nothing."""
STALL_S: Final = 3.0
"""A leader that answers nothing for so long may have lost its office: another stream is opened."""
CHECK_S: Final = 1.0

Answered = Callable[[pi_pb2.PiReply | None, int], None]
"""None: it was not done, or is not known to be. Then the number of partitions by the one that was asked, where that serves some
of these users no more, or not yet; else 0."""


class _Partition:
    """One partition's stream, and what was asked on it."""

    def __init__(
        self,
        number: int,
        view: Callable[[], View],
        channels: Channels,
        crash: Callable[[BaseException], None],
        framed: Framed | None,
    ) -> None:
        self._unanswered: dict[int, tuple[float, Answered]] = {}
        self._request = 0
        self._closed = False
        self.stream = LeaderStream(
            "pi", number, view, channels, up=self._up, reply=self._replied, down=self._down, crash=crash, framed=framed
        )

    def ask(self, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Answered) -> None:
        if self._closed or not self.stream.open or len(self._unanswered) >= MAX_UNANSWERED:
            answered(None, 0)
            return
        self._request += 1
        self._unanswered[self._request] = asyncio.get_running_loop().time(), answered
        self.stream.send(pi_pb2.PiRequest(request=self._request, operations=operations, reads=reads))

    def check(self, now: float) -> None:
        """Give up a stream on which nothing comes."""
        if self._unanswered and next(iter(self._unanswered.values()))[0] + STALL_S <= now:
            self.stream.leave()

    def close(self) -> asyncio.Future[None]:
        self._closed = True
        self._down("")
        return asyncio.ensure_future(self.stream.close())

    def _up(self, epoch: int) -> None:
        """Questions may be asked."""

    def _replied(self, reply: Reply) -> None:
        _, answered = self._unanswered.pop(reply.request if isinstance(reply, pi_pb2.PiReply) else 0, (0.0, None))
        if answered is None or not isinstance(reply, pi_pb2.PiReply):
            return
        if reply.code == NotLeader.code:
            self.stream.leave()
        answered(None if reply.code else reply, reply.server.partitions if reply.code == WrongPartition.code else 0)

    def _down(self, reason: str) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for _, answered in unanswered.values():
            answered(None, 0)


class PiLinks:
    """A stream to the leader of each partition.

    Args:
        view: gives the newest view of the cluster.
        channels: gRPC channels by address.
        crash: called with an error that is a bug here.
        framed: opens framed streams; None: gRPC carries all.
    """

    def __init__(
        self,
        view: Callable[[], View],
        channels: Channels,
        crash: Callable[[BaseException], None],
        framed: Framed | None = None,
    ) -> None:
        self._view, self._channels, self._crash, self._framed = view, channels, crash, framed
        self._partitions: list[_Partition] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def partitions(self) -> int:
        """How many there are."""
        return len(self._partitions)

    @property
    def open(self) -> int:
        """How many partitions have a leader that is known and reached."""
        return sum(partition.stream.open for partition in self._partitions)

    def set_partitions(self, count: int) -> None:
        """Follow the layout. Requests to a partition that is gone are answered with nothing."""
        while len(self._partitions) > count:
            task = self._partitions.pop().close()
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        while len(self._partitions) < count:
            self._partitions.append(_Partition(len(self._partitions), self._view, self._channels, self._crash, self._framed))
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
