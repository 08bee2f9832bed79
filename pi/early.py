"""Standstill of a state before an entry that it cannot apply, and the values an operator gives up to end it. Pure.

    … │ N-1 │ N │ … │ M                 N meets a broken value: nothing of it is applied, reads continue
              ▲       GIVE UP, N         committed after it, by an operator
              └── applied before N by replicas that stand still there

A replica that could apply N has another state than one that gave something up first. It detects that at M and begins again: with
the state of a replica that gave up, or from the log's beginning with the values in M given up at N.

Source: docs/pi.md, "On disk, and failures".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.replication.model import Entry
from pi.keys import ValueDamaged
from pixiu.errors import MalformedData, StateDamaged
from pixiu.wire.inbox_operations import U64, GiveUp, decode, encode

EARLY_KIND: Final = 19
"""Kind of log entries that give up values before an earlier entry: its counter u64, then the operation, if any."""
MAX_EARLY: Final = 100
"""Entries kept for a state that is rebuilt from the log. Policy: the newest."""


class Early(NamedTuple):
    """Values given up before an entry."""

    before: int
    """Counter of the entry that could not be applied."""
    at: int
    """Counter of the entry that gives them up."""
    keys: tuple[bytes, ...]


def encode_early(before: int, keys: Sequence[bytes]) -> bytes:
    """The payload of an entry."""
    return U64.pack(before) + (encode([GiveUp(tuple(keys))]) if keys else b"")


def early_of(entry: Entry) -> Early:
    """Decode an entry of this kind. Raises MalformedData."""
    if len(entry.payload) < U64.size:
        raise MalformedData("an entry that gives up names no other")
    (before,) = U64.unpack_from(entry.payload)
    operations = decode(entry.payload[U64.size :])
    keys = tuple(key for operation in operations if isinstance(operation, GiveUp) for key in operation.keys)
    return Early(before, entry.counter, keys)


class TakenOtherwise(StateDamaged):
    """This state applied an entry before which other replicas had given up values."""

    def __init__(self, early: Early) -> None:
        super().__init__(f"others gave values up before entry {early.before}; this replica takes its inboxes from one of them")
        self.early = early


class Standstill:
    """The entry before which a state stands still, if any."""

    def __init__(self) -> None:
        self.at = 0
        """Its counter; 0: the state does not stand still."""
        self.why: StateDamaged | None = None
        self.tried = 0
        """Counter of the last entry that gave up values for it without success."""
        self.early: dict[int, Early] = {}
        """Counter of an entry → values given up before it."""
        self._reported_at = -math.inf

    def is_due(self, now: float, interval_s: float) -> bool:
        """Return True if it is to be reported now: at most once in an interval."""
        due = now >= self._reported_at + interval_s
        if due:
            self._reported_at = now
        return due

    @property
    def text(self) -> str:
        """The reason, for an operator; empty: the state does not stand still."""
        return f"entry {self.at} of the log cannot be applied: {self.why}" if self.at else ""

    @property
    def keys(self) -> list[bytes]:
        """Key of the value that the entry met, if known."""
        return [self.why.key] if isinstance(self.why, ValueDamaged) and self.why.key else []

    def stop(self, at: int, why: StateDamaged) -> None:
        """Stand still before the entry with this counter."""
        self.at, self.why = at, why
        helped_not = self.early.pop(at, None)
        if helped_not is not None:
            self.tried = helped_not.at

    def remember(self, found: Iterable[Early]) -> None:
        """Remember values to be given up when a state reaches these entries."""
        self.early |= {early.before: early for early in found}

    def look_ahead(self, entries: Iterable[Entry]) -> bool:
        """Search committed entries after this one for one that gives up values. Returns True if the state can go on."""
        for entry in entries:
            if entry.kind != EARLY_KIND or not self.at or entry.counter <= self.tried:
                continue
            try:
                early = early_of(entry)
            except MalformedData:
                continue
            if early.before == self.at:
                self.early[self.at] = early
                self.at, self.why = 0, None
        return not self.at

    def kept(self) -> list[Early]:
        """Return the values that a state rebuilt from the log must give up."""
        met = [self.why.early] if isinstance(self.why, TakenOtherwise) else []
        return sorted({each.before: each for each in (*self.early.values(), *met)}.values())[-MAX_EARLY:]
