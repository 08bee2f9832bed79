"""A relay's streams to gateways: deliveries out, acknowledgements in. Nothing waits here without a bound.

    wanted ─▶ call, the relay's name ─▶ `ready` ─▶ deliveries ─▶ broken ─▶ pause, and again while somebody is there

Source: docs/delivery.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cluster.rpc.framed import Framed, framed_or_grpc
from cluster.rpc.methods import DELIVER
from pixiu.discovery.node import Node
from pixiu.discovery.view import View
from pixiu.ids import EndpointID
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import Duplex, StreamEnded, ask
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import delivery_pb2, delivery_pb2_grpc
from relay.delivery.events import Chunk, DeviceLane
from relay.mail_devices import Place

READY_S: Final = 5.0
"""For the gateway's first word."""
STALL_S: Final = 10.0
"""A stream that takes nothing for so long is broken."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
MAX_MESSAGE_BYTES: Final = 512 << 10
"""Of one message, but for a single larger record."""
MAX_SAID: Final = 200_000
"""Devices that a stream has named. Policy: all are forgotten, and named again."""
Deliveries = Duplex[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]


class Owner(Protocol):
    """What the streams tell of."""

    def stream_ready(self, gateway: int) -> None:
        """Called when the gateway's stream takes deliveries."""

    def stream_broken(self, gateway: int) -> None:
        """What was on the way may be lost."""

    def acknowledged(self, reply: delivery_pb2.DeliveryReply) -> None:
        """Clients have got something."""

    def place(self, uin: int, number: int) -> Place | None:
        """Where a device is."""


@dataclass(slots=True)
class Batch:
    """What leaves in one message."""

    devices: list[delivery_pb2.MailDevice] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    count: int = 0
    """Of envelopes in them."""
    asked: list[delivery_pb2.DeviceLane] = field(default_factory=list)
    size: int = 0


