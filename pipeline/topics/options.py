"""The options of topics' source and sink, checked before any cluster is contacted. Pure.

Source: docs/pipeline.md, "Topics".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.spark.offsets import EARLIEST, LATEST
from pipeline.spark.options import BATCH_ONLY, Given
from pipeline.topics.columns import columns_of
from pipeline.topics.epochs import MAX_EPOCH
from pipeline.topics.lineage import BY_TIME, Wanted, parse_wanted
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID

READ_OPTIONS: Final = (
    "target", "topic", "columns", "startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp",
    "maxOffsetsPerTrigger", "minPartitions", "failOnDataLoss", "retrySeconds", "fromStore",
)  # fmt: skip
WRITE_OPTIONS: Final = ("target", "topic", "query", "epoch", "retrySeconds")
STREAM_ONLY: Final = ("maxOffsetsPerTrigger",)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read."""

    target: str
    topic: str
    columns: tuple[str, ...]
    starting: Wanted
    ending: Wanted
    starting_us: int
    """Unix microseconds, for `BY_TIME`."""
    ending_us: int
    max_offsets_per_trigger: int
    """0: no limit."""
    min_partitions: int
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
    for name in BATCH_ONLY if streaming else STREAM_ONLY:
        if given.text(name):
            raise InvalidArgument(f"option {name} is for {'batch' if streaming else 'streaming'} reads")
    for offsets, when in (("startingOffsets", "startingTimestamp"), ("endingOffsets", "endingTimestamp")):
        if given.text(offsets) and given.text(when):
            raise InvalidArgument(f"give {offsets} or {when}, not both")
    starting = parse_wanted("startingOffsets", given.text("startingOffsets"), LATEST if streaming else EARLIEST)
    ending = parse_wanted("endingOffsets", given.text("endingOffsets"), LATEST)
    if starting.word == LATEST and not streaming and not starting.offsets:
        raise InvalidArgument("startingOffsets of a batch is earliest or an offset: after latest there is nothing")
    if ending.word == EARLIEST and not ending.offsets:
        raise InvalidArgument("endingOffsets is latest or an offset: before earliest there is nothing")
    starting_ms = given.number("startingTimestamp", 0, 0, MAX_ID // 1_000_000)
    ending_ms = given.number("endingTimestamp", 0, 0, MAX_ID // 1_000_000)
    return ReadOptions(
        target=given.target(),
        topic=_topic(given),
        columns=columns_of(given.names("columns")),
        starting=Wanted(BY_TIME) if starting_ms else starting,
        ending=Wanted(BY_TIME) if ending_ms else ending,
        starting_us=starting_ms * 1000,
        ending_us=ending_ms * 1000,
        max_offsets_per_trigger=given.number("maxOffsetsPerTrigger", 0, 0, MAX_ID),
        min_partitions=given.number("minPartitions", 0, 0, 100_000),
        fail_on_data_loss=given.one_of("failOnDataLoss", ("true", "false")) == "true",
        retry_s=given.retry_s(),
        from_store=given.one_of("fromStore", ("true", "false")) == "true",
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
