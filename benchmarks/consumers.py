"""Who takes messages out of RabbitMQ, JetStream and Redis Streams and acknowledges each, and NATS as a writer of batches.

As `benchmarks.peers`: just enough of each protocol over a plain socket, and nothing that a client library would add.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers import STREAM, RabbitMQ, Redis
from comparison import servers
from comparison.amqp import ACK, BODY, CONSUME, CONSUME_OK, DELIVERED, FRAME_BYTES, METHOD, QOS, QOS_OK, short

PREFETCH = 2000
"""Messages that may be unacknowledged: two windows of the benchmark, so that a consumer is never what is waited for."""
GROUP, NAME = b"group", b"consumer"
JETSTREAM, SUBJECT, INBOX, DELIVERIES = "BENCH", "bench.mail", "confirms", "deliveries"


class Consumer(Protocol):
    """Takes and acknowledges messages until it is cancelled. Every body begins with the time at which it was sent."""

    late_s: list[float]
    """Seconds from sending to taking, of each message."""

    async def run(self) -> None:
        """Take, and acknowledge what was taken."""


def late_s(body: bytes, now: float) -> float:
    """How long a message was under way; both ends are in one process."""
    sent: float = struct.unpack_from("<d", body)[0]
    return now - sent


class RabbitMQConsumer:
    """One consumer of the queue; acknowledges up to the last message of each read."""

    def __init__(self, client: RabbitMQ) -> None:
        self._client = client
        self.late_s: list[float] = []

    async def run(self) -> None:
        client = self._client
        client.write_method(QOS, struct.pack(">IHB", 0, PREFETCH, 0))
        await client.expect(QOS_OK)
        client.write_method(
            CONSUME, struct.pack(">H", 0) + short(STREAM.decode()) + short(NAME.decode()) + b"\0" + struct.pack(">I", 0)
        )
        await client.expect(CONSUME_OK)
        buffer, tag = b"", 0
        while True:
            part = await client.reader.read(FRAME_BYTES)
            if not part:
                raise RuntimeError("RabbitMQ closed the consumer's connection")
            buffer, at, acknowledged = buffer + part, 0, tag
            now = time.perf_counter()
            while len(buffer) - at >= 7:
                kind, _, size = struct.unpack_from(">BHI", buffer, at)
                if len(buffer) - at < size + 8:
                    break
                payload = buffer[at + 7 : at + 7 + size]
                at += size + 8
                if kind == METHOD and struct.unpack_from(">HH", payload) == DELIVERED:
                    tag = struct.unpack_from(">Q", payload, 5 + payload[4])[0]
                elif kind == BODY:
                    self.late_s.append(late_s(payload, now))
                    acknowledged = tag
            buffer = buffer[at:]
            if acknowledged:
                client.write_method(ACK, struct.pack(">QB", acknowledged, 1))


class RedisConsumer:
    """One consumer of a group; acknowledges what each read gave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.late_s: list[float] = []

    @classmethod
    async def connect(cls, port: int) -> RedisConsumer:
        """A new connection; the group is made."""
        found = cls(*await asyncio.open_connection("127.0.0.1", port))
        found._say(b"XGROUP", b"CREATE", STREAM, GROUP, b"$", b"MKSTREAM")
        await found._answer()
        return found

    async def run(self) -> None:
        while True:
            self._say(b"XREADGROUP", b"GROUP", GROUP, NAME, b"COUNT", b"%d" % PREFETCH, b"BLOCK", b"1000", b"STREAMS", STREAM, b">")
            found = await self._answer()
            now = time.perf_counter()
            entries = found[0][1] if found else []
            self.late_s += [late_s(fields[1], now) for _, fields in entries]
            if entries:
                self._say(b"XACK", STREAM, GROUP, *(number for number, _ in entries))
                await self._answer()

    def _say(self, *words: bytes) -> None:
        self._writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))

    async def _answer(self) -> Any:
        line = (await self._reader.readuntil(b"\r\n"))[:-2]
        if line.startswith(b"-"):
            raise RuntimeError(f"redis refused: {line!r}")
        if line.startswith(b"$"):
            return (await self._reader.readexactly(int(line[1:]) + 2))[:-2] if line != b"$-1" else None
        if line.startswith(b"*"):
            return [await self._answer() for _ in range(int(line[1:]))] if line != b"*-1" else None
        return line[1:]


