"""Options of a client's socket.

Source: docs/operations.md.
"""

from __future__ import annotations

import contextlib
import socket
import struct

RESET_AT_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds."""


def reset_at_close(sock: socket.socket) -> None:
    """Have the kernel drop what the peer has not taken when the socket is closed."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE)


def keep_alive(sock: socket.socket, seconds: int) -> str:
    """Let the kernel detect a peer that vanished. Returns the peer's address, empty if it has gone already."""
    if seconds:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", max(seconds // 3, 1)), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2000 * seconds)
    try:
        peer = sock.getpeername()
    except OSError:
        return ""
    return str(peer[0]) if isinstance(peer, tuple) else ""
