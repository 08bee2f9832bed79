"""Answers about channels to clients: their state, dead letters, resend and seek.

Source: docs/topics.md, "Channels".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Final

from cluster.topics import entries as en
from pixiu.errors import InvalidArgument, NotServed, Unavailable
from pixiu.wire.block import Flag
from pixiu.wire.v1 import topic_pb2 as pb
from topic import events as ev
from topic.clients.deliveries import delivery
from topic.clients.group import Group, topic_named
from topic.state.parts import Part
from topic.state.state import Done
from topic.storage.segment import Gap

MAX_DEAD: Final = 1000
"""Dead letters in one reply."""
DEFAULT_DEAD: Final = 100
DEAD_BYTES: Final = 2 << 20
"""Bytes of their messages in one reply; the rest comes with the next."""
MAX_VIEWS: Final = 10_000
"""Pairs of channels and parts in one reply."""
MAX_OFFSETS: Final = 10_000
"""Offsets in one request about them."""
REASONS: Final = {
    en.Reason.ATTEMPTS: "its attempts are used up: the last member refused it",
    en.Reason.TIMED_OUT: "its attempts are used up: the last member never answered",
    en.Reason.REJECTED: "a member rejected it",
}


class Channels:
    """Serves `TopicLog.Channel`.

    Args:
        group: the replica.
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    async def serve(self, request: pb.ChannelRequest) -> pb.ChannelReply:
        """Serve a request. Raises NotLeader, Unavailable, NotServed, InvalidArgument, OutcomeUnknown."""
        group = self._group
        group.check_reads()
        state = group.store.state
        topic = topic_named(state, request.topic)
        wanted = set(request.parts)
        parts = [part for part in state.parts_of(topic.topic) if not wanted or en.number_of(part.part) in wanted]
        channels = state.channels_of(topic.topic)
        if request.channel:
            channels = [each for each in channels if each.name == request.channel]
            if not channels:
                raise NotServed(
                    f"{topic.name} has no channel {request.channel[:128]!r}; `pixiu topic channels {topic.name}` lists them"
                )
        ask = request.WhichOneof("ask")
        if ask in (None, "state"):
            return await self._state(channels, parts)
        if not request.channel:
            raise NotServed("name a channel; only the state of all is given at once")
        match ask:
            case "dead":
                return await self._dead(channels[0], parts, request.dead)
            case "resend":
                return await self._resend(channels[0], parts, request.resend.offsets)
            case "acknowledged":
                return self._acknowledged(channels[0], parts, request.acknowledged.offsets)
            case _:
                return await self._seek(channels[0], parts, request.seek)

    async def _state(self, channels: Sequence[en.ChannelSettings], parts: Sequence[Part]) -> pb.ChannelReply:
        reply, wanted = pb.ChannelReply(), {part.part for part in parts}
        if len(channels) * len(parts) > MAX_VIEWS:
            raise InvalidArgument(
                f"{len(channels)} channels in {len(parts)} parts are asked for, at most {MAX_VIEWS} pairs at once; name a channel"
            )
        for channel in channels:
            await asyncio.sleep(0)  # others have their turn
            for view in self._group.core.describe(channel.channel):
                if view.part in wanted:
                    reply.parts.append(await self._view(channel.name, view))
        self._group.check_reads()
        return reply

    async def _view(self, name: str, view: ev.ChannelView) -> pb.ChannelPart:
        oldest_us = 0
        if view.unacknowledged:
            try:
                found = await self._group.reader.find(view.part, view.floor)
                oldest_us = 0 if isinstance(found, Gap) else found[0].at_us
            except Unavailable:  # it is in the object store, which does not answer: everything else is known
                pass
        return pb.ChannelPart(
            channel=name, part=en.number_of(view.part), floor=view.floor, end=view.end, unacknowledged=view.unacknowledged,
            with_members=view.with_members, waiting=view.waiting, dead=view.dead, lost=view.lost, oldest_us=oldest_us,
            members=[
                pb.ChannelMember(name=each.name, tag=each.tag, credit=each.credit, having=each.having) for each in view.members
            ],
            stuck=view.stuck, filter_errors=view.filter_errors,
        )  # fmt: skip

    async def _dead(self, channel: en.ChannelSettings, parts: Sequence[Part], ask: pb.DeadLettersRequest) -> pb.ChannelReply:
        """Dead letters of the parts, in their order, from an offset on."""
        limit, took, reply = min(ask.limit or DEFAULT_DEAD, MAX_DEAD), 0, pb.ChannelReply()
        for part in parts:
            progress = self._group.store.state.progress.get((channel.channel, part.part))
            if progress is None:
                continue  # it was removed while messages of another part were read
            offsets = sorted(offset for offset in progress.dead if offset > ask.after or not ask.after)
            for offset in islice(offsets, limit - len(reply.dead)):
                letter = progress.dead.get(offset)
                if letter is None or took > DEAD_BYTES:
                    continue
                made = reply.dead.add(
                    part=en.number_of(part.part), attempts=letter.attempts, at_us=letter.at_us,
                    reason=letter.text or REASONS.get(en.Reason(letter.reason), "unknown"),
                )  # fmt: skip
                found = await self._group.reader.find(part.part, offset)
                if not isinstance(found, Gap) and not found[1].flags & Flag.HOLE:
                    made.message.CopyFrom(delivery(en.number_of(part.part), *found, offset, offset + 1))
                    took += len(made.message.data)
                else:
                    made.message.part, made.message.base = en.number_of(part.part), offset
        self._group.check_reads()
        return reply

    def _acknowledged(self, channel: en.ChannelSettings, parts: Sequence[Part], offsets: Sequence[int]) -> pb.ChannelReply:
        self._check_offsets(parts, offsets)
        progress = self._group.store.state.progress.get((channel.channel, parts[0].part))
        found = [] if progress is None else [each for each in offsets if not progress.is_open(each)]
        return pb.ChannelReply(acknowledged=found)

    @staticmethod
    def _check_offsets(parts: Sequence[Part], offsets: Sequence[int]) -> None:
        if len(parts) != 1 or len(offsets) > MAX_OFFSETS:
            raise InvalidArgument(f"offsets are of one part, and at most {MAX_OFFSETS} at once; name the part")

    async def _resend(self, channel: en.ChannelSettings, parts: Sequence[Part], offsets: Sequence[int]) -> pb.ChannelReply:
        if offsets:
            self._check_offsets(parts, offsets)
        return await self._changed(en.RESEND, [en.encode_resend(channel.channel, part.part, offsets) for part in parts])

    async def _seek(self, channel: en.ChannelSettings, parts: Sequence[Part], ask: pb.SeekChannel) -> pb.ChannelReply:
        if ask.WhichOneof("to") == "offset" and len(parts) != 1:
            raise InvalidArgument("an offset is of one part; name the part")
        payloads = [en.encode_seek(channel.channel, part.part, await self._target(part, ask)) for part in parts]
        return await self._changed(en.SEEK, payloads, ask.force)

    async def _target(self, part: Part, ask: pb.SeekChannel) -> int:
        match ask.WhichOneof("to"):
            case "offset":
                return ask.offset
            case "time_us":
                return await self._group.reader.offset_at(part, ask.time_us)
            case "end":
                return part.end
            case _:
                return part.first

    async def _changed(self, kind: int, payloads: Sequence[bytes], force: bool = False) -> pb.ChannelReply:
        answers = await asyncio.gather(*(self._group.request(kind, payload, force) for payload in payloads))
        refused = next((answer for answer in answers if isinstance(answer, Done) and not answer.ok), None)
        if refused is not None:
            raise NotServed(refused.why)
        return pb.ChannelReply(changed=sum(answer.changed for answer in answers if isinstance(answer, Done)))
