"""Devices that take mail from this relay: their gateways, connect times, and Pi's numbers for them. Pure.

    relay data ─▶ users who take mail ─▶ of those that this relay owns: the current connection of each device
                                             │ no number: Pi is asked (a batch at a time)
                                             └▶ LoggedIn, LoggedOut

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cluster.membership.map.devices import DEVICE_MASK, Devices, LoginPolicy, connected
from cluster.membership.map.lww_map import MAX_ENTRIES, Applied, Purged
from cluster.membership.map.updates import Update
from pixiu.ids import MAX_ID
from pixiu.placement.partition import rendezvous
from relay.delivery import events as ev

MAX_NUMBERS: Final = 200_000
"""Limit of numbers remembered for devices that have gone. Policy: the oldest is forgotten, and Pi is asked again."""
MAX_NAMES: Final = 100_000
"""Limit of device names not reported to Pi yet. Policy: the oldest is forgotten, and that device has none."""
NUMBER_AGE_S: Final = 3600.0
"""Age at which a number is requested again when its device comes, seconds: Pi gives the number of a device long gone to another
one."""
MAX_ASKED: Final = 256
"""Limit of devices in questions to Pi. Policy: the others wait in order."""
LATER_S: Final = 0.5
"""Pause after Pi did not answer, seconds."""
REFUSED_S: Final = 60.0
"""Pause after Pi refused a device, seconds: the user has too many, or the inboxes have no space."""
MAX_REFUSED: Final = 100_000
"""Limit of pausing devices. Policy: all are forgotten, and asked for again."""
UNKNOWN: Final = -1
_LOGIN: Final = 1
_MAIL: Final = 4

assert connected(1, 1, 1, 0, chat=False, login=False, mail=True).value == _MAIL


class TrackedDevices(Devices):
    """Relay data that tracks changes of devices that take mail.

    Args:
        changed: called when the first changed user is noted.
        policy, max_entries: as in `Devices`.
    """

    __slots__ = ("_changed", "dirty", "names", "sessions", "takers")

    def __init__(
        self, changed: Callable[[], None], *, policy: LoginPolicy = LoginPolicy.ALL, max_entries: int = MAX_ENTRIES
    ) -> None:
        super().__init__(policy=policy, max_entries=max_entries)
        self._changed = changed
        self.takers: dict[int, None] = {}
        """Users with an entry that takes mail; no more than there are entries."""
        self.sessions: dict[int, None] = {}
        """Those of them who are no people: sessions of MQTT that outlive their connections."""
        self.dirty: dict[int, None] = {}
        """Current and former `takers` that changed since the last `take`."""
        self.names: dict[tuple[int, int], str] = {}
        """(UIN, DeviceID) → name of a device that takes mail, until Pi has it."""

    def apply(self, batch: Iterable[Update], now: float) -> Applied:
        """Apply updates as `Devices.apply`, and note users whose devices changed."""
        applied = super().apply(batch, now)
        takers = self.takers
        for change in applied.changes:
            if change.login and change.value & _MAIL:
                takers[change.group] = None
                if not change.value & _LOGIN:
                    self.sessions[change.group] = None
                self._note(change.group)
                if change.name:
                    self._name(change)
            elif change.group in takers:
                self._note(change.group)
                if not change.login:
                    self.names.pop((change.group, change.member & DEVICE_MASK), None)
        return applied

    @property
    def users(self) -> int:
        """Number of users with a connected device; sessions are none."""
        return super().users - len(self.sessions)

    def take(self) -> list[int]:
        """Return the users that changed since the last call."""
        found, self.dirty = list(self.dirty), {}
        for uin in found:
            if not any(self.value(*key) & _MAIL for key in self.live_keys(uin)):
                self.takers.pop(uin, None)
                self.sessions.pop(uin, None)
        return found

    def _forget(self, purged: Purged) -> Purged:
        for key in purged.keys:
            if key.group in self.takers:
                self._note(key.group)
        return super()._forget(purged)

    def _name(self, change: Update) -> None:
        who = change.group, change.member & DEVICE_MASK
        self.names.pop(who, None)
        if len(self.names) >= MAX_NAMES:
            del self.names[next(iter(self.names))]
        self.names[who] = change.name

    def _note(self, uin: int) -> None:
        if not self.dirty:
            self._changed()
        self.dirty[uin] = None


class Place(NamedTuple):
    """Connection of a device that takes mail here."""

    key: int
    """Class and DeviceID."""
    gateway: int
    """Its endpoint."""
    connection: int
    """Connect time."""
    number: int
    """Of Pi; `UNKNOWN` before it is known."""


@dataclass(slots=True)
class Looked:
    """Changes found by a check of users' devices."""

    logged_out: list[ev.Login] = field(default_factory=list)
    logged_in: list[ev.Login] = field(default_factory=list)
    still_there: list[ev.Login] = field(default_factory=list)


