"""The shell of a bridge to a target: its core, the member of its channel, the target.

Source: docs/bridges.md, "How a bridge works".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from structlog.typing import FilteringBoundLogger

from bridge import events as ev
from bridge.connector import Target, said
from bridge.core import Core, Limits
from bridge.options import TargetOptions
from cluster.core import log
from cluster.core.contract import END_OF_TURN, TICK
from cluster.core.runner import Runner
from pixiu.client.client import Client
from pixiu.client.topics.reading.member import ChannelMember, ChannelMessage
from pixiu.errors import ConfigurationError, NotConnected, PixiuError, Unavailable

MAX_ATTEMPTS: Final = 1_000
"""Deliveries of a channel that a bridge makes. The bridge tries again by itself, so a delivery is used up only when a process
dies or leaves; a message that kills each process that has it is a dead letter in the end."""
EXPECTED_BYTES: Final = 65_536
"""Size that messages are taken to have before the first one is there."""
TOUCH_SHARE: Final = 3
"""Messages are kept by a report at this share of the channel's time-out."""
LEAST_TOUCH_S: Final = 0.2
CLOSE_S: Final = 5.0
"""Time for leaving the channel and closing the target at an end without delay, seconds."""
MISCONFIGURED_S: Final = 30.0
"""Least wait after a target that its configuration does not allow to open, seconds."""
BRIDGE_FAILED: Final = "bridge_failed"
BRIDGE_REJECTED: Final = "bridge_rejected"


