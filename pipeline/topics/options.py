"""The options of topics' source and sink, checked before any cluster is contacted. Pure.

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.spark.offsets import EARLIEST, LATEST, check_order, parse_times
from pipeline.spark.options import (
    RANGE_OPTIONS,
    TRIGGER_OPTIONS,
    Given,
    Limits,
    check_ranges,
    check_words,
    latest_if_none,
    limits_of,
)
from pipeline.topics.columns import columns_of
from pipeline.topics.epochs import MAX_EPOCH
from pipeline.topics.lineage import MAX_PART, Wanted, parse_wanted
from pixiu.errors import InvalidArgument

READ_OPTIONS: Final = (
    "target", "topic", "columns", "includeHeaders", *RANGE_OPTIONS, *TRIGGER_OPTIONS, "retrySeconds", "fromStore",
)  # fmt: skip
WRITE_OPTIONS: Final = ("target", "topic", "query", "epoch", "retrySeconds")


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read."""

    target: str
    topic: str
    columns: tuple[str, ...]
    starting: Wanted
    ending: Wanted
    latest_if_none: bool
    """A part without messages since its time begins at its end; False: it is an error."""
    limits: Limits
    fail_on_data_loss: bool
    retry_s: float
    """Time limit for finding a leader, seconds."""
    from_store: bool = True
    """Closed segments are read from the topic's object store, if it can be read here."""


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write."""

    target: str
    topic: str
    query: str
    """Names the writers. Empty: a stream's is its own ID, a batch gets a random one."""
    epoch: int
    """Of a batch."""
    retry_s: float
    checkpoint: str
    """Of a stream; empty: not given here."""


def _topic(given: Given) -> str:
    name = given.text("topic")
    if not name or len(name) > 128:
        raise InvalidArgument(f"option topic is the name of a topic, 1 to 128 characters, not {name!r:.140}")
    return name


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Check the options of a read. Raises `InvalidArgument`, which names the option and the allowed values."""
    given = Given(options, READ_OPTIONS)
    check_ranges(given, streaming=streaming)
    starting = parse_wanted("startingOffsets", given.text("startingOffsets"), LATEST if streaming else EARLIEST)
    ending = parse_wanted("endingOffsets", given.text("endingOffsets"), LATEST)
    check_words(starting.word, ending.word, streaming=streaming)
    starting, ending = (
        wanted.by_time(
            given.time_ms(f"{end}Timestamp"),
            parse_times(f"{end}OffsetsByTimestamp", given.text(f"{end}OffsetsByTimestamp"), (1, MAX_PART)),
        )
        for end, wanted in (("starting", starting), ("ending", ending))
    )
    check_order("the read", starting.word, ending.word, starting.time_ms, ending.time_ms)
    for part in sorted(dict(starting.offsets) | dict(ending.offsets) | dict(starting.times_ms) | dict(ending.times_ms)):
        check_order(f"part {part}", starting.of(part), ending.of(part), starting.at_us(part) // 1000, ending.at_us(part) // 1000)
    return ReadOptions(
        target=given.target(),
        topic=_topic(given),
        columns=columns_of(given.names("columns"), headers=given.yes("includeHeaders", True)),
        starting=starting,
        ending=ending,
        latest_if_none=latest_if_none(given),
        limits=limits_of(given),
        fail_on_data_loss=given.yes("failOnDataLoss", True),
        retry_s=given.retry_s(),
        from_store=given.yes("fromStore", True),
    )


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Check the options of a write. Raises `InvalidArgument`."""
    given = Given(options, WRITE_OPTIONS)
    epoch = given.number("epoch", 0, 0, MAX_EPOCH)
    if given.text("epoch") and streaming:
        raise InvalidArgument("option epoch is for batch writes: a stream's epochs are its micro-batches")
    if given.text("epoch") and not given.text("query"):
        raise InvalidArgument("option epoch needs option query, which names what the epochs are of")
    return WriteOptions(
        given.target(), _topic(given), given.name_of("query"), epoch, given.retry_s(), given.text("checkpointLocation")
    )
