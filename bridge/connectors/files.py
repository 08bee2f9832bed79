"""A target that writes files of messages: JSON lines or Parquet, in a folder or any store that fsspec opens.

    URL/TOPIC/2026-01-31/20260131T140500Z-1-4096-2000-8c2f91d0a3b4.jsonl     day and time of the first message, its part and offset,
                                                                             the count, and a digest of all positions
A batch is one file, written as a whole under a name that follows from its messages: a batch that is repeated takes its own place.

Source: docs/bridges.md, "To files".
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from bridge.connector import DONE, Item, Outcome
from bridge.connectors.webhook import fields_of
from bridge.options import TargetOptions
from cluster.settings.fields import bounded, choice
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.objects.manifest import check_url
from pixiu.objects.store import ObjectStore

ENDINGS: Final = {"jsonl": "jsonl", "body": "jsonl", "parquet": "parquet"}


@dataclass(frozen=True, kw_only=True)
class FilesOptions(TargetOptions):
    """A bridge with kind = "to-files"."""

    url: str = ""
    """Place where files are written: an absolute folder, or a URL such as s3://bucket/folder."""
    form: str = choice("jsonl", "jsonl", "body", "parquet")
    """Form of the files: a JSON object for each message, its body alone as a line, or a row of Parquet."""
    credit: int = bounded(10_000, 1, 10_000)
    """Messages that the bridge may have and not have finished, in each process."""
    batch_messages: int = bounded(10_000, 1, 10_000)
    """Most messages of a file."""
    batch_bytes: int = bounded(16 << 20, 1024, 64 << 20)
    """Most bytes of messages of a file."""
    linger_ms: int = bounded(10_000, 0, 600_000)
    """Milliseconds for which a file that is not full waits for more."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            if not check_url(self.url):
                yield "url", "an absolute folder, or a URL such as s3://bucket/folder"
        except InvalidArgument as error:
            yield "url", f"an absolute folder, or a URL: {error}"


class Files:
    """Writes batches as files.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: FilesOptions) -> None:
        self._options = options
        self._store: ObjectStore | None = None

    async def open(self) -> None:
        """Open the store. Raises `ConfigurationError`."""
        if self._options.form == "parquet":
            table_of([])
        self._store = await asyncio.to_thread(ObjectStore, self._options.url)

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Write one file, durably as far as the store is. Raises `Unavailable`."""
        store = self._store
        assert store is not None
        name = f"{batch[0].topic}/{file_name(batch)}.{ENDINGS[self._options.form]}"
        await asyncio.to_thread(lambda: store.put(name, content_of(batch, self._options.form)))
        return [DONE] * len(batch)

    def settled(self, batch: Sequence[Item]) -> None:
        """Nothing to note."""

    async def close(self) -> None:
        """Nothing to close."""
        self._store = None


def file_name(batch: Sequence[Item]) -> str:
    """The name of a batch's file, with its folder: the same for the same messages."""
    when = datetime.fromtimestamp(batch[0].time_us // 1_000_000, UTC)
    digest = hashlib.sha256(json.dumps([each.position for each in batch]).encode()).hexdigest()[:12]
    part, offset = batch[0].position
    return f"{when:%Y-%m-%d}/{when:%Y%m%dT%H%M%SZ}-{part}-{offset}-{len(batch)}-{digest}"


def content_of(batch: Sequence[Item], form: str) -> bytes:
    """The content of a batch's file."""
    if form == "body":
        return b"".join(each.body.rstrip(b"\n") + b"\n" for each in batch)
    if form == "jsonl":
        lines = (json.dumps({"topic": each.topic} | fields_of(each), ensure_ascii=False) for each in batch)
        return "".join(f"{line}\n" for line in lines).encode()
    table = table_of(batch)
    out = io.BytesIO()
    from pyarrow import parquet

    parquet.write_table(table, out, compression="zstd")
    return out.getvalue()


def table_of(batch: Sequence[Item]) -> Any:
    """An Arrow table of messages. Raises `ConfigurationError` if pyarrow is missing."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ConfigurationError("form = \"parquet\" needs pyarrow: pip install 'pixiu-cluster[bridge]'") from None
    headers = pyarrow.map_(pyarrow.string(), pyarrow.binary())
    columns = {
        "topic": (pyarrow.string(), [each.topic for each in batch]),
        "part": (pyarrow.int64(), [each.position[0] for each in batch]),
        "offset": (pyarrow.int64(), [each.position[1] for each in batch]),
        "time_us": (pyarrow.int64(), [each.time_us for each in batch]),
        "event_time_us": (pyarrow.int64(), [each.event_time_us for each in batch]),
        "key": (pyarrow.binary(), [each.key for each in batch]),
        "headers": (headers, [list(each.headers.items()) for each in batch]),
        "body": (pyarrow.binary(), [each.body for each in batch]),
    }
    return pyarrow.table({name: pyarrow.array(values, kind) for name, (kind, values) in columns.items()})
