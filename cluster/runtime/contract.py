"""The one contract of every core: an event goes in, effects come out, in the order in which they must happen. Pure.

                  step(event, now)
    shell ───────────────────────────▶ core          an event is a batch, never a message
          ◀───────────────────────────               an effect carries bytes to send
               [effect, effect, …]                   an acknowledgement stands behind what it acknowledges
          ◀───────────────────────────
                 next_deadline()                     when the core wants to be called although nothing happened

A core owns no socket, no clock, no task and no randomness. What a link hands over is an event, `RecordsReceived`; what became
of it is an effect, `Settle`, and never a counter that moved. `cluster.runtime.role` drives cores in processes,
`tests/sim/` drives the same cores in simulations.

Source: docs/architecture.md, "The contract"; python-hyper/h11 and aioquic (`docs/sources.md`) for protocols as pure cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Final, Generic, Protocol, TypeVar

from cluster.links.api import Outcome
from pixiu.ids import EndpointID

NEVER: Final = inf
"""The deadline of a core that waits for nothing."""

EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT = TypeVar("EffectT")
KindT = TypeVar("KindT")


class Core(Protocol[EventT_contra, EffectT]):
    """What decides. `step` and `next_deadline` are all that a shell or a simulation calls to make it move."""

    def step(self, event: EventT_contra, now: float, /) -> list[EffectT]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""

    def next_deadline(self) -> float:
        """When a `Tick` is due, monotonic seconds; `NEVER` when the core waits for nothing."""


@dataclass(slots=True)
class RecordsReceived:
    """`count` records lie end to end in data[start:end]. Answered by `Settle`; without one it was taken.

    Not frozen, like `SendRecords`: to make a frozen one costs a quarter of a microsecond more, and there is one a batch.
    """

    peer: EndpointID
    data: bytes
    start: int
    end: int
    count: int


@dataclass(frozen=True, slots=True)
class Settle:
    """Tells who handed something over in this step (a link, a replica's log) what became of it."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that the core named has come."""


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """Everything that came in this turn of the event loop was handed over: what waits to be joined leaves now."""


@dataclass(slots=True)
class SendRecords:
    """A parcel of whole records for a peer. With a token other than 0 the core is told by `Settled` what became of it.

    `urgent`: a publisher waits for that. `more`: so much follows at once that this may wait for it, see `Links.send_records`.
    """

    peer: EndpointID
    records: list[bytes]
    lane: int = 1
    token: int = 0
    urgent: bool = False
    more: bool = False


@dataclass(frozen=True, slots=True)
class SendControl:
    """Serialized `Control` messages for a peer. With a token other than 0 the core is told by `Settled` what became of them."""

    peer: EndpointID
    messages: list[bytes]
    token: int = 0


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of parcels that were sent with a token: (token, whether the peer has handled all of it)."""

    parcels: list[tuple[int, bool]]


TICK: Final = Tick()
TAKEN: Final = Settle(Outcome.TAKEN)
NOT_TAKEN: Final = Settle(Outcome.NOT_TAKEN)
MALFORMED: Final = Settle(Outcome.MALFORMED)
END_OF_TURN: Final = EndOfTurn()


class EventTable(Generic[EffectT]):
    """Which method of a core takes which event. Types are checked where a method is entered: `table.on(Tick, self._on_tick)`.

    A method gets (event, now, out) and appends its effects to `out`, so that a step makes one list whatever it calls.
    """

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[..., None]] = {}

    def on(self, kind: type[KindT], handler: Callable[[KindT, float, list[EffectT]], None]) -> None:
        """Enter a method for an event; each event has one."""
        assert kind not in self._handlers, kind
        self._handlers[kind] = handler

    def step(self, event: object, now: float) -> list[EffectT]:
        """Give the event to its method; returns what that appended. KeyError is a bug: an event that nobody entered."""
        out: list[EffectT] = []
        self._handlers[type(event)](event, now, out)
        return out
