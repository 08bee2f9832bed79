"""Choice of the records that a leader trims, by age and by size: at marks, so that every replica trims at the same place. Pure.

Source: docs/stores.md; by size where an operator asked for it).
"""

from __future__ import annotations

from collections.abc import Iterable

from pixiu.ids import MAX_MSG_SEQUENCE
from xiu.state.state import Head


def trim_to(
    marks: Iterable[tuple[int, int, int]], head: Head, at_us: int, keep_us: int, keep_bytes: int, keep_from: int = MAX_MSG_SEQUENCE
) -> tuple[int, int] | None:
    """Return (sequence, bytes stored before it): earlier records may be trimmed. None: nothing may.

    Args:
        marks: (sequence, clock µs, bytes stored before it), in order.
        head: of the state.
        at_us: the leader's time, Unix µs.
        keep_us: older records may be trimmed; 0: none by age.
        keep_bytes: records before this size of the newest ones may be trimmed; 0: none by size.
        keep_from: a reader needs records from this sequence on (`xiu.state.readers`).
    """
    found: tuple[int, int] | None = None
    for sequence, marked_us, before in marks:
        old = keep_us and marked_us < at_us - keep_us
        surplus = keep_bytes and head.stored_bytes - before >= keep_bytes
        if (not old and not surplus) or sequence > keep_from:
            break
        if sequence > head.floor:
            found = sequence, before
    return found


def trim_below(marks: Iterable[tuple[int, int, int]], head: Head, position: int) -> tuple[int, int] | None:
    """Return (sequence, bytes stored before it) of the last mark at or below a position: earlier records may be trimmed on an
    operator's request. None: no mark is between the floor and the position.

    Args:
        marks, head: as of `trim_to`.
        position: records from here on stay.
    """
    found: tuple[int, int] | None = None
    for sequence, _, before in marks:
        if sequence > position:
            break
        if sequence > head.floor:
            found = sequence, before
    return found
