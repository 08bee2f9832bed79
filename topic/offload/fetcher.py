"""Objects of the store on their way back: a bounded cache of files, read like segments.

    offset ──▶ object ──▶ in the cache? ──▶ blocks
                             └──▶ from the store, once however many ask ──▶ CRC ──▶ a file; the least recently used one goes

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final
from zlib import crc32

from cluster.topics.entries import number_of, topic_of
from pixiu.errors import MalformedData, StorageError
from pixiu.objects.manifest import StoredObject, folder_of
from pixiu.objects.store import ObjectStore
from topic.offload.threads import in_thread
from topic.storage.files import DiskFiles
from topic.storage.segment import Segment, Stored, read_segment

FETCHES_AT_ONCE: Final = 4
READ_AHEAD_BYTES: Final = 1 << 20


class Held:
    """A file in memory, while the disk has no place for it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, path: str, offset: int, size: int) -> bytes:
        """See `topic.storage.files.Files`."""
        return self._data[offset : offset + size]


class Fetcher:
    """Reads objects of all parts of a process.

    Args:
        folder: of the cache; what is in it is removed.
        limit_bytes: of the cache.
        store: returns the store with a URL; called in threads.
    """

    def __init__(self, folder: Path, limit_bytes: int, store: Callable[[str], ObjectStore]) -> None:
        self._folder, self._limit, self._store = folder, limit_bytes, store
        self._files: DiskFiles | None = None
        self._segments: OrderedDict[str, Segment] = OrderedDict()
        """By file, in order of use."""
        self._coming: dict[str, asyncio.Task[Segment | bytes]] = {}
        self._slots = asyncio.Semaphore(FETCHES_AT_ONCE)
        self.fetches = 0
        self.fetched_bytes = 0
        self.cached_bytes = 0

    async def blocks(self, part: int, found: StoredObject, offset: int) -> list[Stored]:
        """Checked blocks of an object from the one that holds an offset on; none if it cannot be read. Raises Unavailable,
        MalformedData for an object that is not as it was."""
        name = f"{topic_of(part)}-{number_of(part)}-{found.base}-{found.end}-{found.epoch}"
        segment = self._segments.get(name)
        if segment is not None:
            self._segments.move_to_end(name)
            blocks = await self._read(segment, offset)
            if blocks:
                return blocks
            self._drop(name)  # the cache's disk has lost it
        task = self._coming.get(name)
        if task is None:
            task = self._coming[name] = asyncio.create_task(self._fetch(part, found, name))
            task.add_done_callback(lambda _: self._coming.pop(name, None))
        here = await asyncio.shield(task)
        if isinstance(here, Segment):
            return await self._read(here, offset)
        held = Segment(name, found.base, found.end, found.size)
        return await asyncio.to_thread(read_segment, Held(here), held, offset, READ_AHEAD_BYTES)  # type: ignore[arg-type]

    async def _read(self, segment: Segment, offset: int) -> list[Stored]:
        assert self._files is not None
        return await asyncio.to_thread(read_segment, self._files, segment, offset, READ_AHEAD_BYTES)

    async def _fetch(self, part: int, found: StoredObject, name: str) -> Segment | bytes:
        async with self._slots:
            data = await in_thread(lambda: self._download(part, found))
        self.fetches += 1
        self.fetched_bytes += len(data)
        try:
            await asyncio.to_thread(self._keep, name, data)
        except (StorageError, OSError):
            return data
        segment = self._segments[name] = Segment(name, found.base, found.end, len(data))
        self.cached_bytes += len(data)
        while self.cached_bytes > self._limit and len(self._segments) > 1:
            self._drop(next(iter(self._segments)))
        return segment

    def _download(self, part: int, found: StoredObject) -> bytes:
        name = found.name(folder_of(topic_of(part), number_of(part)))
        data = self._store(found.url).read(name)
        if len(data) != found.size or crc32(data) != found.crc:
            raise MalformedData(f"{found.url}/{name} is not as it was uploaded: {len(data)} bytes, or its CRC is another one")
        return data

    def _keep(self, name: str, data: bytes) -> None:
        if self._files is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._files = DiskFiles(self._folder)
        self._files.create(name)
        self._files.write(name, 0, data)

    def _drop(self, name: str) -> None:
        segment = self._segments.pop(name, None)
        if segment is not None and self._files is not None:
            self.cached_bytes -= segment.size
            self._files.remove(name)

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = list(self._coming.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._files is not None:
            self._files.close()
