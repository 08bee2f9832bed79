"""Sending many messages to one room, topic or user without waiting for each one.

    async with px.room(42).writer() as writer:
        for payload in payloads:
            await writer.send(payload)              # waits only while the client's queue is full
                                                    # the end waits until all are accepted, and raises the first failure
Source: docs/sdk.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Unpack

from pixiu.client.messages.drafts import Draft
from pixiu.client.messages.send_options import SendOptions
from pixiu.client.send.base_writer import BaseWriter
from pixiu.client.send.streams import Receipt


class Writer(BaseWriter[Receipt]):
    """Sends to one destination with backpressure: `async with px.room(42).writer() as writer: await writer.send(b"…")`.

    Args:
        draft: checks a message.
        submit: queues it, waiting for space.
    """

    def __init__(self, draft: Callable[..., Draft], submit: Callable[[Draft], Awaitable[Receipt]]) -> None:
        super().__init__()
        self._draft = draft
        self._submit = submit

    async def send(self, payload: bytes, **options: Unpack[SendOptions]) -> Receipt:
        """Queue a message, waiting while the queue is full (`queue_records`, `queue_bytes`). Messages stay in order.

        Raises the errors of `Destination.send_soon` except `Overloaded`.
        """
        return self._note(await self._submit(self._draft(payload, **options)))
