"""Random operations, with transactions, crashes and replays anywhere: the state does what the model does, byte for byte alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cluster.replication.model import Entry
from pi.inboxes.unwritten import Store
from pi.state import State
from pi.store.store import StateStore
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    CLEAR,
    DELETE,
    ENTRY_KIND,
    TRIM,
    U64,
    USER_DEVICE,
    Acknowledges,
    AddDevice,
    Appends,
    Clears,
    Clock,
    Deletes,
    DropDevices,
    Fanout,
    Limits,
    Note,
    OpenSessions,
    Operation,
    Trims,
    Writer,
    decode,
    encode,
)
from tests.pi.memory import HOUR, START_S, MemoryStore, at_us
from tests.pi.model import Model
from tests.support.effort import runs
from tests.support.for_each import for_each

pytestmark = pytest.mark.sim

SEEDS = runs("PIXIU_PI_SEEDS", local=10, ci=30)
LIMITS = Limits(cap=12, refuse_full=0, dedupe_s=5 * HOUR, history_s=0, age_s=20 * HOUR, device_age_s=30 * HOUR)
UINS = (3, 7, 11)
NOTED = 11
"""Who has notes, and is removed whole when nobody comes back."""


class World:
    """One run: the log, the model, and a replica that crashes."""

    def __init__(self, seed: int, store: Store) -> None:
        self.chance = random.Random(seed)
        self.model = Model()
        self.store = store
        self.state = State(store, max_heads=4, max_users=2)
        self.log: list[Entry] = []
        self.now_s: int = START_S
        self.epoch = 1
        self.next_msg = 0
        self.sent: list[tuple[int, int, int]] = []
        self.limits = LIMITS

    def operation(self) -> Operation:
        chance, kind = self.chance, self.chance.randrange(108)
        uin, device, lane = chance.choice(UINS), chance.randrange(6), chance.randrange(2)
        if kind < 40:
            return Appends(self._writer(), b"".join(APPEND.pack(*self._message()) for _ in range(chance.randrange(1, 6))))
        if kind < 45:
            receivers = chance.sample(UINS, chance.randrange(1, 4))
            msg_id = self._new_message(lane)
            return Fanout(self._writer(), msg_id, b"".join(map(U64.pack, receivers)))
        if kind < 70:
            return Acknowledges(b"".join(self._acknowledgement() for _ in range(chance.randrange(1, 4))))
        if kind < 80:
            return OpenSessions(USER_DEVICE.pack(uin, device))
        if kind < 87:
            return AddDevice(uin, b"%06dname %d" % (chance.randrange(12), chance.randrange(3)) if chance.random() < 0.9 else b"")
        if kind < 90:
            return DropDevices(USER_DEVICE.pack(uin, device))
        if kind < 93:
            return Trims(TRIM.pack(uin, lane, chance.randrange(30)))
        if kind < 96:
            last = len(self.model.inbox(uin, lane).entries)
            first = chance.randrange(max(last - 10, 0), last + 2)
            return Deletes(DELETE.pack(uin, lane, first, max(first + chance.choice((-1, 0, 0, 0, 1, 2, 5)), 0)))
        if kind >= 100:
            generation = max(self.model.noted.get(NOTED, (1, 0))[0] + chance.choice((-1, 0, 0, 0, 1)), 0)
            if kind < 103:
                return Clears(CLEAR.pack(chance.choice(UINS), generation))
            return Note(NOTED, chance.choice((0, 0, 1, 7, 8)), generation, bytes(chance.choice((0, 3, 3, 9, 5000))))
        if chance.random() < 0.3:
            self.limits = self.limits._replace(from_now=1 - self.limits.from_now)
        if chance.random() < 0.2:
            self.limits = self.limits._replace(refuse_full=1 - self.limits.refuse_full)
        if chance.random() < 0.2:
            self.limits = self.limits._replace(no_space=1 - self.limits.no_space)
        return Clock(self.limits)

    def _writer(self) -> Writer:
        chance = self.chance
        return Writer(chance.randrange(3), chance.choice((1, 1, 1, 2)), self.epoch if chance.random() < 0.95 else self.epoch - 1)

    def _new_message(self, lane: int) -> int:
        self.next_msg += self.chance.randrange(1, 3)
        return self.chance.randrange(2) << 56 | lane << 54 | self.next_msg

    def _message(self) -> tuple[int, int]:
        """A new one, one that was sent out of order, or one that was sent within the dedupe window."""
        chance, lane = self.chance, self.chance.randrange(2)
        young = [each for each in self.sent[-30:] if each[2] > self.now_s - LIMITS.dedupe_s]
        if young and chance.random() < 0.3:
            msg_id, uin, _ = chance.choice(young)
            return msg_id, uin
        msg_id, uin = self._new_message(lane), chance.choice(UINS)
        if chance.random() < 0.2:
            msg_id -= 1
            if any(msg_id & (1 << 48) - 1 == there & (1 << 48) - 1 for there, _, _ in self.sent):
                msg_id += 1
        self.sent.append((msg_id, uin, self.now_s))
        return msg_id, uin

    def _acknowledgement(self) -> bytes:
        chance = self.chance
        uin, lane = chance.choice(UINS), chance.randrange(2)
        device, held = chance.randrange(4), self.model.devices.get(uin, {})
        session = held[device].session if device in held else 0
        session = max(0, session + chance.choice((0, 0, 0, 0, 0, 0, -1, 1)))
        last = len(self.model.inbox(uin, lane).entries)
        bits = chance.getrandbits(6) if chance.random() < 0.5 else 0
        return ACKNOWLEDGE.pack(uin, device, lane, session, chance.randrange(max(last - 8, 0), last + 2), bits)

    def step(self) -> None:
        chance = self.chance
        if chance.random() < 0.1:
            self.epoch += 1
        self.now_s += chance.choice((0, 0, 0, 1, 60, HOUR // 2, 3 * HOUR))
        operations = [self.operation() for _ in range(chance.randrange(1, 4))]
        payload = encode(operations)
        assert decode(payload) == operations
        entry = Entry(self.epoch, len(self.log) + 1, ENTRY_KIND, at_us(self.now_s), payload)
        self.log.append(entry)
        wanted = [self.model.apply(operation, self.now_s, self.epoch) for operation in operations]
        assert self.state.apply([entry]) == [wanted]

    def look(self) -> None:
        """Reads, of everything."""
        for uin in UINS:
            notes, generation = self.state.notes.of(uin)
            assert {note.name: (note.generation, note.value) for note in notes} == self.model.notes.get(uin, {})
            assert generation == self.model.noted.get(uin, (0, 0))[0]
            for lane in range(2):
                inbox, head = self.model.inbox(uin, lane), self.state.inboxes.head(uin, lane)
                assert (head.last, head.floor, head.gap, head.dropped) == (
                    len(inbox.entries), inbox.floor, inbox.gap, inbox.dropped,
                ), (uin, lane)  # fmt: skip
                assert head.base <= head.floor
                shown, before = self.model.shown(uin, lane), self.chance.randrange(1, 40)
                peeked = self.state.peek(uin, lane, 0, 100, devices=True)
                assert (peeked.entries, peeked.unread) == (shown, len(shown))
                back = [each for each in shown[::-1] if each[0] < before][:5]
                assert self.state.peek(uin, lane, 0, 5, before).entries == back
                assert {device.number: device.unread for device in peeked.devices} == {
                    number: self.model.unread(uin, number, lane) for number in self.model.devices.get(uin, {})
                }
                for number, device in self.model.devices.get(uin, {}).items():
                    for start in (None, 0, self.chance.randrange(20)):
                        found = self.state.read(uin, number, lane, device.session, start, 7)
                        assert found.entries == self.model.readable(uin, number, lane, start, 7)
                        assert found.unread == self.model.unread(uin, number, lane)
                    assert self.state.read(uin, number, lane, device.session, None, 5, before).entries == back

    def write(self) -> None:
        """A transaction that succeeds, fails, or is the last thing that happens."""
        chance = self.chance
        changes = self.state.begin_freeze()
        while self.state.inboxes.encode_frozen(1):
            if chance.random() < 0.3:
                self.step()
            if chance.random() < 0.1:
                self.state.unstored()
        if chance.random() < 0.2:
            self.state.table.refused()
            return
        if chance.random() < 0.2:
            self.restart()
            return
        if chance.random() < 0.3:
            self.step()  # while it is being written
        self.store.write(changes)
        if isinstance(self.store, StateStore):
            self.store.renew()
        if chance.random() < 0.2:
            self.restart()
            return
        self.state.table.thawed()

    def restart(self) -> None:
        """From the last transaction, and the log behind it."""
        self.state = State(self.store, max_heads=4, max_users=2)
        self.state.apply(self.log[self.state.applied.counter :])

    def run(self, steps: int) -> dict[bytes, bytes]:
        """What the store holds at the end."""
        for _ in range(steps):
            self.step()
            if self.chance.random() < 0.3:
                self.look()
            if self.chance.random() < 0.15:
                self.write()
        self.store.write(self.state.freeze())
        self.state.table.thawed()
        if isinstance(self.store, StateStore):
            self.store.renew()
        return dict(self.store.scan(b"", b"\xff"))


@for_each("seed", range(SEEDS))
def test_the_state_does_what_the_model_does_and_every_replica_has_the_same_bytes(seed: int) -> None:
    world = World(seed, MemoryStore())
    held = world.run(150)
    other = MemoryStore()
    state = State(other)
    state.apply(world.log)
    other.write(state.freeze())
    assert dict(other.scan(b"", b"\xff")) == held


@pytest.mark.parametrize("seed", range(5))
def test_the_same_over_lmdb(seed: int, tmp_path: Path) -> None:
    store = StateStore(tmp_path / "a", 64 << 20)
    world = World(1000 + seed, store)
    held = world.run(100)
    other = MemoryStore()
    state = State(other)
    state.apply(world.log)
    other.write(state.freeze())
    assert dict(other.scan(b"", b"\xff")) == held
    store.close()
