"""Compaction on real files and LMDB: restarts, snapshots, and gaps that are mended from replicas with other blocks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.topics import entries as en
from pixiu.wire import block
from tests.topic.builders import CHANNEL, PART, TOPIC
from tests.topic.storage.test_machine import Driven, fresh
from topic.clients.lasts import last
from topic.retention import Retention
from topic.storage import lmdb_table
from topic.storage.cutting import clipped
from topic.storage.keys import KEY, digest_of
from topic.storage.lmdb_table import LmdbTable
from topic.storage.machine import Machine
from topic.storage.reader import Reader
from topic.storage.segment import Gap, Stored


class Compacted(Driven):
    """A machine of a topic that is compacted."""

    def make(self) -> None:
        self.apply(en.TOPIC, en.TopicSettings(TOPIC, "orders", compact=60).encode())
        self.apply(en.OPEN, en.Opening(PART, 0, 65_536).encode())
        self.apply(en.CHANNEL, en.ChannelSettings(CHANNEL, TOPIC, "c").encode())

    def say(self, *messages: block.Message) -> None:
        data = block.encode(messages, topic=TOPIC, part=1, writer=5, first=self.position)
        self.apply(en.BLOCK, en.encode_block(42, data))
        self.position += len(messages)

    def messages(self) -> dict[int, bytes]:
        found = dict[int, bytes]()
        for each in self.content()[1]:
            if isinstance(each, Gap):
                found |= dict.fromkeys(range(each.low, each.high), b"gap")
                continue
            stamp, data = each
            read = block.parse_stored(data)[1]
            if not read.flags & block.Flag.HOLE:
                found |= {stamp.base + number: read.message(number).body for number in range(read.count)}
        return found


async def filled(folder: Path) -> Compacted:
    """Ten messages of two keys in one closed file, and one more."""
    found = Compacted(folder)
    found.make()
    for number in range(5):
        found.say(block.Message(b"a%d" % number, 1, b"a"), block.Message(b"b%d" % number, 2, b"b"))
    await found.machine.flush()
    found.machine.store.logs[PART].roll()
    found.say(block.Message(b"end", 1))
    await found.machine.flush()
    return found


def gone() -> bytes:
    return en.Compaction(PART, [(0, 4), (5, 8)]).encode()


LEFT = {4: b"a2", 8: b"a4", 9: b"b4", 10: b"end"}


async def test_it_survives_restarts_and_snapshots(tmp_path: Path) -> None:
    source = await filled(tmp_path / "source")
    before = source.machine.store.logs[PART].stored_bytes
    source.apply(en.COMPACT, gone())
    await source.machine.flush()
    await source.machine.close()
    source = Compacted(tmp_path / "source")  # the row says what is to go
    assert len(source.messages()) == 11
    await source.machine.compact()
    assert source.messages() == LEFT
    assert source.machine.store.logs[PART].stored_bytes < before
    snapshot = fresh(tmp_path / "snapshot")
    await source.machine.snapshot(snapshot)
    await source.machine.check(snapshot)
    copy = Compacted(tmp_path / "copy")
    await copy.machine.load(snapshot)
    for each in (source, copy):
        assert each.messages() == LEFT
        assert each.machine.store.keys.last(PART, digest_of(b"a")) == (8, False)
        assert not each.machine.store.compacting.of(PART)
        await each.machine.close()
    again = Compacted(tmp_path / "source")
    assert (again.messages(), again.machine.store.keys.last(PART, digest_of(b"b"))) == (LEFT, (9, False))
    assert again.machine.state.progress[CHANNEL, PART].acks.next_missing(0) == 4
    await again.machine.close()


def damage(machine: Machine, offset: int) -> Path:
    (path, *_) = sorted(Path(str(machine.store.files.root)).rglob("*.seg"))  # type: ignore[attr-defined]
    data = bytearray(path.read_bytes())
    at = bytes(data).index(b"a2" if offset == 4 else b"a4") if offset >= 4 else bytes(data).index(b"a0")
    data[at] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("compacted", ["this", "the other"])
async def test_a_gap_is_mended_from_a_replica_with_other_blocks(tmp_path: Path, compacted: str) -> None:
    """One has compacted its file, the other has not got to it."""
    ours, theirs = await filled(tmp_path / "ours"), await filled(tmp_path / "theirs")
    for each in (ours, theirs):
        each.apply(en.COMPACT, gone())
        await each.machine.flush()
    await (ours if compacted == "this" else theirs).machine.compact()
    damage(ours.machine, 4)
    ours.machine.store.cache.clear()
    log, theirs_log = ours.machine.store.logs[PART], theirs.machine.store.logs[PART]
    reader, gaps = Reader(lambda: ours.machine.store, lambda part, gap: gaps.append(gap)), list[Gap]()
    assert isinstance(await reader.find(PART, 4), Gap)
    gap = Gap(log.begin_of(gaps[0].low), gaps[0].high)
    found, at = list[Stored](), gap.low
    while at < gap.high:
        each_block = theirs_log.read(at, 1)[0]
        assert isinstance(each_block, Stored)
        found.append(each_block)
        at = each_block.stamp.base + each_block.block.count
    assert await ours.machine.mend(PART, clipped(found, gap.low, gap.high))
    assert b"gap" not in ours.messages().values()
    await ours.machine.compact()
    assert ours.messages() == LEFT
    for each in (ours, theirs):
        await each.machine.close()


async def test_a_damaged_file_is_left_until_it_is_mended(tmp_path: Path) -> None:
    found = await filled(tmp_path / "one")
    damage(found.machine, 0)
    found.apply(en.COMPACT, gone())
    await found.machine.flush()
    for _ in range(2):
        await found.machine.compact()
        assert found.machine.store.compacting.of(PART) == [(0, 4), (5, 8)]
    assert found.messages()[9] == b"b4"
    await found.machine.close()


async def test_the_last_message_of_a_key_is_answered_by_the_part(tmp_path: Path) -> None:
    from pixiu.wire.v1 import topic_pb2 as pb

    found = await filled(tmp_path / "one")
    machine = found.machine
    found.say(block.Message(b"", 1, b"b"), block.Message(b"old", 1, b"c", expires_in_s=1))
    group: Any = SimpleNamespace(
        store=machine.store, check_reads=lambda: None, reader=Reader(lambda: machine.store, lambda *_: None)
    )

    async def ask(key: bytes) -> tuple[bool, int | None]:
        reply = await last(group, pb.TopicLastRequest(topic="orders", part=1, key=key))
        return reply.known, reply.message.base if reply.message.data else None

    assert await ask(b"a") == (True, 8)
    assert await ask(b"b") == (True, None)
    assert await ask(b"c") == (True, 12)
    assert await ask(b"d") == (False, None)
    machine.apply([en_entry(machine, at_us=3_000_000)])
    assert await ask(b"c") == (True, None)  # it has expired
    found.apply(en.TRIM, en.encode_trim(PART, 10))
    assert await ask(b"a") == (True, None)
    await machine.flush()
    assert await ask(b"a") == (False, None)  # it is out of the index
    await machine.close()


def en_entry(machine: Machine, at_us: int) -> Any:
    from cluster.replication.model import Entry

    return Entry(1, machine.applied + 1, en.BEGIN, at_us, b"")


def test_the_table_keeps_the_index_apart_and_sweeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_table, "SWEPT_ROWS", 3)
    table = LmdbTable(tmp_path)
    rows = [(KEY + bytes((part, number)), bytes((number,))) for part in (1, 2) for number in range(20)]
    table.write([*rows, (b"a", b"1"), (b"\2x", b"2"), (b"p", b"3")], 7, 8)
    assert table.read() == ({b"a": b"1", b"\2x": b"2", b"p": b"3"}, 7, 8)
    table.sweep(KEY + b"\1", lambda value: value[0] % 2 == 0)
    assert [table.get(KEY + bytes((1, number))) is not None for number in range(20)] == [False, True] * 10
    table.sweep(KEY + b"\2", lambda value: True)
    table.sweep(KEY + b"\3", lambda value: True)
    table.close()
    table = LmdbTable(tmp_path)
    assert table.read()[0].keys() == {b"a", b"\2x", b"p"}
    assert [row for row, _ in rows if table.get(row)] == [KEY + bytes((1, number)) for number in range(1, 20, 2)]
    table.close()


async def test_what_all_channels_have_acknowledged_goes(tmp_path: Path) -> None:
    found = await filled(tmp_path / "one")
    found.apply(en.TOPIC, en.TopicSettings(TOPIC, "orders", compact=60, retain_acknowledged=1).encode())
    asked = list[tuple[int, bytes]]()

    async def request(kind: int, payload: bytes) -> object:
        asked.append((kind, payload))
        return found.apply(kind, payload)

    group: Any = SimpleNamespace(store=found.machine.store, core=SimpleNamespace(epoch=1), request=request)
    retention = Retention(group)
    found.apply(en.CHANNEL, en.ChannelSettings(CHANNEL + 1, TOPIC, "other").encode())
    steps: list[tuple[en.Settlement, int]] = [
        (en.Settlement(CHANNEL, PART, [(0, 11)]), 0),
        (en.Settlement(CHANNEL + 1, PART, [(0, 9)]), 0),
        (en.Settlement(CHANNEL + 1, PART, dead=[en.Dead(9, 16, 1)]), 0),
    ]
    for settlement, first in steps:
        found.apply(en.SETTLE, settlement.encode())
        await retention.look()
        assert found.machine.state.parts[PART].first == first
    found.apply(en.RESEND, en.encode_resend(CHANNEL + 1, PART))
    await retention.look()
    assert not asked  # a dead letter is not acknowledged, nor one that comes again
    found.apply(en.SETTLE, en.Settlement(CHANNEL + 1, PART, [(9, 10)]).encode())
    await retention.look()
    assert found.machine.state.parts[PART].first == 10
    for channel in (CHANNEL, CHANNEL + 1):
        found.apply(en.CHANNEL, en.ChannelSettings(channel, TOPIC, "c", removed=True).encode())
    found.machine.store.logs[PART].roll()
    found.say(block.Message(b"x", 1))
    await found.machine.flush()
    await retention.look()
    assert found.machine.state.parts[PART].first == 10  # without a channel nothing goes
    await found.machine.close()
