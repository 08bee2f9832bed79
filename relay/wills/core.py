"""The core of a relay's wills: keeps those of its partition's users, and has gateways publish the ones that are due. Pure.

            gateway ─▶ SET ── ENDED ─────────────────────────▶ due ─▶ the owner asks a gateway ─▶ published ─▶ GONE
                        │                                       ▲
                        └── the gateway's run is over: the owner says ENDED to its peers ──┘

A run is over when the registry has shown no gateway of it for `gone_s`, or shows a later one of its instance: its clients are gone
for certain. Every replica of the partition keeps every will. The one that owns the user acts; the others send it what is overdue,
so that nothing waits because a message was lost or an owner is new. A will with a delay is dropped when its device is back.

Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import NEVER, EventTable, SendControl, Settled, Tick
from cluster.wills.will import Phase, State, Will, control_of, encode, state_of
from cluster.wire.v1 import control_pb2
from pixiu.ids import GATEWAY_GENERATION_BITS, EndpointID, gateway_run
from pixiu.placement.partition import rendezvous, rendezvous_order
from relay.wills import events as ev

MAX_BYTES: Final = 256 << 20
"""Limit of the wills of a partition. Policy: further ones are not kept, and die with their gateways."""
WILL_BYTES: Final = 300
"""Memory of a will beside its message, about."""
MAX_GONE: Final = 100_000
"""Wills that are known to be over, in each of two generations. Policy: the older generation is forgotten."""
AGREE_S: Final = 3.0
"""Time for peers to confirm that a will of a lost gateway is due, seconds."""
ASK_S: Final = 1.0
"""Time for a gateway to publish a will, seconds; then the next one is asked."""
OVERDUE_S: Final = 3.0
"""Time after which a replica sends an overdue will to its user's owner, again and again, seconds."""
KEPT_S: Final = 600.0
"""Time for which it does so, or for which an owner asks gateways, seconds. Policy: the will is dropped and counted."""
LOOK_S: Final = 0.5
"""Pause between two looks at the runs of gateways, seconds."""
ENDED_A_TICK: Final = 256
"""Wills of lost gateways that are looked at in one turn of the event loop."""


@dataclass(slots=True)
class Counters:
    """Counts since the start of the relay."""

    wills_of_lost_gateways: int = 0
    wills_published: int = 0
    """That this relay asked gateways for."""
    wills_client_back: int = 0
    """Delayed wills of devices that came back."""
    wills_refused: int = 0
    """Not kept: there was no space."""
    wills_of_others: int = 0
    """From a gateway that named another's run."""
    wills_dropped: int = 0
    """Given up: nobody published them in time."""


@dataclass(slots=True, eq=False)
class _Held:
    will: Will
    phase: Phase = Phase.SET
    over: bool = False
    """True once its gateway's run is over."""
    moved: bool = False
    """True once the device has a newer connection elsewhere."""
    message_id: int = 0
    due: float = NEVER
    """Time at which it is published, or was; `NEVER` while its connection lives."""
    asked: int = 0
    """Gateways that were asked."""
    untold: set[EndpointID] = field(default_factory=set)
    """Peers that have not confirmed yet that it is due."""


