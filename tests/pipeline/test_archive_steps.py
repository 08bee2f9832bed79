"""An archive whose run is killed between any two steps, with retention between: every message is somewhere. No Spark, no Java."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from pipeline.archive.archive import ArchiveOptions, Summary, archive_new, rows_for
from pipeline.archive.compact import Batch, joined, plan
from pipeline.archive.coverage import (
    GIVEN_UP,
    MISSING,
    TWICE,
    Hole,
    Range,
    batches_between,
    check_cluster,
    cluster_of,
    covered,
    holes,
    reach,
)
from pipeline.spark.offsets import Offsets
from pixiu.errors import Gone, InvalidArgument, Unavailable
from tests.pipeline.test_planning import HERE, Cluster, cluster, stream

__all__ = ["cluster"]
OPTIONS = ArchiveOptions("127.0.0.1:7000", "archive")
CLOCK = itertools.count(1000)
Position = tuple[int, int]


class Killed(BaseException):
    """The process ends here."""


@dataclass
class Files:
    """An archive in memory, whose process is killed at its `kill`th step."""

    cluster: Cluster
    kill: int = -1
    written: dict[int, list[Position]] = field(default_factory=dict)
    found: list[Range] = field(default_factory=list)
    meanwhile: list[Range] = field(default_factory=list)
    """What another run writes while this one does."""
    steps: int = 0
    body_bytes: int = 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps - 1 == self.kill:
            raise Killed

    def ranges(self) -> list[Range]:
        return list(self.found)

    def sealed(self) -> set[int]:
        return {each.batch for each in self.found}

    def size(self) -> tuple[int, int]:
        return sum(map(len, self.written.values())), self.body_bytes * sum(map(len, self.written.values()))

    def write(self, batch: int, begins: Offsets, ends: Offsets) -> Summary:
        assert batch not in self.written, "a folder is never written again"
        self._step()
        self.written[batch] = []
        for place in sorted(ends):
            for position in self.cluster.partitions[place]:
                if begins[place] <= position < ends[place]:
                    assert position >= self.cluster.floors.get(place, 0), "replicas say that it is gone"
                    self.written[batch].append((place, position))
            self._step()
        self.found += self.meanwhile
        counts = Counter(place for place, _ in self.written[batch])
        return {place: (rows, 0, 0, rows * self.body_bytes, 0) for place, rows in counts.items()}

    def seal(self, ranges: Sequence[Range], summary: Summary) -> None:
        self._step()
        self.found += ranges
        self._step()

    def readable(self) -> list[Position]:
        return [position for batch in self.sealed() for position in self.written.get(batch, ())]

    def retain(self) -> None:
        """Let go what the archive has."""
        for place, of in enumerate(self.cluster.partitions):
            floor = self.cluster.floors.get(place, 0)
            up_to = covered(self.found, place, floor)
            if any(position < up_to for position in of):
                self.cluster.floors[place] = up_to


def archive(files: Files, rows: int = 7, *, accept_loss: bool = False) -> list[int]:
    files.steps = 0
    options = {"startingOffsets": "earliest", "failOnDataLoss": "false", "reader": "archive", "maxOffsetsPerTrigger": str(rows)}
    wanted = ArchiveOptions(OPTIONS.target, OPTIONS.path, rows, accept_loss=accept_loss)
    return archive_new(stream(**options), files, wanted, lambda: next(CLOCK))


def missing_of(files: Files) -> set[Position]:
    """Positions that are neither stored nor in the archive."""
    every = {(place, position) for place, of in enumerate(files.cluster.partitions) for position in of}
    stored = {(place, position) for place, position in every if position >= files.cluster.floors.get(place, 0)}
    return every - stored - set(files.readable())


def test_killed_between_any_two_steps_with_retention_between_nothing_is_lost(cluster: Cluster) -> None:
    cluster.id = HERE
    for kill, earlier in itertools.product(range(16), (False, True)):
        cluster.partitions, cluster.floors = [[], []], {}
        files = Files(cluster)
        if earlier:
            cluster.put(0, 3)
            archive(files)
        cluster.put(0, 10)
        cluster.put(1, 8)
        files.kill = kill
        try:
            archive(files)
        except Killed:
            files.kill = -1
        cluster.partitions.append([])  # a doubling, too
        cluster.put(0, 5, epoch=1)
        cluster.put(2, 5)
        files.retain()
        assert not missing_of(files), (kill, earlier)
        archive(files)
        files.retain()
        assert not missing_of(files)
        assert holes(files.found) == []
        every = [(place, position) for place, of in enumerate(cluster.partitions) for position in of]
        assert Counter(files.readable()) == Counter(every), "each once"
        assert cluster.held == {(each, "archive"): end for each, end in reach(files.found).items()}


def test_what_retention_took_from_the_archive_is_told_at_position_0_as_well(cluster: Cluster) -> None:
    cluster.id = HERE
    cluster.put(0, 10)
    files = Files(cluster)
    archive(files)
    cluster.partitions.append([])
    cluster.put(0, 10)
    cluster.put(2, 10)
    cluster.floors[2] = 4
    said = "Xiu partition 2: the archive in archive ends at position 0, and retention has passed it: the first that is stored is 4"
    with pytest.raises(Gone, match=said):
        archive(files)
    archive(files, accept_loss=True)
    assert holes(files.found) == [Hole(2, 0, 4, GIVEN_UP)]
    lost = {(2, 1), (2, 2), (2, 3)}
    assert missing_of(files) == lost
    archive(files)
    files.retain()
    assert missing_of(files) == lost


def test_another_run_at_the_same_time_is_noticed_and_its_files_stay(cluster: Cluster) -> None:
    cluster.id = HERE
    cluster.put(0, 10)
    files = Files(cluster, meanwhile=[Range(77, 0, 0, 6, -1, HERE), Range(77, 1, 0, 1, -1, HERE)])
    with pytest.raises(Unavailable, match="another run archives there"):
        archive(files)
    assert files.sealed() == {77}
    files.meanwhile = []
    archive(files)
    assert holes(files.found) == []


def test_another_clusters_archive_is_refused(cluster: Cluster) -> None:
    cluster.id = ""
    cluster.put(0, 10)
    files = Files(cluster)
    with pytest.raises(Unavailable, match="do not say yet of which cluster they are"):
        archive(files)
    cluster.id = HERE
    archive(files)
    cluster.id = "b" * 16
    said = f"archive is an archive of cluster {HERE}, and 127.0.0.1:7000 is cluster {'b' * 16}"
    with pytest.raises(InvalidArgument, match=said):
        archive(files)
    with pytest.raises(InvalidArgument, match="archive holds no archive: no batch of it has a manifest"):
        check_cluster("archive", cluster_of([], "archive"), "127.0.0.1:7000", HERE)


def test_every_batch_that_is_missing_is_a_hole_but_the_newest() -> None:
    batches = [
        [Range(1, 0, 5, 10, -1, HERE)],
        [Range(2, 0, 10, 20, 10, HERE), Range(2, 1, 0, 4, 0, HERE)],
        [Range(3, 0, 20, 1 << 32, 20, HERE), Range(3, 1, 4, 4, 4, HERE)],
        [Range(4, 0, 1 << 32, 1 << 33, 1 << 32, HERE), Range(4, 1, 6, 9, 4, HERE)],
    ]

    def without(*missing: int) -> list[Hole]:
        return holes(each for place, of in enumerate(batches) if place not in missing for each in of)

    given_up = Hole(1, 4, 6, GIVEN_UP)
    assert without() == [given_up]
    assert without(0) == [Hole(0, 0, 10, MISSING), given_up]
    assert without(1) == [Hole(0, 10, 20, MISSING), Hole(1, 0, 4, MISSING), given_up]
    assert without(2) == [Hole(0, 20, 1 << 32, MISSING), given_up]
    assert without(0, 1) == [Hole(0, 0, 20, MISSING), Hole(1, 0, 4, MISSING), given_up]
    assert without(3) == []
    assert holes([*batches[0], Range(9, 0, 5, 12, -1, HERE)]) == [Hole(0, 5, 10, TWICE)]
    every = [each for of in batches for each in of]
    assert (batches_between(every, 0, 7, 20), batches_between(every, 1, 5, 8)) == ({1, 2}, {4}), "what retention reads again"
    assert (covered(every, 0, 7), covered(every, 1, 2), covered(every, 1, 5), covered(every, 2, 3)) == (1 << 33, 4, 5, 3)


def test_a_batch_is_limited_by_bytes_as_well(cluster: Cluster) -> None:
    cluster.id = HERE
    cluster.put(0, 100)
    files = Files(cluster, body_bytes=900)
    wanted = ArchiveOptions(OPTIONS.target, OPTIONS.path, rows_per_batch=40, bytes_per_batch=10_000)
    archive_new(stream(startingOffsets="earliest", failOnDataLoss="false"), files, wanted, lambda: next(CLOCK))
    assert [len(of) for of in files.written.values()] == [40, *[10] * 6], "the first batch does not know how large messages are"
    assert rows_for(wanted, 1, 1 << 20) == 1, "a message is never divided"
    cluster.put(0, 30)
    archive_new(stream(startingOffsets="earliest", failOnDataLoss="false"), files, wanted, lambda: next(CLOCK))
    assert [len(of) for of in files.written.values()][7:] == [10] * 3, "a later run does"


def test_only_batches_that_follow_one_another_are_joined() -> None:
    def batch(number: int, size: int, *ranges: tuple[int, int, int, int]) -> Batch:
        return Batch(number, size, tuple(Range(number, each, begin, end, after, HERE) for each, begin, end, after in ranges))

    first = batch(1, 10, (0, 5, 10, -1))
    second = batch(2, 10, (0, 10, 20, 10), (1, 0, 4, 0))
    third = batch(3, 10, (0, 20, 1 << 32, 20), (1, 4, 4, 4))
    after_a_hole = batch(4, 10, (0, 1 << 32, 1 << 33, 1 << 32), (1, 6, 9, 4))
    fifth = batch(5, 10, (0, 1 << 33, 1 << 34, 1 << 33), (1, 9, 9, 9))
    everything = [fifth, second, third, first, after_a_hole]
    assert plan(everything, 100) == [[first, second, third], [after_a_hole, fifth]]
    assert plan(everything, 29) == [[first, second], [after_a_hole, fifth]]
    assert plan(everything, 20) == [], "what is half as large as wanted is left alone"
    assert plan([first, third], 100) == [], "a batch is missing between them"
    assert joined([first, second, third], 9) == [Range(9, 0, 5, 1 << 32, -1, HERE), Range(9, 1, 0, 4, 0, HERE)]
    ranges = [each for of in everything for each in of.ranges]
    new = [*(joined([first, second, third], 9) or ()), *(joined([after_a_hole, fifth], 10) or ())]
    assert holes(new) == holes(ranges) == [Hole(1, 4, 6, GIVEN_UP)]
    assert reach(new) == reach(ranges)
