"""What happened to topics in a run, and whether it may happen.

The events are facts in the order in which they became true: what the groups' logs committed, what was said to writers and members,
and what members were given. `judge` needs nothing else, so forged histories test it.

Source: docs/topics.md, "Promises".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Message(NamedTuple):
    """What a test writes: the n-th message of a writer to a slot. Its fields follow from its number."""

    writer: int
    slot: int
    number: int

    @property
    def region(self) -> str:
        """Value of its header; empty: it has none."""
        return ("eu", "us", "")[self.number % 3]

    @property
    def tag(self) -> str:
        return "a" if self.number % 5 == 0 else ""

    @property
    def load_test(self) -> bool:
        return self.number % 7 == 0


class Channel(NamedTuple):
    """A channel of a test."""

    ordered: bool
    region: str = ""
    """Messages with this header are wanted; empty: all."""
    load_test: bool = True
    """Messages of load tests are wanted, too."""

    def wants(self, message: Message) -> bool:
        return (not self.region or message.region == self.region) and (self.load_test or not message.load_test)


@dataclass(frozen=True)
class Opened:
    """A part is open in its group's log."""

    part: int
    parents: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sealed:
    """A part's seal is committed."""

    part: int


@dataclass(frozen=True)
class Stored:
    """A block is committed."""

    part: int
    base: int
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Confirmed:
    """A writer was told that a message is stored."""

    message: Message


@dataclass(frozen=True)
class Given:
    """A member gets messages: their offsets, and what the part's segments hold there."""

    channel: int
    part: int
    member: int
    offsets: tuple[int, ...]
    messages: tuple[Message | None, ...]
    leader: tuple[int, ...] = ()
    """Who gave them: group, replica, epoch."""
    tag: str = ""
    """The member's."""
    early: tuple[int, ...] = ()
    """Offsets of messages that are not due."""


@dataclass(frozen=True)
class Done:
    """A settlement is committed: these are acknowledged, or dead."""

    channel: int
    part: int
    offsets: tuple[int, ...]
    deferred: tuple[int, ...] = ()
    """These come again."""


@dataclass(frozen=True)
class Acknowledged:
    """A member was told that its acknowledgement counts."""

    channel: int
    part: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Ended:
    """A leader ended a member."""

    member: int


@dataclass(frozen=True)
class Voided:
    """A seek was asked for, or the topic was deleted, so that what members have counts no longer."""

    channel: int
    part: int


@dataclass(frozen=True)
class Sought:
    """A seek is committed."""

    channel: int
    part: int
    offset: int


@dataclass(frozen=True)
class Resent:
    """Dead letters are to be delivered again, by a committed entry."""

    channel: int
    part: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Finished:
    """A member was told that its channel has everything of a part."""

    channel: int
    part: int


@dataclass(frozen=True)
class Dropped:
    """A part was dropped, by a committed entry."""

    part: int


Event = Opened | Sealed | Stored | Confirmed | Given | Done | Acknowledged | Ended | Voided | Sought | Resent | Finished | Dropped


