"""Server-sent events: the messages of some topics, with a memory of the last ones for readers that come back.

    Subscription ──▶ ring of the last 1,000 ──▶ readers, each at its place
                                              └ `Last-Event-ID` finds the place again, or the reader is told that there is a gap

Source: docs/http.md, "Events"; HTML Living Standard, section 9.2.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any, Final, NamedTuple

from cluster.access.tenants.names import TenantNames
from gateway.http.bodies import shown, topic_of
from gateway.http.tenants import inward
from pixiu.client.client import Client
from pixiu.client.messages.message import Message
from pixiu.errors import PixiuError

MAX_KEPT: Final = 1000
MAX_KEPT_BYTES: Final = 1 << 20
"""Events that a stream remembers; a reader that is further behind misses some, and is told."""
GAP: Final = 'event: gap\ndata: {"reason": "messages are missing here"}\n\n'
MAX_TOPICS: Final = 100


class Event(NamedTuple):
    """One event, as it is sent."""

    id: str
    text: bytes


class EventRing:
    """The last events, each with a number. Pure."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._bytes = 0
        self.first = 0
        """Number of the oldest one."""

    @property
    def next(self) -> int:
        """Number of the event that comes next."""
        return self.first + len(self._events)

    def put(self, event: Event) -> None:
        """Add an event; the oldest ones make way."""
        self._events.append(event)
        self._bytes += len(event.text)
        while len(self._events) > MAX_KEPT or (self._bytes > MAX_KEPT_BYTES and len(self._events) > 1):
            self._bytes -= len(self._events.popleft().text)
            self.first += 1

    def after(self, last: str) -> int | None:
        """Number of the event after the one with this ID; None: it is not remembered."""
        for back, event in enumerate(reversed(self._events)):
            if event.id == last:
                return self.next - back
        return None

    def since(self, number: int, most: int) -> list[Event]:
        """Events from a number on."""
        start = max(number - self.first, 0)
        return [self._events[at] for at in range(start, min(start + most, len(self._events)))]


class EventStream:
    """The events of one set of topics for one login: a receiver of `gateway.http.logins`."""

    def __init__(self, client: Client, uin: int, topics: frozenset[str], tenant: TenantNames | None = None) -> None:
        self.ring = EventRing()
        self._tenant = tenant
        self.error: PixiuError | None = None
        found = [topic_of(name) for name in sorted(topics)]
        self._subscription = client.subscribe(
            rooms=[room for room, _, _ in found if room],
            topics=[name for _, name, _ in found if name],
            chat=any(user for _, _, user in found),
            on_gap=lambda _reason: self._put(Event("", GAP.encode())),
            on_dropped=lambda _number: self._put(Event("", GAP.encode())),
        )
        self._task: asyncio.Task[None] | None = None
        self._more = asyncio.Event()

    @property
    def failed(self) -> bool:
        """True once the subscription has ended."""
        return self.error is not None

    async def open(self) -> None:
        """Join. Raises `PixiuError`."""
        try:
            await self._subscription.__aenter__()
        except BaseException:
            await self._subscription.close()
            raise
        self._task = asyncio.get_running_loop().create_task(self._run(), name="api-events")

    async def close(self) -> None:
        """Leave."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._subscription.close()

    async def more(self) -> None:
        """Wait for events, or the end."""
        await self._more.wait()

    def _put(self, event: Event) -> None:
        self.ring.put(event)
        self._wake()

    def _wake(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def _run(self) -> None:
        try:
            async for message in self._subscription:
                self._put(event_of(message, self._tenant))
        except PixiuError as error:
            self.error = error
        finally:
            self._wake()


def event_of(message: Message, tenant: TenantNames | None = None) -> Event:
    """Event of a message, in the names of a tenant."""
    fields = inward(tenant, fields_of(message))
    number = fields["id"]
    return Event(number, f"id: {number}\nevent: message\ndata: {json.dumps(fields)}\n\n".encode())


def fields_of(message: Message) -> dict[str, Any]:
    """A message in JSON."""
    return {
        "id": f"{message.message_id:016x}",
        "topic": message.destination,
        "sender": message.sender,
        "sent_at_ms": message.sent_at_ms,
        "type": message.type,
        "headers": dict(message.headers),
        **shown(message.payload),
    }
