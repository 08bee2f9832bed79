"""Callers of topic replicas by raw gRPC: what admin, writers, members and readers send, and who leads."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from cluster.topics import entries as en
from cluster.wire.v1 import topic_group_pb2 as group_pb
from cluster.wire.v1 import topic_group_pb2_grpc as group_grpc
from pixiu.discovery.node import Node
from pixiu.wire.block import Block, Flag, Message, encode, parse_stored, stored_size
from pixiu.wire.v1 import topic_pb2 as pb
from pixiu.wire.v1 import topic_pb2_grpc as pb_grpc
from tests.support.roles import Roles
from tests.support.waiting import until

WAIT_S = 60.0
TOPIC, CHANNEL = 7, 3
ORDERS = "orders"
OWN_CHANNELS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 16 << 20)]


class Stream:
    """A stream of requests and replies. Usable by `async with`."""

    def __init__(self, node: Node, method: str, token: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(node.client_address, options=OWN_CHANNELS)
        self._requests: asyncio.Queue[Any] = asyncio.Queue()
        login = (("authorization", f"Bearer {token}"),) if token else ()
        self._call: Any = getattr(pb_grpc.TopicLogStub(self._channel), method)(self._send(), metadata=login)
        self.replies = self._replies()

    async def _send(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _replies(self) -> AsyncIterator[Any]:
        async for reply in self._call:
            yield reply

    def send(self, request: object) -> None:
        """Send a request."""
        self._requests.put_nowait(request)

    async def next(self) -> Any:
        """The next reply."""
        async with asyncio.timeout(WAIT_S):
            return await anext(self.replies)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._requests.put_nowait(None)
        self._call.cancel()
        await self._channel.close()


class Writer:
    """One writer of one part, by one stream."""

    def __init__(self, node: Node, writer: int = 5, part: int = 1, topic: int = TOPIC, token: str = "") -> None:
        self.stream = Stream(node, "Write", token)
        self._writer, self._part, self._topic = writer, part, topic
        self._requests = itertools.count(1)
        self.stream.send(pb.TopicWriteRequest(client="test"))

    async def __aenter__(self) -> Self:
        await self.stream.__aenter__()
        self.hello = await self.stream.next()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stream.__aexit__(*error)

    def send(self, bodies: Sequence[bytes], first: int, slot: int = 0, level: int = 0, key: bytes | None = None) -> None:
        """Send a block."""
        messages = [Message(body, slot, key) for body in bodies]
        block = encode(messages, topic=self._topic, part=self._part, writer=self._writer, first=first)
        request = pb.TopicWriteRequest(request=next(self._requests), block=block)
        request.level = level  # type: ignore[assignment]
        self.stream.send(request)

    async def result(self) -> pb.TopicWriteResult:
        """The result of the only block under way."""
        (result,) = (await self.stream.next()).results
        return result  # type: ignore[no-any-return]

    async def write(
        self, bodies: Sequence[bytes], first: int, slot: int = 0, level: int = 0, key: bytes | None = None
    ) -> pb.TopicWriteResult:
        """Send a block and wait for its result."""
        self.send(bodies, first, slot, level, key)
        return await self.result()


class Member:
    """One member of a channel."""

    def __init__(
        self, node: Node, credit: int = 100, topic: str = ORDERS, channel: str = "c", token: str = "", **hello: Any
    ) -> None:  # fmt: skip
        self.stream = Stream(node, "Consume", token)
        self._requests = itertools.count(1)
        self._came: dict[int, tuple[bytes, int]] = {}
        wanted = pb.ConsumeHello(topic=topic, channel=channel, member="test", credit=credit, **hello)
        self.stream.send(pb.ConsumeRequest(hello=wanted))

    async def __aenter__(self) -> Self:
        await self.stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.stream.__aexit__(*error)

    async def _next(self) -> pb.ConsumeReply:
        reply = await self.stream.next()
        assert isinstance(reply, pb.ConsumeReply)
        assert not reply.end.code, reply.end
        for delivery in reply.deliveries:
            self._came |= messages_of(delivery)
        return reply

    async def get(self, count: int) -> dict[int, tuple[bytes, int]]:
        """So many messages: offset → body and attempts."""
        while len(self._came) < count:
            await self._next()
        found, self._came = self._came, {}
        return found

    async def report(self, part: int, acknowledged: Sequence[int] = (), refused: Sequence[int] = ()) -> pb.ReportResult:
        """Report and wait for the result."""
        report = pb.MessageReport(request=next(self._requests), part=part, acknowledged=acknowledged, refused=refused)
        self.stream.send(pb.ConsumeRequest(reports=[report]))
        while not (results := (await self._next()).results):
            pass
        return results[0]


def messages_of(delivery: pb.Delivery) -> dict[int, tuple[bytes, int]]:
    """The messages of a delivery: offset → bytes and attempts."""
    found, begin = {}, 0
    for number in range(len(delivery.index) // 8):
        end = int.from_bytes(delivery.index[8 * number : 8 * number + 4], "little")
        attempts = delivery.attempts[number] if delivery.attempts else 1
        found[delivery.base + number] = delivery.data[begin:end], attempts
        begin = end
    assert begin == len(delivery.data)
    return found


def blocks_in(data: bytes) -> list[tuple[int, Block]]:
    """(offset, block) of stored blocks end to end."""
    found, at = [], 0
    while at < len(data):
        size = stored_size(data[at : at + 32])
        stamp, block = parse_stored(data[at : at + size])
        found.append((stamp.base, block))
        at += size
    return found


async def append(node: Node, kind: int, payload: bytes) -> group_pb.GroupAnswer:
    """Append an entry as the admin does."""
    async with grpc.aio.insecure_channel(node.address, options=OWN_CHANNELS) as channel:
        stub: Any = group_grpc.TopicGroupsStub(channel)
        answer = await stub.Append(group_pb.GroupEntry(kind=kind, payload=payload), timeout=WAIT_S)
        assert isinstance(answer, group_pb.GroupAnswer)
        return answer


async def call(node: Node, method: str, request: object) -> Any:
    """One call at the clients' port."""
    async with grpc.aio.insecure_channel(node.client_address, options=OWN_CHANNELS) as channel:
        return await getattr(pb_grpc.TopicLogStub(channel), method)(request, timeout=WAIT_S)


