"""Effects of a doubling's entries on a state: a child takes values from its parent, a parent deletes those that moved. Pure.

A child that learns applies only these entries: clock entries of its own leaders have no effect until it is open, and its time is
its parent's. Everything is decided from the state alone, so that every replica of a partition does the same.

Source: docs/doubling.md.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cluster.replication.model import START, Entry, Position
from cluster.store.doubling.phases import DOUBLING_KIND, Command, Phase, Step, fence_of, taken
from pi.doubling.phases import DOUBLING_KEY, Record, followed, hold_of, note_of, position_of, rows_of
from pi.early import EARLY_KIND
from pi.inboxes.inbox_table import InboxTable
from pi.keys import INBOX_KEY, META_KEY, uin_of, unseal
from pixiu.errors import MalformedData
from pixiu.wire.inbox_operations import ENTRY_KIND, Op

SLICE_KEYS: Final = 500
"""Keys that one deleting entry looks at: about a millisecond."""
_ORDER: Final = b"TKICDHU"
"""The sweeps find inboxes by T, so nothing else of an inbox may be deleted before it. Nothing is stored under I any more, but
records hold indexes into this order."""
_KEPT: Final = (META_KEY, DOUBLING_KEY)
_END: Final = b"\xff"
_CLOCK: Final = bytes((Op.CLOCK,))


class DoublingState:
    """Applies a doubling's entries.

    Args:
        inboxes: of the state.
        learn: applies an entry of the parent as if it were the state's own.
        take_time: advances the state's time to an entry's.
        take_row: takes a value of the parent that belongs to no user.
        reset: forgets everything in memory.
    """

    def __init__(
        self,
        inboxes: InboxTable,
        *,
        learn: Callable[[Entry], object],
        take_time: Callable[[Entry], None],
        take_row: Callable[[bytes, bytes], None],
        reset: Callable[[], None],
    ) -> None:
        self._inboxes = inboxes
        self._learn, self._take_time, self._take_row, self._reset = learn, take_time, take_row, reset
        self.record = Record()
        self.on_open: Callable[[], None] = lambda: None
        """Called when the state is as it was at the cut, before the child's own entries."""
        body = inboxes.table.get(DOUBLING_KEY)
        if body is not None:
            self.record = Record.decode(body)

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
        return self.record.holds(self._inboxes.now_s)

    def stays(self, uin: int) -> bool:
        """True if a user's values are not about to be deleted here; values that moved no longer change."""
        record = self.record
        return record.phase not in (Phase.SPLIT, Phase.CLEANING) or not record.doubling.moves(uin)

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
            self._inboxes.table.put(DOUBLING_KEY, made.encode())
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
                self._inboxes.encode()
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
        table = self._inboxes.table
        keys = table.keys(record.place, _END, SLICE_KEYS)
        for key in keys:
            if key not in _KEPT:
                table.delete(key)
        return replace(record, place=keys[-1] + b"\0" if keys else b"", emptied=len(keys) < SLICE_KEYS)

    def _take_rows(self, record: Record, body: bytes) -> Record | None:
        if position_of(body) != record.source or not record.emptied or record.learned != START:
            return None
        last, rows = rows_of(body)
        changes, keys, size = self._inboxes.table.changes, record.keys, record.size
        hold_s, split_at, fence = record.hold_s, record.split_at, record.fence
        for key, value in rows:
            if key == DOUBLING_KEY:
                parent = Record.decode(unseal(key, value))
                hold_s, fence = parent.hold_s, parent.fence
                if parent.phase is Phase.SPLIT and parent.doubling == record.doubling:
                    split_at = parent.split_at
            elif uin_of(key) is None:
                self._take_row(key, unseal(key, value))
            else:
                changes[key] = value
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
        elif entry.kind == EARLY_KIND:
            here = START  # the parent's state differs from what this child made of the same entries
        else:
            self._learn(entry)
            if entry.kind == ENTRY_KIND and entry.payload[:1] == _CLOCK and not self.holds:
                here = START  # the parent's sweeps went on without this child: it begins again
        self.record = replace(record, learned=here)

    # --- a parent

    def _clean(self, record: Record) -> Record:
        """Delete some more of the moved values."""
        inboxes = self._inboxes
        table, moves = inboxes.table, record.doubling.moves
        inboxes.encode()
        index, low = (record.place[0], record.place[1:]) if record.place else (0, b"")
        space = _ORDER[index : index + 1]
        keys = table.keys(low or space, bytes((space[0] + 1,)), SLICE_KEYS)
        deleted = 0
        for key in keys:
            uin = uin_of(key)
            if uin is None or not moves(uin):
                continue
            table.delete(key)
            deleted += 1
            if space == b"H":
                inboxes.heads.drop(uin << 2 | INBOX_KEY.unpack(key)[2])
            elif space in b"UC":
                inboxes.forget_user(uin)
        place = bytes((index,)) + keys[-1] + b"\0" if len(keys) == SLICE_KEYS else bytes((index + 1,))
        left = max(record.keys - deleted, 0)
        if place[0] == len(_ORDER):
            return replace(record, phase=Phase.NONE, place=b"", keys=0, size=0)
        return replace(record, phase=Phase.CLEANING, place=place, keys=left)
