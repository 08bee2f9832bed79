"""Protocols of the load of mail: MQTT sessions, AMQP queues, JetStream consumers.

Every user has a queue (or session) and a connection of their own and acknowledges every message; one sender publishes and waits for
confirmations. This is just enough of each protocol over a plain socket: constant parts are made once, and input is read in place.

Source: docs/performance.md, "Beside others"; MQTT 3.1.1; AMQP 0-9-1; the client protocol and the API of NATS.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from comparison import amqp
from comparison.accounts import NUMBER
from comparison.cases import Case
from comparison.load import CONNECT_LIMIT_S, HOST, come, exactly
from comparison.wires import Mqtt, packet_head, packet_id, string

CONFIRM_LIMIT_S: Final = 60.0
PREFETCH: Final = 2000
"""Maximum unacknowledged messages of one user: more than there ever are, so that the load never waits for a consumer."""


class Books(Protocol):
    """Receiver of the connections' reports."""

    case: Case
    topics: list[str]

    def came(self, number: int, user: int) -> None:
        """Note that a mail arrived, perhaps not for the first time."""

    def fail(self, problem: str) -> None:
        """Note a problem that invalidates all results."""


class Inbox(asyncio.Protocol, ABC):
    """One user's device: takes mail, reports and acknowledges it."""

    def __init__(self, load: Books, user: int) -> None:
        self._load, self._user = load, user
        self._rest = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. Called by asyncio."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take any part of a stream of messages."""
        assert self._transport is not None
        rest, answers = self._rest + data, list[bytes]()
        self._rest = rest[self._read(rest, answers) :]
        if answers:
            self._transport.write(b"".join(answers))

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss of the connection. Called by asyncio."""
        self._load.fail(f"user {self._user} was disconnected: {exc}")

    @abstractmethod
    def _read(self, rest: bytes, answers: list[bytes]) -> int:
        """Take the complete messages. Returns the offset of the first incomplete one."""

    def _took(self, body: bytes, at: int) -> None:
        self._load.came(NUMBER.unpack_from(body, at)[0], self._user)

    def _foreign(self, what: bytes) -> None:
        self._load.fail(f"user {self._user} received what is no mail: {what[:200]!r}")


class Sender(asyncio.Protocol, ABC):
    """Sends windows of mail and waits until all is confirmed."""

    def __init__(self, load: Books) -> None:
        self._load = load
        self._sent = self._confirmed = 0
        self._all = asyncio.Event()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport. Called by asyncio."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take confirmations, or a part of one."""
        self._confirmed += self._count(data)
        if self._confirmed >= self._sent:
            self._all.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the loss of the connection. Called by asyncio."""
        self._load.fail(f"the sender was disconnected: {exc}")
        self._all.set()

    async def send(self, mails: Sequence[tuple[int, bytes]]) -> None:
        """Send to (index of a user, body), in one write, and wait until all is confirmed."""
        assert self._transport is not None
        self._all.clear()
        first = self._sent
        self._sent += len(mails)
        self._transport.write(b"".join([part for n, mail in enumerate(mails) for part in self._parts(first + n, *mail)]))
        async with asyncio.timeout(CONFIRM_LIMIT_S):
            await self._all.wait()

    @abstractmethod
    def _parts(self, number: int, user: int, body: bytes) -> Sequence[bytes]:
        """Encode one message; `number` counts all from 0."""

    @abstractmethod
    def _count(self, data: bytes) -> int:
        """Return the number of new confirmations."""


# --- MQTT

PUBLISH, AGAIN, PUBACK_HEAD, PUBACK_BYTES = 0x32, 0x3A, b"\x40\x02", 4
"""PUBLISH of QoS 1, and the same with the DUP flag; PUBACK."""


class MqttInbox(Inbox):
    """A persistent session of QoS 1."""

    def __init__(self, load: Books, user: int) -> None:
        super().__init__(load, user)
        name, body = string(load.topics[user]), load.case.bytes
        self._head = packet_head(PUBLISH, len(name) + 2 + body)[1:] + name
        self._bytes = 1 + len(self._head) + 2 + body

    def _read(self, rest: bytes, answers: list[bytes]) -> int:
        at = 0
        while len(rest) - at >= self._bytes:
            if rest[at] not in (PUBLISH, AGAIN) or not rest.startswith(self._head, at + 1):
                self._foreign(rest[at:])
                return len(rest)
            behind = at + 1 + len(self._head)
            answers += [PUBACK_HEAD, rest[behind : behind + 2]]
            self._took(rest, behind + 2)
            at += self._bytes
        return at


class MqttSender(Sender):
    """PUBLISH with QoS 1."""

    def __init__(self, load: Books) -> None:
        super().__init__(load)
        self._heads = [Mqtt().published(topic, load.case.bytes, 1)[0] for topic in load.topics]
        self._bytes = 0

    def _parts(self, number: int, user: int, body: bytes) -> Sequence[bytes]:
        return self._heads[user], packet_id(number), body

    def _count(self, data: bytes) -> int:
        before, self._bytes = self._bytes, self._bytes + len(data)
        return self._bytes // PUBACK_BYTES - before // PUBACK_BYTES


def _come_by_mqtt(port: int, load: Books) -> list[socket.socket]:
    # The client's name is the user, and the device.
    return come(port, Mqtt(), [(str(n + 1), topic) for n, topic in enumerate(load.topics)], load.case.subscribed_qos, clean=False)


def _mqtt_sender(port: int, load: Books) -> socket.socket:
    (sock,) = come(port, Mqtt(), [("mail-sender", "")])
    return sock


# --- NATS: JetStream

STREAM: Final = "MAIL"
CONFIRMS: Final = b"confirms"
ACKNOWLEDGED: Final = b'"seq":'
"""Occurs once in each answer to a publication."""


class JetStreamInbox(Inbox):
    """A durable push consumer, with explicit acknowledgements."""

    def _read(self, rest: bytes, answers: list[bytes]) -> int:
        at, size = 0, self._load.case.bytes
        while (end := rest.find(b"\r\n", at)) >= 0:
            words = rest[at:end].split(b" ")
            if words[0] == b"MSG":
                body = end + 2
                if len(rest) < body + int(words[-1]) + 2:
                    break
                if len(words) != 5 or int(words[4]) != size:
                    self._foreign(rest[at:])
                    return len(rest)
                answers.append(b"PUB %s 0\r\n\r\n" % words[3])
                self._took(rest, body)
                end = body + size
            elif words[0] == b"PING":
                answers.append(b"PONG\r\n")
            else:
                self._foreign(rest[at:])
                return len(rest)
            at = end + 2
        return at


class JetStreamSender(Sender):
    """Publications that the stream acknowledges."""

    def __init__(self, load: Books) -> None:
        super().__init__(load)
        self._heads = [b"PUB %s %s %d\r\n" % (topic.encode(), CONFIRMS, load.case.bytes) for topic in load.topics]
        self._end = b""

    def _parts(self, number: int, user: int, body: bytes) -> Sequence[bytes]:
        return self._heads[user], body, b"\r\n"

    def _count(self, data: bytes) -> int:
        data = self._end + data
        self._end = data[-(len(ACKNOWLEDGED) - 1) :]
        if b"PING\r\n" in data and self._transport is not None:
            self._transport.write(b"PONG\r\n")
        if b'"error"' in data or b"-ERR" in data:
            self._load.fail(f"JetStream refused a mail: {data[:200]!r}")
        return data.count(ACKNOWLEDGED)


def open_nats(port: int, subject: str) -> socket.socket:
    """Open a connection that has subscribed to a subject."""
    sock = socket.create_connection((HOST, port), timeout=CONNECT_LIMIT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _line(sock)
    sock.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB %s 1\r\nPING\r\n' % subject.encode())
    if (said := _line(sock)) != b"PONG":
        raise ConnectionError(f"NATS refused: {said!r}")
    return sock


def _line(sock: socket.socket) -> bytes:
    """Read a line, without its end; nothing after it is read."""
    found = bytearray()
    while not found.endswith(b"\r\n"):
        found += exactly(sock, 1)
    return bytes(found[:-2])


def ask_jetstream(sock: socket.socket, api: str, request: object) -> None:
    """Ask JetStream's API, and wait for its answer. Raises ConnectionError for a refusal."""
    data = json.dumps(request).encode()
    sock.sendall(b"PUB $JS.API.%s api %d\r\n%s\r\n" % (api.encode(), len(data), data))
    answer = exactly(sock, int(_line(sock).split(b" ")[-1]) + 2)
    if "error" in json.loads(answer):
        raise ConnectionError(f"JetStream refused {api}: {answer[:200]!r}")


