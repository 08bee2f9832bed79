"""Relays' streams of mail, and the acknowledgements returned on them.

Source: docs/delivery.md; docs/delivery.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from structlog.typing import FilteringBoundLogger

from cluster.core.log import once_per
from cluster.wire.v1 import delivery_pb2
from gateway import events as ev
from gateway.core import Core
from gateway.delivery.mail import Acknowledgement, read_batch
from pixiu.errors import Draining, InvalidArgument, MalformedData, Overloaded, PixiuError, Unavailable
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import Duplex, Served

MAX_STREAMS: Final = 1024
"""Relays connected at one time; a further one is refused."""
MAX_ACKNOWLEDGEMENTS: Final = 1000
"""Acknowledgements in one reply; more go in several."""
HELLO_TIMEOUT_S: Final = 30.0
"""Time limit for a relay's first batch, seconds."""
WARN_S: Final = 60.0
"""Interval between two logs of one relay's faults, seconds."""
MAIL_STREAM_REFUSED: Final = "mail_stream_refused"

Handler = Served[delivery_pb2.DeliveryReply, delivery_pb2.DeliveryBatch]


class _Stream:
    """One relay's delivery stream.

    Args:
        number: of the stream.
        handler: carries it.
        owner: the service.
    """

    def __init__(self, number: int, handler: Handler, owner: MailDeliveryService) -> None:
        self.number, self._owner = number, owner
        self.relay = 0
        """The relay's endpoint; 0 until its first batch."""
        self.error: PixiuError | None = None
        """Reason why the gateway ends the stream."""
        self._greeted = False
        self._duplex = Duplex(handler, self._take, self._give, over=lambda: owner.over(self))
        self._late = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._hello_is_late)

    def wake(self) -> None:
        """Note that there may be something to write."""
        self._duplex.wake()

    def end(self, error: PixiuError) -> None:
        """End the stream with an error."""
        self.error = self.error or error
        self._duplex.end(str(error))

    async def run(self) -> None:
        """Run the stream until it has ended."""
        try:
            await self._duplex.run()
        finally:
            self._late.cancel()

    def _hello_is_late(self) -> None:
        self.end(Overloaded(f"the first batch of a stream must come within {HELLO_TIMEOUT_S:.0f} s"))

    def _take(self, batch: delivery_pb2.DeliveryBatch) -> None:
        if self.error is not None:
            return
        try:
            if not self.relay:
                if not batch.relay:
                    raise MalformedData("the first batch of a stream of deliveries names the relay")
                self.relay = batch.relay
                self._owner.take(self, batch, batch.relay)
                self._late.cancel()
                self.wake()
            else:
                self._owner.take(self, batch)
        except MalformedData as error:
            self.end(error)

    def _give(self) -> delivery_pb2.DeliveryReply | None:
        """Next reply: what this turn of the loop, or the time of the last write, has brought."""
        if not self.relay or self.error is not None:
            return None
        if not self._greeted:
            self._greeted = True
            return delivery_pb2.DeliveryReply(ready=True)
        items = self._owner.acknowledgements(self.number)
        if not items:
            return None
        found = [delivery_pb2.DeviceAcknowledgement(**item._asdict()) for item in items]
        return delivery_pb2.DeliveryReply(acknowledgements=found)


class MailDeliveryService:
    """Serves relays' streams of mail.

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
        """Streams that ended because a relay broke the protocol."""

    def acknowledgements_due(self, effect: ev.AcknowledgementsDue) -> None:
        """Wake a stream that has acknowledgements to write."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.wake()

    def end_stream(self, effect: ev.EndMailStream) -> None:
        """End a relay's stream."""
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.end(MalformedData(effect.text) if effect.at_fault else Overloaded(effect.text))
            stream.wake()

    def stop(self) -> None:
        """End all streams, and accept no more."""
        self._stopped = True
        for stream in self._streams.values():
            stream.end(Draining("the gateway has stopped"))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {"mail_streams": len(self._streams), "mail_streams_refused_total": self.refused}

    async def deliver(self, handler: Handler) -> None:
        """Serve one relay's stream."""
        if self._core() is None or self._stopped:
            raise Unavailable("this gateway does not accept mail now; try again soon")
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"more than {MAX_STREAMS} streams of mail")
        stream = _Stream(next(self._numbers), handler, self)
        self._streams[stream.number] = stream
        await stream.run()
        if isinstance(stream.error, MalformedData):
            self.refused += 1
            if once_per(WARN_S, (MAIL_STREAM_REFUSED, stream.relay)):
                self._log.warning(MAIL_STREAM_REFUSED, relay=f"{stream.relay:016x}", text=str(stream.error))
            raise InvalidArgument(str(stream.error))
        if stream.error is not None:
            raise Unavailable(str(stream.error))

    # --- what its streams call

    def take(self, stream: _Stream, batch: delivery_pb2.DeliveryBatch, relay: int = 0) -> None:
        """Take a batch; `relay`: the relay's endpoint, with the first batch. Raises `MalformedData` before anything was taken."""
        devices, deliveries = read_batch(batch)
        if relay:
            self._step(ev.MailStreamOpened(stream.number, EndpointID(relay)))
        if devices or deliveries or batch.asked:
            self._step(ev.MailArrived(stream.number, devices, deliveries, batch.asked))

    def acknowledgements(self, number: int) -> list[Acknowledgement]:
        """Take the next acknowledgements for a relay, at most `MAX_ACKNOWLEDGEMENTS`."""
        core = self._core()
        assert core is not None
        return core.mail.take_acknowledgements(number, MAX_ACKNOWLEDGEMENTS)

    def over(self, stream: _Stream) -> None:
        """Remove a stream that has ended."""
        del self._streams[stream.number]
        self._step(ev.MailStreamClosed(stream.number))
