"""Two replicas of Pi's production state, on real files whose values break at random, repair themselves from each other.

Each round: mail comes; then a value of one replica breaks, or of a snapshot on its way, or none; then one replica sends the other
a snapshot, which takes it only after a look at it. At most one of both is broken at a time. What was broken on one replica alone
must be whole again in the end, and nobody may ever take a broken value from the other.

Source: docs/replication.md, "Use by a role".
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from cluster.replication.model import Entry
from pi.keys import CHUNK_ENTRIES, chunk_key
from pi.store.machine import Machine
from pi.store.store import FILE_NAME
from pixiu.errors import StateDamaged, StorageError
from pixiu.wire.inbox_operations import ENTRY_KIND, encode
from tests.pi.memory import START_S, at_us
from tests.support.pi import appends, message

ROUNDS = 6
UINS = (7, 8, 9)
MAP_BYTES = 16 << 20


class PassesOn(Machine):
    """Fault: snapshots are made and taken without a look at their values."""

    def _checked(self, folder: Path) -> int:
        return self._position_of(folder)


async def violations(seed: int, folder: Path, kind: type[Machine] = Machine) -> list[tuple[str, str]]:
    """Play one seed in a folder, which is removed afterwards."""
    run = _Run(seed, folder, kind)
    try:
        for number in range(ROUNDS):
            await run.round(number)
        await run.end()
    finally:
        for machine in run.machines:
            await machine.close()
        shutil.rmtree(folder)
    return run.found


class _Run:
    def __init__(self, seed: int, folder: Path, kind: type[Machine]) -> None:
        self._rng, self._folder = random.Random(seed), folder
        self.found: list[tuple[str, str]] = []
        self.machines = [kind(folder / name, MAP_BYTES, 100, 3600.0, _ignored) for name in ("a", "b")]
        for machine in self.machines:
            machine.open()
        self._log: list[Entry] = []

    async def round(self, number: int) -> None:
        """Mail, something that breaks, a snapshot."""
        self._mail()
        for machine in self.machines:
            machine.apply(self._log[machine.applied :])
            await machine.flush()
        sender, taker = self._rng.sample(range(2), 2)
        where = self._rng.choice(("sender", "taker", "on its way", "nowhere"))
        if where == "sender":
            self._break(self._folder / "ab"[sender] / FILE_NAME)
        elif where == "taker":
            self._break(self._folder / "ab"[taker] / FILE_NAME)
        await self._send(number, sender, taker, where == "on its way")
        if where == "sender":  # it takes what the other has, as it would after its start
            await self._send(number, taker, sender, False)

    async def _send(self, number: int, sender: int, taker: int, breaks: bool) -> None:
        snapshot = self._folder / "snapshot"
        snapshot.mkdir()
        try:
            await self.machines[sender].snapshot(snapshot)
            if breaks:
                self._break(snapshot / FILE_NAME)
            await self.machines[taker].check(snapshot)
            await self.machines[taker].load(snapshot)
        except StorageError:
            return  # refused: the taker keeps what it has
        finally:
            shutil.rmtree(snapshot)
        if await self._is_broken(taker):
            self.found.append(("a broken value was passed on", f"in round {number}, to {'ab'[taker]}"))

    async def end(self) -> None:
        """What was broken on one replica alone is whole."""
        broken = [number for number in range(2) if await self._is_broken(number)]
        if broken:
            self.found.append(("broken in the end", f"on {len(broken)} replicas"))

    async def _is_broken(self, number: int) -> bool:
        try:
            await self.machines[number].verify()
        except StateDamaged:
            return True
        return False

    def _mail(self) -> None:
        for _ in range(self._rng.randint(1, 3)):
            counter = len(self._log) + 1
            mail = [(message(counter * 10 + n), self._rng.choice(UINS)) for n in range(10)]
            self._log.append(Entry(1, counter, ENTRY_KIND, at_us(START_S), encode([appends(1, *mail)])))

    def _break(self, file: Path) -> None:
        """A byte of a chunk's value, in every page that ever had it."""
        held = file.read_bytes()
        keys = [chunk_key(uin, 1, seq) for uin in UINS for seq in range(1, 10 * CHUNK_ENTRIES, CHUNK_ENTRIES)]
        key = self._rng.choice([key for key in keys if key in held])
        with file.open("r+b") as opened:
            place = held.find(key)
            while place >= 0:
                opened.seek(place + len(key))
                opened.write(bytes([held[place + len(key)] ^ 0x10]))
                place = held.find(key, place + 1)


def _ignored(_: Exception) -> None:
    """A state that is broken says so to its role, which is not here."""
