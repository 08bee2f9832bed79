"""Items above a datagram's size, cut into fragments that each go in a datagram of their own.

    offset  type  field                      The head's type says what the item is, its count how many fragments the item
    0       u16   index of the fragment      has; each fragment has a sequence of its own, one after the other, so that
    2             its bytes                  sequence - index names the item.

A fragment that is lost loses the item: its sequence stays missing, so that the sender's parcel settles as not handled. Of an item
that is given up here the further fragments are refused, to the same end: those that came are acknowledged already.

Source: docs/links.md, "Sizes".
"""

from __future__ import annotations

from typing import Final

from cluster.links.head import Refusal
from pixiu.ids import EndpointID

MAX_FRAGMENTS: Final = 16
"""Above so many datagrams an item goes by stream: at 1 % loss 15 % of items of 16 fragments are lost."""
INDEX_SIZE: Final = 2
MAX_HELD_BYTES: Final = 16 << 20
"""Of unfinished items of all senders together; above it the oldest are given up."""
HELD_COST_BYTES: Final = 512
"""What an unfinished item counts besides its bytes."""
HELD_S: Final = 3.0
"""An item that is unfinished for so long is given up: its sender has given it up too. What was given up is remembered as long."""
MAX_GIVEN_UP: Final = 16_384
"""Items that were given up and are remembered. Policy: the oldest are forgotten."""


def cut(item: bytes, payload: int) -> list[bytes]:
    """The bodies of the datagrams that carry an item, each at most `payload` bytes."""
    step = payload - INDEX_SIZE
    starts = range(0, len(item), step)
    return [index.to_bytes(INDEX_SIZE, "little") + item[at : at + step] for index, at in enumerate(starts)]


class _Unfinished:
    __slots__ = ("at", "cost", "missing", "parts")

    def __init__(self, count: int, now: float) -> None:
        self.parts = [b""] * count
        self.missing = count
        self.cost = HELD_COST_BYTES
        self.at = now


class Reassembly:
    """The unfinished items of all senders, a bounded number of bytes and for a bounded time."""

    def __init__(self) -> None:
        self._items: dict[tuple[EndpointID, int, int], _Unfinished] = {}
        """By sender, type, and the sequence of the first fragment; the oldest first."""
        self._held = 0
        self.given_up = 0
        """Items that were given up."""
        self._given_up: dict[tuple[EndpointID, int, int], float] = {}
        """When each was, in that order."""

    def take(self, sender: EndpointID, type_: int, sequence: int, count: int, body: bytes, now: float) -> bytes | str | None:
        """A fragment came, for the first time. Returns the whole item when it was the last one that was missing, None when more are
        missing, and a `Refusal` when it is malformed, does not go with the others, or these were given up."""
        index = int.from_bytes(body[:INDEX_SIZE], "little")
        if not 2 <= count <= MAX_FRAGMENTS or index >= count or len(body) <= INDEX_SIZE or sequence <= index:
            return Refusal.MALFORMED_FRAGMENT
        key = sender, type_, sequence - index
        found = self._items.get(key)
        if found is None:
            if now - self._given_up.get(key, -HELD_S) < HELD_S:
                return Refusal.LATE_FRAGMENT
            self._bound(now)
            found = self._items[key] = _Unfinished(count, now)
            self._held += HELD_COST_BYTES
        elif len(found.parts) != count:
            return Refusal.MALFORMED_FRAGMENT
        found.parts[index] = body[INDEX_SIZE:]
        found.missing -= 1
        found.cost += len(body)
        self._held += len(body)
        if found.missing:
            return None
        del self._items[key]
        self._held -= found.cost
        return b"".join(found.parts)

    def _bound(self, now: float) -> None:
        items = self._items
        while items:
            key = next(iter(items))
            oldest = items[key]
            if self._held <= MAX_HELD_BYTES and now - oldest.at < HELD_S:
                return
            del items[key]
            self._held -= oldest.cost
            self.given_up += 1
            self._remember(key, now)

    def _remember(self, key: tuple[EndpointID, int, int], now: float) -> None:
        gone = self._given_up
        gone.pop(key, None)
        gone[key] = now
        while len(gone) > MAX_GIVEN_UP or now - next(iter(gone.values())) >= HELD_S:
            del gone[next(iter(gone))]
