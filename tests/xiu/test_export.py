"""Export of a Xiu: rows equal what was stored, parts end where they say, positions are found by counts and by time."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.store.export import export as shared
from cluster.store.export.arrow import schema_of
from cluster.store.export.export import Part
from pixiu.errors import Gone, InvalidArgument, StoreDamaged, Unavailable
from pixiu.ids import msg_id, snowflake, snowflake_time_ms
from pixiu.wire.export_tables import MESSAGES, columns_of
from pixiu.wire.record import STAMP, Flag, Kind, Record, decode, encode
from pixiu.wire.v1 import export_pb2
from tests.xiu.parts import NOW_MS, NOW_US, NoTable, mail, store
from xiu.export import export as export_module
from xiu.export.export import Export, advance, advance_bytes, bounds, size
from xiu.records.block import KEY
from xiu.state.keys import BLOCKS
from xiu.state.keys import KEY as STATE_KEY
from xiu.state.state import State, XiuKind, trim_entry
from xiu.store.reading import Reading
from xiu.store.store import Store

PARTITION = 3
assert KEY.size == 8


class Stored:
    """A store with what was put into it, and a reading of it."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.state = State(PARTITION, self.store, self.store.head)
        self.reading = Reading(PARTITION, self.store, NoTable())
        self.rows: dict[int, Record] = {}
        self.counter = 0

    def put(self, *records: bytes, epoch: int = 1, at_us: int = NOW_US) -> None:
        self.counter += 1
        decision = self.state.decide(store(self.counter, *records, epoch=epoch, at_us=at_us))
        self.store.write([decision])
        self.state.written(decision)
        assert decision.block is not None
        self.rows |= {decision.block.first + index: decode(record) for index, record in enumerate(records)}

    def trim(self, up_to: int) -> None:
        self.counter += 1
        entry = store(self.counter)._replace(kind=int(XiuKind.TRIM), payload=trim_entry(up_to, 0))
        self.store.write([self.state.decide(entry)])

    def export(self, begin: int = 0, end: int = 0, users: tuple[int, ...] = (), columns: tuple[str, ...] = ()) -> list[Part]:
        wanted = columns_of(MESSAGES, columns)
        export = Export(PARTITION, self.reading, wanted, frozenset(users), begin, end or self.store.head.last + 1)
        parts = [export.part()]
        while not parts[-1].last:
            parts.append(export.part())
        return parts


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    found = Stored(tmp_path / "store")
    yield found
    found.store.close()


def rows_of(parts: list[Part]) -> list[dict[str, Any]]:
    return [row for part in parts if part.batch is not None for row in part.batch.to_pylist()]


def traced(number: int) -> bytes:
    plain = encode(Kind.MAIL, 7, b"traced", number, flags=Flag.TRACED)
    stamp = STAMP.pack(1, 2, 0, 3, 4, 5)
    return (len(plain) - 4 + len(stamp)).to_bytes(4, "little") + plain[4:-1] + stamp + b"\1"


def test_rows_are_what_was_stored(stored: Stored) -> None:
    stored.put(*(mail(number, b"%d" % number, key=number, type_=number) for number in range(10)))
    stored.put(
        mail(11, b"\x1f\x8b zipped", key=7, flags=Flag.COMPRESSED),
        encode(Kind.MAIL, 7, b"", snowflake(NOW_MS, 1, 12), extension=b'{"tag": 1}', lifetime_min=65_535, sender=99),
        encode(Kind.MAIL, 7, b"derived", (1 << 63) - 1, flags=Flag.DERIVED_ID),
        traced(snowflake(NOW_MS, 1, 14)),
        epoch=2,
        at_us=NOW_US + 1,
    )
    found = rows_of(stored.export())
    assert len(found) == len(stored.rows) == 14
    for row, (sequence, record) in zip(found, stored.rows.items(), strict=True):
        assert (row["seq"], row["xiu_partition"], row["msg_id"]) == (sequence, 3, msg_id(3, record.type, sequence))
        assert (row["type"], row["flags"], row["lifetime_min"]) == (record.type, record.flags, record.lifetime_min)
        assert (row["snowflake_id"], row["key"], row["sender"]) == (record.snowflake_id, record.key, record.sender)
        assert (row["ext"], row["body"]) == (record.extension, record.body)
        assert row["trace"] == b"".join(STAMP.pack(*stamp) for stamp in record.stamps)
        assert int(row["stored_at"].timestamp() * 1e6) == NOW_US + (sequence >> 32 == 2)
        if record.flags & Flag.DERIVED_ID:
            assert row["sent_at"] is None
        else:
            assert round(row["sent_at"].timestamp() * 1000) == snowflake_time_ms(record.snowflake_id)
    (part,) = stored.export()
    assert part.batch is not None
    assert part.batch.schema == schema_of(columns_of(MESSAGES, ()))


