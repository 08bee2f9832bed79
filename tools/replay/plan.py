"""Turns a log's events into a schedule: joins, leaves and messages, room by room, in the log's order.

In a room whose log has joins or parts, a user is logged in by a join, by the first message without one, or by a nick (the new name
comes, the old one goes), and logged out by a part or when idle. In a room without any, everybody who speaks is logged in before the
room's first message.

Source: docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import xxhash

from pixiu.ids import UIN, RoomID
from tools.replay.inbox import Mention, inbox_of
from tools.replay.log import LogEvent, Names

IDLE_MS: Final = 30 * 60 * 1000
"""Milliseconds of log time after which a silent user is logged out, in rooms with joins or parts."""


def share_of(*keys: int) -> float:
    """A number in [0, 1) that depends only on the keys."""
    return xxhash.xxh3_64_intdigest(b"".join((key & (1 << 64) - 1).to_bytes(8, "little") for key in keys)) / (1 << 64)


class Action(Enum):
    """Action of a step."""

    JOIN = "join"
    LEAVE = "leave"
    SEND = "send"


class Step(NamedTuple):
    """One thing to do in one room."""

    at_ms: int
    """Milliseconds of log time since the replay's start."""
    action: Action
    uin: UIN
    number: int = -1
    """Number of a message: dense from 0 in the log's order. Otherwise -1."""
    text: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of a replay."""

    rooms: dict[RoomID, list[Step]]
    """The steps of each room, in order; of users' inboxes too (`tools.replay.inbox`)."""
    names: Names
    messages: int
    joins: int
    leaves: int
    expected: int
    """Deliveries that the schedule leads to when nothing fails."""
    span_ms: int
    """Time from the first step to the last, in log time."""
    users: int
    chats: int = 0
    """Number of messages that go to users."""


class _Room:
    """The members of one room while its events are read: times of their last activity, the longest silent first."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self.active: dict[UIN, int] = {}
        self.steps: list[Step] = []

    def touch(self, uin: UIN, at_ms: int) -> None:
        """Note that the user was active; if not a member, the user is logged in first."""
        if self.active.pop(uin, None) is None:
            self.steps.append(Step(at_ms, Action.JOIN, uin))
        self.active[uin] = at_ms

    def leave(self, uin: UIN, at_ms: int) -> None:
        """Log the user out, if present."""
        if self.active.pop(uin, None) is not None:
            self.steps.append(Step(at_ms, Action.LEAVE, uin))

    def expire(self, at_ms: int, idle_ms: int) -> None:
        """Log out users who were silent for too long."""
        while self.live and self.active:
            uin, since = next(iter(self.active.items()))
            if since + idle_ms >= at_ms:
                return
            self.leave(uin, since + idle_ms)


def make_plan(events: Iterable[LogEvent], *, idle_ms: int = IDLE_MS, mentions: Iterable[Mention] = ()) -> Plan:
    """Make the schedule of a log whose events are in the order of time.

    `idle_ms`: milliseconds of log time after which a silent user of a room with joins or parts is logged out.
    `mentions`: messages to users, who wait for them from the start.
    Raises `InvalidArgument` when two names have one ID.
    """
    listed = list(events)
    names = Names()
    live = {event.room for event in listed if event.kind in ("join", "part")}
    start = listed[0].ts_ms if listed else 0
    rooms: dict[RoomID, _Room] = {}
    for event in listed:
        room = names.room(event.room)
        if room not in rooms:
            rooms[room] = _Room(event.room in live)
        if event.room not in live and event.kind in ("msg", "action"):
            rooms[room].touch(names.user(event.user), 0)
    messages = expected = 0
    for event in listed:
        place = rooms[names.room(event.room)]
        uin, at_ms = names.user(event.user), event.ts_ms - start
        place.expire(at_ms, idle_ms)
        if event.kind == "part":
            place.leave(uin, at_ms)
        elif event.kind == "nick":
            place.touch(names.user(event.to), at_ms)
            if names.user(event.to) != uin:
                place.leave(uin, at_ms)
        else:
            place.touch(uin, at_ms)
        if event.kind in ("msg", "action"):
            place.steps.append(Step(at_ms, Action.SEND, uin, messages, event.text.encode("utf-8", "replace")))
            messages += 1
            expected += len(place.active)
    inboxes = _inboxes(mentions, names, start, messages)
    chats = sum(len(steps) - 1 for steps in inboxes.values())
    played = {room: place.steps for room, place in rooms.items() if place.steps} | inboxes
    steps = [step for found in played.values() for step in found]
    return Plan(
        rooms=played,
        names=names,
        messages=messages + chats,
        chats=chats,
        joins=sum(step.action is Action.JOIN for step in steps),
        leaves=sum(step.action is Action.LEAVE for step in steps),
        expected=expected + chats,
        span_ms=max((step.at_ms for step in steps), default=0),
        users=len({step.uin for step in steps}),
    )


def _inboxes(mentions: Iterable[Mention], names: Names, start_ms: int, first: int) -> dict[RoomID, list[Step]]:
    found: dict[RoomID, list[Step]] = {}
    for number, mention in enumerate(mentions, start=first):
        to = names.user(mention.to)
        steps = found.setdefault(inbox_of(to), [Step(0, Action.JOIN, to)])
        names.room_names.setdefault(inbox_of(to), f"@{mention.to}")
        steps.append(Step(mention.ts_ms - start_ms, Action.SEND, names.user(mention.user), number, mention.text))
    return found
