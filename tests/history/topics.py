"""What clients of a durable topic saw, and whether they may have seen it.

Writers and members, in whatever process, note a line before they do or after they learn something. All notes have the time of one
machine's monotonic clock. In the end a reader reads everything that is stored, and `judge` compares. It needs nothing of the
cluster, so forged histories test it.

Source: docs/topics.md, "Promises".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

SENT, CONFIRMED, GIVEN, REPORTED, ACKNOWLEDGED, VOID = "s", "c", "g", "r", "a", "v"
MAX_TOLD = 20
"""Violations that are named of each kind."""


class Note(NamedTuple):
    """A line of a writer's or member's file."""

    at_ns: int
    kind: str
    who: str
    """Channel and member; of a confirmation empty."""
    channel: str
    part: int
    offset: int
    """-1: not known."""
    writer: int
    number: int
    """Of the message, from 1 for each writer."""

    def line(self) -> bytes:
        """As it is written."""
        return (" ".join(str(each) if each != "" else "-" for each in self) + "\n").encode()


def parse(text: str) -> list[Note]:
    """The notes of a file; a line that its writer was killed in is left out."""
    found = []
    for line in text.split("\n")[:-1]:
        at, kind, who, channel, *numbers = line.split(" ")
        part, offset, writer, number = map(int, numbers)
        found.append(Note(int(at), kind, who.strip("-"), channel.strip("-"), part, offset, writer, number))
    return found


class Stored(NamedTuple):
    """A message as a reader read it in the end. `key`: those with the same writer and key stay in order."""

    part: int
    offset: int
    writer: int
    number: int
    key: int


@dataclass
class Verdict:
    """Result of a judgement."""

    violations: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By what was seen: stored, confirmed, given, given again, acknowledged, void, late (given after its acknowledgement was
    confirmed, by a leader or to a member that had been stopped; a report of it must not count)."""

    def violation(self, what: str, details: object) -> None:
        """Add a violation."""
        self.counts[what] += 1
        if self.counts[what] <= MAX_TOLD:
            self.violations.append(f"{what}: {details}")


def judge(
    notes: Iterable[Note],
    stored: Sequence[Stored],
    parents: Mapping[int, Sequence[int]],
    channels: Mapping[str, bool],
    late_ns: int = 0,
) -> Verdict:
    """Compare what clients saw with what is stored.

    Args:
        notes: of all processes, in any order.
        stored: everything that a reader got, in the order in which it got it.
        parents: part → the parts that were sealed for it.
        channels: name → True if it is ordered. All were drained before the end.
        late_ns: a message that comes this long after its acknowledgement was confirmed comes again, whatever was stopped.
    """
    found = Verdict()
    _judge_stored(stored, parents, found)
    ordered = sorted(notes)
    by_message = {(each.writer, each.number): each for each in stored}
    for note in ordered:
        if note.kind == CONFIRMED:
            found.counts["confirmed"] += 1  # once more by a writer that begins again before it
            there = by_message.get((note.writer, note.number))
            if there is None:
                found.violation("confirmed and not stored", note)
            elif note.offset >= 0 and (there.part, there.offset) != (note.part, note.offset):
                found.violation("confirmed at another position", (note, there))
    for channel, is_ordered in channels.items():
        mine = [note for note in ordered if note.channel == channel]
        _judge_given(mine, stored, found, late_ns)
        if is_ordered:
            _judge_order(mine, stored, found)
    return found


def _judge_stored(stored: Sequence[Stored], parents: Mapping[int, Sequence[int]], found: Verdict) -> None:
    """Once, in order for each key, without a hole in parts and in what a writer sent."""
    seen: set[tuple[int, int]] = set()
    last: dict[tuple[int, int], Stored] = {}
    ends: dict[int, int] = defaultdict(int)
    for each in stored:
        found.counts["stored"] += 1
        if (each.writer, each.number) in seen:
            found.violation("stored twice", each)
        seen.add((each.writer, each.number))
        if each.offset != ends[each.part]:
            found.violation("offsets are not dense", each)
        ends[each.part] = each.offset + 1
        before = last.get((each.writer, each.key))
        if before is not None and (before.number >= each.number or not _follows(before.part, each.part, parents)):
            found.violation("stored out of order", (before, each))
        last[each.writer, each.key] = each
    for writer in {writer for writer, _ in seen}:
        numbers = {number for which, number in seen if which == writer}
        if len(numbers) != max(numbers):
            found.violation("a hole in what a writer sent", (writer, sorted(set(range(1, max(numbers))) - numbers)[:5]))


def _follows(before: int, after: int, parents: Mapping[int, Sequence[int]]) -> bool:
    """True if `after` is the part `before`, or comes after it."""
    left, seen = [after], set[int]()
    while left:
        each = left.pop()
        if each == before:
            return True
        if each not in seen:
            seen.add(each)
            left += parents.get(each, ())
    return False


def _judge_given(notes: Sequence[Note], stored: Sequence[Stored], found: Verdict, late_ns: int) -> None:
    """Everything is given and nothing else; what was acknowledged and confirmed comes no more."""
    content = {(each.part, each.offset): (each.writer, each.number) for each in stored}
    given: set[tuple[int, int]] = set()
    done: dict[tuple[int, int], int] = {}
    for note in notes:
        place = note.part, note.offset
        if note.kind == GIVEN:
            found.counts["given"] += 1
            found.counts["given again"] += place in given
            given.add(place)
            if content.get(place) != (note.writer, note.number):
                found.violation("given something else than was stored", (note, content.get(place)))
            if place in done:
                found.counts["late"] += 1
                if note.at_ns - done[place] > late_ns:
                    found.violation("given again after its acknowledgement was confirmed", note)
        elif note.kind == ACKNOWLEDGED:
            found.counts["acknowledged"] += 1
            if place not in given:
                found.violation("acknowledged and never given", note)
            if place in done:
                found.violation("acknowledged twice", note)
            done[place] = note.at_ns
        elif note.kind == VOID:
            found.counts["void"] += 1
    missing = sorted(content.keys() - given)
    if missing:
        found.violation("never given to a channel", (notes[0].channel if notes else "", len(missing), missing[:5]))


def _judge_order(notes: Sequence[Note], stored: Sequence[Stored], found: Verdict) -> None:
    """A message comes when all earlier ones of its key were reported, or with them to the same member."""
    keys = {(each.part, each.offset): (each.writer, each.key) for each in stored}
    line: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    rank: dict[tuple[int, int], int] = {}
    for each in stored:
        mine = line[each.writer, each.key]
        rank[each.part, each.offset] = len(mine)
        mine.append((each.part, each.offset))
    reported: set[tuple[int, int]] = set()
    givers: dict[tuple[int, int], set[str]] = defaultdict(set)
    begins: dict[tuple[int, int], int] = defaultdict(int)
    for note in notes:
        place = note.part, note.offset
        key = keys.get(place)
        if note.kind == REPORTED:
            reported.add(place)
        if note.kind != GIVEN or key is None:
            continue
        mine, at = line[key], begins[key]
        while at < len(mine) and mine[at] in reported:
            at += 1
        begins[key] = at
        for earlier in mine[at : rank[place]]:
            if earlier not in reported and not (earlier[0] == note.part and note.who in givers[earlier]):
                found.violation("given before what is earlier of its key", (note, earlier))
                break
        givers[place].add(note.who)
