"""A closed-loop MQTT load generator: plain sockets, epoll, no parsing of what it counts.

`groups` topics with `members` subscribers each; publishers write prebuilt QoS 0 packets while fewer than `window`
messages are undelivered to the slowest subscriber, so that dropping never pays. All packets have one size, so a
subscriber's progress is its bytes; the sequence number in the last bytes of each packet is checked on a sample.
It works against any MQTT 3.1.1 server: `python -m benchmarks.mqtt_load --port 1883 --members 100`.
"""

from __future__ import annotations

import argparse
import json
import resource
import selectors
import socket
import ssl
import struct
import sys
import time
from dataclasses import dataclass, field

from comparison.load import exactly
from comparison.wires import packet, string

CHUNK = 1 << 18


def connect(address: tuple[str, int], client: str, tls: ssl.SSLContext | None = None) -> socket.socket:
    """A connected client. Raises ConnectionError when the server refuses."""
    sock = socket.create_connection(address, timeout=20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is not None:
        sock = tls.wrap_socket(sock, server_hostname=address[0])
    sock.sendall(packet(0x10, string("MQTT") + bytes([4, 2]) + struct.pack(">H", 600) + string(client)))
    if exactly(sock, 4) != b"\x20\x02\x00\x00":
        raise ConnectionError(f"{client} was refused")
    return sock


def subscribe(sock: socket.socket, topic: str) -> None:
    """Subscribe and wait for the grant. Raises ConnectionError when it is refused."""
    sock.sendall(packet(0x82, struct.pack(">H", 1) + string(topic) + b"\0"))
    if exactly(sock, 5)[4] > 2:
        raise ConnectionError(f"{topic} was refused")


@dataclass
class Group:
    """One topic with its subscribers."""

    topic: str
    head: bytes
    sockets: list[socket.socket] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    sent: int = 0
    publisher: socket.socket | None = None
    unsent: bytes = b""

    @property
    def slowest(self) -> int:
        """Bytes that the slowest subscriber has."""
        return min(self.received)


class Load:
    """Connections and the closed loop."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._addresses = [("127.0.0.1", port) for port in args.port]
        tls = ssl.create_default_context(cafile=args.ca) if args.ca else None
        if tls is not None and args.groups > 1:
            raise ValueError("--ca: one group only: a write by TLS that was not finished must be gone on with")
        self._window = args.window
        self._body = bytes(args.bytes - 8)
        self._buffer = bytearray(CHUNK)
        self._selector = selectors.DefaultSelector()
        self.groups: list[Group] = []
        for number in range(args.groups):
            topic = args.topic.format(number + 1)
            head = packet(0x30, string(topic) + bytes(args.bytes))[: -args.bytes]
            group = Group(topic, head)
            for member in range(args.members):
                sock = connect(self._addresses[member % len(self._addresses)], f"load-{number}-{member}", tls)
                subscribe(sock, topic)
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, (group, member))
                group.sockets.append(sock)
                group.received.append(0)
            self.groups.append(group)
        publishers = [connect(self._addresses[n % len(self._addresses)], f"load-pub-{n}", tls) for n in range(args.publishers)]
        for publisher in publishers:
            publisher.setblocking(False)
        for number, group in enumerate(self.groups):
            group.publisher = publishers[number % len(publishers)]

    def run(self, seconds: float) -> dict[str, float]:
        """Run for some seconds, then until all is delivered (at most 20 s more)."""
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        end = started + seconds
        while time.monotonic() < end:
            for group in self.groups:
                self._publish(group)
            self._receive(0.05)
        stopped = time.monotonic()
        deliveries = sum(n for group in self.groups for n in group.received) // self._packet_size(self.groups[0])
        while any(group.slowest < group.sent * self._packet_size(group) for group in self.groups):
            for group in self.groups:
                if group.unsent:
                    self._write(group)
            if not self._receive(1.0) and time.monotonic() > stopped + 20:
                break
        after = resource.getrusage(resource.RUSAGE_SELF)
        expected = sum(group.sent * len(group.sockets) for group in self.groups)
        got = sum(n // self._packet_size(group) for group in self.groups for n in group.received)
        return {
            "deliveries": deliveries,
            "published": sum(group.sent for group in self.groups),
            "seconds": stopped - started,
            "lost": expected - got,
            "load_cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        }

    def _packet_size(self, group: Group) -> int:
        return len(group.head) + len(self._body) + 8

    def _publish(self, group: Group) -> None:
        if group.unsent:
            self._write(group)
            return
        room = self._window - (group.sent - group.slowest // self._packet_size(group))
        if room > 0:
            group.unsent = b"".join(group.head + self._body + struct.pack(">Q", group.sent + n) for n in range(room))
            group.sent += room
            self._write(group)

    def _write(self, group: Group) -> None:
        assert group.publisher is not None
        try:
            group.unsent = group.unsent[group.publisher.send(group.unsent) :]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass

    def _receive(self, timeout: float) -> int:
        events = self._selector.select(timeout)
        for key, _ in events:
            group, member = key.data
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            try:
                self._read(sock, group, member)
                while isinstance(sock, ssl.SSLSocket) and sock.pending():
                    self._read(sock, group, member)
            except ssl.SSLWantReadError:
                pass
        return len(events)

    def _read(self, sock: socket.socket, group: Group, member: int) -> None:
        count = sock.recv_into(self._buffer)
        if not count:
            raise ConnectionError("the server closed a subscriber's connection")
        size = self._packet_size(group)
        group.received[member] += count
        whole = group.received[member] % size
        if not whole and count >= size and group.received[member] % (size * 64) == 0:
            number = struct.unpack(">Q", self._buffer[count - 8 : count])[0]
            if number + 1 != group.received[member] // size:
                raise ValueError(f"{group.topic}: message {number} came as number {group.received[member] // size - 1}")


def main() -> int:
    """Run one load and print one JSON object. Exit code 1 when messages were lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, action="append", required=True, help="may be given several times")
    parser.add_argument("--topic", default="room/{}", help="{} is the group's number")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--publishers", type=int, default=1)
    parser.add_argument("--window", type=int, default=32, help="undelivered messages in a group")
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--ca", default="", help="speak TLS, and trust this authority")
    args = parser.parse_args()
    result = Load(args).run(args.seconds)
    print(json.dumps(result))
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
