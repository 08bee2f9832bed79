"""State of a group: its parts and channels, as its log's entries make them. Pure.

    committed entries ──▶ apply ──▶ answers          every replica: the same entries make the same state
                            ├─────▶ Blocks.append    blocks go to the segments of their part
                            └─────▶ changes()        rows that differ since they were last taken, for one transaction with `applied`

Source: docs/topics.md, "The log of a group", docs/replication.md, "Use by a role".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from cluster.replication.model import CLOCK, Entry, EntryKind
from pixiu.wire.block import Block, Stamp
from topic import entries as en
from topic.state import rows
from topic.state.channels import Changes, Progress
from topic.state.parts import Appended, Part, Verdict
from topic.state.rows import Kind, Tables

MAX_PARTS: Final = 1000
"""Parts of a group. Policy: one more is not opened."""
MAX_CHANNELS: Final = 1000
"""Channels of a topic. Policy: one more is not made."""


class Blocks(Protocol):
    """Interface to the segments of parts."""

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        """Take a block with a part's next offsets, or with offsets that it has already: after a crash the log is applied again."""

    def trim(self, part: int, first: int) -> None:
        """Allow everything below an offset to be removed."""


class Sealed(NamedTuple):
    """Outcome of a seal: everything that the children's groups have to know."""

    part: int
    end: int
    children: tuple[en.Child, ...]
    """Those of the first seal, whatever this one named."""
    writers: Sequence[en.KnownWriter]
    channels: Sequence[en.ChannelSettings]


class Done(NamedTuple):
    """Outcome of an opening, a channel's change or a trim."""

    ok: bool


