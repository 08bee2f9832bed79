"""Signals in a gateway: the first copy is delivered, further ones are dropped, even across a restart of the gateway. Pure.

Signals of one turn of the event loop are looked up and recorded in one transaction of the table at the turn's end, just before they
are written to the clients. Each copy of a delivered signal, now or earlier, is answered, because the answer to the copy before may
have been lost.

Source: PiXiu §4 step 4; docs/architecture.md, "A signal to a room", and benchmarks/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from gateway.membership.rooms import Channel
from pixiu.wire.record import FLAGS_AT, KEY_AT, SENDER_AT, SNOWFLAKE_AT, Flag, Kind, intact_body

SIGNAL: Final = int(Kind.SIGNAL)
MAX_SIGNALS_A_TURN: Final = 10_000
"""Copies that may wait for the end of a turn; those beyond it are dropped and counted."""
MEMORY_GENERATION: Final = 131_072
"""Signals in a generation of the table of a gateway without shared memory."""
DERIVED_ID_SHIFT: Final = 58
"""Moves the flag for derived IDs to the top bit, which no ID uses: they are a key space of their own."""

assert Flag.DERIVED_ID << DERIVED_ID_SHIFT == 1 << 63

Identity = tuple[int, int]
"""Identity of a signal: its ID, and its key."""


class SignalTable(Protocol):
    """Remembers delivered signals, in two generations: the oldest are forgotten together."""

    def add(self, identities: Sequence[Identity]) -> list[bool]:
        """Record signals, all at once. Returns for each whether it is new; never raises."""


class MemoryTable:
    """A table in the memory of the process, lost with it."""

    def __init__(self, generation: int = MEMORY_GENERATION) -> None:
        self._generation = generation
        self._seen: set[Identity] = set()
        self._before: set[Identity] = set()

    def __len__(self) -> int:
        return len(self._seen) + len(self._before)

    def add(self, identities: Sequence[Identity]) -> list[bool]:
        """Add identities, as in `SignalTable`."""
        new: list[bool] = []
        for identity in identities:
            if identity in self._seen or identity in self._before:
                new.append(False)
                continue
            if len(self._seen) >= self._generation:
                self._before, self._seen = self._seen, set()
            self._seen.add(identity)
            new.append(True)
        return new


class Turn(NamedTuple):
    """Outcome of a turn's signals."""

    deliver: list[tuple[Channel, bytes, bytes]]
    """Channel, record and body of each new one."""
    answer: list[int]
    """SnowflakeIDs of all that were delivered, now or before, each once."""
    repeated: int
    without_members: int
    damaged: int


class Signals:
    """Signals of a turn, and the table."""

    def __init__(self, table: SignalTable) -> None:
        self.table = table
        self.overflows = 0
        self.waiting: list[bytes] = []
        """Copies that came in this turn."""

    def take(self, record: bytes) -> None:
        """Take a copy: one whole record."""
        if len(self.waiting) >= MAX_SIGNALS_A_TURN:
            self.overflows += 1
        else:
            self.waiting.append(record)

    def end_turn(self, channel_of: Callable[[bytes, bytes], Channel | None]) -> Turn:
        """Decide on the turn's signals. `channel_of(record, body)` finds the clients of this gateway that get one.

        A signal that nobody here gets is not recorded: a later copy may find a client that has joined meanwhile.
        """
        waiting, self.waiting = self.waiting, []
        found: list[tuple[Channel, bytes, bytes]] = []
        without_members = damaged = 0
        for record in waiting:
            body = intact_body(record)
            if body is None:
                damaged += 1
                continue
            channel = channel_of(record, body)
            if channel is None:
                without_members += 1
            else:
                found.append((channel, record, body))
        new = self.table.add([_identity(record) for _, record, _ in found]) if found else []
        deliver = [one for one, is_new in zip(found, new, strict=True) if is_new]
        answer = dict.fromkeys(int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little") for _, record, _ in found)
        return Turn(deliver, list(answer), len(found) - len(deliver), without_members, damaged)


def _identity(record: bytes) -> Identity:
    number = int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little") | (record[FLAGS_AT] & Flag.DERIVED_ID) << DERIVED_ID_SHIFT
    return number, int.from_bytes(record[KEY_AT:SENDER_AT], "little")
