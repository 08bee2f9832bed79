"""Descriptions of topics on the wire, and refusals, as the client's own."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio

from pixiu.client.topics.topic_map import ChannelInfo, TopicMap
from pixiu.errors import (
    InvalidArgument,
    LimitError,
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    NotLeader,
    NotServed,
    OutcomeUnknown,
    PixiuError,
    TopicExists,
    TopicInUse,
    Unavailable,
    UnknownTopic,
    error_of_code,
)
from pixiu.placement.slots import Lineage, Part
from pixiu.rpc.channels import reason_of
from pixiu.wire.v1 import topic_pb2

_STATUS: dict[grpc.StatusCode, type[PixiuError]] = {
    grpc.StatusCode.NOT_FOUND: UnknownTopic,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.ALREADY_EXISTS: TopicExists,
    grpc.StatusCode.FAILED_PRECONDITION: TopicInUse,
    grpc.StatusCode.OUT_OF_RANGE: LimitError,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitError,
    grpc.StatusCode.UNIMPLEMENTED: NotServed,
}
FINAL_STATUS = frozenset(_STATUS) - {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Statuses that every proxy answers alike."""
USABLE = frozenset((topic_pb2.PART_OPEN, topic_pb2.PART_SEALED, topic_pb2.PART_SEALING))
NOT_SERVED = "this proxy serves no durable topics: it is of an older version, or the address of another role"


def topic_map(found: topic_pb2.TopicDescription) -> TopicMap:
    """Convert a description; parts that are only planned are left out. Raises `MalformedData`."""
    usable = [each for each in found.parts if each.state in USABLE]
    parts = [
        Part(each.number, each.low, each.high, each.group, tuple(each.parents), each.state == topic_pb2.PART_SEALED)
        for each in usable
    ]
    try:
        lineage = Lineage(parts)
    except InvalidArgument as problem:
        raise MalformedData(f"the description of topic {found.name} is wrong: {problem}") from None
    settings = found.settings
    return TopicMap(
        found.name,
        found.topic,
        found.version,
        lineage,
        {each.group: tuple(each.addresses) for each in found.groups},
        {each.name: channel_info(each) for each in found.channels},
        found.deleted_at_ms,
        retention_s=settings.retention_s,
        retention_bytes=settings.retention_bytes,
        messages_per_s=settings.messages_per_s,
        bytes_per_s=settings.bytes_per_s,
        read_messages_per_s=settings.read_messages_per_s,
        read_bytes_per_s=settings.read_bytes_per_s,
        retain_acknowledged=settings.retain_acknowledged,
        compact_s=settings.compact,
        store=settings.store,
    )


def channel_info(found: topic_pb2.TopicChannel) -> ChannelInfo:
    """Convert a channel."""
    return ChannelInfo(found.name, found.ordered, found.from_end, found.max_attempts, found.timeout_ms, found.filter)


def children_of(parts: Sequence[topic_pb2.TopicPart]) -> list[Part]:
    """Convert the children of a sealed part."""
    return [Part(each.number, each.low, each.high, each.group, tuple(each.parents)) for each in parts]


def refused(found: topic_pb2.TopicRefusal, name: str) -> PixiuError:
    """The error of a refusal."""
    if found.code in (UnknownTopic.code, "NOT_FOUND"):
        return unknown(name, found.text)
    error = error_of_code(found.code, found.text, found.retry_after_ms)
    if isinstance(error, NotLeader):
        error.leader = found.leader
    return error


def unknown(name: str, text: str = "") -> UnknownTopic:
    """The error for a topic that is not there."""
    hint = f"there is no topic {name!r}: `pixiu topic create {name}` makes it, or `await px.topics.create({name!r})`"
    return UnknownTopic(text if "pixiu topic" in text else f"{text} ({hint})" if text else hint)


def error_of_call(error: grpc.aio.AioRpcError, name: str = "") -> PixiuError:
    """The error of a call that failed."""
    kind, details = _STATUS.get(error.code()), error.details() or ""
    if kind is UnknownTopic and name:
        return unknown(name, details)
    if kind is NotServed:
        return NotServed(NOT_SERVED)
    if kind is not None:
        return kind(details or error.code().name)
    if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED):
        return OutcomeUnknown(reason_of(error))
    return Unavailable(reason_of(error))
