"""The `MailDelivery` service: relays' streams of mail, and the acknowledgements that go back on them.

Source: DESIGN section 9 ("Delivery of mail"); docs/delivery.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Final

import grpc
import grpc.aio
from structlog.typing import FilteringBoundLogger

from cluster.runtime.log import once_per
from gateway import events as ev
from gateway.core import Core
from gateway.mail import read_batch
from pixiu.errors import Draining, MalformedData, Overloaded, PixiuError
from pixiu.ids import EndpointID
from pixiu.wire.v1 import delivery_pb2, delivery_pb2_grpc

MAX_STREAMS: Final = 1024
"""Relays at a time; a further one is refused."""
MAX_ACKNOWLEDGEMENTS: Final = 1000
"""In one reply; more go in several."""
HELLO_TIMEOUT_S: Final = 30.0
"""How long a relay has for its first batch."""
FINISH_TIMEOUT_S: Final = 2.0
"""How long a write under way may take when the stream ends."""
WARN_S: Final = 60.0
"""What one relay sends is logged once in so long."""
MAIL_STREAM_REFUSED: Final = "mail_stream_refused"

Call = grpc.aio.ServicerContext[delivery_pb2.DeliveryBatch, delivery_pb2.DeliveryReply]


class _Stream:
    """Of a relay."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.wake = asyncio.Event()
        self.ready = False
        self.error: PixiuError | None = None
        """Why the gateway ends it."""
        self.over = False
        """Nothing more is to be written."""

    def end(self, error: PixiuError) -> None:
        self.error = self.error or error
        self.wake.set()


class MailDeliveryService(delivery_pb2_grpc.MailDeliveryServicer):
    """Serves `pixiu.v1.MailDelivery`.

    Args:
        core: of the gateway, once there is one.
        step: gives an event to it, and performs the effects.
    """

    def __init__(self, core: Callable[[], Core | None], step: Callable[[ev.Event], None], log: FilteringBoundLogger) -> None:
        self._core, self._step, self._log = core, step, log
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._stopped = False
        self.refused = 0
        """Streams that ended because a relay sent what it may not."""

    def acknowledgements_due(self, effect: ev.AcknowledgementsDue) -> None:
        """There are acknowledgements to write on a stream."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.wake.set()

    def end_stream(self, effect: ev.EndMailStream) -> None:
        """End a relay's stream."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.end(MalformedData(effect.text) if effect.at_fault else Overloaded(effect.text))

    def stop(self) -> None:
        """End all streams, and take no more."""
        self._stopped = True
        for stream in self._streams.values():
            stream.end(Draining("the gateway has stopped"))

    def samples(self) -> dict[str, object]:
        """For metrics."""
        return {"mail_streams": len(self._streams), "mail_streams_refused_total": self.refused}

    async def Deliver(  # type: ignore[override]  # the generated base has the synchronous signature as well
        self, request_iterator: AsyncIterator[delivery_pb2.DeliveryBatch], context: Call
    ) -> None:
        """One relay's stream."""
        if self._core() is None or self._stopped:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this gateway does not take mail now; try again soon")
        if len(self._streams) >= MAX_STREAMS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {MAX_STREAMS} streams of mail")
        stream = _Stream(next(self._numbers))
        self._streams[stream.number] = stream
        loop = asyncio.get_running_loop()
        reader, writer = loop.create_task(self._read(stream, request_iterator)), loop.create_task(self._write(stream, context))
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            del self._streams[stream.number]
            self._step(ev.MailStreamClosed(stream.number))
            await self._finish(stream, reader, writer)
        if stream.error is not None:
            bad = isinstance(stream.error, MalformedData)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT if bad else grpc.StatusCode.UNAVAILABLE, str(stream.error))

    async def _finish(self, stream: _Stream, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        """End the tasks. A write under way is left to end: gRPC refuses to close a call in the middle of one."""
        stream.over = True
        stream.wake.set()
        reader.cancel()
        await asyncio.wait((reader, writer), timeout=FINISH_TIMEOUT_S)
        writer.cancel()
        await asyncio.gather(reader, writer, return_exceptions=True)

    async def _read(self, stream: _Stream, batches: AsyncIterator[delivery_pb2.DeliveryBatch]) -> None:
        """Take batches until the relay ends the stream, or sends what it may not."""
        relay = 0
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(batches, None)
            if first is None:
                return
            relay = first.relay
            if not relay:
                raise MalformedData("the first batch of a stream of deliveries names the relay")
            self._take(stream, first, relay)
            async for batch in batches:
                self._take(stream, batch)
                if stream.error is not None:
                    return
        except TimeoutError:
            stream.error = Overloaded(f"the first batch of a stream must come within {HELLO_TIMEOUT_S:.0f} s")
        except MalformedData as error:
            stream.error = stream.error or error
        finally:
            if isinstance(stream.error, MalformedData):
                self._warn(relay, stream.error)

    def _take(self, stream: _Stream, batch: delivery_pb2.DeliveryBatch, relay: int = 0) -> None:
        """One batch; of the first one the relay's endpoint. Raises `MalformedData`: then nothing of it was taken."""
        devices, deliveries = read_batch(batch)
        if relay:
            self._step(ev.MailStreamOpened(stream.number, EndpointID(relay)))
            stream.ready = True
            stream.wake.set()
        if devices or deliveries:
            self._step(ev.MailArrived(stream.number, devices, deliveries))

    def _warn(self, relay: int, error: MalformedData) -> None:
        self.refused += 1
        if once_per(WARN_S, (MAIL_STREAM_REFUSED, relay)):
            self._log.warning(MAIL_STREAM_REFUSED, relay=f"{relay:016x}", text=str(error))

    async def _write(self, stream: _Stream, context: Call) -> None:
        """Write what there is to say: in one reply what a turn of the loop, or the time of the last write, has brought."""
        told = False
        while True:
            await stream.wake.wait()
            stream.wake.clear()
            if stream.ready and not told:
                told = True
                await context.write(delivery_pb2.DeliveryReply(ready=True))
            core = self._core()
            assert core is not None
            while (
                not stream.over
                and stream.error is None
                and (items := core.mail.take_acknowledgements(stream.number, MAX_ACKNOWLEDGEMENTS))
            ):
                found = [delivery_pb2.DeviceAcknowledgement(**item._asdict()) for item in items]
                await context.write(delivery_pb2.DeliveryReply(acknowledgements=found))
            if stream.over or stream.error is not None:
                return
