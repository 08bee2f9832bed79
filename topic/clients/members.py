"""Streams of channels' members: messages out, by their credit, and reports in.

    core ──Deliver──▶ runs that wait ──cut from blocks when the stream is free──▶ member
    member ──reports──▶ core ──▶ log ──▶ committed ──▶ result

Only offsets wait for a slow member, never messages: they are cut when its stream takes more.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

from cluster.access.login_guard import LoginSession
from cluster.access.rules import CONSUME
from cluster.core.turn import Turn
from cluster.rpc.served import ServedStream, ServedStreams
from cluster.topics.entries import MAX_REASON_BYTES, number_of, part_id
from pixiu.errors import InvalidArgument, NotLeader, PixiuError, Unavailable
from pixiu.rpc.duplex import Served
from pixiu.wire.block import Flag
from pixiu.wire.v1 import topic_pb2 as pb
from topic import events as ev
from topic.clients.deliveries import delivery
from topic.clients.group import Group, refusal_of, require

MAX_NAME_BYTES: Final = 128
MAX_FILTER_BYTES: Final = 4096
MAX_MEMBERS: Final = 10_000
"""Streams of members at one time. Policy: more are refused with OVERLOADED."""
MAX_REPORTS: Final = 1000
"""Reports of a stream that wait for their commit. Policy: it is not read until some are answered."""
MAX_NUMBERS: Final = 20_000
"""Numbers in each list of a report."""
REPLY_BYTES: Final = 256 << 10
"""Bytes of messages in one reply; one message may have more."""
UNREADABLE_AGAIN_S: Final = 10.0
"""Delay of the next try to deliver a message that cannot be read now, seconds."""
OWN: Final = 0
"""Number of this process's own reports: nobody waits for their answers."""

Handler = Served[pb.ConsumeReply, pb.ConsumeRequest]


class MemberStream:
    """One member.

    Args:
        handler: the stream's transport.
        members: all streams.
    """

    def __init__(self, handler: Handler, members: Members) -> None:
        self.number = 0
        """0 until it is admitted."""
        self._members = members
        self.session: LoginSession | None = None
        self.opened = False
        """True once its first request has come."""
        self.topic = ""
        """Name of the topic that it reads."""
        self.channel = ""
        """Name of its channel."""
        self._reply = pb.ConsumeReply()
        self._answers = False
        """True if the reply has something to say."""
        self._waiting: deque[tuple[int, ev.Run]] = deque()
        """(part, messages) that the member is to get."""
        self._loading = False
        self._last = 0
        self._reports: dict[int, int] = {}
        """Own number of a report → the client's."""
        self.served: ServedStream[pb.ConsumeReply, pb.ConsumeRequest] = ServedStream(
            handler, lambda request: members.take(self, request), self, lambda: members.over(self)
        )

    def deliver(self, part: int, runs: Sequence[ev.Run]) -> None:
        """Have messages sent."""
        if self.served.ended:
            return  # it has left, or is about to
        self._waiting += [(part, run) for run in runs]
        self.served.changed()

    def number_of(self, request: int) -> int:
        """Note a report; returns the number by which the core answers it."""
        self._last += 1
        self._reports[self._last] = request
        self.served.took()
        return self._last

    def reported(self, number: int, result: pb.ReportResult) -> None:
        """Take the result of a report."""
        request = self._reports.pop(number, None)
        if request is not None:
            result.request = request
            self._reply.results.append(result)
            self._answers = True
            self.served.changed()

    def say(self, reply: pb.ConsumeReply) -> None:
        """Merge other fields into the next reply."""
        self._reply.MergeFrom(reply)
        self._answers = True
        self.served.changed()

    def end(self, why: pb.TopicRefusal) -> None:
        """End the stream with a reason: what it was to get, others get."""
        self._waiting.clear()
        self.say(pb.ConsumeReply(end=why))
        self.served.end(why.text or why.code)

    def login_over(self, text: str) -> None:
        """End the stream: its login has expired, or an operator ended it."""
        self.end(pb.TopicRefusal(code=Unavailable.code, text=text, retry_after_ms=100))
        self._members.left(self)

    def rules_changed(self) -> None:
        """End the stream if its login may no longer read the topic."""
        if self.session is not None and not self.session.allows(CONSUME, self.topic):
            self.end(pb.TopicRefusal(code="NOT_ALLOWED", text=f"this login may no longer consume the topic {self.topic}"))
            self._members.left(self)

    # --- as `Pending`

    def unanswered(self) -> bool:
        """Return True while a report waits for its answer."""
        return bool(self._reports)

    def full(self) -> bool:
        """Return True while too many reports wait, or results for the member to read them."""
        return len(self._reports) + len(self._reply.results) >= MAX_REPORTS

    def give(self) -> pb.ConsumeReply | None:
        """Next reply: results, and as many messages as fit."""
        self._cut()
        if not self._answers:
            return None
        self._answers = False
        reply, self._reply = self._reply, pb.ConsumeReply()
        return reply

    def _cut(self) -> None:
        """Move messages into the reply, until it is full or one has to be read first."""
        took, store = 0, self._members.group.store
        while self._waiting and took < REPLY_BYTES and not self._loading:
            part, run = self._waiting[0]
            found = store.find(part, run.low)
            if found is None:
                self._loading = True
                self._members.spawn(self._load(part, run))
                return
            stamp, block = found
            high = min(run.high, stamp.base + block.count)
            if block.flags & Flag.HOLE:  # compaction has removed it since the core gave it
                self._loading = True
                self._members.spawn(self._pass_over(part, run, high))
                return
            made = delivery(number_of(part), stamp, block, run.low, high, run.attempts)
            self._reply.deliveries.append(made)
            self._answers = True
            took += len(made.data)
            self._members.cut(part, high - run.low, len(made.data))
            self._rest(part, run, high)

    def _rest(self, part: int, run: ev.Run, done: int) -> None:
        """The first messages of what waits are dealt with, up to an offset."""
        if done < run.high:
            self._waiting[0] = part, run._replace(low=done)
        else:
            self._waiting.popleft()

    async def _pass_over(self, part: int, run: ev.Run, high: int) -> None:
        """Report what compaction has removed: it counts as acknowledged."""
        self._loading = False
        if self._waiting and self._waiting[0] == (part, run):
            self._rest(part, run, high)
            self._members.group.step(ev.Reported(self.number, OWN, part, acknowledged=[(run.low, high)]))
        self.served.changed()

    async def _load(self, part: int, run: ev.Run) -> None:
        while True:
            try:
                gap = await self._members.group.reader.load(part, run.low)
                break
            except Unavailable:  # the object store is away: what the member waits for stays its own
                if self.served.ended or not self._waiting:
                    gap = None
                    break
                for waiting, each in self._waiting:
                    offsets = range(each.low, min(each.high, each.low + MAX_NUMBERS))
                    self._members.group.step(ev.Touched(self.number, waiting, offsets))
        self._loading = False
        if gap is not None and self._waiting and self._waiting[0] == (part, run):
            high = min(max(gap.high, run.low + 1), run.high)
            again = [(offset, UNREADABLE_AGAIN_S) for offset in range(run.low, high)]
            self._rest(part, run, high)
            self._members.group.step(ev.Reported(self.number, OWN, part, refused=again))
        self.served.changed()


