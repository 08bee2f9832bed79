"""Streams between processes, and between clients and processes: duplex, in order, and gone with either end or by the seed.

What is under way when a stream breaks is lost; each end learns of it in its own time. A message is fed into the trace of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

if TYPE_CHECKING:
    from tests.sim.cluster.process import Process
    from tests.sim.cluster.wire import Wire

CONNECT_S: Final = (0.002, 0.02)
TOLD_S: Final = 0.02
"""After a break each end hears of it within so long."""
UNANSWERED_S: Final = 0.5
"""A process that does not accept, or a host out of reach."""
BREAK: Final = 1 / 1500
"""Probability that a message finds its stream broken."""

Take = Callable[[Any], None]


class Stream:
    """One stream. Each end sets what is called with messages, and when it is gone.

    Args:
        streams: of the world.
        caller: None for a client.
        callee: the process that accepted it.
        method: what was called.
    """

    def __init__(self, streams: Streams, caller: Process | None, callee: Process, method: str) -> None:
        self._streams = streams
        self.caller, self.callee, self.method = caller, callee, method
        self.open = True
        self.take_reply: Take = lambda message: None
        self.lost: Callable[[], None] = lambda: None
        """For the caller: it broke, or the callee ended it. Not called after `leave`."""
        self.take: Take = lambda message: None
        self.left: Callable[[], None] = lambda: None
        """For the callee: it broke, or the caller left."""
        self._told_caller = self._told_callee = False
        self._last = [0.0, 0.0]

    def send(self, message: object) -> None:
        """From the caller."""
        self._pass(0, message)

    def reply(self, message: object) -> None:
        """From the callee."""
        self._pass(1, message)

    def leave(self) -> None:
        """The caller wants it no longer: it hears nothing more, and the callee hears of it behind what was sent."""
        self._told_caller = True
        self._at(0, self._callee_left)

    def end(self) -> None:
        """The callee ends it, behind what it replied."""
        self._told_callee = True
        self._at(1, self._caller_lost)

    def break_off(self) -> None:
        """What is under way is lost."""
        if self.open:
            self.open = False
            self._streams.forget(self)
            after, chance = self._streams.wire.after, self._streams.wire.rng
            after(chance.uniform(0.0, TOLD_S), self._caller_lost)
            after(chance.uniform(0.0, TOLD_S), self._callee_left)

    def _pass(self, way: int, message: object) -> None:
        if not self.open:
            return
        streams = self._streams
        if streams.apart(self) or streams.wire.chance(BREAK):
            streams.broken += 1
            self.break_off()
            return
        self._at(way, lambda: self._arrive(way, message))

    def _at(self, way: int, action: Callable[[], None]) -> None:
        if not self.open:
            return
        wire = self._streams.wire
        when = self._last[way] = max(self._last[way], wire.now + wire.hop())
        wire.after(when - wire.now, lambda: action() if self.open else None)

    def _arrive(self, way: int, message: object) -> None:
        streams = self._streams
        streams.note(self.method, way, message)
        if way == 0 and not self._told_callee:
            self.callee.do(lambda: self.take(message) if not self._told_callee else None)
        elif way == 1 and not self._told_caller:
            self._do_caller(lambda: self.take_reply(message) if not self._told_caller else None)

    def _do_caller(self, action: Callable[[], None]) -> None:
        if self.caller is not None:
            self.caller.do(action)
        else:
            action()

    def _caller_lost(self) -> None:
        def tell() -> None:
            if not self._told_caller:
                self._told_caller = True
                self._drop()
                self.lost()

        self._do_caller(tell)

    def _callee_left(self) -> None:
        def tell() -> None:
            if not self._told_callee:
                self._told_callee = True
                self._drop()
                self.left()

        self.callee.do(tell)

    def _drop(self) -> None:
        self.open = False
        self._streams.forget(self)


class Streams:
    """All streams of a world."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._open: dict[Stream, None] = {}
        self.broken = self.messages = 0

    def call(
        self,
        caller: Process | None,
        address: tuple[str, int],
        method: str,
        opened: Callable[[Stream], None],
        failed: Callable[[], None],
    ) -> None:
        """Open a stream to whoever is at an address: `opened` or `failed` follows, in a turn of the caller."""
        wire = self.wire

        def tell(action: Callable[[], None]) -> None:
            if caller is not None:
                caller.do(action)
            else:
                action()

        def connect() -> None:
            if caller is not None and not caller.alive:
                return
            callee: Any = wire.hosts.get(address)
            cut = caller is not None and (wire.is_cut(caller.address, address) or wire.is_cut(address, caller.address))
            if callee is None or not callee.alive or cut or method not in getattr(callee, "methods", {}):
                wire.after(UNANSWERED_S if cut else 0.0, lambda: tell(failed))
                return
            stream = Stream(self, caller, callee, method)
            self._open[stream] = None
            callee.do(lambda: callee.methods[method](stream))
            tell(lambda: opened(stream))

        wire.after(wire.rng.uniform(*CONNECT_S), connect)

    def forget(self, stream: Stream) -> None:
        """It is gone."""
        self._open.pop(stream, None)

    def break_of(self, process: Process, method: str = "") -> None:
        """All streams of a process, or those of one method: what was under way is lost."""
        for stream in [s for s in self._open if process in (s.caller, s.callee) and method in ("", s.method)]:
            stream.break_off()

    def break_one(self, choose: Callable[[list[Stream]], Stream]) -> None:
        """One that is chosen."""
        if self._open:
            self.broken += 1
            choose(list(self._open)).break_off()

    def apart(self, stream: Stream) -> bool:
        """Whether nothing passes between the hosts of its ends."""
        if stream.caller is None:
            return False
        one, other = stream.caller.address, stream.callee.address
        return self.wire.is_cut(one, other) or self.wire.is_cut(other, one)

    def note(self, method: str, way: int, message: object) -> None:
        """Feed what arrives into the trace."""
        self.messages += 1
        data = message.SerializeToString(deterministic=True) if isinstance(message, Message) else repr(message).encode()
        self.wire.note(b"%r%s%d" % (self.wire.now, method.encode(), way) + data)
