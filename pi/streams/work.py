"""The user and the amount of a request's work: input of `/hot` for a store that is reached by streams. Pure.

One random user of each request counts for the whole request, to save look-ups. The first one would be biased for senders whose
batches begin alike.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pixiu.wire.inbox_operations import ACKNOWLEDGE, APPEND, CLEAR, DELETE, HEAD, TRIM, U64, USER_DEVICE, WRITER, Op, spans
from pixiu.wire.v1 import pi_pb2

_ITEMS: Final[Mapping[int, tuple[int, int, int]]] = {
    Op.APPENDS: (WRITER.size, APPEND.size, U64.size),
    Op.FANOUT: (WRITER.size + U64.size, U64.size, 0),
    Op.ACKNOWLEDGES: (0, ACKNOWLEDGE.size, 0),
    Op.OPEN_SESSIONS: (0, USER_DEVICE.size, 0),
    Op.ADD_DEVICE: (0, 0, 0),
    Op.DROP_DEVICES: (0, USER_DEVICE.size, 0),
    Op.TRIMS: (0, TRIM.size, 0),
    Op.DELETES: (0, DELETE.size, 0),
    Op.NOTE: (0, 0, 0),
    Op.CLEARS: (0, CLEAR.size, 0),
}
"""Operation → offset of its items, bytes of one (0: there is one), and offset of the UIN in it."""
MAX_LOOKED_AT: Final = 64
"""Limit of operations of a request that are searched for the chosen one."""


def removals(operations: bytes) -> Iterator[dict[str, object]]:
    """Deletions and dropped devices in a request, as an audit log has them: they remove something of a user for good. Malformed
    operations are left to the code that applies them."""
    at, size = 0, len(operations)
    while at + HEAD.size <= size:
        number, length = HEAD.unpack_from(operations, at)
        body, at = operations[at + HEAD.size : at + HEAD.size + length], at + HEAD.size + length
        if number == Op.DELETES:
            for begin in range(0, len(body) - DELETE.size + 1, DELETE.size):
                uin, lane, first, last = DELETE.unpack_from(body, begin)
                yield {"what": "delete", "uin": uin, "lane": lane, "first": first, "last": last}
        elif number == Op.DROP_DEVICES:
            for begin in range(0, len(body) - USER_DEVICE.size + 1, USER_DEVICE.size):
                uin, device = USER_DEVICE.unpack_from(body, begin)
                yield {"what": "drop device", "uin": uin, "device": device}
        elif number == Op.CLEARS:
            for begin in range(0, len(body) - CLEAR.size + 1, CLEAR.size):
                uin, _ = CLEAR.unpack_from(body, begin)
                yield {"what": "clear", "uin": uin}


def of_notes(operations: bytes, reads: Iterable[pi_pb2.PiRead]) -> bool:
    """True if a request sets and reads notes alone: no other one is taken from a gateway. Raises MalformedData."""
    return all(op in (Op.NOTE, Op.CLEARS) for op, _, _ in spans(operations)) and all(read.peek and not read.num for read in reads)


def work_of(operations: bytes, readers: list[int], lot: float) -> tuple[int, int]:
    """(UIN, number of reads and operations, the latter estimated by size); (0, 0) if there is no user.

    operations: as `pixiu.wire.inbox_operations` describes them. readers: the UIN of each read. lot: 0 to below 1.
    """
    size = len(operations)
    items = len(readers) + -(-size // APPEND.size)
    place = int(lot * items)
    if place < len(readers):
        return readers[place], items
    wanted, at = (place - len(readers)) * APPEND.size, 0
    for _ in range(MAX_LOOKED_AT):
        if at + HEAD.size > size:
            break
        number, length = HEAD.unpack_from(operations, at)
        body, end = at + HEAD.size, at + HEAD.size + length
        if end > wanted or end >= size:
            return _user_in(operations, number, body, min(end, size), wanted, items)
        at = end
    return (readers[0], items) if readers else (0, 0)


def _user_in(operations: bytes, number: int, body: int, end: int, wanted: int, items: int) -> tuple[int, int]:
    """The user of the item that contains a byte of an operation."""
    found = _ITEMS.get(number)
    if found is None:
        return 0, 0
    begin, size, uin_at = body + found[0], found[1], found[2]
    if size and wanted > begin:
        begin += min((wanted - begin) // size, max((end - begin) // size - 1, 0)) * size
    if begin + uin_at + U64.size > end:
        return 0, 0
    (uin,) = U64.unpack_from(operations, begin + uin_at)
    return (uin, items) if uin else (0, 0)