def test_columns_and_users(stored: Stored) -> None:
    stored.put(*(mail(number, key=number % 3) for number in range(9)))
    (part,) = stored.export(users=(2, 77), columns=("body", "seq"))
    assert part.batch is not None
    assert part.batch.schema.names == ["body", "seq"]
    assert [row["seq"] & 0xFFFF for row in part.batch.to_pylist()] == [3, 6, 9]
    assert [part.batch for part in stored.export(users=(77,))] == [None]
    with pytest.raises(InvalidArgument, match="has no column 'bodies'; it has xiu_partition"):
        columns_of(MESSAGES, ["bodies"])
    with pytest.raises(InvalidArgument, match="twice"):
        columns_of(MESSAGES, ["seq", "seq"])
    with pytest.raises(InvalidArgument, match="no table 'mails'"):
        columns_of("mails", [])


def test_parts_go_on_where_the_last_one_ended(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "PART_ROWS", 4)
    for epoch in (1, 2):
        for begin in range(0, 9, 3):
            stored.put(*(mail(epoch * 100 + begin + index) for index in range(3)), epoch=epoch)
    parts = stored.export()
    assert [part.batch.num_rows for part in parts if part.batch is not None] == [6, 6, 6]
    everything = [row["seq"] for row in rows_of(parts)]
    assert everything == list(stored.rows)
    for place, sequence in enumerate(everything):
        rest = rows_of(stored.export(sequence))
        assert [row["seq"] for row in rest] == everything[place:], "from the middle of a block"
        for end in range(place + 1, len(everything) + 1):
            some = rows_of(stored.export(sequence, everything[end - 1] + 1))
            assert [row["seq"] for row in some] == everything[place:end], "to the middle of another"


def test_what_was_trimmed_is_gone(stored: Stored) -> None:
    stored.put(mail(1))
    stored.put(mail(2), mail(3))
    second = list(stored.rows)[1]
    stored.trim(second)
    with pytest.raises(Gone, match=f"position 0 was trimmed by retention; the first that is stored is {second}"):
        stored.export(0)
    assert [row["seq"] for row in rows_of(stored.export(second))] == list(stored.rows)[1:]
    assert bounds(stored.reading, export_pb2.BoundsRequest()).first == second


def test_a_block_that_is_missing_is_no_end(stored: Stored) -> None:
    for number in range(3):
        stored.put(mail(number))
    del stored.store._db[STATE_KEY.pack(BLOCKS, list(stored.rows)[1])]
    with pytest.raises(StoreDamaged):
        stored.export()


