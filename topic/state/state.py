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
from cluster.topics import entries as en
from pixiu.objects.manifest import StoredObject
from pixiu.wire.block import Block, Flag, Stamp
from topic.state import rows
from topic.state.channels import Changes, Progress
from topic.state.parts import Appended, Part, Verdict
from topic.state.rows import Kind, Tables

MAX_PARTS: Final = 1000
"""Parts of a group. Policy: one more is not opened."""
MAX_TOPICS: Final = 10_000
"""Topics that a group knows. Policy: one more is refused."""
MAX_FENCES: Final = 100_000
"""Writers with a name of which a group knows the epoch. Policy: the one that was opened first is forgotten."""
MAX_CHANNELS: Final = 1000
"""Channels of a topic. Policy: one more is not made."""


class Blocks(Protocol):
    """Interface to the segments of parts."""

    def append(self, part: int, stamp: Stamp, block: bytes, count: int) -> None:
        """Take a block with a part's next offsets, or with offsets that it has already: after a crash the log is applied again."""

    def trim(self, part: int, first: int) -> None:
        """Allow everything below an offset to be removed."""

    def compact(self, part: int, ranges: list[tuple[int, int]], digests: Sequence[bytes]) -> None:
        """Messages are superseded, and may be removed; deleted keys are to be forgotten."""

    def drop(self, part: int) -> None:
        """A part is no more: all of it may be removed."""


class Sealed(NamedTuple):
    """Outcome of a seal: everything that the children's groups have to know."""

    part: int
    end: int
    children: tuple[en.Child, ...]
    """Those of the first seal, whatever this one named."""
    writers: Sequence[en.KnownWriter]
    channels: Sequence[en.ChannelSettings]


class Done(NamedTuple):
    """Outcome of every other entry that somebody asks for."""

    ok: bool
    """False: it has no effect."""
    why: str = ""
    """Why it has none, and what to do."""
    changed: int = 0
    """Messages that a SEEK or a RESEND concerns."""
    offsets: Sequence[int] = ()
    """Those of a RESEND."""


