"""Decoders of the tables' packed columns, as functions of Spark's columns and DataFrames.

    type   ──▶ lane, application_type           trace          ──▶ stamps, an array of structs
    ext    ──▶ headers, a map                   up_to, map     ──▶ is_acknowledged
    body   ──▶ topic_of, content                inboxes        ──▶ receivers of each message
    names  ──▶ ids, for `named`: users and topics are 63 bits of a hash, which nothing turns back

Of mail: each column has the function's name, `topic_of` the name `topic`. A row of a durable topic needs none of them but `named`.

    from pipeline import functions as decode
    mails.select(decode.lane("type"), decode.content("body", "flags"), decode.headers("ext")["tag"])

Source: docs/pipeline.md, "Decoders"; docs/protocol.md, "Record".
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import functions as f

from pixiu.errors import InvalidArgument
from pixiu.ids import topic_room, uin_of_name
from pixiu.wire.record import STAMP, STAMP_SIZE, TYPE_BITS, Flag
from pixiu.wire.trace import name_of_hop

MAX_CONTENT: Final = 64 << 20
"""Limit of a decompressed body, bytes. Policy: a larger one is null."""
STAMPS: Final = "array<struct<role: string, partition: int, replica: long, in_at: timestamp, out_at: timestamp>>"
_TIME: Final = pa.timestamp("us", tz="UTC")
_STAMP: Final = pa.struct(
    [("role", pa.string()), ("partition", pa.int32()), ("replica", pa.int64()), ("in_at", _TIME), ("out_at", _TIME)]
)
_MAGIC: Final = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x04\x22\x4d\x18": "lz4", b"BZh": "bz2"}
KINDS: Final[dict[str, Callable[[str], int]]] = {"user": uin_of_name, "topic": topic_room}
"""Kind of a name → its ID; of a topic it is the room that carries it."""


def _column(column: Any) -> Any:
    return f.col(column) if isinstance(column, str) else column


def _has(flags: Any, flag: int) -> Any:
    return _column(flags).bitwiseAND(flag) != 0


# --- columns


def lane(type_: Any = "type") -> Any:
    """The lane, 0 first."""
    return f.shiftright(_column(type_), TYPE_BITS).alias("lane")


def application_type(type_: Any = "type") -> Any:
    """The application's type, 0 to 63."""
    return _column(type_).bitwiseAND((1 << TYPE_BITS) - 1).alias("application_type")


def headers(ext: Any = "ext") -> Any:
    """The extension as a map of strings; null for what is no JSON object."""
    return f.from_json(_column(ext).cast("string"), "map<string,string>").alias("headers")


def topic_of(body: Any = "body", flags: Any = "flags") -> Any:
    """The MQTT topic before the body; null where there is none (flag 16)."""
    body = _column(body)
    size = f.conv(f.hex(f.substring(body, 1, 2)), 16, 10).cast("int")
    return f.when(_has(flags, Flag.TOPIC), body.substr(f.lit(3), size).cast("string")).alias("topic")


def content(body: Any = "body", flags: Any = "flags") -> Any:
    """The application's bytes: without the MQTT topic (flag 16), and decompressed (flag 8) if they are gzip, zlib, zstd, LZ4 or
    bzip2, which their first bytes tell; null for what is damaged, in another form, or more than `MAX_CONTENT`."""
    packed = _has(flags, Flag.COMPRESSED | Flag.TOPIC)
    unpack = f.arrow_udf(_contents, "binary")
    return f.when(packed, unpack(_column(body), _column(flags))).otherwise(_column(body)).alias("content")


def stamps(trace: Any = "trace") -> Any:
    """The stamps of a traced message, one of each hop that it passed."""
    return f.arrow_udf(_stamps, STAMPS)(_column(trace)).alias("stamps")


