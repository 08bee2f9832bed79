"""Retention: what goes by age, by size and by acknowledgement, of files and of objects, and the end of a sealed part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cluster.topics import entries as en
from pixiu.objects.manifest import StoredObject
from tests.topic.builders import CHANNEL, PART, Log
from topic.retention import Retention

SECOND = 1_000_000


class Group:
    """A store with a file for each of three blocks of two messages, the last one open, appended a second after each other."""

    def __init__(self, **settings: int | str) -> None:
        self.log = Log(segment_bytes=1)
        self.log.topic(**settings)
        self.log.open_part()
        for number in range(3):
            self.log.write(1, 1, first=1 + 2 * number, at_us=(number + 1) * SECOND)
            self.log.store.flush()
        group: Any = SimpleNamespace(store=self.log.store, core=SimpleNamespace(epoch=1), request=self.request)
        self.retention = Retention(group)

    async def request(self, kind: int, payload: bytes) -> object:
        return self.log.apply(kind, payload, self.log.store.state.clock_us)

    async def first(self, at_s: int = 3) -> int:
        """The first offset that is kept, after a look at a time."""
        self.log.apply(en.BEGIN, b"", at_s * SECOND)
        await self.retention.look()
        return self.log.store.state.parts[PART].first

    def seal(self) -> None:
        self.log.apply(en.SEAL, en.encode_seal(PART, ()))

    def upload(self, base: int, end: int, at_s: int) -> None:
        found = StoredObject(base, end, 100, 0, at_s * SECOND, at_s * SECOND, 1, "memory://s")
        self.log.apply(en.UPLOADED, en.encode_objects(PART, [found]))

    def acknowledge(self, upto: int) -> None:
        if CHANNEL not in self.log.store.state.channels:
            self.log.channel()
        self.log.settle((0, upto))


async def test_the_newest_messages_of_an_open_part_stay_and_a_sealed_one_goes_by_age() -> None:
    group = Group(retention_s=10)
    assert [await group.first(at_s) for at_s in (11, 12, 13, 90)] == [0, 2, 4, 4]
    group.seal()
    assert await group.first(90) == 6


async def test_a_seal_drops_nothing_by_size() -> None:
    group = Group(retention_bytes=1)
    group.seal()
    assert await group.first() == 4


@pytest.mark.parametrize("sealed", [False, True])
async def test_the_newest_object_stays_however_few_bytes_are_kept(sealed: bool) -> None:
    group = Group(retention_bytes=1)
    if sealed:
        group.seal()
    for base in (0, 2, 4):
        group.upload(base, base + 2, 1 + base // 2)
    assert await group.first() == 4


async def test_a_sealed_part_that_everybody_has_acknowledged_goes_as_a_whole() -> None:
    group = Group(retain_acknowledged=1)
    group.acknowledge(6)
    assert await group.first() == 4
    group.seal()
    assert await group.first() == 6


async def test_what_is_acknowledged_goes_from_the_store_as_well() -> None:
    group = Group(retain_acknowledged=1)
    group.upload(0, 2, 1)
    group.upload(2, 4, 2)
    group.log.store.local_firsts[PART] = 4
    group.log.store.flush()
    assert group.log.store.logs[PART].first == 4
    group.acknowledge(3)
    assert await group.first() == 2  # the object that has the third message stays, and no file here has it
    group.acknowledge(4)
    assert await group.first() == 4


async def test_what_is_trimmed_needs_no_compaction() -> None:
    group = Group(compact=60, retention_s=10)
    group.log.apply(en.COMPACT, en.Compaction(PART, [(0, 1), (2, 3), (4, 5)]).encode())
    assert await group.first(12) == 2
    assert group.log.store.compacting.of(PART) == [(2, 3), (4, 5)]
    group.log.store.flush()
    assert group.log.reopened().store.compacting.of(PART) == [(2, 3), (4, 5)]
