"""Subscribers ask every server for the same QoS, and a load fails where another is granted."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from comparison import amqp
from comparison.cases import CASES
from comparison.load import come
from comparison.mail_wires import MAIL_WIRES
from comparison.wires import Mqtt, packet, string

CONNACK = b"\x20\x02\x00\x00"


class Books:
    """One user, and what was wrong."""

    case = CASES["mail"]

    def __init__(self, wire: str) -> None:
        self.topics = [MAIL_WIRES[wire].topic.format(1)]

    def came(self, number: int, user: int) -> None:
        raise AssertionError((number, user))

    def fail(self, problem: str) -> None:
        raise AssertionError(problem)


@contextlib.contextmanager
def server(*answers: bytes) -> Iterator[tuple[int, bytearray]]:
    """A server that says one of these to each connection, in their order, and keeps what all of them said, until the end."""
    said = bytearray()

    def serve() -> None:
        connections = []
        for answer in answers:
            connections.append(listener.accept()[0])
            connections[-1].sendall(answer)
        for connection in connections:
            with connection:
                while data := connection.recv(65_536):
                    said.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1], said
        thread.join()


def subscribe(topic: str, qos: int) -> bytes:
    return packet(0x82, b"\x00\x01" + string(topic) + bytes([qos]))


def suback(code: int) -> bytes:
    return b"\x90\x03\x00\x01" + bytes([code])


def test_mqtt_asks_for_no_qos_but_that_of_the_case() -> None:
    assert {case.subscribed_qos for case in CASES.values() if case.kind != "mail"} == {0}
    assert {case.subscribed_qos for case in CASES.values() if case.kind == "mail"} == {1}
    for qos in (0, 1):
        with server(CONNACK + suback(qos)) as (port, said):
            for sock in come(port, Mqtt(), [("x", "room/1")], qos):
                sock.close()
        assert said.endswith(subscribe("room/1", qos))


@pytest.mark.parametrize(("asked", "granted"), [(1, 0), (0, 1), (1, 0x80)])
def test_another_qos_than_was_asked_for_fails_the_load(asked: int, granted: int) -> None:
    with server(CONNACK + suback(granted)) as (port, _), pytest.raises(ConnectionError, match=f"another QoS than {asked}"):
        come(port, Mqtt(), [("x", "room/1")], asked)


def test_mail_by_mqtt_asks_for_qos_1() -> None:
    books = Books("mqtt")
    with server(CONNACK + suback(1)) as (port, said):
        for sock in MAIL_WIRES["mqtt"].come(port, books):
            sock.close()
    assert said.endswith(subscribe("user/1", 1))


def test_consumers_of_jetstream_acknowledge_every_mail() -> None:
    hello, granted = b"INFO {}\r\nPONG\r\n", b"MSG api 1 2\r\n{}\r\n"
    with server(hello, hello + granted + granted) as (port, said):
        (sock,) = MAIL_WIRES["nats"].come(port, Books("nats"))
        sock.close()
    assert said.count(b'"ack_policy": "explicit"') == 1
    assert b'"durable_name": "u0"' in said


@pytest.mark.parametrize("wire", ["amqp", "amqp-quorum"])
def test_consumers_of_rabbitmq_acknowledge_every_mail_and_the_sender_has_it_confirmed(wire: str) -> None:
    connected = (amqp.START, amqp.TUNE, amqp.OPEN_OK, amqp.CHANNEL_OPEN_OK)
    answers = [
        b"".join(amqp.method_frame(1, method) for method in (*connected, *methods))
        for methods in ((amqp.DECLARE_OK, amqp.QOS_OK, amqp.CONSUME_OK), (amqp.CONFIRM_OK,))
    ]
    books = Books(wire)
    with server(*answers) as (port, said):
        (sock,) = MAIL_WIRES[wire].come(port, books)
        sock.close()
        MAIL_WIRES[wire].connect(port, books).close()
    no_ack = 2
    consume = struct.pack(">HH", *amqp.CONSUME) + struct.pack(">H", 0) + amqp.short("mail.1") + amqp.short("user")
    assert not said[said.index(consume) + len(consume)] & no_ack
    assert struct.pack(">HH", *amqp.DECLARE) + struct.pack(">H", 0) + amqp.short("mail.1") + bytes([amqp.DURABLE]) in said
    assert amqp.method_frame(1, amqp.CONFIRM, b"\0") in said
