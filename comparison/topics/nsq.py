"""NSQ's protocol: MPUB, and a subscription that finishes every message.

Source: docs/performance.md, "Durable topics beside others"; NSQ's TCP protocol.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

from comparison.cases import Case
from comparison.load import CONNECT_LIMIT_S, HOST, exactly

READY: Final = 2500
CHUNK: Final = 1 << 18
QUIET_S: Final = 1.0
"""Time without a message after which there are no more."""
ID_FROM, ID_BYTES = 18, 16
RESPONSE, MESSAGE = 0, 2
HEARTBEAT: Final = b"_heartbeat_"


class Nsq:
    """A client of one nsqd: one connection."""

    can_begin_anew = False

    def __init__(self, port: int, case: Case, topics: Sequence[str]) -> None:
        self._case, self._topics = case, [topic.encode() for topic in topics]
        self._port, self._rest, self._subscribed = port, b"", False
        self._packets: dict[int, bytes] = {}
        self._sock = self._connect()

    def _connect(self) -> socket.socket:
        sock = socket.create_connection((HOST, self._port), timeout=CONNECT_LIMIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(b"  V2")
        return sock

    async def open(self) -> None:
        """Nothing is to be made: topics come with their first message."""

    async def write(self, messages: int, block: int) -> None:
        """Write to every topic by MPUB, one for each block, and wait for all answers."""
        unanswered = 0
        while messages:
            part = min(messages, max(block // self._case.bytes, 1))
            messages -= part
            data = self._packets.get(part)
            if data is None:
                body = struct.pack(">I", self._case.bytes) + bytes(self._case.bytes)
                packed = struct.pack(">I", part) + body * part
                data = self._packets[part] = struct.pack(">I", len(packed)) + packed
            for topic in self._topics:
                self._sock.sendall(b"MPUB %s\n" % topic + data)
                unanswered += 1
        while unanswered:
            unanswered -= self._answer()

    def _answer(self) -> int:
        (size,) = struct.unpack(">I", exactly(self._sock, 4))
        frame = exactly(self._sock, size)
        if frame[4:] == HEARTBEAT:
            self._sock.sendall(b"NOP\n")
            return 0
        if frame[4:] != b"OK":
            raise ConnectionError(f"NSQ refused: {frame[4:]!r}")
        return 1

    async def take(self) -> int:
        """Take and finish what one read brings."""
        if not self._subscribed:
            self._subscribed = True
            self._sock.sendall(b"SUB %s bench\n" % self._topics[0])
            while not self._answer():
                pass
            self._sock.sendall(b"RDY %d\n" % READY)
            self._sock.settimeout(QUIET_S)
        done: list[bytes] = []
        while not done:
            try:
                more = self._sock.recv(CHUNK)
            except TimeoutError:
                return 0
            if not more:
                raise ConnectionError("NSQ closed the connection")
            rest, at = self._rest + more, 0
            while len(rest) - at >= 8:
                size, kind = struct.unpack_from(">II", rest, at)
                if len(rest) - at - 4 < size:
                    break
                if kind == MESSAGE:
                    done.append(b"FIN " + rest[at + ID_FROM : at + ID_FROM + ID_BYTES] + b"\n")
                elif kind == RESPONSE:
                    self._sock.sendall(b"NOP\n")
                else:
                    raise ConnectionError(f"NSQ said {rest[at + 8 : at + 4 + size]!r}")
                at += 4 + size
            self._rest = rest[at:]
        self._sock.sendall(b"".join(done))
        return len(done)

    async def again(self) -> None:
        """Never called: a channel of NSQ gets a message once, as `can_begin_anew` says."""
        raise AssertionError("a channel of NSQ gives a message once")

    async def finish(self) -> None:
        """FIN has no answer."""

    async def close(self) -> None:
        """End the connection."""
        self._sock.close()
