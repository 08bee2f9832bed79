"""The load of messages and connections: a process of its own, one thread, plain sockets and epoll.

It connects and warms up, prints `{}`, waits for a line, works, prints the results as one JSON object, and waits for a line before
it ends, so that its parent can look at the servers before and after. Its work for a message does not depend on the server, except
for the bytes of the protocol.

    python -m comparison.load CASE PORT WIRE TOPIC SECONDS

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

import json
import resource
import select
import socket
import sys
import time
from array import array
from dataclasses import dataclass, field
from typing import Final

from comparison.accounts import NUMBER, Stream
from comparison.cases import CASES, Case
from comparison.wires import WIRES, Wire, packet_id
from tools.load.histogram import Histogram
from tools.load.pace import Pace

HOST: Final = "127.0.0.1"
CHUNK: Final = 1 << 16
WARM_S: Final = 0.5
CONNECT_LIMIT_S: Final = 30.0
AT_ONCE: Final = 100
"""Connections that are opened before their answers are read."""
STALL_S: Final = 2.0
"""Time without any arrival after which missing messages count as lost, and the loop goes on."""
MAX_WAIT_S: Final = 0.05


def exactly(sock: socket.socket, count: int) -> bytes:
    """Read `count` bytes. Raises ConnectionError when the server closes before."""
    data = b""
    while len(data) < count:
        more = sock.recv(count - len(data))
        if not more:
            raise ConnectionError("the server closed the connection")
        data += more
    return data


def come(port: int, wire: Wire, clients: list[tuple[str, str]], qos: int = 0, *, clean: bool = True) -> list[socket.socket]:
    """Connect clients of (name, topic), which subscribe if there is a topic, a hundred at a time."""
    found: list[socket.socket] = []
    for first in range(0, len(clients), AT_ONCE):
        part = []
        for name, topic in clients[first : first + AT_ONCE]:
            sock = socket.create_connection((HOST, port), timeout=CONNECT_LIMIT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            hello, welcome = wire.connect(name, clean=clean)
            sock.sendall(hello)
            part.append((sock, name, topic, welcome))
        for sock, name, topic, welcome in part:
            if exactly(sock, len(welcome)) != welcome:
                raise ConnectionError(f"{name} was refused")
            if topic:
                sock.sendall(wire.subscribe(topic, qos)[0])
        for sock, _, topic, _ in part:
            if topic:
                granted = wire.subscribe(topic, qos)[1]
                if exactly(sock, len(granted)) != granted:
                    raise ConnectionError(f"the subscription to {topic} was refused, or granted with another QoS than {qos}")
            found.append(sock)
    return found


@dataclass
class Group:
    """One topic: its stream, and its publisher."""

    stream: Stream
    head: bytes
    tail: bytes
    publisher: socket.socket
    unsent: bytes = b""
    sent_at: array[float] = field(default_factory=lambda: array("d"))
    first: int = 0
    """Number of the message that `sent_at` begins with."""
    given_up: int = 0
    """Numbers below this are not waited for."""


class Messages:
    """Connections, and the loop: closed if a case has a window, open if it has a rate."""

    def __init__(self, case: Case, port: int, wire: Wire, topic: str) -> None:
        self._case, self._wire = case, wire
        self._poll = select.epoll()
        self._subscribers: dict[int, tuple[socket.socket, Group, int]] = {}
        self._publishers = {sock.fileno(): sock for sock in come(port, wire, [(f"from-{n}", "") for n in range(case.publishers)])}
        self._confirmed = 0.0
        self._pace = Pace(case.rate, case.window)
        self._latency_us, self._late_us = Histogram(), Histogram()
        self._rest = bytes(case.bytes - NUMBER.size)
        self.groups: list[Group] = []
        publishers = list(self._publishers.values())
        for number in range(case.groups):
            name = topic.format(number + 1)
            stream = Stream(*wire.delivered(name, case.bytes), case.bytes, case.members)
            publisher = publishers[number % len(publishers)]
            group = Group(stream, *wire.published(name, case.bytes, case.qos), publisher)
            self.groups.append(group)
            members = [(f"to-{number}-{n}", name) for n in range(case.members)]
            for member, sock in enumerate(come(port, wire, members, case.subscribed_qos)):
                self._subscribers[sock.fileno()] = (sock, group, member)
        for sock in [*publishers, *(sock for sock, _, _ in self._subscribers.values())]:
            sock.setblocking(False)
            self._poll.register(sock.fileno(), select.EPOLLIN)

    def run(self, seconds: float) -> dict[str, float]:
        """Work for `seconds`, then until everything has arrived or nothing arrives any more."""
        for group in self.groups:
            group.stream.begin()
        self._latency_us, self._late_us = Histogram(), Histogram()
        first = sum(group.stream.sent for group in self.groups)
        used, began = cpu_used_s(), time.perf_counter()
        end, self._moved_at, self._due = began + seconds, began, 0
        while (now := time.perf_counter()) < end:
            if self._case.rate:
                self._publish_due(now, began)
                self._receive(max(min(began + self._pace.at_s(self._due), end) - time.perf_counter(), 0.0))
            else:
                self._publish_room(now)
                self._receive(MAX_WAIT_S)
        stopped = time.perf_counter()
        by_then = sum(account.received for group in self.groups for account in group.stream.accounts)
        while any(self._behind(group) for group in self.groups):
            for group in self.groups:
                self._write(group)
            self._receive(MAX_WAIT_S)
            if time.perf_counter() > self._moved_at + STALL_S:
                break
        wall, cpu = time.perf_counter() - began, cpu_used_s() - used
        accounts = [(account, group.stream.sent) for group in self.groups for account in group.stream.accounts]
        return {
            "published": sum(group.stream.sent for group in self.groups) - first,
            "deliveries": sum(account.received for account, _ in accounts),
            "per_second": by_then / (stopped - began),
            "p50_ms": self._latency_us.percentile(50) / 1000,
            "p99_ms": self._latency_us.percentile(99) / 1000,
            "late_p99_ms": self._late_us.percentile(99) / 1000,
            "lost": sum(account.lost(sent) for account, sent in accounts),
            "repeated": sum(account.repeated for account, _ in accounts),
            "disordered": sum(account.disordered for account, _ in accounts),
            "load_share": cpu / wall,
        }

    def _behind(self, group: Group) -> int:
        """Return the number of messages that are still waited for."""
        done = group.stream.slowest
        if self._case.qos:  # in this case there is one topic
            done = min(done, int(self._confirmed))
        return group.stream.sent - max(done, group.given_up)

    def _publish_room(self, now: float) -> None:
        for group in self.groups:
            room = self._pace.due(0.0, 0, self._behind(group))
            if room and not group.unsent:
                self._send(group, [now] * room)
            elif group.unsent:
                self._write(group)
            elif now > self._moved_at + STALL_S:
                group.given_up = group.stream.sent

    def _publish_due(self, now: float, began: float) -> None:
        due = self._pace.due(now - began, self._due, 0)
        times = [began + self._pace.at_s(self._due + n) for n in range(due)]
        for at in times:
            self._late_us.add(int((now - at) * 1e6))
        for number, group in enumerate(self.groups):
            mine = times[(number - self._due) % len(self.groups) :: len(self.groups)]
            if mine or group.unsent:
                self._send(group, mine)
        self._due += due

    def _send(self, group: Group, times: list[float]) -> None:
        """Send messages that were due at these times."""
        number = group.stream.sent
        frames = group.stream.send(len(times))
        if self._case.qos or self._wire is not WIRES["mqtt"]:  # else the published bytes are those that arrive
            head, rest = group.head, self._rest + group.tail
            ids = [packet_id(number + n) if self._case.qos else b"" for n in range(len(times))]
            frames = [head + ids[n] + NUMBER.pack(number + n) + rest for n in range(len(times))]
        group.unsent += b"".join(frames)
        group.sent_at.extend(times)
        first = group.stream.trim()
        del group.sent_at[: first - group.first]
        group.first = first
        self._write(group)

    def _write(self, group: Group) -> None:
        if group.unsent:
            try:
                group.unsent = group.unsent[group.publisher.send(group.unsent) :]
            except BlockingIOError:
                pass

    def _receive(self, timeout_s: float) -> None:
        # epoll waits for whole milliseconds; select on it for microseconds.
        if timeout_s and not select.select([self._poll], [], [], timeout_s)[0]:
            return
        for number, _ in self._poll.poll(0):
            found = self._subscribers.get(number)
            chunk = (found[0] if found is not None else self._publishers[number]).recv(CHUNK)
            if not chunk:
                raise ConnectionError("the server closed a connection")
            if found is None:
                self._confirmed += self._wire.confirmed(chunk)
                continue
            _, group, member = found
            came = group.stream.take(member, chunk)
            now = time.perf_counter()
            self._moved_at = now
            every = self._case.timed_every
            for message in came:
                if not message % every and message >= group.first:
                    self._latency_us.add(int((now - group.sent_at[message - group.first]) * 1e6))


def cpu_used_s() -> float:
    """Return the CPU seconds that this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def step(value: dict[str, float]) -> None:
    """Print a value and wait until the parent process has looked."""
    print(json.dumps(value), flush=True)
    if not sys.stdin.readline():
        raise SystemExit(1)


def connections(case: Case, port: int, wire: Wire, topic: str) -> None:
    """Open connections and keep them, those of one topic together; the first tenth is not counted."""
    names = [(f"stay-{n}", topic.format(1 + n * case.groups // case.members)) for n in range(case.members)]
    few = case.members // 10
    held = come(port, wire, names[:few])
    step({})
    used, began = cpu_used_s(), time.perf_counter()
    held += come(port, wire, names[few:])
    wall = time.perf_counter() - began
    count = case.members - few
    step({"deliveries": count, "published": count, "per_second": count / wall, "load_share": (cpu_used_s() - used) / wall})
    for sock in held:
        sock.close()


def main(arguments: list[str]) -> int:
    """Run one case of messages or connections against one server."""
    name, port, wire, topic, seconds = arguments
    case = CASES[name]
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if case.kind == "connections":
        connections(case, int(port), WIRES[wire], topic)
        return 0
    load = Messages(case, int(port), WIRES[wire], topic)
    load.run(min(WARM_S, float(seconds)))
    step({})
    step(load.run(float(seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
