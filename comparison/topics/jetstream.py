"""JetStream: a stream for each topic, publications that it acknowledges, and a consumer.

Source: docs/performance.md, "Durable topics beside others"; the client protocol and the API of NATS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from comparison.cases import Case
from comparison.mail_wires import ACKNOWLEDGED, ask_jetstream, open_nats

CHUNK: Final = 1 << 18
QUIET_S: Final = 1.0
"""Time without a message after which there are no more."""
PULL: Final = 2500
"""Messages of one request; two are under way, so that the server never waits."""


class JetStream:
    """A client: one connection that writes, and one that takes."""

    can_begin_anew = True

    def __init__(self, port: int, case: Case, topics: Sequence[str]) -> None:
        self._case, self._topics, self._port = case, topics, port
        self._sock = open_nats(port, "confirms")
        self._taking = open_nats(port, "to")
        self._rest, self._wanted = b"", 0
        self._head = b"MSG %s 1 " % topics[0].encode()
        self._consumers, self._pull = 0, b""
        self._packets = [b"PUB %s confirms %d\r\n%s\r\n" % (name.encode(), case.bytes, bytes(case.bytes)) for name in topics]

    async def open(self) -> None:
        """Make the streams, on files."""
        with open_nats(self._port, "api") as sock:
            for name in self._topics:
                ask_jetstream(sock, f"STREAM.CREATE.{name}", {"name": name, "subjects": [name], "storage": "file"})

    async def write(self, messages: int, block: int) -> None:
        """Publish to every topic, all at once, and wait for all answers. It has no blocks."""
        del block
        self._sock.sendall(b"".join([packet * messages for packet in self._packets]))
        unanswered, end = messages * len(self._packets), b""
        while unanswered:
            data = end + self._sock.recv(CHUNK)
            if data == end:
                raise ConnectionError("NATS closed the connection")
            if b'"error"' in data or b"-ERR" in data:
                raise ConnectionError(f"JetStream refused a message: {data[:200]!r}")
            end = data[-(len(ACKNOWLEDGED) - 1) :]
            unanswered -= data.count(ACKNOWLEDGED)
            if b"PING\r\n" in data:
                self._sock.sendall(b"PONG\r\n")

    def _subscribe(self) -> None:
        """Take from the beginning, as a new consumer."""
        self._consumers += 1
        name, policy, consumer = self._topics[0], "explicit" if self._case.act == "take" else "none", f"bench{self._consumers}"
        config: dict[str, object] = {"durable_name": consumer, "deliver_policy": "all", "ack_policy": policy}
        subject, asked = f"$JS.API.CONSUMER.MSG.NEXT.{name}.{consumer}".encode(), b'{"batch": %d}' % PULL
        self._pull, self._wanted = b"PUB %s to %d\r\n%s\r\n" % (subject, len(asked), asked), 0
        if self._case.act == "take":
            config["max_ack_pending"] = 2 * PULL
        with open_nats(self._port, "api") as sock:
            ask_jetstream(sock, f"CONSUMER.DURABLE.CREATE.{name}.{consumer}", {"stream_name": name, "config": config})
        self._taking.settimeout(QUIET_S)

    async def take(self) -> int:
        """Take what one read brings, and acknowledge each message if the case does."""
        if not self._consumers:
            self._subscribe()
        while True:
            while self._wanted <= PULL:
                self._taking.sendall(self._pull)
                self._wanted += PULL
            try:
                more = self._taking.recv(CHUNK)
            except TimeoutError:
                return 0
            if not more:
                raise ConnectionError("NATS closed the connection")
            found = self._acknowledge(more) if self._case.act == "take" else self._count(more)
            if found:
                self._wanted -= found
                return found

    def _count(self, more: bytes) -> int:
        data = self._rest + more
        self._rest = data[-(len(self._head) - 1) :]
        if b"\r\nPING\r\n" in data:
            self._taking.sendall(b"PONG\r\n")
        return data.count(self._head)

    def _acknowledge(self, more: bytes) -> int:
        rest, at, answers = self._rest + more, 0, list[bytes]()
        while (end := rest.find(b"\r\n", at)) >= 0:
            words = rest[at:end].split(b" ")
            if words[0] == b"MSG":
                end += 2 + int(words[-1])
                if len(rest) < end + 2:
                    break
                answers.append(b"PUB %s 0\r\n\r\n" % words[3])
            elif words[0] == b"PING":
                self._taking.sendall(b"PONG\r\n")
            at = end + 2
        self._rest = rest[at:]
        self._taking.sendall(b"".join(answers))
        return len(answers)

    async def again(self) -> None:
        """Take from the beginning."""
        self._subscribe()

    async def finish(self) -> None:
        """Acknowledgements have no answer."""

    async def close(self) -> None:
        """End the connections."""
        self._sock.close()
        self._taking.close()
