"""Positions of messages that a target has, and that the channel may give again: what makes a write exactly once. Pure.

    transaction { messages, and the positions that are written and not settled }  ──▶ acknowledged ──settled──▶ forgotten
                                         ▲
    after a crash: read from the target ─┘   a message that comes again with one of these positions is not written again

Source: docs/bridges.md, "Exactly once into Kafka".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pixiu.errors import MalformedData

MAX_STATE_BYTES: Final = 4_000
"""Longest encoded state: Kafka takes 4,096 bytes with an offset unless it is configured otherwise."""
Position = tuple[int, int]


class Once:
    """Positions that are written and not settled. Raises `MalformedData` for a state that cannot be read."""

    def __init__(self, state: str = "") -> None:
        self.written = decode(state)

    def has(self, position: Position) -> bool:
        """True if the target has this message."""
        return position in self.written

    def fitting(self, positions: Iterable[Position]) -> list[Position]:
        """The first of the positions with which the state is not too long: all, a half, a quarter …"""
        found = list(positions)
        while found and len(self.with_(found)) > MAX_STATE_BYTES:
            found = found[: len(found) // 2]
        return found

    def with_(self, positions: Iterable[Position]) -> str:
        """The state once these are written."""
        return encode(self.written.union(positions))

    def wrote(self, positions: Iterable[Position]) -> None:
        """Note messages that the target has."""
        self.written.update(positions)

    def settled(self, positions: Iterable[Position]) -> None:
        """Note messages that never come again."""
        self.written.difference_update(positions)


def encode(positions: Iterable[Position]) -> str:
    """Positions as a text: PART:LOW-HIGH,… for each part, in hex, each number counted from the one before it."""
    found = list[str]()
    by_part = dict[int, list[int]]()
    for part, offset in sorted(positions):
        by_part.setdefault(part, []).append(offset)
    for part, offsets in by_part.items():
        runs, before = list[str](), 0
        low = high = offsets[0]
        for offset in [*offsets[1:], -1]:
            if offset == high + 1:
                high = offset
                continue
            runs.append(f"{low - before:x}" + (f"-{high - low:x}" if high > low else ""))
            before, low, high = high, offset, offset
        found.append(f"{part:x}:{','.join(runs)}")
    return ";".join(found)


def decode(state: str) -> set[Position]:
    """Positions in a text. Raises `MalformedData`."""
    found = set[Position]()
    try:
        for each in state.split(";") if state else ():
            name, _, runs = each.partition(":")
            part, at = int(name, 16), 0
            for run in runs.split(","):
                low, _, more = run.partition("-")
                at += int(low, 16)
                high = at + (int(more, 16) if more else 0)
                if not 0 <= high - at <= MAX_STATE_BYTES << 8:
                    raise ValueError(run)
                found.update((part, offset) for offset in range(at, high + 1))
                at = high
    except ValueError as error:
        raise MalformedData(f"the positions at the target cannot be read: {error}") from None
    return found
