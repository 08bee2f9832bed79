"""Malformed commands, and the codes with which nsqd answers: played against any nsqd."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Final

CASES: Final[Mapping[str, bytes]] = {
    "unknown command": b"FOO bar\n",
    "RDY before SUB": b"RDY 1\n",
    "FIN before SUB": b"FIN 0123456789abcdef\n",
    "SUB without a channel": b"SUB orders\n",
    "SUB of a bad topic": b"SUB or$ders work\n",
    "SUB of a bad channel": b"SUB orders wo/rk\n",
    "PUB to a bad topic": b"PUB a$b\n\x00\x00\x00\x01x",
    "PUB of nothing": b"PUB orders\n\x00\x00\x00\x00",
    "PUB of a negative size": b"PUB orders\n\xff\xff\xff\xff",
    "PUB that is too big": b"PUB orders\n\x7f\x00\x00\x00",
    "MPUB of nothing": b"MPUB orders\n\x00\x00\x00\x04\x00\x00\x00\x00",
    "MPUB that is too big": b"MPUB orders\n\x7f\x00\x00\x00",
    "MPUB with an empty message": b"MPUB orders\n\x00\x00\x00\x08\x00\x00\x00\x01\x00\x00\x00\x00",
    "DPUB without a time": b"DPUB orders\n\x00\x00\x00\x01x",
    "DPUB of too long a time": b"DPUB orders 99999999999\n\x00\x00\x00\x01x",
    "IDENTIFY that is no JSON": b"IDENTIFY\n\x00\x00\x00\x02{x",
    "IDENTIFY with a heartbeat that is too short": b'IDENTIFY\n\x00\x00\x00\x18{"heartbeat_interval":5}',
    "SUB without heartbeats": b'IDENTIFY\n\x00\x00\x00\x19{"heartbeat_interval":-1}SUB orders work\n',
    "AUTH where there is none": b"AUTH\n\x00\x00\x00\x01x",
    "SUB twice": b"SUB orders work\nSUB orders work\n",
    "RDY that is too high": b"SUB orders work\nRDY 2501\n",
    "FIN of a short ID": b"SUB orders work\nFIN short\n",
    "FIN of an unknown ID": b"SUB orders work\nFIN 0123456789abcdef\nFOO\n",
    "REQ of an unknown ID": b"SUB orders work\nREQ 0123456789abcdef 0\nFOO\n",
    "TOUCH of an unknown ID": b"SUB orders work\nTOUCH 0123456789abcdef\nFOO\n",
    "CLS before SUB": b"CLS\n",
}
"""Name → bytes after the magic. Each ends the connection."""


def codes(host: str, port: int, said: bytes) -> list[str]:
    """Codes of the errors that come, and "closed" once the connection ends. Raises `TimeoutError` if it does not."""
    with socket.create_connection((host, port), timeout=20) as connection:
        connection.sendall(b"  V2" + said)
        found, buffer = [], b""
        while True:
            try:
                data = connection.recv(65_536)
            except ConnectionResetError:
                data = b""
            buffer += data
            while len(buffer) >= 8 and len(buffer) >= 4 + struct.unpack(">i", buffer[:4])[0]:
                size, kind = struct.unpack(">ii", buffer[:8])
                if kind == 1:
                    found.append(buffer[8 : 4 + size].split(b" ")[0].decode())
                buffer = buffer[4 + size :]
            if not data:
                return [*found, "closed"]
