"""What every subscriber is owed, and what it got: the bookkeeping of a replay. Pure.

Every message is owed to those who were members of its room when it was sent: whose join was confirmed, and whose
leave had not begun. A message's missing members are one integer, a bit for each member the room ever had.

    sent ──► open (somebody is still owed it) ──► complete
                └──► overdue (nobody waits for it any longer; a late delivery still counts)

Source: docs/promises.md, docs/operations.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

import xxhash

from pixiu.ids import UIN, RoomID
from pixiu.tools.load.histogram import Histogram
from pixiu.tools.load.payload import HEAD, HEAD_BYTES

EARLY_US: Final = 5_000_000
"""A message may reach somebody whose join began within so many microseconds after it was sent: it was on its way."""
MAX_EXAMPLES: Final = 5
NOT_YET: Final = -1


class Outcome(Enum):
    """What one delivery is."""

    DELIVERED = "delivered"
    REPEATED = "repeated"
    """The same message to the same subscriber once more."""
    OUT_OF_ORDER = "out_of_order"
    """Owed and new, but after a later message of the same sender in the same room."""
    ALIEN = "alien"
    """To somebody who was not a member when it was sent, or in another room."""
    DAMAGED = "damaged"
    """Its text, number or stamp is not what was sent."""
    EARLY = "early"
    """It was on its way when the subscriber joined: neither owed nor wrong."""


class Missing(NamedTuple):
    """A delivery that never came."""

    number: int
    room: RoomID
    uin: UIN
    sender: UIN
    sent_us: int
    acknowledged_us: int
    """When the publisher was told of its acceptance, microseconds; `NOT_YET` if never."""
    refused: bool
    """The publisher was told that it would not be delivered."""
    whole: bool
    """Nobody got this message at all."""


class _Room:
    """One room: a bit for everybody who was ever a member, and what is owed."""

    __slots__ = ("bits", "early", "joined_us", "last", "mask", "missing", "open", "uins")

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        self.uins: list[UIN] = []
        self.mask = 0
        self.joined_us: dict[int, int] = {}
        self.early: set[tuple[int, int]] = set()
        self.open: dict[int, int] = {}
        """Message number → bits of those who are still owed it."""
        self.missing: dict[int, int] = {}
        """The same for overdue messages."""
        self.last: dict[int, dict[int, int]] = {}
        """Subscriber → sender → the highest number that arrived."""

    def bit(self, uin: UIN) -> int:
        found = self.bits.get(uin)
        if found is None:
            found = self.bits[uin] = 1 << len(self.uins)
            self.uins.append(uin)
        return found


class Ledger:
    """Counts one replay. `now_us` is always microseconds of one monotonic clock.

    Memory: about 150 bytes a message, and 100 bytes for each pair of a present subscriber and a sender it heard.
    """

    def __init__(self) -> None:
        self._rooms: dict[int, _Room] = {}
        self._room_of: list[int] = []
        self._sender: list[int] = []
        self._sent_us: list[int] = []
        self._hash: list[int] = []
        self._expected: list[int] = []
        self._acknowledged_us: list[int] = []
        self._position: dict[int, int] = {}
        """Message number → index in the lists above (rooms run at their own pace)."""
        self._refused: dict[int, str] = {}
        self.latency_us = Histogram()
        self.outcomes: Counter[Outcome] = Counter()
        self.refusals: Counter[str] = Counter()
        self.expected = 0
        self.examples: list[str] = []
        """Of deliveries that nobody should have got, the first few."""
        self.open_messages = 0
        self.open_deliveries = 0
        """Deliveries of open messages that are still owed."""
        self.unacknowledged = 0
        """Messages whose acceptance or refusal is still awaited."""

    @property
    def sent(self) -> int:
        """Messages sent so far."""
        return len(self._sent_us)

    @property
    def delivered(self) -> int:
        """Owed deliveries that came, in order or not."""
        return self.outcomes[Outcome.DELIVERED] + self.outcomes[Outcome.OUT_OF_ORDER]

    def joining(self, room: RoomID, uin: UIN, now_us: int) -> None:
        """A user's join begins; what is on its way may reach it."""
        place = self._rooms.setdefault(room, _Room())
        place.bit(uin)
        place.joined_us[uin] = now_us

    def joined(self, room: RoomID, uin: UIN) -> None:
        """The join is confirmed: from now on every message of the room is owed to the user."""
        place = self._rooms[room]
        place.mask |= place.bit(uin)

    def leaving(self, room: RoomID, uin: UIN) -> None:
        """The leave begins (or the connection broke): nothing sent from now on is owed to the user."""
        place = self._rooms[room]
        place.mask &= ~place.bit(uin)
        place.joined_us.pop(uin, None)
        place.last.pop(uin, None)

    def members(self, room: RoomID) -> int:
        """How many users a message would be owed to now."""
        place = self._rooms.get(room)
        return place.mask.bit_count() if place else 0

    def send(self, number: int, room: RoomID, sender: UIN, text: bytes, now_us: int) -> int:
        """A message is handed to a publisher. Returns to how many it is owed."""
        place = self._rooms.setdefault(room, _Room())
        self._position[number] = len(self._sent_us)
        self._room_of.append(room)
        self._sender.append(sender)
        self._sent_us.append(now_us)
        self._hash.append(xxhash.xxh3_64_intdigest(text))
        self._expected.append(place.mask)
        self._acknowledged_us.append(NOT_YET)
        self.unacknowledged += 1
        owed = place.mask.bit_count()
        self.expected += owed
        if owed:
            place.open[number] = place.mask
            self.open_messages += 1
            self.open_deliveries += owed
        return owed

    def acknowledged(self, number: int, now_us: int) -> None:
        """The publisher was told that the message was accepted."""
        position = self._position[number]
        if self._acknowledged_us[position] == NOT_YET and number not in self._refused:
            self._acknowledged_us[position] = now_us
            self.unacknowledged -= 1

    def refused(self, number: int, code: str) -> None:
        """The publisher was told, with an error's code, that the message may be lost."""
        if self._acknowledged_us[self._position[number]] == NOT_YET and number not in self._refused:
            self._refused[number] = code
            self.refusals[code] += 1
            self.unacknowledged -= 1

    def deliver(self, room: RoomID, uin: UIN, payload: bytes, now_us: int) -> tuple[Outcome, bool]:
        """One delivery to one subscriber: what it is, and whether it completed its message."""
        outcome, done = self._judge(room, uin, payload, now_us)
        self.outcomes[outcome] += 1
        return outcome, done

    def _judge(self, room: RoomID, uin: UIN, payload: bytes, now_us: int) -> tuple[Outcome, bool]:
        if len(payload) < HEAD_BYTES:
            return Outcome.DAMAGED, False
        number, stamp = HEAD.unpack_from(payload)
        position = self._position.get(number)
        if position is None or stamp != self._sent_us[position]:
            return Outcome.DAMAGED, False
        if xxhash.xxh3_64_intdigest(memoryview(payload)[HEAD_BYTES:]) != self._hash[position]:
            return Outcome.DAMAGED, False
        place = self._rooms.get(room)
        if place is None or self._room_of[position] != room:
            return Outcome.ALIEN, False
        bit = place.bits.get(uin, 0)
        if not self._expected[position] & bit:
            joined_us = place.joined_us.get(uin)
            if joined_us is None or stamp < joined_us - EARLY_US:
                if len(self.examples) < MAX_EXAMPLES:
                    since = (
                        "had left" if joined_us is None else f"began to join {(joined_us - stamp) / 1e6:.1f} s after it was sent"
                    )
                    age_s = (now_us - stamp) / 1e6
                    self.examples.append(
                        f"message {number} came to {uin} in {room} {age_s:.1f} s after it was sent; this user {since}"
                    )
                return Outcome.ALIEN, False
            if (number, uin) in place.early:
                return Outcome.REPEATED, False
            place.early.add((number, uin))
            return Outcome.EARLY, False
        done = False
        owed = place.open.get(number)
        if owed is not None:
            if not owed & bit:
                return Outcome.REPEATED, False
            owed ^= bit
            self.open_deliveries -= 1
            if owed:
                place.open[number] = owed
            else:
                del place.open[number]
                self.open_messages -= 1
                done = True
        else:
            late = place.missing.get(number, 0)
            if not late & bit:
                return Outcome.REPEATED, False
            place.missing[number] = late ^ bit
        self.latency_us.add(now_us - stamp)
        heard = place.last.setdefault(uin, {})
        sender = self._sender[position]
        if heard.get(sender, -1) > number:
            return Outcome.OUT_OF_ORDER, done
        heard[sender] = number
        return Outcome.DELIVERED, done

    def owed(self, room: RoomID, uin: UIN) -> int:
        """How many open messages of a room a user still waits for; overdue ones do not count."""
        place = self._rooms.get(room)
        bit = place.bits.get(uin, 0) if place else 0
        return sum(1 for missing in place.open.values() if missing & bit) if place and bit else 0

    def expire(self, sent_before_us: int) -> int:
        """Nobody waits any longer for messages sent before a time; a late delivery still counts. Returns how many."""
        moved = 0
        for place in self._rooms.values():
            while place.open:
                number, missing = next(iter(place.open.items()))
                if self._sent_us[self._position[number]] >= sent_before_us:
                    break
                del place.open[number]
                place.missing[number] = missing
                self.open_deliveries -= missing.bit_count()
                moved += 1
        self.open_messages -= moved
        return moved

    def missing(self) -> Iterator[Missing]:
        """Every owed delivery that has not come."""
        for room, place in self._rooms.items():
            for table in (place.open, place.missing):
                for number, bits in table.items():
                    if bits:
                        yield from self._missing_of(RoomID(room), place, number, bits)

    def _missing_of(self, room: RoomID, place: _Room, number: int, bits: int) -> Iterator[Missing]:
        position = self._position[number]
        whole = bits == self._expected[position]
        while bits:
            lowest = bits & -bits
            bits ^= lowest
            yield Missing(
                number,
                room,
                place.uins[lowest.bit_length() - 1],
                UIN(self._sender[position]),
                self._sent_us[position],
                self._acknowledged_us[position],
                number in self._refused,
                whole,
            )

    @property
    def lost(self) -> int:
        """Owed deliveries that have not come."""
        return self.expected - self.delivered
