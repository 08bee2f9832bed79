"""The core of a gateway's wills: reports them to relays, and has them published when they are due. Pure.

    SetWill ─▶ SET ── EndWill(publish) ─▶ ENDED ─▶ a relay has it: its owner asks a gateway to publish it when it is due
                │                           │
                │                           └─▶ no relay takes it: this gateway publishes it, `PATIENCE_S` after it was due
                └── EndWill, the device is back here ─▶ GONE, once all relays have confirmed that

Relays decide about wills that are due, because they outlive this gateway and see devices that are back at another one. A will has
one SnowflakeID, whoever has it published, so repeats are dropped where messages are delivered.

Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import NEVER, EndOfTurn, EventTable, SendControl, Settled, Tick
from cluster.wills.will import Phase, State, Will, state_of
from cluster.wire.v1 import control_pb2
from gateway.events import EndWill, RelaysChanged, SetWill
from gateway.wills import events as ev
from gateway.wills.announcing import Announcer
from pixiu.ids import EndpointID, gateway_msg_id

MAX_BYTES: Final = 256 << 20
"""Limit of the wills of all connections. Policy: further ones are not kept, and counted."""
PATIENCE_S: Final = 2.0
"""Time for relays to take a will that is due, seconds; then this gateway publishes it."""
KEPT_S: Final = 30.0
"""Time for which a will that a relay has is kept after it was due, for relays that come later, seconds."""
MAX_JOBS: Final = 10_000
"""Wills that are being published. Policy: relays' questions beyond it are not taken, and repeated."""
FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
"""First and last pause before a will is published again after a failure, seconds; it doubles."""
MAX_TRIES: Final = 20
FIRST_TOKEN: Final = 1 << 62
"""The tokens of this core's parcels are above those of the gateway's core."""


@dataclass(slots=True)
class Counters:
    """Counts since the start of the gateway."""

    wills_set: int = 0
    wills_refused: int = 0
    """Not kept: there was no space."""
    wills_ended: int = 0
    """Connections that ended and left a will."""
    wills_published: int = 0
    """Published here, also for relays."""
    wills_client_back: int = 0
    """Delayed wills of devices that came back to this gateway."""
    wills_failed: int = 0
    """Given up."""


@dataclass(slots=True, eq=False)
class _Held:
    will: Will
    connection: int
    phase: Phase = Phase.SET
    replaced: bool = False
    """True once the device has a newer connection here."""
    due: float = NEVER
    message_id: int = 0
    handed: bool = False
    """True once a relay has confirmed that it is due."""


@dataclass(slots=True, eq=False)
class _Job:
    """A will that is being published."""

    will: Will
    message_id: int
    relays: set[EndpointID] = field(default_factory=set)
    """Relays that asked for it."""
    tries: int = 1
    again_at: float = NEVER


