"""RocksDB behind the log: what survives, what is noticed, and reading by MsgID and in order."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest
from rocksdict import Rdict

from cluster.replication.model import Entry, MemberID, Position
from pixiu.errors import DiskFailed, StorageError, StoreDamaged, Unavailable
from pixiu.ids import MAX_MSG_SEQUENCE, msg_id
from tests.xiu.parts import NOW_US, NoTable, mail, store
from xiu.records.block import Block, encode
from xiu.records.table import Table
from xiu.state.keys import HOLDS
from xiu.state.readers import EVERYTHING, Held
from xiu.state.readers import encode as encode_readers
from xiu.state.state import Blocked, State, XiuKind
from xiu.store.reading import Reading
from xiu.store.repair import Row, rebuild, verify
from xiu.store.store import Store

MIB = 1 << 20
BODY = bytes(range(256)) * 4


class Xiu:
    """State and store, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.state = State(0, self.store, self.store.head)
        self.reading = Reading(0, self.store, NoTable())

    def apply(self, counter: int, *numbers: int, epoch: int = 1) -> None:
        decision = self.state.decide(store(counter, *(mail(number, BODY) for number in numbers), epoch=epoch))
        self.store.write([decision])
        self.state.written(decision)


def ident(counter: int, epoch: int = 1) -> int:
    return msg_id(0, 64, epoch << 32 | counter)


def codes(xiu: Xiu, *ids: int) -> list[str]:
    return [found.code for found in xiu.reading.fetch(ids)]


def test_what_was_stored_is_read_as_it_was(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1, 2, 3)
    xiu.apply(2, 4)
    found = xiu.reading.fetch([ident(3), ident(1), ident(4)])
    assert [each.record for each in found] == [mail(number, BODY) for number in (3, 1, 4)]
    xiu.store.close()


def test_not_yet_gone_and_wrong_partition_are_told_apart(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1, 2)
    xiu.apply(2, 3, epoch=4)
    assert codes(xiu, ident(2, 4), ident(1, 5)) == ["NOT_YET", "NOT_YET"]
    assert codes(xiu, ident(3), ident(1, 2), ident(0)) == ["GONE", "GONE", "GONE"]
    assert codes(xiu, msg_id(1, 64, 1 << 32 | 1)) == ["WRONG_PARTITION"]
    assert codes(xiu, msg_id(0, 65, 1 << 32 | 1)) == ["GONE"]  # nobody was given this MsgID
    xiu.store.close()


def test_one_call_reads_few_blocks_from_the_disk_and_the_next_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xiu = Xiu(tmp_path)
    for counter in range(1, 101):
        xiu.apply(counter, counter)
    looked: list[int] = []
    block_of = xiu.store.block_of

    def counted(sequence: int) -> Block | None:
        looked.append(sequence)
        return block_of(sequence)

    monkeypatch.setattr(xiu.store, "block_of", counted)
    ids = [ident(counter) for counter in range(1, 101)]
    found: list[bytes] = []
    reads: list[int] = []
    while len(found) < len(ids):
        looked.clear()
        answers = xiu.reading.fetch(ids[len(found) :], max_cold=32)
        found += [each.record for each in answers]
        reads.append(len(looked))
    assert found == [mail(number, BODY) for number in range(1, 101)]
    assert reads == [32, 32, 32, 4]
    assert len(xiu.reading.fetch(ids)) == 100
    xiu.store.close()


def test_what_is_written_survives_a_restart_and_a_flush_says_how_far(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1)
    assert xiu.store.flushed == 0
    assert xiu.store.flush() == 1
    assert not [path for path in tmp_path.glob("*.log") if path.stat().st_size]
    xiu.apply(2, 2)
    xiu.store.close()
    again = Xiu(tmp_path)
    assert again.store.flushed == again.store.head.applied.counter >= 1
    assert codes(again, ident(1)) == [""]
    again.store.close()