class Core(EventTable[SendControl]):
    """Decides; see the module.

    Args:
        endpoint: of this relay.
        gone_s: see `cluster.membership.map.instance_purge`.
        unix_ms: clock of SnowflakeIDs, Unix milliseconds.
        is_back: (UIN, device, run, whether the run is over) → True if the device is connected elsewhere than in that run.
    """

    def __init__(
        self, *, endpoint: EndpointID, gone_s: float, unix_ms: Callable[[], int], is_back: Callable[[int, int, int, bool], bool]
    ) -> None:
        super().__init__()
        self.counters = Counters()
        self.bytes = 0
        self.awaited: dict[tuple[int, int], list[int]] = {}
        """(UIN, device) → wills with a delay, which are not published if the device comes back before it is over."""
        self._endpoint, self._gone_s, self._unix_ms, self._is_back = endpoint, gone_s, unix_ms, is_back
        self._held: dict[int, _Held] = {}
        self._of_run: dict[int, dict[int, None]] = {}
        """Run → wills of its connections that have not ended."""
        self._absent: dict[int, float] = {}
        """Run → time since when the registry shows no gateway of it."""
        self._over: deque[int] = deque()
        """Wills of lost gateways that are to be looked at."""
        self._timers: list[tuple[float, int]] = []
        self._gone: list[dict[int, None]] = [{}, {}]
        self._cluster = ev.ClusterSeen()
        self._look_at = NEVER
        self._token = 1 << 62
        self._telling: dict[int, tuple[int, EndpointID]] = {}
        """Token → will, peer that learns that it is due."""
        self.on(ev.WillsReceived, self._on_wills)
        self.on(ev.WillPublished, self._on_published)
        self.on(ev.ClusterSeen, self._on_cluster)
        self.on(ev.DeviceCame, self._on_device)
        self.on(Settled, self._on_settled)
        self.on(Tick, self._on_tick)

    def __len__(self) -> int:
        return len(self._held)

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds."""
        if self._over:
            return 0.0
        return min(self._timers[0][0] if self._timers else NEVER, self._look_at)

    def _owner(self, uin: int) -> int | None:
        seen = self._cluster
        if not seen.owners or uin % seen.partitions != seen.partition % seen.partitions:
            return None
        return rendezvous(uin, seen.owners)

    def _peers(self) -> list[EndpointID]:
        return [EndpointID(owner) for owner in self._cluster.owners if owner != self._endpoint]

    # --- what gateways and peers report

    def _on_wills(self, event: ev.WillsReceived, now: float, out: list[SendControl]) -> None:
        for state in event.states:
            if event.run is not None and gateway_run(state.id) != event.run:
                self.counters.wills_of_others += 1
            elif state.id in self._gone[0] or state.id in self._gone[1]:
                if event.run is None and state.phase is not Phase.GONE:
                    self._say(event.peer, State(state.id, state.uin, state.device, Phase.GONE), out)
            elif state.phase is Phase.GONE:
                held = self._held.get(state.id)
                if held is not None and held.phase is Phase.ENDED and event.run is not None:
                    self._over_with(held, out)
                else:
                    self._forget(state.id)
            else:
                self._take(state, now, out)

    def _take(self, state: State, now: float, out: list[SendControl]) -> None:
        held = self._held.get(state.id)
        if held is None:
            will = state.will
            if will is None:
                return
            size = will.message.size + WILL_BYTES
            if self.bytes + size > MAX_BYTES:
                self.counters.wills_refused += 1
                return
            held = self._held[will.id] = _Held(will)
            self.bytes += size
            self._of_run.setdefault(will.run, {})[will.id] = None
            if will.delay_ms:
                self.awaited.setdefault((will.uin, will.device), []).append(will.id)
            self._look_at = min(self._look_at, now)
        if state.phase is Phase.ENDED and held.phase is Phase.ENDED and not held.asked:
            held.message_id = min(held.message_id, state.message_id)  # two believed to be the owner
        elif state.phase is Phase.ENDED and held.phase is Phase.SET:
            self._end(held, state.message_id, now + state.left_ms / 1000, now, out)

    def _end(self, held: _Held, message_id: int, due: float, now: float, out: list[SendControl]) -> None:
        will = held.will
        held.phase, held.message_id, held.due = Phase.ENDED, message_id, due
        self._leave_run(will)
        if held.moved:
            self._back(held, out)
            return
        heapq.heappush(self._timers, (due, will.id))

    def _on_device(self, event: ev.DeviceCame, now: float, out: list[SendControl]) -> None:
        for id_ in list(self.awaited.get((event.uin, event.device), ())):
            held = self._held[id_]
            if held.will.run == event.run:
                continue
            if held.phase is Phase.ENDED:
                self._back(held, out)
            elif event.newest or held.over:
                held.moved = True

    def _back(self, held: _Held, out: list[SendControl]) -> None:
        self.counters.wills_client_back += 1
        self._over_with(held, out)

    def _over_with(self, held: _Held, out: list[SendControl]) -> None:
        """Forget a will, and have the peers and the gateway that reported it forget it."""
        will = held.will
        self._forget(will.id)
        gateway = self._cluster.gateways.get(will.run)
        if gateway is not None:
            over = control_pb2.Control(will_published=control_pb2.WillPublished(id=will.id))
            out.append(SendControl(gateway, [over.SerializeToString()]))
        for peer in self._peers():
            self._say(peer, State(will.id, will.uin, will.device, Phase.GONE), out)

    def _forget(self, id_: int) -> None:
        if len(self._gone[0]) >= MAX_GONE:
            self._gone = [{}, self._gone[0]]
        self._gone[0][id_] = None
        held = self._held.pop(id_, None)
        if held is not None:
            self.bytes -= held.will.message.size + WILL_BYTES
            self._leave_run(held.will)
            self._await_no_more(held.will)

    def _leave_run(self, will: Will) -> None:
        found = self._of_run.get(will.run)
        if found is not None:
            found.pop(will.id, None)
            if not found:
                del self._of_run[will.run]
                self._absent.pop(will.run, None)

    def _await_no_more(self, will: Will) -> None:
        place = will.uin, will.device
        if will.id in self.awaited.get(place, ()):
            self.awaited[place].remove(will.id)
            if not self.awaited[place]:
                del self.awaited[place]

    # --- lost gateways

    def _on_cluster(self, event: ev.ClusterSeen, now: float, out: list[SendControl]) -> None:
        self._cluster = event
        peers = set(event.owners)
        for held in [self._held[id_] for id_, _ in self._telling.values() if id_ in self._held]:
            held.untold &= peers
        self._look(now)

    def _look(self, now: float) -> None:
        """Find runs that are over."""
        gateways = self._cluster.gateways
        highest: dict[int, int] = {}
        for run in gateways:
            instance = run >> GATEWAY_GENERATION_BITS
            highest[instance] = max(run, highest.get(instance, 0))
        for run in list(self._of_run):
            if run in gateways:
                self._absent.pop(run, None)
                continue
            since = self._absent.setdefault(run, now)
            if highest.get(run >> GATEWAY_GENERATION_BITS, 0) > run or now >= since + self._gone_s:
                self._over.extend(id_ for id_ in self._of_run[run] if not self._held[id_].over)
        self._look_at = now + LOOK_S if self._of_run else NEVER

    def _end_some(self, now: float, out: list[SendControl]) -> None:
        """End wills whose gateway is lost: the owner decides on the SnowflakeID, and has its peers know it before it acts."""
        for _ in range(min(ENDED_A_TICK, len(self._over))):
            held = self._held.get(self._over.popleft())
            if held is None or held.phase is not Phase.SET or held.over:
                continue
            held.over = True
            self.counters.wills_of_lost_gateways += 1
            heapq.heappush(self._timers, (now, held.will.id))

    def _decide(self, held: _Held, now: float, out: list[SendControl]) -> None:
        will = held.will
        delay_s = will.delay_ms / 1000
        self._end(held, will.message_id(self._unix_ms() + will.delay_ms), now + delay_s, now, out)
        if will.id not in self._held:
            return
        for peer in self._peers():
            self._token += 1
            self._telling[self._token] = will.id, peer
            held.untold.add(peer)
            state = state_of(will, Phase.ENDED, left_ms=will.delay_ms, message_id=held.message_id)
            out.append(SendControl(peer, [control_of([state])], self._token))

    def _on_settled(self, event: Settled, now: float, out: list[SendControl]) -> None:
        for token, handled in event.parcels:
            id_, peer = self._telling.pop(token, (0, EndpointID(0)))
            held = self._held.get(id_)
            if held is None:
                continue
            if not handled and now < held.due + AGREE_S and peer in self._cluster.owners:
                self._token += 1
                self._telling[self._token] = id_, peer
                left_ms = round((held.due - now) * 1000)
                state = state_of(held.will, Phase.ENDED, left_ms=left_ms, message_id=held.message_id)
                out.append(SendControl(peer, [control_of([state])], self._token))
                continue
            held.untold.discard(peer)
            if not held.untold and held.due <= now:
                heapq.heappush(self._timers, (now, id_))

    # --- what is due

    def _on_tick(self, event: Tick, now: float, out: list[SendControl]) -> None:
        if self._look_at <= now:
            self._look(now)
        self._end_some(now, out)
        while self._timers and self._timers[0][0] <= now:
            _, id_ = heapq.heappop(self._timers)
            held = self._held.get(id_)
            if held is not None:
                self._act(held, now, out)

    def _act(self, held: _Held, now: float, out: list[SendControl]) -> None:
        will, owner = held.will, self._owner(held.will.uin)
        if held.phase is Phase.SET:
            if owner == self._endpoint:
                self._decide(held, now, out)
            else:
                self._remind(held, owner, now, out)
            return
        if now > held.due + KEPT_S:
            self.counters.wills_dropped += 1
            self._forget(will.id)
        elif owner != self._endpoint:
            self._remind(held, owner, now, out)
        elif held.untold and now < held.due + AGREE_S:
            heapq.heappush(self._timers, (held.due + AGREE_S, will.id))
        elif will.delay_ms and not held.asked and self._is_back(will.uin, will.device, will.run, held.over):
            self._back(held, out)
        else:
            self._ask(held, now, out)

    def _ask(self, held: _Held, now: float, out: list[SendControl]) -> None:
        """Ask a gateway to publish: the one that had the connection, if it lives, then others."""
        will = held.will
        self._await_no_more(will)
        own = self._cluster.gateways.get(will.run)
        gateways = rendezvous_order(will.id, sorted(self._cluster.reachable))
        if own in gateways:
            gateways = [own, *(each for each in gateways if each != own)]
        heapq.heappush(self._timers, (now + ASK_S, will.id))
        if not gateways:
            return
        gateway = EndpointID(gateways[held.asked % len(gateways)])
        held.asked += 1
        state = encode(state_of(will, Phase.ENDED, message_id=held.message_id))
        out.append(SendControl(gateway, [control_pb2.Control(publish_will=state).SerializeToString()]))

    def _remind(self, held: _Held, owner: int | None, now: float, out: list[SendControl]) -> None:
        """Send what is overdue to the owner, after a while: it has done its part by then, or lacks the will."""
        if held.phase is Phase.SET and held.due == NEVER:
            held.due = now  # of a lost gateway, and the owner has not decided
        later = held.due + OVERDUE_S
        if now >= later:
            if owner is not None:
                left_ms = round((held.due - now) * 1000)
                self._say(
                    EndpointID(owner), state_of(held.will, held.phase, left_ms=left_ms, message_id=held.message_id), out
                )  # fmt: skip
            if now > held.due + KEPT_S:
                self.counters.wills_dropped += 1
                self._forget(held.will.id)
                return
            later = now + OVERDUE_S
        heapq.heappush(self._timers, (later, held.will.id))

    def _on_published(self, event: ev.WillPublished, now: float, out: list[SendControl]) -> None:
        held = self._held.get(event.id)
        if held is not None:
            self.counters.wills_published += 1
            self._over_with(held, out)

    def _say(self, peer: EndpointID, state: State, out: list[SendControl]) -> None:
        out.append(SendControl(peer, [control_of([state])]))
