"""Notes: values that a server keeps beside a user's inbox, and the end of such a user. Pure.

Their users are no people: each stands for something that ends, such as an MQTT session. So nothing of them stays for ever: `clear`
removes all but their numbers, and what nobody comes back to goes by age, whole.

Source: docs/pi.md, "Notes".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pi.inboxes.inbox import User
from pi.inboxes.inbox_table import InboxTable
from pi.inboxes.ranges import NO_RANGES
from pi.keys import CRC_BYTES, NOTE_VALUE, NOTES_LANE, deleted_key, note_key, time_key
from pixiu.wire.inbox_operations import MAX_LANE, MAX_NOTE, Code

_HOUR_S: Final = 3600


class NoteFound(NamedTuple):
    """A note of a user."""

    name: int
    generation: int
    value: bytes


class Notes:
    """The notes of a state's users."""

    def __init__(self, inboxes: InboxTable) -> None:
        self._inboxes = inboxes

    def of(self, uin: int) -> tuple[list[NoteFound], int]:
        """Return a user's notes, and the generation below which nothing can be set. Raises StateDamaged."""
        user, found = self._inboxes.user(uin), list[NoteFound]()
        for name in _names(user):
            body = self._inboxes.table.get(note_key(uin, name))
            if body is not None:
                found.append(NoteFound(name, NOTE_VALUE.unpack_from(body)[0], body[NOTE_VALUE.size :]))
        return found, user.generation

    def set(self, uin: int, name: int, generation: int, value: bytes) -> int:
        """Set a note, or remove it if the value is empty. Returns 0 or `-Code`."""
        if name > MAX_NOTE or not generation:
            return -Code.INVALID_ARGUMENT
        inboxes, key = self._inboxes, note_key(uin, name)
        user = inboxes.user(uin)
        if generation < user.generation:
            return -Code.OLD_SESSION
        bit = 1 << name
        if value and inboxes.limits.no_space and self._grows(key, value):
            return -Code.DISK_FULL
        names = user.names | bit if value else user.names & ~bit
        if value:
            inboxes.table.put(key, NOTE_VALUE.pack(generation) + value)
        elif user.names & bit:
            inboxes.table.delete(key)
        if self._list(uin, user) or (generation, names) != (user.generation, user.names):
            user.generation, user.names = generation, names
            inboxes.put_user(uin, user)
        return 0

    def _grows(self, key: bytes, value: bytes) -> bool:
        stored = self._inboxes.table.get_raw(key)
        return stored is None or len(stored) < NOTE_VALUE.size + len(value) + CRC_BYTES

    def _list(self, uin: int, user: User) -> bool:
        """List the notes under the present hour, by which they go. Returns True if they were not."""
        hour = self._inboxes.now_s // _HOUR_S
        if user.hour == hour:
            return False
        user.hour = hour
        self._inboxes.table.put(time_key(hour, uin, NOTES_LANE), b"")
        return True

    def clear(self, uin: int, generation: int) -> int:
        """Remove notes, devices and entries of a user, without a gap. Numbers go on: nothing late can be taken for something new.
        Users without notes are left as they are. Returns 0 or `-Code`."""
        user = self._inboxes.user(uin)
        if not generation:
            return -Code.INVALID_ARGUMENT
        if generation < user.generation:
            return -Code.OLD_SESSION
        if user.generation:
            user.generation = generation
            self._empty(uin, user)
            self._list(uin, user)
            self._inboxes.put_user(uin, user)
        return 0

    def _empty(self, uin: int, user: User) -> int:
        """Remove what a user has; return the number of entries. The caller stores the user."""
        inboxes, removed = self._inboxes, 0
        for name in _names(user):
            inboxes.table.delete(note_key(uin, name))
        user.names = 0
        for number in user.devices:
            inboxes.forget_cursors(uin, number)
        user.devices = {}
        for lane in range(MAX_LANE + 1):
            head = inboxes.head(uin, lane)
            if head.deleted is not NO_RANGES:
                inboxes.table.delete(deleted_key(uin, lane))
                head.deleted = NO_RANGES
                inboxes.changed(uin, lane, head)
            if head.base < head.last or head.gap:
                removed += head.last - head.base
                head.floor, head.gap, head.oldest_s = head.last, 0, 0
                inboxes.cut(uin, lane, head, head.last)
        return removed

    def expire(self, uin: int, hour: int) -> int:
        """Remove a user whole whose notes are as old as this hour, unless a device counts. Returns the number of entries that went
        with it."""
        inboxes = self._inboxes
        user = inboxes.user(uin)
        if not user.generation or user.hour != hour:
            return 0  # there is nothing, or the notes are listed under a later hour
        if any(inboxes.counts(device) for device in user.devices.values()):
            self._list(uin, user)
            inboxes.put_user(uin, user)
            return 0
        removed = self._empty(uin, user)
        for lane in range(MAX_LANE + 1):
            inboxes.remove(uin, lane)
        inboxes.remove_user(uin)
        return removed


def _names(user: User) -> list[int]:
    return [name for name in range(MAX_NOTE + 1) if user.names >> name & 1]
