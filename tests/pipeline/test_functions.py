"""Decoders in Python, without Spark; as columns they are tested in `test_spark.py`."""

from __future__ import annotations

import bz2
import gzip
import zlib

import pyarrow as pa
import pytest

from pipeline import functions
from pipeline.functions import content_of, decompressed, stamps_of
from pixiu.wire.record import STAMP, Flag, with_topic
from pixiu.wire.trace import Hop

TEXT = b"twenty degrees, " * 100


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(TEXT),
        zlib.compress(TEXT),
        bz2.compress(TEXT),
        *(pa.compress(TEXT, codec=codec, asbytes=True) for codec in ("zstd", "lz4")),
    ],
    ids=["gzip", "zlib", "bz2", "zstd", "lz4"],
)
def test_a_body_is_decompressed_by_what_it_begins_with(packed: bytes) -> None:
    assert decompressed(packed) == TEXT
    assert content_of(packed, Flag.COMPRESSED) == TEXT
    assert content_of(packed, 0) == packed
    assert content_of(with_topic("a/b", packed), Flag.COMPRESSED | Flag.TOPIC) == TEXT
    assert decompressed(packed[:-9]) is None, "it is cut off"


def test_what_is_no_compressed_body_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [decompressed(body) for body in (b"", b"plain", b"\x1f\x8b", b"BZh9x")] == [None] * 4
    assert content_of(None, Flag.COMPRESSED) is None
    monkeypatch.setattr(functions, "MAX_CONTENT", 1000)
    for packed in (gzip.compress(bytes(1001)), zlib.compress(bytes(1001))):
        assert decompressed(packed) is None, "a small one may be large inside"
    assert decompressed(gzip.compress(bytes(1000))) == bytes(1000)


def test_stamps() -> None:
    trace = STAMP.pack(Hop.PROXY, 0, 0, 5, 1_000, 2_000) + STAMP.pack(99, 3, 0, 6, 3_000, 1 << 40)
    assert stamps_of(trace + b"cut off") == [
        {"role": "proxy", "partition": 0, "replica": 5, "in_at": 1_000, "out_at": 2_000},
        {"role": "99", "partition": 3, "replica": 6, "in_at": 3_000, "out_at": 1 << 40},
    ]
    assert stamps_of(b"") == stamps_of(None) == []
