"""Limits on the joins and leaves of a gateway's clients. Pure.

    a connection's joins ── its own few ──────────────────────────────────▶ at once
                         └─ what goes beyond ─▶ the gateway's share ─ wait ─▶ in turn
                                                     └─ the queue is too long, or all hold too many ─▶ refused

A join costs the replicas of a router's and a broker's partition some 25 µs each, and a rate per connection does not limit what a
thousand connections cost together. So each connection has a few free joins, as many as an app with its rooms needs, and all further
ones share one rate: clients that join without end wait for each other, and a new app does not wait for them.

Source: docs/promises.md, "Failure rules" 4; docs/decisions/0276-bulk-joins-are-queued.md.
"""

from __future__ import annotations

from typing import Final

from cluster.core.token_bucket import TokenBucket

FREE_PER_S: Final = 1.0
"""Rate at which a connection's free joins come back."""
MAX_WAIT_S: Final = 20.0
"""Longest wait in the queue, seconds: less than the 30 s for which an MQTT session waits for an answer."""
LONG_HOLD_S: Final = MAX_WAIT_S
"""A refused client is not read from for a quarter of this to all of it, seconds, at random, ..."""
MAX_DOUBLINGS: Final = 1
"""... and doubled, at most this many times, when it is refused again."""


class JoinShare:
    """The rate that all connections share once they have used up their own few joins.

    Args:
        per_s: joins and leaves a second; 0: no limit.
        max_subscriptions: of all connections; beyond it each connection has only its free ones.
        now: monotonic seconds.
    """

    def __init__(self, per_s: float, max_subscriptions: int, now: float) -> None:
        self._bucket: TokenBucket | None = None
        self.max_subscriptions = max_subscriptions
        self.subscriptions = 0
        """Subscriptions of all connections."""
        self.refused = 0
        """Joins refused because they would have waited too long, or were too many."""
        self.set_rate(per_s, now)

    def set_rate(self, per_s: float, now: float) -> None:
        """Allow `per_s` joins and leaves a second from now on, beginning with a second's worth."""
        self._bucket = TokenBucket(per_s, per_s, now) if per_s else None

    def wait_s(self, joins: float, now: float) -> float | None:
        """Take a turn for these joins. Returns the seconds to wait; None if the queue is too long."""
        if self._bucket is None or joins <= 0:
            return 0.0
        wait_s = self._bucket.wait_s(now)
        if wait_s > MAX_WAIT_S:
            return None
        self._bucket.spend(joins, now)
        return wait_s

    def is_full(self, now: float) -> bool:
        """True if the queue is too long for more joins."""
        return self._bucket is not None and self._bucket.wait_s(now) > MAX_WAIT_S

    def spend(self, leaves: float, now: float) -> float:
        """Charge leaves, which cannot be refused. Returns the seconds for which to stop reading from their client."""
        if self._bucket is None or leaves <= 0:
            return 0.0
        return min(self._bucket.spend(leaves, now), LONG_HOLD_S)


class JoinRate:
    """Limits the joins and leaves of one connection.

    Args:
        per_s, burst: the connection's own rate; 0: no limit.
        free: joins and leaves allowed before it draws on the share.
    """

    __slots__ = ("_few", "_free", "_own", "_refused", "_share", "_subscriptions")

    def __init__(self, share: JoinShare, per_s: float, burst: float, free: int, now: float) -> None:
        self._share, self._few, self._subscriptions, self._refused = share, free, 0, 0
        self._own = TokenBucket(per_s, burst, now) if per_s else None
        self._free = TokenBucket(FREE_PER_S, free, now)

    def wait_s(self, joins: int, now: float) -> float | None:
        """Reserve joins. Returns the seconds to wait; None if refused: too many wait, or all connections hold too many."""
        share, beyond = self._share, 0.0
        if share.subscriptions + joins > share.max_subscriptions and self._subscriptions + joins > self._few:
            wait_s = None
        else:
            beyond = self._beyond(joins, now)
            wait_s = share.wait_s(beyond, now)
        if wait_s is None:
            share.refused += joins
            self._refused += 1
        elif beyond:  # a free join must not reset the count of refusals
            self._refused = 0
        return wait_s

    def is_vain(self, joins: int, now: float) -> bool:
        """True if this number of joins, or more, would be refused now."""
        share = self._share
        if share.subscriptions + joins > share.max_subscriptions and self._subscriptions + joins > self._few:
            return True
        return joins > self._few and share.is_full(now)

    def refuse(self, joins: int) -> None:
        """Count refused joins."""
        self._share.refused += joins
        self._refused += 1

    def refusal_hold_s(self, chance: float) -> float:
        """Seconds for which a refused client is not read from. `chance`: random from 0 to 1, so that clients that are refused
        together do not come back together."""
        return (0.25 + 0.75 * chance) * LONG_HOLD_S * (1 << min(max(self._refused - 1, 0), MAX_DOUBLINGS))

    def has_now(self, subscriptions: int) -> None:
        """Set the connection's number of subscriptions."""
        self._share.subscriptions += subscriptions - self._subscriptions
        self._subscriptions = subscriptions

    def hold_s(self, changes: int, now: float, *, joined: bool = False) -> float:
        """Charge joins, leaves, or vain requests. Returns the seconds for which to stop reading from the client. `joined`: `wait_s`
        has charged the share already."""
        own = self._own.spend(changes, now) if self._own is not None else 0.0
        return own if joined else max(own, self._share.spend(self._beyond(changes, now), now))

    def _beyond(self, changes: int, now: float) -> float:
        return changes - self._free.take_some(changes, now)
