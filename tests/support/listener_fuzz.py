"""Peers without a login at every listener of a cluster that is guarded: what they say is random, damaged, too long, or unfinished.

Listeners: `mqtt`, `gateway` and `proxy` (clients' gRPC), `cluster` (gRPC of a broker), `links` (its datagrams), `http`. An attack
opens connections, says one thing on each, reads a little, and goes; what comes of it is counted by kind.
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
READ_S: Final = 0.3
"""So long an attack waits for a word."""
AT_ONCE: Final = 8
FROM: Final = "127.0.0.2"
"""The address that attacks come from: an address whose logins fail is not let in for a while, and honest clients have another."""
REFUSED: Final = "refused or closed"
METHODS: Final = (
    "/pixiu.v1.Publisher/Publish", "/pixiu.v1.Publisher/Cluster", "/pixiu.v1.Mailer/Send", "/pixiu.v1.Presence/Query",
    "/pixiu.v1.Subscriber/Subscribe", "/pixiu.v1.Replication/Promote", "/grpc.health.v1.Health/Check",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/x/y",
)  # fmt: skip


@dataclass
class Target:
    """Where it is, and whose process it is."""

    name: str
    host: str
    port: int
    pid: int
    speaks: str
    """tls, plain or udp."""
    said: Counter[str] = field(default_factory=Counter)
    """Kind of attack → how many there were."""
    rss_kb: list[int] = field(default_factory=list)
    """At the beginning, then once a second."""
    sent_bytes: int = 0
    """Before TLS. Of datagrams: that were sent, not that arrived."""

    def measure(self) -> None:
        """Note how much memory the process has."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        self.rss_kb.append(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")))

    def told(self) -> str:
        """A line of figures."""
        rss = [kb / 1024 for kb in self.rss_kb]
        shares = [rss[min(part * len(rss) // 4, len(rss) - 1)] for part in range(5)]
        tried = sum(count for kind, count in self.said.items() if kind != REFUSED)
        return (
            f"{self.name:<8} {tried} tried, {self.sent_bytes / 1048576:.1f} MiB | RSS at each quarter "
            f"{', '.join(f'{mib:.0f}' for mib in shares)} MiB, most {max(rss):.0f} | {dict(sorted(self.said.items()))}"
        )


class Attack:
    """Everything that peers without a login do to one listener.

    Args:
        certificate: of another authority, with its key, which is shown now and then.
    """

    def __init__(self, listener: Target, seed: int, certificate: Path | None = None) -> None:
        self._listener, self._random, self._certificate = listener, random.Random(seed), certificate

    async def run(self, seconds: float, at_least: int = 0) -> None:
        """Attack for so long, and so often however long that takes."""
        end = time.monotonic() + seconds
        self._listener.measure()
        await asyncio.gather(*(self._until(end, at_least) for _ in range(AT_ONCE)), self._measure(end))

    async def _measure(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(1)
            self._listener.measure()

    async def _until(self, end: float, at_least: int) -> None:
        kinds = self._kinds()
        while time.monotonic() < end or self._listener.said.total() < at_least:
            kind, act = self._random.choice(kinds)
            self._listener.said[kind] += 1
            try:
                async with asyncio.timeout(5):
                    await act()
            except (OSError, EOFError, TimeoutError, ssl.SSLError):
                self._listener.said[REFUSED] += 1

    def _kinds(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        if self._listener.speaks == "udp":
            return [("datagrams", self._datagrams)]
        make = {"mqtt": self._mqtt, "http": self._http}.get(self._listener.name, self._http2)
        if self._listener.speaks == "plain":
            return [("random bytes", self._raw), ("requests", lambda: self._talk(make(), tls=False))]
        return [
            ("random bytes", self._raw),
            ("half a handshake", self._half),
            ("packets by TLS", lambda: self._talk(make(), tls=True)),
            ("packets by TLS, byte by byte", lambda: self._talk(make(), tls=True, pieces=True)),
            ("a stranger's certificate", lambda: self._talk(make(), tls=True, own=True)),
        ]

    # --- connections

    async def _raw(self) -> None:
        await self._talk(self._bytes(4000), tls=False)

    async def _half(self) -> None:
        """A part of a good hello, or a damaged one."""
        to_server = ssl.MemoryBIO()
        hello = self._context().wrap_bio(ssl.MemoryBIO(), to_server, server_hostname="localhost")
        try:
            hello.do_handshake()
        except ssl.SSLWantReadError:
            pass
        await self._talk(self._damaged(to_server.read()), tls=False)

    async def _talk(self, data: bytes, *, tls: bool, pieces: bool = False, own: bool = False) -> None:
        context = self._context(own=own) if tls else None
        reader, writer = await asyncio.open_connection(self._listener.host, self._listener.port, ssl=context, local_addr=(FROM, 0))
        try:
            step = self._random.randint(1, 40) if pieces else len(data) or 1
            for at in range(0, min(len(data), 40 * step), step):
                if reader.at_eof() or writer.transport.is_closing():
                    return
                writer.write(data[at : at + step])
                self._listener.sent_bytes += min(step, len(data) - at)
                await writer.drain()
            if self._random.random() < 0.5:
                async with asyncio.timeout(READ_S):
                    while await reader.read(65_536):
                        pass
        finally:
            writer.transport.abort()

    def _context(self, *, own: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self._listener.name != "mqtt":
            context.set_alpn_protocols(["h2"])
        if own and self._certificate is not None:
            context.load_cert_chain(self._certificate)
        return context

    async def _datagrams(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.bind((FROM, 0))
            for _ in range(50):
                head = struct.pack(
                    ">2sBBH", b"PX", self._random.choice((1, 2, 9)), self._random.randrange(8), self._random.randrange(65_536)
                )
                data = self._random.choice((head, b"")) + self._bytes(self._random.choice((20, 80, 1400, 9000)))
                sock.sendto(data, (self._listener.host, self._listener.port))
                self._listener.sent_bytes += len(data)
        await asyncio.sleep(0.01)

    # --- what is said

    def _bytes(self, most: int) -> bytes:
        return self._random.randbytes(self._random.randint(0, most))

    def _damaged(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.randint(0, 4)):
            if changed:
                changed[self._random.randrange(len(changed))] = self._random.randrange(256)
        return bytes(changed[: self._random.randint(0, len(changed))] if self._random.random() < 0.3 else changed)

    def _mqtt(self) -> bytes:
        """Packets of MQTT, the first a CONNECT more often than not; lengths lie now and then."""
        packets = []
        for number in range(self._random.randint(1, 12)):
            if number == 0 and self._random.random() < 0.7:
                user, password = self._text(), self._bytes(self._random.choice((0, 20, 9000)))
                flags = self._random.choice((0xC2, 0x02, 0x82, 0xFF, 0xC0))
                body = b"\x00\x04MQTT" + bytes((self._random.choice((4, 4, 4, 5, 3, 255)), flags)) + b"\x00\x3c"
                body += b"".join(len(part).to_bytes(2, "big") + part for part in (self._text(), user, password))
                packets.append(b"\x10" + self._length(len(body)) + body)
            else:
                body = self._bytes(200)
                packets.append(bytes((self._random.randrange(256),)) + self._length(len(body)) + body)
        return self._damaged(b"".join(packets))

    def _length(self, size: int) -> bytes:
        if self._random.random() < 0.1:
            return self._random.choice((b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff\xff", b"\x80\x80\x80\x01"))
        found = bytearray()
        while True:
            size, digit = divmod(size, 128)
            found.append(digit | (0x80 if size else 0))
            if not size:
                return bytes(found)

    def _text(self) -> bytes:
        return self._random.choice((b"demo", b"7", b"room/#", b"\x00", b"\xff\xfe", b"a" * 3000, b""))

    def _http2(self) -> bytes:
        """Frames of HTTP/2: settings, then calls of methods with random messages, and frames that are none."""
        frames = [self._frame(4, 0, 0, b"")]
        for stream in range(1, 2 * self._random.randint(1, 12), 2):
            path = self._random.choice(METHODS).encode()
            fields = [(b":method", b"POST"), (b":scheme", b"https"), (b":path", path), (b":authority", b"x"), (b"te", b"trailers")]
            fields.append((b"content-type", b"application/grpc"))
            if self._random.random() < 0.5:
                fields.append((b"authorization", b"Bearer " + self._text().replace(b"\x00", b"e") * self._random.choice((1, 20))))
            block = b"".join(b"\x00" + self._string(name) + self._string(value) for name, value in fields)
            frames.append(self._frame(1, 4, stream, block))
            message = self._bytes(300)
            lie = len(message) if self._random.random() < 0.8 else self._random.choice((0xFFFFFFFF, 1 << 24))
            frames.append(self._frame(0, self._random.choice((0, 1)), stream, b"\x00" + lie.to_bytes(4, "big") + message))
            if self._random.random() < 0.3:
                frames.append(self._frame(self._random.randrange(12), self._random.randrange(256), stream, self._bytes(100)))
        return PREFACE + (b"".join(frames) if self._random.random() < 0.6 else self._damaged(b"".join(frames)))

    def _frame(self, kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body

    def _string(self, text: bytes) -> bytes:
        if len(text) < 127:
            return bytes((len(text),)) + text
        rest, found = len(text) - 127, bytearray((127,))
        while rest >= 128:
            rest, digit = divmod(rest, 128)
            found.append(digit | 128)
        return bytes((*found, rest)) + text

    def _http(self) -> bytes:
        """Requests of HTTP/1, good and damaged."""
        path = self._random.choice((b"/metrics", b"/health", b"/hot", b"/../../etc/passwd", b"/" + b"a" * 9000, b"*", b"/%00"))
        method = self._random.choice((b"GET", b"POST", b"HEAD", b"PUT", b"\x16\x03\x01"))
        heads = [b"Host: x", b"Content-Length: 99999999999", b"Transfer-Encoding: chunked", b"Expect: 100-continue"]
        heads.append(b"X: " + b"y" * 20_000)
        chosen = self._random.sample(heads, self._random.randint(0, 4))
        return self._damaged(method + b" " + path + b" HTTP/1.1\r\n" + b"\r\n".join(chosen) + b"\r\n\r\n" + self._bytes(300))