class MailDevices:
    """The devices that take mail from this relay, with Pi's numbers for them.

    Args:
        devices: relay data.
        gateway_of: returns the endpoint of a gateway instance that is in the registry and not silent.
        endpoint: of this relay.
    """

    def __init__(self, devices: TrackedDevices, gateway_of: Callable[[int], int | None], endpoint: int) -> None:
        self.devices = devices
        self.refused = 0
        """Number of times that Pi refused a device: its user has too many."""
        self._gateway_of = gateway_of
        self._endpoint = endpoint
        self._owners: tuple[int, ...] = ()
        self._partition, self._partitions = 0, 1
        self._places: dict[int, dict[int, Place]] = {}
        """UIN → DeviceID → place. Only users that are owned here."""
        self._numbers: dict[tuple[int, int], tuple[int, float]] = {}
        """(UIN, DeviceID) → (Pi's number, time of its answer)."""
        self._ask: dict[tuple[int, int], None] = {}
        self._asked: set[tuple[int, int]] = set()
        self._not_before: dict[tuple[int, int], float] = {}

    def __len__(self) -> int:
        """Number of users with devices here."""
        return len(self._places)

    @property
    def unnumbered(self) -> int:
        """Number of devices without a number of Pi."""
        return len(self._ask) + len(self._asked)

    def set_owners(self, owners: Sequence[int], partition: int, partitions: int) -> bool:
        """Set the relays among which the owner of each user of a partition is chosen. Returns True if something changed: then all
        users who take mail must be checked again."""
        new = tuple(owners), partition, partitions
        changed = new != (self._owners, self._partition, self._partitions)
        self._owners, self._partition, self._partitions = new
        return changed

    def owns(self, uin: int) -> bool:
        """True if this relay delivers a user's mail."""
        if self._endpoint not in self._owners or uin % self._partitions != self._partition:
            return False
        return len(self._owners) == 1 or rendezvous(uin, self._owners) == self._endpoint

    def place(self, uin: int, number: int) -> Place | None:
        """Return a device's place, by Pi's number."""
        return next((place for place in self._places.get(uin, {}).values() if place.number == number), None)

    def users(self) -> list[int]:
        """Users who take mail, or did."""
        return list({**self.devices.takers, **dict.fromkeys(self._places)})

    def look(self, uins: Iterable[int], now: float, served: Container[ev.Device] | None = None) -> Looked:
        """Compare users with relay data. With `served`, the devices that have a session, also report devices without one."""
        found = Looked()
        for uin in uins:
            self._look(uin, now, found)
            if served is not None:
                self._heartbeat(uin, now, served, found)
        return found

    def _look(self, uin: int, now: float, found: Looked) -> None:
        wanted: dict[int, Place] = {}
        if 0 < uin <= MAX_ID and self.owns(uin):
            for connection in self.devices.connections(uin, sessions=True):
                gateway = self._gateway_of(connection.instance)
                if connection.mail and gateway is not None:
                    wanted[connection.device] = Place(connection.key, gateway, connection.connect_time, UNKNOWN)
        there = self._places.setdefault(uin, {}) if wanted else self._places.get(uin, {})
        for device in [device for device in there if device not in wanted]:
            place = there.pop(device)
            self._ask.pop((uin, device), None)
            if place.number != UNKNOWN:
                found.logged_out.append(_login(uin, place))
        for device, place in wanted.items():
            old = there.get(device)
            if old is not None and old[:3] == place[:3]:
                continue
            number = old.number if old is not None else self._known(uin, device, now)
            if old is not None and number != UNKNOWN and place.connection <= old.connection:
                found.logged_out.append(_login(uin, old))  # the newer connection ended, and an older one is there again
            there[device] = place = place._replace(number=number)
            if number != UNKNOWN:
                found.logged_in.append(_login(uin, place))
            elif now >= self._not_before.get((uin, device), 0.0):
                self._wait(uin, device)
        if not there:
            self._places.pop(uin, None)

    def _heartbeat(self, uin: int, now: float, served: Container[ev.Device], found: Looked) -> None:
        for device, place in self._places.get(uin, {}).items():
            if place.number == UNKNOWN:
                if now >= self._not_before.get((uin, device), 0.0):
                    self._wait(uin, device)
            elif ev.Device(uin, place.number) not in served:
                found.still_there.append(_login(uin, place))

    # --- numbers

    def to_number(self, now: float) -> list[tuple[int, int]]:
        """(UIN, DeviceID) of devices whose numbers must be requested now; `numbered` takes the answers."""
        found: list[tuple[int, int]] = []
        for who in list(self._ask):
            if len(self._asked) >= MAX_ASKED:
                break
            if now >= self._not_before.get(who, 0.0):
                del self._ask[who]
                self._asked.add(who)
                found.append(who)
        return found

    def name(self, uin: int, device: int) -> str:
        """The name of a device if Pi does not have it yet; else empty."""
        return self.devices.names.get((uin, device), "")

    def numbered(self, uin: int, device: int, answer: int | ev.Failure, now: float) -> ev.Login | None:
        """Record the number Pi assigned; return the device that uses it now."""
        who = uin, device
        self._asked.discard(who)
        place = self._places.get(uin, {}).get(device)
        if isinstance(answer, ev.Failure):
            if len(self._not_before) >= MAX_REFUSED:
                self._not_before.clear()
            self.refused += answer is ev.Failure.REFUSED
            self._not_before[who] = now + (REFUSED_S if answer is ev.Failure.REFUSED else LATER_S)
            if place is not None and answer is not ev.Failure.REFUSED:
                self._ask[who] = None
            return None
        self._not_before.pop(who, None)
        self.devices.names.pop(who, None)
        self._numbers.pop(who, None)
        if len(self._numbers) >= MAX_NUMBERS:
            del self._numbers[next(iter(self._numbers))]
        self._numbers[who] = answer, now
        if place is None:
            return None
        place = self._places[uin][device] = place._replace(number=answer)
        return _login(uin, place)

    def forget(self, uin: int, number: int) -> None:
        """Forget a device's number, unknown to Pi: the next heartbeat requests one."""
        for device, place in self._places.get(uin, {}).items():
            if place.number == number:
                self._places[uin][device] = place._replace(number=UNKNOWN)
                self._numbers.pop((uin, device), None)
                return

    def _known(self, uin: int, device: int, now: float) -> int:
        number, at = self._numbers.get((uin, device), (UNKNOWN, now))
        return number if now < at + NUMBER_AGE_S else UNKNOWN

    def _wait(self, uin: int, device: int) -> None:
        if (uin, device) not in self._asked:
            self._ask[uin, device] = None


def _login(uin: int, place: Place) -> ev.Login:
    return ev.Login(uin, place.number, place.gateway, place.connection)
