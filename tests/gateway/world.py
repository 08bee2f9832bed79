"""Drives a gateway's core turn by turn, and makes the `Clients` that connections need."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import TypeVar

from cluster.links.api import Outcome
from cluster.membership.lww_map import Update
from cluster.runtime.contract import END_OF_TURN, RecordsReceived, Settle
from gateway import events as ev
from gateway.clients import Clients
from gateway.core import Core
from gateway.options import Options
from gateway.publishing import Confirmable
from pixiu.ids import EndpointID, SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.wire.envelope import Envelope, encode, envelopes
from pixiu.wire.record import MAX_RECORD_BYTES

PEER = EndpointID(301)
"""A broker or relay that sends records."""
KindT = TypeVar("KindT")


def of(kind: type[KindT], effects: list[ev.Effect]) -> list[KindT]:
    """The effects of a kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def turn(core: Core, *events: ev.Event, now: float = 1.0) -> list[ev.Effect]:
    """The effects of these events and of the end of the turn in which they come."""
    return [effect for event in (*events, END_OF_TURN) for effect in core.step(event, now)]


def hand_over(core: Core, data: bytes, count: int = 1, now: float = 2.0) -> Outcome:
    """What becomes of a batch that a link hands over."""
    for effect in core.step(RecordsReceived(PEER, data, 0, len(data), count), now):
        assert isinstance(effect, Settle), "what is delivered waits for the end of the turn"
        return effect.outcome
    return Outcome.TAKEN


def arrive(core: Core, *records: bytes, now: float = 2.0) -> list[ev.Effect]:
    """The effects of a turn in which one batch of these records comes."""
    assert hand_over(core, b"".join(records), len(records), now) is Outcome.TAKEN
    return core.step(END_OF_TURN, now)


def fan_out(core: Core, *records: bytes) -> list[ev.Deliver]:
    """What of such a turn is delivered."""
    return of(ev.Deliver, arrive(core, *records))


def memberships(effects: list[ev.Effect]) -> list[ev.SendMembership]:
    """Without the second times, which nobody waits for."""
    return [effect for effect in of(ev.SendMembership, effects) if effect.token]


def updates(effects: list[ev.Effect]) -> list[Update]:
    """What is reported, the second times included."""
    return [update for effect in of(ev.SendMembership, effects) for update in effect.messages]


def enveloped(msg_id: int, seq: int, uin: int, session: int, device: int, lane: int, flags: int, record: bytes) -> Envelope:
    """A delivery as a relay sends it, read in place."""
    (found,) = envelopes(encode(msg_id, seq, uin, session, device, lane, flags, record), 1)
    return found


@dataclass
class World:
    """`Clients` without a service: what their connections do is noted."""

    options: Options = field(default_factory=Options)
    now: float | None = None
    """Monotonic seconds; None: the clock's."""
    vrooms: VRooms = field(default_factory=VRooms)
    roles: tuple[str, ...] = ("gateway", "proxy", "router", "broker")

    def __post_init__(self) -> None:
        self.events: list[ev.Event] = []
        self.published: list[Confirmable] = []
        self._snowflakes = itertools.count(1)
        self.clients = Clients(
            self.options,
            now=lambda: time.monotonic() if self.now is None else self.now,
            step=self.events.append,
            next_snowflake=lambda: SnowflakeID(next(self._snowflakes)),
            publish_confirmed=self.published.append,
            roles=lambda: self.roles,
            endpoint=EndpointID(7),
            max_record_bytes=MAX_RECORD_BYTES,
            vrooms=self.vrooms,
            through_relays=False,
        )

    @property
    def closed_for(self) -> list[str]:
        """Reasons for which connections were closed."""
        return list(self.clients.closed_by_reason.elements())
