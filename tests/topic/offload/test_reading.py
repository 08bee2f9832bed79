"""Reads of what only the object store has: by offset and by time, through a bounded cache, with the store failing or away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from cluster.topics import entries as en
from pixiu.errors import Unavailable
from pixiu.objects.manifest import StoredObject, folder_of
from pixiu.objects.store import ObjectStore
from tests.support.faulty_store import URL, faulty_store
from tests.topic.builders import PART, TOPIC, Log
from topic.mending import Mending
from topic.offload.cut import cut
from topic.offload.fetcher import Fetcher
from topic.storage import reader as readers
from topic.storage.reader import Reader
from topic.storage.segment import Gap, Stored

FOLDER = folder_of(TOPIC, 1)
BLOCKS = 30


class Away:
    """A part of 30 blocks, the first 20 in three objects of a store and not here."""

    def __init__(self, folder: Path, limit_bytes: int = 1 << 20) -> None:
        self.store, self.files = faulty_store()
        self.log = Log()
        self.log.open_part()
        for number in range(BLOCKS):
            self.log.write(1, 1, first=2 * number + 1, at_us=1000 + number)
            self.log.store.flush()
        for low, high in ((0, 14), (14, 30), (30, 40)):
            self.upload(low, high)
        self.log.store.local_firsts[PART] = 40
        self.log.store.flush()
        self.log.store.cache.clear()
        self.gaps: list[Gap] = []
        self.fetcher = Fetcher(folder / "cache", limit_bytes, self._store_at)
        self.reader = Reader(lambda: self.log.store, lambda _part, gap: self.gaps.append(gap), self.fetcher.blocks)

    def _store_at(self, url: str) -> ObjectStore:
        assert url == URL
        return self.store

    def upload(self, low: int, high: int) -> StoredObject:
        log = self.log.store.logs[PART]
        made = cut(self.log.files, log.segments, low, high, 1 << 20, 1, URL)
        assert made.object is not None
        assert made.gap is None
        assert (made.object.base, made.object.end, made.object.crc) == (low, high, crc32(made.data))
        self.store.put(made.object.name(FOLDER), made.data)
        self.log.apply(en.UPLOADED, en.encode_objects(PART, [made.object]))
        return made.object

    async def offsets(self) -> list[int]:
        """The bases of all blocks that can be read."""
        found, at, end = list[int](), 0, self.log.store.state.parts[PART].end
        while at < end:
            each = await self.reader.find(PART, at)
            if isinstance(each, Gap):
                at = each.high
            else:
                found.append(each[0].base)
                at = each[0].base + each[1].count
        return found


@pytest.fixture
async def away(tmp_path: Path) -> AsyncIterator[Away]:
    found = Away(tmp_path)
    yield found
    await found.fetcher.close()


async def test_everything_is_read_as_if_it_were_here(away: Away) -> None:
    log = away.log.store.logs[PART]
    assert 30 < log.first <= 40
    assert await away.offsets() == list(range(0, 60, 2))
    assert (away.fetcher.fetches, away.gaps) == (3, [])
    away.log.store.cache.clear()
    away.files.away = True
    assert await away.offsets() == list(range(0, 60, 2))


async def test_a_restart_finds_no_gaps_in_what_the_store_has(away: Away) -> None:
    log = away.log.reopened()
    assert log.store.logs[PART].gaps == []
    assert log.store.state.parts[PART].stored == 40


async def test_the_cache_is_bounded(tmp_path: Path) -> None:
    away = Away(tmp_path, limit_bytes=1)
    assert await away.offsets() == list(range(0, 60, 2))
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert away.fetcher.cached_bytes == away.log.store.state.parts[PART].objects[-1].size
    await away.fetcher.close()


async def test_a_full_disk_is_no_reason_not_to_read(away: Away, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert await away.offsets() == list(range(0, 60, 2))
    assert away.fetcher.cached_bytes == 0


async def test_readers_of_one_object_fetch_it_once(away: Away) -> None:
    found = await asyncio.gather(*(away.reader.find(PART, offset) for offset in range(14)))
    assert not any(isinstance(each, Gap) for each in found)
    assert away.fetcher.fetches == 1


async def test_half_of_the_answers_may_be_failures(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "TRIES", 50)
    monkeypatch.setattr(readers, "FIRST_PAUSE_S", 0.0)
    away.files.chance = 0.5
    assert await away.offsets() == list(range(0, 60, 2))
    assert away.files.failures


async def test_a_store_that_is_away_is_no_gap(away: Away, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "FIRST_PAUSE_S", 0.0)
    away.files.away = True
    with pytest.raises(Unavailable, match="503"):
        await away.reader.find(PART, 0)
    assert away.gaps == []
    here = await away.reader.find(PART, 50)
    assert not isinstance(here, Gap)


async def test_an_object_that_is_damaged_or_lost_is_a_gap(away: Away) -> None:
    one, two, _ = away.log.store.state.parts[PART].objects
    away.store.put(one.name(FOLDER), away.store.read(one.name(FOLDER))[:-1])
    away.store.remove([two.name(FOLDER)])
    assert await away.reader.find(PART, 4) == Gap(4, 14)
    assert await away.reader.find(PART, 14) == Gap(14, 30)
    assert away.gaps == [Gap(4, 14), Gap(14, 30)]
    assert await away.offsets() == list(range(30, 60, 2))


@pytest.mark.parametrize(("at_us", "offset"), [(0, 0), (1003, 6), (1007, 14), (1019, 38), (1020, 40), (1029, 58), (1030, 60)])
async def test_a_time_finds_its_offset_wherever_it_is(away: Away, at_us: int, offset: int) -> None:
    part = away.log.store.state.parts[PART]
    assert await away.reader.offset_at(part, at_us) == offset
    part.first = 6
    assert await away.reader.offset_at(part, 0) == 6


async def test_what_channels_want_is_asked_for_and_not_waited_for(away: Away) -> None:
    wanted: list[tuple[int, int]] = []
    away.log.store.on_away = lambda part, offset: wanted.append((part, offset))
    assert away.log.store.blocks(PART, 0, 10) == []
    assert wanted == [(PART, 0)]
    assert await away.reader.load(PART, 0) is None
    assert [stamp.base for stamp, _ in away.log.store.blocks(PART, 0, 10)] == [0, 2, 4, 6, 8]


def test_what_cannot_be_read_ends_an_object(tmp_path: Path) -> None:
    log = Log()
    log.open_part()
    for number in range(10):
        log.write(1, 1, first=2 * number + 1)
    log.store.flush()
    segments = log.store.logs[PART].segments
    file = log.files._file(segments[0].path)
    file.now = file.now[:250]
    made = cut(log.files, segments, 0, 20, 1 << 20, 1, URL)
    assert made.object is not None
    assert made.gap is not None
    assert (made.object.base, made.object.end) == (0, made.gap.low)
    assert cut(log.files, segments, made.gap.low, 20, 1 << 20, 1, URL).object is None
    few = cut(log.files, segments, 0, 20, 1, 1, URL)
    assert few.object is not None
    assert (few.object.end, few.gap) == (2, None)


class Mended:
    """Takes what was found in place of a gap."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[int]]] = []

    async def mend(self, part: int, blocks: Sequence[Stored]) -> bool:
        self.found.append((part, [each.stamp.base for each in blocks]))
        return True


async def test_damaged_files_are_mended_from_the_store(away: Away) -> None:
    """Nobody else is asked: other replicas need not have it any more."""
    machine, log = Mended(), SimpleNamespace(error=lambda *_, **__: None, info=lambda *_, **__: None)
    context: Any = SimpleNamespace(tls=None, log=log)
    group: Any = SimpleNamespace(store=away.log.store, reader=away.reader)
    mending = Mending(context, group, machine)  # type: ignore[arg-type]
    mending.found(PART, Gap(12, 18))
    await mending.look()
    assert machine.found == [(PART, [12, 14, 16])]
    assert (len(mending), mending.mended) == (0, 1)
    await mending.close()
