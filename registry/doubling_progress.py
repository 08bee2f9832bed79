"""How far a doubling is within its phase: keys and bytes that moved, entries that are behind, time that is left. Pure.

Source: docs/doubling.md, "The tool".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pixiu.wire.v1 import doubling_pb2 as pb
from registry.doubling import COPIED, STORED, Phase, Seen

MIN_SHARE: Final = 0.02
"""Of the work must be done before something is said of the time that is left."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What was done in a phase, of all partitions together."""

    done: int
    total: int
    """Of LEARN it is an estimate: a half of what the parents have."""
    unit: str
    """What is counted: replicas, keys, or entries."""
    bytes: int = 0
    """That children have taken over."""
    behind: int = 0
    """Entries of their parents that children lack."""


@dataclass(frozen=True, slots=True)
class Step:
    """Where a doubling stands, for people and programs."""

    phase: Phase
    missing: tuple[str, ...]
    """What is waited for, in words."""
    moved: Moved | None = None
    left_s: float | None = None
    """Until the phase is over, as it goes now; None: not known yet."""

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
        """Return one line for people; empty where there is nothing to say."""
        one = self.moved
        if one is None:
            return ""
        about = "about " if self.phase is Phase.LEARN else ""
        said = f"{one.done:,} of {about}{max(one.total, one.done):,} {one.unit}"
        said += f", {one.bytes / (1 << 20):,.1f} MiB" if one.bytes else ""
        said += f", {one.behind:,} entries behind" if one.behind else ""
        return said + (f", about {self.left_s:,.0f} s left" if self.left_s is not None else "")


def moved(seen: Seen, phase: Phase) -> Moved | None:
    """What was done in this phase; None where nothing is counted. Of CLEAN what is left alone: `Pace` knows what there was."""
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
        # A parent that is not split says how much it has; one that is, what moved.
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
    """Whether a child has all that its parent had once, and takes over what came since."""
    status = seen.statuses[seen.child(parent)]
    return seen.phase_of(seen.child(parent)) == pb.DOUBLING_LEARNING and status.learned > 0


class Pace:
    """What was done in a phase, and how fast it goes, by its first look and the last one."""

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._began = 0.0
        self._had = 0
        self._total = 0

    def step(self, phase: Phase, missing: tuple[str, ...], one: Moved | None, now: float) -> Step:
        """Where the doubling stands at a time, monotonic seconds."""
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
