"""Where a key's records go, changed without disturbing their order. Pure.

A sender keeps one peer per key. When the peers change, the keys that move must not overtake what is still on its
way to their old peer: `Routes` holds new parcels back until everything that was sent before is settled, at most
`barrier_ms`, and then routes by the new choice.

        records of key 7 ──▶ peer A  ┊ change: A ┄▶ B      ┊ A has settled all
        ─────────────────────────────┊─────────────────────┊──────────────────▶ time
          sent to A                  ┊ held                ┊ held, then new ones go to B

Source: docs/promises.md, docs/routing.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

Target = TypeVar("Target", bound=Hashable)

MAX_CACHED_KEYS = 200_000
"""When so many keys are cached, the cache starts anew."""


class Routes(Generic[Target]):
    """A cache of key → target, with the barrier that keeps order when the choice changes.

    Args:
        choose: the target of a key by the newest view; None where nobody serves it.
        barrier_ms: how long a change may wait for what is under way, milliseconds.

    Departs from docs/routing.md, which lets a key move at once, because a replica that joins would then
    reorder the messages of the rooms that it takes over.
    """

    def __init__(self, choose: Callable[[int], Target | None], barrier_ms: int = 200) -> None:
        self._choose = choose
        self._barrier_s = barrier_ms / 1000
        self._cache: dict[int, Target] = {}
        self._under_way: dict[int, Target] = {}
        self._awaited: set[int] = set()
        self._deadline = 0.0

    @property
    def held(self) -> bool:
        """Whether a change is waiting for what is under way: nothing may be sent now."""
        return bool(self._awaited)

    @property
    def deadline(self) -> float | None:
        """When a waiting change goes ahead in any case, monotonic seconds."""
        return self._deadline if self._awaited else None

    def target(self, key: int) -> Target | None:
        """Where a key's records go now; None where nobody serves it."""
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= MAX_CACHED_KEYS:
                self._cache.clear()
            found = self._choose(key)
            if found is not None:
                self._cache[key] = found
        return found

    @property
    def cache(self) -> dict[int, Target]:
        """The cache itself, for a loop over a batch; a miss is answered by `target`."""
        return self._cache

    def sent(self, token: int, target: Target) -> None:
        """A parcel is under way to a target."""
        self._under_way[token] = target

    def settled(self, token: int) -> None:
        """A parcel is no longer under way."""
        self._under_way.pop(token, None)
        self._awaited.discard(token)

    def change(self, now: float, gone: Iterable[Target] = ()) -> None:
        """The choice may have changed. What is under way to a target in `gone` is not waited for."""
        lost = set(gone)
        self._cache.clear()
        if not self._awaited:
            self._deadline = now + self._barrier_s
        self._awaited = {token for token, target in self._under_way.items() if target not in lost}

    def expire(self, now: float) -> None:
        """Give up waiting when the deadline has passed."""
        if self._awaited and now >= self._deadline:
            self._awaited.clear()
