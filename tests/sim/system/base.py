"""What the processes of a whole system have beside those of `tests.sim.cluster`: methods that can be called, and timers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.sim.cluster.process import Process
from tests.sim.system.streams import Stream

if TYPE_CHECKING:
    from tests.sim.system.world import SystemWorld


class Served(Process):
    """A process whose methods others call by streams."""

    world: SystemWorld

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """What can be called: each method takes the callee's end of a new stream."""
        return {}

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do something later, if the process lives then: in a turn of it."""
        self.world.wire.after(delay, lambda: self.do(action))

    def drain(self, done: Callable[[], None]) -> None:
        """SIGTERM: leave what is here to others, then call `done`. The registry says Draining by now."""
        self.after(0.5, done)

    def crash(self) -> None:
        """See `Process`."""
        super().crash()
        self.world.streams.break_of(self)


class Unlinked(Served):
    """A process whose links have no peers."""

    def peer_roles(self) -> tuple[str, ...]:
        """See `Process`."""
        return ()

    def turn(self) -> None:
        """See `Process`: nothing comes by the links, and nothing goes."""
        if self.alive:
            self.end_of_turn()
            self._arm()


def unary(
    process: Served, address: tuple[str, int], method: str, request: Any, timeout_s: float, done: Callable[[Any], None]
) -> None:
    """One question and its answer; `done(None)` when there is none in time."""
    over = [False]
    held: list[Stream] = []

    def finish(answer: Any) -> None:
        if not over[0]:
            over[0] = True
            for stream in held:
                stream.leave()
            done(answer)

    def opened(stream: Stream) -> None:
        if over[0]:
            stream.leave()
            return
        held.append(stream)
        stream.take_reply = finish
        stream.lost = lambda: finish(None)
        stream.send(request)

    process.world.streams.call(process, address, method, opened, lambda: finish(None))
    process.after(timeout_s, lambda: finish(None))
