"""The header of the PROXY protocol: both versions, everything that is none, and connections that begin with one."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.listeners.networks import Networks
from gateway.clients.clients import Pending
from gateway.doors import proxied
from gateway.doors.proxied import ProxyDoor
from gateway.doors.proxy_header import MAX_BINARY_BYTES, SIGNATURE, HeaderRefused, Source, read_header
from gateway.mqtt.listener import Listener
from tests.support.waiting import until


def binary(command: int = 0x21, family: int = 0x11, addresses: bytes = b"", rest: bytes = b"") -> bytes:
    return SIGNATURE + struct.pack("!BBH", command, family, len(addresses + rest)) + addresses + rest


PORTS = struct.pack("!HH", 41_000, 1883)
V4 = ip_address("203.0.113.7").packed + ip_address("10.0.0.1").packed + PORTS
V6 = ip_address("2001:db8::7").packed + ip_address("fd00::1").packed + PORTS
SSL_TLV = b"\x20\x00\x05\x01\0\0\0\0"


def parse(data: bytes) -> tuple[Source | None, bytes]:
    """The client's address, and what was not taken of the data."""
    header = read_header()
    wanted = next(header)
    while True:
        if len(data) < wanted:
            raise EOFError
        taken, data = data[:wanted], data[wanted:]
        try:
            wanted = header.send(taken)
        except StopIteration as stop:
            return stop.value, data


@pytest.mark.parametrize(
    ("header", "source"),
    [
        (binary(addresses=V4), Source("203.0.113.7", 41_000)),
        (binary(addresses=V4, rest=SSL_TLV), Source("203.0.113.7", 41_000)),
        (binary(family=0x21, addresses=V6), Source("2001:db8::7", 41_000)),
        (binary(command=0x20), None),
        (binary(command=0x20, family=0, addresses=bytes(12)), None),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 41000 1883\r\n", Source("203.0.113.7", 41_000)),
        (b"PROXY TCP6 2001:db8::7 fd00::1 41000 1883\r\n", Source("2001:db8::7", 41_000)),
        (b"PROXY UNKNOWN\r\n", None),
        (b"PROXY UNKNOWN ffff::1 ffff::2 65535 65535\r\n", None),
    ],
)
def test_a_header_is_read_and_nothing_after_it(header: bytes, source: Source | None) -> None:
    assert parse(header + b"\x10\x0c") == (source, b"\x10\x0c")
    for end in range(len(header)):
        with pytest.raises(EOFError):
            parse(header[:end])


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c", "no header"),
        (b"GET /v1/health HTTP/1.1\r\n", "no header"),
        (binary(command=0x11, addresses=V4), "unknown version or command"),
        (binary(command=0x22, addresses=V4), "unknown version or command"),
        (binary(family=0x31, addresses=bytes(216)), "not from TCP"),
        (binary(family=0x12, addresses=V4), "not from TCP"),
        (binary(addresses=V4[:11]), "header too short"),
        (binary(family=0x21, addresses=V4), "header too short"),
        (SIGNATURE + struct.pack("!BBH", 0x21, 0x11, MAX_BINARY_BYTES + 1), "header too long"),
        (b"PROXY " + b"x" * 200, "header too long"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 41000 1883\n", "malformed header"),
        (b"PROXY TCP4 203.0.113.7 10.0.0.1 70000 1883\r\n", "malformed header"),
        (b"PROXY TCP4 203.0.113.700 10.0.0.1 41000 1883\r\n", "malformed header"),
        (b"PROXY TCP6 203.0.113.7 10.0.0.1 41000 1883\r\n", "malformed header"),
        (b"PROXY TCP4  203.0.113.7 10.0.0.1 41000 1883\r\n", "malformed header"),
        (b"PROXY TCP4 \xff\r\n", "malformed header"),
    ],
)
def test_everything_else_is_refused_with_a_reason(header: bytes, reason: str) -> None:
    with pytest.raises(HeaderRefused, match=reason):
        parse(header)