OK: Final = Done(True)


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
        self._news: dict[int, None] = {}
        self._names: dict[str, int] = {}
        """Name → ID of the topic that has it."""
        self._parts_in: dict[int, set[int]] = {}
        """Topic → IDs of its parts."""
        self._channels_in: dict[int, set[int]] = {}
        """Topic → IDs of its channels."""
        self._changed: dict[rows.Key, None] = {}
        """Rows that differ from what was last taken, in order of change."""

    # --- what follows from it

    def topic_named(self, name: str) -> en.TopicSettings | None:
        """The topic with a name; of several, one that is not deleted, else the latest."""
        return self.topics.get(self._names.get(name, -1))

    def channel_named(self, topic: int, name: str) -> en.ChannelSettings | None:
        """The channel of a topic with a name."""
        return next((each for each in self.channels_of(topic) if each.name == name), None)

    def channels_of(self, topic: int) -> list[en.ChannelSettings]:
        """The channels of a topic, by ID."""
        return [self.channels[number] for number in sorted(self._channels_in.get(topic, ()))]

    def parts_of(self, topic: int) -> list[Part]:
        """The parts of a topic that are here, by number."""
        return [self.parts[number] for number in sorted(self._parts_in.get(topic, ()))]

    def finished(self, channel: int, part: int) -> bool:
        """True if a channel has acknowledged all of a sealed part."""
        found, progress = self.parts.get(part), self.progress.get((channel, part))
        return found is not None and progress is not None and found.sealed and progress.acks.floor >= found.end

    def acknowledged(self, part: int) -> int:
        """The offset below which every channel of the topic has acknowledged all of a part; 0 without a channel. What waits for
        another delivery and dead letters are not acknowledged."""
        found = [self.progress[channel.channel, part] for channel in self.channels_of(en.topic_of(part))]
        return min((min([each.acks.floor, *each.waiting, *each.dead]) for each in found), default=0)

    def take_news(self) -> list[int]:
        """The topics of which parts or channels came, went or changed since the last call."""
        found = list(self._news)
        self._news.clear()
        return found

    # --- entries

    def apply(self, entry: Entry) -> object:
        """Apply the next entry. Returns its answer: `Appended`, `Changes` of a settlement, `Sealed`, `Done`, or None."""
        self.applied = entry.counter
        self.clock_us = max(self.clock_us, entry.at_us)
        match entry.kind:
            case en.BLOCK:
                return self._append(entry)
            case en.SETTLE:
                return self._settle(entry)
            case en.SEAL:
                return self._seal(*en.decode_seal(entry.payload))
            case EntryKind.SET_CLOCK:
                (self.clock_us,) = CLOCK.unpack(entry.payload)
            case _:
                return self._administer(entry)
        return None

    def _administer(self, entry: Entry) -> Done | None:
        payload = entry.payload
        match entry.kind:
            case en.TOPIC:
                return self._topic(en.TopicSettings.decode(payload))
            case en.OPEN:
                return self._open(en.Opening.decode(payload))
            case en.CHANNEL:
                return self._channel(en.ChannelSettings.decode(payload))
            case en.TRIM:
                return self._trim(*en.decode_trim(payload))
            case en.LOST:
                return self._lose(*en.decode_lost(payload))
            case en.COMPACT:
                return self._compact(en.Compaction.decode(payload))
            case en.DROP:
                return self._drop(en.decode_drop(payload))
            case en.SEEK:
                return self._seek(*en.decode_seek(payload))
            case en.RESEND:
                return self._resend(*en.decode_resend(payload), entry.at_us)
            case en.FENCE:
                return self._fence(*en.decode_fence(payload))
            case en.UPLOADED:
                return self._uploaded(*en.decode_objects(payload), entry.epoch)
            case en.REMOVED:
                return self._removed(*en.decode_objects(payload))
        return None

    def _append(self, entry: Entry) -> Appended:
        sender, data = en.decode_block(entry.payload)
        block = Block.checked(data)
        part = self.parts.get(en.part_id(block.topic, block.part))
        if part is None or part.opening:
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

    # --- topics and parts

    def _topic(self, settings: en.TopicSettings) -> Done:
        old = self.topics.get(settings.topic)
        if old is not None and 0 < settings.version < old.version:
            return Done(False, f"the topic {old.name} has version {old.version} here, this entry {settings.version}; read it again")
        if old is None and len(self.topics) >= MAX_TOPICS:
            return Done(False, f"a group knows at most {MAX_TOPICS} topics; add a group")
        self._set_topic(settings._replace(version=max(settings.version, old.version if old else 0)))
        self._change(Kind.TOPIC, settings.topic)
        if settings.deleted and not self._parts_in.get(settings.topic):
            self._forget_topic(settings.topic)
        self._news[settings.topic] = None
        return OK

    def _set_topic(self, settings: en.TopicSettings) -> None:
        old, named = self.topics.get(settings.topic), self.topic_named(settings.name)
        self.topics[settings.topic] = settings
        if old is not None and (old.name, old.deleted) != (settings.name, settings.deleted):
            self._name()
        elif named is None or _rank(named) < _rank(settings):
            self._names[settings.name] = settings.topic
        for part in self.parts_of(settings.topic):
            part.deleted = settings.deleted

    def _name(self) -> None:
        self._names = {each.name: each.topic for each in sorted(self.topics.values(), key=_rank)}

    def _forget_topic(self, topic: int) -> None:
        for channel in self.channels_of(topic):
            self._remove_channel(channel.channel)
        for key in [key for key in self.fences if key[0] == topic]:
            self._forget_fence(key)
        del self.topics[topic]
        self._change(Kind.TOPIC, topic)
        self._name()

    def _open(self, opening: en.Opening) -> Done:
        if opening.part in self.parts:
            return self._inherit(self.parts[opening.part], opening)
        topic = self.topics.get(en.topic_of(opening.part))
        if topic is None:
            return Done(False, f"the topic {en.topic_of(opening.part)} is not known here; send its TOPIC entry first")
        if len(self.parts) >= MAX_PARTS:
            return Done(False, f"a group holds at most {MAX_PARTS} parts; use another group, or add one")
        self._news[topic.topic] = None
        part = Part(opening.part, opening.low, opening.high, tuple(opening.parents), deleted=topic.deleted)
        part.opening = True
        self.parts[part.part] = part
        self._parts_in.setdefault(topic.topic, set()).add(part.part)
        for channel in opening.channels:
            if channel.channel not in self.channels and not channel.removed:
                self._channel(channel._replace(from_end=False, version=0))
        for channel in self.channels_of(topic.topic):
            self._begin(channel.channel, part, at=0)
        return self._inherit(part, opening)

    def _inherit(self, part: Part, opening: en.Opening) -> Done:
        """Have a part that takes no blocks yet inherit more, or the last."""
        if part.opening:
            for parent, writer, position, progress, epoch in opening.writers:
                part.inherited[parent, writer] = position, progress
                self._change(Kind.INHERITED, part.part, parent, writer)
                if epoch:
                    self._fence(en.topic_of(part.part), writer, epoch)
            part.opening = opening.more
            self._change(Kind.PART, part.part)
        return OK

    def _seal(self, number: int, children: tuple[en.Child, ...]) -> Sealed | Done:
        part = self.parts.get(number)
        if part is None:
            return Done(False, _no_part(number))
        if not part.sealed:
            part.sealed, part.children = True, children
            self._change(Kind.PART, number)
        topic = en.topic_of(number)
        writers = [each._replace(epoch=self.fences.get((topic, each.writer), 0)) for each in part.known_writers()]
        return Sealed(number, part.end, part.children, writers, self.channels_of(topic))

    def _fence(self, topic: int, writer: int, epoch: int) -> Done:
        """A writer was opened again: who has a lower epoch writes no more. Epochs are times, so the lowest one is the oldest."""
        known = self.fences.get((topic, writer), 0)
        if topic not in self.topics:
            return Done(False, f"the topic {topic} is not known here")
        if epoch < known:
            return Done(False, f"the writer has been opened with the epoch {known} since; ask for its epoch and open it again")
        if not known and len(self.fences) >= MAX_FENCES:
            self._forget_fence(min(self.fences, key=lambda key: (self.fences[key], key)))
        self.fences[topic, writer] = epoch
        self._change(Kind.FENCE, topic, writer)
        return OK

    def _forget_fence(self, key: tuple[int, int]) -> None:
        del self.fences[key]
        self._change(Kind.FENCE, *key)

    def _drop(self, number: int) -> Done:
        """Repeated, it has no effect and is right all the same."""
        part = self.parts.get(number)
        if part is None:
            return OK
        topic = self.topics.get(en.topic_of(number))
        if not part.sealed and topic is not None and not topic.deleted:
            return Done(False, f"part {en.number_of(number)} of {topic.name} is open; seal it, or delete the topic")
        for channel in self.channels_of(en.topic_of(number)):
            self._forget(channel.channel, number)
        for writer in part.writers:
            self._change(Kind.WRITER, number, writer)
        for parent, writer in part.inherited:
            self._change(Kind.INHERITED, number, parent, writer)
        self._change(Kind.PART, number)
        self._waste(part, [*part.objects, *_marks(part)])
        del self.parts[number]
        self._parts_in[en.topic_of(number)].discard(number)
        self._blocks.drop(number)
        if topic is not None and topic.deleted and not self._parts_in[topic.topic]:
            self._forget_topic(topic.topic)
        self._news[en.topic_of(number)] = None
        return OK

    def _trim(self, number: int, first: int) -> Done:
        part = self.parts.get(number)
        if part is None:
            return Done(False, _no_part(number))
        if not part.first < first <= part.end:
            return Done(False, f"the part has the offsets from {part.first} to {part.end}; {first} is not between them")
        part.first = first
        self._change(Kind.PART, number)
        self._blocks.trim(number, first)
        self._waste(part, part.expire())
        for channel in self.channels_of(en.topic_of(number)):
            self._progressed(channel.channel, number, self.progress[channel.channel, number].trim(first))
        return OK

    def _lose(self, number: int, low: int, high: int) -> Done:
        part = self.parts.get(number)
        if part is None:
            return Done(False, _no_part(number))
        if not low < high <= part.end:
            return Done(False, f"the part ends at {part.end}; [{low}, {high}) is not in it")
        for channel in self.channels_of(en.topic_of(number)):
            self._progressed(channel.channel, number, self.progress[channel.channel, number].lose(low, high))
        return OK

    def _compact(self, found: en.Compaction) -> Done:
        """Have messages removed; every channel counts them as acknowledged."""
        part = self.parts.get(found.part)
        if part is None:
            return Done(False, _no_part(found.part))
        if not found.ranges or found.ranges[-1][1] > part.end:
            return Done(False, f"the part ends at {part.end}, and the last offset to be removed is not in it")
        part.flags |= Flag.HOLE
        self._change(Kind.PART, part.part)
        for channel in self.channels_of(en.topic_of(part.part)):
            self._progressed(channel.channel, part.part, self.progress[channel.channel, part.part].compact(found.ranges))
        self._blocks.compact(part.part, list(found.ranges), found.digests)
        return OK

    # --- the object store

    def _uploaded(self, number: int, objects: Sequence[StoredObject], epoch: int) -> Done:
        part = self.parts.get(number)
        if part is None:
            return Done(False, _no_part(number))
        for each in objects:
            if each.epoch != epoch:  # what a deposed leader uploaded is not claimed by another one
                return Done(False, f"the object was uploaded in epoch {each.epoch}, and this is epoch {epoch}; upload it again")
            replaced = part.uploaded(each)
            if isinstance(replaced, str):
                return Done(False, replaced)
            self._waste(part, replaced)
            self._change(Kind.OBJECT, number, each.base)
        self._change(Kind.PART, number)
        self._waste(part, part.expire())
        return OK

    def _waste(self, part: Part, objects: Sequence[StoredObject]) -> None:
        """Note objects that are to be removed from the store."""
        garbage = self.garbage.setdefault(part.part, {}) if objects else {}
        for each in objects:
            garbage[each.base, each.end] = each
            self._change(Kind.OBJECT, part.part, each.base)
            self._change(Kind.GARBAGE, part.part, each.base, each.end)

    def _removed(self, number: int, objects: Sequence[StoredObject]) -> Done:
        """Repeated, it has no effect and is right all the same."""
        garbage = self.garbage.get(number, {})
        for each in objects:
            if garbage.pop((each.base, each.end), None) is not None:
                self._change(Kind.GARBAGE, number, each.base, each.end)
        if not garbage:
            self.garbage.pop(number, None)
        return OK

    # --- channels

    def _channel(self, settings: en.ChannelSettings) -> Done:
        topic, number = self.topics.get(settings.topic), settings.channel
        if topic is None:
            if settings.removed:
                return OK
            return Done(False, f"the topic {settings.topic} is not known here; send its TOPIC entry first")
        if 0 < settings.version < topic.version:
            return Done(False, f"{topic.name} has version {topic.version} here, this entry {settings.version}; read it again")
        if settings.version > topic.version:
            self.topics[topic.topic] = topic._replace(version=settings.version)
            self._change(Kind.TOPIC, topic.topic)
        self._news[topic.topic] = None
        old = self.channels.get(number)
        if settings.removed:
            self._remove_channel(number)
        elif old is not None:
            self.channels[number] = settings._replace(topic=old.topic, ordered=old.ordered, from_end=old.from_end)
        elif len(self._channels_in.get(topic.topic, ())) >= MAX_CHANNELS:
            return Done(False, f"a topic has at most {MAX_CHANNELS} channels; remove one")
        else:
            self.channels[number] = settings
            self._channels_in.setdefault(topic.topic, set()).add(number)
            for part in self.parts_of(topic.topic):
                self._begin(number, part, at=part.end if settings.from_end else part.first)
        self._change(Kind.CHANNEL, number)
        return OK

    def _remove_channel(self, number: int) -> None:
        old = self.channels.pop(number, None)
        if old is not None:
            for part in self.parts_of(old.topic):
                self._forget(number, part.part)
            self._channels_in[old.topic].discard(number)
            self._change(Kind.CHANNEL, number)

    def _begin(self, channel: int, part: Part, at: int) -> None:
        if (channel, part.part) not in self.progress:
            progress = self.progress[channel, part.part] = Progress()
            progress.acks.floor = at
            self._change(Kind.PROGRESS, channel, part.part)

    def _forget(self, channel: int, part: int) -> None:
        progress = self.progress.pop((channel, part))
        self._progressed(channel, part, Changes(set(progress.acks.chunks), [*progress.waiting, *progress.dead]))

    def _seek(self, channel: int, part: int, offset: int) -> Done:
        found, progress = self.parts.get(part), self.progress.get((channel, part))
        if found is None or progress is None:
            return Done(False, _no_channel(channel, part))
        to = min(max(offset, found.first), found.end)
        skipped, again = progress.acks.missing_in(0, to), found.end - to - progress.acks.missing_in(to, found.end)
        self._progressed(channel, part, progress.seek(to))
        return Done(True, changed=skipped + again)

    def _resend(self, channel: int, part: int, offsets: Sequence[int], at_us: int) -> Done:
        progress = self.progress.get((channel, part))
        if progress is None:
            return Done(False, _no_channel(channel, part))
        changes = progress.resend(offsets, at_us)
        self._progressed(channel, part, changes)
        return Done(True, changed=len(changes.offsets), offsets=changes.offsets)

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
        for number in self.parts:
            self._parts_in.setdefault(en.topic_of(number), set()).add(number)
        for channel in self.channels.values():
            self._channels_in.setdefault(channel.topic, set()).add(channel.channel)
        for topic in self.topics.values():
            for part in self.parts_of(topic.topic):
                part.deleted = topic.deleted
        self._name()


def _marks(part: Part) -> list[StoredObject]:
    """In the garbage of a part that is no more, one for each of its stores: its manifests go, too."""
    return [StoredObject(part.end, part.end + at, 0, 0, 0, 0, 0, url) for at, url in enumerate(part.stores)]


def _rank(topic: en.TopicSettings) -> tuple[bool, int]:
    """Order of topics with one name; the last has it."""
    return not topic.deleted, topic.topic


def _no_part(part: int) -> str:
    return f"part {en.number_of(part)} of topic {en.topic_of(part)} is not in this group"


def _no_channel(channel: int, part: int) -> str:
    return f"channel {channel} has no part {en.number_of(part)} of topic {en.topic_of(part)} in this group"