class Core(EventTable[ev.Effect]):
    """Decides; see the module.

    Args:
        instance, generation: of this gateway.
        unix_ms: clock of SnowflakeIDs, Unix milliseconds.
    """

    def __init__(self, *, instance: int, generation: int, unix_ms: Callable[[], int]) -> None:
        super().__init__()
        self.counters = Counters()
        self.bytes = 0
        self._identity, self._unix_ms = (instance, generation), unix_ms
        self._counter, self._token, self._now = 0, FIRST_TOKEN, 0.0
        self._held: dict[int, _Held] = {}
        self._of: dict[int, int] = {}
        """Connection → its will."""
        self._delayed: dict[tuple[int, int], list[int]] = {}
        """(UIN, device) → wills with a delay, until it is over."""
        self._due: list[tuple[float, int]] = []
        self._jobs: dict[int, _Job] = {}
        self._announcer = Announcer(self, self._next_token, self._confirmed)
        self.on(SetWill, self._on_set)
        self.on(EndWill, self._on_end)
        self.on(ev.DeviceOpened, self._on_opened)
        self.on(ev.WillAsked, self._on_asked)
        self.on(ev.WillDone, self._on_done)
        self.on(ev.WillOver, self._on_over)
        self.on(RelaysChanged, self._on_relays)
        self.on(Settled, self._on_settled)
        self.on(Tick, self._on_tick)
        self.on(EndOfTurn, self._on_end_of_turn)

    def __len__(self) -> int:
        return len(self._held)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        deadline = min(self._due[0][0] if self._due else NEVER, self._announcer.next_deadline())
        for job in self._jobs.values():
            deadline = min(deadline, job.again_at)
        return deadline

    @property
    def unfinished(self) -> int:
        """Number of wills that would be lost with this process: not with a relay, or being published."""
        ended = [held for held in self._held.values() if held.phase is Phase.ENDED and not held.handed]
        return len(ended) + len(self._jobs)

    # --- for the announcer

    def ids(self) -> Iterable[int]:
        """See `Wills`."""
        return self._held

    def user(self, id_: int) -> int | None:
        """See `Wills`."""
        held = self._held.get(id_)
        return None if held is None else held.will.uin

    def phase(self, id_: int) -> Phase:
        """See `Wills`."""
        return self._held[id_].phase

    def state(self, id_: int, whole: bool) -> State:
        """See `Wills`."""
        held = self._held[id_]
        left_ms = round((held.due - self._now) * 1000) if held.phase is Phase.ENDED else 0
        return state_of(held.will, held.phase, left_ms=left_ms, message_id=held.message_id, whole=whole)

    def _next_token(self) -> int:
        self._token += 1
        return self._token

    # --- connections

    def _on_set(self, event: SetWill, now: float, out: list[ev.Effect]) -> None:
        self._take_back(event.connection)
        if self.bytes + event.message.size > MAX_BYTES:
            self.counters.wills_refused += 1
            return
        self._counter += 1
        id_ = gateway_msg_id(*self._identity, self._counter)
        self._held[id_] = _Held(Will(id_, event.uin, event.device, event.delay_ms, event.message), event.connection)
        if event.delay_ms:
            self._delayed.setdefault((event.uin, event.device), []).append(id_)
        self._of[event.connection] = id_
        self.bytes += event.message.size
        self.counters.wills_set += 1
        self._announcer.said(id_, event.uin)

    def _on_end(self, event: EndWill, now: float, out: list[ev.Effect]) -> None:
        if not event.publish:
            self._take_back(event.connection)
            return
        id_ = self._of.pop(event.connection, None)
        if id_ is None:
            return
        held = self._held[id_]
        if held.replaced:
            self.counters.wills_client_back += 1
            self._gone(id_)
            return
        will, held.phase = held.will, Phase.ENDED
        held.due = now + will.delay_ms / 1000
        held.message_id = will.message_id(self._unix_ms() + will.delay_ms)
        self.counters.wills_ended += 1
        self._announcer.said(id_, will.uin)
        self._wait(id_, held.due + (PATIENCE_S if self._announcer.has_relays else 0.0))

    def _on_opened(self, event: ev.DeviceOpened, now: float, out: list[ev.Effect]) -> None:
        for id_ in list(self._delayed.get((event.uin, event.device), ())):
            held = self._held[id_]
            if held.phase is Phase.ENDED:
                self.counters.wills_client_back += 1
                self._gone(id_)
            else:
                held.replaced = held.connection != event.connection

    def _take_back(self, connection: int) -> None:
        id_ = self._of.pop(connection, None)
        if id_ is not None:
            self._gone(id_)

    def _gone(self, id_: int) -> None:
        """Have relays forget a will, then forget it."""
        held = self._held.get(id_)
        if held is None or held.phase is Phase.GONE:
            return
        self._undelay(held.will)
        held.phase = Phase.GONE
        self._announcer.said(id_, held.will.uin)
        if self._announcer.is_over(id_):
            self._forget(id_)

    def _forget(self, id_: int) -> None:
        held = self._held.pop(id_)
        self.bytes -= held.will.message.size
        self._undelay(held.will)
        self._announcer.forget(id_)

    def _undelay(self, will: Will) -> None:
        place = will.uin, will.device
        if will.id in self._delayed.get(place, ()):
            self._delayed[place].remove(will.id)
            if not self._delayed[place]:
                del self._delayed[place]

    # --- publishing

    def _wait(self, id_: int, until: float) -> None:
        heapq.heappush(self._due, (until, id_))

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        while self._due and self._due[0][0] <= now:
            _, id_ = heapq.heappop(self._due)
            held = self._held.get(id_)
            if held is None or held.phase is not Phase.ENDED:
                continue
            self._undelay(held.will)
            if not held.handed:
                self._publish(held.will, held.message_id, None, out)
            elif now < held.due + KEPT_S:
                self._wait(id_, held.due + KEPT_S)
            else:
                self._forget(id_)
        for job in self._jobs.values():
            if job.again_at <= now:
                job.again_at = NEVER
                job.tries += 1
                out.append(ev.PublishWill(job.will, job.message_id))

    def _on_asked(self, event: ev.WillAsked, now: float, out: list[ev.Effect]) -> None:
        if event.will.id in self._jobs or len(self._jobs) < MAX_JOBS:
            self._publish(event.will, event.message_id, event.relay, out)

    def _on_over(self, event: ev.WillOver, now: float, out: list[ev.Effect]) -> None:
        held = self._held.get(event.id)
        if held is not None and held.phase is Phase.ENDED:
            self._gone(event.id)

    def _publish(self, will: Will, message_id: int, relay: EndpointID | None, out: list[ev.Effect]) -> None:
        job = self._jobs.get(will.id)
        if job is None:
            job = self._jobs[will.id] = _Job(will, message_id)
            out.append(ev.PublishWill(will, message_id))
        if relay is not None:
            job.relays.add(relay)

    def _on_done(self, event: ev.WillDone, now: float, out: list[ev.Effect]) -> None:
        job = self._jobs.get(event.id)
        if job is None:
            return
        if event.again and job.tries < MAX_TRIES:
            job.again_at = now + min(FIRST_PAUSE_S * 2 ** min(job.tries - 1, 10), MAX_PAUSE_S)
            return
        del self._jobs[event.id]
        if event.again:
            self.counters.wills_failed += 1
        else:
            self.counters.wills_published += 1
        answer = control_pb2.Control(will_published=control_pb2.WillPublished(id=event.id)).SerializeToString()
        out += [SendControl(relay, [answer]) for relay in sorted(job.relays)]
        self._gone(event.id)

    # --- relays

    def _on_relays(self, event: RelaysChanged, now: float, out: list[ev.Effect]) -> None:
        self._announcer.set_relays(event.partitions, event.replicas)

    def _on_settled(self, event: Settled, now: float, out: list[ev.Effect]) -> None:
        for token, handled in event.parcels:
            if token > FIRST_TOKEN:
                self._announcer.settled(token, handled, now)

    def _confirmed(self, id_: int, phase: Phase) -> None:
        held = self._held.get(id_)
        if held is None:
            return
        if phase is Phase.ENDED:
            held.handed = True
        elif held.phase is Phase.GONE and self._announcer.is_over(id_):
            self._forget(id_)

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        self._now = now
        sent: list[SendControl] = []
        self._announcer.flush(now, sent)
        out += sent