def test_a_scan_is_in_order_from_any_record_to_any_record(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1, 2, 3)
    xiu.apply(2, 4, 5)
    xiu.apply(3, 6, epoch=2)
    base = 1 << 32
    assert [block.first for block in xiu.reading.scan(0, (1 << 48) - 1, 100)] == [base | 1, base | 4, 2 << 32 | 1]
    assert [block.first for block in xiu.reading.scan(base | 3, base | 4, 100)] == [base | 1, base | 4]
    assert [block.first for block in xiu.reading.scan(base | 4, 1 << 47, 2)] == [base | 4]
    assert [block.first for block in xiu.reading.scan(base | 6, 1 << 47, 9)] == [2 << 32 | 1]
    xiu.store.close()


@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
def test_a_flipped_byte_in_a_file_is_an_error_and_never_another_record(tmp_path: Path, part: float) -> None:
    xiu = Xiu(tmp_path)
    for counter in range(1, 201):
        xiu.apply(counter, counter * 2 - 1, counter * 2)
    xiu.store.flush()
    xiu.store.close()
    (file,) = tmp_path.glob("*.sst")
    data = bytearray(file.read_bytes())
    data[int(len(data) * part)] ^= 0x10
    file.write_bytes(data)
    again = Xiu(tmp_path)  # RocksDB opens as if nothing were wrong
    found = again.reading.fetch([ident(counter) for counter in range(1, 401)])
    assert {each.code for each in found} == {"", "STORE_DAMAGED"}
    for number, each in enumerate(found, 1):
        assert each.code or each.record == mail(number, BODY)
    assert again.reading.damaged
    with pytest.raises(StoreDamaged):
        list(again.reading.scan(0, 1 << 48, 1000))
    again.store.close()


def test_a_block_that_is_wrong_where_rocksdb_sees_nothing_is_found_by_our_crc(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    decision = xiu.state.decide(store(1, mail(1, BODY)))
    key, value = decision.puts[-1]
    decision.puts[-1] = key, value[:-1] + bytes([value[-1] ^ 1])
    xiu.store.write([decision])
    assert codes(xiu, ident(1)) == ["STORE_DAMAGED"]
    xiu.store.close()


def test_a_hole_within_an_epoch_is_damage_and_not_gone(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    decisions = [xiu.state.decide(store(counter, mail(counter))) for counter in (1, 2, 3)]
    del decisions[1].puts[:]
    xiu.store.write(decisions)
    assert codes(xiu, ident(1), ident(2), ident(3)) == ["", "STORE_DAMAGED", ""]
    with pytest.raises(StoreDamaged):
        list(xiu.reading.scan(0, 1 << 48, 1000))
    xiu.store.close()


def test_a_missing_file_is_said_at_the_start(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1)
    xiu.store.flush()
    xiu.store.close()
    for file in tmp_path.glob("*.sst"):
        file.unlink()
    with pytest.raises(StorageError):
        Store(tmp_path)


def test_errors_of_the_disk_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xiu = Xiu(tmp_path)
    decision = xiu.state.decide(store(1, mail(1)))

    class Failing:
        text = ""

        def write(self, _batch: object) -> None:
            raise OSError(self.text)

    db, failing = xiu.store._db, Failing()
    monkeypatch.setattr(xiu.store, "_db", failing)
    for text, full in (("IO error: No space left on device: 000012.sst", True), ("Result incomplete: Write stall", False)):
        failing.text = text
        with pytest.raises(Blocked) as caught:
            xiu.store.write([decision])
        assert caught.value.full is full
    failing.text = "IO error: Input/output error"
    with pytest.raises(StorageError, match="Input/output"):
        xiu.store.write([decision])
    for text, kind in (
        ("IO error: While pread offset 4096 len 512: 000012.sst: Input/output error", StoreDamaged),
        ("IO error: While open a file for random read: 000012.sst: Input/output error", StoreDamaged),
        ("IO error: While fdatasync: 000012.sst: Input/output error", DiskFailed),
        ("IO error: While appending to file: 000012.sst: Input/output error", DiskFailed),
    ):
        assert type(xiu.store._error("written", OSError(text))) is kind
    monkeypatch.setattr(xiu.store, "_db", db)
    assert xiu.store.head.applied.counter == 0
    xiu.store.write([decision])
    assert codes(xiu, ident(1)) == [""]
    xiu.store.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_flush_during_which_the_store_was_opened_again_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1)
    xiu.store.flush()
    xiu.apply(2, 2)
    db = xiu.store._db

    class Slow:
        def flush(self) -> None:
            db.close()
            xiu.store.reopen()
            xiu.store.head.applied = Position(1, 1)  # as a crash leaves it: closing has written what was in memory
            xiu.store.flushed = 1
            if fails:
                raise OSError("DB already closed")

        def close(self) -> None: ...

    monkeypatch.setattr(xiu.store, "_db", Slow())
    assert xiu.store.flush() == 1
    assert xiu.store.flushed == 1
    xiu.store.close()


def test_another_thread_reads_while_the_store_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1)
    read: list[Future[int | None]] = []

    def slow(self: Store) -> Rdict:
        """A read begins while it is closed."""
        read.append(threads.submit(self.next_first, 0))
        wait(read, timeout=0.1)
        return real(self)

    real = Store._open
    with ThreadPoolExecutor(1) as threads, monkeypatch.context() as patch:
        patch.setattr(Store, "_open", slow)
        xiu.store.reopen()
        assert [each.result() for each in read] == [1 << 32 | 1]
    xiu.store.close()


