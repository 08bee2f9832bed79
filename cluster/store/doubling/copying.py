"""Effects of the entries by which a child copies its parent: it takes values, and the parent deletes those that moved. Pure.

A child that learns applies only these entries: others of its own leaders have no effect until it is open, and its time is its
parent's. Everything is decided from the state alone, so that every replica of a partition does the same.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Final, Protocol

from cluster.replication.model import START, Entry, Position
from cluster.store.doubling.copied import DOUBLING_KEY, Record, followed, hold_of, note_of, position_of, rows_of
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Doubling, Phase, Step, fence_of, taken
from pixiu.errors import MalformedData

SLICE_KEYS: Final = 500
"""Keys that one deleting entry looks at: about a millisecond."""
_END: Final = b"\xff"


class Table(Protocol):
    """Interface to a state's keys and values."""

    def get(self, key: bytes) -> bytes | None:
        """Return a value's body. Raises StateDamaged."""

    def put(self, key: bytes, body: bytes) -> None:
        """Set a value."""

    def put_raw(self, key: bytes, value: bytes) -> None:
        """Set a value as it is stored."""

    def delete(self, key: bytes) -> None:
        """Remove a value."""

    def keys(self, low: bytes, high: bytes, limit: int) -> list[bytes]:
        """Return the first keys from `low` to below `high`."""


