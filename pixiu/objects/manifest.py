"""Objects and manifests: what a part of a topic has in an object store. Pure.

    STORE/7-1/000000000000000-000000000004096-3.seg    stored blocks [0, 4096) of part 1 of topic 7, uploaded in epoch 3
    STORE/7-1/manifest-000000000003-00000012.json      the 12th manifest of epoch 3: which objects count

A manifest is never changed: the next one has the next number. The newest is that of the highest epoch, then of the highest
number. A deposed leader has a lower epoch than its successor, so nothing that it writes is taken.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from pixiu.errors import InvalidArgument, MalformedData

MAX_URL: Final = 1024
MAX_MANIFEST_BYTES: Final = 256 << 20
VERSION: Final = 1
_MANIFEST: Final = re.compile(r"manifest-(\d{12})-(\d{8})\.json")
_OBJECT: Final = re.compile(r"(\d{15})-(\d{15})-(\d+)\.seg")


class StoredObject(NamedTuple):
    """Stored blocks of one part, end to end, in the object store. They never change."""

    base: int
    """Offset of the first message."""
    end: int
    """Offset behind the last one."""
    size: int
    """Bytes."""
    crc: int
    """CRC-32 of all of them."""
    first_us: int
    """Time of appending of the first block, Unix µs."""
    last_us: int
    epoch: int
    """Of the leader that uploaded it."""
    url: str
    """The store."""

    def name(self, folder: str) -> str:
        """Its name in the store. folder: of the part."""
        return f"{folder}/{self.base:015d}-{self.end:015d}-{self.epoch}.seg"


class Manifest(NamedTuple):
    """A part's objects in the store, as its leader knew them at one moment."""

    epoch: int
    number: int
    topic: int
    part: int
    """Number in the topic."""
    first: int
    """Offset of the oldest message that is kept."""
    sealed: bool
    objects: Sequence[StoredObject]
    """Rising."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{folder_of(self.topic, self.part)}/manifest-{self.epoch:012d}-{self.number:08d}.json"

    def encode(self) -> bytes:
        """The content of its object."""
        found = self._asdict() | {"version": VERSION, "objects": [each._asdict() for each in self.objects]}
        return json.dumps(found, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in an object. Raises MalformedData."""
        if len(data) > MAX_MANIFEST_BYTES:
            raise MalformedData(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one {len(data)}")
        try:
            found = json.loads(data)
            if found["version"] != VERSION:
                raise MalformedData(f"this manifest has version {found['version']!r}; this program reads version {VERSION}")
            objects = [StoredObject(**{name: each[name] for name in StoredObject._fields}) for each in found["objects"]]
            epoch, number, topic, part, first = (found[name] for name in ("epoch", "number", "topic", "part", "first"))
        except (ValueError, KeyError, TypeError) as problem:
            raise MalformedData("the manifest of a part in the object store cannot be read") from problem
        numbers = [epoch, number, topic, part, first, *(number for each in objects for number in each[:-1])]
        if not all(type(each) is int and each >= 0 for each in numbers) or not all(type(each.url) is str for each in objects):
            raise MalformedData("the manifest of a part in the object store has numbers that are none")
        return cls(epoch, number, topic, part, first, bool(found["sealed"]), objects)


def folder_of(topic: int, number: int) -> str:
    """The folder of a part in its store."""
    return f"{topic}-{number}"


def manifests_in(names: Iterable[str]) -> list[str]:
    """The names of manifests among others, the newest first."""
    found = [(int(match[1]), int(match[2]), name) for name in names if (match := _MANIFEST.fullmatch(name.rpartition("/")[2]))]
    return [name for _, _, name in sorted(found, reverse=True)]


def epoch_of(name: str) -> int | None:
    """The epoch of the leader that wrote an object or a manifest; None: it is neither."""
    base = name.rpartition("/")[2]
    if match := _OBJECT.fullmatch(base):
        return int(match[3])
    match = _MANIFEST.fullmatch(base)
    return int(match[1]) if match else None


def check_url(url: str) -> str:
    """Check where a store is; returns it. Raises InvalidArgument."""
    if len(url) > MAX_URL or not url.isprintable():
        raise InvalidArgument(f"a store is a folder or a URL of at most {MAX_URL} printable characters")
    if url and "://" not in url and not url.startswith("/"):
        raise InvalidArgument(f"a store is an absolute folder, or a URL like s3://bucket/folder, not {url[:128]!r}")
    try:
        secret = "://" in url and urlsplit(url).password
    except ValueError as problem:
        raise InvalidArgument(f"the store {url[:128]!r} is not a URL: {problem}") from None
    if secret:
        raise InvalidArgument("a store's URL has no password: many see it; give credentials by fsspec's configuration")
    return url.rstrip("/") if url.strip("/") else url
