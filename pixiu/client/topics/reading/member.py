"""A member of a channel: gets messages, each one until it is acknowledged, and shares the work with the other members.

    async with topic.channel("billing") as messages:
        async for message in messages:
            charge(message.body)
            await message.ack()                 # True: committed; False: not known to be, and it may come again

    async with topic.channel("billing") as messages:
        await messages.run(handler, workers=8)  # acknowledged when it returned, delivered again later when it raised

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from types import TracebackType
from typing import Final, Self

from pixiu.client.inbox.handler_runner import Retries
from pixiu.client.login import refused_login
from pixiu.client.messages.load_test import handling
from pixiu.client.timeouts import within
from pixiu.client.topics.described import refused
from pixiu.client.topics.drafts import check_count, check_seconds, text_of
from pixiu.client.topics.reading.member_core import (
    AskTopic,
    CloseMember,
    Effect,
    MemberCore,
    MemberCounters,
    OpenMember,
    Outcomes,
    Place,
    Reportable,
)
from pixiu.client.topics.reading.received import Origin, Span, TopicMessage, spans
from pixiu.client.topics.surroundings import TopicContext, is_hopeless
from pixiu.client.topics.topic_map import ChannelInfo, TopicMap
from pixiu.errors import (
    InvalidArgument,
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    NotConnected,
    OutcomeUnknown,
    PixiuError,
    Refusal,
    UnknownTopic,
)
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.duplex import Duplex, End, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import topic_pb2, topic_pb2_grpc

MAX_CREDIT: Final = 10_000
MAX_DELAY_S: Final = 30 * 24 * 3600.0
"""Longest delay of a message that is delivered again, seconds."""
MIN_TICK_S: Final = 0.001
ANSWER_S: Final = 0.2
"""Interval at which a member that has too many bytes reads on while reports are not answered, seconds."""
TOUCH_SHARE: Final = 3
"""A message that waits in the member is kept by a report at this share of the channel's time-out."""
Handler = Callable[["ChannelMessage"], Awaitable[None] | None]
Call = GrpcCall[topic_pb2.ConsumeRequest, topic_pb2.ConsumeReply]
log = logging.getLogger("pixiu.client")


@dataclass(frozen=True)
class Joining:
    """Arguments with which a member joins its channel."""

    topic: str
    channel: str
    credit: int
    tag: str = ""
    filter: str = ""
    load_test: int = topic_pb2.LOAD_TEST_BLOCK
    credit_bytes: int = 0
    """0: no bound."""


class ChannelMessage(TopicMessage):
    """A message that a channel's member has until it is acknowledged, refused or taken back."""

    __slots__ = ("_member", "attempts", "place")

    def __init__(self, member: ChannelMember, origin: Origin, place: Place, data: bytes, span: Span, attempts: int) -> None:
        super().__init__(origin, place.offset, data, *span)
        self._member, self.place = member, place
        self.attempts = attempts
        """Deliveries, this one included: 1 the first time."""

    @property
    def redelivered(self) -> bool:
        """True if it was delivered before, to whomever: its handling may have been begun."""
        return self.attempts > 1

    @property
    def held(self) -> bool:
        """True while the message is this member's, and not reported."""
        return self._member.core.holds(self.place)

    async def ack(self) -> bool:
        """Acknowledge the message, and wait until that is committed: then the channel never delivers it again.

        False: it is no longer this member's, because its time was over, or its leader changed. It comes again, to whomever, unless
        another member has dealt with it, or the leader ended between the commit and its answer. So False is no reason to undo what
        was done. Raises `NotConnected` when the member is closed.
        """
        return await self._member.report(self, None)

    def ack_soon(self) -> None:
        """Acknowledge the message without waiting; it leaves with others. `ChannelMember.flush` waits for all of them."""
        self._member.report_soon(self, None)

    async def nack(self, delay_s: float = 0.0) -> bool:
        """Give the message back: it is delivered again after `delay_s`, or goes to the dead letters if its attempts are used up.
        Returns as `ack`."""
        return await self._member.report(self, delay_s)

    def nack_soon(self, delay_s: float = 0.0) -> None:
        """`nack` without waiting."""
        self._member.report_soon(self, delay_s)

    async def reject(self, reason: str) -> bool:
        """Send the message to the channel's dead letters at once, because no attempt can succeed.

        Args:
            reason: a sentence that says why, and what to do; the servers keep 256 bytes of it.

        Returns as `ack`."""
        return await self._member.report(self, reason)

    def reject_soon(self, reason: str) -> None:
        """`reject` without waiting."""
        self._member.report_soon(self, reason)

    def touch(self) -> None:
        """Ask for the channel's whole time-out again, because handling the message takes long."""
        self._member.touch(self)


