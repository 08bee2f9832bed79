"""Capacity for QoS 1 messages of a gateway's clients: those that find none wait, and get it in turn.

Source: docs/architecture.md, "The gateway's edge".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gateway import events as ev
from pixiu.placement.big_rooms import VRooms

MAX_BYTES: Final = 8 << 20
MAX_MESSAGES: Final = 100_000
"""Limits of what is not resolved, for big rooms and for all others each. Policy: clients with more are not read from."""


class _Capacity:
    """Space for unresolved messages. Clients that find none get it in turn."""

    def __init__(self) -> None:
        self._bytes = self._messages = 0
        self._waiting: dict[Callable[[], None], None] = {}
        """Callbacks for when there is space, in that order; at most one for each client."""
        self._letting_in = False

    def take(self, size: int, when_space: Callable[[], None]) -> bool:
        """Take space for a message; one that is alone always has it."""
        if self._messages and (self._messages >= MAX_MESSAGES or self._bytes + size > MAX_BYTES):
            self._waiting[when_space] = None
            return False
        self._messages += 1
        self._bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Give back the space of a message."""
        self._messages -= 1
        self._bytes -= size
        if self._waiting and not self._letting_in:
            self._letting_in = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def forget(self, when_space: Callable[[], None]) -> None:
        """Forget a client that waits."""
        self._waiting.pop(when_space, None)

    def _let_in(self) -> None:
        """Call each waiting client once; one that finds no space goes to the end."""
        self._letting_in = False
        for when_space in list(self._waiting):
            if self._waiting.pop(when_space, False) is None:
                before = len(self._waiting)
                when_space()
                if len(self._waiting) > before:
                    return  # it found no space again: nor would those after it


class ConfirmedPublishers:
    """Gives clients' messages of QoS 1 to the gateway's core by `step`, and their outcomes to the clients."""

    def __init__(self, vrooms: VRooms, step: Callable[[ev.Event], None]) -> None:
        self._vrooms, self._has_big, self._step = vrooms, vrooms.low < vrooms.high, step
        self._ordinary, self._big = _Capacity(), _Capacity()

    def admit(self, key: int, size: int, when_space: Callable[[], None]) -> bool:
        """Take space for a record of `size` bytes that is published at once. False: there is none; `when_space` is called when
        there may be some."""
        capacity = self._big if self._has_big and self._vrooms.is_big(key) else self._ordinary
        return capacity.take(size, when_space)

    def publish(self, messages: list[ev.Confirmable]) -> None:
        """Send messages; `resolved` of each is called once."""
        self._step(ev.PublishConfirmed(messages))

    def resolved(self, effect: ev.Resolved) -> None:
        """Pass outcomes on."""
        for message, error in effect.outcomes:
            capacity = self._big if self._has_big and self._vrooms.is_big(message.key) else self._ordinary
            capacity.give_back(len(message.record))
            message.resolved(error)

    def forget(self, when_space: Callable[[], None]) -> None:
        """Forget a client that waits for space."""
        self._ordinary.forget(when_space)
        self._big.forget(when_space)
