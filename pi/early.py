"""Where a state stands still before an entry that it cannot apply, and what an operator gives up so that it goes on. Pure.

    … │ N-1 │ N │ … │ M                 N meets a broken value: nothing of it is applied, reads go on
              ▲       GIVE UP, N         committed behind it, by an operator's word
              └── applied before N, by whoever stands there

A replica that could apply N has another state than one that gave something up first. It finds that out at M, and begins again: with
the state of a replica that went on, or from the log's beginning with what M says taken at N.

Source: docs/pi.md, "On disk, and failures".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.replication.model import Entry
from pi.keys import ValueDamaged
from pixiu.errors import MalformedData, StateDamaged
from pixiu.wire.inbox_operations import U64, GiveUp, decode, encode

EARLY_KIND: Final = 19
"""Of the log's entries that give values up before an earlier entry: its counter u64, then the operation, if there are any."""
MAX_EARLY: Final = 100
"""Kept for a state that is made from the log again. Policy: the newest."""


class Early(NamedTuple):
    """Values that are given up before an entry."""

    before: int
    """The counter of the entry that could not be applied."""
    at: int
    """The counter of the entry that says so."""
    keys: tuple[bytes, ...]


def encode_early(before: int, keys: Sequence[bytes]) -> bytes:
    """The payload of an entry."""
    return U64.pack(before) + (encode([GiveUp(tuple(keys))]) if keys else b"")


def early_of(entry: Entry) -> Early:
    """What an entry of this kind says. Raises MalformedData."""
    if len(entry.payload) < U64.size:
        raise MalformedData("an entry that gives up names no other")
    (before,) = U64.unpack_from(entry.payload)
    operations = decode(entry.payload[U64.size :])
    keys = tuple(key for operation in operations if isinstance(operation, GiveUp) for key in operation.keys)
    return Early(before, entry.counter, keys)


class TakenOtherwise(StateDamaged):
    """This state applied an entry with what others had given up before it."""

    def __init__(self, early: Early) -> None:
        super().__init__(f"others gave values up before entry {early.before}; this replica takes its inboxes from one of them")
        self.early = early


class Standstill:
    """What is known of the entry that a state stands before."""

    def __init__(self) -> None:
        self.at = 0
        """Its counter; 0: the state does not stand still."""
        self.why: StateDamaged | None = None
        self.tried = 0
        """The counter of the last entry that gave something up for it, and did not help."""
        self.early: dict[int, Early] = {}
        """By counter: what is given up before that entry."""

    @property
    def text(self) -> str:
        """Why, for an operator; empty: the state does not stand still."""
        return f"entry {self.at} of the log cannot be applied: {self.why}" if self.at else ""

    @property
    def keys(self) -> list[bytes]:
        """The value that the entry met, where that is known."""
        return [self.why.key] if isinstance(self.why, ValueDamaged) and self.why.key else []

    def stop(self, at: int, why: StateDamaged) -> None:
        """The entry with this counter is not applied."""
        self.at, self.why = at, why
        helped_not = self.early.pop(at, None)
        if helped_not is not None:
            self.tried = helped_not.at

    def remember(self, found: Iterable[Early]) -> None:
        """What is to be given up when a state comes to these entries."""
        self.early |= {early.before: early for early in found}

    def look_ahead(self, entries: Iterable[Entry]) -> bool:
        """Look through committed entries behind this one for an operator's word. Whether there is one: the state goes on."""
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
        """What a state needs that is made from the log again."""
        met = [self.why.early] if isinstance(self.why, TakenOtherwise) else []
        return sorted({each.before: each for each in (*self.early.values(), *met)}.values())[-MAX_EARLY:]
