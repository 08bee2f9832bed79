"""Decides the next step of doubling a role, from its present state. Pure; the shell is `ops.doubling.tool`.

    broker, router, relay   BEGIN ─▶ START ─────────────────────────▶ COMMIT ─▶ FOLLOW ───────────▶ DONE
    xiu, pi                 BEGIN ─▶ START ─▶ LEARN ─▶ SPLIT ─▶ OPEN ─▶ COMMIT ─▶ FOLLOW ─▶ CLEAN ─▶ DONE

The phase is read off the layout and, of Xiu and Pi, off the partitions' logs, so a tool that was killed leaves no state that
the next one would need.

Source: docs/doubling.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from cluster.wire.v1 import doubling_pb2 as pb
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.errors import InvalidArgument, Unavailable
from pixiu.placement.partition import MAX_PARTITIONS
from registry.layout_change import check_doubled

STORED: Final = ("xiu", "pi")
"""Roles whose partitions are split in their logs."""
COPIED: Final = ("pi",)
"""Those of them whose children learn the keys that move; a child of Xiu leaves stored messages where they are."""
CLOSE: Final = 100
"""Parents are split when no child lacks more of its parent's entries than this; moved keys pause while these are taken over."""


class Phase(Enum):
    """Phases of a doubling."""

    BEGIN = "begin"
    """Nothing is written yet."""
    START = "start"
    """The layout names 2n; replicas of the new partitions start and load."""
    LEARN = "learn"
    """Xiu, Pi: children copy the data of their parents."""
    SPLIT = "split"
    """Xiu, Pi: children have nearly caught up; parents refuse moved keys."""
    OPEN = "open"
    """Xiu, Pi: children take over the last entries, then serve."""
    COMMIT = "commit"
    """Every new partition serves; the layout's number becomes 2n."""
    FOLLOW = "follow"
    """Every process adopts the new layout."""
    CLEAN = "clean"
    """Xiu, Pi: parents delete the keys that moved."""
    DONE = "done"


SOFT_PHASES: Final = (Phase.BEGIN, Phase.START, Phase.COMMIT, Phase.FOLLOW, Phase.DONE)
STORED_PHASES: Final = (
    Phase.BEGIN, Phase.START, Phase.LEARN, Phase.SPLIT, Phase.OPEN, Phase.COMMIT, Phase.FOLLOW, Phase.CLEAN, Phase.DONE,
)  # fmt: skip


def phases(role: str) -> tuple[Phase, ...]:
    """The phases of a role's doubling, in order."""
    return STORED_PHASES if role in STORED else SOFT_PHASES


@dataclass(frozen=True, slots=True)
class Begin:
    """Write 2n into the layout."""


@dataclass(frozen=True, slots=True)
class Advance:
    """Have the leaders of these partitions, all at once, go on to a phase."""

    partitions: tuple[int, ...]
    phase: pb.DoublingPhase.ValueType
    forced: str = ""
    """CLEANING: what was not compared, in words, when the operator wants to delete all the same."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Make 2n the number in the layout."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until others have done something."""

    missing: tuple[str, ...]
    """Missing conditions, in words."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is left to do."""


Action = Begin | Advance | Commit | Wait | Finished


