"""A subscription of an NSQ client: a member of a channel, and what the client has of it.

Source: docs/nsq.md, "What is what".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from cluster.nsq.frames import Sent, message_id
from nsqdoor.options import Options
from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import Subscribe
from nsqdoor.protocol.extended import Headers, extension_of
from nsqdoor.topics import Topics, refused
from pixiu.client.topics.reading.member import ChannelMember, ChannelMessage
from pixiu.errors import MalformedData, PixiuError

BATCH: Final = 500
"""Messages that are given to a connection at once."""
TOUCH_SHARE: Final = 3
"""A message that a client has longer than the channel's time-out is touched at this share of it."""
LEAVE_S: Final = 5.0


class Consumer:
    """Runs one subscription.

    Args:
        topics: of the client's login.
        wanted: the subscription.
        options: of the listener.
        joined: called once when the channel was joined (None), or with the reason why it was not, or was left.
        deliver: called with messages.
    """

    def __init__(
        self,
        topics: Topics,
        wanted: Subscribe,
        options: Options,
        msg_timeout_s: float,
        joined: Callable[[Refused | None], None],
        deliver: Callable[[Sequence[Sent]], None],
    ) -> None:
        self._topics, self.wanted, self._options, self._msg_timeout_s = topics, wanted, options, msg_timeout_s
        self._joined, self._deliver = joined, deliver
        self._messages: dict[bytes, ChannelMessage] = {}
        self._member: ChannelMember | None = None
        self._credit = 0
        self.may_deliver = asyncio.Event()
        """Cleared while the client does not take bytes."""
        self.may_deliver.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="nsq-consumer")

    def set_credit(self, count: int) -> None:
        """Take this number of messages at a time."""
        self._credit = count
        if self._member is not None:
            self._member.set_credit(count)

    def finish(self, found: Sequence[bytes]) -> None:
        """Acknowledge messages. One that is no longer ours comes again, to whomever."""
        messages = [message for each in found if (message := self._messages.pop(each, None)) is not None]
        if self._member is not None and not self._member.closed:
            self._member.ack_all_soon(messages)

    def requeue(self, found: bytes, delay_ms: int) -> None:
        """Give a message back."""
        message = self._messages.pop(found, None)
        if message is not None and self._open:
            message.nack_soon(delay_ms / 1000)

    def touch(self, found: bytes) -> None:
        """Ask for more time."""
        message = self._messages.get(found)
        if message is not None:
            message.touch()

    @property
    def _open(self) -> bool:
        return self._member is not None and not self._member.closed

    async def close(self) -> None:
        """Leave the channel: what the client had goes to others at once."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._member is not None:
            await self._member.close()
            with contextlib.suppress(PixiuError, TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._topics.leave(self.wanted)

    async def _run(self) -> None:
        keeping: asyncio.Task[None] | None = None
        try:
            member = self._member = await self._topics.join(self.wanted, self._options)
            member.set_credit(self._credit)
            self._joined(None)
            keeping = asyncio.create_task(self._keep(member), name="nsq-consumer-keep")
            await self._pump(member)
        except PixiuError as error:
            self._topics.forget(self.wanted.topic)
            self._joined(refused(error, "SUB", self.wanted.topic, self.wanted.channel))
        finally:
            if keeping is not None:
                keeping.cancel()

    async def _pump(self, member: ChannelMember) -> None:
        while found := await member.next_batch(BATCH):
            await self.may_deliver.wait()
            sent: list[Sent] = []
            for message in found:
                try:
                    each = self._sent(message)
                except MalformedData:
                    continue  # it is not reported, and comes again
                self._messages[each.id] = message
                sent.append(each)
            self._deliver(sent)

    def _sent(self, message: ChannelMessage) -> Sent:
        extension = None
        if self.wanted.extended:
            extension = extension_of(Headers(message.headers, message.tag, message.load_test))
        return Sent(message_id(*message.position), message.time_us, message.attempts, message.body, extension)

    async def _keep(self, member: ChannelMember) -> None:
        """Keep what the client may have longer than the channel's time-out."""
        channel = member.channel
        timeout_s = channel.timeout_ms / 1000 if channel is not None else self._msg_timeout_s
        while self._msg_timeout_s > timeout_s / TOUCH_SHARE:
            await asyncio.sleep(timeout_s / TOUCH_SHARE)
            for message in self._messages.values():
                message.touch()
