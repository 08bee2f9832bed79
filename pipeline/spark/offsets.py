"""Offsets of the source: a position for each Xiu partition; and the shares of partitions in a trigger's rows. Pure.

    offset    {"0": 4294967297, "1": 17179869190, "cluster": "0123456789abcdef"}
              the next position to read of each partition, and the ID of their cluster
    option    earliest | latest | the same JSON, with -2 for earliest and -1 for latest

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_MSG_SEQUENCE

EARLIEST: Final = -2
LATEST: Final = -1
MAX_PARTITION: Final = 127
CLUSTER: Final = "cluster"

Offsets = dict[int, int]
"""Partition → position."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Value of an option: one word for all partitions, or a position for each."""

    word: int = EARLIEST
    """For partitions without a position."""
    positions: tuple[tuple[int, int], ...] = ()

    def of(self, partition: int) -> int:
        """The position of a partition, or its word as a number."""
        return dict(self.positions).get(partition, self.word)


def parse_wanted(option: str, text: str, default: int) -> Wanted:
    """Parse an option's value. Raises `InvalidArgument`, which describes the format."""
    words = {"earliest": EARLIEST, "latest": LATEST}
    if not text:
        return Wanted(default)
    if text.lower() in words:
        return Wanted(words[text.lower()])
    how = f'{option} is earliest, latest, or a position for each Xiu partition like {{"0": 4294967297, "1": -2}}, not {text!r}'
    try:
        found = json.loads(text)
    except ValueError:
        raise InvalidArgument(how) from None
    if not isinstance(found, dict):
        raise InvalidArgument(how)
    positions: Offsets = {}
    for key, value in found.items():
        if not key.isdecimal() or int(key) > MAX_PARTITION or isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(how)
        if not EARLIEST <= value <= MAX_MSG_SEQUENCE + 1:
            raise InvalidArgument(how)
        positions[int(key)] = value
    return Wanted(default, tuple(sorted(positions.items())))


def to_json(offsets: Mapping[int, int], cluster: str) -> dict[str, int | str]:
    """Encode as in Spark's checkpoint. `cluster`: of the positions, 16 hex digits."""
    return {**{str(partition): position for partition, position in sorted(offsets.items())}, CLUSTER: cluster}


def from_json(found: Mapping[str, object]) -> Offsets:
    """Decode from a checkpoint. Raises `InvalidArgument` for one of another source."""
    offsets: Offsets = {}
    for key, value in found.items():
        if key == CLUSTER:
            continue
        if CLUSTER not in found or not key.isdecimal() or isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"the checkpoint holds no offset of this source: {dict(found)!r}; use another checkpointLocation")
        offsets[int(key)] = value
    return offsets


def cluster_of(found: Mapping[str, object]) -> str:
    """The cluster of a checkpoint."""
    return str(found[CLUSTER])


def other_cluster(made: str, target: str, here: str) -> InvalidArgument:
    """Make the error for a checkpoint of another cluster."""
    return InvalidArgument(
        f"the checkpoint was made with cluster {made}, and {target} is cluster {here}: use another checkpointLocation, or the "
        "target that it was made with"
    )


def share_out(limit: int, available: Mapping[int, int]) -> dict[int, int]:
    """The number of rows of each partition in a trigger: together `limit`, in proportion to the available rows, none starved."""
    total = sum(available.values())
    if total <= limit:
        return dict(available)
    shares = {partition: rows * limit // total for partition, rows in available.items()}
    left = limit - sum(shares.values())
    for partition in sorted(available, key=lambda each: (-(available[each] * limit % total), each)):
        if not left:
            break
        if shares[partition] < available[partition]:
            shares[partition] += 1
            left -= 1
    return shares