class Nats:
    """A connection to NATS: publishes to a JetStream stream with acknowledgements, or takes what a consumer of it pushes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._confirmed = 0
        self.late_s: list[float] = []

    @classmethod
    async def connect(cls, port: int, subject: str) -> Nats:
        """A connection that has subscribed to one subject."""
        found = cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 24))
        await found._reader.readuntil(b"\r\n")
        found._writer.write(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %s 1\r\n' % subject.encode())
        return found

    async def ask(self, api: str, request: object) -> None:
        """A request to the JetStream API, whose answer must not be an error."""
        data = json.dumps(request).encode()
        self._writer.write(b"PUB $JS.API.%s %s %d\r\n%s\r\n" % (api.encode(), INBOX.encode(), len(data), data))
        _, answer = await self._message()
        if "error" in json.loads(answer):
            raise RuntimeError(f"JetStream refused {api}: {answer!r}")

    def prepare(self, bodies: list[bytes]) -> bytes:
        """One publication a message, answered by the stream."""
        head = f"PUB {SUBJECT} {INBOX} ".encode()
        return b"".join(b"%s%d\r\n%s\r\n" % (head, len(body), body) for body in bodies)

    async def store(self, prepared: bytes, count: int) -> None:
        """Send them and wait until the stream has all."""
        self._writer.write(prepared)
        await self._writer.drain()
        for _ in range(count):
            _, answer = await self._message()
            if b'"error"' in answer:
                raise RuntimeError(f"JetStream refused: {answer!r}")

    async def run(self) -> None:
        """Take what is pushed, and acknowledge each message."""
        while True:
            reply, body = await self._message()
            self.late_s.append(late_s(body, time.perf_counter()))
            self._writer.write(b"PUB %s 4\r\n+ACK\r\n" % reply)

    async def close(self) -> None:
        """End the connection."""
        self._writer.close()

    async def _message(self) -> tuple[bytes, bytes]:
        """(where to answer, body) of the next one."""
        while True:
            line = (await self._reader.readuntil(b"\r\n"))[:-2]
            if line == b"PING":
                self._writer.write(b"PONG\r\n")
            elif line.startswith(b"MSG "):
                words = line.split(b" ")
                body = (await self._reader.readexactly(int(words[-1]) + 2))[:-2]
                return (words[3] if len(words) == 5 else b""), body
            elif line.startswith(b"-ERR"):
                raise RuntimeError(f"NATS refused: {line!r}")


@contextlib.contextmanager
def nats(folder: Path) -> Iterator[tuple[int, int] | None]:
    """(port, session) of a NATS server with JetStream on files; None where it is not installed."""
    if not servers.PEERS["jetstream"].found:
        yield None
        return
    with servers.jetstream(folder) as served:
        yield served


async def connect_rabbitmq(port: int) -> tuple[RabbitMQ, Consumer]:
    """A writer and a consumer of one durable queue."""
    return await RabbitMQ.connect(port), RabbitMQConsumer(await RabbitMQ.connect(port))


async def connect_redis(port: int) -> tuple[Redis, Consumer]:
    """A writer and a consumer of one stream."""
    consumer = await RedisConsumer.connect(port)
    return await Redis.connect(port), consumer


async def connect_nats(port: int) -> tuple[Nats, Consumer]:
    """A writer and a consumer of one stream that is kept on files."""
    writer = await Nats.connect(port, INBOX)
    await writer.ask(
        f"STREAM.CREATE.{JETSTREAM}", {"name": JETSTREAM, "subjects": [SUBJECT], "storage": "file", "retention": "limits"}
    )
    consumer = await Nats.connect(port, DELIVERIES)
    wanted = {
        "durable_name": "c", "deliver_subject": DELIVERIES, "ack_policy": "explicit", "deliver_policy": "all",
        "max_ack_pending": PREFETCH,
    }  # fmt: skip
    await writer.ask(f"CONSUMER.DURABLE.CREATE.{JETSTREAM}.c", {"stream_name": JETSTREAM, "config": wanted})
    return writer, consumer
