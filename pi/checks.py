"""Checks of a leader on its callers' operations, which it refuses or passes on. Pure.

Operations are not decoded: numbers are unpacked a body at a time, and valid bytes go into the log as they came.

Source: docs/pi.md, "Modules".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from pixiu.errors import InvalidArgument, TooManyReceivers, WrongPartition
from pixiu.ids import MAX_ID
from pixiu.wire.inbox_operations import (
    ACKNOWLEDGE,
    APPEND,
    CLEAR,
    DELETE,
    FANOUT_HEAD,
    MAX_RECEIVERS,
    TRIM,
    U64,
    USER_DEVICE,
    WRITER,
    Op,
    Writer,
    writer_at,
)

Span = tuple[int, int, int]
"""(number, begin of the body, end of the body): see `pixiu.wire.inbox_operations.spans`."""
_APPENDS, _FANOUT = int(Op.APPENDS), int(Op.FANOUT)
_SINGLE: Final = (int(Op.ADD_DEVICE), int(Op.NOTE))
"""Operations on one user, with whose UIN they begin."""
_LEADERS: Final = (int(Op.CLOCK), int(Op.GIVE_UP))
"""Operations that only a leader may put into the log."""
_USERS: Final = {
    int(op): struct.Struct(f"<Q{form.size - U64.size}x")
    for op, form in (
        (Op.ACKNOWLEDGES, ACKNOWLEDGE), (Op.OPEN_SESSIONS, USER_DEVICE), (Op.DROP_DEVICES, USER_DEVICE), (Op.TRIMS, TRIM),
        (Op.DELETES, DELETE), (Op.CLEARS, CLEAR),
    )
}  # fmt: skip
"""Items that begin with a UIN: the formats read only that."""


def writers_of(payload: bytes, found: Sequence[Span]) -> list[Writer]:
    """Return the writers of all appends and fan-outs. Raises MalformedData."""
    return [writer_at(payload, begin) for op, begin, _ in found if op in (_APPENDS, _FANOUT)]


def appends_of(payload: bytes, found: Sequence[Span]) -> list[tuple[int, int]] | None:
    """(MsgID, UIN) of each append, in the order of their results; None if there are other operations."""
    pairs: list[tuple[int, int]] = []
    for op, begin, end in found:
        begin += WRITER.size
        if op == _APPENDS:
            pairs += APPEND.iter_unpack(memoryview(payload)[begin:end])
        elif op == _FANOUT:
            msg_id, *receivers = _numbers(payload, begin, (end - begin) // U64.size)
            pairs += [(msg_id, uin) for uin in receivers]
        else:
            return None
    return pairs


NOBODY: Final = -1
"""Stands for a partition in a replica that serves no user."""


def check(payload: bytes, found: Sequence[Span], partition: int, partitions: int) -> int:
    """Check a caller's operations; return the number of appends to inboxes that they contain.

    Args:
        payload: the operations.
        found: where each one is.
        partition: this replica's; `NOBODY`: it serves no user.
        partitions: number of Pi's partitions; 0 while it is not known: then any user is served.

    Raises WrongPartition, InvalidArgument, TooManyReceivers.
    """
    appends = 0
    for op, begin, end in found:
        if op == _APPENDS:
            numbers = _numbers(payload, begin + WRITER.size, (end - begin - WRITER.size) // APPEND.size * 2)
            check_users(numbers[1::2], partition, partitions)
            _check_messages(numbers[::2])
            appends += len(numbers) // 2
        elif op == _FANOUT:
            receivers = _numbers(payload, begin + FANOUT_HEAD, (end - begin - FANOUT_HEAD) // U64.size)
            if len(receivers) > MAX_RECEIVERS:
                raise TooManyReceivers(f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several")
            check_users(receivers, partition, partitions)
            _check_messages(_numbers(payload, begin + WRITER.size, 1))
            appends += len(receivers)
        elif op in _SINGLE:
            check_users(_numbers(payload, begin, 1), partition, partitions)
        elif op in _LEADERS:
            raise InvalidArgument("only a leader sets the clock, or gives up what is lost")
        else:
            check_users([uin for (uin,) in _USERS[op].iter_unpack(memoryview(payload)[begin:end])], partition, partitions)
    return appends


def _numbers(payload: bytes, begin: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", payload, begin)


def check_users(uins: Sequence[int], partition: int, partitions: int) -> None:
    """Raise WrongPartition or InvalidArgument for the first user that this partition does not serve."""
    if not uins:
        return
    n = partitions or 1
    rest = partition % n if partition != NOBODY else NOBODY
    if min(uins) > 0 and max(uins) <= MAX_ID and ((n == 1 and not rest) or not [uin for uin in uins if uin % n != rest]):
        return
    for uin in uins:
        if uin % n != rest:
            here = "this one, which is not open" if partition == NOBODY else str(partition)
            raise WrongPartition(f"user {uin} is served by pi partition {uin % n} of {n}, not by {here}", key=uin)
        if not 0 < uin <= MAX_ID:
            raise InvalidArgument(f"UIN {uin} is out of range: 1 to 2^63-1")


def _check_messages(msg_ids: Sequence[int]) -> None:
    if msg_ids and not (min(msg_ids) > 0 and max(msg_ids) <= MAX_ID):
        wrong = next(msg_id for msg_id in msg_ids if not 0 < msg_id <= MAX_ID)
        raise InvalidArgument(f"MsgID {wrong} is out of range: 1 to 2^63-1")
