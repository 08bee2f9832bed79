"""Progress of a doubling within its phase: keys and bytes moved, entries behind, time left. Pure.

Source: docs/doubling.md, "The tool".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from cluster.wire.v1 import doubling_pb2 as pb
from ops.doubling.doubling import COPIED, STORED, Phase, Seen

MIN_SHARE: Final = 0.02
"""Share of the work that must be done before the time left is estimated."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Work done in a phase, all partitions together."""

    done: int
    total: int
    """In LEARN an estimate: half of the parents' keys."""
    unit: str
    """Unit of the counts: replicas, keys, or entries."""
    bytes: int = 0
    """Bytes that children have taken over."""
    behind: int = 0
    """Entries of their parents that children lack."""


@dataclass(frozen=True, slots=True)
class Step:
    """State of a doubling, for people and programs."""

    phase: Phase
    missing: tuple[str, ...]
    """Missing conditions, in words."""
    moved: Moved | None = None
    left_s: float | None = None
    """Estimated time until the phase is over; None: not known yet."""

    def json(self) -> dict[str, object]:
        """Return values for JSON."""
        fields: dict[str, object] = {"phase": self.phase.value, "missing": list(self.missing)}
        if self.moved is not None:
            fields |= {"done": self.moved.done, "total": self.moved.total, "unit": self.moved.unit}
            fields |= {"bytes": self.moved.bytes, "behind": self.moved.behind}
        if self.left_s is not None:
            fields["left_s"] = round(self.left_s, 1)
        return fields

    def text(self) -> str:
        """Return one line for people; empty if there is nothing to report."""
        one = self.moved
        if one is None:
            return ""
        about = "about " if self.phase is Phase.LEARN else ""
        said = f"{one.done:,} of {about}{max(one.total, one.done):,} {one.unit}"
        said += f", {one.bytes / (1 << 20):,.1f} MiB" if one.bytes else ""
        said += f", {one.behind:,} entries behind" if one.behind else ""
        return said + (f", about {self.left_s:,.0f} s left" if self.left_s is not None else "")


def moved(seen: Seen, phase: Phase) -> Moved | None:
    """Return the work done in this phase; None where nothing is counted. In CLEAN only the remaining work is known: `Pace` knows
    the total."""
    if phase is Phase.START:
        wanted = max(seen.layout.replicas, 1)
        children = range(seen.layout.n, 2 * seen.layout.n)
        return Moved(sum(min(seen.running.get(p, 0), wanted) for p in children), wanted * len(children), "replicas")
    if seen.role not in STORED:
        return None
    parents = [p for p in seen.parents if p in seen.statuses and seen.child(p) in seen.statuses]
    if phase in (Phase.LEARN, Phase.SPLIT, Phase.OPEN) and seen.role in COPIED:
        own = [seen.statuses[seen.child(p)] for p in parents if seen.phase_of(seen.child(p)) != pb.DOUBLING_NONE]
        lags = (seen.statuses[p].committed - seen.statuses[seen.child(p)].learned for p in parents if _follows(seen, p))
        # A parent that is not split reports all of its keys; one that is, the keys that moved.
        total = sum(one.keys // (2 if seen.phase_of(p) == pb.DOUBLING_NONE else 1) for p, one in _of(seen, parents))
        done = sum(one.keys for one in own)
        return Moved(done, max(total, done), "keys", sum(one.bytes for one in own), sum(max(lag, 0) for lag in lags))
    if phase is Phase.CLEAN:
        left = sum(one.keys for p, one in _of(seen, parents) if seen.phase_of(p) in (pb.DOUBLING_SPLIT, pb.DOUBLING_CLEANING))
        return Moved(0, left, "keys")
    return None


def _of(seen: Seen, parents: list[int]) -> list[tuple[int, pb.DoublingStatus]]:
    return [(p, seen.statuses[p]) for p in parents]


def _follows(seen: Seen, parent: int) -> bool:
    """Return True if a child has copied its parent's data once, and follows new entries."""
    status = seen.statuses[seen.child(parent)]
    return seen.phase_of(seen.child(parent)) == pb.DOUBLING_LEARNING and status.learned > 0


class Pace:
    """Work done in a phase and its rate, from the first look and the latest one."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._began = 0.0
        self._had = 0
        self._total = 0

    def step(self, phase: Phase, missing: tuple[str, ...], one: Moved | None, now: float) -> Step:
        """Return the state at a time in monotonic seconds."""
        if phase is not self._phase:
            self._phase, self._began, self._had, self._total = phase, now, one.done if one is not None else 0, 0
        if one is None:
            return Step(phase, missing)
        self._total = max(self._total, one.total)
        if phase is Phase.CLEAN:
            one = replace(one, done=self._total - one.total, total=self._total)
        gone, done = now - self._began, one.done - self._had
        if gone <= 0 or done <= 0 or done < MIN_SHARE * self._total:
            return Step(phase, missing, one)
        return Step(phase, missing, one, max(self._total - one.done, 0) * gone / done)
