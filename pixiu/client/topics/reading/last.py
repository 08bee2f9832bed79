"""The last message of a key: asked of the part that holds its slot, and of those before it while they may have it.

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

from typing import Any, Final

from pixiu.client.topics.drafts import key_of
from pixiu.client.topics.reading.received import Origin, TopicMessage, spans
from pixiu.client.topics.surroundings import TopicContext, ask_leader
from pixiu.client.topics.topic_map import TopicMap
from pixiu.errors import InvalidArgument, Unavailable, WrongPartition
from pixiu.placement.slots import SLOTS, Part, slot_of
from pixiu.wire.v1 import topic_pb2

MAX_ROUNDS: Final = 10
"""Times that it is begun again because parts were split, merged or moved meanwhile. Policy: then it is refused."""


async def last(around: TopicContext, name: str, key: str | bytes, slot: int | None = None) -> TopicMessage | None:
    """Look up the last message of a key; None: there is none, or it was deleted. slot: that of its messages, if their writers named
    one.

    Raises `InvalidArgument` if the topic is not compacted, `UnknownTopic`, `NotAllowed`, `Unavailable`.
    """
    wanted = key_of(key)
    if slot is not None and not 0 <= slot < SLOTS:
        raise InvalidArgument(f"a slot is from 0 to {SLOTS - 1}, not {slot}")
    at = slot_of(wanted) if slot is None else slot
    topic = await around.directory.topic(name)
    for _ in range(MAX_ROUNDS):
        part: Part | None = topic.lineage.open_part(at)
        while part is not None:
            try:
                reply = await _ask(around, topic, part, wanted)
            except WrongPartition:
                break
            if reply.sealed and not part.sealed:
                break  # its children may have a newer one
            if reply.known:
                return _message(name, part.number, reply.message)
            part = topic.lineage.parent(part.number, at)
        else:
            return None
        topic = await around.directory.describe(name, topic.version)
    raise Unavailable(f"the parts of topic {name} change all the time; try again")


async def _ask(around: TopicContext, topic: TopicMap, part: Part, key: bytes) -> topic_pb2.TopicLastReply:
    request = topic_pb2.TopicLastRequest(topic=topic.name, part=part.number, key=key)

    async def call(stub: Any, seconds: float) -> topic_pb2.TopicLastReply:
        reply: topic_pb2.TopicLastReply = await stub.Last(request, timeout=seconds, metadata=around.channels.metadata())
        return reply

    return await ask_leader(around, topic.name, part.group, call)


def _message(name: str, part: int, found: topic_pb2.Delivery) -> TopicMessage | None:
    for span in spans(found.index, found.data):
        return TopicMessage(Origin(name, part, found.time_us, found.sender, found.writer), found.base, found.data, *span)
    return None
