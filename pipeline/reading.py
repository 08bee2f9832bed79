"""Functions shared by the jobs: reading tables, and one sentence for any error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pixiu.errors import DiskFull, InvalidArgument, PixiuError, Unavailable

_OURS: Final = re.compile(r"^(?:.*?: )?pixiu\.(?:errors|[\w.]+)\.(\w+): (.+)$", re.MULTILINE)
_FULL: Final = re.compile("No space left on device|Disk quota exceeded")
_PLACE: Final = re.compile(r"Task failed while writing rows to (\S+?)\.?(?=\s|$)")
_TRACEBACK: Final = "Traceback (most recent call last):"
MAX_SENTENCE: Final = 1000
TIMES: Final = "spark.sql.parquet.outputTimestampType"


def read(spark: Any, target: str, **options: object) -> Any:
    """Open a table of the cluster as a DataFrame, as it is now."""
    reader = spark.read.format("pixiu").option("target", target)
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.load()


def sentence_of(error: BaseException) -> str:
    """Describe an exception in one sentence: ours, if Spark's contains one."""
    text = str(error)
    if _FULL.search(text):
        place = _PLACE.search(text)
        where = f"on the disk of {place[1]}" if place else "on a disk that Spark writes to"
        return f"no space is left {where}: free some, and run it again; it continues where it was"[:MAX_SENTENCE]
    ours = _OURS.findall(text)
    if ours:
        return str(ours[-1][1]).strip()[:MAX_SENTENCE]
    _, traceback, raised = text.rpartition(_TRACEBACK)
    lines = [line for line in raised.splitlines() if line.strip()]
    if traceback:  # the error is the first line that is not indented
        lines = lines[next((place for place, line in enumerate(lines) if not line[0].isspace()), 0) :]
    lines = [line.strip().removeprefix(": ").removeprefix("py4j.protocol.Py4JJavaError: ") for line in lines]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling "):  # py4j's; Java's own is the next
        lines = lines[1:]
    return (lines[0] if lines else type(error).__name__)[:MAX_SENTENCE]


def problem_of(error: Exception) -> PixiuError:
    """Convert an exception of Spark's to one of ours, in one sentence."""
    return (DiskFull if _FULL.search(str(error)) else Unavailable)(sentence_of(error))


def read_json(spark: Any, path: str, schema: str) -> Any:
    """Read files of JSON lines. A malformed line has nulls. Raises InvalidArgument if there are no files."""
    try:
        return spark.read.schema(schema).json(path)
    except Exception as error:
        raise _unreadable(path, error) from None


def read_file(spark: Any, path: str, columns: tuple[str, ...]) -> Any:
    """Read a file or folder of JSON lines, CSV with a header, or Parquet, chosen by its name. Raises InvalidArgument if it lacks
    one of these columns."""
    plain = path.lower().rstrip("/").removesuffix(".gz")
    try:
        if plain.endswith(".csv"):
            found = spark.read.option("header", "true").option("inferSchema", "true").csv(path)
        elif plain.endswith((".json", ".jsonl")):
            found = spark.read.json(path)
        else:
            found = spark.read.parquet(path)
    except Exception as error:
        raise _unreadable(path, error) from None
    missing = [name for name in columns if name not in found.columns]
    if missing:
        raise InvalidArgument(f"{path} has no column {missing[0]!r}; it has {', '.join(found.columns)}")
    return found


def _unreadable(path: str, error: BaseException) -> InvalidArgument:
    return InvalidArgument(f"{path} cannot be read: {sentence_of(error)}")


@contextmanager
def microseconds(spark: Any) -> Iterator[None]:
    """Write timestamps as microseconds: Spark's INT96 has no statistics, and no time zone for other programs."""
    before = spark.conf.get(TIMES)
    spark.conf.set(TIMES, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(TIMES, before)


def write_tables(spark: Any, tables: dict[str, Any], folder: str) -> None:
    """Write tables as Parquet, a folder for each, with `_SUCCESS` when it is complete."""
    with microseconds(spark):
        for name, frame in tables.items():
            frame.write.mode("overwrite").parquet(f"{folder}/{name}")
