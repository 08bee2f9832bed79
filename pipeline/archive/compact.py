"""Compaction: small batches of an archive into large ones.

    batch=1 ─┐
    batch=2 ─┼─▶ messages/batch=9 ──▶ manifest/batch=9, which replaces 1, 2, 3 ──▶ an hour later batches 1, 2, 3 are removed
    batch=3 ─┘   nothing counts yet   9 counts, and 1, 2, 3 do not

The one new manifest is what changes: a reader that lists manifests before it is there reads the old batches, and one that lists
them later reads the new one. The old files stay for the first. A killed run leaves a folder without a manifest, as an archive run
does.

Source: docs/pipeline.md, "Archive".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from pipeline.archive.archive import (
    COLUMNS,
    ROW_BYTES,
    Summary,
    batches_in,
    every_manifest,
    files_of,
    manifests,
    ranges_of,
    write_manifest,
    write_messages,
)
from pipeline.archive.coverage import Range
from pipeline.folders import remove_folder
from pipeline.report import Report, Section
from pixiu.errors import StoreDamaged, Unavailable

TARGET_BYTES: Final = 256 << 20
KEEP_H: Final = 1.0
"""Hours for which replaced batches stay, for readers that began before."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch that counts."""

    number: int
    bytes: int
    ranges: tuple[Range, ...]


def joined(batches: Sequence[Batch], number: int) -> list[Range] | None:
    """The ranges of these batches as those of one batch; None if they do not follow one another without a gap."""
    found: dict[int, Range] = {}
    for batch in batches:
        for each in batch.ranges:
            before = found.get(each.partition)
            if before is None:
                found[each.partition] = replace(each, batch=number)
            elif before.end == each.begin == each.after:
                found[each.partition] = replace(before, end=each.end)
            else:
                return None
    return [found[partition] for partition in sorted(found)]


def plan(batches: Iterable[Batch], target_bytes: int) -> list[list[Batch]]:
    """Groups of batches to join: each at least two that follow one another, and at most `target_bytes`. A batch of half of that is
    left alone, so that it is not written again and again."""
    groups: list[list[Batch]] = []
    group: list[Batch] = []
    for batch in sorted(batches, key=lambda each: sum(range_.end for range_ in each.ranges)):  # by position
        large = batch.bytes >= target_bytes / 2
        if large or sum(each.bytes for each in group) + batch.bytes > target_bytes or joined([*group, batch], 0) is None:
            groups.append(group)
            group = []
        if not large:
            group.append(batch)
    return [each for each in (*groups, group) if len(each) > 1]


def batches_of(ranges: Iterable[Range], sizes: Mapping[int, int]) -> list[Batch]:
    """The batches of an archive."""
    found: dict[int, list[Range]] = {}
    for each in ranges:
        found.setdefault(each.batch, []).append(each)
    return [Batch(number, sizes[number], tuple(of)) for number, of in found.items()]


def _summaries(spark: Any, path: str) -> dict[int, dict[int, tuple[int, int, int]]]:
    """Batch → partition → rows, bytes, digest, as the manifests have them."""
    found: dict[int, dict[int, tuple[int, int, int]]] = {}
    for row in manifests(spark, path).select("batch", "xiu_partition", "rows", "bytes", "digest").collect():
        found.setdefault(row[0], {})[row[1]] = (row[2], row[3] or 0, row[4])
    return found


def join(
    spark: Any, path: str, group: Sequence[Batch], said: Mapping[int, Mapping[int, tuple[int, int, int]]], now_us: int
) -> tuple[int, Summary]:
    """Write a group as one batch that replaces it; return its number and its content. Raises StoreDamaged if the files are not what
    the manifests say, Unavailable if the archive changes meanwhile."""
    known = batches_in(spark, f"{path}/manifest")
    number, of = max(now_us, max(known) + 1), [each.number for each in group]
    files = files_of(spark, path)
    wanted = files.where(files.batch.isin(of)).select(*COLUMNS, "day")
    summary = write_messages(spark, wanted.coalesce(1).sortWithinPartitions("day", "xiu_partition", "seq"), number, path)
    expected: dict[int, tuple[int, int]] = {}
    for batch in of:
        for partition, (rows, _, digest) in said[batch].items():
            before = expected.get(partition, (0, 0))
            expected[partition] = before[0] + rows, before[1] ^ digest
    if {each: (found[0], found[4]) for each, found in summary.items()} != {
        each: sums for each, sums in expected.items() if sums[0]
    }:
        raise StoreDamaged(
            f"batches {of[0]} to {of[-1]} of the archive in {path} are damaged, and nothing was replaced: "
            f"`pixiu pipeline archive {path} --verify` names them"
        )
    if batches_in(spark, f"{path}/manifest") != known:
        raise Unavailable(f"the archive in {path} changed while this run compacted it: run it again when no other one runs")
    of_these = [row for row in every_manifest(spark, path).collect() if row.batch in of]
    older = {each for row in of_these for each in row.replaces or ()}
    write_manifest(spark, joined(group, number) or (), summary, path, {*of, *(older & known)})
    return number, summary


def sweep(spark: Any, path: str, before_us: int) -> list[int]:
    """Remove batches that were replaced before a time; return their numbers. The manifest goes last, and that of a batch which
    replaced others after theirs: whenever it is killed, nothing counts again."""
    there = batches_in(spark, f"{path}/messages") | batches_in(spark, f"{path}/manifest")
    old = [row for row in every_manifest(spark, path).collect() if row.batch < before_us]
    replaced = there & {each for row in old for each in row.replaces or ()}
    for batch in sorted(replaced):
        for folder in ("messages", "manifest"):
            remove_folder(spark, f"{path}/{folder}/batch={batch}")
    return sorted(replaced)


def run(
    spark: Any, path: str, now_us: Callable[[], int], target_bytes: int = TARGET_BYTES, keep_h: float = KEEP_H
) -> tuple[Report, dict[str, Any]]:
    """Remove what was replaced long ago, then join small batches. Raises InvalidArgument, StoreDamaged, Unavailable."""
    removed = sweep(spark, path, now_us() - int(keep_h * 3_600_000_000))
    said = _summaries(spark, path)
    sizes = {batch: sum(size + rows * ROW_BYTES for rows, size, _ in of.values()) for batch, of in said.items()}
    rows = []
    for group in plan(batches_of(ranges_of(spark, path), sizes), target_bytes):
        number, summary = join(spark, path, group, said, now_us())
        rows.append((number, len(group), sum(each[0] for each in summary.values()), sum(each[3] or 0 for each in summary.values())))
    report = Report("Compaction of the archive", {"path": path, "batches_before": len(said)})
    report.facts |= {"batches": len(said) - sum(row[1] - 1 for row in rows), "removed": len(removed)}
    report.sections.append(Section("joined", ("batch", "of", "messages", "bytes"), tuple(rows), len(rows)))
    return report, {}
