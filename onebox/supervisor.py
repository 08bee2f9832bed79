"""Decisions of `pixiu up`: the next process to start, the restart of a crashed one, the order of the end. Pure.

            START            RUNNING
    WAITING ─────▶ STARTING ─────────▶ RUNNING
       ▲              │                   │          STOP, then TERM and after a grace KILL
       │ RESTED       │ EXITED            │ EXITED   every state ─────────▶ STOPPING ──EXITED──▶ STOPPED
       └── BACKOFF ◀──┴───────────────────┘

Source: docs/operations.md; docs/promises.md, "Failure rules" 2 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from onebox.grouping import Entry, ProcessSpec, alone
from pixiu.discovery.paths import DRAIN_ORDER
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.deadline_timer import NEVER

FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
STEADY_S: Final = 30.0
"""A process that ran for this number of seconds starts its back-off from the beginning."""
START_SLOTS: Final = 4
"""Processes that start at once: more would only share the same cores."""
SLOW_START_S: Final = 20.0
"""A process that is not Running after this number of seconds no longer holds up the others' start."""
FIRST_TRIES: Final = 3
"""A process that ends this number of times without ever having been Running makes the whole start fail."""
CONFIGURATION_EXIT: Final = 2
"""Exit code of a role whose options or port are at fault: a retry cannot help."""
GRACE_S: Final = 15.0
"""Seconds between SIGTERM and SIGKILL, for each kind of role in the process: they drain one after the other."""


class ProcessState(Enum):
    """State of one process."""

    WAITING = "Waiting"
    STARTING = "Starting"
    RUNNING = "Running"
    BACKOFF = "Back-off"
    STOPPING = "Stopping"
    STOPPED = "Stopped"


class ProcessEvent(Enum):
    """Event of one process."""

    START = "a slot is free"
    RUNNING = "the registry says that it is Running"
    EXITED = "it ended"
    RESTED = "its back-off is over"
    STOP = "all shall end"


_S, _E = ProcessState, ProcessEvent
TRANSITIONS: Final[dict[tuple[ProcessState, ProcessEvent], ProcessState]] = {
    (_S.WAITING, _E.START): _S.STARTING,
    (_S.WAITING, _E.STOP): _S.STOPPED,
    (_S.STARTING, _E.RUNNING): _S.RUNNING,
    (_S.STARTING, _E.EXITED): _S.BACKOFF,
    (_S.STARTING, _E.STOP): _S.STOPPING,
    (_S.RUNNING, _E.EXITED): _S.BACKOFF,
    (_S.RUNNING, _E.STOP): _S.STOPPING,
    (_S.BACKOFF, _E.RESTED): _S.WAITING,
    (_S.BACKOFF, _E.STOP): _S.STOPPED,
    (_S.STOPPING, _E.EXITED): _S.STOPPED,
}
"""All transitions; any other pair of state and event changes nothing."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a process to drain and end (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process at once (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The cluster cannot start because of this process; with its exit code."""

    name: str
    code: int


Effect = Start | Terminate | Kill | Fail


@dataclass(slots=True)
class ProcessRecord:
    """The supervisor's knowledge of one process. Times in monotonic seconds."""

    spec: ProcessSpec
    state: ProcessState = ProcessState.WAITING
    since: float = 0.0
    starts: int = 0
    failures: int = 0
    """Exits in a row without a steady time between."""
    ever_running: bool = False
    last_code: int | None = None
    rest_until: float = 0.0
    wanted: tuple[Entry, ...] = ()
    """Those of its roles that are wanted; none: it is forgotten when it has ended."""

    def __post_init__(self) -> None:
        self.wanted = self.spec.entries

    @property
    def restarts(self) -> int:
        """Number of restarts."""
        return max(self.starts - 1, 0)


