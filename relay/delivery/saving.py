"""Cursors on their way to Pi: joined, repeated until they are answered, only the newest of each. Pure.

Source: docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.contract import NEVER
from relay.delivery import events as ev
from relay.delivery.limits import Limits

_Key = tuple[int, int, int]


def _key(item: ev.Acknowledgement) -> _Key:
    return item.uin, item.device, item.lane


class Saving:
    """Cursors that wait to be saved at Pi, including those of ended sessions."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: dict[_Key, ev.Acknowledgement] = {}
        """(UIN, device, lane) → the newest. Bounded by the sessions, including those that ended within a call's time."""
        self._under_way: dict[int, tuple[float, Sequence[ev.Acknowledgement]]] = {}
        """Call → (time at which it counts as failed, its cursors)."""
        self._carried: dict[_Key, int] = {}
        """Cursor → the last call in progress that has it: an earlier call's cursor is older, and not repeated."""
        self._due_at = NEVER
        self._number = 0
        self._failures = 0

    @property
    def unsaved(self) -> int:
        """Number of cursors that wait or are in progress."""
        return len(self._waiting) + sum(len(items) for _, items in self._under_way.values())

    def next_deadline(self) -> float:
        """Time at which `due` has work."""
        calls = min((at for at, _ in self._under_way.values()), default=NEVER)
        return min(calls, self._due_at if len(self._under_way) < self._limits.acknowledge_calls else NEVER)

    def add(self, item: ev.Acknowledgement, now: float) -> None:
        """Queue a cursor to be saved at Pi."""
        self._waiting[item.uin, item.device, item.lane] = item
        due_at = now + self._limits.acknowledge_wait_s
        if due_at < self._due_at:
            self._due_at = due_at

    def hurry(self, now: float) -> None:
        """Wait no longer: once a newer session is open, Pi refuses acknowledgements of an older one."""
        if self._waiting:
            self._due_at = min(self._due_at, now)

    def due(self, now: float) -> list[ev.SaveCursors]:
        """Return the calls to make now."""
        for number in [number for number, (at, _) in self._under_way.items() if at <= now]:
            self._retry(number, now)
        calls: list[ev.SaveCursors] = []
        while self._waiting and now >= self._due_at and len(self._under_way) < self._limits.acknowledge_calls:
            keys = list(self._waiting)[: self._limits.acknowledge_batch]
            items = [self._waiting.pop(key) for key in keys]
            self._number += 1
            self._under_way[self._number] = (now + self._limits.call_timeout_s, items)
            self._carried.update(dict.fromkeys(keys, self._number))
            calls.append(ev.SaveCursors(self._number, items))
        if not self._waiting:
            self._due_at = NEVER
        return calls

    def answered(
        self, number: int, results: Sequence[ev.Failure | None] | None, now: float
    ) -> list[tuple[ev.Acknowledgement, ev.Failure]]:
        """Take an answer. Returns cursors that Pi refused for good."""
        if number not in self._under_way:
            return []
        if results is None or len(results) != len(self._under_way[number][1]):
            self._retry(number, now)
            return []
        _, items = self._under_way.pop(number)
        self._failures = 0
        refused: list[tuple[ev.Acknowledgement, ev.Failure]] = []
        for item, failure in zip(items, results, strict=True):
            if failure is ev.Failure.LATER:
                self._put_back(number, item)
                self._due_at = min(self._due_at, now + self._limits.pause_s)
                continue
            key = _key(item)
            if self._carried.get(key) == number:
                del self._carried[key]
            if failure is not None:
                refused.append((item, failure))
        return refused

    def _retry(self, number: int, now: float) -> None:
        _, items = self._under_way.pop(number)
        for item in items:
            self._put_back(number, item)
        pause_s = min(self._limits.max_pause_s, self._limits.pause_s * float(1 << min(self._failures, 10)))
        self._failures += 1
        self._due_at = now + pause_s

    def _put_back(self, number: int, item: ev.Acknowledgement) -> None:
        key = _key(item)
        if self._carried.get(key) == number:
            del self._carried[key]
            self._waiting.setdefault(key, item)
