"""Events of a client's connections, for applications: a callback, and an async iterator."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

MAX_WAITING_EVENTS: Final = 1_000
"""Limit of events that wait in one iterator. Policy: the oldest is dropped and counted."""
log = logging.getLogger("pixiu.client")


class ConnectionState(Enum):
    """State of a connection after an event."""

    CONNECTED = "connected"
    """The connection serves, for the first time or again."""
    RECONNECTING = "reconnecting"
    """The connection was lost, and another one is being set up."""
    MOVED = "moved"
    """Another process took over in order, because the previous one is leaving: nothing is missing."""
    CLOSED = "closed"
    """The connection ended for good: the application closed it, or the cluster refused it."""


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """An event of a connection."""

    state: ConnectionState
    what: str
    """Kind of connection: "publisher" (one for each proxy in use), "subscription" or "inbox"."""
    source: object
    """The `Client`, `Subscription` or `Inbox`."""
    address: str
    """host:port of the proxy or gateway that serves now, or that served last; empty if none ever did."""
    reason: str = ""
    """Reason for the loss, move or refusal; empty if nothing is wrong."""


class ConnectionEvents:
    """Passes on the events of one client.

    Args:
        on_connection: the application's callback; it runs in the event loop and must not block.
    """

    def __init__(self, on_connection: Callable[[ConnectionEvent], None] | None = None) -> None:
        self._on_connection = on_connection
        self._streams: set[ConnectionEventStream] = set()

    def tell(self, event: ConnectionEvent) -> None:
        """Pass an event to the callback and all iterators."""
        if self._on_connection is not None:
            try:
                self._on_connection(event)
            except Exception:
                log.exception("on_connection_callback_failed")
        for stream in self._streams:
            stream.put(event)

    def stream(self) -> ConnectionEventStream:
        """Make an iterator over all events from now on."""
        made = ConnectionEventStream(self._streams.discard)
        self._streams.add(made)
        return made

    def end(self) -> None:
        """End all iterators after the events that already wait; the client is closed."""
        for stream in list(self._streams):
            stream.close()


class ConnectionEventStream:
    """Connection events: `async for event in px.connection_events()`. It ends when the client is closed. Only one task may
    iterate."""

    def __init__(self, on_close: Callable[[ConnectionEventStream], None]) -> None:
        self._on_close = on_close
        self._waiting: deque[ConnectionEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.dropped = 0
        """Events that were dropped because they were not taken in time."""

    def put(self, event: ConnectionEvent) -> None:
        """Add an event."""
        if len(self._waiting) >= MAX_WAITING_EVENTS:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)
        self._changed.set()

    def close(self) -> None:
        """End the iteration after the events that already wait."""
        self._closed = True
        self._changed.set()
        self._on_close(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ConnectionEvent:
        event = await self.next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def next(self) -> ConnectionEvent | None:
        """Wait for the next event; None at the end."""
        while not self._waiting and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self.take()

    def take(self) -> ConnectionEvent | None:
        """Take an event that already waits; None if none does."""
        return self._waiting.popleft() if self._waiting else None
