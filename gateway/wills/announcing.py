"""Reports of wills to the relays of their users: to every replica of the partition, until it has confirmed them. Pure.

    said ─▶ waiting, by relay ─▶ in flight: one message of a will at a time ─▶ known
                ▲                        │
                └── lost, after a pause ─┘

A new relay gets all wills of its users.

Source: docs/delivery.md, "Wills".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cluster.core.contract import NEVER, SendControl
from cluster.wills.will import Phase, State, control_of
from gateway.events import Replica
from pixiu.ids import EndpointID
from pixiu.placement.partition import serves

WINDOW_BYTES: Final = 256 << 10
"""Bytes that one relay has not confirmed before the next will waits."""
MESSAGE_BYTES: Final = 1000
"""Wills share a message up to this size, so that small ones fill a datagram."""
STATE_BYTES: Final = 80
"""Size of a state without its message, about."""
SCAN_SLICE: Final = 500
"""Wills that are looked at for new relays in one turn of the event loop."""
REST_S: Final = 0.2
MAX_REST_S: Final = 5.0
"""First and last pause after a loss, seconds; it doubles."""


class Wills(Protocol):
    """The wills to report."""

    def ids(self) -> Iterable[int]:
        """All of them."""

    def user(self, id_: int) -> int | None:
        """The user of a will; None: it is over."""

    def phase(self, id_: int) -> Phase:
        """Its present phase."""

    def state(self, id_: int, whole: bool) -> State:
        """Its present state, with its message if `whole`."""


@dataclass(slots=True, eq=False)
class _Target:
    """A relay."""

    endpoint: EndpointID
    partition: int
    known: dict[int, Phase] = field(default_factory=dict)
    """Will → phase that it has confirmed."""
    waiting: dict[int, None] = field(default_factory=dict)
    flying: dict[int, Phase] = field(default_factory=dict)
    """Will → phase in flight."""
    doubted: set[int] = field(default_factory=set)
    """Wills of lost messages: it may know them."""
    scan: deque[int] = field(default_factory=deque)
    """Wills that may be new to it."""
    unconfirmed: int = 0
    losses: int = 0
    rest_until: float = 0.0


class Announcer:
    """Reports wills to relays. `confirmed` is called with a will and the phase that a relay has confirmed."""

    def __init__(self, wills: Wills, next_token: Callable[[], int], confirmed: Callable[[int, Phase], None]) -> None:
        self._wills, self._next_token, self._confirmed = wills, next_token, confirmed
        self._partitions = 0
        self._targets: dict[EndpointID, _Target] = {}
        self._parcels: dict[int, tuple[_Target, dict[int, Phase], int]] = {}
        """Token → relay, wills, size."""

    @property
    def has_relays(self) -> bool:
        """True if the cluster's layout has relays."""
        return self._partitions > 0

    def set_relays(self, partitions: int, replicas: tuple[Replica, ...]) -> None:
        """Set the relays; what is new to one of them waits."""
        wanted = {replica.endpoint: replica.partition for replica in replicas}
        regrouped = partitions != self._partitions
        self._partitions = partitions
        for endpoint in [endpoint for endpoint, target in self._targets.items() if wanted.get(endpoint) != target.partition]:
            del self._targets[endpoint]
        ids: list[int] | None = None
        for endpoint, partition in wanted.items():
            if endpoint in self._targets and not regrouped:
                continue
            ids = list(self._wills.ids()) if ids is None else ids
            self._targets.setdefault(endpoint, _Target(endpoint, partition)).scan = deque(ids)

    def said(self, id_: int, uin: int) -> None:
        """Note that a will has a new state."""
        for target in self._targets.values():
            if serves(target.partition, uin, self._partitions):
                target.waiting[id_] = None

    def is_over(self, id_: int) -> bool:
        """True if no relay has anything of a will, nor will get it."""
        return not any(id_ in target.known or id_ in target.flying or id_ in target.doubted for target in self._targets.values())

    def forget(self, id_: int) -> None:
        """Report nothing more of a will."""
        for target in self._targets.values():
            target.waiting.pop(id_, None)
            target.known.pop(id_, None)
            target.doubted.discard(id_)

    def settled(self, token: int, handled: bool, now: float) -> None:
        """Note whether a relay got a message."""
        parcel = self._parcels.pop(token, None)
        if parcel is None:
            return
        target, wills, size = parcel
        target.unconfirmed -= size
        target.losses = 0 if handled else target.losses + 1
        if not handled:
            target.rest_until = now + min(REST_S * 2 ** min(target.losses - 1, 10), MAX_REST_S)
        current = self._targets.get(target.endpoint) is target
        for id_, phase in wills.items():
            target.flying.pop(id_, None)
            if not handled:
                target.doubted.add(id_)
            else:
                target.doubted.discard(id_)
                target.known[id_] = phase
                if phase is Phase.GONE:
                    del target.known[id_]
            alive = self._wills.user(id_) is not None
            if alive and (not handled or self._wills.phase(id_) is not phase):
                target.waiting[id_] = None
            if handled and current:
                self._confirmed(id_, phase)
            if not alive:
                target.known.pop(id_, None)
                target.doubted.discard(id_)

    def flush(self, now: float, out: list[SendControl]) -> None:
        """Send what may leave."""
        for target in self._targets.values():
            self._scan(target)
            if target.waiting and target.rest_until <= now:
                self._send(target, out)

    def next_deadline(self) -> float:
        """Time at which `flush` has something to do, monotonic seconds."""
        deadline = NEVER
        for target in self._targets.values():
            if target.scan:
                return 0.0
            if target.losses and target.waiting and target.unconfirmed < WINDOW_BYTES:
                deadline = min(deadline, target.rest_until)
        return deadline

    def _scan(self, target: _Target) -> None:
        for _ in range(min(SCAN_SLICE, len(target.scan))):
            id_ = target.scan.popleft()
            uin = self._wills.user(id_)
            if uin is None or not serves(target.partition, uin, self._partitions):
                continue
            # What is due is the relays' matter once one has it: it may be over by now.
            if self._wills.phase(id_) is not Phase.ENDED or not any(
                other.known.get(id_) is Phase.ENDED for other in self._targets.values()
            ):
                target.waiting[id_] = None

    def _send(self, target: _Target, out: list[SendControl]) -> None:
        parcel: list[State] = []
        size = 0
        for id_ in list(target.waiting):
            if target.unconfirmed + size >= WINDOW_BYTES:
                break
            if id_ in target.flying:
                continue  # its next state follows when this one is settled
            del target.waiting[id_]
            if self._wills.user(id_) is None:
                continue
            phase = self._wills.phase(id_)
            if target.known.get(id_) is phase or (phase is Phase.GONE and id_ not in target.known and id_ not in target.doubted):
                continue
            state = self._wills.state(id_, id_ not in target.known and phase is not Phase.GONE)
            grown = STATE_BYTES + (state.message.size if state.message is not None else 0)
            if parcel and size + grown > MESSAGE_BYTES:
                self._parcel(target, parcel, size, out)
                parcel, size = [], 0
            parcel.append(state)
            target.flying[id_] = phase
            size += grown
        if parcel:
            self._parcel(target, parcel, size, out)

    def _parcel(self, target: _Target, states: list[State], size: int, out: list[SendControl]) -> None:
        token = self._next_token()
        self._parcels[token] = target, {state.id: state.phase for state in states}, size
        target.unconfirmed += size
        out.append(SendControl(target.endpoint, [control_of(states)], token))
