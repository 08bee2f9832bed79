"""Which items of a link go by stream, so that order survives the change of carrier without a wait for everybody. Pure.

    an order's first large item ──► its order goes by stream: the stream waits until what was queued for datagrams
                                    before it has left and is acknowledged (or 100 ms, however many orders join it)
    KEEP_S without a large item,
    and the stream acknowledged ──► its order goes by datagrams again

An order is what must stay in order: records of one key (a hash of it), all control messages together.

Source: docs/links.md, "Sizes".
"""

from __future__ import annotations

from typing import Final

from cluster.links.outbox import INFINITY

ORDERS: Final = 1024
"""Into so many orders the keys of records fall."""
KEEP_S: Final = 0.5
"""How long an order goes by stream after its last large item, so that a key with many such does not go to and fro."""
SWITCH_WAIT_S: Final = 0.1
"""How long the stream waits for the acknowledgement of the datagrams before it."""
LEAVE_CHECK_S: Final = 0.05

KEY_AT: Final = 24
"""Where a record has its key."""
_SPREAD: Final = 0x9E3779B97F4A7C15


def order_of(record: bytes) -> int:
    """The order that a record belongs to."""
    return (int.from_bytes(record[KEY_AT : KEY_AT + 8], "little") * _SPREAD >> 48) & (ORDERS - 1)


class Switch:
    """The orders of one kind that go by stream, and what the stream waits for."""

    __slots__ = ("_asks", "_checked_at", "_first", "_mark", "_until", "_waits_for", "orders")

    def __init__(self) -> None:
        self.orders: dict[int, float] = {}
        """Those that go by stream, and when the last large item of each came."""
        self._waits_for = 0
        """The number of the last run for datagrams that the stream waits for; 0: for none."""
        self._first = 0
        """The same of the order for which it began to wait."""
        self._mark = 0
        """When that has left: the sequence before which datagrams must be acknowledged; 0: it has not left."""
        self._until = INFINITY
        """When the wait ends in any case, once what the first order waits for has left."""
        self._checked_at = 0.0
        self._asks = False

    def enter(self, order: int, run_number: int, now: float) -> None:
        """A large item of this order came; runs up to this number were queued for datagrams before it."""
        if order not in self.orders:
            if not self._waits_for:
                self._first = run_number
            self._waits_for, self._mark = run_number, 0
        self.orders[order] = now

    def may_stream(self, first_waiting: float, upcoming: int, first_in_flight: float, now: float) -> bool:
        """Whether the stream may go on.

        Args:
            first_waiting: the number of the first run that waits for datagrams; infinity: none.
            upcoming: the sequence of the next datagram.
            first_in_flight: that of the oldest one in flight; infinity: none.
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
        """Whether an acknowledgement is needed: true once, when everything before has left and some of it is in flight."""
        asks, self._asks = self._asks, False
        return asks

    @property
    def until(self) -> float:
        """When the stream goes on whatever is acknowledged; infinity: it waits for no acknowledgement."""
        return self._until

    def leave(self, now: float) -> None:
        """Everything on the stream is acknowledged: orders without a large item in the last time go by datagrams again."""
        if now - self._checked_at >= LEAVE_CHECK_S:
            self._checked_at = now
            for order in [order for order, at in self.orders.items() if now - at >= KEEP_S]:
                del self.orders[order]

    def reset(self) -> None:
        """No order goes by stream any more."""
        self.orders.clear()
        self._waits_for, self._mark, self._until = 0, 0, INFINITY
