"""Coverage of positions by an archive: the ranges of its manifests, and the holes between them. Pure.

    batch      ├── begin … end ──┤├── begin … end ──┤        ├── begin … end ──┤
    after      -1, the archive     the end of the    ▲        the end that it follows:
               begins here         batch before it   │        where it lacks a batch, or `begin` is higher
                                                     missing, or given up by an operator

A range names the end that it follows, so that any missing batch is noticed, except the newest: its messages are archived again by
the next run, or refused because Xiu no longer has them.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pipeline.spark.offsets import Offsets
from pixiu.errors import InvalidArgument, Unavailable

NONE: Final = -1
"""`after` of the first range of a partition."""
MISSING: Final = "missing"
TWICE: Final = "twice"
GIVEN_UP: Final = "given up"


@dataclass(frozen=True, slots=True)
class Range:
    """Positions of one partition in one batch; `begin` included, `end` excluded."""

    batch: int
    partition: int
    begin: int
    end: int
    after: int
    cluster: str
    """16 hex digits."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Positions that are not exactly once in the archive."""

    partition: int
    begin: int
    end: int
    what: str
    """MISSING: no batch has them. TWICE: more than one has. GIVEN_UP: the archive continued without them on request."""


def reach(ranges: Iterable[Range]) -> Offsets:
    """Partition → position at which the archive continues."""
    found: Offsets = {}
    for each in ranges:
        found[each.partition] = max(each.end, found.get(each.partition, 0))
    return found


def holes(ranges: Iterable[Range]) -> list[Hole]:
    """Positions that are not exactly once in the archive, by partition and position."""
    by_partition: dict[int, list[Range]] = {}
    for each in ranges:
        by_partition.setdefault(each.partition, []).append(each)
    found: list[Hole] = []
    for partition, of in sorted(by_partition.items()):
        at = NONE
        for each in sorted(of, key=lambda range_: (range_.begin, range_.end, range_.after)):
            follows = each.begin if each.after == NONE else each.after
            begins_here = at == NONE and each.after == NONE
            if not begins_here and follows > max(at, 0):
                found.append(Hole(partition, max(at, 0), follows, MISSING))
            if each.begin > follows:
                found.append(Hole(partition, follows, each.begin, GIVEN_UP))
            if each.begin < min(at, each.end):
                found.append(Hole(partition, each.begin, min(at, each.end), TWICE))
            at = max(at, each.end)
    return found


def covered(ranges: Sequence[Range], partition: int, floor: int) -> int:
    """The end of the archived positions that begin at `floor` without a gap; `floor` if it is not archived."""
    of = [each for each in ranges if each.partition == partition]
    at = floor
    for each in sorted(of, key=lambda range_: range_.begin):
        if each.begin > at:
            break
        at = max(at, each.end)
    return at


def batches_between(ranges: Iterable[Range], partition: int, begin: int, end: int) -> set[int]:
    """The batches that have some of these positions."""
    return {each.batch for each in ranges if each.partition == partition and each.begin < end and each.end > begin}


def cluster_of(ranges: Iterable[Range], path: str) -> str:
    """The cluster of an archive; empty: it has no batches. Raises InvalidArgument if there are two."""
    found = sorted({each.cluster for each in ranges})
    if len(found) > 1:
        raise InvalidArgument(f"{path} has batches of cluster {found[0]} and of cluster {found[1]}: keep an archive for each")
    return found[0] if found else ""


def check_cluster(path: str, made: str, target: str, here: str) -> None:
    """Raise InvalidArgument if an archive belongs to another cluster than the target, Unavailable if the target's cluster is
    unknown."""
    if not here:
        raise Unavailable(f"the Xius of {target} do not say yet of which cluster they are; try again soon")
    if not made:
        raise InvalidArgument(f"{path} holds no archive: no batch of it has a manifest")
    if made != here:
        raise InvalidArgument(f"{path} is an archive of cluster {made}, and {target} is cluster {here}")
