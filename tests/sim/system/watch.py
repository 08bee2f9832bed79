"""What must hold of mail from its writer to each device's application, looked at whenever something happens.

The truth is what replicas of Pi and Xiu applied: the first replica that applies an entry says what inboxes, cursors and devices
are from then on, and every other one must say the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gateway.events as ge
from cluster.replication.core.states import State
from cluster.replication.model import Entry
from pi.keys import uin_of
from pixiu.client.inbox.core import GapReason, Held
from pixiu.wire.cursor import MAP_BITS, Cursor
from pixiu.wire.envelope import GAP, REDELIVERED, Delivery
from pixiu.wire.envelope import split as split_envelopes
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    ENTRY_KIND,
    U64,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Appends,
    Fanout,
    OpenSessions,
    decode,
)
from pixiu.wire.levels import Level
from pixiu.wire.record import INBOX_LANES, split
from relay.delivery.events import Chunk
from tests.history.record import Listed
from tests.sim.system.pi import PiProcess
from tests.sim.system.told import Told
from xiu.state.state import XiuKind

if TYPE_CHECKING:
    from tests.sim.system.client import Application, Device, Letter
    from tests.sim.system.gateway import SystemGateway
    from tests.sim.system.relay import SystemRelay
    from tests.sim.system.world import SystemWorld
    from tests.sim.system.xiu import XiuProcess

Place = tuple[int, int, int]
"""UIN, Pi's number of the device, lane."""


@dataclass
class Acknowledged:
    """What the application on a device has acknowledged in one lane, and what of it is in Pi."""

    start: int = 0
    """What all other devices had acknowledged before this one came."""
    by_application: set[int] = field(default_factory=set)
    cursor: Cursor = field(default_factory=Cursor)
    up_to: int = 0
    """The application has acknowledged everything up to here, or it is not for this device."""

    def move_up(self) -> int:
        """Bring `up_to` to where it is now."""
        self.up_to = max(self.up_to, self.start, self.cursor.up_to)
        while self.up_to + 1 in self.by_application:
            self.up_to += 1
        return self.up_to