def test_a_store_that_is_opened_again_ends_the_reads_under_way(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path)
    for number in range(1, 4):
        xiu.apply(number, number)
    cursor, blocks = xiu.store.cursor(), xiu.store.scan(0)
    assert cursor.seek(b"") is not None
    next(blocks)
    xiu.store.reopen()
    with pytest.raises(Unavailable):
        cursor.next()
    with pytest.raises(Unavailable):
        next(blocks)
    assert codes(xiu, ident(1), ident(3)) == ["", ""]
    assert verify(xiu.store.cursor(), MAX_MSG_SEQUENCE).records == 3
    xiu.store.close()


def test_a_store_is_not_opened_again_while_a_thread_flushes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xiu = Xiu(tmp_path)
    xiu.apply(1, 1)
    db, flushing, go_on = xiu.store._db, Event(), Event()

    class Slow:
        def flush(self) -> None:
            flushing.set()
            go_on.wait(60)

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(xiu.store, "_db", Slow())
        flush = threads.submit(xiu.store.flush)
        assert flushing.wait(60)
        try:
            with pytest.raises(Blocked, match="flushed or copied"):
                xiu.store.reopen()
        finally:
            go_on.set()
        assert flush.result(60) == 1
    monkeypatch.setattr(xiu.store, "_db", db)
    xiu.store.reopen()
    assert codes(xiu, ident(1)) == [""]
    xiu.store.close()


def test_readers_are_rows_of_the_store_and_of_its_snapshots(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path / "store")
    xiu.apply(1, 1, 2)
    for counter, held in (
        (2, {"archive": Held(7, 0), "größe": Held(9, 0)}),
        (3, {"archive": Held(EVERYTHING, 0), "audit": Held(0, 5)}),
    ):
        xiu.store.write([xiu.state.decide(Entry(1, counter, int(XiuKind.HOLD), NOW_US, encode_readers(held)))])
    xiu.apply(4, 3)
    xiu.store.checkpoint(tmp_path / "copy")
    for there in (xiu.store, copy := Store(tmp_path / "copy")):
        assert there.readers() == {"größe": Held(9, NOW_US), "audit": Held(0, 5)}
        assert verify(there.cursor(), MAX_MSG_SEQUENCE).damaged == 0
        assert there.last_before(1 << 32 | 1) == 0
    rows: list[Row] = []
    rebuild(xiu.store.cursor(), xiu.store.head, rows.append, lambda _key: iter(()))
    assert {key for key, _ in rows if key[:1] == HOLDS} == {HOLDS + "größe".encode(), HOLDS + b"audit"}
    copy.close()
    xiu.store.close()


def test_reading_takes_the_table_first(tmp_path: Path) -> None:
    xiu = Xiu(tmp_path / "store")
    table = Table(tmp_path / "table", 8 * MIB, MemberID(1))
    xiu.apply(1, 1, 2)
    block = xiu.store.block_of(1 << 32 | 1)
    assert block is not None
    table.put([(block, encode(block))], persisted=True)
    reading = Reading(0, xiu.store, table)
    assert [found.record for found in reading.fetch([ident(2)])] == [mail(2, BODY)]
    assert table.counters.hits == 1
    table.close(remove=True)
    xiu.store.close()