def is_acknowledged(inbox_seq: Any = "inbox_seq", up_to: Any = "up_to", map_: Any = "map") -> Any:
    """True if a device has acknowledged an entry: `inboxes` joined with `acknowledgements` by user and lane."""
    ahead = (_column(inbox_seq) - _column(up_to) - 1).cast("int")
    bit = f.getbit(_column(map_), f.greatest(f.least(ahead, f.lit(63)), f.lit(0)))
    return ((ahead < 0) | ((ahead < 64) & (bit == 1))).alias("is_acknowledged")


# --- DataFrames


def receivers(inboxes: Any) -> Any:
    """(msg_id, receivers): the users in whose inboxes each message is, to be joined with `messages`; `key` is the first alone."""
    return inboxes.groupBy("msg_id").agg(f.sort_array(f.collect_set("uin")).alias("receivers"))


def ids(names: Any, kind: str = "user") -> Any:
    """(id, name) of a dictionary of names.

    Args:
        names: a DataFrame with a column `name`, or of one column.
        kind: "user", or "topic" for the rooms that carry MQTT topics.
    """
    if kind not in KINDS:
        raise InvalidArgument(f"names are of a user or a topic, not {kind!r}")
    column = "name" if "name" in names.columns else names.columns[0]
    id_of = f.arrow_udf(_users if kind == "user" else _topics, "long")
    return (
        names.select(f.trim(f.col(column)).alias("name")).where("name <> ''").distinct().select(id_of("name").alias("id"), "name")
    )


def named(frame: Any, names: Any, *columns: str, kind: str = "user") -> Any:
    """A DataFrame with a column `COLUMN_name` for each of some columns of IDs; null where the dictionary has no name.

    Args:
        names: of `ids`: a DataFrame, or the path of a text file with a name in each line.
    """
    if isinstance(names, str):
        names = frame.sparkSession.read.text(names)
    known = f.broadcast(ids(names, kind))
    for column in columns:
        found = known.select(f.col("id").alias(column), f.col("name").alias(f"{column}_name"))
        frame = frame.join(found, column, "left")
    return frame


# --- in Python


def _contents(body: pa.Array, flags: pa.Array) -> pa.Array:
    found = [content_of(*each) for each in zip(body.to_pylist(), flags.to_pylist(), strict=True)]
    return pa.array(found, pa.binary())


def content_of(body: bytes | None, flags: int) -> bytes | None:
    """See `content`."""
    if body is None:
        return None
    if flags & Flag.TOPIC:
        body = body[2 + int.from_bytes(body[:2], "big") :]
    return decompressed(body) if flags & Flag.COMPRESSED else body


def decompressed(body: bytes) -> bytes | None:
    """A body decompressed by what its first bytes say."""
    kind = next((name for magic, name in _MAGIC.items() if body.startswith(magic)), "")
    try:
        if kind:
            with pa.input_stream(pa.py_buffer(body), compression=kind) as stream:
                found: bytes = stream.read(MAX_CONTENT + 1)
        else:
            stream = zlib.decompressobj()
            found = stream.decompress(body, MAX_CONTENT + 1)
            if not stream.eof:
                return None
    except (OSError, zlib.error, pa.ArrowException):
        return None
    return found if len(found) <= MAX_CONTENT else None


def _stamps(trace: pa.Array) -> pa.Array:
    return pa.array([stamps_of(each) for each in trace.to_pylist()], pa.list_(_STAMP))


def stamps_of(trace: bytes | None) -> list[dict[str, object]]:
    """See `stamps`; stamps that are cut off are left out."""
    data = (trace or b"")[: len(trace or b"") // STAMP_SIZE * STAMP_SIZE]
    return [
        {"role": name_of_hop(role), "partition": partition, "replica": replica, "in_at": in_us, "out_at": out_us}
        for role, partition, _, replica, in_us, out_us in STAMP.iter_unpack(data)
        if max(in_us, out_us) < 1 << 63
    ]


def _users(names: pa.Array) -> pa.Array:
    return pa.array([uin_of_name(name) for name in names.to_pylist()], pa.int64())


def _topics(names: pa.Array) -> pa.Array:
    return pa.array([topic_room(name) for name in names.to_pylist()], pa.int64())
