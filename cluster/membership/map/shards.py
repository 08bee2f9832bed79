"""Parts of a map of millions of groups: small dicts, none of which stops the event loop when it grows. Pure.

    group ── hash ──► 512 shards ──► dicts of some thousands of keys

A dict is copied in one step when it is two thirds full, 60 ns and more per key: with two million groups in one dict that took 270
ms. The hash mixes, because keys that fill all shards evenly would make all of them grow within one batch.

Source: docs/decisions/0248-big-maps-are-many-small-dicts.md.
"""

from __future__ import annotations

from typing import Final, NamedTuple

SHARDS: Final = 512
NO_GROUP: Final = -1
Register = tuple[int, int, int]
"""Group, member, instance: a `Key` of the map."""


class _AlwaysTracked(NamedTuple):
    """An empty tuple of its own class, which makes the garbage collector keep the dict that holds it on its list. A dict of plain
    tuples of numbers leaves that list, returns as young at every insertion, and all of its keys are inspected again."""


ALWAYS_TRACKED: Final = _AlwaysTracked()


def shard_of(group: int) -> int:
    """Shard of a group: 0 to 511."""
    return hash((group,)) & SHARDS - 1


class Shard:
    """Data of a map about the groups of one shard."""

    __slots__ = ("gateways", "groups", "tombstones", "values")

    def __init__(self) -> None:
        self.groups: dict[int, dict[int, dict[int, int]]] = {}
        """Group → instance → {member: GatewayMsgID}."""
        self.gateways: dict[int, tuple[int, ...]] = {NO_GROUP: ALWAYS_TRACKED}
        """Group → the instances with members, ascending."""
        self.tombstones: dict[Register, tuple[int, float]] = {}
        """(GatewayMsgID, time of expiry); the insertion order is the order of expiry, because a rewrite moves to the end."""
        self.values: dict[Register, int] = {}
        """Values of live entries, if not 0."""


class UserCache:
    """Results about users, kept until they change. At most `limit` of them; a full shard is forgotten as a whole."""

    __slots__ = ("_limit", "_shards", "_stale")

    def __init__(self, limit: int) -> None:
        self._limit = max(limit // SHARDS, 1)
        self._shards: list[dict[int, tuple[int, ...]]] = [{} for _ in range(SHARDS)]
        self._stale = bytearray(SHARDS)
        """1: the shard's content is outdated, and is dropped at its next use."""

    def _shard(self, uin: int) -> dict[int, tuple[int, ...]]:
        at = shard_of(uin)
        found = self._shards[at]
        if self._stale[at]:
            self._stale[at] = 0
            found.clear()
        return found

    def get(self, uin: int) -> tuple[int, ...] | None:
        """Cached result for a user; None if there is none."""
        return self._shard(uin).get(uin)

    def put(self, uin: int, found: tuple[int, ...]) -> None:
        """Cache a result for a user."""
        shard = self._shard(uin)
        if len(shard) >= self._limit:
            shard.clear()
        shard[uin] = found

    def forget(self, uin: int) -> None:
        """Forget a user, who has changed."""
        self._shards[shard_of(uin)].pop(uin, None)

    def forget_all(self) -> None:
        """Forget all users, who may have changed."""
        self._stale = bytearray(b"\1" * SHARDS)
