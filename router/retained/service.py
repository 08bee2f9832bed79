"""A router's retained messages: a replicated table, which gateways list.

Source: docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

from typing import Any, Final

import grpc
import grpc.aio

from cluster.wire.v1 import retained_pb2, retained_pb2_grpc
from pixiu.placement.partition import is_partition_count
from router.replicated.service import Form, Replicated, now_ms
from router.retained.map import Entry, RetainedMap

MAX_FILTERS: Final = 1_000
FULL: Final = (
    "the routers keep as many retained messages as they may (router.retained_messages, router.retained_mb): clear some, or raise it"
)


def entry_of(wire: retained_pb2.RetainedEntry) -> Entry:
    """An entry as the map has it."""
    return Entry(wire.topic.encode(), wire.version, wire.snowflake, wire.record, wire.expires_at_ms, wire.room)


def wire_of(entry: Entry) -> retained_pb2.RetainedEntry:
    """An entry as it is sent."""
    return retained_pb2.RetainedEntry(
        topic=entry.topic.decode(),
        version=entry.version,
        snowflake=entry.snowflake,
        record=entry.record,
        expires_at_ms=entry.expires_at_ms,
        room=entry.room,
    )


FORM: Final = Form(
    name="retained",
    what="retained messages",
    option="router.retained_mb",
    wire=retained_pb2,
    prefix="Retained",
    stub=retained_pb2_grpc.RetainedStub,
    read=entry_of,
    write=wire_of,
)


class RetainedService(Replicated[Entry], retained_pb2_grpc.RetainedServicer):
    """Serves the retained messages of one router; takes the arguments of `Replicated`.

    Args:
        max_messages: limit of retained messages.
        max_bytes: limit of their bytes.
    """

    def __init__(self, *, max_messages: int, max_bytes: int, **shell: Any) -> None:
        self.map = RetainedMap(max_messages, max_bytes)
        super().__init__(FORM, self.map, max_bytes=max_bytes, **shell)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {**super().samples(), "retained_messages": len(self.map), "retained_cleared": self.map.removed}

    def _outcome(self, newest: Entry) -> retained_pb2.RetainedOutcome:
        return retained_pb2.RetainedOutcome(version=newest.version, snowflake=newest.snowflake)

    def _full(self, entry: Entry) -> str:
        return FULL

    async def List(
        self, request: retained_pb2.RetainedListRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> retained_pb2.RetainedList:
        """A slice, see the proto."""
        partitions = request.partitions or 1
        if len(request.filters) > MAX_FILTERS or not is_partition_count(partitions):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_FILTERS} filters, and a number of partitions")
        filters = [name.encode() for name in request.filters]
        found = self.map.listing(filters, request.after.encode(), request.limit, now_ms(), request.partition, partitions)
        if request.totals:
            size = sum(len(entry.record) for entry in found.entries)
            return retained_pb2.RetainedList(next=found.next.decode(), messages=len(found.entries), bytes=size)
        return retained_pb2.RetainedList(entries=[wire_of(entry) for entry in found.entries], next=found.next.decode())
