"""Requests and replies: an ordinary message whose headers name the room for the reply, and a message that is sent there.

    request(payload) ──▶ room 42, headers reply-to: room/9…, request-id: 3f… ──▶ a subscriber: message.reply(payload)
         ▲                                                                                  │
         └────────── the client's own room 9… ◀── headers request-id: 3f… ──────────────────┘

Source: docs/protocol.md, "Headers"; docs/sdk.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Final

from pixiu.client.messages.message import Message
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.receive.subscriber import Subscription
from pixiu.errors import InvalidArgument, OutcomeUnknown, Overloaded, PixiuError
from pixiu.placement.topics import ROOM_PREFIX
from pixiu.wire.headers import decode_headers

REPLY_TO: Final = "reply-to"
"""The header that names the room for the reply, as an MQTT topic."""
REQUEST_ID: Final = "request-id"
"""The header that identifies a request; the reply repeats it."""
MAX_REQUESTS: Final = 10_000
"""Requests of a client that wait for their reply. Policy: more are refused as `Overloaded`."""
REPLY_ROOMS: Final = 1 << 61
"""Upper limit of reply rooms: a client takes a random room from 1 to below this number."""


def reply_room() -> int:
    """Choose a room for the replies to one client."""
    return secrets.randbelow(REPLY_ROOMS - 1) + 1


def request_options(room: int, identity: str, options: SendOptions) -> SendOptions:
    """Make the options of a request: its headers are added to those of the application. Raises `InvalidArgument`."""
    if options.get("extension"):
        raise InvalidArgument("a request has headers of its own: give headers=, not extension=")
    headers = dict(options.get("headers") or {})
    if REPLY_TO in headers or REQUEST_ID in headers:
        raise InvalidArgument(f"the headers {REPLY_TO!r} and {REQUEST_ID!r} are a request's own")
    found = options.copy()
    found["headers"] = {REPLY_TO: f"{ROOM_PREFIX}{room}", REQUEST_ID: identity, **headers}
    return found


def where_to_reply(message: Message) -> tuple[int, str]:
    """Find the room for the reply to a message, and the request's ID. Raises `InvalidArgument` if the message asks for none."""
    headers = decode_headers(message.extension)
    where, identity = headers.get(REPLY_TO, ""), headers.get(REQUEST_ID, "")
    number = where.removeprefix(ROOM_PREFIX)
    if not identity or number == where or not (number.isascii() and number.isdecimal()):
        raise InvalidArgument("the message asks for no reply: it is not a request")
    return int(number), identity


def reply_options(identity: str, options: SendOptions) -> SendOptions:
    """Make the options of a reply: its header is added to those of the application. Raises `InvalidArgument`."""
    if options.get("extension"):
        raise InvalidArgument("a reply has a header of its own: give headers=, not extension=")
    found = options.copy()
    found["headers"] = {**(options.get("headers") or {}), REQUEST_ID: identity}
    return found


class Replies:
    """The replies to one client's requests: they are sent to a room of its own, which it joins with the first request.

    Args:
        subscribe: subscribes to a room.
    """

    def __init__(self, subscribe: Callable[[int], Subscription]) -> None:
        self.room = reply_room()
        self._subscription = subscribe(self.room)
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._task = asyncio.get_running_loop().create_task(self._read(), name="pixiu-replies")

    @property
    def failed(self) -> bool:
        """True if replies no longer arrive: make another object."""
        return self._task.done()

    async def ready(self, timeout_s: float) -> None:
        """Wait until replies can arrive. Raises the errors of `Subscription.join`."""
        await self._subscription.ready(timeout_s=timeout_s)

    @contextlib.contextmanager
    def expect(self, identity: str) -> Iterator[asyncio.Future[Message]]:
        """Expect the reply to a request while the block runs. Raises `Overloaded`."""
        if len(self._waiting) >= MAX_REQUESTS:
            raise Overloaded(f"{MAX_REQUESTS} requests wait for their replies")
        future = self._waiting[identity] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._waiting[identity]

    async def close(self) -> None:
        """Stop waiting for replies."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end(OutcomeUnknown("the client was closed before the reply came"))

    async def _read(self) -> None:
        try:
            async for message in self._subscription:
                future = self._waiting.get(decode_headers(message.extension).get(REQUEST_ID, ""))
                if future is not None and not future.done() and message.room == self.room:
                    future.set_result(message)
        except PixiuError as error:
            self._end(error)

    def _end(self, error: PixiuError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