class Members:
    """The streams of all members.

    Args:
        group: the replica.
        turn: of the process's clients.
        spawn: runs a task.
    """

    def __init__(self, group: Group, turn: Turn, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.group, self._turn, self.spawn = group, turn, spawn
        self.streams: ServedStreams[MemberStream] = ServedStreams(MAX_MEMBERS, "this replica has %d streams of members")

    def open(self, handler: Handler) -> MemberStream:
        """Make a stream. It is not admitted yet."""
        return MemberStream(handler, self)

    def admit(self, stream: MemberStream) -> None:
        """Number a stream. Raises Draining, Overloaded."""
        stream.number = self.streams.enter(stream)

    def over(self, stream: MemberStream) -> None:
        """Forget a stream that is over."""
        if stream.session is not None:
            stream.session.close()
        if self.streams.pop(stream.number, None) is not None:
            self.left(stream)

    def left(self, stream: MemberStream) -> None:
        """A member gets nothing more, and others get what it had; its stream may still be open, since it need not read."""
        if stream.topic:
            self.group.step(ev.Left(stream.number))

    def cut(self, number: int, messages: int, size: int) -> None:
        """Have the core know the size of messages that leave."""
        part = self.group.store.state.parts.get(number)
        if part is not None:
            self.group.core.paces.cut(part, messages, size, time.monotonic())

    def drain(self) -> None:
        """Ask all members to find the next leader."""
        self.streams.draining = True
        for stream in list(self.streams.values()):
            stream.say(pb.ConsumeReply(draining=True))

    def rejoin(self, topic: str, channel: str) -> None:
        """Ask the members of a channel that was moved to join the groups of finished parts again."""
        for stream in list(self.streams.values()):
            if (stream.topic, stream.channel) == (topic, channel):
                stream.say(pb.ConsumeReply(rejoin=True))

    def leader_changed(self) -> None:
        """End all streams: the core knows no members any more."""
        why = refusal_of(self.group, NotLeader("the leader has changed; join the new one"))
        for stream in list(self.streams.values()):
            stream.end(why)

    def stop(self) -> None:
        """End all streams."""
        for stream in list(self.streams.values()):
            stream.served.cut("this replica stops")

    # --- requests

    def take(self, stream: MemberStream, request: pb.ConsumeRequest) -> Awaitable[Any] | None:
        """Take a request of a stream."""
        if not stream.topic:
            stream.opened = True
            return self._join(stream, request)
        if request.credit or request.paused:
            self.group.step(ev.Credited(stream.number, 0 if request.paused else request.credit))
        if not request.reports:
            return None
        return self._report(stream, request.reports)

    async def _join(self, stream: MemberStream, request: pb.ConsumeRequest) -> None:
        hello = request.hello
        try:
            names = (hello.topic, hello.channel, hello.member, hello.tag)
            if not hello.topic or not hello.channel or not hello.credit:
                raise InvalidArgument("a stream begins with `hello`: a topic, a channel and a credit above 0")
            if any(len(name.encode()) > MAX_NAME_BYTES for name in names) or len(hello.filter.encode()) > MAX_FILTER_BYTES:
                raise InvalidArgument(f"names have at most {MAX_NAME_BYTES} bytes, a filter {MAX_FILTER_BYTES}")
            load_test = ev.LoadTest(hello.load_test)
            await require(stream.session, CONSUME, hello.topic)
            if stream.served.ended:
                return
            stream.topic, stream.channel = hello.topic, hello.channel
            if stream.session is not None:
                stream.session.rules_changed = stream.rules_changed
            self.group.step(
                ev.Joined(stream.number, hello.topic, hello.channel, hello.credit, hello.member, hello.tag, load_test, hello.filter)
            )
        except ValueError:
            stream.end(refusal_of(self.group, InvalidArgument(f"there is no treatment of load tests {hello.load_test}")))
        except PixiuError as problem:
            stream.end(refusal_of(self.group, problem))

    async def _report(self, stream: MemberStream, reports: Sequence[pb.MessageReport]) -> None:
        for report in reports:
            await self._turn.run(partial(self._one, stream, report), report.ByteSize())
            if (space := stream.served.space()) is not None:
                await space

    def _one(self, stream: MemberStream, report: pb.MessageReport) -> None:
        if stream.served.ended or stream.number not in self.streams:
            return
        topic = self.group.store.state.topic_named(stream.topic)
        part = part_id(topic.topic if topic is not None else 0, report.part)
        sizes = len(report.acknowledged), len(report.refused), len(report.touched), len(report.rejected)
        if any(size % 2 for size in sizes[:2]) or max(sizes) > MAX_NUMBERS:
            number = stream.number_of(report.request)
            text = f"ranges and refused messages are pairs of numbers, and each list of a report has at most {MAX_NUMBERS}"
            refusal = refusal_of(self.group, InvalidArgument(text))
            stream.reported(number, pb.ReportResult(part=report.part, refusal=refusal))
            return
        if report.touched:
            self.group.step(ev.Touched(stream.number, part, report.touched))
        if report.acknowledged or report.refused or report.rejected:
            acknowledged, refused = iter(report.acknowledged), iter(report.refused)
            ranges = list(zip(acknowledged, acknowledged, strict=True))
            delays = [(offset, delay_ms / 1000) for offset, delay_ms in zip(refused, refused, strict=True)]
            rejected = [(each.offset, shortened(each.reason)) for each in report.rejected]
            self.group.step(ev.Reported(stream.number, stream.number_of(report.request), part, ranges, delays, rejected))

    # --- effects

    def deliver(self, effect: ev.Deliver) -> None:
        """Have messages sent."""
        stream = self.streams.get(effect.member)
        if stream is not None:
            stream.deliver(effect.part, effect.runs)

    def reported(self, effect: ev.ReportReply) -> None:
        """Answer a report."""
        stream = self.streams.get(effect.member)
        if stream is None or effect.request == OWN:
            return
        pairs = [number for pair in effect.acknowledged for number in pair]
        result = pb.ReportResult(part=number_of(effect.part), acknowledged=pairs, refused=effect.refused)
        if effect.refusal is not None:
            result.refusal.CopyFrom(refusal_of(self.group, effect.refusal))
        stream.reported(effect.request, result)

    def ended(self, effect: ev.MemberEnded) -> None:
        """End a member's stream."""
        stream = self.streams.get(effect.member)
        if stream is not None:
            stream.end(refusal_of(self.group, effect.refusal))

    def finished(self, effect: ev.PartsFinished) -> None:
        """Inform a member of finished parts."""
        stream = self.streams.get(effect.member)
        if stream is not None:
            stream.say(pb.ConsumeReply(finished_parts=[number_of(part) for part in effect.parts]))


def shortened(reason: str) -> str:
    """The reason of a rejection, cut to its limit."""
    return reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
