"""The one contract of every core: an event goes in, effects come out, in the order in which they must happen. Pure.

                  step(event, now)
    shell ───────────────────────────▶ core          an event is a batch, never a message
          ◀───────────────────────────               an effect carries bytes to send
               [effect, effect, …]                   an acknowledgement comes after the effects that it acknowledges
          ◀───────────────────────────
                 next_deadline()                     time at which the core wants to be called even if nothing happens

A core owns no socket, no clock, no task and no randomness. Input from a link is an event, `RecordsReceived`; its outcome is an
effect, `Settle`, and never a counter that moved. `cluster.core.role` drives cores in processes, `tests/sim/` drives the same
cores in simulations.

Source: docs/architecture.md, "The contract"; python-hyper/h11 and aioquic (`docs/sources.md`) for protocols as pure cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from cluster.links.api import Outcome
from pixiu.ids import EndpointID
from pixiu.rpc import deadline_timer

NEVER: Final = deadline_timer.NEVER
"""The deadline of a core that waits for nothing."""

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT = TypeVar("EffectT")
KindT = TypeVar("KindT")


class Core(Protocol[EventT_contra, EffectT]):
    """Decides. A shell or a simulation drives it by `step` and `next_deadline` alone."""

    def step(self, event: EventT_contra, now: float, /) -> list[EffectT]:
        """Take one event; `now` is monotonic seconds. Returns the effects, in order."""

    def next_deadline(self) -> float:
        """Return the time at which a `Tick` is due, monotonic seconds; `NEVER` if the core waits for nothing."""


@dataclass(init=False, slots=True)
class RecordsReceived:
    """`count` records, end to end in data[start:end]. Answered by `Settle`; without one the outcome is TAKEN.

    It has an `__init__` of its own, as all have that a message passes: that is compiled, and a dataclass's is not.
    """

    peer: EndpointID
    data: bytes
    start: int
    end: int
    count: int

    def __init__(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> None:
        self.peer, self.data, self.start, self.end, self.count = peer, data, start, end, count


@dataclass(frozen=True, slots=True)
class Settle:
    """Outcome of this step's input, for its source (a link, a replica's log)."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that the core named has passed."""


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """All input of this turn of the event loop was handed over: items that wait to be joined leave now."""


@dataclass(init=False, slots=True)
class SendRecords:
    """A parcel of whole records for a peer. With a token other than 0 a `Settled` reports its outcome to the core.

    `urgent`: a publisher waits for the outcome. `more`: enough follows at once that this may wait for it, see `Links.send_records`.
    """

    peer: EndpointID
    records: list[bytes]
    lane: int
    token: int
    urgent: bool
    more: bool

    def __init__(
        self, peer: EndpointID, records: list[bytes], lane: int = 1, token: int = 0, urgent: bool = False, more: bool = False
    ) -> None:
        self.peer, self.records, self.lane, self.token, self.urgent, self.more = peer, records, lane, token, urgent, more


@dataclass(init=False, slots=True)
class SendControl:
    """Serialized `Control` messages for a peer. With a token other than 0 a `Settled` reports their outcome to the core."""

    peer: EndpointID
    messages: list[bytes]
    token: int

    def __init__(self, peer: EndpointID, messages: list[bytes], token: int = 0) -> None:
        self.peer, self.messages, self.token = peer, messages, token


@dataclass(init=False, slots=True)
class Settled:
    """Outcomes of parcels that were sent with a token: (token, True if the peer has handled all of it)."""

    parcels: list[tuple[int, bool]]

    def __init__(self, parcels: list[tuple[int, bool]]) -> None:
        self.parcels = parcels


TICK: Final = Tick()
TAKEN: Final = Settle(Outcome.TAKEN)
NOT_TAKEN: Final = Settle(Outcome.NOT_TAKEN)
MALFORMED: Final = Settle(Outcome.MALFORMED)
END_OF_TURN: Final = EndOfTurn()


class EventTable(Generic[EffectT]):
    """Maps events to a core's methods; most cores are such a table. Types are checked where a method is registered:
    `self.on(Tick, self._on_tick)`.

    A method gets (event, now, out) and appends its effects to `out`, so that a step makes one list in all.
    """

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[..., None]] = {}

    def on(self, kind: type[KindT], handler: Callable[[KindT, float, list[EffectT]], None]) -> None:
        """Register the method for an event; each event has one."""
        assert kind not in self._handlers, kind
        self._handlers[kind] = handler

    def step(self, event: object, now: float) -> list[EffectT]:
        """Pass an event to its method; `now` is monotonic seconds. Returns the effects that it appended, in order. KeyError is a
        bug: nobody registered the event."""
        out: list[EffectT] = []
        self._handlers[type(event)](event, now, out)
        return out
