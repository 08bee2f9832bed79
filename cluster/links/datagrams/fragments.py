"""Items larger than a datagram, cut into fragments that are sent in one datagram each.

    offset  type  field                      The head's type gives the kind of item, its count the number of fragments.
    0       u16   index of the fragment      Each fragment has its own sequence, one after the other, so
    2             its bytes                  sequence - index identifies the item.

A lost fragment loses the item: its sequence stays missing, so the sender's parcel settles as not handled. When an item is given up
here its further fragments are refused, to the same end, because those that arrived are acknowledged already.

Source: docs/links.md, "Sizes".
"""

from __future__ import annotations

from typing import Final

from cluster.links.datagrams.head import DatagramRefusal
from pixiu.ids import EndpointID

MAX_FRAGMENTS: Final = 16
"""Largest number of fragments; larger items go by stream. At 1 % loss, 15 % of items of 16 fragments are lost."""
INDEX_SIZE: Final = 2
MAX_HELD_BYTES: Final = 16 << 20
"""Bytes of unfinished items of all senders together; beyond this the oldest are given up."""
HELD_COST_BYTES: Final = 512
"""Bytes that an unfinished item counts in addition to its own."""
HELD_S: Final = 3.0
"""Time after which an unfinished item is given up, as its sender has done by then, seconds. Items given up are remembered as
long."""
MAX_GIVEN_UP: Final = 16_384
"""Items that are remembered as given up. Policy: the oldest are forgotten."""


def cut(item: bytes, payload: int) -> list[bytes]:
    """Cut an item into the bodies of its datagrams, each at most `payload` bytes."""
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
    """The unfinished items of all senders, bounded in bytes and in time."""

    def __init__(self) -> None:
        self._items: dict[tuple[EndpointID, int, int], _Unfinished] = {}
        """Items by sender, type, and sequence of the first fragment; oldest first."""
        self._held = 0
        self.given_up = 0
        """Number of items given up."""
        self._given_up: dict[tuple[EndpointID, int, int], float] = {}
        """Time at which each item was given up, in this order."""

    def take(self, sender: EndpointID, type_: int, sequence: int, count: int, body: bytes, now: float) -> bytes | str | None:
        """Take a fragment that arrives for the first time. Returns the whole item if it was the last one missing, None if more are
        missing, and a `DatagramRefusal` if it is malformed, does not match the others, or its item was given up."""
        index = int.from_bytes(body[:INDEX_SIZE], "little")
        if not 2 <= count <= MAX_FRAGMENTS or index >= count or len(body) <= INDEX_SIZE or sequence <= index:
            return DatagramRefusal.MALFORMED_FRAGMENT
        key = sender, type_, sequence - index
        found = self._items.get(key)
        if found is None:
            if now - self._given_up.get(key, -HELD_S) < HELD_S:
                return DatagramRefusal.LATE_FRAGMENT
            self._bound(now)
            found = self._items[key] = _Unfinished(count, now)
            self._held += HELD_COST_BYTES
        elif len(found.parts) != count:
            return DatagramRefusal.MALFORMED_FRAGMENT
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
