"""What users and the sender of mail say to servers, and read from them however it is cut."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from comparison.accounts import NUMBER
from comparison.cases import CASES
from comparison.mail_wires import MAIL_WIRES, Inbox, Sender
from comparison.wires import packet_head, string

CASE = CASES["mail"]
REST = bytes(CASE.bytes - NUMBER.size)


class Load:
    """What came, and what was wrong."""

    def __init__(self, wire: str) -> None:
        self.case = CASE
        self.topics = [MAIL_WIRES[wire].topic.format(n + 1) for n in range(3)]
        self.mails: list[tuple[int, int]] = []
        self.problems: list[str] = []

    def came(self, number: int, user: int) -> None:
        self.mails.append((number, user))

    def fail(self, problem: str) -> None:
        self.problems.append(problem)


class Transport(asyncio.WriteTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, 1, len(payload)) + payload + b"\xce"


def amqp_delivery(tag: int, body: bytes) -> bytes:
    method = struct.pack(">HH", 60, 60) + b"\x04user" + struct.pack(">QB", tag, 0) + b"\x00\x06mail.2"
    header = struct.pack(">HHQHB", 60, 0, len(body), 1 << 12, 2)
    return frame(1, method) + frame(2, header) + frame(3, body)


def delivery(wire: str, number: int) -> bytes:
    """What a server sends to the second user."""
    body = NUMBER.pack(number) + REST
    if wire == "mqtt":
        topic = string("user/2")
        return packet_head(0x32, len(topic) + 2 + len(body)) + topic + struct.pack(">H", number + 1) + body
    if wire == "nats":
        return b"MSG to.1 1 $JS.ACK.%d %d\r\n%s\r\n" % (number, len(body), body)
    return amqp_delivery(number + 1, body)


def acknowledgement(wire: str, number: int) -> bytes:
    """Of one message that came alone."""
    if wire == "mqtt":
        return b"\x40\x02" + struct.pack(">H", number + 1)
    if wire == "nats":
        return b"PUB $JS.ACK.%d 0\r\n\r\n" % number
    return frame(1, struct.pack(">HHQB", 60, 80, number + 1, 1))


def inbox_of(wire: str) -> tuple[Load, Inbox, Transport]:
    load, transport = Load(wire), Transport()
    inbox = MAIL_WIRES[wire].inbox(load, 1)
    inbox.connection_made(transport)
    return load, inbox, transport


@pytest.mark.parametrize("wire", MAIL_WIRES)
@pytest.mark.parametrize("cut", [1, 7, 150, 100_000])
def test_mail_is_taken_and_acknowledged_however_it_is_cut(wire: str, cut: int) -> None:
    load, inbox, transport = inbox_of(wire)
    data = b"".join(delivery(wire, number) for number in range(20))
    for at in range(0, len(data), cut):
        inbox.data_received(data[at : at + cut])
    assert load.mails == [(number, 1) for number in range(20)]
    assert load.problems == []
    assert transport.written.endswith(acknowledgement(wire, 19))
    if cut == 1:
        assert transport.written == b"".join(acknowledgement(wire, number) for number in range(20))
    inbox.data_received(delivery(wire, 5))
    assert (len(load.mails), load.mails[-1]) == (21, (5, 1))


@pytest.mark.parametrize(
    ("wire", "foreign"),
    [
        ("mqtt", b"\x30" + bytes(300)),
        ("nats", b"-ERR 'no'\r\n"),
        ("nats", b"MSG to.1 1 $JS.ACK.1 3\r\nabc\r\n"),
        ("amqp", frame(1, struct.pack(">HH", 20, 40) + bytes(8))),
    ],
)
def test_what_is_no_mail_is_a_failure(wire: str, foreign: bytes) -> None:
    load, inbox, _ = inbox_of(wire)
    inbox.data_received(delivery(wire, 0) + foreign)
    assert load.mails == [(0, 1)]
    assert "no mail" in load.problems[0]


def confirmations(wire: str, count: int) -> bytes:
    """Of so many mails."""
    if wire == "mqtt":
        return b"".join(b"\x40\x02" + struct.pack(">H", n + 1) for n in range(count))
    if wire == "nats":
        answer = b'{"stream":"MAIL", "seq":%d}'
        return b"PING\r\n" + b"".join(
            b"MSG confirms 1 %d\r\n%s\r\n" % (len(answer % (n + 1)), answer % (n + 1)) for n in range(count)
        )
    one = [(2, 0), (1, 0), (3, 0), (count - 1, 1), (count, 0)]  # in any order, some for all up to them
    return frame(8, b"") + b"".join(frame(1, struct.pack(">HHQB", 60, 80, *each)) for each in one)


@pytest.mark.parametrize("wire", MAIL_WIRES)
@pytest.mark.parametrize("cut", [1, 5, 100_000])
async def test_a_window_is_sent_at_once_and_waits_until_all_is_confirmed(wire: str, cut: int) -> None:
    load, transport = Load(wire), Transport()
    sender: Sender = MAIL_WIRES[wire].sender(load)
    sender.connection_made(transport)
    body = NUMBER.pack(7) + REST
    sending = asyncio.create_task(sender.send([(n % 3, body) for n in range(9)]))
    await asyncio.sleep(0)
    assert transport.written.count(body) == 9
    assert transport.written.count(load.topics[2].encode()) == 3
    data = confirmations(wire, 9)
    for at in range(0, len(data), cut):
        assert not sending.done()
        sender.data_received(data[at : at + cut])
    await sending
    assert not load.problems
    assert transport.written.endswith(b"PONG\r\n") == (wire == "nats")


def test_refusals_of_a_sender_are_failures() -> None:
    for wire, said in (
        ("nats", b'MSG confirms 1 40\r\n{"error":{"code":503},"stream":"MAIL","seq":0}\r\n'),
        ("amqp", frame(1, struct.pack(">HHQB", 60, 120, 1, 0))),
    ):
        load = Load(wire)
        sender = MAIL_WIRES[wire].sender(load)
        sender.connection_made(Transport())
        sender.data_received(said)
        assert len(load.problems) == 1
