"""How fast the clients of one gateway join and leave. Pure.

    a connection's joins ── its own few ──────────────────────────────────▶ at once
                         └─ what goes beyond ─▶ the gateway's share ─ wait ─▶ in turn
                                                     └─ the line is too long, or all hold too many ─▶ refused

A join costs the replicas of a router's and a broker's partition some 25 µs each, and a rate of each connection says nothing of what
a thousand of them cost together. So each connection has a few joins that nobody holds up, as many as an app with its rooms needs,
and all that want more share one rate: who joins without end waits for others of its kind, and not an app that comes.

Source: docs/promises.md, "Failure rules" 4; docs/decisions/0276-who-joins-much-waits-in-line.md.
"""

from __future__ import annotations

from typing import Final

from cluster.runtime.token_bucket import TokenBucket

FREE_PER_S: Final = 1.0
"""So fast a connection's free joins come back."""
MAX_WAIT_S: Final = 20.0
"""The longest wait in the line: less than the 30 s for which an MQTT session waits for an answer."""
LONG_HOLD_S: Final = MAX_WAIT_S
"""A client that was refused is not read from for a quarter of this to all of it, at random, ..."""
MAX_DOUBLINGS: Final = 1
"""... and for twice as long when it is refused again, so often."""


class JoinShare:
    """The rate that all connections share once they have used up their own few joins.

    Args:
        per_s: joins and leaves a second; 0: no limit.
        max_subscriptions: of all connections, beyond which there are only the few of each.
        now: monotonic seconds.
    """

    def __init__(self, per_s: float, max_subscriptions: int, now: float) -> None:
        self._bucket: TokenBucket | None = None
        self.max_subscriptions = max_subscriptions
        self.subscriptions = 0
        """Subscriptions of all connections."""
        self.refused = 0
        """Joins that would have waited too long, or been too many."""
        self.set_rate(per_s, now)

    def set_rate(self, per_s: float, now: float) -> None:
        """Allow so many a second from now on; it begins with a second's worth."""
        self._bucket = TokenBucket(per_s, per_s, now) if per_s else None

    def wait_s(self, joins: float, now: float) -> float | None:
        """Seconds until so many have their turn, which they take; None: the line is too long."""
        if self._bucket is None or joins <= 0:
            return 0.0
        wait_s = self._bucket.wait_s(now)
        if wait_s > MAX_WAIT_S:
            return None
        self._bucket.spend(joins, now)
        return wait_s

    def is_full(self, now: float) -> bool:
        """Whether the line is too long for more."""
        return self._bucket is not None and self._bucket.wait_s(now) > MAX_WAIT_S

    def spend(self, leaves: float, now: float) -> float:
        """So many were left, which nobody can refuse. Returns the seconds for which their client is not to be read from."""
        if self._bucket is None or leaves <= 0:
            return 0.0
        return min(self._bucket.spend(leaves, now), LONG_HOLD_S)


class JoinRate:
    """What one connection joins and leaves.

    Args:
        per_s, burst: the connection's own rate; 0: no limit.
        free: joins and leaves that it has before it takes of the share.
    """

    __slots__ = ("_few", "_free", "_own", "_refused", "_share", "_subscriptions")

    def __init__(self, share: JoinShare, per_s: float, burst: float, free: int, now: float) -> None:
        self._share, self._few, self._subscriptions, self._refused = share, free, 0, 0
        self._own = TokenBucket(per_s, burst, now) if per_s else None
        self._free = TokenBucket(FREE_PER_S, free, now)

    def wait_s(self, joins: int, now: float) -> float | None:
        """Seconds to wait before so many are joined; None: they are refused, as too many wait, or all hold too many."""
        share, beyond = self._share, 0.0
        if share.subscriptions + joins > share.max_subscriptions and self._subscriptions + joins > self._few:
            wait_s = None
        else:
            beyond = self._beyond(joins, now)
            wait_s = share.wait_s(beyond, now)
        if wait_s is None:
            share.refused += joins
            self._refused += 1
        elif beyond:  # a free one would else let who was refused begin anew
            self._refused = 0
        return wait_s

    def is_vain(self, joins: int, now: float) -> bool:
        """Whether so many, or more, would be refused now."""
        share = self._share
        if share.subscriptions + joins > share.max_subscriptions and self._subscriptions + joins > self._few:
            return True
        return joins > self._few and share.is_full(now)

    def refuse(self, joins: int) -> None:
        """So many are refused."""
        self._share.refused += joins
        self._refused += 1

    def refusal_hold_s(self, chance: float) -> float:
        """Seconds for which the client is not to be read from, when it was refused. `chance`: from 0 to 1, so that those that are
        refused together do not come back together."""
        return (0.25 + 0.75 * chance) * LONG_HOLD_S * (1 << min(max(self._refused - 1, 0), MAX_DOUBLINGS))

    def has_now(self, subscriptions: int) -> None:
        """The connection has so many now."""
        self._share.subscriptions += subscriptions - self._subscriptions
        self._subscriptions = subscriptions

    def hold_s(self, changes: int, now: float, *, joined: bool = False) -> float:
        """So many were joined, or left, or asked for in vain. Seconds for which the client is not to be read from. `joined`: the
        share knows of them by `wait_s`."""
        own = self._own.spend(changes, now) if self._own is not None else 0.0
        return own if joined else max(own, self._share.spend(self._beyond(changes, now), now))

    def _beyond(self, changes: int, now: float) -> float:
        return changes - self._free.take_some(changes, now)
