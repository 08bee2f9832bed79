"""The inbox, which receives mail: each mail once, acknowledged by hand or after a handler has returned.

    async with px.inbox(uin=7, device="phone") as inbox:
        async for mail in inbox:
            store(mail.payload)
            mail.acknowledge()

    async with px.inbox(uin=7, device="phone") as inbox:
        await inbox.run(handler)                # acknowledged when it returned; to the dead-letter inbox when it never does

    gateway ──mail──▶ MailIntake ──▶ `async for` or `run` ──acknowledge()──▶ MailIntake ──ranges──▶ gateway
                        64 a lane: an application that takes or acknowledges nothing gets nothing more

Source: docs/delivery.md, docs/operations.md; docs/mail.md.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Final, Self

from pixiu.client.inbox.core import Held, MailGap, MailIntake, MailIntakeCounters
from pixiu.client.inbox.handler_runner import LaneHandler, Retries
from pixiu.client.inbox.mail import Mail
from pixiu.client.mail.publisher import MailPublisher
from pixiu.client.messages.load_test import LoadTest, check_load_test, passes
from pixiu.client.options import MAX_CLIENT_NAME_BYTES, ClientOptions
from pixiu.client.receive.gateway_connection import ConnectionContext, GatewayConnection
from pixiu.client.receive.gateway_stream import GatewayStream, Waiter
from pixiu.client.timeouts import within
from pixiu.errors import InvalidArgument, NotAllowed, NotConnected, OutcomeUnknown, PixiuError, Unavailable
from pixiu.ids import UIN
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.record import INBOX_LANES
from pixiu.wire.v1 import wire_pb2

CLOSE_GRACE_S: Final = 1.0
"""Time for the gateway to take the last acknowledgements when an inbox is closed, seconds."""
ALL_LANES: Final = range(INBOX_LANES)
log = logging.getLogger("pixiu.client")


def device_of(device: str, options: ClientOptions, client: str) -> tuple[str, int]:
    """Choose the device name and DeviceID (0: derived from the name) to send to a gateway. `client`: a name that stays the same, or
    empty.

    Raises `InvalidArgument` without a stable name: mail is kept per device, and a new name in each process would miss all of it.
    """
    if not isinstance(device, str):
        raise InvalidArgument(f"a device has a name, not {device!r}; a number is the option connect(device=…)")
    if len(device.encode()) > MAX_CLIENT_NAME_BYTES:
        raise InvalidArgument(f"a device's name has at most {MAX_CLIENT_NAME_BYTES} bytes, this one {len(device.encode())}")
    if device:
        return device, 0
    if not options.device and not client:
        raise InvalidArgument(
            "mail is kept for a device, which needs a name that stays the same: inbox(device=…), or connect(…, client=…)"
        )
    return client, options.device


class Inbox(GatewayConnection):
    """Mail of one device of a user: `async for mail in inbox`, or `await inbox.run(handler)`. One task at a time may take mail.

    It connects when it is entered, iterated or run, and reconnects by itself. Each lane delivers at most 64 mails ahead of the
    oldest unacknowledged one, so acknowledge in about the order in which mail arrives.

    `on_gap(gap)` is called, in the mail's order, for mail that this device does not get; it runs in the event loop and must not
    block.
    Source: docs/delivery.md, docs/promises.md, "Failure rules", docs/operations.md.
    """

    what = "inbox"
    _linger_s = 0.0

    def __init__(
        self,
        surroundings: ConnectionContext,
        uin: UIN,
        device: tuple[str, int],
        on_gap: Callable[[MailGap], None] | None,
        mails: Callable[[], MailPublisher],
        load_test: LoadTest = "block",
    ) -> None:
        super().__init__(surroundings)
        self._load_test = check_load_test(load_test)
        self.uin = uin
        """The user whose mail it receives."""
        self.on_gap = on_gap
        self._device = device
        self._mails = mails
        self._intake = MailIntake(uin)
        self._arrived = asyncio.Event()
        self._running = False
        self._timer = DeadlineTimer(self._send)

    @property
    def device(self) -> str:
        """The name of the device as given; if there is only a number, that in hex."""
        name, number = self._device
        return name or f"{number:012x}"

    @property
    def counters(self) -> MailIntakeCounters:
        """Counters since the inbox was opened."""
        return self._intake.counters

    @property
    def unacknowledged(self) -> int:
        """Number of mails in this process, taken or not, that are not acknowledged."""
        return self._intake.held

    @property
    def closed(self) -> bool:
        """True if the inbox was closed."""
        return self._closed

    # Called by users.

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Connect, and wait until the cluster knows the device and delivers to it.

        Raises the gateway's refusal, and `OutcomeUnknown` after `timeout_s` (default: the option `join_timeout_s`).
        """
        await self._settle(set(), set(), timeout_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Mail:
        """Return the next mail, of the first lane that has any. Raises the error that ended the inbox: a refusal, `LoginReplaced`
        when the same device connected elsewhere, or `Unreachable` when no gateway could be reached at first."""
        if self._running:
            raise InvalidArgument("`run` consumes this inbox's mail: iterate after it has ended, or use another device")
        mail = await self.next(ALL_LANES)
        if mail is None:
            raise StopAsyncIteration
        return mail

    async def next(self, lanes: range) -> Mail | None:
        """Wait for the next mail of some lanes; None once the inbox is closed."""
        while not self._closed:
            held = self._intake.take(time.time_ns() // 1_000_000, lanes)
            if held is None:
                if self._error is not None:
                    raise self._error
                self._start()
                await self._more()
            elif held.gap is not None:
                self._tell(held, held.gap)
            elif held.message is not None and not passes(self._load_test, marked=held.message.load_test):
                self.counters.load_test_blocked += 1
                if not self._closed:
                    self.acknowledge(held)
            elif held.message is not None:
                return Mail(self, held, held.message)
        return None

    def give_back(self, mail: Mail) -> None:
        """Return a mail that was taken and not handled: it is the next one again."""
        self._intake.give_back(mail.held)
        self._nudge()

    async def run(
        self,
        handler: Callable[[Mail], Awaitable[None] | None],
        *,
        retries: int = 5,
        backoff_s: float = 0.2,
        max_backoff_s: float = 30.0,
    ) -> None:
        """Call `handler` with each mail, and acknowledge the mail when the handler has returned. Ends when the inbox is closed.

        Order holds in a lane: the next mail of a lane waits until the previous one is acknowledged. Lanes are handled in parallel.
        A mail is handled at least once: if the process dies after the handler returned, the device gets the mail again.

        Args:
            handler: a coroutine function, or a function that does not block. An exception means that it failed.
            retries: number of further calls with a mail that failed, after waits that double from `backoff_s` to `max_backoff_s`,
                each shortened by a random part. Later mails of the lane wait meanwhile. After the last retry the mail goes to the
                dead-letter inbox (`pixiu.client.inbox.dead_letters`), and is acknowledged once that is stored on all replicas in
                sync. The lane stands still while the dead letter cannot be sent.

        A handler that acknowledges the mail and then fails is not called again. If `run` is cancelled, mails under way stay
        unacknowledged, and the next `run` gets them first. Raises the errors of iterating.
        Source: docs/architecture.md, "A mail is sent".
        """
        if self._running:
            raise InvalidArgument("`run` takes this inbox's mail already")
        plan = Retries(retries, backoff_s, max_backoff_s)
        plan.validate()
        self._check_open()
        self._running = True
        handlers = [
            LaneHandler(self, lane, handler, plan, self._around.options, self._around.uniform, self._mails) for lane in ALL_LANES
        ]
        tasks = [asyncio.create_task(each.run(), name=f"pixiu-mail-lane-{each.lane}") for each in handlers]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._running = False

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until a gateway has all acknowledgements.

        The gateway passes them on within some milliseconds, and they are saved some milliseconds later, which is not reported to
        the client: if the gateway or relay dies in between, mail is delivered again although it was flushed. A process that still
        runs does not see it twice; the device's next process does, marked `redelivered`.

        Raises `OutcomeUnknown` when the connection was lost meanwhile (mail whose acknowledgement was lost is delivered and
        acknowledged again automatically) and after `timeout_s` (default: `join_timeout_s`), and the error that ended the inbox.
        """
        self._check_open()
        self._start()
        seconds = self._around.options.join_timeout_s if timeout_s is None else timeout_s

        def late() -> OutcomeUnknown:
            why = self._why_late("did not answer")
            return OutcomeUnknown(f"no gateway took the acknowledgements within {seconds:g} s ({why})")

        async with within(seconds, late):
            await self._flush()

    async def close(self) -> None:
        """Send the last acknowledgements (at most a second) and stop. Mail that is not acknowledged is delivered again."""
        if self._closed:
            return
        self._closed = True
        self._arrived.set()
        if self._stream is not None and self._error is None:
            try:
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._flush()
            except (TimeoutError, PixiuError):
                log.info("inbox_closed_without_confirmation")
        self._timer.cancel()
        await self._stop()

    async def __aenter__(self) -> Self:
        try:
            await self.ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # Inside: taking and acknowledging.

    def acknowledge(self, held: Held) -> None:
        """Acknowledge a mail; the acknowledgement leaves with others within some milliseconds. Raises `NotConnected` once the inbox
        is closed."""
        if held.acknowledged:
            return
        if self._closed:
            raise NotConnected("the inbox is closed: the mail is not acknowledged, and is redelivered to the device's next inbox")
        self._intake.acknowledge(held, asyncio.get_running_loop().time())
        self._arm()

    def _tell(self, held: Held, gap: MailGap) -> None:
        if self.on_gap is not None:
            try:
                self.on_gap(gap)
            except Exception:
                self.counters.callback_errors += 1
                log.exception("inbox_callback_failed")
        if not self._closed:
            self.acknowledge(held)

    async def _more(self) -> None:
        """Wait until something has changed."""
        self._arrived.clear()
        await self._arrived.wait()

    async def _flush(self) -> None:
        while self._stream is None:
            if self._error is not None:
                raise self._error
            await self._more()
        self._send()
        text = "the connection was lost before the gateway confirmed the acknowledgements: what it did not get is redelivered"
        waiter = Waiter(frozenset(), frozenset(), OutcomeUnknown(f"{text}, and is acknowledged again"))
        self._stream.acknowledge([], waiter)
        await waiter.done

    def _arm(self) -> None:
        self._timer.set(self._intake.next_deadline())

    def _send(self) -> None:
        self._timer.cancel()
        for stream, ranges in self._intake.acknowledgements():
            assert isinstance(stream, GatewayStream)
            stream.acknowledge(ranges)

    # Inside: called by the connection.

    def _connect(self, address: str) -> GatewayStream:
        name, number = self._device
        stream = GatewayStream(
            address,
            self._around.channels,
            self.uin,
            name,
            mail=True,
            device=number,
            device_class=self._around.options.device_class,
        )
        self._intake.opened(stream)
        return stream

    def _stream_over(self, stream: GatewayStream) -> None:
        self._intake.closed(stream)

    def _lost(self) -> None:
        self.counters.reconnects += 1

    def _moved(self) -> None:
        self.counters.moves += 1

    def _nudge(self) -> None:
        self._arrived.set()

    async def _content(self, stream: GatewayStream, reply: wire_pb2.SubscribeReply, *, held: bool) -> None:
        self._nudge()
        if reply.revoked_topics:
            raise NotAllowed("the permission to read this inbox has ended" + (f": {reply.error_text}" if reply.error_text else ""))
        if not reply.mail and not reply.mail_count:
            return
        sound = self._intake.arrived(stream, reply.mail, reply.mail_count, asyncio.get_running_loop().time())
        self._arm()
        if not sound:
            raise Unavailable(f"mail that gateway {stream.address} sent was damaged on the way; it is asked for again")
