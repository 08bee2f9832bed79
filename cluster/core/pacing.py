"""An event loop with a pace: when it is woken often and CPU is short, it rests between two wake-ups, so that each finds several
messages.

    wake-up ─▶ work ─▶ rest: only impatient sources are listened to ─▶ wake-up, with all that came meanwhile

A wake-up costs a process as much as the work for dozens of messages. Patient sources may wait for the end of a rest: datagrams of
links, and MQTT clients' connections. Everything else (calls, framed streams, the registry, signals) and timers wake the loop at
once. Work that somebody waits for keeps the loop from resting for a while (`hurry`). While the loop and the machine have CPU to
spare nobody gains from messages that arrive later, so it does not rest.

Source: docs/performance.md, "QoS 1, and a pace for many small messages", docs/decisions/0275-a-pace-for-event-loops.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import selectors
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from pixiu.rpc.turn_loop import TurnLoop

WINDOW_S: Final = 0.05
"""Interval of deciding whether to rest."""
WAKES_PER_S: Final = 600
"""Rate of wake-ups above which a loop begins to rest."""
BUSY: Final = 0.5
"""Share of time that the loop, or the machine's processors, must work for a loop to begin to rest; it goes on down to half of that,
because rests save work."""
SAVING: Final = 0.75
"""Share of the wake-ups before that may be left while a loop rests: rests that join few messages cost more than they save."""
AGAIN_S: Final = 1.0
"""Time until a loop whose rests saved nothing tries again."""
MACHINE_S: Final = 0.5
"""Interval of asking how busy the machine is: the kernel sums up all processors and interrupts for an answer."""
HURRY_S: Final = 0.02
"""Time without a rest after something that somebody waits for."""
LEAST_S: Final = 0.0005
"""Shortest rest: the kernel's timer for rests has milliseconds."""


class MachineLoad:
    """The share of time in which the machine's processors work, steal by a hypervisor included.

    Args:
        read: returns the first line of /proc/stat.
    """

    def __init__(self, read: Callable[[], str]) -> None:
        self._read = read
        self._at = float("-inf")
        self._total = self._idle = 0
        self._share = 0.0

    def share(self, now: float) -> float:
        """Return the share since the last look, from 0 to 1. `now`: monotonic seconds."""
        if now - self._at >= MACHINE_S:
            self._at = now
            times = [int(found) for found in self._read().split()[1:9]]
            total, idle = sum(times), sum(times[3:5])
            if total > self._total:
                self._share = 1.0 - (idle - self._idle) / (total - self._total)
            self._total, self._idle = total, idle
        return self._share


def _processors() -> str:
    try:
        with open("/proc/stat", encoding="ascii") as file:
            return file.readline(256)
    except OSError:
        return ""


class HasFileno(Protocol):
    """A socket that shows when it is closed."""

    def fileno(self) -> int:
        """Return its file descriptor; -1 once it is closed."""


class PacedSelector(selectors.EpollSelector):
    """A selector that rests.

    Args:
        rest_s: from the beginning of one wake-up to that of the next one; the work counts.
        machine: returns how busy the machine is at this time, as `MachineLoad.share`.
    """

    def __init__(self, rest_s: float, machine: Callable[[float], float]) -> None:
        super().__init__()
        self._rest_s, self._machine = rest_s, machine
        self._impatient = select.epoll()
        """The sources that wake a resting loop."""
        self._patient: dict[int, HasFileno] = {}
        """File descriptor → the socket it belongs to; a later socket with the same descriptor is not patient."""
        self._next_at = 0.0
        """End of a rest that begins now."""
        self._hurried_until = 0.0
        self._resting = False
        self._since = time.monotonic()
        self._woken = self._rested = self._found = 0
        """Counts of this window: wake-ups, rests, and rests after which there was something to do."""
        self._idle_s = 0.0
        """Time of this window in which the loop waited."""
        self._rate = 0.0
        """Wake-ups a second before it began to rest."""
        self._not_before = 0.0
        self.rests = 0

    def be_patient(self, sock: HasFileno) -> None:
        """Let this socket, registered or not, wait for the end of a rest, until it is closed."""
        fd = sock.fileno()
        if not self._is_patient(fd) and fd in self.get_map():
            self._impatient.unregister(fd)
        self._patient[fd] = sock

    def _is_patient(self, fd: int) -> bool:
        sock = self._patient.get(fd)
        if sock is not None and sock.fileno() != fd:
            del self._patient[fd]
            return False
        return sock is not None

    def hurry(self, now: float) -> None:
        """Note that somebody waits for something that happens now (monotonic seconds)."""
        self._hurried_until = now + HURRY_S

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See `selectors`."""
        key = super().register(fileobj, events, data)
        if not self._is_patient(key.fd):
            self._impatient.register(key.fd, _mask(events))
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """See `selectors`."""
        key = super().modify(fileobj, events, data)
        if not self._is_patient(key.fd):
            self._impatient.modify(key.fd, _mask(events))
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See `selectors`."""
        key = super().unregister(fileobj)
        if key.fd not in self._patient:
            with contextlib.suppress(OSError):  # it was closed before
                self._impatient.unregister(key.fd)
        return key

    def close(self) -> None:
        """See `selectors`."""
        self._impatient.close()
        super().close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait as `selectors` does, after a rest if one is due."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        now = time.monotonic()
        events: list[tuple[selectors.SelectorKey, int]] = []
        if self._resting and now >= self._hurried_until:
            rest = self._next_at - now
            if timeout is not None:
                rest = min(rest, timeout)
            if rest >= LEAST_S:
                self._impatient.poll(round(rest, 3), 1)
                events = super().select(0)
                self.rests += 1
                self._rested += 1
                self._found += bool(events)
                if timeout is not None:
                    timeout = max(timeout - (time.monotonic() - now), 0.0)
        if not events:
            events = super().select(timeout)
        woken = time.monotonic()
        self._idle_s += woken - now
        self._decide(woken)
        return events

    def _decide(self, now: float) -> None:
        self._next_at = now + self._rest_s
        self._woken += 1
        window_s = now - self._since
        if window_s >= WINDOW_S:
            if not self._resting:
                self._rate = self._woken / window_s
                self._resting = self._rate > WAKES_PER_S and now >= self._not_before and self._is_busy(now, BUSY)
            elif self._woken > SAVING * self._rate * window_s:
                self._resting, self._not_before = False, now + AGAIN_S
            else:
                self._resting = 2 * self._found > self._rested and self._is_busy(now, BUSY / 2)
            self._since, self._woken, self._rested, self._found, self._idle_s = now, 0, 0, 0, 0.0

    def _is_busy(self, now: float, share: float) -> bool:
        return 1.0 - self._idle_s / (now - self._since) > share or self._machine(now) > share


def _mask(events: int) -> int:
    return (select.EPOLLIN if events & selectors.EVENT_READ else 0) | (select.EPOLLOUT if events & selectors.EVENT_WRITE else 0)


class PacedLoop(TurnLoop):
    """An event loop with a `PacedSelector`."""

    def __init__(self, pace_s: float) -> None:
        self.pacer = PacedSelector(pace_s, MachineLoad(_processors).share)
        super().__init__(self.pacer)


def new_loop(pace_s: float) -> asyncio.AbstractEventLoop:
    """Make an event loop that rests for at most `pace_s`; 0: one that never rests."""
    return PacedLoop(pace_s) if pace_s else TurnLoop()


def pacer_of(loop: asyncio.AbstractEventLoop) -> PacedSelector | None:
    """Return the pacer of a loop; None if it has none."""
    return loop.pacer if isinstance(loop, PacedLoop) else None
