"""Correct histories from a seed: a cluster without mistakes, whose senders, devices and faults do whatever is allowed.

    play(17).history    # some 2,000 events; the same seed plays the same

Source: docs/promises.md, docs/architecture.md, docs/stores.md.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.history.record import (
    ACCEPTED,
    PERSISTED,
    REPLICATED,
    UNTOLD,
    Acknowledge,
    Acknowledged,
    Call,
    Drop,
    Fault,
    Gap,
    History,
    Listed,
    LoggedIn,
    Login,
    Logout,
    Mail,
    Read,
    Send,
    Sent,
)

LANES = (0, 1)
WINDOW = 8
"""What a device has unacknowledged at once in a lane."""
NOBODY = 900
"""A user who never has a device."""
ROLES = ("proxy/0", "relay/0/1", "gateway/2", "xiu/0/0", "pi/0/1")


@dataclass(slots=True)
class Entry:
    """A message in an inbox."""

    seq: int
    sent: Send
    msg_id: int


@dataclass(slots=True)
class Device:
    """One device, and the run of the application on it."""

    uin: int
    number: int
    by_name: bool
    """It never learns numbers, as an MQTT client."""
    run: int = 1
    online: bool = False
    dropped: bool = False
    up_to: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    singly: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By lane: how far this connection is."""
    ever: set[int] = field(default_factory=set)
    """Messages that were ever sent to it."""
    got: set[int] = field(default_factory=set)
    """Messages that this run has."""
    unacknowledged: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """By lane: what came on this connection, InboxSeq → message."""

    @property
    def process(self) -> str:
        """The run's name."""
        return f"app-{self.uin}-{self.number}-{self.run}"

    def has(self, lane: int, seq: int) -> bool:
        """Whether it acknowledged an entry."""
        return seq <= self.up_to[lane] or seq in self.singly[lane]

    def acknowledge(self, lane: int, up_to: int, singly: set[int]) -> None:
        """Its cursor, as Pi keeps it."""
        self.up_to[lane] = max(self.up_to[lane], up_to)
        self.singly[lane] |= singly
        while self.up_to[lane] + 1 in self.singly[lane]:
            self.up_to[lane] += 1