def _come_to_jetstream(port: int, load: Books) -> list[socket.socket]:
    """Make a stream on files; for every user a durable consumer of their subject, and a connection."""
    found = [open_nats(port, f"to.{n}") for n in range(len(load.topics))]
    with open_nats(port, "api") as sock:
        ask_jetstream(sock, f"STREAM.CREATE.{STREAM}", {"name": STREAM, "subjects": ["mail.*"], "storage": "file"})
        for n, topic in enumerate(load.topics):
            config = {
                "durable_name": f"u{n}", "deliver_subject": f"to.{n}", "filter_subject": topic, "ack_policy": "explicit",
                "deliver_policy": "all", "max_ack_pending": PREFETCH,
            }  # fmt: skip
            ask_jetstream(sock, f"CONSUMER.DURABLE.CREATE.{STREAM}.u{n}", {"stream_name": STREAM, "config": config})
    return found


def _jetstream_sender(port: int, load: Books) -> socket.socket:
    return open_nats(port, CONFIRMS.decode())


# --- AMQP 0-9-1


class AmqpInbox(Inbox):
    """A consumer of a durable queue; acknowledges up to the last message of each read."""

    def __init__(self, load: Books, user: int) -> None:
        super().__init__(load, user)
        self._tag = 0

    def _read(self, rest: bytes, answers: list[bytes]) -> int:
        at, took = 0, False
        while len(rest) - at >= amqp.FRAME.size:
            kind, _, size = amqp.FRAME.unpack_from(rest, at)
            behind = at + amqp.FRAME.size + size + 1
            if len(rest) < behind:
                break
            payload = at + amqp.FRAME.size
            if kind == amqp.METHOD:
                if amqp.NAME.unpack_from(rest, payload) != amqp.DELIVERED:
                    self._foreign(rest[at:])
                    return len(rest)
                self._tag = amqp.TAG.unpack_from(rest, payload + 5 + rest[payload + 4])[0]
            elif kind == amqp.BODY:
                self._took(rest, payload)
                took = True
            at = behind
        if took:
            answers.append(amqp.method_frame(1, amqp.ACK, amqp.TAG.pack(self._tag, 1)))
        return at


