"""Reports of relays that no device took a message, kept until the messages' parcels settle. Pure.

A relay sends its notice before it acknowledges the datagram that brought the messages, so the notice is here first; if the network
loses a notice, its messages count as accepted.

Source: docs/promises.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pixiu.wire.record import KEY_AT, SNOWFLAKE_AT

MAX_NOTICED: Final = 100_000
"""Messages remembered as not taken. Policy: the oldest is forgotten, and counts as accepted."""


class OfflineNotices:
    """SnowflakeIDs of messages to offline users, with the number of times each was named: a signal's copies share one."""

    def __init__(self) -> None:
        self.ids: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Iterable[int]) -> None:
        """Remember the SnowflakeIDs of a relay's notice."""
        for number in ids:
            self.ids[number] = self.ids.get(number, 0) + 1
        while len(self.ids) > MAX_NOTICED:
            del self.ids[next(iter(self.ids))]

    def take(self, records: Iterable[bytes]) -> list[bytes]:
        """Take a settled parcel's records that a notice named; they are forgotten here."""
        found: list[bytes] = []
        for record in records:
            number = int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")
            times = self.ids.pop(number, 0)
            if times:
                found.append(record)
            if times > 1:
                self.ids[number] = times - 1
        return found