class Play:
    """One run."""

    def __init__(self, seed: int, steps: int, users: int) -> None:
        self.random = Random(seed)
        self.now_us = 0
        self.history = History(lambda: self.now_us)
        self.happened: Counter[str] = Counter()
        """Which of the allowed oddities did."""
        self._inboxes: dict[tuple[int, int], list[Entry]] = defaultdict(list)
        self._floors: dict[tuple[int, int], int] = defaultdict(int)
        self._stored: dict[int, int] = {}
        """Message → MsgID."""
        self._devices: dict[int, list[Device]] = {
            uin: [Device(uin, number, self.random.random() < 0.2) for number in range(1, 2 + uin % 2)]
            for uin in range(101, 101 + users)
        }
        self._pending: dict[str, list[tuple[Call, Send]]] = {f"writer-{number}": [] for number in range(1, 5)}
        self._late: dict[str, Send] = {}
        """What may still be stored although its sender knows nothing of it: until the writer sends anything else."""
        self._messages = 0
        self._broken = ""
        self._store_hit = False
        self._steps = steps

    def run(self) -> Play:
        """Play it to the end."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._send, 20), (self._answer, 22), (self._late_effect, 2),
            (self._connect, 8), (self._disconnect, 3), (self._join, 1), (self._drop, 1),
            (self._deliver, 50), (self._acknowledge, 22), (self._list, 4), (self._trim, 2), (self._fault, 2),
        ]  # fmt: skip
        chosen = self.random.choices([act for act, _ in actions], [weight for _, weight in actions], k=self._steps)
        for act in chosen:
            self._pass()
            act()
        self._finish()
        return self

    def _pass(self) -> None:
        self.now_us += self.random.randrange(1, 20_000)

    def _send(self) -> None:
        writer = self.random.choice(list(self._pending))
        if len(self._pending[writer]) >= 4:
            return
        self._messages += 1
        others = self.random.sample([*self._devices, NOBODY], self.random.choice((1, 1, 1, 2, 3)))
        level = self.random.choices((REPLICATED, PERSISTED, ACCEPTED), (8, 1, 1))[0]
        expires_us = self.now_us + self.random.randrange(1_000_000) if self.random.random() < 0.15 else 0
        sent = Send(
            0xA0_0000 + self._messages, 1, tuple(others), self.random.choice(LANES), level, expires_us, self._messages * 7 + 1
        )
        self._begin(writer, sent)

    def _begin(self, writer: str, sent: Send) -> None:
        self._late.pop(writer, None)
        self._pending[writer].append((self.history.invoke(writer, sent), sent))

    def _answer(self) -> None:
        writer = self.random.choice(list(self._pending))
        if not self._pending[writer]:
            return
        call, sent = self._pending[writer].pop(0)
        chance = self.random.random()
        if chance < 0.10:
            self.history.fail(call, "RESOURCE_EXHAUSTED")
            self.happened["refused"] += 1
        elif chance < 0.30:
            self._answer_unknown(writer, call, sent, stored=chance < 0.20)
        elif sent.level != REPLICATED and self._store_hit and chance < 0.6 and sent.id not in self._stored:
            self.happened["lost below replicated"] += 1
            self.history.ok(call, Sent())
        else:
            self._store(sent)
            told = tuple((uin, self._seq(uin, sent)) for uin in sent.receivers if self.random.random() < 0.9)
            self.history.ok(call, Sent(self._stored[sent.id], told))

    def _answer_unknown(self, writer: str, call: Call, sent: Send, stored: bool) -> None:
        if stored:
            self._store(sent)
        if self.random.random() < 0.8:
            self.history.unknown(call, "timeout")
        self.happened["unknown, stored" if stored else "unknown"] += 1
        if self.random.random() < 0.6:
            self.happened["sent again"] += 1
            self._begin(writer, sent)
        elif not stored and not self._pending[writer]:
            self._late[writer] = sent

    def _late_effect(self) -> None:
        if self._late:
            self.happened["stored after the time-out"] += 1
            _, sent = self._late.popitem()
            self._store(sent)

    def _store(self, sent: Send) -> None:
        if sent.id in self._stored:
            return
        self._stored[sent.id] = 1 << 56 | sent.lane << 48 | len(self._stored) + 1
        for uin in sent.receivers:
            entries = self._inboxes[uin, sent.lane]
            entries.append(Entry(len(entries) + 1, sent, self._stored[sent.id]))

    def _seq(self, uin: int, sent: Send) -> int:
        return next(entry.seq for entry in reversed(self._inboxes[uin, sent.lane]) if entry.sent.id == sent.id)

    def _some(self, online: bool) -> Device | None:
        found = [device for of_one in self._devices.values() for device in of_one if device.online == online and not device.dropped]
        return self.random.choice(found) if found else None

    def _connect(self) -> None:
        device = self._some(online=False)
        if device:
            self._log_in(device, None)

    def _log_in(self, device: Device, starts: tuple[tuple[int, int], ...] | None) -> None:
        if self.random.random() < 0.4:
            device.run += 1
            device.got.clear()
            self.happened["another run"] += 1
        call = self.history.invoke(device.process, Login(device.uin, device.number))
        self.history.ok(call, LoggedIn(starts or ()))
        device.online = True
        device.sent = defaultdict(int)
        device.unacknowledged = defaultdict(dict)

    def _disconnect(self) -> None:
        device = self._some(online=True)
        if device:
            if self.random.random() < 0.5:
                self.history.ok(self.history.invoke(device.process, Logout(device.uin, device.number)))
            device.online = False

    def _deliver(self) -> None:
        device = self._some(online=True)
        if device:
            for lane in LANES:
                self._deliver_next(device, lane)

    def _deliver_next(self, device: Device, lane: int) -> bool:
        if len(device.unacknowledged[lane]) >= WINDOW:
            return False
        behind = max(device.sent[lane], self._floors[device.uin, lane])
        for entry in self._inboxes[device.uin, lane][behind:]:
            if not device.has(lane, entry.seq):
                device.sent[lane] = entry.seq
                self._hand_over(device, lane, entry)
                return device.online
        return False

    def _hand_over(self, device: Device, lane: int, entry: Entry) -> None:
        history, sent = self.history, entry.sent
        if 0 < sent.expires_us <= self.now_us and sent.id not in device.ever:
            self.happened["expired, with a gap"] += 1
            device.unacknowledged[lane][entry.seq] = sent.id
            history.gap(device.process, Gap(device.uin, device.number, lane, entry.seq, entry.seq))
            return
        dup = sent.id in device.ever
        device.ever.add(sent.id)
        if self.random.random() < 0.03:
            device.online = False  # the connection broke under it: the next copy is marked, and is the first that arrives
            self.happened["lost on the wire"] += 1
            return
        device.unacknowledged[lane][entry.seq] = sent.id
        seq, msg_id = (0, 0) if device.by_name else (entry.seq, entry.msg_id)
        history.wire(device.process, Mail(device.uin, device.number, lane, sent.id, seq, msg_id, dup, sent.crc))
        self.happened["repeated on the wire"] += dup
        if sent.id not in device.got:
            device.got.add(sent.id)
            history.delivered(device.process, Mail(device.uin, device.number, lane, sent.id, seq, msg_id, False, sent.crc))

    def _acknowledge(self) -> None:
        device = self._some(online=True)
        lane = self.random.choice(LANES)
        if device and device.unacknowledged[lane]:
            self._acknowledge_some(device, lane)

    def _acknowledge_some(self, device: Device, lane: int) -> None:
        waiting = device.unacknowledged[lane]
        if device.by_name:
            seqs = set(self.random.sample(sorted(waiting), self.random.randint(1, len(waiting))))
            # By name, and of a gap by number: there is no message to name.
            asked = Acknowledge(
                device.uin, device.number, lane, 0, tuple(sorted(seqs)), tuple(waiting[seq] for seq in sorted(seqs))
            )
        elif self.random.random() < 0.5 and (run := self._run(device, lane)):
            seqs = {seq for seq in waiting if seq <= run}
            asked = Acknowledge(device.uin, device.number, lane, run)
        else:
            seqs = set(self.random.sample(sorted(waiting), self.random.randint(1, len(waiting))))
            asked = Acknowledge(device.uin, device.number, lane, 0, tuple(sorted(seqs)))
        call = self.history.invoke(device.process, asked)
        chance = self.random.random()
        if chance < 0.9:  # else nobody heard of it, and the window stays as full as it was
            device.acknowledge(lane, asked.up_to, seqs)
            for seq in seqs:
                del waiting[seq]
        if chance < 0.7:
            self.history.ok(call, Acknowledged(device.up_to[lane]))
        else:
            self.history.unknown(call, "the connection broke")
            self.happened["acknowledgement unknown"] += 1

    def _run(self, device: Device, lane: int) -> int:
        """The end of what it has without a hole."""
        seq = device.up_to[lane]
        while seq + 1 in device.unacknowledged[lane] or seq + 1 in device.singly[lane]:
            seq += 1
        return seq if seq > device.up_to[lane] else 0

    def _list(self) -> None:
        device = self._some(online=self.random.random() < 0.5)
        if device and (device.online or device.ever):
            lane = self.random.choice(LANES)
            start = self.random.choice((UNTOLD, UNTOLD, 0))
            self._read(device, lane, start, self.random.choice((3, 1000)), final=False)

    def _read(self, device: Device, lane: int, start: int, num: int, final: bool) -> Listed:
        asked = Read(device.uin, device.number, lane, start, num, final)
        call = self.history.invoke(device.process, asked)
        floor, entries = self._floors[device.uin, lane], self._inboxes[device.uin, lane]
        there = entries[max(floor, device.up_to[lane] if start == UNTOLD else start) :]
        there = [entry for entry in there if start != UNTOLD or not device.has(lane, entry.seq)][:num]
        by_id = self.random.random() < 0.5
        told = tuple((entry.seq, entry.msg_id, entry.sent.id if by_id else 0) for entry in there)
        listed = Listed(told, len(entries), floor, 0, device.up_to[lane])
        self.history.ok(call, listed)
        return listed

    def _trim(self) -> None:
        for uin, devices in self._devices.items():
            counted = [device for device in devices if not device.dropped]
            for lane in LANES:
                low = min((device.up_to[lane] for device in counted), default=0)
                self.happened["trimmed"] += low > self._floors[uin, lane]
                self._floors[uin, lane] = max(low, self._floors[uin, lane])

    def _join(self) -> None:
        uin = self.random.choice(list(self._devices))
        if len(self._devices[uin]) < 5:
            device = Device(uin, len(self._devices[uin]) + 1, self.random.random() < 0.2)
            self._devices[uin].append(device)
            for lane in LANES:
                newest = self.random.random() < 0.5
                device.up_to[lane] = len(self._inboxes[uin, lane]) if newest else self._floors[uin, lane]
            self._log_in(device, tuple(device.up_to.items()))
            self.happened["joined later"] += 1

    def _drop(self) -> None:
        uin = self.random.choice(list(self._devices))
        device = self._devices[uin][-1]
        if len(self._devices[uin]) > 2 and not device.dropped:
            device.dropped, device.online = True, False
            self.history.ok(self.history.invoke("operator", Drop(uin, device.number)))
            self.happened["dropped"] += 1

    def _fault(self) -> None:
        if self._broken:
            self.history.fault(Fault("restart", self._broken, heals=True))
            self._broken = ""
            return
        self._broken = self.random.choice(ROLES)
        self._store_hit |= self._broken.startswith(("xiu", "pi"))
        self.history.fault(Fault("kill", self._broken))

    def _finish(self) -> None:
        while any(self._pending.values()):
            self._pass()
            self._answer()
        self._late.clear()
        if self._broken:
            self._fault()
        alive = [device for devices in self._devices.values() for device in devices if not device.dropped]
        for device in alive:
            self._pass()
            if not device.online and (not device.ever or self.random.random() < 0.7):
                self._log_in(device, None)
            for lane in LANES if device.online and self.random.random() < 0.6 else ():
                while self._deliver_next(device, lane):
                    self._pass()
                    if self.random.random() < 0.7 and device.unacknowledged[lane]:
                        self._acknowledge_some(device, lane)
        for device in [*alive, Device(NOBODY, 0, by_name=False)]:
            for lane in LANES:
                self._look(device, lane)

    def _look(self, device: Device, lane: int) -> None:
        """Page through the whole of what is listed."""
        start = UNTOLD
        while True:
            self._pass()
            entries = self._read(device, lane, start, 20, final=True).entries
            if len(entries) < 20:
                return
            start = entries[-1][0]


def play(seed: int, steps: int = 900, users: int = 5) -> Play:
    """A correct history. Source: docs/promises.md."""
    return Play(seed, steps, users).run()