class Judge:
    """Takes events one by one. `violations` are (what, details)."""

    def __init__(self, channels: dict[int, Channel]) -> None:
        self._channels = channels
        self.violations: list[tuple[str, str]] = []
        self._parents: dict[int, tuple[int, ...]] = {}
        self._sealed: set[int] = set()
        self._content: dict[int, list[Message]] = defaultdict(list)
        """By part and offset."""
        self._by_slot: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(part, slot) → offsets."""
        self._undone: dict[tuple[int, int, int], int] = defaultdict(int)
        """(channel, part, slot) → how many of the offsets in `_by_slot` are done, without a gap."""
        self._done: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(channel, part) → offsets."""
        self._ever_done: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._sought: set[tuple[int, int]] = set()
        """(channel, part) that a seek moved."""
        self._owed: dict[tuple[int, int], set[int]] = defaultdict(set)
        """(channel, part) → dead letters that are to be delivered again."""
        self._holders: dict[tuple[int, int], dict[int, tuple[int, tuple[int, ...]]]] = defaultdict(dict)
        """(channel, part) → offset → member that has it, and who gave it."""
        self._told: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._given: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._stored: set[Message] = set()
        self._confirmed: set[Message] = set()
        self._last: dict[tuple[int, int], int] = {}
        """(writer, slot) → number of its last stored message."""

    def _violation(self, what: str, details: object) -> None:
        if len(self.violations) < 20:
            self.violations.append((what, str(details)))

    def take(self, event: Event) -> None:
        getattr(self, f"_on_{type(event).__name__.lower()}")(event)

    def _on_opened(self, event: Opened) -> None:
        self._parents[event.part] = event.parents
        for parent in event.parents:
            if parent not in self._sealed:
                self._violation("a child opened before its parent was sealed", event)

    def _on_sealed(self, event: Sealed) -> None:
        self._sealed.add(event.part)

    def _on_stored(self, event: Stored) -> None:
        content = self._content[event.part]
        if event.base != len(content):
            self._violation("offsets are not dense", event)
        if event.part in self._sealed:
            self._violation("stored after the seal", event)
        for message in event.messages:
            if message in self._stored:
                self._violation("a message is stored twice", message)
            self._stored.add(message)
            key = message.writer, message.slot
            if message.number <= self._last.get(key, 0):
                self._violation("a slot is out of order", message)
            self._last[key] = max(message.number, self._last.get(key, 0))
            self._by_slot[event.part, message.slot].append(len(content))
            content.append(message)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._confirmed.add(event.message)
        if event.message not in self._stored:
            self._violation("confirmed and not stored", event.message)

    def _on_given(self, event: Given) -> None:
        key = event.channel, event.part
        before = set[int]()
        if event.early:
            self._violation("given before its time", event)
        for offset, message in zip(event.offsets, event.messages, strict=True):
            content = self._content[event.part]
            if offset >= len(content) or message != content[offset]:
                self._violation("given something else than was stored", (event, offset))
                continue
            if offset in self._told[key]:
                self._violation("given again after its acknowledgement was confirmed", (event.channel, event.part, offset))
            channel = self._channels[event.channel]
            if not channel.wants(message):
                self._violation("given and not wanted", (event.channel, message))
            if event.tag not in ("", message.tag):
                self._violation("given to a member with another tag", (event, message))
            if self._holders[key].get(offset, (0, ()))[1] == event.leader != ():
                self._violation("with two members at the same time", (event, offset, self._holders[key][offset]))
            self._holders[key][offset] = event.member, event.leader
            if channel.ordered and offset not in self._owed[key]:
                self._check_turn(event, offset, content[offset].slot, before)
            before.add(offset)
            self._given[key].add(offset)

    def _check_turn(self, event: Given, offset: int, slot: int, before: set[int]) -> None:
        """Everything earlier of the slot is done, or comes in the same batch before it."""
        for part in self._line(event.part):
            done, offsets = self._done[event.channel, part], self._by_slot[part, slot]
            content, wants = self._content[part], self._channels[event.channel].wants
            at = self._undone[event.channel, part, slot]
            while at < len(offsets) and (offsets[at] in done or not wants(content[offsets[at]])):
                at += 1
            self._undone[event.channel, part, slot] = at
            if part != event.part and (event.channel, part) in self._sought:
                continue  # a seek in a part that was finished does not hold up those behind it
            for each in offsets[at:]:
                if part == event.part and each >= offset:
                    break
                if each not in done and wants(content[each]) and not (part == event.part and each in before):
                    self._violation("a lane was handed on before it was done", (event, slot, part, each))
                    return

    def _line(self, part: int) -> list[int]:
        """A part and all before it."""
        found, left = list[int](), [part]
        while left:
            each = left.pop()
            if each not in found:
                found.append(each)
                left += self._parents.get(each, ())
        return found

    def _on_done(self, event: Done) -> None:
        key, channel, content = (event.channel, event.part), self._channels[event.channel], self._content[event.part]
        for offset in event.offsets:
            if offset < len(content) and channel.wants(content[offset]) and offset not in self._given[key]:
                self._violation("acknowledged and never given", (event, content[offset]))
        self._done[key].update(event.offsets)
        self._ever_done[key].update(event.offsets)
        self._owed[key].difference_update(event.offsets)
        for offset in (*event.offsets, *event.deferred):
            self._holders[key].pop(offset, None)

    def _on_acknowledged(self, event: Acknowledged) -> None:
        key = event.channel, event.part
        if not self._ever_done[key].issuperset(event.offsets):
            self._violation("an acknowledgement counted before it was committed", event)
        self._told[key].update(self._done[key].intersection(event.offsets))

    def _on_ended(self, event: Ended) -> None:
        for holders in self._holders.values():
            for offset in [offset for offset, (member, _) in holders.items() if member == event.member]:
                del holders[offset]

    def _on_voided(self, event: Voided) -> None:
        self._holders[event.channel, event.part].clear()

    def _on_sought(self, event: Sought) -> None:
        key = event.channel, event.part
        self._sought.add(key)
        skipped = set(range(min(event.offset, len(self._content[event.part]))))
        self._owed[key].clear()
        self._done[key] = skipped
        self._ever_done[key] |= skipped
        self._given[key] = self._given[key] & skipped | skipped
        self._told[key] &= skipped
        for slot in {message.slot for message in self._content[event.part]}:
            self._undone[event.channel, event.part, slot] = 0

    def _on_resent(self, event: Resent) -> None:
        key = event.channel, event.part
        self._owed[key].update(event.offsets)
        self._told[key].difference_update(event.offsets)
        self._given[key].difference_update(event.offsets)

    def _on_finished(self, event: Finished) -> None:
        key = event.channel, event.part
        whole = event.part in self._sealed and len(self._ever_done[key]) == len(self._content[event.part])
        if not whole and key not in self._sought:
            self._violation("a part is called finished that is not", event)

    def _on_dropped(self, event: Dropped) -> None:
        for channel in self._channels:
            if not self.is_done(channel, event.part):
                self._violation("dropped and not done", (channel, event.part))

    def finish(self) -> None:
        """The run is over, and everything had time to be read."""
        for message in sorted(self._confirmed - self._stored):
            self._violation("confirmed and not stored", message)
        for number, channel in self._channels.items():
            for part, content in self._content.items():
                missing = {at for at, each in enumerate(content) if channel.wants(each)} - self._given[number, part]
                if missing:
                    self._violation("never given to a channel", (number, part, sorted(missing)[:5]))
                if not self.is_done(number, part):
                    self._violation("never acknowledged", (number, part))

    @property
    def stored(self) -> int:
        return len(self._stored)

    @property
    def confirmed(self) -> int:
        return len(self._confirmed)

    def end(self, part: int) -> int:
        """Number of messages that a part has."""
        return len(self._content[part])

    def is_done(self, channel: int, part: int) -> bool:
        """True if a channel has all of a part, as far as it is written."""
        key = channel, part
        return len(self._done[key]) == len(self._content[part]) and not self._owed[key]

    def all_done(self) -> bool:
        return all(self.is_done(channel, part) for channel in self._channels for part in self._content)


def judge(events: Sequence[Event], channels: dict[int, Channel]) -> list[str]:
    """What is wrong with a whole history."""
    found = Judge(channels)
    for event in events:
        found.take(event)
    found.finish()
    return [what for what, _ in found.violations]
