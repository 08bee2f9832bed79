"""The columns of a table in Spark's and in Arrow's form."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pixiu.wire.export_tables import Columns, ColumnType

SPARK_TYPES: Final[dict[ColumnType, DataType]] = {
    "int": IntegerType(),
    "long": LongType(),
    "timestamp": TimestampType(),
    "binary": BinaryType(),
    "boolean": BooleanType(),
}
ARROW_TYPES: Final[dict[ColumnType, pa.DataType]] = {
    "int": pa.int32(),
    "long": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "binary": pa.binary(),
    "boolean": pa.bool_(),
}


def spark_schema(columns: Columns, *, headers: bool = False) -> StructType:
    """The table's schema for Spark; with the column of headers, a map of strings, at its end."""
    found = StructType([StructField(name, SPARK_TYPES[kind], nullable=True) for name, kind in columns])
    return found.add("headers", MapType(StringType(), StringType())) if headers else found


def arrow_schema(columns: Columns) -> pa.Schema:
    """The table's Arrow schema: equal to Spark's conversion of `spark_schema`."""
    return pa.schema([pa.field(name, ARROW_TYPES[kind]) for name, kind in columns])
