"""Selects the items of a link that go by stream, so that order survives a change of carrier without delaying all items. Pure.

    an order's first large item ──► its order goes by stream: the stream waits until items queued earlier for datagrams
                                    have left and are acknowledged (or 100 ms, however many orders join it)
    KEEP_S without a large item,
    and the stream acknowledged ──► its order goes by datagrams again

An order is a set of items that must stay in order: records of one key (a hash of it), or all control messages.

Source: docs/links.md, "Sizes".
"""

from __future__ import annotations

from typing import Final

from cluster.links.peer.outbox import INFINITY
from pixiu.wire.record import KEY_AT, SENDER_AT

ORDERS: Final = 1024
"""Number of orders into which the keys of records fall."""
KEEP_S: Final = 0.5
"""Time for which an order goes by stream after its last large item, so that a key with many of them does not alternate, seconds."""
SWITCH_WAIT_S: Final = 0.1
"""Longest wait of the stream for the acknowledgement of earlier datagrams, seconds."""
LEAVE_CHECK_S: Final = 0.05

_SPREAD: Final = 0x9E3779B97F4A7C15


def order_of(record: bytes) -> int:
    """The order of a record."""
    return (int.from_bytes(record[KEY_AT:SENDER_AT], "little") * _SPREAD >> 48) & (ORDERS - 1)


class Switch:
    """The orders of one kind that go by stream, and the datagrams that the stream waits for."""

    __slots__ = ("_asks", "_checked_at", "_first", "_mark", "_until", "_waits_for", "orders")

    def __init__(self) -> None:
        self.orders: dict[int, float] = {}
        """Orders that go by stream, and the time of each one's last large item."""
        self._waits_for = 0
        """Number of the last run for datagrams that the stream waits for; 0: none."""
        self._first = 0
        """Number of the run that the first of the orders waits for."""
        self._mark = 0
        """Sequence before which datagrams must be acknowledged; 0 until the run `_waits_for` has left."""
        self._until = INFINITY
        """Time at which the wait ends in any case, set when the first order's run has left."""
        self._checked_at = 0.0
        self._asks = False

    def enter(self, order: int, run_number: int, now: float) -> None:
        """Note a large item of this order; runs up to this number were queued for datagrams before it."""
        if order not in self.orders:
            if not self._waits_for:
                self._first = run_number
            self._waits_for, self._mark = run_number, 0
        self.orders[order] = now

    def may_stream(self, first_waiting: float, upcoming: int, first_in_flight: float, now: float) -> bool:
        """True if the stream may continue.

        Args:
            first_waiting: number of the first run that waits for datagrams; above all numbers: none.
            upcoming: sequence of the next datagram.
            first_in_flight: sequence of the oldest datagram in flight; infinity: none.
        """
        if not self._waits_for:
            return True
        if first_waiting <= self._first:
            return False
        if self._until == INFINITY:
            self._until = now + SWITCH_WAIT_S
        if now < self._until:
            if not self._mark:
                if first_waiting <= self._waits_for:
                    return False
                self._mark, self._asks = upcoming, True
            if first_in_flight < self._mark:
                return False
        self._waits_for, self._mark, self._until = 0, 0, INFINITY
        return True

    def asks(self) -> bool:
        """True if an acknowledgement is needed: once, when everything before has left and some of it is in flight."""
        asks, self._asks = self._asks, False
        return asks

    @property
    def until(self) -> float:
        """Time at which the stream continues even without acknowledgement; infinity: it waits for none."""
        return self._until

    def leave(self, now: float) -> None:
        """Return orders without a recent large item to datagrams; called when everything on the stream is acknowledged."""
        if now - self._checked_at >= LEAVE_CHECK_S:
            self._checked_at = now
            for order in [order for order, at in self.orders.items() if now - at >= KEEP_S]:
                del self.orders[order]

    def reset(self) -> None:
        """Return all orders to datagrams."""
        self.orders.clear()
        self._waits_for, self._mark, self._until = 0, 0, INFINITY
