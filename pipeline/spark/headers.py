"""Column `headers` of mail: the extension, a JSON object, as a map of strings.

    ext {"tag": "a", "n": 3} ──▶ headers {tag: "a", n: "3"}

What is no JSON object is null, as is a message without an extension. A value that is no string is its JSON, as Spark's `from_json`
has it.

Source: docs/pipeline.md.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final

import pyarrow as pa

from pixiu.wire.export_tables import Columns

HEADERS: Final = "headers"
EXT: Final = "ext"
TYPE: Final = pa.map_(pa.string(), pa.string())


def shipped(columns: Columns) -> Columns:
    """The columns that a server sends, so that headers can be made of them."""
    return columns if EXT in dict(columns) else (*columns, (EXT, "binary"))


@lru_cache(4096)
def headers_of(ext: bytes) -> dict[str, str] | None:
    """The headers of one extension."""
    try:
        found = json.loads(ext) if ext else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    return {name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":")) for name, value in found.items()}


def with_headers(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """The columns of a record batch, and the headers after them."""
    found = [headers_of(ext) for ext in batch.column(EXT).to_pylist()]
    headers = pa.array([None if each is None else list(each.items()) for each in found], TYPE)
    names = [name for name, _ in columns]
    return pa.RecordBatch.from_arrays([*(batch.column(name) for name in names), headers], names=[*names, HEADERS])
