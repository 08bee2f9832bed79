"""The tables that the stores export: their columns, in order, with types. Pure.

    xiu   messages           stored messages, one row a message
    pi    inboxes            entries of users' inboxes
          heads              one row an inbox: its beginning and end, and its drops
          acknowledgements   one row a device and lane: its cursor
          devices            one row a device of a user

Servers make Arrow arrays of these types; readers and Spark expect them. Only `sent_at` can be null.

Source: docs/pipeline.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from pixiu.errors import InvalidArgument

ColumnType = Literal["int", "long", "timestamp", "binary", "boolean"]
"""32 and 64 bits, signed; Unix microseconds in UTC; bytes; a bit."""
Columns = tuple[tuple[str, ColumnType], ...]

MESSAGES: Final = "messages"
INBOXES: Final = "inboxes"
HEADS: Final = "heads"
ACKNOWLEDGEMENTS: Final = "acknowledgements"
DEVICES: Final = "devices"
MAX_USERS: Final = 10_000
"""Limit of users in one request."""

TABLES: Final[dict[str, Columns]] = {
    MESSAGES: (
        ("xiu_partition", "int"),
        ("type", "int"),  # the record's whole type: lane << 6 | the application's type
        ("seq", "long"),  # Partition_Msg_ID
        ("msg_id", "long"),
        ("snowflake_id", "long"),
        ("key", "long"),  # UIN of the first receiver
        ("sender", "long"),
        ("sent_at", "timestamp"),  # null if the ID is derived and holds no time
        ("stored_at", "timestamp"),
        ("flags", "int"),
        ("lifetime_min", "int"),
        ("ext", "binary"),
        ("body", "binary"),  # as sent
        ("trace", "binary"),  # stamps of 24 bytes (`pixiu.wire.record.STAMP`), end to end
    ),
    INBOXES: (
        ("pi_partition", "int"),
        ("uin", "long"),
        ("lane", "int"),
        ("inbox_seq", "long"),
        ("msg_id", "long"),
        ("appended_at", "timestamp"),
    ),
    HEADS: (
        ("pi_partition", "int"),
        ("uin", "long"),
        ("lane", "int"),
        ("last", "long"),
        ("floor", "long"),
        ("base", "long"),
        ("gap", "long"),
        ("dropped", "long"),
    ),
    ACKNOWLEDGEMENTS: (
        ("pi_partition", "int"),
        ("uin", "long"),
        ("device", "int"),
        ("lane", "int"),
        ("up_to", "long"),
        ("map", "long"),  # bit i: up_to + 1 + i is acknowledged; the 64th bit makes it negative
    ),
    DEVICES: (
        ("pi_partition", "int"),
        ("uin", "long"),
        ("device", "int"),
        ("session", "long"),
        ("seen_at", "timestamp"),
        ("client_id", "binary"),
    ),
}
ROLE_OF_TABLE: Final = {table: "xiu" if table == MESSAGES else "pi" for table in TABLES}


def tables_of(role: str) -> dict[str, Columns]:
    """Return the tables that a role exports."""
    return {table: columns for table, columns in TABLES.items() if ROLE_OF_TABLE[table] == role}


def columns_of(table: str, names: Sequence[str], tables: Mapping[str, Columns] = TABLES) -> Columns:
    """Select columns by name, in the order of the names; none: all. Raises `InvalidArgument`, which lists the known names."""
    known = tables.get(table)
    if known is None:
        raise InvalidArgument(f"there is no table {table!r}; one of {', '.join(tables)}")
    if not names:
        return known
    types = dict(known)
    unknown = [name for name in names if name not in types]
    if unknown:
        raise InvalidArgument(f"table {table} has no column {unknown[0]!r}; it has {', '.join(types)}")
    if len(set(names)) != len(names):
        raise InvalidArgument(f"a column is named twice: {', '.join(names)}")
    return tuple((name, types[name]) for name in names)
