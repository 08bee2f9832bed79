"""Translation between deliveries and Pi's messages: requests of an allowed size, answers, notices. Pure.

Source: docs/delivery.md, docs/stores.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from cluster.wire.v1 import delivery_pb2
from pixiu.errors import Gone, NotYet, OldSession, Overloaded, UnknownDevice
from pixiu.ids import msg_lane, msg_partition
from pixiu.wire.inbox_operations import MAX_READ_ENTRIES, Code
from pixiu.wire.record import MIN_SIZE, SIZE_FIELD
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as ev

MAX_NOTICES: Final = 4096
"""Limit of notices in one batch of a proxy."""
MAX_READS: Final = 64
"""Limit of reads in one request. A Pi serves them in one turn of its event loop, from inboxes that may not be in memory: some pages
each."""
_CODES: Final = {UnknownDevice.code: ev.Failure.REFUSED, OldSession.code: ev.Failure.FENCED}
_MISSING: Final = {NotYet.code: ev.Missing.NOT_YET, Gone.code: ev.Missing.GONE, Overloaded.code: ev.Missing.FULL}

_NONE: Final[tuple[int, list[int], list[bytes]]] = (0, [], [])

ReadItem = tuple[ev.Asked, int, Sequence[ev.Read]]
FetchItem = tuple[ev.Asked, Sequence[int]]


def read_requests(items: Sequence[ReadItem]) -> Iterator[Sequence[ReadItem]]:
    """Split reads of one partition into requests: at most `MAX_READS` each, and no more entries than Pi returns, since a cut-off
    answer would look like the inbox's end."""
    part: list[ReadItem] = []
    reads = entries = 0
    for item in items:
        wanted = sum(read.num for read in item[2])
        if part and (reads + len(item[2]) > MAX_READS or entries + wanted > MAX_READ_ENTRIES):
            yield part
            part, reads, entries = [], 0, 0
        part.append(item)
        reads += len(item[2])
        entries += wanted
    if part:
        yield part


def reads_of(items: Sequence[ReadItem]) -> list[pi_pb2.PiRead]:
    """Encode reads."""
    return [
        pi_pb2.PiRead(uin=asked.uin, device=asked.device, lane=read.lane, session=session, start=read.start, num=read.num)
        for asked, session, reads in items
        for read in reads
    ]


def listings_of(
    items: Sequence[ReadItem], reply: pi_pb2.PiReply | None
) -> list[tuple[ev.Asked, Sequence[ev.Listing] | ev.Failure]]:
    """Translate the answers to a request's reads."""
    if reply is None or len(reply.reads) != sum(len(reads) for _, _, reads in items):
        return [(asked, ev.Failure.LATER) for asked, _, _ in items]
    answers: list[tuple[ev.Asked, Sequence[ev.Listing] | ev.Failure]] = []
    at = 0
    for asked, _, reads in items:
        own = reply.reads[at : at + len(reads)]
        at += len(reads)
        refused = [_CODES.get(found.code, ev.Failure.LATER) for found in own if found.code]
        if refused:
            answers.append((asked, max(refused, key=_gravity)))
        else:
            answers.append((asked, [_listing(found) for found in own]))
    return answers


def _gravity(failure: ev.Failure) -> int:
    return (ev.Failure.LATER, ev.Failure.REFUSED, ev.Failure.FENCED).index(failure)


def _listing(found: pi_pb2.PiReadReply) -> ev.Listing:
    return ev.Listing(list(zip(found.seqs, found.msg_ids, strict=False)), found.floor, found.gap, found.last, found.up_to)


def numbers_of(count: int, reply: pi_pb2.PiReply | None) -> list[int | ev.Failure]:
    """The result of each item of a request, 0 or above; else why there is none."""
    if reply is None or len(reply.results) != count:
        return [ev.Failure.LATER] * count
    fenced, refused = ev.Failure.FENCED, ev.Failure.REFUSED
    return [result if result >= 0 else fenced if result == -Code.OLD_SESSION else refused for result in reply.results]


def fetches_of(items: Sequence[FetchItem]) -> list[list[FetchItem]]:
    """Split fetches by the partitions of Xiu that they need: one that does not answer delays only users with mail there."""
    apart: dict[frozenset[int], list[FetchItem]] = {}
    for item in items:
        apart.setdefault(frozenset(map(msg_partition, item[1])), []).append(item)
    return list(apart.values())


def records_of(
    items: Sequence[FetchItem], found: Mapping[int, tuple[str, bytes]]
) -> list[tuple[ev.Asked, Sequence[bytes | ev.Missing] | ev.Failure]]:
    """Translate the answers to a fetch. Records that are unavailable now, or damaged and may be repaired, are requested again."""
    return [(asked, [_record(found.get(each)) for each in msg_ids]) for asked, msg_ids in items]


def _record(answer: tuple[str, bytes] | None) -> bytes | ev.Missing:
    if answer is None:
        return ev.Missing.LATER
    code, record = answer
    return _MISSING.get(code, ev.Missing.LATER) if code else record


def notices_of(batch: delivery_pb2.NoticeBatch) -> list[ev.Notice] | None:
    """Decode a batch of notices; consecutive ones in a user's lane are joined. None: the batch is malformed."""
    count = len(batch.uins)
    if count > MAX_NOTICES or not count == len(batch.seqs) == len(batch.msg_ids) == len(batch.sizes):
        return None
    records = batch.records  # protobuf copies the bytes each time
    if sum(batch.sizes) != len(records):
        return None
    found: list[ev.Notice] = []
    growing: dict[int, tuple[int, list[int], list[bytes]]] = {}
    """UIN << 2 | lane → the InboxSeq after its last notice, and the lists of that notice."""
    at = 0
    for uin, seq, msg_id, size in zip(batch.uins, batch.seqs, batch.msg_ids, batch.sizes, strict=True):
        record = records[at : at + size]
        at += size
        said = int.from_bytes(record[:SIZE_FIELD], "little")
        if size and (said < MIN_SIZE or said + SIZE_FIELD != size):
            return None
        lane = msg_lane(msg_id)
        inbox = uin << 2 | lane
        following, msg_ids, bodies = growing.get(inbox, _NONE)
        if seq and seq == following:
            msg_ids.append(msg_id)
            bodies.append(record)
        else:
            msg_ids, bodies = [msg_id], [record]
            found.append(ev.Notice(uin, lane, seq, msg_ids, bodies))
        growing[inbox] = seq + 1, msg_ids, bodies
    return found


def acknowledgements_of(reply: delivery_pb2.DeliveryReply) -> list[ev.Acknowledgement]:
    """Decode a gateway's report: acknowledgements, and what it has written if it was asked."""
    return [
        ev.Acknowledgement(
            each.uin, each.device, each.session, each.lane, each.up_to, each.bits, each.written if each.HasField("written") else -1
        )
        for each in reply.acknowledgements
    ]
