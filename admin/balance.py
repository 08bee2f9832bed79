"""Moves of parts that even the load of groups out. Pure.

The load of a group is the CPU that its leader uses, in thousandths of a core, and a little for each open part. A part has the
share of it that it has of what is written to the group. A move takes a part from a group with more to one with less, never makes
that one the heavier of the two, and leaves the first one at least the average. So no group that gives is soon one that takes, and
the moves end.

    group 0  ██████████ ──part 3──▶ ███████
    group 1  ████                   ███████

Source: docs/topics.md, "Placement".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from admin.placement import MAX_GROUP_PARTS

HYSTERESIS: Final = 1.2
"""Ratio of two groups' loads below which nothing is moved between them."""
PART_LOAD: Final = 1.0
"""Load of an open part to which nothing is written, thousandths of a core: so groups without any load get equally many parts."""
ROUNDING: Final = 1e-6
MAX_MOVES: Final = 1_000
"""Moves of one plan. Policy: the next plan has the others."""


class OpenPart(NamedTuple):
    """An open part, by what is written to it."""

    topic: str
    number: int
    bytes_per_s: float


class Move(NamedTuple):
    """A part that is to be in another group."""

    topic: str
    part: int
    source: int
    target: int
    load: float
    """Its load, thousandths of a core."""


@dataclass(slots=True)
class GroupLoad:
    """A group as it was measured, and as moves leave it."""

    cpu: float
    """Share of a core that its leader uses."""
    stored_parts: int
    """Parts that it holds, sealed ones included."""
    parts: dict[OpenPart, float] = field(default_factory=dict)
    """Open part → its load, thousandths of a core."""

    @classmethod
    def measured(cls, cpu: float, stored_parts: int, parts: Iterable[OpenPart]) -> GroupLoad:
        """A group from what it reports."""
        found = sorted(parts)
        written = sum(part.bytes_per_s + 1 for part in found)
        loads = {part: PART_LOAD + 1000 * cpu * (part.bytes_per_s + 1) / written for part in found}
        return cls(cpu, stored_parts, loads)

    @property
    def load(self) -> float:
        """Thousandths of a core."""
        return sum(self.parts.values()) if self.parts else 1000 * self.cpu


def plan(
    groups: Mapping[int, GroupLoad],
    *,
    least: float = 0.0,
    resting: Collection[int] = (),
    staying: Collection[tuple[str, int]] = (),
    most: int = MAX_MOVES,
) -> list[Move]:
    """The moves that even groups out, the most useful first; `groups` become as they leave them.

    Args:
        groups: those that are running.
        least: load below which a group gives nothing away.
        resting: groups that take no part.
        staying: topics and numbers of parts that do not move.
        most: number of moves.
    """
    moves, able = list[Move](), {number: group for number, group in groups.items() if number not in resting}
    while len(moves) < most and (move := _best(able, least, staying)) is not None:
        moves.append(move)
    return moves


def _best(groups: Mapping[int, GroupLoad], least: float, staying: Collection[tuple[str, int]]) -> Move | None:
    """Make the move that helps the heaviest group that can be helped."""
    by_load = sorted(groups, key=lambda number: (groups[number].load, number))
    mean = sum(group.load for group in groups.values()) / max(1, len(groups))
    for source in reversed(by_load):
        heavy = groups[source].load
        for target in by_load:
            light = groups[target].load
            if heavy < least or heavy <= HYSTERESIS * light or target == source:
                break  # those that follow are heavier
            most = min((heavy - light) / 2, heavy - mean) + ROUNDING
            fits = [(load, part) for part, load in groups[source].parts.items() if load <= most and part[:2] not in staying]
            if fits and groups[target].stored_parts < MAX_GROUP_PARTS:
                return _moved(groups, max(fits)[1], source, target)
    return None


def emptied(groups: Mapping[int, GroupLoad], source: int, most: int = MAX_MOVES) -> list[Move]:
    """The moves that leave a group without open parts, the heaviest part first. Fewer if the other groups are full."""
    moves = list[Move]()
    for part, _ in sorted(groups[source].parts.items(), key=lambda each: (-each[1], each[0])):
        able = [number for number in groups if number != source and groups[number].stored_parts < MAX_GROUP_PARTS]
        if not able or len(moves) >= most:
            break
        moves.append(_moved(groups, part, source, min(able, key=lambda number: (groups[number].load, number))))
    return moves


def _moved(groups: Mapping[int, GroupLoad], part: OpenPart, source: int, target: int) -> Move:
    load = groups[source].parts.pop(part)
    groups[target].parts[part] = load
    groups[target].stored_parts += 1
    groups[source].cpu -= load / 1000
    return Move(part.topic, part.number, source, target, load)
