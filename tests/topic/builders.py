"""Entries and stores of topics for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.replication.model import Entry
from cluster.topics import entries as en
from pixiu.wire import block
from tests.sim.topics.disk import MemoryFiles, MemoryTable
from topic.storage.store import Store

TOPIC = 1
PART = en.part_id(TOPIC, 1)
CHANNEL = 7


def written(*slots: int, writer: int = 5, first: int = 1, part: int = 1, progress: int = 0, body: bytes = b"") -> bytes:
    """A block with a message for each slot; the bodies are the positions."""
    messages = [block.Message(body or b"%d" % number, slot) for number, slot in enumerate(slots, first)]
    return block.encode(messages, topic=TOPIC, part=part, writer=writer, first=first, progress=progress)


def said(*fields: dict[str, Any], first: int = 1) -> bytes:
    """A block with a message for each: fields of `Message`, the slot 1 if none is given."""
    messages = [block.Message(b"x", each.pop("slot", 1), **each) for each in map(dict, fields)]
    return block.encode(messages, topic=TOPIC, part=1, writer=9, first=first)


class Log:
    """A store with entries applied one by one."""

    def __init__(self, files: MemoryFiles | None = None, table: MemoryTable | None = None, segment_bytes: int = 400) -> None:
        self.files, self.table = files or MemoryFiles(), table or MemoryTable()
        self.store = Store(self.files, self.table, segment_bytes)
        self.store.open()
        self.entries: list[Entry] = []
        if TOPIC not in self.store.state.topics:
            self.topic()

    def apply(self, kind: int, payload: bytes, at_us: int = 1000) -> object:
        entry = Entry(1, self.store.state.applied + 1, kind, at_us, payload)
        self.entries.append(entry)
        return self.store.apply([entry])[0]

    def topic(self, **fields: Any) -> object:
        return self.apply(en.TOPIC, en.TopicSettings(TOPIC, "orders")._replace(**fields).encode())

    def open_part(self, number: int = 1, low: int = 0, high: int = 65_536, **fields: Sequence[object] | bool) -> None:
        self.apply(en.OPEN, en.Opening(en.part_id(TOPIC, number), low, high, **fields).encode())  # type: ignore[arg-type]

    def write(self, *slots: int, at_us: int = 1000, **fields: int) -> object:
        return self.apply(en.BLOCK, en.encode_block(42, written(*slots, **fields)), at_us)  # type: ignore[arg-type]

    def channel(self, **fields: Any) -> None:
        settings = en.ChannelSettings(CHANNEL, TOPIC, "c")._replace(**fields)
        self.apply(en.CHANNEL, settings.encode())

    def settle(self, *ranges: tuple[int, int], at_us: int = 1000, **fields: Sequence[object]) -> object:
        settlement = en.Settlement(CHANNEL, PART, ranges, **fields)  # type: ignore[arg-type]
        return self.apply(en.SETTLE, settlement.encode(), at_us)

    def reopened(self) -> Log:
        """The store of the next process, after a flush."""
        self.store.flush()
        return Log(self.files, self.table)
