"""Offsets of the source: a position for each Xiu partition; and the shares of partitions in a trigger's rows. Pure.

    offset    {"0": 4294967297, "1": 17179869190, "cluster": "0123456789abcdef"}
              the next position to read of each partition, and the ID of their cluster
    option    earliest | latest | the same JSON, with -2 for earliest and -1 for latest
    by time   {"0": 1764445200000}
              Unix milliseconds of each partition

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID, MAX_MSG_SEQUENCE

EARLIEST: Final = -2
LATEST: Final = -1
MAX_PARTITION: Final = 127
CLUSTER: Final = "cluster"
MAX_MS: Final = MAX_ID // 1_000_000
"""Limit of times, Unix milliseconds."""
LEAST_MS: Final = 978_307_200_000
"""The year 2001, in Unix milliseconds: what is less are seconds, until the year 32970."""
WHOLE: Final = re.compile("0|-?[1-9][0-9]*")
"""A whole number as JSON writes it: Python's `int` takes "00" and other scripts' digits too."""

Offsets = dict[int, int]
"""Partition → position."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Value of an option: one word for all partitions, or a position for each."""

    word: int = EARLIEST
    """For partitions without a position."""
    positions: tuple[tuple[int, int], ...] = ()
    time_ms: int = 0
    """Unix milliseconds, for all partitions; 0: by position."""
    times_ms: tuple[tuple[int, int], ...] = ()
    """The same for some."""

    def of(self, partition: int) -> int:
        """The position of a partition, or its word as a number."""
        return dict(self.positions).get(partition, self.word)

    def at_ms(self, partition: int) -> int:
        """The time from which a partition is wanted, Unix milliseconds; 0: by position."""
        return dict(self.times_ms).get(partition, self.time_ms)

    @property
    def named(self) -> frozenset[int]:
        """The partitions that have an entry of their own."""
        return frozenset(partition for partition, _ in (*self.positions, *self.times_ms))


def parse_numbers(text: str, keys: tuple[int, int], values: tuple[int, int]) -> Offsets | None:
    """Parse a JSON object of whole numbers, whose names are whole numbers too, within these limits; None: it is something else."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name occurs twice")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not all(is_whole(key, *keys) for key in found):
        return None
    if not all(type(value) is int and values[0] <= value <= values[1] for value in found.values()):
        return None
    return {int(key): value for key, value in found.items()}


def is_whole(text: str, least: int, most: int) -> bool:
    """True if a text is a whole number from `least` to `most`, written in one way only."""
    return len(text) <= 20 and WHOLE.fullmatch(text) is not None and least <= int(text) <= most


def parse_wanted(option: str, text: str, default: int) -> Wanted:
    """Parse an option's value. Raises `InvalidArgument`, which describes the format."""
    words = {"": default, "earliest": EARLIEST, "latest": LATEST}
    if text.lower() in words:
        return Wanted(words[text.lower()])
    positions = parse_numbers(text, (0, MAX_PARTITION), (EARLIEST, MAX_MSG_SEQUENCE + 1))
    if positions is None:
        raise InvalidArgument(
            f'{option} is earliest, latest, or a position for each Xiu partition like {{"0": 4294967297, "1": -2}}, '
            f"not {text!r:.200}"
        )
    return Wanted(default, tuple(sorted(positions.items())))


def parse_times(option: str, text: str, partitions: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Parse the value of an option with times: partition and Unix milliseconds. Raises `InvalidArgument`."""
    if not text:
        return ()
    times = parse_numbers(text, partitions, (1, MAX_MS))
    if not times:
        raise InvalidArgument(
            f'{option} is a time for each partition, Unix milliseconds, like {{"1": {1764445200000}}}, not {text!r:.200}'
        )
    for at_ms in times.values():
        check_ms(option, at_ms)
    return tuple(sorted(times.items()))


def check_ms(option: str, at_ms: int) -> None:
    """Raise `InvalidArgument` for a time that can only be in seconds."""
    if at_ms < LEAST_MS:
        when = datetime.fromtimestamp(at_ms / 1000, UTC).date()
        raise InvalidArgument(f"option {option} is Unix milliseconds, and {at_ms} is {when}: of seconds, give {at_ms * 1000}")


def check_order(where: str, begin: int, end: int, begin_ms: int, end_ms: int) -> None:
    """Raise `InvalidArgument` for a range that ends before it begins. Words, which are negative, and times of 0 do not count."""
    if 0 <= end < begin:
        raise InvalidArgument(f"{where} would end at {end}, before its begin at {begin}: is one of starting and ending wrong?")
    if 0 < end_ms < begin_ms:
        raise InvalidArgument(f"{where} would end at time {end_ms}, before its begin at {begin_ms}: exchange them")


def to_json(offsets: Mapping[int, int], cluster: str) -> dict[str, int | str]:
    """Encode as in Spark's checkpoint. `cluster`: of the positions, 16 hex digits."""
    return {**{str(partition): position for partition, position in sorted(offsets.items())}, CLUSTER: cluster}


def from_json(found: Mapping[str, object]) -> Offsets:
    """Decode from a checkpoint. Raises `InvalidArgument` for one of another source."""
    offsets: Offsets = {}
    for key, value in found.items():
        if key == CLUSTER:
            continue
        if CLUSTER not in found or not is_whole(key, 0, MAX_PARTITION) or type(value) is not int:
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


def none_since(where: str, at_ms: int) -> InvalidArgument:
    """Make the error for a start by time after everything that is stored."""
    return InvalidArgument(
        f"{where} has nothing since {at_ms} (Unix milliseconds): take an earlier time, or begin at its end with "
        "startingOffsetsByTimestampStrategy=latest"
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


def share_bytes(limit: int, available: Mapping[int, int], take: Callable[[int, int], int]) -> None:
    """Share a trigger's bytes out to the partitions with rows: equal shares, and what one leaves goes to those after it.

    Args:
        limit: bytes of the trigger.
        available: partition → its rows; those with few come first.
        take: takes rows of a partition up to so many bytes; returns how many bytes they have.
    """
    left = limit
    turn = sorted((partition for partition, rows in available.items() if rows), key=lambda each: (available[each], each))
    for place, partition in enumerate(turn):
        left -= take(partition, max(1, left // (len(turn) - place)))
