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
    """What a test writes: the n-th message of a writer to a slot."""

    writer: int
    slot: int
    number: int


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


@dataclass(frozen=True)
class Done:
    """A settlement is committed: these are acknowledged, or dead."""

    channel: int
    part: int
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Acknowledged:
    """A member was told that its acknowledgement counts."""

    channel: int
    part: int
    offsets: tuple[int, ...]


Event = Opened | Sealed | Stored | Confirmed | Given | Done | Acknowledged


class Judge:
    """Takes events one by one. `violations` are (what, details)."""

    def __init__(self, channels: dict[int, bool]) -> None:
        self._ordered = channels
        """Channel → whether it is ordered."""
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
        for offset, message in enumerate(event.messages, event.base):
            if message in self._stored:
                self._violation("a message is stored twice", message)
            self._stored.add(message)
            key = message.writer, message.slot
            if message.number <= self._last.get(key, 0):
                self._violation("a slot is out of order", message)
            self._last[key] = max(message.number, self._last.get(key, 0))
            content.append(message)
            self._by_slot[event.part, message.slot].append(offset)

    def _on_confirmed(self, event: Confirmed) -> None:
        self._confirmed.add(event.message)
        if event.message not in self._stored:
            self._violation("confirmed and not stored", event.message)

    def _on_given(self, event: Given) -> None:
        key = event.channel, event.part
        before = set[int]()
        for offset, message in zip(event.offsets, event.messages, strict=True):
            content = self._content[event.part]
            if offset >= len(content) or message != content[offset]:
                self._violation("given something else than was stored", (event, offset))
                continue
            if offset in self._told[key]:
                self._violation("given again after its acknowledgement was confirmed", (event.channel, event.part, offset))
            if self._ordered[event.channel]:
                self._check_turn(event, offset, content[offset].slot, before)
            before.add(offset)
            self._given[key].add(offset)

    def _check_turn(self, event: Given, offset: int, slot: int, before: set[int]) -> None:
        """Everything earlier of the slot is done, or comes in the same batch before it."""
        for part in self._line(event.part):
            done, offsets = self._done[event.channel, part], self._by_slot[part, slot]
            at = self._undone[event.channel, part, slot]
            while at < len(offsets) and offsets[at] in done:
                at += 1
            self._undone[event.channel, part, slot] = at
            for each in offsets[at:]:
                if part == event.part and each >= offset:
                    break
                if each not in done and not (part == event.part and each in before):
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
        self._done[event.channel, event.part].update(event.offsets)

    def _on_acknowledged(self, event: Acknowledged) -> None:
        for offset in event.offsets:
            if offset not in self._done[event.channel, event.part]:
                self._violation("an acknowledgement counted before it was committed", event)
                break
        self._told[event.channel, event.part].update(event.offsets)

    def finish(self) -> None:
        """The run is over, and everything had time to be read."""
        for message in sorted(self._confirmed - self._stored):
            self._violation("confirmed and not stored", message)
        for channel in self._ordered:
            for part, content in self._content.items():
                missing = set(range(len(content))) - self._given[channel, part]
                if missing:
                    self._violation("never given to a channel", (channel, part, sorted(missing)[:5]))
                if len(self._done[channel, part]) < len(content):
                    self._violation("never acknowledged", (channel, part))

    @property
    def stored(self) -> int:
        return len(self._stored)

    @property
    def confirmed(self) -> int:
        return len(self._confirmed)

    def all_done(self) -> bool:
        return all(
            len(self._done[channel, part]) == len(content) for channel in self._ordered for part, content in self._content.items()
        )


def judge(events: Sequence[Event], channels: dict[int, bool]) -> list[str]:
    """What is wrong with a whole history."""
    found = Judge(channels)
    for event in events:
        found.take(event)
    found.finish()
    return [what for what, _ in found.violations]
