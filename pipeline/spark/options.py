"""The options of the source and the sink, checked before any cluster is contacted. Pure.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from pipeline.spark.offsets import (
    EARLIEST,
    LATEST,
    MAX_MS,
    MAX_PARTITION,
    Wanted,
    check_ms,
    check_order,
    is_whole,
    parse_times,
    parse_wanted,
)
from pixiu.discovery.target import parse_target
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.wire.export_tables import MAX_USERS, MESSAGES, ROLE_OF_TABLE, Columns, columns_of

RANGE_OPTIONS: Final = (
    "startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp", "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy", "minPartitions", "maxRecordsPerPartition", "failOnDataLoss",
)  # fmt: skip
TRIGGER_OPTIONS: Final = ("maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
READ_OPTIONS: Final = (
    "target", "topic", "table", "columns", "includeHeaders", "partitions", "users", *RANGE_OPTIONS, *TRIGGER_OPTIONS, "reader",
    "retrySeconds",
)  # fmt: skip
WRITE_OPTIONS: Final = ("target", "topic", "query", "kind", "idColumns", "level", "retrySeconds")
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})
"""Spark's own options that it passes on."""
PATHS: Final = ("path", "paths")
"""Options in which Spark passes the argument of `load`, `save` and `start` on."""
OF_KAFKA: Final = {
    "subscribe": "the option is topic",
    "subscribepattern": "a read has one topic, option topic: join several reads by unionByName",
    "assign": "the option is topic; parts are chosen by startingOffsets",
    "kafka.bootstrap.servers": "the option is target, zk://HOST:PORT/ROOT or HOST:PORT,… of proxies",
    "kafka.group.id": "a query keeps its offsets in its checkpoint, and there are no groups",
    "groupidprefix": "a query keeps its offsets in its checkpoint, and there are no groups",
}
"""Option of Spark's Kafka source → what to do here."""
STREAM_ONLY: Final = (*TRIGGER_OPTIONS, "reader")
BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp")
KINDS: Final = ("mail", "chat", "room")
LEVELS: Final = ("replicated", "persisted", "accepted")
DEFAULT_RETRY_S: Final = 60.0
DEFAULT_DELAY: Final = "15m"
"""Kafka's default of `maxTriggerDelay`."""
MAX_TASKS: Final = 100_000
_DURATION: Final = re.compile("([1-9][0-9]{0,9}) *(ms|s|m|min|h|d)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_NAME: Final = 128
"""Limit of characters of a reader's or a query's name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a micro-batch and of a task."""

    max_rows: int = 0
    """0: no limit, as in the next ones."""
    max_bytes: int = 0
    min_rows: int = 0
    """With fewer rows a stream waits, but not longer than `max_delay_s`."""
    max_delay_s: float = 0.0
    min_partitions: int = 0
    max_rows_of_task: int = 0

    @property
    def read_limit(self) -> ReadLimit:
        """The same for Spark, which passes it on to `latestOffset`; with `Trigger.Once` it passes none."""
        if self.max_rows:
            return ReadMaxRows(self.max_rows)
        return ReadMaxBytes(self.max_bytes) if self.max_bytes else ReadAllAvailable()

    def within(self, limit: ReadLimit) -> tuple[int, int]:
        """The rows and bytes of a micro-batch with a limit of Spark's; 0: no limit."""
        if isinstance(limit, ReadAllAvailable):
            return 0, 0
        return limit.max_rows if isinstance(limit, ReadMaxRows) else 0, self.max_bytes

    def waits(self, rows: int, waited_s: float) -> bool:
        """True if a stream with so many new rows is to wait for more."""
        return rows < self.min_rows and waited_s < self.max_delay_s

    def pieces(self, rows: int, tasks: int) -> int:
        """The number of tasks for rows of which otherwise one of `tasks` would read all."""
        wanted = max(tasks, -(-rows // self.max_rows_of_task) if self.max_rows_of_task else 1)
        return max(1, min(wanted, MAX_TASKS))


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read."""

    target: str
    table: str
    columns: Columns
    headers: bool
    """The last column is the headers, of `ext`."""
    partitions: frozenset[int]
    """Empty: all."""
    users: tuple[int, ...]
    """Empty: all."""
    starting: Wanted
    ending: Wanted
    latest_if_none: bool
    """A partition without messages since `starting.at_ms` begins at its end; False: it is an error."""
    limits: Limits
    fail_on_data_loss: bool
    reader: str
    """Name of this query for retention; empty: retention does not wait for it."""
    retry_s: float
    """Time limit for finding a replica that serves, seconds."""

    @property
    def role(self) -> str:
        """The role that has the table."""
        return ROLE_OF_TABLE[self.table]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write."""

    target: str
    query: str
    """Identifies data written once: IDs are derived from it."""
    kind: str
    id_columns: tuple[str, ...]
    level: str
    retry_s: float
    checkpoint: str = ""
    """Of a stream; empty: not given here."""


class Given:
    """Options by name, case-insensitive."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        names = {name.lower(): name for name in known}
        check_foreign(options)
        for name in options:
            if name.lower() not in names and name.lower() not in SPARKS_OWN:
                near = difflib.get_close_matches(name.lower(), names, 1)
                hint = f"did you mean {names[near[0]]}?" if near else f"there are {', '.join(known)}"
                raise InvalidArgument(f"there is no option {name!r} here; {hint}")

    def text(self, name: str, default: str = "") -> str:
        return str(self._values.get(name.lower(), default)).strip()

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part.strip() for part in self.text(name).split(",") if part.strip())

    def number(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number; the default may be outside of the limits."""
        text = self.text(name)
        if not text:
            return default
        if not is_whole(text, least, most):
            raise InvalidArgument(f"option {name} is a number from {least} to {most}, not {text!r:.100}")
        return int(text)

    def numbers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        found = self.names(name)
        for text in found:
            if not is_whole(text, least, most):
                raise InvalidArgument(f"option {name} is a list like 1,2,3 of numbers from {least} to {most}, not {text!r:.100}")
        return tuple(int(text) for text in found)

    def time_ms(self, name: str) -> int:
        """Unix milliseconds; 0: not given."""
        found = self.number(name, 0, 1, MAX_MS)
        if found:
            check_ms(name, found)
        return found

    def seconds(self, name: str, default: str) -> float:
        """A duration."""
        text = self.text(name, default)
        found = _DURATION.fullmatch(text)
        if found is None:
            raise InvalidArgument(f"option {name} is a number and a unit, ms, s, m, h or d, like {default}, not {text!r:.100}")
        return int(found[1]) * _UNITS[found[2]]

    def yes(self, name: str, default: bool) -> bool:
        return self.one_of(name, ("true", "false") if default else ("false", "true")) == "true"

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        text = self.text(name, allowed[0]).lower()
        if text not in allowed:
            raise InvalidArgument(f"option {name} is one of {', '.join(allowed)}, not {text!r}")
        return text

    def target(self) -> str:
        text = self.text("target")
        if not text:
            raise InvalidArgument(
                'option target is missing: .option("target", "zk://HOST:PORT/ROOT"), or HOST:PORT,… of processes; in SQL '
                "SELECT … FROM table WITH ('target' = 'zk://HOST:PORT/ROOT'), as Spark does not pass on what CREATE TABLE has"
            )
        parse_target(text)
        return text

    def retry_s(self) -> float:
        return float(self.number("retrySeconds", int(DEFAULT_RETRY_S), 1, 86_400))

    def name_of(self, name: str) -> str:
        text = self.text(name)
        if len(text) > MAX_NAME:
            raise InvalidArgument(f"option {name} has at most {MAX_NAME} characters, this one {len(text)}")
        return text


def check_foreign(options: Mapping[str, str]) -> None:
    """Refuse a name that was given as a path, with which mail would be read, and options of Kafka. Raises `InvalidArgument`."""
    for name, value in options.items():
        if name.lower() in PATHS:
            raise InvalidArgument(
                f"{value!r:.140} was given as a path, to load, save or start, and there are no paths: for a durable topic use "
                'option topic, .option("topic", "clicks")'
            )
        if name.lower() in OF_KAFKA:
            raise InvalidArgument(f"{name} is an option of Kafka: {OF_KAFKA[name.lower()]}")


def check_ranges(given: Given, *, streaming: bool) -> None:
    """Check which options are given together. Raises `InvalidArgument`."""
    for name in BATCH_ONLY if streaming else STREAM_ONLY:
        if given.text(name):
            raise InvalidArgument(f"option {name} is for {'batch' if streaming else 'streaming'} reads")
    for end in ("starting", "ending"):
        found = [name for name in (f"{end}Offsets", f"{end}Timestamp", f"{end}OffsetsByTimestamp") if given.text(name)]
        if len(found) > 1:
            raise InvalidArgument(f"give {found[0]} or {found[1]}, not both")
    if given.text("startingOffsetsByTimestampStrategy") and not (
        given.text("startingTimestamp") or given.text("startingOffsetsByTimestamp")
    ):
        raise InvalidArgument("option startingOffsetsByTimestampStrategy needs startingTimestamp or startingOffsetsByTimestamp")
    if given.text("maxTriggerDelay") and not given.text("minOffsetsPerTrigger"):
        raise InvalidArgument("option maxTriggerDelay is how long minOffsetsPerTrigger waits: give both")


def check_words(starting: int, ending: int, *, streaming: bool) -> None:
    """Refuse ranges in which there is nothing. Raises `InvalidArgument`."""
    if starting == LATEST and not streaming:
        raise InvalidArgument("startingOffsets of a batch is earliest or a position: after latest there is nothing")
    if ending == EARLIEST:
        raise InvalidArgument("endingOffsets is latest or a position: before earliest there is nothing")


def latest_if_none(given: Given) -> bool:
    """True unless `startingOffsetsByTimestampStrategy` is `error`, which Kafka has as default: an idle partition is no mistake."""
    return given.one_of("startingOffsetsByTimestampStrategy", ("latest", "error")) == "latest"


def limits_of(given: Given) -> Limits:
    """The limits. Raises `InvalidArgument`."""
    least, most = given.number("minOffsetsPerTrigger", 0, 1, MAX_ID), given.number("maxOffsetsPerTrigger", 0, 1, MAX_ID)
    if most and least > most:
        raise InvalidArgument(f"minOffsetsPerTrigger, {least}, is above maxOffsetsPerTrigger, {most}")
    return Limits(
        max_rows=most,
        max_bytes=given.number("maxBytesPerTrigger", 0, 1, MAX_ID),
        min_rows=least,
        max_delay_s=given.seconds("maxTriggerDelay", DEFAULT_DELAY),
        min_partitions=given.number("minPartitions", 0, 1, MAX_TASKS),
        max_rows_of_task=given.number("maxRecordsPerPartition", 0, 1, MAX_ID),
    )


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Check the options of a read. Raises `InvalidArgument`, which names the option and the allowed values."""
    given = Given(options, READ_OPTIONS)
    table = given.text("table", MESSAGES).lower()
    check_ranges(given, streaming=streaming)
    columns, headers = columns_of(table, given.names("columns")), given.yes("includeHeaders", False)
    if table != MESSAGES:
        if streaming:
            raise InvalidArgument(f"table {table} holds the current state, not a stream of rows: read it as a batch")
        for name in (*RANGE_OPTIONS, "includeHeaders"):
            if name != "failOnDataLoss" and given.text(name):
                has = "has no headers" if name == "includeHeaders" else "has no offsets"
                raise InvalidArgument(f"option {name} is for table {MESSAGES}: {table} {has}")
    starting = parse_wanted("startingOffsets", given.text("startingOffsets"), LATEST if streaming else EARLIEST)
    ending = parse_wanted("endingOffsets", given.text("endingOffsets"), LATEST)
    check_words(starting.word, ending.word, streaming=streaming)
    partitions = frozenset(given.numbers("partitions", 0, MAX_PARTITION))
    starting, ending = (
        replace(
            wanted,
            time_ms=given.time_ms(f"{end}Timestamp"),
            times_ms=parse_times(f"{end}OffsetsByTimestamp", given.text(f"{end}OffsetsByTimestamp"), (0, MAX_PARTITION)),
        )
        for end, wanted in (("starting", starting), ("ending", ending))
    )
    for end, wanted in (("starting", starting), ("ending", ending)):
        left_out = sorted(wanted.named - partitions) if partitions else []
        if left_out:
            raise InvalidArgument(f"the {end} offsets name partition {left_out[0]}, which option partitions leaves out")
    check_order("the read", starting.word, ending.word, starting.time_ms, ending.time_ms)
    for each in sorted(starting.named | ending.named):
        times = starting.at_ms(each), ending.at_ms(each)
        check_order(f"Xiu partition {each}", starting.of(each), ending.of(each), *times)
    users = given.numbers("users", 1, MAX_ID)
    if len(users) > MAX_USERS:
        raise InvalidArgument(f"option users names {len(users)}; at most {MAX_USERS}: read all and filter")
    return ReadOptions(
        target=given.target(),
        table=table,
        columns=columns,
        headers=headers,
        partitions=partitions,
        users=users,
        starting=starting,
        ending=ending,
        latest_if_none=latest_if_none(given),
        limits=limits_of(given),
        fail_on_data_loss=given.yes("failOnDataLoss", True),
        reader=given.name_of("reader"),
        retry_s=given.retry_s(),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Check the options of a write. Raises `InvalidArgument`."""
    given = Given(options, WRITE_OPTIONS)
    query = given.name_of("query")
    if not query:
        raise InvalidArgument(
            "option query is missing: a name that stays the same whenever this query is run again; the messages' IDs are derived "
            "from it, so that what is written again is stored once"
        )
    return WriteOptions(
        given.target(),
        query,
        given.one_of("kind", KINDS),
        given.names("idColumns"),
        given.one_of("level", LEVELS),
        given.retry_s(),
        given.text("checkpointLocation"),
    )
