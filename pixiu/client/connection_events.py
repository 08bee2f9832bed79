"""What happens to a client's connections, for an application that wants to know: a callback, and an async iterator."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Self

MAX_WAITING_EVENTS: Final = 1_000
"""Of one iterator. Policy: the oldest is dropped and counted."""
log = logging.getLogger("pixiu.client")


class ConnectionState(Enum):
    """What became of a connection."""

    CONNECTED = "connected"
    """It serves: for the first time, or again."""
    RECONNECTING = "reconnecting"
    """It was lost, and another one is being looked for."""
    MOVED = "moved"
    """Another process took over in good order, because the one before is going: nothing is missing."""
    CLOSED = "closed"
    """It ended for good: the application closed it, or the cluster refused it."""


@dataclass(frozen=True, slots=True)
class ConnectionEvent:
    """Something happened to a connection."""

    state: ConnectionState
    what: str
    """Which one: "publisher" (there is one for each proxy that is used), "subscription" or "inbox"."""
    source: object
    """The `Client`, `Subscription` or `Inbox`."""
    address: str
    """host:port of the proxy or gateway: the one that serves now, or that served last; empty where none ever did."""
    reason: str = ""
    """Why it was lost, moved or refused; empty where nothing is wrong."""


class ConnectionEvents:
    """Passes the events of one client on.

    Args:
        on_connection: the application's callback; it runs in the event loop and must not block.
    """

    def __init__(self, on_connection: Callable[[ConnectionEvent], None] | None = None) -> None:
        self._on_connection = on_connection
        self._streams: set[ConnectionEventStream] = set()

    def tell(self, event: ConnectionEvent) -> None:
        """Something happened."""
        if self._on_connection is not None:
            try:
                self._on_connection(event)
            except Exception:
                log.exception("on_connection_callback_failed")
        for stream in self._streams:
            stream.put(event)

    def stream(self) -> ConnectionEventStream:
        """All events from now on."""
        made = ConnectionEventStream(self._streams.discard)
        self._streams.add(made)
        return made

    def end(self) -> None:
        """The client is closed: iterations end after what is waiting."""
        for stream in list(self._streams):
            stream.close()


class ConnectionEventStream:
    """Connection events: `async for event in px.connection_events()`. It ends when the client is closed. One task iterates."""

    def __init__(self, on_close: Callable[[ConnectionEventStream], None]) -> None:
        self._on_close = on_close
        self._waiting: deque[ConnectionEvent] = deque()
        self._changed = asyncio.Event()
        self._closed = False
        self.dropped = 0
        """Events that were not taken in time."""

    def put(self, event: ConnectionEvent) -> None:
        """One more."""
        if len(self._waiting) >= MAX_WAITING_EVENTS:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(event)
        self._changed.set()

    def close(self) -> None:
        """No more come."""
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
        """The next event; None at the end."""
        while not self._waiting and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        return self.take()

    def take(self) -> ConnectionEvent | None:
        """An event that waits already; None when none does."""
        return self._waiting.popleft() if self._waiting else None
