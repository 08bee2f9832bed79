"""Checks of segments: that every block is as it was written, by CRCs alone.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import time
from typing import Final
from zlib import crc32

from pixiu.errors import MalformedData
from pixiu.wire.block import COVERED_FROM, STAMP_BYTES, U32
from topic.storage.files import Files
from topic.storage.segment import Gap, base_of, heads_of

CHECK_BYTES: Final = 4 << 20
"""Bytes that are checked before a pause."""
PAUSE_S: Final = 0.0005


def damaged_in(files: Files, path: str, base: int, end: int) -> list[Gap]:
    """Gaps in the blocks [base, end) that a file should have. Reads all of it; to be called in a thread."""
    gaps, at, place, read = list[Gap](), base, 0, 0
    for stamp, count, size in heads_of(files, path, base):
        if stamp.base >= end:
            break
        at = stamp.base + count
        if not _is_whole(files, path, place, size):
            gaps.append(Gap(stamp.base, at))
        place, read = place + size, read + size
        if read > CHECK_BYTES:
            read = 0
            time.sleep(PAUSE_S)
    if at < end:
        gaps.append(Gap(at, end))
    return gaps


def _is_whole(files: Files, path: str, place: int, size: int) -> bool:
    try:
        data = files.read(path, place, size)
    except MalformedData:
        return False
    if len(data) != size:
        return False
    block = memoryview(data)[STAMP_BYTES:]
    stamp_crc = crc32(block[8:COVERED_FROM], crc32(memoryview(data)[8:STAMP_BYTES]))
    return bool(U32.unpack_from(data, 4)[0] == stamp_crc and U32.unpack_from(block, 8)[0] == crc32(block[COVERED_FROM:]))


def damaged_of(files: Files, folder: str, first: int, end: int) -> list[Gap]:
    """Gaps in the blocks [first, end) of a part's folder. Reads all of it; to be called in a thread."""
    bases = [base for name in files.names(folder) if (base := base_of(name)) is not None and base < end]
    gaps, at = list[Gap](), first
    for number, base in enumerate(bases):
        behind = bases[number + 1] if number + 1 < len(bases) else end
        if base > at:
            gaps.append(Gap(at, base))
        gaps += [gap for gap in damaged_in(files, f"{folder}/{base:015d}.seg", base, behind) if gap.high > first]
        at = max(at, behind)
    if at < end:
        gaps.append(Gap(at, end))
    return gaps