class MailWatch:
    """See the module."""

    def __init__(self, world: SystemWorld) -> None:
        self._world = world
        self.checked: Counter[str] = Counter()
        self.inboxes: dict[tuple[int, int], dict[int, int]] = {}
        """(UIN, lane) → InboxSeq → MsgID."""
        self._entries: dict[tuple[int, int], dict[int, int]] = {}
        """The same, MsgID → InboxSeq."""
        self._applied: dict[int, list[Any]] = {}
        """Partition of Pi → the results of each entry."""
        self._snowflakes: dict[int, int] = {}
        """MsgID → SnowflakeID."""
        self._msg_ids: dict[int, int] = {}
        self._homes: dict[tuple[str, int, int], dict[int, int]] = {}
        """(role, MsgID, UIN in Pi) → in each partition the counter of the first entry that has it."""
        self.letters: dict[int, Letter] = {}
        """By SnowflakeID."""
        self._records: dict[int, bytes] = {}
        self.numbers: dict[tuple[int, bytes], int] = {}
        """(UIN, client ID) → Pi's number."""
        self._devices: dict[tuple[int, int], Device] = {}
        """(UIN, Pi's number) → the device."""
        self._cursors: dict[Place, Acknowledged] = {}
        self._opened: dict[tuple[int, int], tuple[int, list[Cursor]]] = {}
        """(UIN, session) → the device's number, and its cursors then."""
        self._sessions: dict[tuple[int, int], int] = {}
        """(UIN, session) → the relay that delivers under it."""
        self._written: dict[tuple[int, int], tuple[int, int]] = {}
        """(connection, lane) → the session and InboxSeq that were written last."""
        self.told = Told(world)
        self._received: dict[Place, set[int]] = {}
        """InboxSeqs that some run of the application on a device got, or was told of."""

    # --- writers and proxies

    def offered(self, letter: Letter) -> None:
        """A writer offers a mail."""
        self.letters[letter.ticket.message_id] = letter
        self._records[letter.ticket.message_id] = letter.ticket.record
        self.told.offered(letter)
        self.checked["mails"] += 1
        self.checked["mails to many"] += len(letter.receivers) > 1

    def resolved(self, letter: Letter) -> None:
        """A writer is told what became of its mail: what is confirmed at level replicated is stored, and in every inbox."""
        ticket = letter.ticket
        self.told.resolved(letter)
        if ticket.failure is not None:
            self.checked["mails refused"] += 1
            return
        self.checked[f"confirmed {ticket.level.name.lower()}"] += 1
        self.checked["sent again"] += ticket.attempts > 1
        if ticket.level is not Level.REPLICATED:
            return
        assert self._msg_ids.get(ticket.message_id) == ticket.msg_id, "mail is confirmed that Xiu does not have"
        for uin in letter.receivers:
            held = self._entries.get((uin, letter.lane), {})
            assert ticket.msg_id in held, "mail is confirmed, and Pi does not have it"
        having = [self._copies("xiu", ticket.msg_id, 0), *(self._copies("pi", ticket.msg_id, uin) for uin in letter.receivers)]
        assert 1 <= ticket.copies <= min(having), f"{ticket.copies} copies are told of, and disks have {having}"
        self.checked["copies above one"] += ticket.copies > 1

    def _copies(self, role: str, msg_id: int, uin: int) -> int:
        """How many disks have a mail, whatever becomes of their machines."""
        homes = self._homes.get((role, msg_id, uin), {})
        places = [place for place in self._world.places_of(role) if place.kept is not None and place.partition in homes]
        having = Counter(place.partition for place in places if place.kept.disk.image.last.counter >= homes[place.partition])
        return max(having.values(), default=0)

    # --- Xiu and Pi

    def stored(self, process: XiuProcess, entries: Sequence[Entry]) -> None:
        """A replica of Xiu applied entries: a SnowflakeID has one MsgID, whatever replica is asked."""
        for entry in entries:
            if entry.kind != XiuKind.STORE:
                continue
            for record in split(entry.payload[4:], int.from_bytes(entry.payload[:4], "little")):
                snowflake = int.from_bytes(record[16:24], "little")
                (known,) = process.core.known([(snowflake, False)])
                assert known is not None, "a Xiu refuses a mail for its ID"
                msg_id = known[0]
                assert self._msg_ids.setdefault(snowflake, msg_id) == msg_id, "a SnowflakeID has two MsgIDs"
                self._snowflakes[msg_id] = snowflake
                self._homes.setdefault(("xiu", msg_id, 0), {}).setdefault(process.place.partition, entry.counter)
                self.checked["stored"] += 1

    def applying(self, process: PiProcess, entry: Entry, apply: Callable[[], list[list[Any]]]) -> list[list[Any]]:
        """A replica of Pi applies an entry: the first one to do so says what it makes, the others the same."""
        known = self._applied.setdefault(process.place.partition, [])
        first = entry.counter == len(known) + 1
        operations = decode(entry.payload) if first and entry.kind == ENTRY_KIND else []
        found = apply()
        if not first:
            if entry.counter <= len(known):
                assert known[entry.counter - 1] == found[0], "two replicas of Pi make different things of an entry"
            return found
        known.append(found[0])
        # A child that learns does nothing by operations of its own, and what its parent's say was seen there.
        for operation, results in zip(operations, found[0] if operations else (), strict=bool(found[0])):
            if isinstance(operation, Appends):
                self._appended(process, entry, list(APPEND.iter_unpack(operation.items)), results)
            elif isinstance(operation, Fanout):
                pairs = [(operation.msg_id, uin) for (uin,) in U64.iter_unpack(operation.receivers)]
                self._appended(process, entry, pairs, results)
            elif isinstance(operation, Acknowledges):
                self._saved(list(ACKNOWLEDGE.iter_unpack(operation.items)), results)
            elif isinstance(operation, OpenSessions):
                self._session(list(USER_DEVICE.iter_unpack(operation.items)), results)
            elif isinstance(operation, AddDevice):
                self._added(process, operation, results[0])
        return found

    def _appended(self, process: PiProcess, entry: Entry, pairs: list[tuple[int, int]], results: list[int]) -> None:
        for (msg_id, uin), seq in zip(pairs, results, strict=True):
            if seq <= 0:
                self.checked["appends refused"] += 1
                continue
            self._homes.setdefault(("pi", msg_id, uin), {}).setdefault(process.place.partition, entry.counter)
            inbox = uin, msg_id >> 54 & 3
            seqs, entries = self.inboxes.setdefault(inbox, {}), self._entries.setdefault(inbox, {})
            if msg_id in entries:
                assert entries[msg_id] == seq, "a MsgID is in an inbox twice"
                self.checked["appended again"] += 1
                continue
            assert seq == len(seqs) + 1, "an InboxSeq is given twice, or one is left out"
            seqs[seq], entries[msg_id] = msg_id, seq
            self.checked["appended"] += 1

    def _saved(self, items: list[tuple[int, int, int, int, int, int]], results: list[int]) -> None:
        """A cursor is in Pi: nothing in it that the application on the device did not acknowledge."""
        for (uin, number, lane, _, up_to, bits), result in zip(items, results, strict=True):
            if result:
                self.checked["cursors fenced"] += 1
                continue
            held = self._cursor((uin, number, lane))
            named = [*range(held.cursor.up_to + 1, up_to + 1), *(up_to + 1 + bit for bit in range(64) if bits >> bit & 1)]
            for seq in named:
                known = seq <= held.start or held.cursor.has(seq) or seq in held.by_application
                assert known, f"the cursor of device {number} of {uin} is saved beyond what it acknowledged: {seq} in lane {lane}"
            self.checked["cursors saved"] += held.cursor.acknowledge(up_to, bits)
            self.told.saved(uin, number, lane, held.cursor.up_to, held.cursor.bits)

    def _cursor(self, place: Place) -> Acknowledged:
        return self._cursors.setdefault(place, Acknowledged())

    def _session(self, items: list[tuple[int, int]], results: list[int]) -> None:
        for (uin, number), session in zip(items, results, strict=True):
            if session > 0:
                cursors = [self._cursor((uin, number, lane)).cursor for lane in range(INBOX_LANES)]
                self._opened[uin, session] = number, [Cursor(cursor.up_to, cursor.bits) for cursor in cursors]
                self.checked["sessions"] += 1

    def _added(self, process: PiProcess, operation: AddDevice, number: int) -> None:
        """A device has a number. What all others had acknowledged before it came is not for it."""
        assert number >= 0, "Pi refuses a device"
        uin, device_id = operation.uin, int.from_bytes(operation.client_id, "big")
        assert self.numbers.setdefault((uin, operation.client_id), number) == number, "a device has two numbers"
        if (uin, number) not in self._devices:
            self._devices[uin, number] = self._world.device(uin, device_id)
            starts = [process.machine.state.inboxes.head(uin, lane).floor for lane in range(INBOX_LANES)]
            for lane, start in enumerate(starts):
                self._cursor((uin, number, lane)).start = start
            self.told.numbered(self._devices[uin, number], starts)

    # --- relays and gateways

    def delivered(self, relay: SystemRelay, gateway: int, chunks: Sequence[Chunk]) -> None:
        """A relay sends to a gateway: what the inbox has, nothing that its cursor had when the session was opened, and a
        session has one relay."""
        for item in [item for chunk in chunks for item in split_envelopes(chunk.data, chunk.mails)]:
            number, cursors = self._opened[item.uin, item.session]
            assert number == item.device, "a session is of another device"
            one = self._sessions.setdefault((item.uin, item.session), relay.endpoint)
            assert one == relay.endpoint, "two relays deliver under one session"
            self.checked["delivered again"] += bool(item.flags & REDELIVERED)
            self.checked["deliveries"] += 1
            if item.flags & GAP and not item.msg_id:
                raise AssertionError("a relay tells of a gap, and no inbox drops anything")
            window_from = self._cursor((item.uin, item.device, item.lane)).move_up()
            assert item.seq <= window_from + MAP_BITS, "a relay delivers beyond the window"
            assert not cursors[item.lane].has(item.seq), "what was acknowledged before a session began is delivered under it"
            assert self.inboxes[item.uin, item.lane].get(item.seq) == item.msg_id, "another message than the inbox has"

    def written(self, gateway: SystemGateway, effect: ge.WriteMail) -> None:
        """A gateway writes to a connection: sessions rise, and in each the numbers of a lane."""
        for item in [item for run in effect.runs for item in split_envelopes(run.data, run.count)]:
            key = effect.connection, item.lane
            before = self._written.get(key, (0, 0))
            assert before < (item.session, item.seq), "a gateway writes an entry again, or of an older session"
            self._written[key] = item.session, item.seq
            self._check_record(item)
            self.checked["written"] += 1

    def _check_record(self, item: Delivery) -> None:
        if not item.flags & GAP:
            snowflake = int.from_bytes(item.record[16:24], "little")
            assert self._records[snowflake] == item.record, "another record than was sent"
            assert item.uin in self.letters[snowflake].receivers, "somebody gets another user's mail"

    # --- applications

    def got(self, device: Device, application: Application, held: Held) -> None:
        """The application takes a mail, or is told of a gap: each once, in the order of its lane."""
        self.told.got(device, held)
        self.checked["received"] += 1
        self.checked["received again by another run"] += held.redelivered and device.runs > 1
        number = self._number(device)
        self._received.setdefault((device.uin, number, held.lane), set()).update(held.seqs)
        assert held.seq > application.last.get(held.lane, 0), "an application gets mail out of order"
        application.last[held.lane] = held.seq
        if held.gap is not None:
            self._gap(held)
            return
        assert held.msg_id not in application.seen, "an application gets a mail twice"
        application.seen[held.msg_id] = None

    def _gap(self, held: Held) -> None:
        assert held.gap is not None
        assert held.gap.reason is GapReason.GONE, f"a device is told of a gap: {held.gap}"
        # Mail below level replicated may be in Pi when Xiu's leader has lost it.
        assert held.msg_id not in self._snowflakes, "a mail is called gone that Xiu has"
        self.checked["gone"] += 1

    def acknowledged(self, device: Device, lane: int, seqs: Sequence[int]) -> None:
        """The application on a device has done with these."""
        number = self._number(device)
        self._cursor((device.uin, number, lane)).by_application.update(seqs)
        for seq in seqs:
            self.told.acknowledged(device, number, lane, seq)
        self.checked["acknowledged"] += len(seqs)

    def connected(self, device: Device) -> None:
        """A device has a connection."""
        self.told.connected(device, self.numbers.get((device.uin, device.number.to_bytes(6, "big"))))

    def listed(self, device: Device, lane: int) -> Listed | None:
        """What Pi's leader lists for a device; None when there is no leader, or no such device."""
        pi = next((p for p in self._world.running_pis(device.uin) if p.core.epoch), None)
        number = self.numbers.get((device.uin, device.number.to_bytes(6, "big")))
        held = pi.machine.state.inboxes.user(device.uin).devices.get(number) if pi is not None and number is not None else None
        if pi is None or number is None or held is None:
            return None
        found = pi.machine.state.read(device.uin, number, lane, held.session, None, 1000)
        entries = tuple((seq, msg_id, self._snowflakes.get(msg_id, 0)) for seq, msg_id in found.entries)
        return Listed(entries, found.last, found.floor, found.gap, found.up_to)

    def _number(self, device: Device) -> int:
        return self.numbers[device.uin, device.number.to_bytes(6, "big")]

    # --- the end

    def differences(self) -> Iterator[str]:
        """What is not as it must be when the faults are over."""
        yield from self._letters()
        yield from self._inboxes()
        yield from self._relays()
        yield from self._replicas()
        yield from self._doubling()

    def _doubling(self) -> Iterator[str]:
        """Each user's inboxes are whole at one partition, and nothing of them is left at another."""
        yield from (f"the doubling of {role} is not over" for role, tool in self._world.tools.items() if not tool.over)
        if "pi" not in self._world.tools:
            return
        count = self._world.registry.view.count("pi")
        for own in range(count):
            process = self._world.leader_of("pi", own)
            if not isinstance(process, PiProcess):
                yield f"nobody leads pi {own}"
                continue
            strange = {uin for key in process.machine.rows() if (uin := uin_of(key)) is not None and uin % count != own}
            if strange:
                yield f"pi {own} has users of other partitions: {sorted(strange)}"
            for (uin, lane), entries in self.inboxes.items():
                if uin % count == own and process.machine.state.inboxes.head(uin, lane).last != len(entries):
                    yield f"pi {own} does not have all of the inbox of {uin}, lane {lane}"
                self.checked["inboxes after a doubling"] += 1

    def _letters(self) -> Iterator[str]:
        for letter in self.letters.values():
            name = f"mail {letter.number} of writer {letter.writer}"
            if not letter.ticket.resolved:
                yield f"{name} has no outcome"
            elif letter.ticket.failure is not None:
                yield f"{name} failed: {letter.ticket.failure}"
            elif letter.ticket.level is Level.REPLICATED:
                for uin in letter.receivers:
                    if letter.ticket.msg_id not in self._entries.get((uin, letter.lane), {}):
                        yield f"{name} was confirmed, and is not in the inbox of {uin}"
        for (uin, lane), entries in self._entries.items():
            last: dict[int, int] = {}
            for msg_id in entries:
                letter = self.letters[self._snowflakes[msg_id]] if msg_id in self._snowflakes else None  # type: ignore[assignment]
                if letter is None:
                    continue
                if last.get(letter.writer, 0) >= letter.number:
                    yield f"writer {letter.writer}'s mail {letter.number} in the inbox of {uin}, lane {lane}, is behind a later one"
                last[letter.writer] = letter.number
                self.checked["in order"] += 1

    def _inboxes(self) -> Iterator[str]:
        for (uin, lane), entries in self.inboxes.items():
            for device in self._world.devices_of(uin):
                number = self.numbers.get((uin, device.number.to_bytes(6, "big")))
                if number is None:
                    yield f"{device} has no number"
                    continue
                if self.listed(device, lane) is None:
                    yield f"Pi does not have {device}"
                held, got = self._cursor((uin, number, lane)), self._received.get((uin, number, lane), set())
                missing = [seq for seq in entries if seq > held.start and seq not in got]
                if missing:
                    yield f"{device} did not get {missing[:5]} of {len(entries)} in lane {lane}"
                elif held.cursor.up_to != len(entries):
                    yield f"of {device} Pi has {held.cursor.up_to} of {len(entries)} acknowledged in lane {lane}"

    def _relays(self) -> Iterator[str]:
        served: list[tuple[int, int]] = []
        for relay in self._world.running_relays():
            core = relay.deliveries
            if core.unsaved or core.waiting or core.busy:
                yield f"{relay.place.name} is busy: {core.unsaved} cursors, {core.waiting} wait, {core.busy} busy"
            served += [(device.uin, device.device) for device in core.sessions]
        for uin in sorted({uin for uin, _ in self._devices}):
            owners = [relay.place.name for relay in self._world.running_relays() if relay.mail_devices.owns(uin)]
            if len(owners) != 1:
                yield f"the devices of {uin} are not served by one relay each: {owners} own them"
        if sorted(served) != sorted(self._devices):
            yield f"devices are not served by one relay each: {sorted(served)}"

    def _replicas(self) -> Iterator[str]:
        for (role, number), partition in self._world.partitions.items():
            cores = [replica.core for replica in partition.replicas.values()]
            leaders = [core for core in cores if core.state is State.LEADING]
            if len(leaders) != 1:
                yield f"{len(leaders)} replicas of {role} {number} lead: {[core.state.value for core in cores]}"
            elif len({core.context.log.last for core in cores}) != 1:
                yield f"the logs of {role} {number} are not equal"
