"""A Pi replica: its production core and state, over a dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pi.events as pe
from cluster.core.contract import END_OF_TURN, TICK
from cluster.replication.core.events import Persisted
from cluster.replication.model import Entry, Position
from cluster.store.events import Committed, LeaderChanged, Propose, Refused
from pi.inboxes.reading import Read
from pi.state import State
from pi.streams.streams import level_of, message_of, reads_of
from pixiu.errors import PixiuError, Refusal
from pixiu.ids import msg_lane
from pixiu.wire.inbox_operations import Limits
from pixiu.wire.v1 import pi_pb2
from tests.pi.memory import MemoryStore
from tests.sim.replication.disk import Disk
from tests.sim.system.base import Unlinked
from tests.sim.system.pi_doubler import Doubler
from tests.sim.system.replica import Kept, Replica
from tests.sim.system.streams import Stream

CLOCK_S = 1.0


class Machine:
    """See `tests.sim.system.replica.Machine`. What was not flushed is in the state's table alone."""

    def __init__(self, process: PiProcess, kept: Kept) -> None:
        self._process, self._kept = process, kept
        self._take(process.world.variant.state(kept.state))

    def _take(self, state: State) -> None:
        self.state = state
        state.copying.on_open = self._opened

    def _opened(self) -> None:
        self._process.doubler.opened()

    @property
    def position(self) -> Position:
        """See `Machine`."""
        return self.state.applied

    def apply(self, entries: Sequence[Entry]) -> Sequence[object]:
        """See `Machine`."""
        answers: list[object] = []
        for entry in entries:
            (results,) = self._process.world.mail.applying(self._process, entry, lambda entry=entry: self.state.apply([entry]))  # type: ignore[misc]
            answers.append(results)
            self._process.doubler.changed()
        return answers

    def rows(self) -> dict[bytes, bytes]:
        """All values."""
        found = dict(self._kept.state.values)
        for key, value in self.state.unstored().items():
            if value is None:
                found.pop(key, None)
            else:
                found[key] = value
        return found

    def flush(self) -> int:
        """See `Machine`."""
        self._kept.state.write(self.state.freeze())
        self.state.table.thawed()
        return self.position.counter

    def snapshot(self) -> object:
        """See `Machine`: everything was flushed just before."""
        return dict(self._kept.state.values)

    def load(self, snapshot: Any) -> None:
        """See `Machine`."""
        self._kept.state = MemoryStore()
        self._kept.state.values = dict(snapshot)
        self._take(self._process.world.variant.state(self._kept.state))
        self._process.doubler.changed()


class PiProcess(Unlinked):
    """One replica of a partition of Pi."""

    def start_core(self) -> None:
        """See `Process`."""
        place, world = self.place, self.world
        if place.kept is None:
            place.kept = Kept(Disk(), MemoryStore())
        kept: Kept = place.kept
        self._streams: dict[int, Stream] = {}
        self._number = 0
        self._requested_in_turn = False
        self.machine = Machine(self, kept)
        partition = world.partitions["pi", place.partition]
        self.doubler = Doubler(self)
        self.core = world.variant.pi(partition=place.partition, inboxes=self, limits=Limits(), clock_interval_s=CLOCK_S)
        self.replica = Replica(self, partition, place.number + 1, kept.disk, self.machine, self._led)
        self.doubler.changed(always=True)
        self.after(0.02, lambda: self.set_state("Running"))

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """See `Served`."""
        return {"Exchange": self._exchange, "Learn": self.doubler.learn}

    def on_view(self) -> None:
        """See `Process`."""
        addresses = {node.partition: "{}:{}".format(*node.address) for node in self.view.running("pi")}
        self.step(pe.LayoutChanged(self.view.version, self.view.count("pi"), addresses))

    def deadline(self) -> float:
        """See `Process`: the shell asks at least so often."""
        return min(self.replica.deadline(), max(self.core.next_deadline(), self._clock_not_before))

    _clock_not_before = 0.0

    def tick(self) -> None:
        """See `Process`."""
        now = self.world.now
        if now >= max(self.core.next_deadline(), self._clock_not_before):
            self._clock_not_before = now + 0.05
            self.step(TICK)
        self.replica.tick()

    def end_of_turn(self) -> None:
        """See `Process`."""
        if self._requested_in_turn:
            self._requested_in_turn = False
            self.step(END_OF_TURN)

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`."""
        self.replica.drain(done)

    def crash(self) -> None:
        """See `Process`."""
        super().crash()
        self.replica.crash()

    # --- streams

    def _exchange(self, stream: Stream) -> None:
        self._number += 1
        number = self._number
        self._streams[number] = stream
        stream.take = lambda request: self._requested(number, request)
        stream.left = lambda: self._left(number)

    def _requested(self, number: int, request: pi_pb2.PiRequest) -> None:
        if not self.core.epoch:
            self.step(LeaderChanged(0, self.replica.leader_address))
        self.step(pe.Requested(number, request.request, request.operations, level_of(request), reads_of(request)))
        self._requested_in_turn = True
        self.doubler.requested()

    def _left(self, number: int) -> None:
        self._streams.pop(number, None)
        self.step(pe.StreamClosed(number))

    # --- what the core reads

    def read(
        self, uin: int, number: int, lane: int, session: int, start: int | None, count: int, before: int = 0,
        devices: bool = False, notes: bool = False,
    ) -> Read:  # fmt: skip
        """See `pi.core.Inboxes`."""
        return self.machine.state.read(uin, number, lane, session, start, count, before, devices=devices)

    def stored(self, msg_id: int, uin: int) -> int:
        """See `pi.core.Inboxes`."""
        return self.machine.state.inboxes.number_of(uin, msg_lane(msg_id), msg_id)

    def may_grow(self) -> bool:
        """See `pi.core.Inboxes`."""
        return True

    def may_read(self) -> bool:
        """See `pi.core.Inboxes`."""
        return self.replica.may_read()

    # --- the core

    def _led(self, epoch: int) -> None:
        if epoch:
            self.doubler.leading()
        self.step(LeaderChanged(epoch))
        if not epoch:
            self.doubler.deposed()

    def step(self, event: pe.Event) -> None:
        """Give the core an event and do what it asks for."""
        if not self.alive:
            return
        for effect in self.core.step(event, self.world.now):
            match effect:
                case Propose():
                    self._propose(effect)
                case pe.Reply(stream):
                    found = self._streams.get(stream)
                    if found is not None:
                        found.reply(message_of(effect))

    def _propose(self, effect: Propose) -> None:
        first = [0]

        def applied(answers: list[Any], copies: int) -> None:
            self.step(Committed(first[0], answers, copies))

        try:
            verdict = self.replica.submit(effect.payloads, effect.replicated, lambda: self.step(Persisted(first[0])), applied)
        except PixiuError as error:
            self.step(Refused(effect.token, Refusal.of(error)))
        else:
            first[0] = verdict.first
            self.step(replace(verdict, token=effect.token))
