"""A writer's mail in flight: divided into batches with the same route, and these into parts for the partitions of Pi. Pure.

    what a writer sent ──▶ batches, each to one partition of Xiu ──▶ stored ──▶ parts, each to one partition of Pi

Source: docs/protocol.md, "Record", docs/routing.md, docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pixiu import errors
from pixiu.errors import Refusal
from pixiu.ids import MAX_ID
from pixiu.placement.split import SplitPartitions
from pixiu.wire.inbox_operations import MAX_RECEIVERS
from pixiu.wire.levels import Level
from pixiu.wire.record import HEADER_SIZE, MAIL, MIN_SIZE, ROUTE, SIZE_FIELD, TYPE_AT, Flag
from proxy import mail_events as ev
from proxy.publishers.permits import REFUSALS

BATCH_BYTES: Final = 256 << 10
"""Bytes at which a batch takes no more records."""


@dataclass(slots=True, eq=False)
class Writer:
    """One stream of a sender."""

    stream: int
    worker: int
    generation: int
    xius: int
    """Partitions of Xiu when it began, or when it last had nothing in flight: the modulus of its channels."""
    expected: int = 1
    size: int = 0
    """Bytes that are not confirmed."""
    ended: bool = False
    batches: dict[Batch, None] = field(default_factory=dict)
    """Batches in flight, in order."""
    channels: dict[int, deque[Batch]] = field(default_factory=dict)
    """UIN % `xius` → mail for the inboxes of these users, in order, whichever partition stores it; RoomID % `xius` → messages to
    these rooms. A mail to several users may be in several; it goes on when it is the first in all of them."""


@dataclass(slots=True, eq=False)
class Batch:
    """Mail of one writer and one level with the same route: many to one receiver each, or one to many."""

    writer: Writer
    level: Level
    partition: int
    """The partition of Xiu."""
    channels: tuple[int, ...]
    deadline: float
    positions: list[int] = field(default_factory=list)
    uins: list[int] = field(default_factory=list)
    """One receiver of each mail; of a mail to many all receivers."""
    many: bool = False
    room: int = 0
    """The key of a message to a room, which is none of its receivers; 0: the first receiver is the key."""
    ends: list[int] = field(default_factory=list)
    """End of each record in `data`."""
    types: bytearray = field(default_factory=bytearray)
    size: int = 0
    data: bytes = b""
    msg_ids: list[int] = field(default_factory=list)
    codes: dict[int, Refusal] = field(default_factory=dict)
    """Index → reason of Xiu's refusal."""
    copies: int = 0
    stored: bool = False
    pending: int = 0
    """Parts that Pi has not answered."""
    open: set[int] = field(default_factory=set)
    """Inboxes that do not have a mail to many yet."""
    refused: Refusal | None = None
    """Reason why some inbox did not take a mail to many."""
    done: bool = False

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.positions)

    @property
    def keys(self) -> list[int]:
        """The records' keys, which choose the partition of Xiu."""
        return [self.room] if self.room else self.uins[:1] if self.many else self.uins

    def hold(self, data: bytes) -> None:
        """Set the records, all of them."""
        self.data, self.size = data, len(data) + 8 * len(self.uins)

    def finish(self) -> None:
        """Note that nobody asks for it any more. It may stay in queues for a while, without its records."""
        self.done, self.data, self.uins, self.msg_ids = True, b"", [], []


@dataclass(slots=True, eq=False)
class Part:
    """Appends of a batch to inboxes of one partition of Pi."""

    batch: Batch
    indexes: Sequence[int]
    """Index in the batch, one for each receiver in `uins`."""
    uins: Sequence[int]


def split(
    writer: Writer, event: ev.MailReceived, partition_of: Callable[[int], int], max_size: int, deadline: float
) -> tuple[list[Batch], list[ev.Result]] | None:
    """Split a writer's mail into batches, in order, and refusals. Returns None if it is malformed.

    Args:
        writer: the sender.
        event: its mail.
        partition_of: the partition of Xiu that stores a user's mail. Users of one partition are of one channel.
        max_size: of a record, without its size field.
        deadline: of the batches.
    """
    data, end, unpack, more, xius = event.data, len(event.data), ROUTE.unpack_from, event.more, writer.xius
    batches: list[Batch] = []
    records: dict[Batch, list[bytes]] = {}
    growing: dict[int, Batch] = {}
    refused: list[ev.Result] = []
    at = 0
    for index in range(event.count):
        if at + HEADER_SIZE > end:
            return None
        size, kind, flags, type_, _, key = unpack(data, at)
        after = at + SIZE_FIELD + size
        if size < MIN_SIZE or after > end:
            return None
        position, record, others = event.position + index, data[at:after], more.get(index) if more else None
        at = after
        if kind != MAIL or flags & Flag.TO_ROOM or not 0 < key <= MAX_ID or size > max_size:
            refused.append(ev.refused(position, _refusal(kind, size, max_size)))
            continue
        if others:
            receivers = list(dict.fromkeys([key, *others]))
            problem = _problem_of(receivers)
            if problem is not None:
                refused.append(ev.refused(position, problem))
                continue
            channels = tuple(dict.fromkeys(uin % xius for uin in receivers))
            for partition in [partition for partition in growing if partition % xius in channels]:
                del growing[partition]  # later mail in these channels must not overtake
            batch = Batch(writer, event.level, partition_of(key), channels, deadline, uins=receivers, many=True)
            batch.open = set(receivers)
            batches.append(batch)
        else:
            partition = partition_of(key)
            known = growing.get(partition)
            if known is None or known.ends[-1] >= BATCH_BYTES:
                known = growing[partition] = Batch(writer, event.level, partition, (key % xius,), deadline)
                batches.append(known)
            batch = known
            batch.uins.append(key)
        batch.positions.append(position)
        batch.types.append(type_)
        batch.ends.append(len(record) + (batch.ends[-1] if batch.ends else 0))
        records.setdefault(batch, []).append(record)
    if at != end:
        return None
    for batch in batches:
        batch.hold(b"".join(records[batch]))
    return batches, refused


