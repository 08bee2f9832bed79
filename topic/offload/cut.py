"""Cuts objects from a part's files. To be called in threads.

Source: docs/topics.md, "Storage apart from compute".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from pixiu.objects.manifest import StoredObject
from topic.storage.files import Files
from topic.storage.segment import READ_BYTES, Gap, Segment, Stored, read_segment


class Cut(NamedTuple):
    """An object, and what could not be read behind it."""

    object: StoredObject | None
    """None: nothing could be read."""
    data: bytes
    gap: Gap | None


def cut(files: Files, segments: Sequence[Segment], base: int, end: int, max_bytes: int, epoch: int, url: str) -> Cut:
    """Make an object of the whole blocks [base, end), or the first of them, with about as many bytes as allowed."""
    found, took, at = list[Stored](), 0, base
    for segment in segments:
        while segment.base <= at < min(segment.end, end) and took < max_bytes:
            blocks = read_segment(files, segment, at, READ_BYTES)
            if not blocks or blocks[0].stamp.base > at or (found and blocks[0].stamp.base < at):
                return _made(found, Gap(at, min(segment.end, end)), epoch, url)
            for each in blocks:
                if took >= max_bytes or each.stamp.base >= end:
                    break
                found.append(each)
                took, at = took + len(each.data), each.stamp.base + each.block.count
    return _made(found, None if took >= max_bytes or at >= end else Gap(at, end), epoch, url)


def _made(found: Sequence[Stored], gap: Gap | None, epoch: int, url: str) -> Cut:
    if not found:
        return Cut(None, b"", gap)
    data, first, last = b"".join(each.data for each in found), found[0], found[-1]
    made = StoredObject(
        first.stamp.base,
        last.stamp.base + last.block.count,
        len(data),
        crc32(data),
        first.stamp.at_us,
        last.stamp.at_us,
        epoch,
        url,
    )
    return Cut(made, data, gap)
