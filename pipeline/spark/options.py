"""The options of the source and the sink, checked before any cluster is contacted. Pure.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipeline.spark.offsets import EARLIEST, LATEST, MAX_PARTITION, Wanted, parse_wanted
from pixiu.discovery.target import parse_target
from pixiu.errors import InvalidArgument
from pixiu.ids import MAX_ID
from pixiu.wire.export_tables import MAX_USERS, MESSAGES, ROLE_OF_TABLE, Columns, columns_of

READ_OPTIONS: Final = (
    "target", "table", "columns", "partitions", "users", "startingOffsets", "endingOffsets", "startingTimestamp",
    "endingTimestamp", "maxOffsetsPerTrigger", "minPartitions", "failOnDataLoss", "reader", "retrySeconds",
)  # fmt: skip
WRITE_OPTIONS: Final = ("target", "query", "kind", "idColumns", "level", "retrySeconds")
SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname", "path"})
"""Spark's own options that it passes on."""
STREAM_ONLY: Final = ("maxOffsetsPerTrigger", "reader")
BATCH_ONLY: Final = ("endingOffsets", "endingTimestamp")
KINDS: Final = ("mail", "chat", "room")
LEVELS: Final = ("replicated", "persisted", "accepted")
DEFAULT_RETRY_S: Final = 60.0
MAX_NAME: Final = 128
"""Limit of characters of a reader's or a query's name."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read."""

    target: str
    table: str
    columns: Columns
    partitions: frozenset[int]
    """Empty: all."""
    users: tuple[int, ...]
    """Empty: all."""
    starting: Wanted
    ending: Wanted
    starting_ms: int
    """Unix milliseconds; 0: by position."""
    ending_ms: int
    max_offsets_per_trigger: int
    """0: no limit."""
    min_partitions: int
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
        text = self.text(name) or str(default)
        if not text.lstrip("-").isdecimal() or not least <= int(text) <= most:
            raise InvalidArgument(f"option {name} is a number from {least} to {most}, not {text!r}")
        return int(text)

    def numbers(self, name: str, least: int, most: int) -> tuple[int, ...]:
        found = self.names(name)
        for text in found:
            if not text.isdecimal() or not least <= int(text) <= most:
                raise InvalidArgument(f"option {name} is a list like 1,2,3 of numbers from {least} to {most}, not {text!r}")
        return tuple(int(text) for text in found)

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        text = self.text(name, allowed[0]).lower()
        if text not in allowed:
            raise InvalidArgument(f"option {name} is one of {', '.join(allowed)}, not {text!r}")
        return text

    def target(self) -> str:
        text = self.text("target")
        if not text:
            raise InvalidArgument('option target is missing: .option("target", "zk://HOST:PORT/ROOT"), or HOST:PORT,… of processes')
        parse_target(text)
        return text

    def retry_s(self) -> float:
        return float(self.number("retrySeconds", int(DEFAULT_RETRY_S), 1, 86_400))

    def name_of(self, name: str) -> str:
        text = self.text(name)
        if len(text) > MAX_NAME:
            raise InvalidArgument(f"option {name} has at most {MAX_NAME} characters, this one {len(text)}")
        return text


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Check the options of a read. Raises `InvalidArgument`, which names the option and the allowed values."""
    given = Given(options, READ_OPTIONS)
    table = given.text("table", MESSAGES).lower()
    for name in BATCH_ONLY if streaming else STREAM_ONLY:
        if given.text(name):
            raise InvalidArgument(f"option {name} is for {'batch' if streaming else 'streaming'} reads")
    columns = columns_of(table, given.names("columns"))
    if table != MESSAGES:
        if streaming:
            raise InvalidArgument(f"table {table} holds the current state, not a stream of rows: read it as a batch")
        for name in READ_OPTIONS:
            if (name.startswith(("starting", "ending")) or name == "minPartitions") and given.text(name):
                raise InvalidArgument(f"option {name} is for table {MESSAGES}: {table} has no offsets")
    for end, when in (("startingOffsets", "startingTimestamp"), ("endingOffsets", "endingTimestamp")):
        if given.text(end) and given.text(when):
            raise InvalidArgument(f"give {end} or {when}, not both")
    starting = parse_wanted("startingOffsets", given.text("startingOffsets"), LATEST if streaming else EARLIEST)
    ending = parse_wanted("endingOffsets", given.text("endingOffsets"), LATEST)
    if starting.word == LATEST and not streaming and not starting.positions:
        raise InvalidArgument("startingOffsets of a batch is earliest or a position: after latest there is nothing")
    if ending.word == EARLIEST and not ending.positions:
        raise InvalidArgument("endingOffsets is latest or a position: before earliest there is nothing")
    users = given.numbers("users", 1, MAX_ID)
    if len(users) > MAX_USERS:
        raise InvalidArgument(f"option users names {len(users)}; at most {MAX_USERS}: read all and filter")
    return ReadOptions(
        target=given.target(),
        table=table,
        columns=columns,
        partitions=frozenset(given.numbers("partitions", 0, MAX_PARTITION)),
        users=users,
        starting=starting,
        ending=ending,
        starting_ms=given.number("startingTimestamp", 0, 0, MAX_ID // 1_000_000),
        ending_ms=given.number("endingTimestamp", 0, 0, MAX_ID // 1_000_000),
        max_offsets_per_trigger=given.number("maxOffsetsPerTrigger", 0, 0, MAX_ID),
        min_partitions=given.number("minPartitions", 0, 0, 100_000),
        fail_on_data_loss=given.one_of("failOnDataLoss", ("true", "false")) == "true",
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