async def read_all(node: Node, part: int = 1, start: int = 0) -> dict[int, bytes]:
    """Everything in a part from an offset on: offset → body."""
    found: dict[int, bytes] = {}
    while True:
        reply = await call(node, "Read", pb.TopicReadRequest(topic=ORDERS, part=part, offset=start))
        for base, block in blocks_in(reply.blocks):
            if not block.flags & Flag.HOLE:
                found |= {base + number: block.message(number).body for number in range(block.count)}
        assert not reply.gap_high, reply
        if reply.next >= reply.committed_end:
            return found
        start = reply.next


async def make_topic(
    node: Node, parts: Sequence[int] = (1,), ordered: bool = False, retention_bytes: int = 0, compact: int = 0,
    **channel: Any,
) -> None:  # fmt: skip
    """A topic with parts of equal ranges, and a channel `c`."""
    wanted = en.TopicSettings(TOPIC, ORDERS, retention_bytes=retention_bytes, compact=compact)
    await until(lambda: _done(node, en.TOPIC, wanted.encode()), "a topic")
    step = 65_536 // len(parts)
    for place, part in enumerate(parts):
        high = 65_536 if place == len(parts) - 1 else (place + 1) * step
        assert (await append(node, en.OPEN, en.Opening(en.part_id(TOPIC, part), place * step, high).encode())).ok
    settings = en.ChannelSettings(CHANNEL, TOPIC, "c", ordered)._replace(**channel)
    assert (await append(node, en.CHANNEL, settings.encode())).ok


async def _done(node: Node, kind: int, payload: bytes) -> bool:
    answer = await append(node, kind, payload)
    assert answer.ok or answer.refusal.code, answer
    return answer.ok


async def status(roles: Roles, name: str) -> dict[str, Any]:
    """What a replica says of its replication."""
    node = await roles.node(name)
    if node is None:
        return {}
    reader, writer = await asyncio.open_connection(node.host, node.http_port)
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    data = await reader.read()
    writer.close()
    found: dict[str, Any] = json.loads(data.partition(b"\r\n\r\n")[2])["service"]["replication"]
    return found


async def leader(roles: Roles, *names: str) -> str:
    """Name of the leading one, once one of them leads."""
    found: list[str] = []

    async def leads() -> bool:
        found.extend([name for name in names if (await status(roles, name)).get("state") == "Leading"])
        return bool(found)

    await until(leads, "a leader")
    return found[0]


async def in_sync(roles: Roles, count: int, *names: str) -> str:
    """Name of the leader, once so many are in sync."""
    found = ""

    async def enough() -> bool:
        nonlocal found
        found = await leader(roles, *names)
        return len((await status(roles, found)).get("in_sync", ())) >= count

    await until(enough, f"{count} in sync")
    return found
