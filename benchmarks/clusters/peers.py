"""Redis and RabbitMQ for a writer of batches: just enough of their protocols over a plain socket.

Both are loaded as a Xiu is: a window of messages is sent in one write, and the next one when all of it is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from comparison import amqp, servers
from comparison.amqp import (
    ACK,
    BODY,
    CONFIRM,
    CONFIRM_OK,
    DECLARE,
    DECLARE_OK,
    DURABLE,
    HEADER,
    HEARTBEAT,
    METHOD,
    PERSISTENT,
    PUBLISH,
    frame,
    long,
    method_frame,
    short,
)

STREAM = b"bench"


class Client(Protocol):
    """A connection to a peer."""

    def prepare(self, bodies: list[bytes]) -> bytes:
        """Encode a window of messages."""

    async def store(self, prepared: bytes, count: int) -> None:
        """Send it and wait until all is acknowledged."""

    async def close(self) -> None:
        """End the connection."""


class Redis:
    """XADD to one stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Redis:
        """Open a connection."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def prepare(self, bodies: list[bytes]) -> bytes:
        """Encode one command for each message."""
        head = b"*5\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$1\r\n*\r\n$1\r\nd\r\n" % (len(STREAM), STREAM)
        return b"".join(b"%s$%d\r\n%s\r\n" % (head, len(body), body) for body in bodies)

    async def store(self, prepared: bytes, count: int) -> None:
        """Send, and count replies: each is `$LENGTH`, and the entry's ID."""
        self._writer.write(prepared)
        await self._writer.drain()
        lines = 0
        while lines < 2 * count:
            part = await self._reader.read(1 << 18)
            if not part or part.startswith(b"-") or b"\n-" in part:
                raise RuntimeError(f"redis refused: {part[:200]!r}")
            lines += part.count(b"\n")

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()


class RabbitMQ:
    """Persistent messages to one durable queue, with publisher confirms."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self._writer = reader, writer
        self._sent = self._confirmed = 0

    @classmethod
    async def connect(cls, port: int) -> RabbitMQ:
        """Open a connection with one channel in confirm mode, and declare the queue."""
        client = cls(*await asyncio.open_connection(sock=amqp.connect(port)))
        client.write_method(DECLARE, struct.pack(">H", 0) + short(STREAM.decode()) + bytes([DURABLE]) + long(b""))
        await client.expect(DECLARE_OK)
        client.write_method(CONFIRM, b"\0")
        await client.expect(CONFIRM_OK)
        return client

    async def _read(self) -> tuple[int, bytes]:
        kind, _, size = struct.unpack(">BHI", await self.reader.readexactly(7))
        return kind, (await self.reader.readexactly(size + 1))[:-1]

    def write_method(self, method: tuple[int, int], arguments: bytes) -> None:
        """Send a method on the channel."""
        self._writer.write(method_frame(1, method, arguments))

    async def expect(self, method: tuple[int, int]) -> None:
        """Read the next frame. Raises RuntimeError unless it is this method."""
        kind, payload = await self._read()
        if kind != METHOD or struct.unpack_from(">HH", payload) != method:
            raise RuntimeError(f"RabbitMQ said {payload[:200]!r} where {method} was due")

    def prepare(self, bodies: list[bytes]) -> bytes:
        """Encode three frames for each message: the method, its properties, its body."""
        publish = method_frame(1, PUBLISH, struct.pack(">H", 0) + short("") + short(STREAM.decode()) + b"\0")
        return b"".join(
            publish + frame(HEADER, 1, struct.pack(">HHQHB", 60, 0, len(body), 1 << 12, PERSISTENT)) + frame(BODY, 1, body)
            for body in bodies
        )

    async def store(self, prepared: bytes, count: int) -> None:
        """Send, and count confirms. Each names a tag, with `multiple` every tag up to it. They may come in any order."""
        self._writer.write(prepared)
        await self._writer.drain()
        self._sent += count
        single: set[int] = set()
        while self._confirmed < self._sent:
            kind, payload = await self._read()
            if kind == HEARTBEAT:
                continue
            if kind != METHOD or struct.unpack_from(">HH", payload) != ACK:
                raise RuntimeError(f"RabbitMQ did not confirm: {payload[:200]!r}")
            tag, multiple = struct.unpack_from(">QB", payload, 4)
            if multiple:
                self._confirmed = max(self._confirmed, tag)
            else:
                single.add(tag)
            while self._confirmed + 1 in single:
                self._confirmed += 1
                single.discard(self._confirmed)

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()


@contextlib.contextmanager
def redis(folder: Path, fsync: str) -> Iterator[tuple[int, int] | None]:
    """Run a Redis with an append-only file. Yields (port, session); None if it is not installed."""
    if not servers.PEERS["redis"].found:
        yield None
        return
    with servers.redis(folder, fsync) as served:
        yield served


@contextlib.contextmanager
def rabbitmq(folder: Path) -> Iterator[tuple[int, int] | None]:
    """Run a RabbitMQ without plugins. Yields (port, session); None if it is not installed."""
    if not servers.PEERS["rabbitmq"].found:
        yield None
        return
    with servers.rabbitmq(folder) as served:
        yield served
