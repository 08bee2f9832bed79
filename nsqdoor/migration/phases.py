"""The phases in which a topic moves from an NSQ cluster to this one. Pure.

    phase   consumers (access=r) get   producers (access=w) get
      0     the old cluster            the old cluster
      1     both                       the old cluster
      2     both                       the new cluster
      3     the new cluster            the new cluster

Source: How we redesigned the NSQ (docs/sources.md), "NSQ migrate proxy"; docs/nsq.md, "Moving from NSQ".
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

from pixiu.errors import InvalidArgument, MalformedData

READ: Final = "r"
WRITE: Final = "w"
MAX_PRODUCERS: Final = 4_096
"""nsqd in one answer."""


class Phase(IntEnum):
    """Phase of a topic."""

    OLD = 0
    READ_BOTH = 1
    WRITE_NEW = 2
    NEW = 3


class Side(IntEnum):
    """One of the two clusters."""

    OLD = 0
    NEW = 1


SIDES: Final[Mapping[tuple[Phase, str], Sequence[Side]]] = {
    (Phase.OLD, READ): (Side.OLD,),
    (Phase.OLD, WRITE): (Side.OLD,),
    (Phase.READ_BOTH, READ): (Side.OLD, Side.NEW),
    (Phase.READ_BOTH, WRITE): (Side.OLD,),
    (Phase.WRITE_NEW, READ): (Side.OLD, Side.NEW),
    (Phase.WRITE_NEW, WRITE): (Side.NEW,),
    (Phase.NEW, READ): (Side.NEW,),
    (Phase.NEW, WRITE): (Side.NEW,),
}


@dataclass(frozen=True)
class Lookup:
    """Answer of one side for a topic."""

    channels: Sequence[str] = ()
    producers: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Found:
    """State of both sides, at which an operator's step looks."""

    old_channels: Sequence[str] = ()
    new_channels: Sequence[str] | None = None
    """None: the new side has no such topic."""
    old_left: int | None = 0
    """Messages that the old side holds; None: an nsqd did not answer."""
    problems: Sequence[str] = field(default_factory=list)
    """Questions that had no answer, in words."""


def merged(answers: Iterable[Lookup]) -> Lookup:
    """Put answers together: each nsqd once, by its address and port."""
    channels: set[str] = set()
    producers: dict[tuple[Any, Any], Mapping[str, Any]] = {}
    for each in answers:
        channels.update(each.channels)
        for producer in each.producers:
            producers.setdefault((producer.get("broadcast_address"), producer.get("tcp_port")), producer)
    return Lookup(sorted(channels), list(producers.values())[:MAX_PRODUCERS])


def lookup_of(found: object) -> Lookup:
    """Read an answer of nsqlookupd, of 1.x or earlier. Raises `MalformedData`."""
    if isinstance(found, dict) and isinstance(found.get("data"), dict):
        found = found["data"]
    if not isinstance(found, dict):
        raise MalformedData("this is no answer of nsqlookupd")
    channels, producers = found.get("channels") or [], found.get("producers") or []
    if not isinstance(channels, list) or not isinstance(producers, list):
        raise MalformedData("this is no answer of nsqlookupd")
    named = [each for each in producers if isinstance(each, dict) and isinstance(each.get("broadcast_address"), str)]
    return Lookup(
        [each for each in channels if isinstance(each, str)], [each for each in named if isinstance(each.get("tcp_port"), int)]
    )


def left_of(found: object, topic: str) -> int:
    """Messages of a topic that an nsqd holds, of its answer to /stats. Raises `MalformedData`."""
    if isinstance(found, dict) and isinstance(found.get("data"), dict):
        found = found["data"]
    topics = found.get("topics") if isinstance(found, dict) else None
    if not isinstance(topics, list):
        raise MalformedData("this is no answer of nsqd")
    left = 0
    for each in topics:
        if isinstance(each, dict) and each.get("topic_name") == topic:
            left += _count(each, "depth")
            for channel in each.get("channels") or []:
                left += sum(_count(channel, name) for name in ("depth", "in_flight_count", "deferred_count"))
    return left


def _count(found: object, name: str) -> int:
    value = found.get(name, 0) if isinstance(found, dict) else None
    if not isinstance(value, int) or value < 0:
        raise MalformedData("this is no answer of nsqd")
    return value


def refusal(before: Phase, after: Phase, found: Found) -> str:
    """Why a step is refused; empty: it is not. Any step back is allowed, and each step forward by one alone."""
    if after <= before:
        return ""
    if after > before + 1:
        return f"the topic is in phase {before}: go to phase {before + 1} first"
    if found.problems:
        return "; ".join(found.problems)
    if after is Phase.WRITE_NEW:
        if found.new_channels is None:
            return "the new side has no such topic: go back to phase 0 and to 1 again, which makes it"
        missing = sorted(set(found.old_channels) - set(found.new_channels))
        if missing:
            return f"the new side lacks the channels {', '.join(missing)}: go back to phase 0 and to 1 again, which makes them"
    if after is Phase.NEW:
        if found.old_left is None:
            return "an nsqd of the old side does not say what it holds"
        if found.old_left:
            return f"the old side still holds {found.old_left} messages of the topic"
    return ""


def encode(phase: Phase, by: str, at_ms: int) -> bytes:
    """A topic's state as it is stored."""
    return json.dumps({"phase": int(phase), "by": by, "at_ms": at_ms}).encode()


def decode(data: bytes) -> Phase:
    """Read a topic's state. Raises `MalformedData`."""
    try:
        return Phase(json.loads(data)["phase"])
    except (ValueError, TypeError, KeyError):
        raise MalformedData("this is no state of a migration") from None


def phase_of(number: int) -> Phase:
    """A phase by its number. Raises `InvalidArgument`."""
    try:
        return Phase(number)
    except ValueError:
        raise InvalidArgument(f"a phase is from 0 to 3, not {number}") from None
