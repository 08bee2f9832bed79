"""One Subscribe stream to one gateway: the requests sent on it, and those that the gateway has confirmed."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from pixiu.errors import Overloaded, PixiuError, error_of_code
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

MAX_NAMES_A_REQUEST: Final = 1_000
"""Limit of rooms, topics and acknowledgements in one request; more go in several. No gateway takes fewer unless it announces so."""
MAX_UNCONFIRMED: Final = 10_000
"""Limit of requests under way on one stream."""

Reading = asyncio.Task[wire_pb2.SubscribeReply | None]
"""Task that reads the next reply; None at the end."""


class Waiter:
    """A `join` or `leave` that waits until the whole cluster has it, or a wait for acknowledgements.

    Args:
        lost: error if its stream ends; None: the next stream answers it.
    """

    __slots__ = ("done", "lost", "rooms", "topics", "waits_for")

    def __init__(self, rooms: frozenset[int], topics: frozenset[str], lost: PixiuError | None = None) -> None:
        self.lost = lost
        self.rooms = rooms
        self.topics = topics
        self.waits_for: set[int] = set()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(self, error: PixiuError | None = None) -> None:
        """End the wait: the request has taken effect, or was refused."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class GatewayStream:
    """Wraps one call. `read` and `take` report its failure (`StreamEnded`)."""

    def __init__(
        self,
        address: str,
        channels: Channels,
        uin: int,
        client: str,
        *,
        chat: bool = False,
        mail: bool = False,
        device: int = 0,
        device_class: str = "",
    ) -> None:
        self.address = address
        self.rooms: set[int] = set()
        self.topics: set[str] = set()
        self.uin = 0
        self.draining = False
        self.max_names = MAX_NAMES_A_REQUEST
        self.lacking = False
        """True if a request was refused for now and will be repeated."""
        self._requests: dict[int, tuple[set[int], set[str]]] = {}
        self._last_request = 0
        self._waiters: list[Waiter] = []
        self._reading: Reading | None = None
        self._call: GrpcCall[wire_pb2.SubscribeRequest, wire_pb2.SubscribeReply] = GrpcCall.over(
            channels, address, lambda channel: wire_pb2_grpc.SubscriberStub(channel).Subscribe(metadata=channels.metadata())
        )
        greeting = wire_pb2.SubscribeHello(uin=uin, client=client, chat=chat, mail=mail)
        greeting.device, greeting.device_class = device, device_class
        hello = wire_pb2.SubscribeRequest(hello=greeting)
        if chat or mail:  # answered like a join
            hello.request = self._last_request = 1
            self._requests[1] = (set(), set())
        self._outgoing = deque((hello,))
        self._more = asyncio.Event()
        self._greeted = asyncio.Event()
        # A write that is cancelled ends the stream, so writes have a task of their own, which no caller's time-out can cancel.
        self._writer = asyncio.create_task(self._write(), name=f"pixiu-requests-{address}")

    def reconcile(self, rooms: set[int], topics: set[str], waiters: list[Waiter]) -> None:
        """Join what is wanted and was not asked for yet, and leave what is not wanted; `waiters` wait for the answers.

        Raises `Overloaded` when too many requests are unconfirmed.
        """
        if len(self._requests) >= MAX_UNCONFIRMED:
            raise Overloaded(f"gateway {self.address} has not confirmed {MAX_UNCONFIRMED} requests yet: await each join and leave")
        joins = self._parts(rooms - self.rooms, topics - self.topics)
        leaves = self._parts(self.rooms - rooms, self.topics - topics)
        self.rooms = set(rooms)
        self.topics = set(topics)
        requests = [wire_pb2.SubscribeRequest(leave_rooms=part[0], leave_topics=part[1]) for part in leaves]
        requests += [wire_pb2.SubscribeRequest(join_rooms=part[0], join_topics=part[1]) for part in joins]
        for request in requests:
            self._last_request += 1
            request.request = self._last_request
            self._requests[self._last_request] = (set(request.join_rooms), set(request.join_topics))
        for waiter in waiters:
            # A name that was asked for before may not be confirmed yet: wait for everything that is under way.
            waiter.waits_for = set(self._requests)
            if waiter.waits_for:
                self._waiters.append(waiter)
            else:
                waiter.finish()
        self._outgoing.extend(requests)
        self._more.set()

    def acknowledge(self, ranges: list[tuple[int, int, int]], waiter: Waiter | None = None) -> None:
        """Acknowledge mail: (lane, first, last InboxSeq). `waiter` waits until the gateway has this and everything before it.

        Raises `Overloaded` when too many wait.
        """
        if waiter is not None and len(self._requests) >= MAX_UNCONFIRMED:
            raise Overloaded(f"gateway {self.address} has not confirmed {MAX_UNCONFIRMED} requests yet: await each flush")
        for start in range(0, max(len(ranges), 1), self.max_names):
            request = wire_pb2.SubscribeRequest()
            for lane, first, last in ranges[start : start + self.max_names]:
                request.mail_acknowledgements.add(lane=lane, first=first, last=last)
            self._outgoing.append(request)
        if waiter is not None:
            self._last_request += 1
            request.request = self._last_request
            self._requests[self._last_request] = (set(), set())
            waiter.waits_for = {self._last_request}
            self._waiters.append(waiter)
        self._more.set()

    async def _write(self) -> None:
        try:
            # Write nothing after the hello until the gateway has answered it: a write that meets the end of a refused call makes
            # gRPC forget the status with the reason.
            await self._call.write(self._outgoing.popleft())
            await self._greeted.wait()
            while True:
                while self._outgoing:
                    await self._call.write(self._outgoing.popleft())
                self._more.clear()
                await self._more.wait()
        except StreamEnded:
            pass  # the reader learns the reason

    @property
    def awaited(self) -> bool:
        """True if somebody waits for a confirmation."""
        return bool(self._waiters)

    @property
    def settled(self) -> bool:
        """True if the gateway has confirmed every request."""
        return not self._requests

    def confirmed(self, request: int) -> None:
        """Handle a confirmation: a request has taken effect in the whole cluster."""
        if self._requests.pop(request, None) is None:
            return
        left = []
        for waiter in self._waiters:
            waiter.waits_for.discard(request)
            if waiter.waits_for:
                left.append(waiter)
            else:
                waiter.finish()
        self._waiters = left

    def refused(self, request: int, code: str, text: str, retry_after_ms: int = 0) -> tuple[set[int], set[str], list[Waiter]]:
        """Handle a refused request (0: all). Returns its rooms and topics, and the waiters that got the error."""
        numbers = [request] if request else list(self._requests)
        rooms: set[int] = set()
        topics: set[str] = set()
        told: list[Waiter] = []
        for number in numbers:
            asked = self._requests.pop(number, None)
            if asked is None:
                continue
            rooms |= asked[0]
            topics |= asked[1]
            for waiter in [waiter for waiter in self._waiters if number in waiter.waits_for]:
                waiter.finish(error_of_code(code, text, retry_after_ms))
                self._waiters.remove(waiter)
                told.append(waiter)
        self.rooms -= rooms
        self.topics -= topics
        return rooms, topics, told

    def read(self) -> Reading:
        """Read the next reply, as a task: time-outs while waiting for the task do not end the stream; cancelling it would."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._call.read())
        return self._reading

    def take(self) -> wire_pb2.SubscribeReply | None:
        """Return the result of `read` when it is done; None at the end of the stream. Raises `StreamEnded`."""
        assert self._reading is not None
        reading, self._reading = self._reading, None
        reply = reading.result()
        self._greeted.set()
        return reply

    async def close(self) -> list[Waiter]:
        """End the stream. Returns the waiters that are left: the next stream answers them."""
        self._call.cancel()
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._reading = None
        await self._call.close()
        waiters, self._waiters = self._waiters, []
        self._requests.clear()
        return [waiter for waiter in waiters if not waiter.done.done()]

    def _parts(self, rooms: set[int], topics: set[str]) -> list[tuple[list[int], list[str]]]:
        ordered_rooms, ordered_topics, most = sorted(rooms), sorted(topics), self.max_names
        by_room: list[tuple[list[int], list[str]]] = [
            (ordered_rooms[start : start + most], []) for start in range(0, len(ordered_rooms), most)
        ]
        left = most - len(by_room[-1][0]) if by_room else 0
        if left and ordered_topics:  # do not split what fits into one request
            by_room[-1] = by_room[-1][0], ordered_topics[:left]
        return by_room + [([], ordered_topics[start : start + most]) for start in range(left, len(ordered_topics), most)]
