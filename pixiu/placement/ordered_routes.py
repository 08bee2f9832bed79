"""Routes of keys, changed without disturbing the order of their records. Pure.

A sender keeps one peer per key. When the peers change, a key that moves must not overtake records that are still on their way to
its old peer: its records wait until everything sent to that peer before is settled, at most `barrier_ms`. Keys that do not move, or
whose old peer has nothing under way, continue without a wait.

        records of key 7 ──▶ peer A  ┊ change: A ┄▶ B      ┊ A has settled all
        ─────────────────────────────┊─────────────────────┊──────────────────▶ time
          sent to A                  ┊ wait                ┊ then these and new ones go to B

Source: docs/promises.md; docs/routing.md, "Order across a change of routes".
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable
from typing import Final, Generic, TypeVar

Target = TypeVar("Target", bound=Hashable)

MAX_CACHED_KEYS: Final = 200_000
"""Limit of cached keys; at this number the cache is emptied."""
MAX_CHANGES: Final = 8
"""Changes within one barrier whose old choices are remembered. Policy: keys that moved by an older change no longer wait."""


class Routes(Generic[Target]):
    """A cache of key → target, with the barrier that keeps order when the choice changes.

    Args:
        choose: returns the target of a key by the newest view; None if nobody serves it.
        waiting: value that `target` returns for a key whose records have to wait.
        barrier_ms: longest wait of a change for parcels under way, milliseconds.

    A key does not move at once, because a replica that joins would then reorder the messages of the rooms that it takes over.
    """

    def __init__(self, choose: Callable[[int], Target | None], waiting: Target, barrier_ms: int = 200) -> None:
        self._choose = choose
        self._waiting = waiting
        self._barrier_s = barrier_ms / 1000
        self.cache: dict[int, Target] = {}
        """Key → target, for a loop over a batch; for a missing key call `target`."""
        self._under_way: dict[int, Target] = {}
        self._awaited: set[int] = set()
        self._awaited_of: Counter[Target] = Counter()
        self._olds: deque[Callable[[int], Target | None]] = deque(maxlen=MAX_CHANGES)
        """The choices before the changes that wait."""
        self._moving: set[int] = set()
        """Keys for which `waiting` was returned. They wait until the end of the barrier, even if a further change moves them
        again."""
        self.deadline = math.inf
        """Time at which a waiting change takes effect in any case, monotonic seconds; infinity if none waits."""

    @property
    def held(self) -> bool:
        """True if a change waits for parcels under way, so that the records of some keys wait."""
        return bool(self._awaited)

    def target(self, key: int) -> Target | None:
        """Find the target of a key's records now; `waiting` if they have to wait; None if nobody serves the key."""
        found = self.cache.get(key)
        if found is None:
            if len(self.cache) >= MAX_CACHED_KEYS:
                self.cache.clear()
            found = self._choose(key)
            if found is not None:
                if self._awaited and (key in self._moving or self._moves(key, found)):
                    found = self._waiting
                    self._moving.add(key)
                self.cache[key] = found
        return found

    def sent(self, token: int, target: Target) -> None:
        """Note that a parcel is under way to a target."""
        self._under_way[token] = target

    def settled(self, token: int) -> bool:
        """Note that a parcel is no longer under way. Returns False if it was none of these."""
        target = self._under_way.pop(token, None)
        if target is None:
            return False
        if token in self._awaited:
            self._awaited.remove(token)
            self._awaited_of[target] -= 1
            if not self._awaited:
                self._end()
        return True

    def change(
        self,
        now: float,
        old: Callable[[int], Target | None],
        *,
        gone: Collection[Target] = (),
        among: Collection[Target] | None = None,
    ) -> None:
        """Start a change of the choice.

        Args:
            old: the choice before; None for a key that does not wait in any case.
            gone: targets that are dead or suspected: parcels under way to them are not waited for.
            among: targets from which keys may have moved; None: any.
        """
        self.cache.clear()
        if not self._awaited:
            self.deadline = now + self._barrier_s
        lost = set(gone)
        found = {token for token, target in self._under_way.items() if target not in lost and (among is None or target in among)}
        self._awaited = found | {token for token in self._awaited if self._under_way[token] not in lost}
        self._awaited_of = Counter(self._under_way[token] for token in self._awaited)
        if self._awaited:
            self._olds.append(old)
        else:
            self._end()

    def expire(self, now: float) -> None:
        """Give up waiting when the deadline has passed."""
        if now >= self.deadline:
            self._end()

    def _moves(self, key: int, new: Target) -> bool:
        for old in self._olds:
            target = old(key)
            if target is not None and target != new and self._awaited_of[target]:
                return True
        return False

    def _end(self) -> None:
        self._awaited.clear()
        self._awaited_of.clear()
        self._olds.clear()
        for key in self._moving:
            if self.cache.get(key) == self._waiting:
                del self.cache[key]
        self._moving.clear()
        self.deadline = math.inf