class TargetRun:
    """One bridge to a target, in this process.

    Args:
        name: of the bridge.
        options: of it.
        make: makes the target.
        client: connected to the cluster.
        now: monotonic seconds.
        log: for what an operator has to see.
    """

    def __init__(
        self,
        name: str,
        options: TargetOptions,
        make: Callable[[], Target],
        client: Client,
        now: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self.name, self.options = name, options
        self._make, self._client, self._log = make, client, log
        limits = Limits(
            options.batch_messages, options.batch_bytes, options.linger_ms / 1000, options.in_flight, options.max_tries,
            options.max_backoff_s, options.ordered,
        )  # fmt: skip
        self.core = Core(limits, self._held, random.Random().random)
        self._runner: Runner[ev.Event, ev.Effect] = Runner(self.core, now, tick=TICK, end_of_turn=END_OF_TURN)
        self._messages: dict[int, ChannelMessage] = {}
        self._numbers = 0
        self._bytes, self._credit = 0, 0
        self._target: Target | None = None
        self._member: ChannelMember | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._joining: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._rejected = ""
        """The last message that went to the dead letters, and why."""
        on = self._runner.effects.on
        on(ev.OpenTarget, lambda _effect: self._start(self._open()))
        on(ev.CloseTarget, lambda _effect: self._close_target())
        on(ev.Join, lambda _effect: self._join())
        on(ev.Leave, lambda _effect: self._leave())
        on(ev.Write, lambda effect: self._start(self._write(effect.batch, effect.numbers)))
        on(ev.Acknowledge, lambda effect: self._settle(effect.numbers))
        on(ev.Reject, self._reject)
        on(ev.Forget, lambda effect: self._forget(effect.numbers))

    @property
    def channel(self) -> str:
        """The channel that it reads."""
        return self.options.channel or f"bridge-{self.name}"

    @property
    def running(self) -> bool:
        """True while it does anything."""
        return not self.core.idle

    def begin(self) -> None:
        """Run. Does nothing if it runs."""
        self._runner.step(ev.Begin())

    async def end(self) -> None:
        """Finish what is being written, acknowledge it, and leave the channel."""
        self._runner.step(ev.End())
        while not self.core.idle or self._tasks:
            self._done.clear()
            if self.core.idle and not self._tasks:
                break
            await self._done.wait()

    async def stop(self) -> None:
        """End at once: leave the channel, so that what is not acknowledged comes again, and close the target."""
        self._runner.stop()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._leave()
        self._close_target()
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=CLOSE_S)

    def status(self) -> dict[str, object]:
        """State for `/health` and `pixiu bridge status`."""
        counters = self.core.counters
        return {
            "name": self.name, "kind": self.options.kind, "topic": self.options.topic, "channel": self.channel,
            "state": self.core.state.value, "why": self.core.why, "messages": counters.messages, "bytes": counters.bytes,
            "rejected": counters.rejected, "retries": counters.retries, "waiting": self.core.waiting, "before": self._rejected,
        }  # fmt: skip

    # --- effects

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run(), name=f"pixiu-bridge-{self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _start(self, work: Awaitable[None]) -> None:
        self._spawn(work)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._done.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error(BRIDGE_FAILED, bridge=self.name, error=type(error).__name__, text=said(error))

    async def _open(self) -> None:
        target = self._target = self._make()
        try:
            async with asyncio.timeout(self.options.timeout_s):
                await target.open()
        except Exception as error:
            self._runner.step(ev.OpenFailed(_why(error), wait_of(error)))
            return
        self._runner.step(ev.Opened())

    def _close_target(self) -> None:
        target, self._target = self._target, None
        if target is not None:
            self._spawn(target.close())

    def _join(self) -> None:
        options = self.options
        self._credit = credit_for(options.credit, options.credit_bytes, 1, EXPECTED_BYTES)
        member = self._member = self._client.durable_topic(options.topic).channel(
            self.channel, credit=self._credit, credit_bytes=options.credit_bytes, filter=options.filter, ordered=options.ordered,
            from_end=options.from_end, max_attempts=MAX_ATTEMPTS, load_test=options.load_test,
        )  # fmt: skip
        self._joining = self._spawn(self._take(member))

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            self._spawn(member.close())

    async def _take(self, member: ChannelMember) -> None:
        """Give the core what the channel gives, until the member is closed."""
        keeps = None
        try:
            await member.open()
            keeps = self._spawn(self._keep(member))
            while (message := await member.next()) is not None:
                self._numbers += 1
                self._messages[self._numbers] = message
                self._bytes += message.size
                self._share_credit(member)
                self._runner.step(ev.Arrived([ev.Arrival(self._numbers, message.slot, message.size)]))
        except PixiuError as error:
            if member is self._member:
                self._runner.step(ev.MemberFailed(str(error)))
        finally:
            if keeps is not None:
                keeps.cancel()

    def _share_credit(self, member: ChannelMember) -> None:
        """Have the credit follow the size of the messages: what is given beyond the bytes would wait at the servers."""
        wanted = credit_for(self.options.credit, self.options.credit_bytes, len(self._messages), self._bytes)
        if not self._credit // 2 <= wanted <= self._credit + self._credit // 2:
            self._credit = wanted
            member.set_credit(wanted)

    def _pop(self, number: int) -> ChannelMessage:
        message = self._messages.pop(number)
        self._bytes -= message.size
        return message

    async def _keep(self, member: ChannelMember) -> None:
        """Ask for time for what waits here while the target is away."""
        while True:
            channel = member.core.topic.channels.get(self.channel)
            timeout_s = channel.timeout_ms / 1000 if channel is not None and channel.timeout_ms else 60.0
            await asyncio.sleep(max(timeout_s / TOUCH_SHARE, LEAST_TOUCH_S))
            for message in [*self._messages.values()]:
                if message.held:
                    message.touch()

    async def _write(self, batch: int, numbers: Sequence[int]) -> None:
        target = self._target
        try:
            if target is None:
                raise Unavailable("the target was closed meanwhile")
            async with asyncio.timeout(self.options.timeout_s):
                outcomes = await target.write([self._messages[number] for number in numbers])
        except Exception as error:
            self._runner.step(ev.WriteFailed(batch, _why(error), wait_of(error)))
            return
        self._runner.step(ev.Written(batch, outcomes))

    def _settle(self, numbers: Sequence[int]) -> None:
        self._spawn(self._acknowledge([self._pop(number) for number in numbers], self._target))

    async def _acknowledge(self, messages: Sequence[ChannelMessage], target: Target | None) -> None:
        try:
            counted = await asyncio.gather(*(message.ack() for message in messages))
        except NotConnected:  # the member was closed: they come again
            return
        if target is not None:
            target.settled([message for message, counts in zip(messages, counted, strict=True) if counts])

    def _reject(self, effect: ev.Reject) -> None:
        for number, why in effect.letters:
            message = self._pop(number)
            self._rejected = f"{message.part}:{message.offset} went to the dead letters: {why}"
            if log.once_per(1.0, (BRIDGE_REJECTED, self.name)):
                self._log.warning(BRIDGE_REJECTED, bridge=self.name, part=message.part, offset=message.offset, why=why)
            try:
                message.reject_soon(why)
            except NotConnected:  # it comes again
                continue

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self._messages:
                self._pop(number)

    def _held(self, number: int) -> bool:
        return self._messages[number].held


def credit_for(most: int, most_bytes: int, count: int, size: int) -> int:
    """The messages for which a member asks, if `count` of them have `size` bytes together."""
    return min(most, max(1, most_bytes * count // max(size, 1)))


def _why(error: Exception) -> str:
    if isinstance(error, PixiuError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "the target did not answer in time (timeout_s)"
    return f"{type(error).__name__}: {said(error)}"


def wait_of(error: Exception) -> float:
    """The least wait after an error, seconds."""
    if isinstance(error, ConfigurationError):
        return MISCONFIGURED_S
    return error.retry_after_ms / 1000 if isinstance(error, PixiuError) else 0.0