class State(Tables):
    """The tables of a group, changed by its entries alone.

    Args:
        blocks: takes the blocks.
    """

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks
        self.applied = 0
        self.clock_us = 0
        self.shape = 0
        """Number that changes when parts or channels come, go or change."""
        self._changed: dict[rows.Key, None] = {}
        """Rows that differ from what was last taken, in order of change."""

    # --- what follows from it

    def channels_of(self, topic: int) -> list[en.ChannelSettings]:
        """The channels of a topic."""
        return [channel for _, channel in sorted(self.channels.items()) if channel.topic == topic]

    def finished(self, channel: int, part: int) -> bool:
        """True if a channel has acknowledged all of a sealed part."""
        found, progress = self.parts.get(part), self.progress.get((channel, part))
        return found is not None and progress is not None and found.sealed and progress.acks.floor >= found.end

    # --- entries

    def apply(self, entry: Entry) -> object:
        """Apply the next entry. Returns its answer: `Appended`, `Sealed`, `Done`, `Changes` of a settlement, or None."""
        self.applied = entry.counter
        self.clock_us = max(self.clock_us, entry.at_us)
        match entry.kind:
            case en.BLOCK:
                return self._append(entry)
            case en.SETTLE:
                return self._settle(entry)
            case en.OPEN:
                return Done(self._open(en.Opening.decode(entry.payload)))
            case en.SEAL:
                return self._seal(*en.decode_seal(entry.payload))
            case en.CHANNEL:
                return Done(self._channel(en.ChannelSettings.decode(entry.payload)))
            case en.TRIM:
                return Done(self._trim(*en.decode_trim(entry.payload)))
            case en.LOST:
                return Done(self._lose(*en.decode_lost(entry.payload)))
            case EntryKind.SET_CLOCK:
                (self.clock_us,) = CLOCK.unpack(entry.payload)
        return None

    def _append(self, entry: Entry) -> Appended:
        sender, data = en.decode_block(entry.payload)
        block = Block.checked(data)
        part = self.parts.get(en.part_id(block.topic, block.part))
        if part is None:
            return Appended(Verdict.NOT_HERE, 0)
        base = part.end
        found, forgotten = part.append(block, entry.at_us)
        if found.verdict is Verdict.STORED:
            self._blocks.append(part.part, Stamp(base, entry.at_us, sender), data, block.count)
            self._change(Kind.PART, part.part)
            for writer in (*forgotten, block.writer):
                self._change(Kind.WRITER, part.part, writer)
        return found

    def _settle(self, entry: Entry) -> Changes | None:
        found = en.Settlement.decode(entry.payload)
        progress, part = self.progress.get((found.channel, found.part)), self.parts.get(found.part)
        if progress is None or part is None:
            return None
        return self._progressed(found.channel, found.part, progress.settle(found, part.end, entry.at_us))

    def _progressed(self, channel: int, part: int, changes: Changes) -> Changes:
        self._change(Kind.PROGRESS, channel, part)
        for chunk in sorted(changes.chunks):
            self._change(Kind.CHUNK, channel, part, chunk)
        for offset in changes.offsets:
            self._change(Kind.WAITING, channel, part, offset)
            self._change(Kind.DEAD, channel, part, offset)
        return changes

    def _open(self, opening: en.Opening) -> bool:
        self.shape += 1
        if opening.part in self.parts:
            return True
        if len(self.parts) >= MAX_PARTS:
            return False
        part = Part(opening.part, opening.low, opening.high, tuple(opening.parents))
        for parent, writer, position, progress in opening.writers:
            part.inherited[parent, writer] = position, progress
            self._change(Kind.INHERITED, part.part, parent, writer)
        self.parts[part.part] = part
        self._change(Kind.PART, part.part)
        for channel in opening.channels:
            if channel.channel not in self.channels and not channel.removed:
                self._channel(channel._replace(from_end=False))
        for channel in self.channels_of(en.topic_of(part.part)):
            self._begin(channel.channel, part, at=0)
        return True

    def _seal(self, number: int, children: tuple[en.Child, ...]) -> Sealed | Done:
        part = self.parts.get(number)
        if part is None:
            return Done(False)
        if not part.sealed:
            part.sealed, part.children = True, children
            self._change(Kind.PART, number)
        return Sealed(number, part.end, part.children, part.known_writers(), self.channels_of(en.topic_of(number)))

    def _channel(self, settings: en.ChannelSettings) -> bool:
        self.shape += 1
        number = settings.channel
        if settings.removed:
            self.channels.pop(number, None)
            for _, each in [key for key in self.progress if key[0] == number]:
                self._forget(number, each)
        elif number in self.channels:
            old = self.channels[number]
            self.channels[number] = settings._replace(topic=old.topic, ordered=old.ordered, from_end=old.from_end)
        elif len(self.channels_of(settings.topic)) >= MAX_CHANNELS:
            return False
        else:
            self.channels[number] = settings
            for part in self.parts.values():
                if en.topic_of(part.part) == settings.topic:
                    self._begin(number, part, at=part.end if settings.from_end else part.first)
        self._change(Kind.CHANNEL, number)
        return True

    def _begin(self, channel: int, part: Part, at: int) -> None:
        if (channel, part.part) not in self.progress:
            progress = self.progress[channel, part.part] = Progress()
            progress.acks.floor = at
            self._change(Kind.PROGRESS, channel, part.part)

    def _forget(self, channel: int, part: int) -> None:
        progress = self.progress.pop((channel, part))
        self._progressed(channel, part, Changes(set(progress.acks.chunks), [*progress.waiting, *progress.dead]))

    def _trim(self, number: int, first: int) -> bool:
        part = self.parts.get(number)
        if part is None or not part.first < first <= part.end:
            return False
        part.first = first
        self._change(Kind.PART, number)
        self._blocks.trim(number, first)
        for (channel, each), progress in self.progress.items():
            if each == number:
                self._progressed(channel, number, progress.trim(first))
        return True

    def _lose(self, number: int, low: int, high: int) -> bool:
        part = self.parts.get(number)
        if part is None or not low < high <= part.end:
            return False
        for (channel, each), progress in self.progress.items():
            if each == number:
                self._progressed(channel, number, progress.lose(low, high))
        return True

    # --- rows

    def _change(self, kind: Kind, *numbers: int) -> None:
        self._changed[kind, *numbers] = None

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Take the rows that changed since the last call: (key, value), None for one that is no more."""
        changed, self._changed = self._changed, {}
        return [(rows.encode_key(key), rows.value_of(self, key)) for key in changed]

    def load(self, found: Mapping[bytes, bytes], applied: int, clock_us: int) -> None:
        """Become what rows say; the state is empty."""
        self.applied, self.clock_us = applied, clock_us
        for key in sorted(found):
            rows.load(self, rows.decode_key(key), found[key])
