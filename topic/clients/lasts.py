"""Answers which message is the last of a key, in one part of a topic that is compacted.

Source: docs/topics.md, "Compaction".
"""

from __future__ import annotations

from typing import Final

from cluster.topics.entries import number_of, part_id
from pixiu.errors import InvalidArgument, Unavailable, WrongPartition
from pixiu.wire.block import MAX_KEY_BYTES, Flag
from pixiu.wire.v1 import topic_pb2 as pb
from topic.clients.deliveries import delivery
from topic.clients.group import Group, topic_named
from topic.clients.reads import children_of
from topic.storage.keys import digest_of
from topic.storage.segment import Gap

MICRO: Final = 1_000_000


async def last(group: Group, request: pb.TopicLastRequest) -> pb.TopicLastReply:
    """Answer. Raises NotLeader, Unavailable, NotServed, WrongPartition, InvalidArgument."""
    group.check_reads()
    if len(request.key) > MAX_KEY_BYTES:
        raise InvalidArgument(f"a key has at most {MAX_KEY_BYTES} bytes, this one {len(request.key)}")
    digest = digest_of(request.key)
    while True:
        topic = topic_named(group.store.state, request.topic)
        if not topic.compact:
            raise InvalidArgument(
                f"topic {topic.name} is not compacted: its keys have no index; `pixiu topic create NAME --compact TIME` makes one"
            )
        part = group.store.state.parts.get(part_id(topic.topic, request.part))
        if part is None:
            raise WrongPartition(f"part {request.part} of {topic.name} is not in this group; ask a proxy where it is")
        reply = pb.TopicLastReply(sealed=part.sealed, children=children_of(part.children))
        known = group.store.keys.last(part.part, digest)
        if known is None:
            return reply
        reply.known = True
        if known.tombstone or known.offset < part.first:  # retention has dropped it: those before it count no more
            return reply
        found = await group.reader.find(part.part, known.offset)
        group.check_reads()
        if group.store.keys.last(part.part, digest) != known:
            continue  # another message has come, and this one may be gone
        if isinstance(found, Gap):
            raise Unavailable(f"the last message of this key, {request.part}:{known.offset}, cannot be read now; try again", 1000)
        stamp, block = found
        if block.flags & Flag.HOLE:
            raise Unavailable(f"the last message of this key, {request.part}:{known.offset}, is not there", 1000)
        expires_in_s = block.handling(known.offset - stamp.base)[1]
        if expires_in_s is None or group.store.state.clock_us < stamp.at_us + expires_in_s * MICRO:
            reply.message.CopyFrom(delivery(number_of(part.part), stamp, block, known.offset, known.offset + 1))
        return reply