class AmqpSender(Sender):
    """Persistent messages to queues by their names, with publisher confirms."""

    def __init__(self, load: Books) -> None:
        super().__init__(load)
        size = load.case.bytes
        header = amqp.frame(amqp.HEADER, 1, struct.pack(">HHQHB", 60, 0, size, 1 << 12, amqp.PERSISTENT)) + amqp.FRAME.pack(
            amqp.BODY, 1, size
        )
        self._heads = [
            amqp.method_frame(1, amqp.PUBLISH, struct.pack(">H", 0) + amqp.short("") + amqp.short(topic) + b"\0") + header
            for topic in load.topics
        ]
        self._rest = b""
        self._up_to = 0
        self._single: set[int] = set()

    def _parts(self, number: int, user: int, body: bytes) -> Sequence[bytes]:
        return self._heads[user], body, amqp.FRAME_END

    def _count(self, data: bytes) -> int:
        rest, at, before = self._rest + data, 0, self._up_to
        while len(rest) - at >= amqp.FRAME.size:
            kind, _, size = amqp.FRAME.unpack_from(rest, at)
            behind = at + amqp.FRAME.size + size + 1
            if len(rest) < behind:
                break
            if kind == amqp.METHOD:
                if amqp.NAME.unpack_from(rest, at + amqp.FRAME.size) != amqp.ACK:
                    self._load.fail(f"RabbitMQ did not confirm a mail: {rest[at : at + 200]!r}")
                    return 0
                self._confirms(*amqp.TAG.unpack_from(rest, at + amqp.FRAME.size + amqp.NAME.size))
            at = behind
        self._rest = rest[at:]
        return self._up_to - before

    def _confirms(self, tag: int, multiple: int) -> None:
        """Take a confirm. It names a tag, with `multiple` every tag up to it. Confirms may come in any order."""
        if multiple:
            self._up_to = max(self._up_to, tag)
        else:
            self._single.add(tag)
        while self._up_to + 1 in self._single:
            self._up_to += 1
            self._single.discard(self._up_to)
        if multiple:
            self._single = {each for each in self._single if each > self._up_to}


