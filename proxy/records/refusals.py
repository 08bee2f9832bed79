"""Refusals of records, in words: why a proxy does not pass one on. Pure."""

from __future__ import annotations

from collections.abc import Set
from itertools import pairwise
from math import ceil
from typing import Any, Final

from pixiu import errors
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.record import CHAT, ROOM, SIGNAL, SIZE_FIELD, Flag, crc_ok, offsets
from proxy.publishers.permits import REFUSALS
from proxy.records.big_rooms import MAX_SWEEP_BYTES
from proxy.records.destinations import Destinations

OFFLINE = "the user has no device online that takes messages; nobody got it, and it is not kept"
STARTING: Final = "this proxy has just started and does not know the cluster yet; send it again"
STARTING_MS: Final = 200
"""Time after which a sender tries again, milliseconds."""
GONE_MEANWHILE = "its partition lost its last replica while it waited; `pixiu status` shows which are missing"
NOT_CONFIRMED = "a broker or relay did not confirm it: it may be lost; sending it again with the same ID is safe"
NO_RECEIPTS = "this cluster has no gateways of its own (cluster.router_root): send it through a proxy of the cluster that has them"
PUBLISHER_OVER_RATE = "this publisher sends faster than proxy.publisher_messages_per_s or publisher_bytes_per_s allow"
ROOM_OVER_RATE = "its room gets more than proxy.room_messages_per_s or room_bytes_per_s allow"
TOO_LARGE_FOR_BIG_ROOMS = f"a message to a big room has at most {MAX_SWEEP_BYTES} bytes; send a reference to the content instead"
BIG_ROOMS_BUSY = "too many messages wait for big rooms (proxy.big_room_vrooms_per_s)"


class Takes:
    """Kinds and sizes that a proxy takes, and reasons why a record has no target.

    Args:
        max_size: of a record, without its size field.
        vrooms: the cluster's big rooms.
        kinds: kinds that are taken: "room", "chat".
        brokers, relays: the replicas.
    """

    def __init__(
        self, max_size: int, vrooms: VRooms, kinds: Set[str], brokers: Destinations[Any], relays: Destinations[Any]
    ) -> None:  # fmt: skip
        self.max_size, self.kinds = max_size, kinds
        self._vrooms, self._brokers, self._relays = vrooms, brokers, relays

    def why_not(self, kind: int, flags: int, size: int, key: int) -> tuple[type[errors.PixiuError], str]:
        """Error and text for a record with this head."""
        if size > self.max_size:
            text = f"a record of {size + SIZE_FIELD} bytes is above the cluster's limit of {self.max_size + SIZE_FIELD}"
            return errors.RecordTooLarge, f"{text}; send a reference to the content instead"
        if self._vrooms.is_vroom(key):
            big = self._vrooms.shown(key)
            return (
                errors.InvalidArgument,
                f"{key} is the number of a VRoom, which nobody publishes to; publish to the big room {big}",
            )
        if not key:
            return errors.InvalidArgument, "0 is neither a RoomID (1 to 2^62-1) nor a UIN (1 to 2^63-1)"
        to_room = kind == ROOM or (kind == SIGNAL and bool(flags & Flag.TO_ROOM))
        if kind in REFUSALS:
            return errors.NotAllowed, REFUSALS[kind]
        if kind not in (ROOM, CHAT, SIGNAL):
            return errors.InvalidArgument, "this stream takes room messages, chat and signals; mail has its own, Mailer.Send"
        name = "room" if to_room else "chat"
        if name not in self.kinds:
            return errors.InvalidArgument, f"this proxy does not accept {name} messages (proxy.kinds); use another one"
        role, destinations = ("broker", self._brokers) if to_room else ("relay", self._relays)
        if not self._brokers.partitions:
            return errors.Unavailable, STARTING
        if not destinations.partitions:
            return errors.Unavailable, "this cluster has no relays: `pixiu up --relays 2` has them"
        partition = key % destinations.partitions
        return errors.Unavailable, f"no {role} of partition {partition} is running; `pixiu status` shows which are missing"


def later(text: str, wait_s: float) -> tuple[str, int]:
    """Text of a refusal, with its retry-after in milliseconds."""
    retry_ms = max(ceil(wait_s * 1000), 1)
    return f"{text}; try again in {retry_ms} ms", retry_ms


def first_damaged(data: bytes, count: int) -> int | None:
    """Index of the first record whose CRC does not match; None if all do, or if the batch's lengths are wrong."""
    found = offsets(data, 0, len(data), count)
    if found is None:
        return None
    return next((index for index, (start, end) in enumerate(pairwise(found)) if not crc_ok(data[start:end])), None)
