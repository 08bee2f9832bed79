"""What clients of a simulated system are told, as a history for the checker of `tests.history`, which knows no system."""

from __future__ import annotations

from typing import TYPE_CHECKING
from zlib import crc32

from pixiu.client.inbox.core import Held
from pixiu.wire.levels import Level
from pixiu.wire.record import INBOX_LANES
from tests.history.checker import check
from tests.history.record import (
    ACCEPTED,
    PERSISTED,
    REPLICATED,
    UNTOLD,
    Acknowledge,
    Acknowledged,
    Call,
    Fault,
    Gap,
    History,
    LoggedIn,
    Login,
    Mail,
    Read,
    Send,
    Sent,
)
from tests.history.violation import Limits

if TYPE_CHECKING:
    from tests.sim.cluster.process import Place
    from tests.sim.system.client import Device, Letter
    from tests.sim.system.world import SystemWorld

LEVELS = {Level.REPLICATED: REPLICATED, Level.PERSISTED: PERSISTED, Level.ACCEPTED: ACCEPTED}
LIMITS = Limits(faults=0)
MAX_READ = 1000


class Told:
    """Records what happens to writers and devices."""

    def __init__(self, world: SystemWorld) -> None:
        self._world = world
        self._history = History(lambda: int(world.now * 1_000_000))
        self._sends: dict[int, Call] = {}
        self._logins: dict[tuple[int, int], list[Call]] = {}
        """(UIN, DeviceID) → logins from before Pi knew the device."""
        self._acknowledging: dict[tuple[int, int, int], list[tuple[int, Call]]] = {}
        """(UIN, Pi's number, lane) → InboxSeqs whose acknowledgement is not in Pi yet."""

    def offered(self, letter: Letter) -> None:
        """A mail is sent."""
        ticket = letter.ticket
        sent = Send(ticket.message_id, 1, letter.receivers, letter.lane, LEVELS[ticket.level], 0, crc32(ticket.record))
        self._sends[ticket.message_id] = self._history.invoke(f"writer-{letter.writer}", sent)

    def resolved(self, letter: Letter) -> None:
        """Its writer knows what became of it."""
        call = self._sends[letter.ticket.message_id]
        if letter.ticket.failure is None:
            self._history.ok(call, Sent(letter.ticket.msg_id))
        else:
            self._history.unknown(call, letter.ticket.failure.code)

    def connected(self, device: Device, number: int | None) -> None:
        """A device has a connection. It is known from when Pi has given it its number."""
        call = self._history.invoke(_process(device), Login(device.uin, device.number))
        if number is None:
            self._logins.setdefault((device.uin, device.number), []).append(call)
        else:
            self._history.ok(call, LoggedIn())

    def numbered(self, device: Device, starts: list[int]) -> None:
        """Pi knows a device from now on."""
        for call in self._logins.pop((device.uin, device.number), ()):
            self._history.ok(call, LoggedIn(tuple(enumerate(starts))))

    def got(self, device: Device, held: Held) -> None:
        """An application takes a mail, or is told of a gap."""
        if held.gap is not None:
            self._history.gap(_process(device), Gap(device.uin, device.number, held.lane, held.seq, held.seq))
            return
        snowflake = int.from_bytes(held.record[16:24], "little")
        mail = Mail(device.uin, device.number, held.lane, snowflake, held.seq, held.msg_id, False, crc32(held.record))
        self._history.delivered(_process(device), mail)

    def acknowledged(self, device: Device, number: int, lane: int, seq: int) -> None:
        """An application has done with an entry."""
        call = self._history.invoke(_process(device), Acknowledge(device.uin, device.number, lane, 0, (seq,)))
        self._acknowledging.setdefault((device.uin, number, lane), []).append((seq, call))

    def saved(self, uin: int, number: int, lane: int, up_to: int, bits: int) -> None:
        """A cursor is in Pi: what it names is acknowledged."""
        waiting = self._acknowledging.get((uin, number, lane), [])
        done = [seq <= up_to or bool(bits >> (seq - up_to - 1) & 1) for seq, _ in waiting]
        for (_, call), is_done in zip(waiting, done, strict=True):
            if is_done:
                self._history.ok(call, Acknowledged())
        self._acknowledging[uin, number, lane] = [one for one, is_done in zip(waiting, done, strict=True) if not is_done]

    def fault(self, place: Place) -> None:
        """A process is broken."""
        self._history.fault(Fault("kill", f"{place.role}/{place.partition}/{place.number}"))

    def violations(self) -> list[str]:
        """What the checker finds, after a last look at every inbox."""
        history = self._history
        for device in self._world.devices:
            for lane in range(INBOX_LANES):
                asked = Read(device.uin, device.number, lane, UNTOLD, MAX_READ, final=True)
                listed = self._world.mail.listed(device, lane)
                if listed is not None:
                    history.ok(history.invoke("reader", asked), listed)
        return [violation.shown(history.events) for violation in check(history, LIMITS)]


def _process(device: Device) -> str:
    return f"app-{device.uin}-{device.number}-{device.runs}"