class SupervisorCore:
    """Decides for one cluster. `now` is monotonic seconds; `jitter` gives numbers in [0, 1).

    Source: docs/promises.md, "Failure rules" 2 (no retry without jittered back-off).
    """

    def __init__(self, specs: Sequence[ProcessSpec], jitter: Callable[[], float], *, grace_s: float = GRACE_S) -> None:
        self.processes = {spec.name: ProcessRecord(spec) for spec in specs}
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, lambda: 1.0 - jitter())
        self._grace_s = grace_s
        self._stopping = False
        self._complete = False
        """True once all were Running: later failures do not make the start fail."""
        self._group = -1
        self._kill_at = NEVER

    @property
    def all_running(self) -> bool:
        """True if every process is Running."""
        return all(record.state is ProcessState.RUNNING for record in self.processes.values())

    @property
    def all_stopped(self) -> bool:
        """True if every process has ended."""
        return all(record.state is ProcessState.STOPPED for record in self.processes.values())

    def entries(self) -> list[Entry]:
        """Return the wanted roles of all processes."""
        return [entry for record in self.processes.values() for entry in record.wanted]

    def _grace(self, record: ProcessRecord) -> float:
        return self._grace_s * record.spec.kinds

    def _move(self, record: ProcessRecord, event: ProcessEvent, now: float) -> bool:
        state = TRANSITIONS.get((record.state, event))
        if state is None:
            return False
        record.state, record.since = state, now
        return True

    def tick(self, now: float) -> list[Effect]:
        """Return the effects that are due: starts, ends of back-offs, the next group of the end."""
        if self._stopping:
            return self._stop_next(now)
        for record in self.processes.values():
            if record.state is ProcessState.BACKOFF and now >= record.rest_until:
                self._move(record, ProcessEvent.RESTED, now)
        starting = [record for record in self.processes.values() if record.state is ProcessState.STARTING]
        slots = START_SLOTS - sum(1 for record in starting if now - record.since < SLOW_START_S)
        effects: list[Effect] = []
        for record in self.processes.values():
            if slots <= 0:
                break
            if self._move(record, ProcessEvent.START, now):
                record.starts += 1
                slots -= 1
                effects.append(Start(record.spec.name))
        return effects + self._kill_late(now) + self._restart_changed(now)

    def set_replicas(self, role: str, replicas: int, now: float, partitions: int = 0) -> list[Effect]:
        """Set the wanted number of replicas of each partition of a role: new ones start as processes of their own, the last ones
        end. `partitions`: the new number of partitions; 0: as many as before.

        A node that runs others as well is ended and started again without those that are no longer wanted, one node at a time.

        Source: docs/operations.md, "Draining and adding processes".
        """
        if self._stopping:
            return []
        there = {entry: record for record in self.processes.values() for entry in record.spec.entries if entry.role == role}
        numbers = range(partitions) if partitions else sorted({entry.partition for entry in there})
        wanted = [Entry(role, partition, number) for partition in numbers for number in range(replicas)]
        effects: list[Effect] = []
        for record in {record.spec.name: record for record in there.values()}.values():
            record.wanted = tuple(
                entry for entry in record.spec.entries if (entry in wanted if entry.role == role else entry in record.wanted)
            )
            if record.wanted and record.state in (ProcessState.WAITING, ProcessState.BACKOFF):
                record.spec = replace(record.spec, entries=record.wanted)
            elif not record.wanted and self._move(record, ProcessEvent.STOP, now):
                if record.state is ProcessState.STOPPING:
                    effects.append(Terminate(record.spec.name))
                else:
                    del self.processes[record.spec.name]
        for entry in wanted:
            if entry not in there:
                self.processes[entry.name] = ProcessRecord(alone(entry))
        return effects + self.tick(now)

    def _restart_changed(self, now: float) -> list[Effect]:
        """End a node of which not all roles are wanted any more, to start it again, while everything else is Running."""
        changed = [record for record in self.processes.values() if record.wanted != record.spec.entries and record.wanted]
        if not changed or not self.all_running:
            return []
        self._move(changed[0], ProcessEvent.STOP, now)
        return [Terminate(changed[0].spec.name)]

    def _kill_late(self, now: float) -> list[Effect]:
        """Kill processes that are to end and do not end by themselves."""
        late: list[Effect] = []
        for record in self.processes.values():
            if record.state is ProcessState.STOPPING and now - record.since >= self._grace(record):
                record.since = now
                late.append(Kill(record.spec.name))
        return late

    def running(self, name: str, now: float) -> list[Effect]:
        """Handle a process that the registry lists as Running."""
        record = self.processes[name]
        if self._move(record, ProcessEvent.RUNNING, now):
            record.ever_running = True
            self._complete = self._complete or self.all_running
        return self.tick(now)

    def exited(self, name: str, code: int, now: float) -> list[Effect]:
        """Handle the end of a process with an exit code (negative: a signal)."""
        record = self.processes[name]
        steady = record.state is ProcessState.RUNNING and now - record.since >= STEADY_S
        record.last_code = code
        if not self._move(record, ProcessEvent.EXITED, now) or self._stopping:
            return self.tick(now)
        if record.state is ProcessState.STOPPED:  # it, or some of its roles, were no longer wanted
            del self.processes[name]
            if record.wanted:
                self.processes[name] = ProcessRecord(replace(record.spec, entries=record.wanted))
            return self.tick(now)
        record.failures = 1 if steady else record.failures + 1
        if not (record.ever_running or self._complete) and (code == CONFIGURATION_EXIT or record.failures >= FIRST_TRIES):
            return [Fail(name, code)]
        record.rest_until = now + self._backoff.after_s(record.failures)
        return self.tick(now)

    def stop(self, now: float) -> list[Effect]:
        """End everything, group by group in `DRAIN_ORDER`."""
        if self._stopping:
            return []
        self._stopping = True
        return self._stop_next(now)

    def kill(self, now: float) -> list[Effect]:
        """End everything at once."""
        self._stopping = True
        self._group = len(DRAIN_ORDER)
        effects: list[Effect] = []
        for record in self.processes.values():
            self._move(record, ProcessEvent.STOP, now)
            if record.state is ProcessState.STOPPING:
                effects.append(Kill(record.spec.name))
        return effects

    def _of_group(self) -> list[ProcessRecord]:
        if not 0 <= self._group < len(DRAIN_ORDER):
            return []
        return [record for record in self.processes.values() if record.spec.stops_with == self._group]

    def _stop_next(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._group < len(DRAIN_ORDER):
            left = [record for record in self._of_group() if record.state is ProcessState.STOPPING]
            if left:
                if now >= self._kill_at:
                    self._kill_at = NEVER
                    effects.extend(Kill(record.spec.name) for record in left)
                return effects
            self._group += 1
            self._kill_at = now + max(map(self._grace, self._of_group()), default=self._grace_s)
            for record in self._of_group():
                self._move(record, ProcessEvent.STOP, now)
                if record.state is ProcessState.STOPPING:
                    effects.append(Terminate(record.spec.name))
        return effects

    def next_deadline(self) -> float:
        """Return the time at which `tick` next has something to do, if nothing else happens."""
        if self._stopping:
            return self._kill_at if not self.all_stopped else NEVER
        times = [record.rest_until for record in self.processes.values() if record.state is ProcessState.BACKOFF]
        times += [record.since + self._grace(record) for record in self.processes.values() if record.state is ProcessState.STOPPING]
        if any(record.state is ProcessState.WAITING for record in self.processes.values()):
            times += [record.since + SLOW_START_S for record in self.processes.values() if record.state is ProcessState.STARTING]
        return min(times, default=NEVER)
