"""Login tickets in gateways' reports: a relay takes a gateway's word that a user is at it only with one. Pure.

Reports that come later by other ways (from peers, by snapshots, from the relay's database) were checked by the replica that took
them first. No connection counts for longer than a ticket can last, whatever its gateway says.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cluster.membership.map.updates import ENTRY, VALUE, Update
from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, TICKET_BYTES, signer
from cluster.wire.v1 import control_pb2

CONNECT_TIME_SHIFT: Final = 3
"""Flags below the connect time in a device's value: see `cluster.membership.map.devices`."""
MS_SHIFT: Final = 16
"""Bits below the milliseconds of a connect time: see `gateway.membership.hybrid_clock`."""
LOOK_S: Final = 60.0
"""Interval at which the oldest connect time that counts moves on, seconds."""


class LoginProofs:
    """Checks the reports of gateways.

    Args:
        keys: returns the current keys of tickets.
        unix_s: Unix seconds.
    """

    def __init__(self, keys: Callable[[], tuple[bytes, ...]], unix_s: Callable[[], float]) -> None:
        self._keys, self._unix_s = keys, unix_s
        self._look_at = 0.0

    def proven(self, run: int, messages: list[Update]) -> list[Update]:
        """The messages of a gateway's run that may be taken: departures, and connections of users with a ticket."""
        keys, now = self._keys(), self._unix_s()
        return [
            message._replace(ticket=b"") if message.ticket else message
            for message in messages
            if not message.login or self._is_proven(keys, message.ticket, message.group, run, message.value, now)
        ]

    def proven_page(self, run: int, page: control_pb2.ListingPage) -> control_pb2.ListingPage | None:
        """A page of a gateway's run with the entries that may be taken; None if that is all of it, or it is malformed.

        An entry that is left out counts as gone, as one that the gateway does not list.
        """
        count = len(page.entries) // ENTRY.size
        if len(page.entries) % ENTRY.size or (page.values and len(page.values) != count * VALUE.size):
            return None
        keys, now = self._keys(), self._unix_s()
        tickets = page.tickets if len(page.tickets) == count * TICKET_BYTES else bytes(count * TICKET_BYTES)
        values = page.values or bytes(count * VALUE.size)
        good = [
            index
            for index, (uin, _, _) in enumerate(ENTRY.iter_unpack(page.entries))
            if self._is_proven(
                keys,
                tickets[index * TICKET_BYTES : (index + 1) * TICKET_BYTES],
                uin,
                run,
                VALUE.unpack_from(values, index * VALUE.size)[0],
                now,
            )
        ]
        if len(good) == count:
            return None
        found = control_pb2.ListingPage()
        found.CopyFrom(page)
        found.entries = b"".join([page.entries[index * ENTRY.size : (index + 1) * ENTRY.size] for index in good])
        found.values = b"".join([values[index * VALUE.size : (index + 1) * VALUE.size] for index in good]) if page.values else b""
        return found

    def oldest(self, now: float) -> int | None:
        """The oldest connect time that counts, if it is time to move it on; `now`: monotonic seconds."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        return max(int(self._unix_s()) - MAX_TICKET_S - 2 * GRACE_S, 0) * 1000 << MS_SHIFT

    @staticmethod
    def _is_proven(keys: tuple[bytes, ...], ticket: bytes, uin: int, run: int, value: int, now: float) -> bool:
        # A connect time in the future would let the connection count for longer.
        connected_s = (value >> CONNECT_TIME_SHIFT >> MS_SHIFT) / 1000
        return connected_s <= now + GRACE_S and signer(keys, ticket, uin, run, now) is not None
