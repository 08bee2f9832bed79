"""A member with a bound of bytes reads no more while it has more, and reads on for the answers to its reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pixiu.client.options import ClientOptions
from pixiu.client.topics.reading.member import ChannelMember, Joining, MemberCall
from pixiu.wire.block import INDEX
from pixiu.wire.v1 import topic_pb2
from tests.pixiu.client.topics.groups import Cluster

BYTES = 1_000


class Directory:
    """Knows one topic."""

    async def follow(self, *_: object) -> Any:
        return Cluster(1, 1).topic()

    def leave(self, *_: object) -> None:
        pass

    def refresh(self, *_: object, **__: object) -> None:
        pass


class Offline(ChannelMember):
    """Its streams connect to nobody."""

    async def _run(self, stream: MemberCall, address: str) -> None:
        await asyncio.Event().wait()


def delivery(base: int, count: int, size: int) -> topic_pb2.ConsumeReply:
    """Messages of this size."""
    index = b"".join(INDEX.pack(size * (at + 1), 0, 0, 0) for at in range(count))
    found = topic_pb2.Delivery(part=1, base=base, index=index, data=b"x" * size * count)
    return topic_pb2.ConsumeReply(deliveries=[found])


@pytest.mark.parametrize("bound", [0, BYTES])
async def test_nothing_more_is_read_above_the_bound_until_something_is_reported(bound: int) -> None:
    async def ready() -> int:
        return 0

    context: Any = SimpleNamespace(directory=Directory(), options=ClientOptions(), uniform=lambda: 0.5, users=set(), client="me")
    member = Offline(context, Joining("orders", "c", 100, credit_bytes=bound), ready)
    await member.open()
    try:
        (stream,) = member._streams.values()
        assert member._take(stream, delivery(0, 2, 400)) is None
        wait = member._take(stream, delivery(2, 2, 400))
        assert member.held_bytes == 1_600
        if not bound:
            assert wait is None
            return
        assert wait is not None
        waiting = asyncio.ensure_future(wait)
        found = await member.next_batch(10)
        await asyncio.sleep(0)
        assert not waiting.done()
        found[0].ack_soon()
        found[1].ack_soon()
        assert member.held_bytes == 800
        await waiting
        again = member._take(stream, delivery(4, 2, 400))
        assert again is not None
        await again  # ends although nothing was reported since: the answers to the reports are to be read
    finally:
        await member.close()