class MemberCall:
    """One stream to a leader."""

    __slots__ = ("answered", "credit", "duplex", "greeted", "held_bytes", "number", "task")

    def __init__(self, number: int, credit: int) -> None:
        self.number, self.credit = number, credit
        self.held_bytes = 0
        """Bytes of what came on it and is not reported."""
        self.greeted = self.answered = False
        self.duplex: Duplex[topic_pb2.ConsumeRequest, topic_pb2.ConsumeReply] | None = None
        self.task: asyncio.Task[None] | None = None


class ChannelMember:
    """A member of a channel, which `DurableTopic.channel` makes: `async with member: async for message in member`, or
    `await member.run(handler)`.

    It joins the leaders of all groups that hold the topic's parts, also those that come later, and joins again by itself.

    Args:
        around: the client.
        joining: which channel, and how.
        prepare: makes sure that the channel is there; returns the topic's version that has it.
    """

    def __init__(self, around: TopicContext, joining: Joining, prepare: Callable[[], Awaitable[int]]) -> None:
        self._around, self._joining, self._prepare = around, joining, prepare
        self.core: MemberCore
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, MemberCall] = {}
        self._waiting: deque[ChannelMessage] = deque()
        self._reports: dict[Place, asyncio.Future[bool]] = {}
        self._arrived, self._freed = asyncio.Event(), asyncio.Event()
        self._alarm = DeadlineTimer(self._tick, least_s=MIN_TICK_S)
        self._error: PixiuError | None = None
        self._refused_at = 0.0
        self._keeping: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._took = False
        self._open = self._closed = self._running = False

    @property
    def counters(self) -> MemberCounters:
        """Totals since the member was opened."""
        return self.core.counters

    @property
    def closed(self) -> bool:
        """True if the member was closed."""
        return self._closed

    async def open(self) -> Self:
        """Find the topic, make the channel if that was asked for, and join. Raises `UnknownTopic`, `NotAllowed`, `Unavailable`,
        `InvalidArgument` for a channel of another mode, and `NotConnected` if the member is closed meanwhile."""
        async with self._opening:
            if not self._open:
                await self._join()
        return self

    async def _join(self) -> None:
        version = await self._prepare()
        topic = await self._around.directory.follow(self._joining.topic, self._on_topic, self._fail, version)
        if self._closed:
            self._around.directory.leave(self._joining.topic, self._on_topic)
            raise NotConnected("the member is closed: open another one")
        self.core = MemberCore(self._around.options, topic, self._joining.credit, self._around.uniform)
        self._open = True
        self._around.users.add(self)
        self._apply(self.core.begin(self._loop.time()))
        self._keeping = self._loop.create_task(self._keep(), name=f"pixiu-channel-{self._joining.channel}")

    async def close(self) -> None:
        """Send the last reports (at most a second) and leave. What is not acknowledged comes again, to whomever."""
        if self._closed:
            return
        self._closed = True
        self._around.users.discard(self)
        if not self._open:
            return
        self._around.directory.leave(self._joining.topic, self._on_topic)
        if self._error is None:
            try:
                async with asyncio.timeout(1.0):
                    await self._idle()
            except TimeoutError:
                log.info("channel_closed_without_confirmation")
        self._alarm.cancel()
        tasks = [stream.task for stream in self._streams.values() if stream.task is not None]
        self._apply(self.core.close())
        if self._keeping is not None:
            tasks.append(self._keeping)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._waiting.clear()
        self._arrived.set()
        self._freed.set()

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    # --- taking messages

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChannelMessage:
        """Return the next message. Raises the error that ended the member."""
        if self._running:
            raise InvalidArgument("`run` takes this member's messages: iterate after it has ended, or open another member")
        message = await self.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next(self) -> ChannelMessage | None:
        """Wait for the next message; None once the member is closed. Raises `NotConnected` if it was not opened: one whose loop was
        left would keep its messages from the others."""
        if not (self._open or self._closed):
            raise NotConnected(
                f"the member is not open: `async with topic.channel({self._joining.channel!r}) as messages:`, or `open()`"
            )
        while not self._closed:
            while self._waiting:
                message = self._waiting.popleft()
                if message.held:
                    self._took = True
                    return message
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        return None

    async def next_batch(self, limit: int) -> Sequence[ChannelMessage]:
        """Wait for messages, and return all that are here, at most `limit`; none once the member is closed. Raises as `next`."""
        first = await self.next()
        found = [] if first is None else [first]
        while self._waiting and len(found) < limit:
            message = self._waiting.popleft()
            if message.held:
                found.append(message)
        return found

    async def run(self, handler: Handler, *, workers: int = 1, backoff_s: float = 1.0, max_backoff_s: float = 60.0) -> None:
        """Call `handler` with each message, and acknowledge the message when the handler has returned. Ends when the member is
        closed. A member that is not open yet is opened, and closed when this ends.

        A message for which it raised is delivered again, to any member, after a wait that doubles with its attempts from
        `backoff_s` to `max_backoff_s`; when its attempts are used up (`max_attempts` of the channel) it goes to the dead letters. A
        handler may acknowledge or refuse the message itself. In a channel of mode `ordered` the messages of a slot are handled one
        after the other; later ones that this member has go back with one that failed, and come again after it, with the attempt
        counted.

        Args:
            handler: a coroutine function, or a function that does not block.
            workers: number of messages that are handled at a time.

        Raises the errors of iterating.
        """
        if self._running:
            raise InvalidArgument("`run` takes this member's messages already")
        if not 1 <= workers <= 10_000:
            raise InvalidArgument(f"workers is from 1 to 10000, not {workers}")
        Retries(0, backoff_s, max_backoff_s).validate()
        opens = not self._open
        await self.open()
        self._running = True
        pool = HandlerPool(self, handler, workers, Backoff(backoff_s, max_backoff_s, self._around.uniform))
        try:
            await pool.run(self.ordered)
        finally:
            self._running = False
            if opens:
                await self.close()

    @property
    def channel(self) -> ChannelInfo | None:
        """The channel, as the topic's description has it; None: not known yet."""
        return self.core.topic.channels.get(self._joining.channel)

    @property
    def ordered(self) -> bool:
        """True if the channel is of mode `ordered`."""
        return self.channel is not None and self.channel.ordered

    @property
    def max_attempts(self) -> int:
        """Deliveries of a message before it goes to the dead letters; 0: not known."""
        return 0 if self.channel is None else self.channel.max_attempts

    async def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until everything that was reported is answered. Raises `OutcomeUnknown` after `timeout_s` (default:
        `join_timeout_s`), and the error that ended the member."""
        check_seconds(timeout_s, "timeout_s")
        seconds = self._around.options.join_timeout_s if timeout_s is None else timeout_s
        async with within(seconds, lambda: OutcomeUnknown(f"no leader answered all reports within {seconds:g} s")):
            await self._idle()
        if self._error is not None:
            raise self._error

    async def _idle(self) -> None:
        while self._open and self._error is None and not self.core.idle():
            self._arrived.clear()
            await self._arrived.wait()

    def set_credit(self, credit: int) -> None:
        """Take another number of messages at a time, 0 to 10,000. 0: nothing more comes until the next call; what is here may still
        be acknowledged."""
        check_count(credit, "credit", MAX_CREDIT)
        if self._open and not self._closed:
            self._apply(self.core.set_credit(credit, self._loop.time()))
        else:
            self._joining = replace(self._joining, credit=credit)

    # --- reporting

    async def report(self, message: ChannelMessage, how: float | str | None) -> bool:
        """Report a message as done, as refused with a delay, or as rejected with a reason, and wait for the answer."""
        if not self._report(message, how):
            return False
        future: asyncio.Future[bool] = self._loop.create_future()
        self._reports[message.place] = future
        return await future

    def report_soon(self, message: ChannelMessage, how: float | str | None) -> None:
        """`report` without waiting."""
        self._report(message, how)

    def _report(self, message: ChannelMessage, how: float | str | None) -> bool:
        if self._closed:
            raise NotConnected("the member is closed: the message is not acknowledged, and comes again")
        if how is None:
            effects = self.core.acknowledge(message.place)
        elif isinstance(how, str):
            effects = self.core.refuse(message.place, text_of(how, "a reason"))
        elif not 0 <= how <= MAX_DELAY_S:
            raise InvalidArgument(f"a delay is from 0 to {MAX_DELAY_S:g} seconds, not {how!r}")
        else:
            effects = self.core.refuse(message.place, int(how * 1000))
        if effects is None:
            return False
        self._streams[message.place.stream].held_bytes -= message.size
        self._freed.set()
        self._apply(effects)
        return True

    def ack_all_soon(self, messages: Iterable[ChannelMessage]) -> None:
        """Acknowledge messages of this member without waiting: `ack_soon` for each, and cheaper. Raises `NotConnected` when it is
        closed."""
        if self._closed:
            raise NotConnected("the member is closed: the messages are not acknowledged, and come again")
        given = {message.place: message for message in messages}
        for place, message in given.items():
            if self.core.holds(place):
                self._streams[place.stream].held_bytes -= message.size
        self._freed.set()
        self._apply(self.core.acknowledge_all(given))

    def touch(self, message: ChannelMessage) -> None:
        """Ask for more time for a message."""
        if not self._closed:
            self._apply(self.core.touch(message.place))

    async def _keep(self) -> None:
        """Keep messages that wait here while the application takes others; one that takes nothing loses them."""
        while True:
            channel = self.core.topic.channels.get(self._joining.channel)
            timeout_s = channel.timeout_ms / 1000 if channel is not None and channel.timeout_ms else 60.0
            await asyncio.sleep(timeout_s / TOUCH_SHARE)
            if self._took:
                for message in list(self._waiting):
                    self._apply(self.core.touch(message.place))
            self._took = False

    # --- effects and streams

    def _on_topic(self, topic: TopicMap) -> None:
        if self._open and not self._closed and topic.replaces(self.core.topic):
            self._fail(UnknownTopic(topic.gone_text()))
        elif self._open and not self._closed:
            self._apply(self.core.set_topic(topic, self._loop.time()))

    def _fail(self, error: PixiuError) -> None:
        """End the member with an error, which the next iteration raises."""
        if self._error is None:
            self._error = error
            if self._open:
                self._apply(self.core.close())
        self._arrived.set()
        self._freed.set()

    def _tick(self) -> None:
        self._apply(self.core.tick(self._loop.time()))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reportable):
                stream = self._streams.get(effect.stream)
                if stream is not None and stream.duplex is not None:
                    stream.duplex.wake()
            elif isinstance(effect, Outcomes):
                for place, counts in effect.found:
                    future = self._reports.pop(place, None)
                    if future is not None and not future.done():
                        future.set_result(counts)
                self._arrived.set()
            elif isinstance(effect, OpenMember):
                stream = self._streams[effect.stream] = MemberCall(effect.stream, effect.credit)
                stream.task = self._loop.create_task(self._run(stream, effect.address), name=f"pixiu-channel-{effect.address}")
            elif isinstance(effect, CloseMember):
                found = self._streams.pop(effect.stream, None)
                if found is not None and found.task is not None and found.task is not asyncio.current_task():
                    found.task.cancel()
            elif isinstance(effect, AskTopic):
                self._around.directory.refresh(self._joining.topic, newer=effect.newer)
        if not self._closed and self._error is None:
            self._alarm.set(self.core.next_deadline())

    async def _run(self, stream: MemberCall, address: str) -> None:
        channels = self._around.channels
        try:
            call: Call = GrpcCall.over(
                channels, address, lambda channel: topic_pb2_grpc.TopicLogStub(channel).Consume(metadata=channels.metadata())
            )
            async with call:
                stream.duplex = Duplex(call, lambda reply: self._take(stream, reply), lambda: self._give(stream))
                self._over(stream, await stream.duplex.run())
        except StreamEnded as why:  # it was not opened
            self._over(stream, End(str(why), why.refused))

    def _over(self, stream: MemberCall, end: End) -> None:
        if self._streams.pop(stream.number, None) is None or self._closed:
            return
        if end.refused and not stream.answered:
            login = refused_login(end.text)
            self._fail(NotAuthenticated(login) if login else NotAllowed(end.text))
        else:
            self._apply(self.core.stream_died(stream.number, self._loop.time()))

    def _give(self, stream: MemberCall) -> topic_pb2.ConsumeRequest | None:
        joining = self._joining
        if not stream.greeted:
            stream.greeted = True
            hello = topic_pb2.ConsumeHello(
                topic=joining.topic, channel=joining.channel, member=self._around.client, credit=stream.credit, tag=joining.tag,
                load_test=topic_pb2.LoadTest.ValueType(joining.load_test), filter=joining.filter,
            )  # fmt: skip
            return topic_pb2.ConsumeRequest(hello=hello)
        found = self.core.next_report(stream.number, self._loop.time())
        if found is None:
            return None
        credit, reports = found
        return topic_pb2.ConsumeRequest(
            credit=credit or 0,
            paused=credit == 0,
            reports=[
                topic_pb2.MessageReport(
                    request=each.request,
                    part=each.part,
                    acknowledged=each.acknowledged,
                    refused=each.refused,
                    touched=each.touched,
                    rejected=[topic_pb2.RejectedMessage(offset=offset, reason=reason) for offset, reason in each.rejected],
                )
                for each in reports
            ],
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of the messages that are here and not reported."""
        return sum(each.held_bytes for each in self._streams.values())

    def _over_bytes(self) -> bool:
        return 0 < self._joining.credit_bytes < self.held_bytes and not self._closed and self._error is None

    async def _room(self) -> None:
        """Wait for room. While a report is not answered, a reply is read from time to time: the room may depend on the answer."""
        while self._over_bytes():
            self._freed.clear()
            try:
                async with asyncio.timeout(None if self.core.idle() else ANSWER_S):
                    await self._freed.wait()
            except TimeoutError:
                return

    def _take(self, stream: MemberCall, reply: topic_pb2.ConsumeReply) -> Awaitable[None] | None:
        now = self._loop.time()
        if not stream.answered and not reply.HasField("end"):
            stream.answered = True
            self._refused_at = 0.0
            self._apply(self.core.answered(stream.number))
        for delivery in reply.deliveries:
            self._delivered(stream, delivery)
        for result in reply.results:
            why = result.refusal
            refusal = Refusal(why.code, why.text, why.retry_after_ms) if result.HasField("refusal") else None
            acknowledged, given_back = result.acknowledged, result.refused
            self._apply(self.core.reported(stream.number, result.request, result.part, acknowledged, given_back, refusal, now))
        if reply.finished_parts:
            self._apply(self.core.finished(reply.finished_parts, now))
        if reply.rejoin:
            self.core.rejoin(now)
            self._apply([])
        if reply.HasField("end"):
            self._ended(stream, reply.end, now)
        return self._room() if self._over_bytes() else None

    def _delivered(self, stream: MemberCall, found: topic_pb2.Delivery) -> None:
        data, part, base = found.data, found.part, found.base  # each look at a message's field makes a new object of it
        try:
            places = list(spans(found.index, data))
        except MalformedData:
            self.core.counters.malformed += 1
            return  # it is not reported, and comes again
        attempts = list(found.attempts) if len(found.attempts) == len(places) else [1] * len(places)
        if not self.core.delivered(stream.number, part, base, len(places), sum(each > 1 for each in attempts)):
            return
        stream.held_bytes += places[-1].end if places else 0
        origin = Origin(self._joining.topic, part, found.time_us, found.sender, found.writer)
        self._waiting += [
            ChannelMessage(self, origin, Place(stream.number, part, base + at), data, span, attempts[at])
            for at, span in enumerate(places)
        ]
        self._arrived.set()

    def _ended(self, stream: MemberCall, end: topic_pb2.TopicRefusal, now: float) -> None:
        self._streams.pop(stream.number, None)
        error = refused(end, self._joining.topic)
        # A group may learn of a new channel or part a moment later than the client.
        self._refused_at = self._refused_at or now
        patience_s = 0.0 if isinstance(error, InvalidArgument | NotAllowed) else self._around.options.join_timeout_s
        if is_hopeless(error) and now >= self._refused_at + patience_s:
            self._fail(error)
        else:
            self._apply(self.core.stream_died(stream.number, now, end.leader, end.retry_after_ms / 1000))
        if stream.duplex is not None:
            stream.duplex.end(end.text)


