"""Requests to the leaders of Xiu and Pi: their content, those in flight, and Xiu's answers to them. Pure.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, Generic, TypeVar

from cluster.core.contract import NEVER
from pixiu.errors import Refusal
from pixiu.ids import MSG_SEQUENCE_BITS
from pixiu.wire.inbox_operations import encode_appends, encode_fanout
from pixiu.wire.levels import Level
from proxy import mail_events as ev
from proxy.mail.batches import Batch, Part
from proxy.mail.results import PERMANENT

STORE_BYTES: Final = 256 << 10
STORE_RECORDS: Final = 1000
"""Records of one request to a Xiu; or one batch. A store decides a request in one turn, at some 40 µs a record."""
APPEND_ITEMS: Final = 1000
"""Appends of one request to a Pi; or one part, which is at most as large as a batch."""
MAX_REQUESTS: Final = 4
"""Unanswered requests to one store. Policy: later mail waits and leaves together."""
STALL_S: Final = 10.0
"""Silence, seconds, after which a store that owes an answer is left for the next leader."""

Waiting = TypeVar("Waiting")


class Request(Generic[Waiting]):
    """A request to a store that is not answered yet."""

    __slots__ = ("codes", "count", "found", "partitions", "remaining", "retry", "waiting")

    def __init__(self, waiting: list[Waiting], count: int, remaining: int = 0, found: list[int] | None = None) -> None:
        self.waiting = waiting
        self.count = count
        self.remaining = remaining
        self.found: list[int] = [] if found is None else found
        """MsgIDs."""
        self.codes: dict[int, Refusal] = {}
        self.retry: Refusal | None = None
        self.partitions = 0
        """Number of partitions by the count of a Xiu that refused some records as another partition's."""


class Link(Generic[Waiting]):
    """The stream to the leader of one partition, and the requests on it."""

    __slots__ = ("bounces", "epoch", "in_flight", "next_number", "not_before", "number", "progress_at", "queue", "store", "trouble")

    def __init__(self, store: ev.Store) -> None:
        self.store = store
        self.number = 0
        """Number of the open stream; 0: none is open."""
        self.epoch = -1
        """-1: no stream was requested yet."""
        self.queue: deque[Waiting] = deque()
        self.in_flight: dict[int, Request[Waiting]] = {}
        """Number of a request → the request, in order; for a Xiu, the number is the position of its first record."""
        self.next_number = 1
        self.progress_at = 0.0
        self.not_before = 0.0
        self.trouble: Refusal | None = None
        """The last refusal."""
        self.bounces = 0
        """Number of times that a child of this partition of Xiu refused what this one had refused, since the layout changed."""

    @property
    def deadline(self) -> float:
        """Time at which it stalls, or at which waiting mail may be sent again; `NEVER`: nothing to wait for."""
        stalls_at = self.progress_at + STALL_S if self.in_flight else NEVER
        sends = self.number and self.queue and len(self.in_flight) < MAX_REQUESTS
        return min(stalls_at, self.not_before) if sends else stalls_at

    def stalls(self, now: float) -> bool:
        """True if its answer is overdue."""
        return bool(self.in_flight) and now >= self.progress_at + STALL_S

    def sent(self, request: Request[Waiting], numbers: int, now: float) -> int:
        """Note a request that leaves and takes `numbers` numbers. Returns its first number."""
        number = self.next_number
        self.next_number += numbers
        if not self.in_flight:
            self.progress_at = now
        self.in_flight[number] = request
        return number

    def drop(self) -> list[Request[Waiting]]:
        """Drop the stream. Returns its requests, in order."""
        lost = list(self.in_flight.values())
        self.in_flight, self.number, self.epoch = {}, 0, 0
        return lost


def store_requests(link: Link[Batch], now: float) -> Iterator[ev.SendStore]:
    """Build the requests that leave for a Xiu now: batches of one level together."""
    while len(link.in_flight) < MAX_REQUESTS:
        batches: list[Batch] = []
        size, count, level = 0, 0, Level.REPLICATED
        while link.queue:
            after = link.queue[0]
            if not after.done:
                more = size + after.size > STORE_BYTES or count + after.count > STORE_RECORDS
                if batches and (more or after.level != level):
                    break
                size, count, level = size + after.size, count + after.count, after.level
                batches.append(after)
            link.queue.popleft()
        if not batches:
            return
        position = link.sent(Request(batches, count, count, [0] * count), count, now)
        data = batches[0].data if len(batches) == 1 else b"".join(batch.data for batch in batches)
        yield ev.SendStore(link.store.partition, link.number, position, data, count, level, link.epoch)


def append_requests(link: Link[Part], now: float) -> Iterator[ev.SendAppend]:
    """Build the requests that leave for a Pi now: parts of one level together."""
    while len(link.in_flight) < MAX_REQUESTS:
        parts: list[Part] = []
        items, level = 0, Level.REPLICATED
        while link.queue:
            after = link.queue[0]
            if not after.batch.done:
                if parts and (items + len(after.uins) > APPEND_ITEMS or after.batch.level != level):
                    break
                items, level = items + len(after.uins), after.batch.level
                parts.append(after)
            link.queue.popleft()
        if not parts:
            return
        number = link.sent(Request(parts, items), 1, now)
        operations = b"".join([_operation(part, link.epoch) for part in parts])
        yield ev.SendAppend(link.store.partition, link.number, number, operations, level)


def _operation(part: Part, epoch: int) -> bytes:
    batch, writer = part.batch, part.batch.writer
    if batch.many:
        return encode_fanout(writer.worker, writer.generation, epoch, batch.msg_ids[0], part.uins)
    msg_ids = [batch.msg_ids[index] for index in part.indexes]
    return encode_appends(writer.worker, writer.generation, epoch, msg_ids, part.uins)


def take_runs(link: Link[Batch], runs: Sequence[ev.StoredRun]) -> list[Request[Batch]]:
    """Note Xiu's answers for records in flight. Returns the requests that are answered completely."""
    starts = list(link.in_flight)
    current = 0
    answered: list[int] = []
    for run in runs:
        while current < len(starts) and not 0 <= run.position - starts[current] < link.in_flight[starts[current]].count:
            current += 1
        if current == len(starts):  # levels may be answered out of order: look again from the first one
            current = next((i for i, s in enumerate(starts) if 0 <= run.position - s < link.in_flight[s].count), -1)
        if current < 0:
            current = 0
            continue
        request = link.in_flight[starts[current]]
        _take_run(request, run, run.position - starts[current], link.store.partition)
        if request.remaining <= 0:
            answered.append(starts[current])
    return [link.in_flight.pop(start) for start in dict.fromkeys(answered)]


def _take_run(request: Request[Batch], run: ev.StoredRun, begin: int, partition: int) -> None:
    """Note Xiu's answer for some records of a request, the first of them at index `begin`."""
    count = min(run.count, request.count - begin)
    request.remaining -= count
    if run.refusal is not None:
        if run.refusal.code in PERMANENT:
            for index in range(begin, begin + count):
                request.codes[index] = run.refusal
        else:
            request.retry, request.partitions = run.refusal, run.partitions or request.partitions
    elif run.msg_id:
        request.found[begin : begin + count] = [run.msg_id] * count
    else:
        types = b"".join(bytes(batch.types) for batch in request.waiting)[begin : begin + count]
        base = (partition << 8) << MSG_SEQUENCE_BITS
        sequences = range(run.sequence, run.sequence + count)
        request.found[begin : begin + count] = [
            base | type_ << MSG_SEQUENCE_BITS | sequence for type_, sequence in zip(types, sequences, strict=True)
        ]
