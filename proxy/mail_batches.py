"""A writer's batch taken apart into parcels, and what stores say of them. Pure.

Source: DESIGN sections 5, 8 and 9 ("Mail").
"""

from __future__ import annotations

from typing import Final

from pixiu import errors
from pixiu.ids import MAX_ID, MSG_SEQUENCE_BITS
from pixiu.wire.inbox_operations import MAX_RECEIVERS, Code
from pixiu.wire.record import HEADER_SIZE, LEAST_SIZE, ROUTE, SIZE_FIELD, Flag, Kind
from proxy.mail_events import MailReceived, Result, StoredRun
from proxy.mail_state import Parcel, Request, Writer

MAIL: Final = int(Kind.MAIL)
PARCEL_BYTES: Final = 256 << 10
"""A parcel that has as much takes no more records."""
PERMANENT: Final = frozenset({
    errors.IdReused.code, errors.IdTooOld.code, errors.IdAhead.code, errors.RecordTooLarge.code, errors.InvalidArgument.code,
    errors.ChecksumWrong.code, errors.DiskFull.code, errors.TooManyReceivers.code,
})  # fmt: skip
"""What a sender is told at once; everything else is tried again."""
INBOX_FULL: Final = -int(Code.INBOX_FULL)
_FULL_TEXT: Final = "the inbox is at its limit and refuses more (pi.inbox_full); the user must acknowledge some first"


def split(
    writer: Writer, event: MailReceived, xius: int, max_size: int, deadline: float
) -> tuple[list[Parcel], list[Result]] | None:
    """Parcels of a batch, in order, and what is refused of it; None when it is malformed.

    Args:
        writer: whose.
        event: the batch.
        xius: partitions of Xiu.
        max_size: of a record, without its size field.
        deadline: of the parcels.
    """
    data, end, unpack, more = event.data, len(event.data), ROUTE.unpack_from, event.more
    parcels: list[Parcel] = []
    records: dict[Parcel, list[bytes]] = {}
    growing: dict[int, Parcel] = {}
    refused: list[Result] = []
    at = 0
    for index in range(event.count):
        if at + HEADER_SIZE > end:
            return None
        size, kind, flags, type_, _, key = unpack(data, at)
        after = at + SIZE_FIELD + size
        if size < LEAST_SIZE or after > end:
            return None
        position, record, others = event.position + index, data[at:after], more.get(index) if more else None
        at = after
        if kind != MAIL or flags & Flag.TO_ROOM or not 0 < key <= MAX_ID or size > max_size:
            refused.append(Result(position, 1, 0, (), *_refusal(kind, size, max_size)))
            continue
        if others:
            receivers = list(dict.fromkeys([key, *others]))
            problem = _problem_of(receivers)
            if problem is not None:
                refused.append(Result(position, 1, 0, (), *problem))
                continue
            channels = tuple(dict.fromkeys(uin % xius for uin in receivers))
            for channel in channels:  # what follows in them must not overtake
                growing.pop(channel, None)
            parcel = Parcel(writer, event.level, key % xius, channels, deadline, uins=receivers, many=True)
            parcel.open = set(receivers)
            parcels.append(parcel)
        else:
            channel = key % xius
            known = growing.get(channel)
            if known is None or known.ends[-1] >= PARCEL_BYTES:
                known = growing[channel] = Parcel(writer, event.level, channel, (channel,), deadline)
                parcels.append(known)
            parcel = known
            parcel.uins.append(key)
        parcel.positions.append(position)
        parcel.types.append(type_)
        parcel.ends.append(len(record) + (parcel.ends[-1] if parcel.ends else 0))
        records.setdefault(parcel, []).append(record)
    if at != end:
        return None
    for parcel in parcels:
        parcel.data = b"".join(records[parcel])
        parcel.size = len(parcel.data) + 8 * len(parcel.uins)
    return parcels, refused


def take_run(request: Request[Parcel], run: StoredRun, begin: int, partition: int) -> None:
    """Note what a Xiu says of some records of a request, the first of them at index `begin`."""
    count = min(run.count, request.count - begin)
    request.remaining -= count
    if run.code:
        if run.code in PERMANENT:
            for index in range(begin, begin + count):
                request.codes[index] = (run.code, run.text)
        else:
            request.retry = (run.code, run.text)
    elif run.msg_id:
        request.found[begin : begin + count] = [run.msg_id] * count
    else:
        types = b"".join(bytes(parcel.types) for parcel in request.waiting)[begin : begin + count]
        base = (partition << 8) << MSG_SEQUENCE_BITS
        sequences = range(run.sequence, run.sequence + count)
        request.found[begin : begin + count] = [
            base | type_ << MSG_SEQUENCE_BITS | sequence for type_, sequence in zip(types, sequences, strict=True)
        ]


def why_not(result: int) -> tuple[str, str]:
    """What a sender is told of an append that Pi refused."""
    if result == INBOX_FULL:
        return errors.InboxFull.code, _FULL_TEXT
    return errors.InvalidArgument.code, f"Pi refused it ({result})"


def _refusal(kind: int, size: int, max_size: int) -> tuple[str, str]:
    if size > max_size:
        limit = max_size + SIZE_FIELD
        return errors.RecordTooLarge.code, f"a record of {size + SIZE_FIELD} bytes is above the cluster's limit of {limit}"
    if kind != MAIL:
        return errors.InvalidArgument.code, f"a record of kind {kind}; mail has kind {MAIL}"
    return errors.InvalidArgument.code, "mail goes to users: UINs are from 1 to 2^63-1"


def _problem_of(receivers: list[int]) -> tuple[str, str] | None:
    if len(receivers) > MAX_RECEIVERS:
        return errors.TooManyReceivers.code, f"{len(receivers)} receivers; one mail has at most {MAX_RECEIVERS}: send several"
    if not all(0 < uin <= MAX_ID for uin in receivers):
        return errors.InvalidArgument.code, "mail goes to users: UINs are from 1 to 2^63-1"
    return None