class Outbox:
    """What waits for one stream, and which devices it has named.

    Args:
        place: where a device is, by UIN and Pi's number.
        gateway: the endpoint of the stream's gateway.
    """

    def __init__(self, place: Callable[[int, int], Place | None], gateway: int) -> None:
        self._place, self._gateway = place, gateway
        self._batches: deque[Batch] = deque()
        self._said: dict[tuple[int, int], tuple[int, int]] = {}
        """(UIN, number) → (key, connect time)."""
        self.bytes = 0
        """That wait, or are being sent."""

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Mails. A device is named before its first one, and again when its connection is another."""
        for uin, number, count, chunk in chunks:
            place = self._place(uin, number)
            named: delivery_pb2.MailDevice | None = None
            if place is not None and place.gateway == self._gateway:
                meant = place.key, place.connection
                if self._said.get((uin, number)) != meant:
                    if len(self._said) >= MAX_SAID:
                        self._said.clear()
                    self._said[uin, number] = meant
                    named = delivery_pb2.MailDevice(uin=uin, key=place.key, connect_time=place.connection, device=number)
            last = self._batches[-1] if self._batches else None
            # What was for a device's former connection leaves before the new one is named.
            if last is None or last.asked or (named is not None and last.chunks) or last.size + len(chunk) > MAX_MESSAGE_BYTES:
                last = Batch()
                self._batches.append(last)
            if named is not None:
                last.devices.append(named)
            last.chunks.append(chunk)
            last.count += count
            last.size += len(chunk)
            self.bytes += len(chunk)

    def ask(self, lanes: Sequence[DeviceLane]) -> None:
        """Ask what was written of these, behind all that waits."""
        if not self._batches:
            self._batches.append(Batch())
        self._batches[-1].asked.extend(delivery_pb2.DeviceLane(**lane._asdict()) for lane in lanes)

    def take(self) -> Batch:
        """The next message; `sent` when it has left."""
        return self._batches.popleft()

    def sent(self, batch: Batch) -> None:
        """Count a batch that has left."""
        self.bytes -= batch.size


class _Stream:
    """One gateway's."""

    def __init__(self, gateway: int, streams: GatewayStreams) -> None:
        self.gateway, self._streams = gateway, streams
        self.outbox = Outbox(streams.owner.place, gateway)
        self._duplex: Deliveries | None = None
        """While the gateway takes deliveries."""
        self._leaving: Batch | None = None
        """What is being written."""
        self._stalled: asyncio.TimerHandle | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-deliver-{gateway:016x}")
        self.task.add_done_callback(streams.ended)

    @property
    def ready(self) -> bool:
        return self._duplex is not None

    def send(self, chunks: Sequence[Chunk]) -> None:
        self.outbox.add(chunks)
        if self._duplex is not None:
            self._duplex.wake()

    def ask(self, lanes: Sequence[DeviceLane]) -> None:
        if self._duplex is not None:
            self.outbox.ask(lanes)
            self._duplex.wake()

    def give_up(self) -> None:
        """It does not take what is sent."""
        duplex, self._duplex = self._duplex, None
        if duplex is not None:
            duplex.end("the gateway does not take what is sent")

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            node = self._streams.view().by_endpoint(self.gateway)
            if node is not None and await self._serve(node):
                self._streams.broke(self.gateway)
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _serve(self, node: Node) -> bool:
        """One stream to its end. Whether it was ready."""

        def by_grpc() -> GrpcCall[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]:
            return GrpcCall.over(
                self._streams.channels, node.address, lambda channel: delivery_pb2_grpc.MailDeliveryStub(channel).Deliver()
            )

        parse = delivery_pb2.DeliveryReply.FromString
        try:
            async with framed_or_grpc(self._streams.framed, node, DELIVER, parse, by_grpc) as call:
                reply = await ask(call, delivery_pb2.DeliveryBatch(relay=self._streams.endpoint), READY_S)
                if not reply.ready:
                    return False
                self.outbox = Outbox(self._streams.owner.place, self.gateway)
                duplex = self._duplex = Duplex(call, self._take, self._give, over=self._over)
                self._streams.owner.stream_ready(self.gateway)
                await duplex.run()
        except StreamEnded:
            return False  # it was not opened; the pause is what is done about it
        return True

    def _take(self, reply: delivery_pb2.DeliveryReply) -> None:
        if self.ready:
            self._streams.owner.acknowledged(reply)

    def _give(self) -> delivery_pb2.DeliveryBatch | None:
        """The next batch. The one before has left."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if self._leaving is not None:
            self.outbox.sent(self._leaving)
            self._leaving = None
        if not self.outbox:
            return None
        self._leaving = batch = self.outbox.take()
        self._stalled = asyncio.get_running_loop().call_later(STALL_S, self.give_up)
        return delivery_pb2.DeliveryBatch(
            devices=batch.devices, deliveries=b"".join(batch.chunks), count=batch.count, asked=batch.asked
        )

    def _over(self) -> None:
        self._duplex = None
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._leaving = None


class GatewayStreams:
    """One stream to each gateway that has somebody with mail.

    Args:
        owner: is told.
        endpoint: of this relay.
        view: gives the newest view of the cluster.
        max_bytes: that may wait for one gateway. Policy: its stream is broken, and what was not acknowledged is sent again.
        crash: called with an error that is a bug here.
        framed: opens framed streams to gateways that offer them; None: gRPC carries all.
    """

    def __init__(
        self,
        owner: Owner,
        endpoint: EndpointID,
        view: Callable[[], View],
        max_bytes: int,
        crash: Callable[[BaseException], None],
        framed: Framed | None = None,
    ) -> None:
        self.owner, self.endpoint, self.view, self.framed = owner, endpoint, view, framed
        self.channels = Channels("gateway")
        self.broken = 0
        """Streams that broke."""
        self._max_bytes, self._crash = max_bytes, crash
        self._streams: dict[int, _Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """That deliver."""
        return sum(stream.ready for stream in self._streams.values())

    @property
    def waiting_bytes(self) -> int:
        """Bytes of deliveries that wait, for all gateways."""
        return sum(stream.outbox.bytes for stream in self._streams.values() if stream.ready)

    def want(self, gateway: int) -> bool:
        """Open a stream if there is none. Whether it delivers already."""
        stream = self._streams.get(gateway)
        if stream is None:
            stream = self._streams[gateway] = _Stream(gateway, self)
        return stream.ready

    def deliver(self, gateway: int, chunks: Sequence[Chunk]) -> bool:
        """Send, in order. Whether there is a stream that takes it."""
        if not self.want(gateway):
            return False
        stream = self._streams[gateway]
        if stream.outbox.bytes > self._max_bytes:
            stream.give_up()
            return False
        stream.send(chunks)
        return True

    def ask_written(self, gateway: int, lanes: Sequence[DeviceLane]) -> None:
        """Ask what was written. Nobody answers while there is no stream; what it had is sent again then."""
        stream = self._streams.get(gateway)
        if stream is not None:
            stream.ask(lanes)

    def keep(self, gateways: Collection[int]) -> None:
        """End the streams to all others."""
        for gateway in [gateway for gateway in self._streams if gateway not in gateways]:
            task = self._streams.pop(gateway).task
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all of them."""
        self.keep(())
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self.channels.close()

    def broke(self, gateway: int) -> None:
        """A stream that delivered is gone."""
        self.broken += 1
        self.owner.stream_broken(gateway)

    def ended(self, task: asyncio.Task[None]) -> None:
        """The task of a stream."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)
