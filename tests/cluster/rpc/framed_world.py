"""A framed listener and callers of it in one process, as roles of two processes or of this one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster.rpc.framed import FramedCall, FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.frames import Hello
from cluster.rpc.local_streams import LocalCall, LocalStreams

METHOD = "/test.Streams/Exchange"
HOST = "127.0.0.1"
MAX_BYTES = 1 << 20
Handler = Callable[[FramedHandler[bytes, bytes]], Awaitable[None]]
Call = FramedCall[bytes, bytes]
INSIDE: LocalStreams | None = None
"""The listeners of one process, by their ports: callers are roles of it. None: of another one."""


@asynccontextmanager
async def serving(handler: Handler, **listener: Any) -> AsyncIterator[tuple[FramedListener, int]]:
    """A listener whose only method is `handler`, and its port."""
    made = FramedListener(**({"max_bytes": MAX_BYTES} | listener))
    made.serve(METHOD, bytes, handler)
    port = await made.bind(HOST, 0, fallback=True)
    await made.start()
    if INSIDE is not None:
        made.serve_locally(INSIDE, port)
    try:
        yield made, port
    finally:
        await made.close()


def call_to(port: int, *, method: str = METHOD, role: str = "proxy", key: bytes | None = None, of: str = "xiu") -> Call:
    if INSIDE is not None:
        return LocalCall(INSIDE, port, of, Hello(method, role, 1), bytes, MAX_BYTES)
    return FramedCall(HOST, port, of, Hello(method, role, 1), lambda: key, bytes, MAX_BYTES)
