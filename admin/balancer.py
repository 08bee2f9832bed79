"""The load of groups as the leading admin knows it: plans that are asked for, and the next move by itself. Pure.

Source: docs/topics.md, "Placement".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from admin import balance
from admin import events as ev
from admin.balance import GroupLoad, Move, OpenPart
from admin.tracked import Group
from cluster.core.contract import NEVER
from cluster.topics.entries import part_id
from pixiu.discovery.topics import PartState, TopicNode
from pixiu.errors import InvalidArgument, Refusal, Unavailable

LEAST_LOAD: Final = 100.0
"""Load of a group, thousandths of a core, below which nothing of it moves by itself."""
REST_S: Final = 180.0
"""Time for which both groups of a move take no part in another one: what was measured before has to wear off."""
PART_REST_S: Final = 3600.0
"""Time for which a part that has moved by itself stays where it is."""
HOUR_S: Final = 3600.0


@dataclass(slots=True)
class Asked:
    """A plan that somebody asks for."""

    request: int
    drain: int | None
    since: float


@dataclass(slots=True)
class Balancer:
    """Plans of the leading admin.

    Args:
        moves_per_hour: that it makes by itself; 0: none.
    """

    moves_per_hour: int = 0
    asked: list[Asked] = field(default_factory=list)
    _next_at: float = NEVER
    _groups: dict[int, float] = field(default_factory=dict)
    """Group → until when it rests."""
    _parts: dict[tuple[str, int], float] = field(default_factory=dict)
    """Part → until when it rests."""

    def elected(self, now: float) -> None:
        """This admin leads from now on; what a former one has moved is not known."""
        self._next_at = now + REST_S
        self._groups.clear()
        self._parts.clear()

    def answers(self, groups: Mapping[int, Group], running: Collection[int], nodes: Iterable[TopicNode]) -> list[ev.Planned]:
        """The plans for which all groups have answered, or do not."""
        found = [each for each in self.asked if all(_said(groups[number], each.since) for number in running)]
        self.asked = [each for each in self.asked if each not in found]
        known = list(nodes) if found else []
        return [self._planned(each, groups, running, known) for each in found]

    def _planned(
        self, asked: Asked, groups: Mapping[int, Group], running: Collection[int], nodes: Iterable[TopicNode]
    ) -> ev.Planned:  # fmt: skip
        heard = [number for number in sorted(running) if groups[number].load_at >= asked.since]
        before, after = measured(groups, heard, nodes), measured(groups, heard, nodes)
        if asked.drain is None:
            moves = balance.plan(after)
        elif asked.drain not in after:
            why = Unavailable(f"group {asked.drain} does not answer, or does not exist; `pixiu status` shows the groups")
            return ev.Planned(asked.request, refusal=Refusal.of(why))
        else:
            moves = balance.emptied(after, asked.drain)
            if after[asked.drain].parts and len(moves) < balance.MAX_MOVES:
                full = InvalidArgument(f"there is no other group with room for the parts of group {asked.drain}; add one")
                return ev.Planned(asked.request, refusal=Refusal.of(full))
        shown = tuple(ev.PlannedGroup(number, each.load, after[number].load, len(each.parts)) for number, each in before.items())
        return ev.Planned(asked.request, tuple(moves), shown)

    def next_move(
        self, groups: Mapping[int, Group], running: Collection[int], nodes: Iterable[TopicNode], now: float
    ) -> Move | None:  # fmt: skip
        """The move that the admin makes by itself now, if there is one."""
        if not self.moves_per_hour or now < self._next_at:
            return None
        self._groups = {number: until for number, until in self._groups.items() if until > now}
        self._parts = {part: until for part, until in self._parts.items() if until > now}
        heard = [number for number in sorted(running) if groups[number].load_at > now - REST_S]
        found = balance.plan(
            measured(groups, heard, nodes), least=LEAST_LOAD, resting=self._groups, staying=self._parts, most=1
        )  # fmt: skip
        return found[0] if found else None

    def moved(self, move: Move, child: int, now: float) -> None:
        """A move is made, by which `child` follows the part."""
        self._next_at = now + HOUR_S / max(1, self.moves_per_hour)
        self._groups |= {move.source: now + REST_S, move.target: now + REST_S}
        self._parts[move.topic, child] = now + PART_REST_S


def _said(group: Group, since: float) -> bool:
    return max(group.load_at, group.load_failed_at) >= since


def measured(groups: Mapping[int, Group], heard: Collection[int], nodes: Iterable[TopicNode]) -> dict[int, GroupLoad]:
    """The groups that were heard of, with their open parts."""
    stored: Counter[int] = Counter()
    parts: dict[int, list[OpenPart]] = {number: [] for number in heard}
    for node in nodes:
        for part in node.parts:
            stored[part.group] += 1
            if part.state is PartState.OPEN and not node.deleted_at_ms and part.group in parts:
                load = groups[part.group].loads.get(part_id(node.topic, part.number))
                parts[part.group].append(OpenPart(node.name, part.number, load.bytes_per_s if load is not None else 0.0))
    return {number: GroupLoad.measured(groups[number].cpu, stored[number], parts[number]) for number in heard}