@given(st.binary(max_size=200).flatmap(lambda rest: st.sampled_from([rest, SIGNATURE + rest, b"PROXY " + rest])))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    try:
        source, rest = parse(data)
    except (HeaderRefused, EOFError):
        return
    assert data.endswith(rest)
    assert source is None or (source.host and 0 <= source.port < 1 << 16)


def test_networks_are_matched_in_both_forms_of_an_address() -> None:
    networks = Networks("10.0.0.0/8, fd00::/8")
    assert [networks.have(each) for each in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::1%eth0", "11.0.0.1", "::1", "")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not appear"):
        Networks("10.0.0.0/8, balancers")


class Arrived(asyncio.Protocol):
    """Notes the addresses of clients and what they send."""

    def __init__(self, found: list[tuple[str, bytes]]) -> None:
        self._found = found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._found.append((self._transport.get_extra_info("peername")[0], data))
        self._transport.close()


class AtMostOne:
    """Evicts the oldest pending connection as soon as there are two."""

    def __init__(self) -> None:
        self.pending: dict[Pending, str] = {}

    def arrived(self, connection: Pending, address: str) -> int:
        for other in self.pending:
            other.evict()
        self.pending[connection] = address
        return 1

    def closed(self, connection: Pending, reason: int) -> None:
        del self.pending[connection]


class Doors:
    """A listener, and what came through it."""

    def __init__(self, networks: str) -> None:
        self.found: list[tuple[str, bytes]] = []
        self.pending = AtMostOne()
        self.behind = ProxyDoor(Networks(networks), self.pending)
        self.port = 0
        self.listener = Listener(lambda: Arrived(self.found), "127.0.0.1", 0, behind=self.behind)

    async def send(self, data: bytes) -> bytes:
        """What the listener answers to this until it closes: nothing, or a reset."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@pytest.fixture
async def doors(request: pytest.FixtureRequest) -> AsyncIterator[Doors]:
    made = Doors(request.param)
    made.port = await made.listener.bind()
    await made.listener.start()
    yield made
    made.listener.close()
    assert not made.pending.pending


@pytest.mark.parametrize("doors", ["127.0.0.0/8"], indirect=True)
async def test_the_clients_address_counts_for_connections_of_a_listed_network(doors: Doors) -> None:
    await doors.send(binary(addresses=V4) + b"first")
    await doors.send(b"PROXY TCP6 2001:db8::7 fd00::1 41000 1883\r\nsecond")
    await doors.send(binary(command=0x20) + b"third")
    assert doors.found == [("203.0.113.7", b"first"), ("2001:db8::7", b"second"), ("127.0.0.1", b"third")]


@pytest.mark.parametrize("doors", ["127.0.0.0/8"], indirect=True)
async def test_a_listed_network_without_a_header_is_closed_with_a_reason(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    await doors.send(b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c")
    assert dict(doors.behind.refused) == {"no header": 1}
    monkeypatch.setattr(proxied, "HEADER_TIMEOUT_S", 0.05)
    await doors.send(b"PROXY TCP4 ")
    assert dict(doors.behind.refused) == {"no header": 1, "late": 1}
    assert not doors.found


@pytest.mark.parametrize("doors", ["127.0.0.0/8"], indirect=True)
async def test_a_connection_without_its_header_is_evicted_for_others(doors: Doors) -> None:
    waiting = asyncio.create_task(doors.send(b"PROXY TCP4 "))
    await until(lambda: doors.pending.pending)
    await doors.send(binary(addresses=V4) + b"second")
    await waiting
    assert doors.found == [("203.0.113.7", b"second")]
    assert dict(doors.behind.refused) == {"evicted": 1}


@pytest.mark.parametrize("doors", ["10.0.0.0/8", ""], indirect=True)
async def test_a_header_of_others_is_data_like_any(doors: Doors) -> None:
    await doors.send(binary(addresses=V4))
    assert doors.found == [("127.0.0.1", binary(addresses=V4))]