class Copying:
    """Applies a doubling's entries to a keyed state. A role derives from it, and supplies its keys and its own entries.

    Args:
        table: of the state.
    """

    SPACES: ClassVar[bytes]
    """First bytes of the keys of values that move, in the order in which a parent deletes them. Records hold indexes into it."""
    KEPT: ClassVar[tuple[bytes, ...]] = (DOUBLING_KEY,)
    """Keys that stay when a child begins anew."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.record = Record()
        self.on_open: Callable[[], None] = lambda: None
        """Called when the state is as it was at the cut, before the child's own entries."""
        body = table.get(DOUBLING_KEY)
        if body is not None:
            self.record = Record.decode(body)

    # --- what a role supplies

    @property
    def now_s(self) -> int:
        """The state's time, seconds."""
        raise NotImplementedError

    def user_of(self, key: bytes) -> int | None:
        """Return the user's key to whom a value belongs; None: to nobody."""
        raise NotImplementedError

    def body_of(self, key: bytes, value: bytes) -> bytes:
        """Return the body of a stored value. Raises StateDamaged."""
        return value

    def of_child(self, kind: int, payload: bytes, doubling: Doubling) -> bytes:
        """Return what of an entry concerns the child. See `OfChild`."""
        raise NotImplementedError

    def _learn(self, entry: Entry) -> bool:
        """Apply an entry of the parent as if it were the state's own; return False if the parent may have made something else of
        it, so that the child begins again."""
        raise NotImplementedError

    def _take_time(self, entry: Entry) -> None:
        """Advance the state's time to an entry's."""

    def _take_row(self, key: bytes, body: bytes) -> None:
        """Take a value of the parent that belongs to no user."""

    def _reset(self) -> None:
        """Forget everything in memory: the values go."""

    def _settle(self) -> None:
        """Put what is in memory alone into the table."""

    def _forget(self, key: bytes, user: int) -> None:
        """Forget a value in memory: it is deleted."""

    # --- what is known

    def movers(self, doubling: Doubling) -> Callable[[bytes], bool]:
        """Return a test of keys: whether a doubling moves a value."""

        def moves(key: bytes) -> bool:
            user = self.user_of(key)
            return user is not None and doubling.moves(user)

        return moves

    @property
    def learning(self) -> bool:
        """True if the state applies nothing but entries from its parent."""
        return self.record.phase is Phase.LEARNING

    @property
    def whole(self) -> bool:
        """True if a child may open: it has everything up to the cut."""
        return self.learning and self.record.whole

    @property
    def holds(self) -> bool:
        """True if the sweeps wait."""
        return self.record.holds(self.now_s)

    def stays(self, user: int) -> bool:
        """True if a user's values are not about to be deleted here; values that moved no longer change."""
        record = self.record
        return record.phase not in (Phase.SPLIT, Phase.CLEANING) or not record.doubling.moves(user)

    def apply(self, entry: Entry) -> bool:
        """Apply an entry of a doubling; return True if it had an effect. Late and repeated entries have none. Raises
        MalformedData."""
        command = Command.decode(entry.payload)
        record = self.record
        try:
            made = self._apply(command, entry.counter)
        except struct.error as wrong:
            raise MalformedData(f"a command of a doubling: {wrong}") from wrong
        if made is None:
            return False
        if made is not record:
            self.record = made
            self._table.put(DOUBLING_KEY, made.encode())
        return True

    def _apply(self, command: Command, counter: int) -> Record | None:
        record, step = self.record, command.step
        if step is Step.HOLD:
            return replace(record, hold_s=hold_of(command.body))
        if step is Step.OPEN and not self.whole:
            return None
        made = taken(record, command, counter)
        if made is not None:
            if step is Step.SPLIT:
                return Record(made.phase, made.doubling, made.split_at, made.fence, hold_s=record.hold_s)
            if step is Step.OPEN:
                self.on_open()
            return self._clean(record) if step is Step.CLEAN else made
        if command.doubling != record.doubling:
            return None
        if step is Step.NOTE:
            digest, keys, size = note_of(command.body)
            return replace(record, digest=digest, keys=keys, size=size)
        return self._learn_from(command) if record.phase is Phase.LEARNING else None

    # --- a child

    def _learn_from(self, command: Command) -> Record | None:
        record = self.record
        match command.step:
            case Step.RESET:
                self._settle()
                self._reset()
                return Record(Phase.LEARNING, record.doubling, source=position_of(command.body))
            case Step.DROP:
                return None if record.emptied else self._drop(record)
            case Step.ROWS:
                return self._take_rows(record, command.body)
            case Step.FOLLOW:
                return self._follow(record, command.body)
            case _:
                return None

    def _drop(self, record: Record) -> Record:
        table = self._table
        keys = table.keys(record.place, _END, SLICE_KEYS)
        for key in keys:
            if key not in self.KEPT:
                table.delete(key)
        return replace(record, place=keys[-1] + b"\0" if keys else b"", emptied=len(keys) < SLICE_KEYS)

    def _take_rows(self, record: Record, body: bytes) -> Record | None:
        if position_of(body) != record.source or not record.emptied or record.learned != START:
            return None
        last, rows = rows_of(body)
        keys, size = record.keys, record.size
        hold_s, split_at, fence = record.hold_s, record.split_at, record.fence
        for key, value in rows:
            if key == DOUBLING_KEY:
                parent = Record.decode(self.body_of(key, value))
                hold_s, fence = parent.hold_s, parent.fence
                if parent.phase is Phase.SPLIT and parent.doubling == record.doubling:
                    split_at = parent.split_at
            elif self.user_of(key) is None:
                self._take_row(key, self.body_of(key, value))
            else:
                self._table.put_raw(key, value)
                keys, size = keys + 1, size + len(key) + len(value)
        learned = record.source if last else START
        return replace(record, learned=learned, hold_s=hold_s, split_at=split_at, fence=fence, keys=keys, size=size)

    def _follow(self, record: Record, body: bytes) -> Record | None:
        if record.learned == START or record.whole:
            return None
        for entry in followed(body):
            if entry.counter <= self.record.learned.counter:
                continue
            if entry.counter != self.record.learned.counter + 1:
                break
            self._follow_one(entry)
            if self.record.learned == START or self.record.whole:
                break
        return None if self.record is record else self.record

    def _follow_one(self, entry: Entry) -> None:
        record = self.record
        here = Position(entry.epoch, entry.counter)
        if entry.kind == DOUBLING_KIND:
            self._take_time(entry)
            command = Command.decode(entry.payload)
            if command.step is Step.HOLD:
                record = replace(record, hold_s=hold_of(command.body))
            elif command.step is Step.TAKE_BACK:
                record = replace(record, fence=entry.counter)
            elif command.step is Step.SPLIT and command.doubling == record.doubling and fence_of(command.body) == record.fence:
                record = replace(record, split_at=entry.counter)
        elif not self._learn(entry):
            here = START  # the parent's state may differ from what this child made of the same entries
        self.record = replace(record, learned=here)

    # --- a parent

    def _clean(self, record: Record) -> Record:
        """Delete some more of the moved values."""
        table = self._table
        self._settle()
        index, low = (record.place[0], record.place[1:]) if record.place else (0, b"")
        space = self.SPACES[index : index + 1]
        keys = table.keys(low or space, bytes((space[0] + 1,)), SLICE_KEYS)
        deleted = 0
        for key in keys:
            user = self.user_of(key)
            if user is not None and record.doubling.moves(user):
                table.delete(key)
                deleted += 1
                self._forget(key, user)
        place = bytes((index,)) + keys[-1] + b"\0" if len(keys) == SLICE_KEYS else bytes((index + 1,))
        left = max(record.keys - deleted, 0)
        if place[0] == len(self.SPACES):
            return replace(record, phase=Phase.NONE, place=b"", keys=0, size=0)
        return replace(record, phase=Phase.CLEANING, place=place, keys=left)