def _come_by_amqp(port: int, load: Books, arguments: bytes = b"") -> list[socket.socket]:
    """Make for every user a durable queue, a consumer of it, and a connection."""
    found = []
    for topic in load.topics:
        sock = amqp.connect(port)
        for said, due in (
            (
                amqp.method_frame(
                    1, amqp.DECLARE, struct.pack(">H", 0) + amqp.short(topic) + bytes([amqp.DURABLE]) + amqp.long(arguments)
                ),
                amqp.DECLARE_OK,
            ),
            (amqp.method_frame(1, amqp.QOS, struct.pack(">IHB", 0, PREFETCH, 0)), amqp.QOS_OK),
            (
                amqp.method_frame(
                    1, amqp.CONSUME, struct.pack(">H", 0) + amqp.short(topic) + amqp.short("user") + b"\0" + amqp.long(b"")
                ),
                amqp.CONSUME_OK,
            ),
        ):
            sock.sendall(said)
            amqp.expect(sock, due)
        found.append(sock)
    return found


def _come_by_quorum(port: int, load: Books) -> list[socket.socket]:
    return _come_by_amqp(port, load, amqp.short("x-queue-type") + b"S" + amqp.long(b"quorum"))


def _amqp_sender(port: int, load: Books) -> socket.socket:
    sock = amqp.connect(port)
    sock.sendall(amqp.method_frame(1, amqp.CONFIRM, b"\0"))
    amqp.expect(sock, amqp.CONFIRM_OK)
    return sock


@dataclass(frozen=True, slots=True)
class MailWire:
    """A protocol for sending and receiving mail."""

    topic: str
    """Topic of a user, by number."""
    come: Callable[[int, Books], list[socket.socket]]
    """Opens the users' connections, in their order, each with its queue."""
    inbox: Callable[[Books, int], Inbox]
    connect: Callable[[int, Books], socket.socket]
    """Opens the sender's connection."""
    sender: Callable[[Books], Sender]


MAIL_WIRES: Final = {
    "mqtt": MailWire("user/{}", _come_by_mqtt, MqttInbox, _mqtt_sender, MqttSender),
    "nats": MailWire("mail.{}", _come_to_jetstream, JetStreamInbox, _jetstream_sender, JetStreamSender),
    "amqp": MailWire("mail.{}", _come_by_amqp, AmqpInbox, _amqp_sender, AmqpSender),
    "amqp-quorum": MailWire("mail.{}", _come_by_quorum, AmqpInbox, _amqp_sender, AmqpSender),
}
