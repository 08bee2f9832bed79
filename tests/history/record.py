"""The history of a test of mail: calls, deliveries and faults in the order in which they happened, as JSON lines.

    history = History(path=...)
    call = history.invoke("sender-1", Send(id=17, sender=1, receivers=(7,)))
    history.ok(call, Sent(msg_id=0x1_40…, seqs=((7, 1),)))       # or fail(call, why), or unknown(call, why)
    history.wire("app-7", Mail(uin=7, device=1, lane=1, id=17))  # every copy that a device got
    history.delivered("app-7", Mail(uin=7, device=1, lane=1, id=17))  # what its application got

A call is invoked once and ends at most once. *Fail* says that it certainly had no effect; *unknown*, or no end at all, that it
may have had. A retry is another call of the same message. A process is whoever does one thing after the other: a sender's writer,
or one run of an application; who starts again is another process. Numbers that are not known where something was seen are 0.

Source: docs/promises.md, docs/architecture.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TextIO

REPLICATED: Final = "replicated"
PERSISTED: Final = "persisted"
ACCEPTED: Final = "accepted"
LEVELS: Final = (REPLICATED, PERSISTED, ACCEPTED)
ALL_DEVICES: Final = -1
"""An acknowledgement for every device of a user: the message is deleted."""
UNTOLD: Final = -1
"""A cursor or end of an inbox that an answer did not tell."""

INVOKE: Final = "invoke"
OK: Final = "ok"
FAIL: Final = "fail"
UNKNOWN: Final = "unknown"
ENDS: Final = (OK, FAIL, UNKNOWN)
APP: Final = "app"
WIRE: Final = "wire"
GAP: Final = "gap"
FAULT: Final = "fault"


@dataclass(slots=True)
class Send:
    """A call: send a mail."""

    id: int
    """The SnowflakeID, or what else names one message in the run and is in its body."""
    sender: int
    receivers: tuple[int, ...]
    lane: int = 1
    level: str = REPLICATED
    expires_us: int = 0
    """By the history's clock; 0: never."""
    crc: int = 0
    """Of what was sent; 0: not compared."""


@dataclass(slots=True)
class Acknowledge:
    """A call: a device acknowledges up to an InboxSeq, or single entries by InboxSeq or by message."""

    uin: int
    device: int
    lane: int = 1
    up_to: int = 0
    seqs: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Read:
    """A call: list an inbox for a device."""

    uin: int
    device: int
    lane: int = 1
    start: int = UNTOLD
    """Entries after this InboxSeq; `UNTOLD`: what the device has not acknowledged."""
    num: int = 1000
    final: bool = False
    """Part of the last look at this inbox, when everything has come to rest: what it does not list is gone."""


@dataclass(slots=True)
class Login:
    """A call: a device connects. Each connection is one."""

    uin: int
    device: int


@dataclass(slots=True)
class Logout:
    """A call: a device disconnects."""

    uin: int
    device: int


@dataclass(slots=True)
class Drop:
    """A call: a user gives up a device. Nothing is owed to it any longer."""

    uin: int
    device: int


@dataclass(slots=True)
class Sent:
    """How a `Send` ended well."""

    msg_id: int = 0
    seqs: tuple[tuple[int, int], ...] = ()
    """(UIN, InboxSeq), as far as told."""


@dataclass(slots=True)
class Acknowledged:
    """How an `Acknowledge` ended well."""

    cursor: int = UNTOLD


@dataclass(slots=True)
class Listed:
    """What a `Read` answered."""

    entries: tuple[tuple[int, int, int], ...] = ()
    """(InboxSeq, MsgID, message), ascending; 0 for what is not told."""
    last: int = UNTOLD
    """The newest InboxSeq."""
    floor: int = 0
    """Entries up to here can no longer be read."""
    gap: int = 0
    """The newest entry that went before every device had acknowledged it."""
    cursor: int = UNTOLD


@dataclass(slots=True)
class LoggedIn:
    """How a `Login` ended well."""

    starts: tuple[tuple[int, int], ...] = ()
    """(lane, InboxSeq): a new device gets what comes after; nothing for a known one."""


@dataclass(slots=True)
class Mail:
    """One copy of a message where it arrived."""

    uin: int
    device: int
    lane: int
    id: int
    seq: int = 0
    msg_id: int = 0
    dup: bool = False
    """Marked as sent again. On the wire only."""
    crc: int = 0


@dataclass(slots=True)
class Gap:
    """An application was told that entries are gone."""

    uin: int
    device: int
    lane: int
    first: int
    last: int


