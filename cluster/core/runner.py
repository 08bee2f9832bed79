"""Runs cores: performs their effects by a table, keeps their timers and the ends of their turns.

    link, stream, view, timer ──▶ Runner.step(event) ──▶ core.step ──▶ effects ──▶ performs[type(effect)]
                                        │
                                        ├── once at the end of the event loop's turn: `EndOfTurn`, where the core wants it
                                        └── the timer: `Tick` at core.next_deadline()

Source: docs/architecture.md, "The contract".
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, TypeVar

from cluster.core.contract import Core, SendControl, SendRecords, Settle
from cluster.links.api import Links, Outcome
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.rpc.turn_loop import call_at_end

MIN_TICK_S: Final = 0.001
"""Shortest delay of a timer: no event loop is more exact."""

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
KindT = TypeVar("KindT")


class Effects(Generic[EffectT]):
    """Maps effects to the functions that perform them. Types are checked where one is registered: `effects.on(Reply,
    self._reply)`."""

    def __init__(self) -> None:
        self.performs: dict[type, Callable[..., None]] = {}

    def on(self, kind: type[KindT], perform: Callable[[KindT], None]) -> None:
        """Register the function for an effect; each effect has one."""
        assert kind not in self.performs, kind
        self.performs[kind] = perform


class Runner(Generic[EventT, EffectT]):
    """Drives one core: steps it, performs its effects, keeps its timer.

    Args:
        core: None until there is one (a gateway needs its lease first); events before that are dropped.
        now: monotonic seconds.
        tick: makes the event of the timer; None for a core without deadlines.
        end_of_turn: makes the event that joins the input of one turn of the event loop; None for a core that joins nothing.
        performed: called after the effects of a step that has some, to flush once for all of them.
    """

    def __init__(
        self,
        core: Core[EventT, EffectT] | None,
        now: Callable[[], float],
        *,
        tick: EventT | None = None,
        end_of_turn: EventT | None = None,
        performed: Callable[[], None] | None = None,
    ) -> None:
        self.core = core
        self.effects: Effects[EffectT] = Effects()
        self._performs = self.effects.performs
        self._performs[Settle] = self._settle
        self._now, self.performed = now, performed
        self._tick_event, self._end_of_turn = tick, end_of_turn
        self._timer = DeadlineTimer(self._tick, MIN_TICK_S)
        self._turn: asyncio.Handle | None = None
        self._turn_awaited = False
        """True if the turn ends with the input of the links."""
        self._links: Links | None = None
        self._outcome = Outcome.TAKEN
        self._stopped = False
        self.performing = False
        """True while effects are performed; `performed` follows."""
        self._behind: deque[EventT] = deque()
        """Events that arose while effects were performed."""

    def step(self, event: EventT, *, timed: bool = True) -> None:
        """Pass an event to the core and perform the effects it returns. Does nothing after `stop`.

        An event that arises while effects are performed waits until they all are: effects keep their order. `timed=False`: the
        event moves no deadline (a batch of records that is only passed on), so the core is not asked for one.
        """
        core = self.core
        if core is None or self._stopped:
            return
        behind = self._behind
        if self.performing:
            behind.append(event)
            return
        performs, performed = self._performs, False
        self.performing = True
        try:
            for effect in core.step(event, self._now()):
                performs[type(effect)](effect)
                performed = True
            while behind and not self._stopped:
                for effect in core.step(behind.popleft(), self._now()):
                    performs[type(effect)](effect)
                    performed = True
        finally:
            self.performing = False
        if performed and self.performed is not None:
            self.performed()
        if self._end_of_turn is not None and event is not self._end_of_turn:
            if self._turn is None and not self._turn_awaited:
                self.end_turn_soon()
        elif timed and self._tick_event is not None:
            deadline = core.next_deadline()
            if deadline < self._timer.when:
                self._timer.set(deadline)

    def take(self, event: EventT, *, timed: bool = True) -> Outcome:
        """Pass an event from a link to the core. Returns the core's outcome; NOT_TAKEN while there is no core."""
        if self.core is None or self._stopped:
            return Outcome.NOT_TAKEN
        assert not self.performing, "what is handed over is answered now, and not behind other effects"
        self._outcome = Outcome.TAKEN
        self.step(event, timed=timed)
        return self._outcome

    def end_turn_soon(self) -> None:
        """Have the core's `EndOfTurn` come when this turn of the event loop ends."""
        if self._turn is not None or self._turn_awaited:
            return
        if self._links is not None and self._links.at_end_of_input(self._end_turn):
            self._turn_awaited = True
        else:
            self._turn = call_at_end(self._end_turn)

    def stop(self) -> None:
        """Cancel the timer and the turn; the core takes no more events."""
        self._stopped = True
        self._timer.cancel()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def send_by(self, links: Links) -> None:
        """Perform `SendRecords` and `SendControl` by these links."""
        self._links = links
        records, control = links.send_records, links.send_control

        def send_records(effect: SendRecords) -> None:
            records(effect.peer, effect.records, effect.lane, effect.token, effect.urgent, effect.more)

        def send_control(effect: SendControl) -> None:
            control(effect.peer, effect.messages, effect.token)

        self.effects.on(SendRecords, send_records)
        self.effects.on(SendControl, send_control)

    def _settle(self, effect: Settle) -> None:
        self._outcome = effect.outcome

    def _tick(self) -> None:
        if self._tick_event is not None:
            self.step(self._tick_event)

    def _end_turn(self) -> None:
        event, links, in_input = self._end_of_turn, self._links, self._turn_awaited
        self._turn, self._turn_awaited = None, False
        if event is None:
            return
        if links is None or in_input:
            self.step(event)
        else:
            # Its output leaves at once, with the links' own.
            links.in_turn(partial(self.step, event))