def test_positions_by_counts(stored: Stored) -> None:
    for epoch in (1, 2, 5):
        stored.put(*(mail(epoch * 100 + index) for index in range(5)), epoch=epoch)
        stored.put(*(mail(epoch * 100 + 50 + index) for index in range(5)), epoch=epoch)
    everything = list(stored.rows)
    end = stored.store.head.last + 1
    for place, begin in enumerate(everything):
        for limit in range(1, 32):
            behind, count = advance(stored.reading, begin, end, limit)
            assert count == min(limit, len(everything) - place)
            assert behind == everything[place + count - 1] + 1
    assert advance(stored.reading, 0, end, 100) == (end, 30)
    assert advance(stored.reading, end, end, 100) == (end, 0)
    reply = bounds(stored.reading, export_pb2.BoundsRequest(begin=0, limit=11))
    assert (reply.end, reply.rows, reply.advanced) == (end, 30, everything[10] + 1)


def test_positions_by_time(stored: Stored) -> None:
    for number in range(300):
        stored.put(mail(number), at_us=NOW_US + number * 1_000_000)
    everything = list(stored.rows)

    def at(at_us: int) -> int:
        return bounds(stored.reading, export_pb2.BoundsRequest(at_us=at_us)).at

    assert at(1) == everything[0]
    for number in (0, 1, 59, 60, 61, 122, 299):
        assert at(NOW_US + number * 1_000_000) == everything[number]
        assert at(NOW_US + number * 1_000_000 - 999_999) == everything[number]
    assert at(NOW_US + 299_000_001) == everything[-1] + 1


def test_positions_by_bytes(stored: Stored) -> None:
    """Of marks, of blocks between them, and of records in a block."""
    for number in range(40):  # a mark each minute, and in bodies of a mebibyte
        bodies = [b"x" * 900_000] if number == 20 else [b"y" * (30 * number + place) for place in range(5)]
        records = [encode(Kind.MAIL, 7, body, snowflake(NOW_MS, 1, number * 8 + place)) for place, body in enumerate(bodies)]
        stored.put(*records, epoch=1 + number // 15, at_us=NOW_US + number * 25_000_000)
    everything, end = list(stored.rows), stored.store.head.last + 1
    sizes = [40 + len(record.body) for record in stored.rows.values()]
    assert len(list(stored.reading.marks(0))) > 10
    for place in (0, 1, 7, 99, 100, 101, len(everything) - 1):
        begin, behind = everything[place], sizes[place:]
        assert size(stored.reading, begin, end) == sum(behind)
        assert bounds(stored.reading, export_pb2.BoundsRequest(begin=begin, sizes=True)).bytes == sum(behind)
        for rows in (1, 2, 5, 13, len(behind)):
            exact = sum(behind[:rows])
            following = everything[place + min(rows, len(behind)) - 1] + 1
            for limit in (exact, exact + 1):
                position, took = advance_bytes(stored.reading, begin, end, limit)
                assert (stored.reading.last_before(position) + 1, took) == (following, exact)
        assert advance_bytes(stored.reading, begin, end, 1)[1] == behind[0], "the first one counts, whatever its size"
    assert advance_bytes(stored.reading, end, end, 5) == (end, 0)


@pytest.mark.slow
async def test_exports_take_no_more_than_their_share() -> None:
    exporter = shared.Exporter(0.25)

    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    began = time.monotonic()
    for _ in range(4):
        await exporter.run(work)
    assert time.monotonic() - began >= 3 * 0.05 / 0.25 + 0.05
    assert exporter.busy_s >= 0.2
    exporter.close()


def test_arrow_reads_what_leaves(stored: Stored) -> None:
    stored.put(mail(1, b"body"))
    (part,) = stored.export()
    assert part.batch is not None
    schema = pa.ipc.read_schema(pa.BufferReader(schema_of(columns_of(MESSAGES, ())).serialize()))
    assert pa.ipc.read_record_batch(part.batch.serialize(), schema).to_pylist() == part.batch.to_pylist()


async def test_a_store_without_pyarrow_reports_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cluster.store.export.arrow", None)
    exporter = shared.Exporter(1.0)
    with pytest.raises(Unavailable, match=r"pip install 'pixiu-cluster\[export\]' on every Xiu and Pi"):
        await anext(exporter.stream(columns_of(MESSAGES, ()), lambda: Part(None, last=True)))
    exporter.close()
