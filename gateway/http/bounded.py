"""Bounds of the HTTP API: connections, slow clients, bodies in memory.

Source: docs/security.md, "The HTTP API".
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.listeners.clients import host_of
from gateway.http.answers import Refused, busy

MAX_BODY_BYTES: Final = 2 << 20
MAX_BODIES_BYTES: Final = 64 << 20
"""Bytes of all bodies that are in memory at one time."""
BODY_S: Final = 20.0
"""Time for a body to come, seconds."""
IDLE_S: Final = 15.0
"""Time for the head of a request to come, and for a connection to stay between two, seconds."""
LOOK_S: Final = 2.0
BODY: Final = web.RequestKey("body_bytes", int)


class Bodies:
    """Bytes of the bodies in memory."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, request: web.Request, size: int) -> None:
        """Take memory for a request until `give_back`. Raises `Refused`."""
        if self.bytes + size > MAX_BODIES_BYTES:
            raise busy("too many large requests at once")
        self.bytes += size
        request[BODY] = request.get(BODY, 0) + size

    def give_back(self, request: web.Request) -> None:
        """Give back the memory of a request that is over."""
        self.bytes -= request.get(BODY, 0)


BODIES: Final = web.AppKey("bodies", Bodies)


async def read_body(request: web.Request) -> bytes:
    """Read a body of at most `MAX_BODY_BYTES`, in at most `BODY_S`. Raises `Refused`, before it is read if its length is known."""
    length = request.content_length
    if length is not None and length > MAX_BODY_BYTES:
        raise _too_large()
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused(400, "INVALID_ARGUMENT", "a body is sent as it is: leave Content-Encoding out")
    if not request.can_read_body:
        return b""
    bodies, body = request.app[BODIES], bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
                bodies.take(request, len(chunk))  # as it comes: who promises much and sends little takes nothing from others
    except TimeoutError:
        raise Refused(408, "TIMEOUT", f"the body did not come within {BODY_S:g} s") from None
    return bytes(body)


def _too_large() -> Refused:
    return Refused(413, "BODY_TOO_LARGE", f"a body has at most {MAX_BODY_BYTES} bytes: send several requests")


class Connections:
    """The connections of the API: a bounded number, of which those that are idle make way, for their own address first.

    Args:
        most: at one time. percent: of these that one address may have.
    """

    def __init__(self, most: int, percent: int) -> None:
        self._most, self._of_address = most, max(most * percent // 100, 1)
        self._idle: dict[RequestHandler, float] = {}
        """Connections without a request, the one that has been so for the longest first → since when, by the loop's clock."""
        self._busy: set[RequestHandler] = set()
        self._addresses: dict[RequestHandler, str] = {}
        self._counts: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.refused = 0
        self.closed = 0
        """Idle connections that were closed, because they were late or others needed the place."""

    def __len__(self) -> int:
        return len(self._addresses)

    def start(self) -> None:
        """Start to close connections that are late."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def stop(self) -> None:
        """Stop."""
        if self._timer is not None:
            self._timer.cancel()

    def take(self, transport: asyncio.BaseTransport, handler: RequestHandler) -> bool:
        """Count a new connection. False: there is no place for it."""
        address = host_of(transport)
        of_address = self._counts.get(address, 0) >= self._of_address
        if (of_address or len(self) >= self._most) and not self._make_way(address if of_address else None):
            self.refused += 1
            return False
        self._addresses[handler] = address
        self._counts[address] = self._counts.get(address, 0) + 1
        self._idle[handler] = asyncio.get_running_loop().time()
        return True

    def begins(self, handler: RequestHandler) -> None:
        """Note that a connection has a request."""
        if self._idle.pop(handler, None) is not None:
            self._busy.add(handler)

    def ends(self, handler: RequestHandler) -> None:
        """Note that a connection's request is answered."""
        if handler in self._busy:
            self._busy.discard(handler)
            self._idle[handler] = asyncio.get_running_loop().time()

    def gone(self, handler: RequestHandler) -> None:
        """Note that a connection is over."""
        address = self._addresses.pop(handler, None)
        if address is None:
            return
        self._idle.pop(handler, None)
        self._busy.discard(handler)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def _make_way(self, address: str | None) -> bool:
        """Close the connection, of an address if it is given, that is idle the longest. False: there is none."""
        oldest = next((handler for handler in self._idle if address in (None, self._addresses[handler])), None)
        if oldest is not None:
            self._close(oldest)
        return oldest is not None

    def _close(self, handler: RequestHandler) -> None:
        self.closed += 1
        self.gone(handler)
        handler.force_close()
        if handler.transport is not None:
            handler.transport.abort()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time() - IDLE_S
        for handler in [handler for handler, since in self._idle.items() if since < before]:
            self._close(handler)
        self._timer = loop.call_later(LOOK_S, self._look)
