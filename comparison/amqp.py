"""Just enough of AMQP 0-9-1 to load RabbitMQ: frames, methods, and a connection with one channel.

Source: AMQP 0-9-1; docs/performance.md, "Beside others".
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from comparison.load import CONNECT_LIMIT_S, HOST, exactly

METHOD, HEADER, BODY, HEARTBEAT, FRAME_END = 1, 2, 3, 8, b"\xce"
START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK = (10, 10), (10, 11), (10, 30), (10, 31), (10, 40), (10, 41)
CHANNEL_OPEN, CHANNEL_OPEN_OK, DECLARE, DECLARE_OK = (20, 10), (20, 11), (50, 10), (50, 11)
CONFIRM, CONFIRM_OK, QOS, QOS_OK, CONSUME, CONSUME_OK = (85, 10), (85, 11), (60, 10), (60, 11), (60, 20), (60, 21)
PUBLISH, DELIVERED, ACK = (60, 40), (60, 60), (60, 80)
FRAME: Final = struct.Struct(">BHI")
NAME: Final = struct.Struct(">HH")
TAG: Final = struct.Struct(">QB")
FRAME_BYTES: Final = 131_072
PERSISTENT: Final = 2
DURABLE: Final = 2


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """Encode a frame of a kind on a channel."""
    return FRAME.pack(kind, channel, len(payload)) + payload + FRAME_END


def method_frame(channel: int, method: tuple[int, int], arguments: bytes = b"") -> bytes:
    """Encode a frame of a method, with encoded arguments."""
    return frame(METHOD, channel, NAME.pack(*method) + arguments)


def short(text: str) -> bytes:
    """Encode a short string."""
    data = text.encode()
    return bytes([len(data)]) + data


def long(data: bytes) -> bytes:
    """Encode a long string, or a table."""
    return struct.pack(">I", len(data)) + data


def expect(sock: socket.socket, method: tuple[int, int]) -> None:
    """Read the next frame. Raises ConnectionError unless it is this method."""
    kind, _, size = FRAME.unpack(exactly(sock, FRAME.size))
    payload = exactly(sock, size + 1)
    if kind != METHOD or NAME.unpack_from(payload) != method:
        raise ConnectionError(f"RabbitMQ said {payload[:200]!r} where {method} was due")


def connect(port: int) -> socket.socket:
    """Open a connection with one channel."""
    sock = socket.create_connection((HOST, port), timeout=CONNECT_LIMIT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    login = struct.pack(">I", 0) + short("PLAIN") + long(b"\0guest\0guest") + short("en_US")
    for said, due in (
        (b"AMQP\x00\x00\x09\x01", START),
        (method_frame(0, START_OK, login), TUNE),
        (
            method_frame(0, TUNE_OK, struct.pack(">HIH", 1, FRAME_BYTES, 0))
            + method_frame(0, OPEN, short("/") + short("") + b"\0"),
            OPEN_OK,
        ),
        (method_frame(1, CHANNEL_OPEN, short("")), CHANNEL_OPEN_OK),
    ):
        sock.sendall(said)
        expect(sock, due)
    return sock
