"""The bookkeeping of a load: what was sent, confirmed and received, and what is owed to whom. Pure.

Every message is owed to the members of its room at the time of sending: users whose join was confirmed, and whose leave had not
begun. A user's chat or mail is a room of which the user alone is a member. A message's missing members are one integer, a bit for
each member the room ever had.

    sent ──► open (somebody is still owed it) ──► complete
                └──► given up: overdue, or refused (nobody waits for it any longer; a late delivery still counts)

Source: docs/promises.md, docs/operations.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple

import xxhash

from pixiu.ids import UIN, RoomID
from tools.load.histogram import Histogram
from tools.load.payload import HEAD, HEAD_BYTES, encode_payload

EARLY_US: Final = 5_000_000
"""Time between the sending of a message and the beginning of a join in which the message may still reach the user, microseconds: it
was on its way."""
MAX_EXAMPLES: Final = 5
NOT_YET: Final = -1


class Judgement(Enum):
    """Judgement of one delivery."""

    DELIVERED = "delivered"
    REPEATED = "repeated"
    """A repeat of the same message to the same subscriber."""
    AGAIN = "again"
    """The same, marked as redelivered: the acknowledgement had not reached the cluster."""
    OUT_OF_ORDER = "out_of_order"
    """Owed and new, but after a later message of the same sender in the same room."""
    ALIEN = "alien"
    """To a user who was not a member when it was sent, or in another room."""
    DAMAGED = "damaged"
    """Its text, number or stamp differs from what was sent."""
    EARLY = "early"
    """It was on its way when the subscriber joined: neither owed nor wrong."""
    FOREIGN = "foreign"
    """Of another load: it was in the inbox before."""


class Missing(NamedTuple):
    """A delivery that never came."""

    number: int
    room: RoomID
    uin: UIN
    sender: UIN
    sent_us: int
    acknowledged_us: int
    """Time at which its acceptance was reported to the publisher, microseconds; `NOT_YET` if never."""
    refused: bool
    """True if it was reported to the publisher as not delivered."""
    whole: bool
    """True if nobody got this message at all."""


class _Room:
    """One room: a bit for everybody who was ever a member, and the owed deliveries."""

    __slots__ = ("bits", "early", "joined_us", "last", "mask", "missing", "open", "uins")

    def __init__(self) -> None:
        self.bits: dict[int, int] = {}
        self.uins: list[UIN] = []
        self.mask = 0
        self.joined_us: dict[int, int] = {}
        self.early: set[tuple[int, int]] = set()
        self.open: dict[int, int] = {}
        """Message number → bits of the members to whom it is still owed."""
        self.missing: dict[int, int] = {}
        """`open` for messages that were given up."""
        self.last: dict[int, dict[int, int]] = {}
        """Subscriber → sender → the highest number that arrived."""

    def bit(self, uin: UIN) -> int:
        found = self.bits.get(uin)
        if found is None:
            found = self.bits[uin] = 1 << len(self.uins)
            self.uins.append(uin)
        return found


class Ledger:
    """Counts one load. `now_us` is always microseconds of one monotonic clock.

    `run`: bytes before each text, by which messages of other loads are recognized; empty if there are none.

    Memory: about 150 bytes a message, and 100 bytes for each pair of a present subscriber and a sender it heard.
    """

    def __init__(self, run: bytes = b"") -> None:
        self._run = run
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
        self.outcomes: Counter[Judgement] = Counter()
        self.refusals: Counter[str] = Counter()
        self.expected = 0
        self.examples: list[str] = []
        """Examples of deliveries that nobody should have got, the first few."""
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
    def confirmed(self) -> int:
        """Messages whose acceptance was reported to the publisher."""
        return self.sent - self.unacknowledged - len(self._refused)

    @property
    def delivered(self) -> int:
        """Number of owed deliveries that arrived, in order or not."""
        return self.outcomes[Judgement.DELIVERED] + self.outcomes[Judgement.OUT_OF_ORDER]

    def joining(self, room: RoomID, uin: UIN, now_us: int) -> None:
        """Note that a user's join begins; messages on their way may reach the user."""
        place = self._rooms.setdefault(room, _Room())
        place.bit(uin)
        place.joined_us[uin] = now_us

    def joined(self, room: RoomID, uin: UIN) -> None:
        """Note that the join is confirmed: from now on every message of the room is owed to the user."""
        place = self._rooms[room]
        place.mask |= place.bit(uin)

    def leaving(self, room: RoomID, uin: UIN) -> None:
        """Note that the leave begins (or the connection broke): nothing sent from now on is owed to the user."""
        place = self._rooms[room]
        place.mask &= ~place.bit(uin)
        place.joined_us.pop(uin, None)
        place.last.pop(uin, None)

    def members(self, room: RoomID) -> int:
        """Number of users to whom a message would be owed now."""
        place = self._rooms.get(room)
        return place.mask.bit_count() if place else 0

    def send(self, number: int, room: RoomID, sender: UIN, text: bytes, now_us: int) -> bytes:
        """Note that a message is handed to a publisher. Returns its payload."""
        text = self._run + text
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
        return encode_payload(number, now_us, text)

    def acknowledged(self, number: int, now_us: int) -> None:
        """Note that the message's acceptance was reported to the publisher."""
        position = self._position[number]
        if self._acknowledged_us[position] == NOT_YET and number not in self._refused:
            self._acknowledged_us[position] = now_us
            self.unacknowledged -= 1

    def refused(self, number: int, code: str) -> None:
        """Note that the message was reported to the publisher, with an error's code, as possibly lost."""
        if self._acknowledged_us[self._position[number]] == NOT_YET and number not in self._refused:
            self._refused[number] = code
            self.refusals[code] += 1
            self.unacknowledged -= 1
            self._give_up(self._rooms[self._room_of[self._position[number]]], number)

    def deliver(self, room: RoomID, uin: UIN, payload: bytes, now_us: int, *, again: bool = False) -> tuple[Judgement, bool]:
        """Judge one delivery to one subscriber; returns the outcome, and True if it completed its message.

        `again`: it is marked as redelivered.
        """
        outcome, done = self._judge(room, uin, payload, now_us)
        if again and outcome is Judgement.REPEATED:
            outcome = Judgement.AGAIN
        self.outcomes[outcome] += 1
        return outcome, done

    def arrived(self, number: int, room: RoomID, uin: UIN, now_us: int) -> Judgement:
        """Judge one delivery whose content was checked elsewhere; a number that was not sent counts as `FOREIGN`."""
        position = self._position.get(number)
        outcome = Judgement.FOREIGN if position is None else self._judge_sound(number, position, room, uin, now_us)[0]
        self.outcomes[outcome] += 1
        return outcome

    def _judge(self, room: RoomID, uin: UIN, payload: bytes, now_us: int) -> tuple[Judgement, bool]:
        head = HEAD_BYTES + len(self._run)
        if len(payload) < head or payload[HEAD_BYTES:head] != self._run:
            return (Judgement.FOREIGN if self._run else Judgement.DAMAGED), False
        number, stamp = HEAD.unpack_from(payload)
        position = self._position.get(number)
        if position is None or stamp != self._sent_us[position]:
            return Judgement.DAMAGED, False
        if xxhash.xxh3_64_intdigest(memoryview(payload)[HEAD_BYTES:]) != self._hash[position]:
            return Judgement.DAMAGED, False
        return self._judge_sound(number, position, room, uin, now_us)

    def _judge_sound(self, number: int, position: int, room: RoomID, uin: UIN, now_us: int) -> tuple[Judgement, bool]:
        """Judge a delivery whose content is what was sent."""
        stamp = self._sent_us[position]
        place = self._rooms.get(room)
        if place is None or self._room_of[position] != room:
            return Judgement.ALIEN, False
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
                return Judgement.ALIEN, False
            if (number, uin) in place.early:
                return Judgement.REPEATED, False
            place.early.add((number, uin))
            return Judgement.EARLY, False
        done = False
        owed = place.open.get(number)
        if owed is not None:
            if not owed & bit:
                return Judgement.REPEATED, False
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
                return Judgement.REPEATED, False
            place.missing[number] = late ^ bit
        self.latency_us.add(now_us - stamp)
        heard = place.last.setdefault(uin, {})
        sender = self._sender[position]
        if heard.get(sender, -1) > number:
            return Judgement.OUT_OF_ORDER, done
        heard[sender] = number
        return Judgement.DELIVERED, done

    def owed(self, room: RoomID, uin: UIN) -> int:
        """Number of open messages of a room that a user still waits for; those given up do not count."""
        place = self._rooms.get(room)
        bit = place.bits.get(uin, 0) if place else 0
        return sum(1 for missing in place.open.values() if missing & bit) if place and bit else 0

    def expire(self, sent_before_us: int) -> int:
        """Stop waiting for messages sent before a time; late deliveries still count. Returns their number."""
        moved = 0
        for place in self._rooms.values():
            while place.open:
                number = next(iter(place.open))
                if self._sent_us[self._position[number]] >= sent_before_us:
                    break
                self._give_up(place, number)
                moved += 1
        return moved

    def _give_up(self, place: _Room, number: int) -> None:
        missing = place.open.pop(number, 0)
        if missing:
            place.missing[number] = missing
            self.open_deliveries -= missing.bit_count()
            self.open_messages -= 1

    def missing(self) -> Iterator[Missing]:
        """Iterate over every owed delivery that has not arrived."""
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
        """Number of owed deliveries that have not arrived."""
        return self.expected - self.delivered
