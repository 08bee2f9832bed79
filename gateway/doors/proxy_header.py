"""The PROXY protocol's header, versions 1 and 2: the address of a client that came through a balancer. Pure.

    version 1   PROXY TCP4 203.0.113.7 10.0.0.1 41000 1883\r\n      a line of at most 107 bytes
    version 2   \r\n\r\n\0\r\nQUIT\n  0x2 command  family  length  addresses  TLVs
                 12 bytes              1            1       2       length bytes in all

Source: https://www.haproxy.org/download/2.6/doc/proxy-protocol.txt; docs/operations.md, "Balancers in front of gateways".
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Generator
from typing import Final, NamedTuple

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
FIRST_BYTES: Final = len(SIGNATURE)
"""Bytes that tell the versions apart; the shortest header of version 1 has more."""
MAX_LINE_BYTES: Final = 107
MAX_BINARY_BYTES: Final = 2048
"""Largest length of addresses and TLVs that is read; a chain of certificates is not expected here."""
LOCAL: Final = 0x20
PROXY: Final = 0x21
TCP4: Final = 0x11
TCP6: Final = 0x21
SIZES: Final = {TCP4: 12, TCP6: 36}
"""Family and protocol → bytes of the addresses."""


class HeaderRefused(ValueError):
    """Refusal of bytes that are no header of the PROXY protocol, or not one for TCP. The text is a reason, for metrics as well."""


class Source(NamedTuple):
    """Address of the client."""

    host: str
    port: int


def read_header() -> Generator[int, bytes, Source | None]:
    """Ask for numbers of bytes, each exactly, until the header is complete: none of what follows it is taken. Returns the client's
    address; None: the balancer speaks for itself, as for a health check, or does not know it. Raises `HeaderRefused`."""
    first = yield FIRST_BYTES
    if first == SIGNATURE:
        command, family, length = struct.unpack("!BBH", (yield 4))
        if length > MAX_BINARY_BYTES:
            raise HeaderRefused("header too long")
        return _binary(command, family, (yield length) if length else b"")
    if not first.startswith(b"PROXY "):
        raise HeaderRefused("no header")
    line = first
    while not line.endswith(b"\n"):
        if len(line) >= MAX_LINE_BYTES:
            raise HeaderRefused("header too long")
        line += yield 1
    return _line(line)


def _binary(command: int, family: int, data: bytes) -> Source | None:
    if command == LOCAL:
        return None
    if command != PROXY:
        raise HeaderRefused("unknown version or command")
    size = SIZES.get(family)
    if size is None:
        raise HeaderRefused("not from TCP")
    if len(data) < size:
        raise HeaderRefused("header too short")
    end = 4 if family == TCP4 else 16
    (port,) = struct.unpack_from("!H", data, 2 * end)
    return Source(str(ipaddress.ip_address(data[:end])), port)


def _line(line: bytes) -> Source | None:
    try:
        words = line.decode("ascii").removesuffix("\r\n").split(" ")
    except UnicodeDecodeError:
        raise HeaderRefused("malformed header") from None
    if not line.endswith(b"\r\n"):
        raise HeaderRefused("malformed header")
    if words[1:2] == ["UNKNOWN"]:
        return None
    try:
        _, protocol, host, _, port, _ = words
        address = ipaddress.ip_address(host)
        if protocol != f"TCP{address.version}":
            raise HeaderRefused("malformed header")
    except ValueError:
        raise HeaderRefused("malformed header") from None
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 1 << 16):
        raise HeaderRefused("malformed header")
    return Source(str(address), int(port))
