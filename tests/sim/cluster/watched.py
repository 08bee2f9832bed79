"""The production map, with what must never happen to it checked at every change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cluster.membership.map.devices import Devices, LoginPolicy
from cluster.membership.map.digest import DigestRule
from cluster.membership.map.lww_map import Applied, Dropped, Key, LwwMap
from cluster.membership.map.updates import Chunk, Update
from pixiu.ids import gateway_instance


class Watched(LwwMap):
    """Snapshots of many parts; no register goes back; nothing goes that its gateway has.

    `is_true(key, id)`: whether the gateway of a key lives and has exactly this login.
    """

    def __init__(self, is_true: Callable[[Key, int], bool]) -> None:
        super().__init__()
        self.is_true = is_true
        self.highest: dict[Key, int] = {}
        self.watching = True

    def snapshot(self, partition: int = 0, partitions: int = 1, chunk_entries: int = 2) -> Iterator[Chunk]:
        """Of many parts, so that much happens between the first and the last."""
        return super().snapshot(partition, partitions, chunk_entries)

    def apply(self, batch: Iterable[Update], now: float) -> Applied:
        """Last-writer-wins, checked."""
        applied = super().apply(batch, now)
        for change in applied.changes:
            key = Key(change.group, change.member, gateway_instance(change.id))
            assert change.id >= self.highest.get(key, 0), f"{key} went back to an older message"
            self.highest[key] = change.id
        return applied

    def _moved(self, rule: DigestRule) -> Iterator[Dropped]:
        """What belongs to another partition since a doubling goes, wherever its users are."""
        steps = super()._moved(rule)
        while True:
            self.watching = False
            step = next(steps, None)
            self.watching = True
            if step is None:
                return
            yield step

    def lose(self, key: Key) -> None:
        """A live entry goes, as no message would make it go."""
        self.watching = False
        self._remove(*key)
        self.watching = True
        self.highest.pop(key, None)

    def revive(self, change: Update) -> None:
        """An old login is here, as if what came after it had never come."""
        key = Key(change.group, change.member, gateway_instance(change.id))
        found = self.get(*key)
        self.highest[key] = change.id
        self._add(*key, change.id, found is None or not found[1])

    def _remove(self, room: int, uin: int, instance: int) -> bool:
        self._check(Key(room, uin, instance))
        return super()._remove(room, uin, instance)

    def _drop(self, room: int, instance: int) -> list[Key]:
        for uin in self._of(room)[instance]:
            self._check(Key(room, uin, instance))
        return super()._drop(room, instance)

    def _check(self, key: Key) -> None:
        if self.watching:
            id_ = self._of(key.group)[key.instance][key.member]
            assert not self.is_true(key, id_), f"{key} was removed although its gateway has it"


class WatchedDevices(Watched, Devices):
    """The same for relay data."""

    def __init__(self, is_true: Callable[[Key, int], bool], policy: LoginPolicy) -> None:
        super().__init__(is_true)
        self._policy = policy