@dataclass(frozen=True, slots=True)
class Seen:
    """The present state of one role."""

    role: str
    layout: RoleLayout
    doubling: str
    """The ID of the doubling that is under way, was just committed, or shall begin: 16 hex digits."""
    running: Mapping[int, int]
    """Partition → its Running replicas."""
    statuses: Mapping[int, pb.DoublingStatus] = field(default_factory=dict)
    """Xiu, Pi: answers of the partitions' leaders; partitions without a leader are left out."""
    behind: tuple[str, ...] = ()
    """Processes that use an earlier layout than the registry's, in words. Asked for in FOLLOW."""
    force: bool = False
    """True if parents delete moved keys even when these could not be compared with the children's."""

    @property
    def committed(self) -> bool:
        """True if the layout has this doubling's number of partitions."""
        return self.doubling in self.layout.ended

    @property
    def under_way(self) -> bool:
        """True if the layout names this doubling's number as the next one."""
        return self.layout.next > self.layout.n

    @property
    def parents(self) -> range:
        """Partitions that are split."""
        return range(self.layout.n // 2 if self.committed else self.layout.n)

    def child(self, parent: int) -> int:
        """Return the partition that gets a part of a parent's keys."""
        return parent + len(self.parents)

    def phase_of(self, partition: int) -> pb.DoublingPhase.ValueType:
        """Return a partition's phase in this doubling; NONE if it only knows others."""
        status = self.statuses.get(partition)
        return status.phase if status is not None and status.doubling == int(self.doubling, 16) else pb.DOUBLING_NONE


def decide(seen: Seen) -> tuple[Phase, Action]:
    """Return the phase, and the action to take in it."""
    return _after(seen) if seen.committed else _before(seen)


def _before(seen: Seen) -> tuple[Phase, Action]:
    """Decide while the layout has the number from before this doubling."""
    if not seen.under_way:
        return Phase.BEGIN, Begin()
    wanted, count = max(seen.layout.replicas, 1), seen.layout.n
    short = [p for p in range(count, 2 * count) if seen.running.get(p, 0) < wanted]
    cut = any(seen.phase_of(parent) == pb.DOUBLING_SPLIT for parent in seen.parents)
    if short and not cut:
        return Phase.START, Wait(
            tuple(f"{seen.role} partition {p}: {seen.running.get(p, 0)} of {wanted} replicas Running" for p in short)
        )
    if seen.role not in STORED:
        return Phase.COMMIT, Commit()
    mute = [p for p in range(2 * count) if p not in seen.statuses]
    if mute:
        phase = Phase.OPEN if cut else Phase.LEARN
        return phase, Wait(tuple(f"{seen.role} partition {p}: no leader answers" for p in mute))
    return _cut(seen, cut)


def _cut(seen: Seen, cut: bool) -> tuple[Phase, Action]:
    """Decide for Xiu and Pi, from the first child that learns to the last one that serves."""
    parents = tuple(seen.parents)
    empty = tuple(seen.child(p) for p in parents if seen.phase_of(seen.child(p)) == pb.DOUBLING_NONE)
    if empty:
        return Phase.LEARN, Advance(empty, pb.DOUBLING_LEARNING)
    lag = {p: seen.statuses[p].committed - seen.statuses[seen.child(p)].learned for p in parents}
    bare = [p for p in parents if not seen.statuses[seen.child(p)].learned] if seen.role in COPIED else []
    far = [p for p in parents if lag[p] > CLOSE and p not in bare] if seen.role in COPIED else []
    if (bare or far) and not cut:
        said = [f"{seen.role} partition {seen.child(p)}: takes over what partition {p} has" for p in bare]
        return Phase.LEARN, Wait((*said, *(f"{seen.role} partition {seen.child(p)}: {lag[p]:,} entries behind" for p in far)))
    whole = tuple(p for p in parents if seen.phase_of(p) == pb.DOUBLING_NONE)
    if whole:
        return Phase.SPLIT, Advance(whole, pb.DOUBLING_SPLIT)
    closed = [p for p in parents if seen.phase_of(seen.child(p)) == pb.DOUBLING_LEARNING]
    split = [p for p in closed if seen.statuses[p].split_at]
    ready = tuple(seen.child(p) for p in split if seen.statuses[seen.child(p)].learned >= seen.statuses[p].split_at)
    if ready:
        return Phase.OPEN, Advance(ready, pb.DOUBLING_OPEN)
    if closed:
        return Phase.OPEN, Wait(tuple(f"{seen.role} partition {seen.child(p)}: takes over the last entries" for p in closed))
    return Phase.COMMIT, Commit()


def _after(seen: Seen) -> tuple[Phase, Action]:
    """Decide once the layout has the number of this doubling."""
    if seen.behind:
        return Phase.FOLLOW, Wait(seen.behind)
    if seen.role not in STORED:
        return Phase.DONE, Finished()
    parents = tuple(seen.parents)
    mute = [p for p in range(2 * len(parents)) if p not in seen.statuses]
    if mute:
        return Phase.CLEAN, Wait(tuple(f"{seen.role} partition {p}: no leader answers" for p in mute))
    split = tuple(p for p in parents if seen.phase_of(p) == pb.DOUBLING_SPLIT)
    if split:
        return Phase.CLEAN, _clean(seen, split)
    left = [p for p in parents if seen.phase_of(p) == pb.DOUBLING_CLEANING]
    if left:
        return Phase.CLEAN, Wait(
            tuple(f"{seen.role} partition {p}: {seen.statuses[p].keys:,} moved keys are still to be deleted" for p in left)
        )
    return Phase.DONE, Finished()


def _clean(seen: Seen, split: tuple[int, ...]) -> Action:
    """Let parents delete their copy once their children have shown that they have the same."""
    lost, waits = [], []
    for parent in split:
        child = seen.child(parent)
        mine, its = seen.statuses[parent], seen.statuses[child]
        if its.doubling != int(seen.doubling, 16) or its.phase not in (pb.DOUBLING_OPEN, pb.DOUBLING_NONE):
            lost.append(f"{seen.role} partition {child} knows nothing of this doubling (were its disks lost?)")
        elif seen.role not in COPIED:
            continue
        elif not mine.digest:
            waits.append(f"{seen.role} partition {parent}: reads what moved, to compare it")
        elif not its.digest and its.phase == pb.DOUBLING_OPEN:
            waits.append(f"{seen.role} partition {child}: reads what it had at the cut, to compare it")
        elif not its.digest:
            lost.append(f"{seen.role} partition {child} no longer knows what it had at the cut: all its replicas ended then")
        elif mine.digest != its.digest:
            raise Unavailable(
                f"{seen.role} partitions {parent} and {child} do not agree on what moved ({mine.digest:016x}, {its.digest:016x}): "
                f"nothing is deleted, and the new partition serves; `pixiu repair --role {seen.role}`, then run this again"
            )
    if lost and not seen.force:
        raise Unavailable(
            f"{'; '.join(lost)}. Nothing is deleted, because the partition that was split may have the last copy: "
            f"`pixiu double {seen.role} --force` deletes it anyway"
        )
    return Wait(tuple(waits)) if waits else Advance(split, pb.DOUBLING_CLEANING, "; ".join(lost))


def check_take_back(seen: Seen) -> None:
    """Check that the doubling can be taken back. A child that has begun to learn starts over with the next doubling. Raises
    `InvalidArgument` when the doubling is not under way, or a parent was split already."""
    if not seen.under_way:
        raise InvalidArgument(f"no doubling of {seen.role} is under way: there is nothing to take back")
    if any(seen.statuses[parent].doubling == int(seen.doubling, 16) for parent in seen.parents if parent in seen.statuses):
        raise InvalidArgument(
            f"{seen.role} was split already, so this doubling cannot be taken back: `pixiu double {seen.role}` completes it"
        )


def unfinished(seen: Mapping[int, pb.DoublingStatus], layout: RoleLayout) -> bool:
    """Return True if parents of the last committed doubling (Xiu, Pi) are still split or deleting."""
    if not layout.ended:
        return False
    last = int(layout.ended[-1], 16)
    return any(s.doubling == last and s.phase in (pb.DOUBLING_SPLIT, pb.DOUBLING_CLEANING) for s in seen.values())


def unnamed(seen: Mapping[int, pb.DoublingStatus], layout: RoleLayout) -> str:
    """Return the ID of a doubling (Xiu, Pi) that has split partitions although the layout does not name it: it was taken back
    too late. "" if there is none."""
    for partition, status in sorted(seen.items()):
        name = f"{status.doubling:016x}"
        split = status.phase == pb.DOUBLING_SPLIT and partition < layout.n and status.partitions == 2 * layout.n
        if split and name not in layout.doublings:
            return name
    return ""


def chosen(layout: Layout, role: str, to: int, unfinished_last: bool, new: str, strayed: str = "") -> str | None:
    """Return the ID of the doubling to carry out; None if the role already has the wanted number.

    Args:
        to: the wanted number of partitions; 0: twice the present number, or the target of the doubling under way.
        unfinished_last: see `unfinished`.
        strayed: see `unnamed`; it is resumed under its ID.
        new: the ID for a new doubling.

    Raises `InvalidArgument` when the role cannot be doubled, or another one is being doubled.
    """
    check_doubled(role)
    there = layout.roles.get(role)
    if there is None:
        raise InvalidArgument(f"the cluster has no {role}; it has {', '.join(sorted(layout.roles)) or 'no layout'}")
    for other, found in layout.roles.items():
        if other != role and found.next > found.n:
            raise InvalidArgument(
                f"{other} is being doubled; one role at a time: `pixiu double {other}` ends that, "
                f"`pixiu double {other} --abort` takes it back"
            )
    if there.next > there.n:
        if not there.doublings:
            raise InvalidArgument(
                f"the layout names {there.next} partitions of {role} without a doubling: write next {there.n} back"
            )
        if strayed:
            raise InvalidArgument(
                f"partitions of {role} were split by doubling {strayed}, which the layout does not name: take the one under way "
                f"back with `pixiu double {role} --abort`, then `pixiu double {role}` takes {strayed} up again"
            )
        if to not in (0, there.next):
            raise InvalidArgument(f"a doubling of {role} to {there.next} partitions is under way: end it before one to {to}")
        return there.doublings[-1]
    if unfinished_last and to in (0, there.n):
        return there.ended[-1]
    if to == there.n:
        return None
    if 2 * there.n > MAX_PARTITIONS:
        raise InvalidArgument(f"{role} has {there.n} partitions, the most there can be")
    if to not in (0, 2 * there.n):
        raise InvalidArgument(f"{role} has {there.n} partitions and doubles to {2 * there.n}, not to {to}")
    if unfinished_last:
        raise InvalidArgument(
            f"the last doubling of {role} has not deleted what moved yet: `pixiu double {role} --to {there.n}` first"
        )
    return strayed or new


def problems(view: View, role: str, version: str, mute: Sequence[int] = ()) -> list[str]:
    """List, in words, the problems to fix before a doubling begins. `mute`: partitions of which no leader answers."""
    layout = view.layout.roles[role]
    bare = [partition for partition in range(layout.n) if not view.replicas(role, partition)]
    found = [f"{role} partition {partition} has no Running replica: `pixiu status`" for partition in bare]
    found += [
        f"{role} partition {partition} has no leader that answers: `pixiu status` says what it waits for"
        for partition in mute
        if partition not in bare
    ]
    strange = sorted({node.version for node in view.of_role(role) if node.version != version})
    if strange:
        found.append(f"this tool has version {version}, and {role} runs {', '.join(strange)}: use the tool of the same version")
    return found


def start_commands(role: str, missing: Sequence[tuple[int, int]], target: str) -> list[str]:
    """Return the commands that start replicas of new partitions by hand. missing: (partition, number of replicas)."""
    return [
        f"python -m {role} --config FILE --set registry={target} --set partition={partition}"
        + (f"      # {count} times, each with its own data_dir" if count > 1 else "")
        for partition, count in missing
    ]