def batch_of_room(writer: Writer, position: int, mail: ev.RoomMail, partition: int, deadline: float) -> Batch:
    """Batch of a message to a room for sessions. Its channel is the room's, so order is that of each room."""
    batch = Batch(writer, Level.REPLICATED, partition, (mail.room % writer.xius,), deadline, [position], list(mail.uins), many=True)
    batch.room, batch.open = mail.room, set(mail.uins)
    batch.types.append(mail.record[TYPE_AT])
    batch.ends.append(len(mail.record))
    batch.hold(mail.record)
    return batch


def divide(batch: Batch, partition_of: Callable[[int], int]) -> list[Batch]:
    """Divide an unstored batch by the partitions of Xiu that store its mail now. The batch itself keeps a part; the others follow
    it in its channels. A mail to many goes where its first receiver's mail goes, or its room's."""
    if batch.many:
        batch.partition = partition_of(batch.keys[0])
        return [batch]
    wanted: dict[int, list[int]] = {}
    for index, uin in enumerate(batch.uins):
        wanted.setdefault(partition_of(uin), []).append(index)
    if len(wanted) == 1:
        (batch.partition,) = wanted
        return [batch]
    begins = [0, *batch.ends]
    positions, uins, types, ends, data = batch.positions, batch.uins, batch.types, batch.ends, batch.data
    parts: list[Batch] = []
    for partition, indexes in wanted.items():
        part = batch if not parts else Batch(batch.writer, batch.level, partition, batch.channels, batch.deadline)
        part.partition, part.codes = partition, {}
        part.positions, part.uins = [positions[at] for at in indexes], [uins[at] for at in indexes]
        part.types, part.ends = bytearray(types[at] for at in indexes), []
        records = [data[begins[at] : ends[at]] for at in indexes]
        for record in records:
            part.ends.append(len(record) + (part.ends[-1] if part.ends else 0))
        part.hold(b"".join(records))
        parts.append(part)
    return parts


def parts_of(batch: Batch, pis: SplitPartitions) -> dict[int, Part]:
    """Partition of Pi → part of a batch, without what Xiu refused."""
    if batch.many:
        wanted = [(0, uin) for uin in batch.uins] if not batch.codes else []
    elif len(pis.all()) == 1 and not batch.codes:
        return {0: Part(batch, list(range(batch.count)), batch.uins)}
    else:
        wanted = [(index, uin) for index, uin in enumerate(batch.uins) if index not in batch.codes]
    return _by_partition(batch, wanted, pis)


def split_again(part: Part, pis: SplitPartitions) -> dict[int, Part]:
    """Partition of Pi → what of a part belongs there now; the batch waits for each of them."""
    found = _by_partition(part.batch, zip(part.indexes, part.uins, strict=True), pis)
    part.batch.pending += len(found) - 1
    return found


def _by_partition(batch: Batch, wanted: Iterable[tuple[int, int]], pis: SplitPartitions) -> dict[int, Part]:
    found: dict[int, tuple[list[int], list[int]]] = {}
    of = pis.of
    for index, uin in wanted:
        indexes, uins = found.setdefault(of(uin), ([], []))
        indexes.append(index)
        uins.append(uin)
    return {partition: Part(batch, indexes, uins) for partition, (indexes, uins) in found.items()}


def _refusal(kind: int, size: int, max_size: int) -> Refusal:
    if size > max_size:
        limit = max_size + SIZE_FIELD
        return Refusal(errors.RecordTooLarge.code, f"a record of {size + SIZE_FIELD} bytes is above the cluster's limit of {limit}")
    if kind in REFUSALS:
        return Refusal(errors.NotAllowed.code, REFUSALS[kind])
    if kind != MAIL:
        return Refusal(errors.InvalidArgument.code, f"a record of kind {kind}; mail has kind {MAIL}")
    return Refusal(errors.InvalidArgument.code, "mail goes to users: UINs are from 1 to 2^63-1")


def _problem_of(receivers: list[int]) -> Refusal | None:
    if len(receivers) > MAX_RECEIVERS:
        return Refusal(
            errors.TooManyReceivers.code, f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several"
        )
    if not all(0 < uin <= MAX_ID for uin in receivers):
        return Refusal(errors.InvalidArgument.code, "mail goes to users: UINs are from 1 to 2^63-1")
    return None