class HandlerPool:
    """Handles a member's messages, several at a time; of an ordered channel, one of a slot.

    Args:
        member: whose messages.
        handler: handles one.
        workers: most that are handled at a time.
        backoff: waits before a message comes again.
    """

    def __init__(self, member: ChannelMember, handler: Handler, workers: int, backoff: Backoff) -> None:
        self._member, self._handler, self._backoff = member, handler, backoff
        self._free = asyncio.Semaphore(workers)
        self._lanes: dict[int, deque[ChannelMessage]] = {}
        """Slot → its messages that wait, while one of it is handled."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, ordered: bool) -> None:
        """Handle messages until the member is closed. Raises the error that ended it."""
        try:
            while (message := await self._member.next()) is not None:
                if ordered and message.slot in self._lanes:
                    self._lanes[message.slot].append(message)
                    continue
                await self._free.acquire()
                lane = deque((message,))
                if ordered:
                    self._lanes[message.slot] = lane
                task = asyncio.create_task(self._handle_lane(message.slot, lane, ordered), name="pixiu-topic-handler")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.gather(*self._tasks)  # one of them may be closing the member
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle_lane(self, slot: int, lane: deque[ChannelMessage], ordered: bool) -> None:
        message: ChannelMessage | None = None
        try:
            while lane:
                message = lane.popleft()
                if message.held and not await self._handle(message) and not self._is_last(message):
                    break  # it comes again, and before those after it
        finally:
            for left in (*((message,) if message is not None else ()), *lane):
                self._report(left, 0.0)  # nothing, unless it failed or was cancelled
            if ordered:
                self._lanes.pop(slot, None)
            self._free.release()

    def _is_last(self, message: ChannelMessage) -> bool:
        """True if a message that failed does not come again: it is among the dead letters."""
        return 0 < self._member.max_attempts <= message.attempts

    async def _handle(self, message: ChannelMessage) -> bool:
        """Handle one message. False: it comes again."""
        try:
            with handling(marked=message.load_test):
                result = self._handler(message)
                if isawaitable(result):
                    await result
        except Exception as error:
            self._member.counters.handler_failures += 1
            log.warning(
                "topic_handler_failed topic=%s part=%d offset=%d attempts=%d error=%s",
                message.topic, message.part, message.offset, message.attempts, type(error).__name__,
            )  # fmt: skip
            self._report(message, self._backoff.after_s(message.attempts))
            return False
        self._report(message, None)
        return True

    def _report(self, message: ChannelMessage, delay_s: float | None) -> None:
        if not self._member.closed and message.held:
            self._member.report_soon(message, delay_s)