@dataclass(slots=True)
class Fault:
    """Something was broken, or made whole again."""

    kind: str
    """kill, stop, cut, loss … or what undoes it."""
    target: str
    """role/partition/replica, or whatever starts with the role."""
    heals: bool = False


@dataclass(slots=True)
class Reason:
    """Why a call failed or is unknown."""

    text: str


Operation = Send | Acknowledge | Read | Login | Logout | Drop
Result = Sent | Acknowledged | Listed | LoggedIn
Body = Operation | Result | Mail | Gap | Fault | Reason | None
BODIES: Final[dict[str, type[Any]]] = {
    body.__name__: body
    for body in (Send, Acknowledge, Read, Login, Logout, Drop, Sent, Acknowledged, Listed, LoggedIn, Mail, Gap, Fault, Reason)
}
_FIELDS: Final = {name: tuple(field.name for field in fields(body)) for name, body in BODIES.items()}


@dataclass(slots=True)
class Event:
    """One line of a history."""

    at_us: int
    process: str
    kind: str
    call: int
    """Which of the process's calls begins or ends here; 0: none."""
    body: Body

    def line(self) -> str:
        """As JSON."""
        said: dict[str, Any] = {"at_us": self.at_us, "process": self.process, "kind": self.kind}
        if self.call:
            said["call"] = self.call
        if self.body is not None:
            name = type(self.body).__name__
            said["body"] = {"is": name} | {field: getattr(self.body, field) for field in _FIELDS[name]}
        return json.dumps(said, separators=(",", ":"))


@dataclass(slots=True, frozen=True)
class Call:
    """What ends an invoked operation."""

    process: str
    number: int


class History:
    """Records what happens. Several threads may record; each event takes its place and its time when it is recorded."""

    def __init__(
        self,
        clock_us: Callable[[], int] = lambda: time.monotonic_ns() // 1000,
        path: Path | None = None,
        events: Iterable[Event] = (),
    ) -> None:
        self.events = list(events)
        self._clock_us = clock_us
        self._calls = 0
        self._lock = threading.Lock()
        self._file: TextIO | None = path.open("w", buffering=1) if path else None

    def invoke(self, process: str, operation: Operation) -> Call:
        """A call begins."""
        with self._lock:
            self._calls += 1
            call = Call(process, self._calls)
            self._add(process, INVOKE, call.number, operation)
        return call

    def ok(self, call: Call, result: Result | None = None) -> None:
        """A call had its effect."""
        self._put(call.process, OK, call.number, result)

    def fail(self, call: Call, why: str) -> None:
        """A call certainly had no effect, and never will."""
        self._put(call.process, FAIL, call.number, Reason(why))

    def unknown(self, call: Call, why: str) -> None:
        """A call may have had its effect, or have it later."""
        self._put(call.process, UNKNOWN, call.number, Reason(why))

    def delivered(self, process: str, mail: Mail) -> None:
        """A device's application got a message: its handler returned, or an iterator gave it out."""
        self._put(process, APP, 0, mail)

    def wire(self, process: str, mail: Mail) -> None:
        """A copy arrived on the connection that the process's last `Login` of this device opened."""
        self._put(process, WIRE, 0, mail)

    def gap(self, process: str, gap: Gap) -> None:
        """A device's application was told that entries are gone."""
        self._put(process, GAP, 0, gap)

    def fault(self, fault: Fault) -> None:
        """The test broke something, or made it whole again."""
        self._put("faults", FAULT, 0, fault)

    def close(self) -> None:
        """Nothing is recorded in the file any longer."""
        if self._file:
            self._file.close()
            self._file = None

    def _put(self, process: str, kind: str, call: int, body: Body) -> None:
        with self._lock:
            self._add(process, kind, call, body)

    def _add(self, process: str, kind: str, call: int, body: Body) -> None:
        event = Event(self._clock_us(), process, kind, call, body)
        self.events.append(event)
        if self._file:
            self._file.write(event.line() + "\n")


def load(paths: Sequence[Path]) -> History:
    """Histories of one run, from files; those of several recorders of one machine are laid together by their times.

    Raises ValueError with file and line for what is no event.
    """
    events = []
    for path in paths:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                try:
                    events.append(_event(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"{path}:{number}: no event: {error!r}") from error
    if len(paths) > 1:
        events.sort(key=lambda event: event.at_us)
    return History(events=events)


def _event(line: str) -> Event:
    said = json.loads(line)
    body = said.get("body")
    if body is not None:
        kind = BODIES[body.pop("is")]
        body = kind(**{name: _frozen(value) for name, value in body.items()})
    return Event(said["at_us"], said["process"], said["kind"], said.get("call", 0), body)


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
