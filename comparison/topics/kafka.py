"""Kafka's protocol: just enough to write batches, to fetch them, and to commit offsets. One node, one partition a topic.

Source: docs/performance.md, "Durable topics beside others"; Kafka's protocol guide.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from itertools import count
from typing import Final

from comparison.cases import Case
from comparison.load import CONNECT_LIMIT_S, HOST, exactly

PRODUCE, FETCH, OFFSET_COMMIT, FIND_COORDINATOR, CREATE_TOPICS = (0, 3), (1, 4), (8, 2), (10, 0), (19, 2)
"""Requests: (key, version)."""
HEAD: Final = struct.Struct(">qiibIhiqqqhii")
"""A batch up to its records."""
BATCH_OVERHEAD: Final = 12
CRC_AT: Final = 17
CRC_FROM: Final = CRC_AT + 4
POLYNOMIAL: Final = 0x82F63B78
FETCH_BYTES: Final = 1 << 20
GROUP: Final = "bench"
READY_LIMIT_S: Final = 30.0


def _crc_table() -> list[int]:
    found = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (POLYNOMIAL if number & 1 else 0)
        found.append(number)
    return found


TABLE: Final = _crc_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def varint(number: int) -> bytes:
    """Encode a number, zigzag."""
    rest, found = number << 1 if number >= 0 else (-number << 1) - 1, bytearray()
    while rest > 127:
        found.append(rest & 127 | 128)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def text(value: str) -> bytes:
    """Encode a string."""
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def batch(messages: int, size: int) -> bytes:
    """Encode a batch of messages with bodies of this size, without keys and times."""
    records = bytearray()
    for number in range(messages):
        record = b"\0\0" + varint(number) + varint(-1) + varint(size) + bytes(size) + varint(0)
        records += varint(len(record)) + record
    head = HEAD.pack(0, HEAD.size - BATCH_OVERHEAD + len(records), 0, 2, 0, 0, messages - 1, 0, 0, -1, -1, -1, messages)
    tail = head[CRC_FROM:] + records
    return head[:CRC_AT] + struct.pack(">I", crc32c(tail)) + tail


def messages_in(data: bytes) -> tuple[int, int]:
    """Return (messages in the complete batches of a fetch, offset after them)."""
    at = messages = after = 0
    while len(data) - at >= HEAD.size:
        base, length = struct.unpack_from(">qi", data, at)
        end = at + BATCH_OVERHEAD + length
        if end > len(data):
            break
        last, count_here = struct.unpack_from(">i", data, at + 23)[0], struct.unpack_from(">i", data, at + 57)[0]
        messages, after, at = messages + count_here, base + last + 1, end
    return messages, after


class Kafka:
    """A client of one node."""

    can_begin_anew = True

    def __init__(self, port: int, case: Case, topics: Sequence[str]) -> None:
        self._case, self._topics = case, topics
        self._sock = socket.create_connection((HOST, port), timeout=CONNECT_LIMIT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._numbers, self._offset, self._unanswered = count(1), 0, 0
        self._batches: dict[int, bytes] = {}

    async def open(self) -> None:
        """Make the topics, and a group if it commits."""
        made = b"".join(text(name) + struct.pack(">ihii", 1, 1, 0, 0) for name in self._topics)
        self._ask(CREATE_TOPICS, struct.pack(">i", len(self._topics)) + made + struct.pack(">ib", 30_000, 0))
        end = time.monotonic() + READY_LIMIT_S
        while self._case.act == "take" and struct.unpack_from(">h", self._ask(FIND_COORDINATOR, text(GROUP)))[0]:
            self._not_after(end)
        self._send_batch(self._topics, 1)
        while self._drain():
            self._not_after(end)
            self._send_batch(self._topics, 1)
        self._offset = 1 if len(self._topics) == 1 else 0

    async def write(self, messages: int, block: int) -> None:
        """Write to every topic, in batches, and wait for all answers. Raises ConnectionError for a refusal."""
        while messages:
            part = min(messages, max(block // self._case.bytes, 1))
            messages -= part
            self._send_batch(self._topics, part)
        if wrong := self._drain():
            raise ConnectionError(f"Kafka refused a batch with error {wrong}")

    def _send_batch(self, topics: Sequence[str], messages: int) -> None:
        data = self._batches.get(messages)
        if data is None:
            data = self._batches[messages] = batch(messages, self._case.bytes)
        for topic in topics:
            self._send(PRODUCE, struct.pack(">hhii", -1, 1, 30_000, 1) + text(topic) + struct.pack(">iii", 1, 0, len(data)) + data)
            self._unanswered += 1

    def _drain(self) -> int:
        wrong = 0
        while self._unanswered:
            answer = self._receive()
            self._unanswered -= 1
            (name,) = struct.unpack_from(">h", answer, 4)
            wrong = wrong or struct.unpack_from(">h", answer, 4 + 2 + name + 8)[0]
        return int(wrong)

    async def take(self) -> int:
        """Fetch once, and commit if the case acknowledges. Returns the number of messages."""
        topic = text(self._topics[0])
        request = (
            struct.pack(">iiiibi", -1, 500, 1, FETCH_BYTES, 0, 1) + topic + struct.pack(">iiqi", 1, 0, self._offset, FETCH_BYTES)
        )
        answer = self._ask(FETCH, request)
        at = 4 + 4 + len(topic) + 4 + 4
        (error,) = struct.unpack_from(">h", answer, at)
        if error:
            raise ConnectionError(f"Kafka refused a fetch with error {error}")
        at += 2 + 8 + 8
        aborted, at = struct.unpack_from(">i", answer, at)[0], at + 4
        at += max(aborted, 0) * 16
        messages, after = messages_in(answer[at + 4 :])
        if not messages:
            return 0
        self._offset = after
        if self._case.act == "take":
            said = text(GROUP) + struct.pack(">i", -1) + text("") + struct.pack(">qi", -1, 1) + topic
            answer = self._ask(OFFSET_COMMIT, said + struct.pack(">iiq", 1, 0, after) + text(""))
            (error,) = struct.unpack_from(">h", answer, len(answer) - 2)
            if error:
                raise ConnectionError(f"Kafka refused a commit with error {error}")
        return messages

    async def again(self) -> None:
        """Fetch from the beginning."""
        self._offset = 1

    async def finish(self) -> None:
        """Nothing waits."""

    async def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def _not_after(self, end: float) -> None:
        if time.monotonic() > end:
            raise ConnectionError("Kafka has no leader of the topic or no coordinator of the group")
        time.sleep(0.2)

    def _send(self, request: tuple[int, int], body: bytes) -> None:
        head = struct.pack(">hhi", *request, next(self._numbers)) + text("bench")
        self._sock.sendall(struct.pack(">i", len(head) + len(body)) + head + body)

    def _receive(self) -> bytes:
        return received(self._sock, struct.unpack(">i", exactly(self._sock, 4))[0])[4:]

    def _ask(self, request: tuple[int, int], body: bytes) -> bytes:
        self._send(request, body)
        return self._receive()


def received(sock: socket.socket, size: int) -> bytes:
    """Read so many bytes into one buffer. Raises ConnectionError when the server closes before."""
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        got = sock.recv_into(view[at:])
        if not got:
            raise ConnectionError("the server closed the connection")
        at += got
    return bytes(data)
