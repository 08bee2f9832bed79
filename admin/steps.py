"""Work left for a topic: the entries that its groups do not have yet, and the node once they have them. Pure.

    TOPIC at each group ──▶ CHANNEL, OPEN, DROP there
    SEAL at the groups of all parents ──▶ OPEN at the group of a child, with the parents' writers

Every entry may be appended again, so nothing but the node and the answers of this leadership is needed: a new leader begins anew.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

from admin import entries
from cluster.topics import entries as en
from cluster.topics.entries import KnownWriter, encode_drop, part_id
from pixiu.discovery.topics import PartState, TopicNode, TopicPart

Key = tuple[int, int, int]
"""Kind of an entry, its group or part, its channel or, of an OPEN, how many follow it."""


class Step(NamedTuple):
    """An entry that a group is to append."""

    key: Key
    group: int
    kind: int
    payload: bytes
    made: int
    """V of the topic that it is made from."""
    version: int = 1
    """V of the topic when what it says was changed last."""


class Done(NamedTuple):
    """An entry that a group has."""

    version: int
    """V of the topic when what it says was changed last."""
    writers: Sequence[KnownWriter] = ()
    """Of a seal."""


Answers = Mapping[Key, Done]
MAX_WRITERS: Final = 20_000
"""Writers' states in one OPEN: 1.5 MiB at most; half of what a log's entry may have. With more of them a part has several."""
MOVING: Final = (PartState.OPENING, PartState.SEALING)


def ready(node: TopicNode, done: Answers) -> Iterator[Step]:
    """The entries that may be appended now."""
    if node.purging:
        yield from _purge(node, done)
        return
    if node.settled < node.version:
        for group in node.groups:
            key = (en.TOPIC, group, 0)
            if not _has(done, key, node.version):
                yield Step(key, group, en.TOPIC, entries.set_topic(node), node.version, node.version)
                continue
            for channel in node.channels:
                key = (en.CHANNEL, group, channel.channel)
                if channel.version > node.settled and not _has(done, key, channel.version):
                    yield Step(key, group, en.CHANNEL, entries.set_channel(node, channel), node.version, channel.version)
    for part in node.parts:
        step = _step_of(node, part, done)
        if step is not None:
            yield step


def leads_on(step: Step) -> bool:
    """True if other entries wait for this one."""
    return step.kind in (en.TOPIC, en.SEAL) or (step.kind == en.OPEN and step.key[2] > 0)


def _purge(node: TopicNode, done: Answers) -> Iterator[Step]:
    """A group drops an open part only after it knows that the topic is deleted."""
    for group in node.groups:
        key = (en.TOPIC, group, 0)
        if not _has(done, key, node.version):
            yield Step(key, group, en.TOPIC, entries.set_topic(node), node.version, node.version)
    for part in node.parts:
        known = _has(done, (en.TOPIC, part.group, 0), node.version)
        if known and not _has(done, (en.DROP, part.number, 0)):
            yield _drop(node, part)


def _step_of(node: TopicNode, part: TopicPart, done: Answers) -> Step | None:
    match part.state:
        case PartState.SEALING:
            key = (en.SEAL, part.number, 0)
            return None if _has(done, key) else Step(key, part.group, en.SEAL, entries.seal_part(node, part), node.version)
        case PartState.OPENING:
            key = (en.OPEN, part.number, 0)
            if _has(done, key) or not _has(done, (en.TOPIC, part.group, 0), 1):
                return None
            seals = [done.get((en.SEAL, parent, 0)) for parent in part.parents]
            if any(seal is None for seal in seals):
                return None
            return _open(node, part, done, sorted({writer for seal in seals if seal is not None for writer in seal.writers}))
        case PartState.DROPPING:
            return None if _has(done, (en.DROP, part.number, 0)) else _drop(node, part)
    return None


def _open(node: TopicNode, part: TopicPart, done: Answers, writers: Sequence[KnownWriter]) -> Step:
    """The next OPEN of a part: one after the other, so that the last one finds everything."""
    left = max(len(writers) - 1, 0) // MAX_WRITERS
    first = 0
    while left and _has(done, (en.OPEN, part.number, left)):
        first, left = first + MAX_WRITERS, left - 1
    payload = entries.open_part(node, part, writers[first : first + MAX_WRITERS], more=left > 0)
    return Step((en.OPEN, part.number, left), part.group, en.OPEN, payload, node.version)


def _drop(node: TopicNode, part: TopicPart) -> Step:
    payload = encode_drop(part_id(node.topic, part.number))
    return Step((en.DROP, part.number, 0), part.group, en.DROP, payload, node.version)


def _has(done: Answers, key: Key, version: int = 0) -> bool:
    found = done.get(key)
    return found is not None and found.version >= version


def after(node: TopicNode, done: Answers, wall_ms: int) -> TopicNode | None:
    """The node as far as its groups have it; the same object if nothing was reached since. None: it is purged, delete it."""
    left = list(ready(node, done))
    if node.purging:
        return node if left else None
    states = _states(node, done)
    gone = {number for number, state in states.items() if state is None}
    parts = tuple(_in_state(part, states.get(part.number), wall_ms) for part in node.parts if part.number not in gone)
    # Steps that wait for others show as parts that are still on their way. What is dropped concerns no client.
    complete = all(step.kind == en.DROP for step in left) and not any(part.state in MOVING for part in parts)
    channels = tuple(each for each in node.channels if not each.removed) if complete else node.channels
    changed = parts != node.parts or channels != node.channels
    version = node.version + 1 if changed else node.version
    settled = version if complete else node.settled
    if not changed and settled == node.settled:
        return node
    return replace(node, version=version, parts=parts, channels=channels, settled=settled)


def _in_state(part: TopicPart, state: PartState | None, wall_ms: int) -> TopicPart:
    if state is None or state is part.state:
        return part
    return replace(part, state=state, sealed_at_ms=wall_ms if state is PartState.SEALED else 0)


def _states(node: TopicNode, done: Answers) -> dict[int, PartState | None]:
    """Number → state that a part has reached; None: it is gone.

    Parents become sealed together with all of their children becoming open, so that each slot has one open part in every version.
    """
    found: dict[int, PartState | None] = {}
    for part in node.parts:
        if part.state is PartState.OPENING and _has(done, (en.OPEN, part.number, 0)):
            found[part.number] = PartState.OPEN
        elif part.state is PartState.SEALING and _has(done, (en.SEAL, part.number, 0)):
            found[part.number] = PartState.SEALED
        elif part.state is PartState.DROPPING and _has(done, (en.DROP, part.number, 0)):
            found[part.number] = None
    opening = [part for part in node.parts if part.state is PartState.OPENING]
    ties = [(parent, part.number) for part in opening for parent in part.parents]
    ties += pairwise(part.number for part in opening if not part.parents)  # those of a new topic
    loose = True
    while loose:
        loose = False
        for parent, child in ties:
            if (parent in found) != (child in found):
                found.pop(parent, None)
                found.pop(child, None)
                loose = True
    return found
