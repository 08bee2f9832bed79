"""Reads of a part's closed segments straight from the object store, past its leader.

    driver      the leader says where the store is ──▶ manifest ──▶ objects of each task
    executors   object ──▶ CRC ──▶ stored blocks, a mebibyte at a time; what cannot be read there comes from the leader

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple
from zlib import crc32

from pipeline.topics.columns import walk
from pixiu.errors import ConfigurationError, InvalidArgument, MalformedData, Unavailable
from pixiu.objects.manifest import Manifest, StoredObject, folder_of
from pixiu.objects.store import ObjectStore
from pixiu.wire.block import STAMP_BYTES
from pixiu.wire.v1 import topic_pb2

PIECE_BYTES: Final = 1 << 20
"""Bytes of blocks in one record batch, about."""
AWAY: Final = (ConfigurationError, InvalidArgument, MalformedData, Unavailable)
LOG: Final = logging.getLogger("pixiu.pipeline")


class Piece(NamedTuple):
    """Offsets of a part that are read together."""

    begin: int
    end: int
    object: StoredObject | None
    """None: they are read from the leader."""


class Manifests:
    """Manifests of a topic's parts, as the driver has read them."""

    def __init__(self) -> None:
        self._found: dict[int, Manifest] = {}

    def objects(self, topic: int, part: int, store: topic_pb2.TopicStore, begin: int, end: int) -> tuple[StoredObject, ...]:
        """The objects that have offsets [begin, end) of a part; none if the store cannot be read here."""
        if begin >= store.end:
            return ()
        found = self._found.get(part)
        if found is None or not found.objects or found.objects[-1].end < min(end, store.end):
            try:
                found = ObjectStore(store.url).manifest(topic, part)
            except AWAY as problem:
                LOG.warning("part %d is read from its leader alone: %s", part, problem)
                return ()
            if found is None:
                return ()
            self._found[part] = found
        return tuple(each for each in found.objects if each.end > begin and each.base < end)


def pieces(begin: int, end: int, objects: Sequence[StoredObject]) -> Iterator[Piece]:
    """Cut offsets [begin, end) by the objects that have them."""
    for each in objects:
        low, high = max(each.base, begin), min(each.end, end)
        if low >= high:
            continue
        if begin < low:
            yield Piece(begin, low, None)
        yield Piece(low, high, each)
        begin = high
    if begin < end:
        yield Piece(begin, end, None)


def read_object(topic: int, part: int, found: StoredObject) -> list[bytes]:
    """The blocks of an object, some in each piece. Raises Unavailable, MalformedData, ConfigurationError."""
    data = ObjectStore(found.url).read(found.name(folder_of(topic, part)))
    if (len(data), crc32(data)) != (found.size, found.crc):
        raise MalformedData(f"an object of part {part} in {found.url} is not as it was uploaded")
    cuts, at = [0], 0
    for block in walk(data):
        at = block.at - STAMP_BYTES
        if at - cuts[-1] >= PIECE_BYTES:
            cuts.append(at)
    return [data[low:high] for low, high in pairwise([*cuts, len(data)])]
