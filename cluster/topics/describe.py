"""A topic's node of the registry as a message for clients. Pure.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from typing import Final

from pixiu.discovery.topics import SETTINGS, PartState, TopicNode
from pixiu.errors import PixiuError, Refusal, error_of_code
from pixiu.wire.v1 import topic_pb2

STATES: Final = {
    PartState.OPENING: topic_pb2.PART_OPENING,
    PartState.OPEN: topic_pb2.PART_OPEN,
    PartState.SEALING: topic_pb2.PART_SEALING,
    PartState.SEALED: topic_pb2.PART_SEALED,
    PartState.DROPPING: topic_pb2.PART_SEALED,
}


def description_of(node: TopicNode) -> topic_pb2.TopicDescription:
    """The description of a topic, without its groups. Removed channels are left out."""
    return topic_pb2.TopicDescription(
        name=node.name,
        topic=node.topic,
        version=node.version,
        settings=topic_pb2.TopicSettings(**{name: getattr(node, name) for name in SETTINGS}),
        parts=[
            topic_pb2.TopicPart(
                number=part.number,
                low=part.low,
                high=part.high,
                group=part.group,
                state=STATES[part.state],
                parents=part.parents,
            )
            for part in node.parts
        ],
        channels=[
            topic_pb2.TopicChannel(
                name=channel.name,
                channel=channel.channel,
                ordered=channel.ordered,
                from_end=channel.from_end,
                max_attempts=channel.max_attempts,
                timeout_ms=channel.timeout_ms,
                filter=channel.filter,
            )
            for channel in node.channels
            if not channel.removed
        ],
        deleted_at_ms=node.deleted_at_ms,
    )


def refusal_of(refusal: Refusal, leader: str = "") -> topic_pb2.TopicRefusal:
    """A refusal as a message. leader: address of the leader, if that is the reason."""
    return topic_pb2.TopicRefusal(
        code=refusal.code, text=refusal.text, retry_after_ms=refusal.retry_after_ms, leader=leader
    )  # fmt: skip


def error_of(refusal: topic_pb2.TopicRefusal) -> PixiuError:
    """The error that a refusal reports."""
    return error_of_code(refusal.code, refusal.text, refusal.retry_after_ms)
