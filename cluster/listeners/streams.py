"""The framed streams of a process: its listener, its calls to others, and the keys by which callers prove their role.

Source: docs/links.md, "Framed streams", docs/security.md.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable

from cluster.listeners.call_guard import CallGuard, may_call
from cluster.listeners.server import message_bytes
from cluster.rpc.framed import Framed
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.frames import Hello
from cluster.settings.options import ClusterOptions
from cluster.trust.followed_keys import keys_of
from cluster.trust.key_ring import KeyRing
from pixiu.errors import NotAllowed
from pixiu.rpc.tls import Tls


def stream_keys(ring: KeyRing | None, sender: str, receiver: str) -> tuple[bytes, ...] | None:
    """Return the keys by which a sender of one role proves it to a receiver of another, the signing key first; None if there are
    none."""
    return None if ring is None else keys_of(ring, (f"{sender}, streams", receiver))


def framed_listener(
    role: str, cluster: ClusterOptions, tls: Tls | None, guard: CallGuard | None, ring: Callable[[], KeyRing | None],
    failed: Callable[[str, Exception], None],
) -> FramedListener:  # fmt: skip
    """Make the listener of a process of this role. Raises ConfigurationError."""

    def admits(hello: Hello, certificate: bytes | None, peer: str) -> tuple[str, str]:
        if guard is not None and certificate is not None:
            caller = guard.admit(hello.method, certificate, peer)
            return caller.role, caller.name
        if not may_call(hello.method, hello.role, role):
            raise NotAllowed(f"{hello.role} may not call {hello.method} of {role}")
        return hello.role, ""

    def context() -> ssl.SSLContext | None:
        return tls.server_context() if tls is not None else None

    return FramedListener(
        admits, context, lambda caller: stream_keys(ring(), caller, role), message_bytes(cluster), failed
    )  # fmt: skip


def framed_calls(role: str, endpoint: int, cluster: ClusterOptions, tls: Tls | None) -> Framed:
    """Return the opener of framed streams for a process of this role."""

    def key(receiver: str) -> bytes | None:
        keys = stream_keys(cluster.key_ring(), role, receiver)
        return keys[0] if keys is not None else None

    return Framed(role, endpoint, key, message_bytes(cluster), tls)
