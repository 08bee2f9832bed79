"""Exported columns as Arrow types. Imported only when an export runs.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pixiu.wire.export_tables import Columns, ColumnType

TYPES: Final[dict[ColumnType, pa.DataType]] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}


def schema_of(columns: Columns) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([pa.field(name, TYPES[kind]) for name, kind in columns])
