"""The proxy's core: routes records to brokers, and tells publishers what became of them.

A record goes to partition `key % n` and, inside it, to the replica that rendezvous hashing names. A publisher's
position is resolved when the brokers have handled the record (their links' acknowledgements), so that an accepted
record has left the proxy and the broker when either of them dies.

Source: seed 004 §2.2 steps 6 to 8, §2.2.1 (batches in one loop here, threads there).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from pixiu import errors
from pixiu.ids import EndpointID
from pixiu.partition import rendezvous
from pixiu.record import HEADER_SIZE, LEAST_SIZE, ROUTE, SIZE_FIELD, Flag, Kind
from pixiu.routing import Routes
from proxy.events import (
    BatchForwarded,
    BatchPublished,
    BrokersChanged,
    Delivered,
    Effect,
    Event,
    Failure,
    MalformedBatch,
    PublisherClosed,
    PublisherOpened,
    Replica,
    Reply,
    SendRecords,
    Settled,
    SignalsDelivered,
    Tick,
)
from proxy.signals import AwaitedSignals, only_signals, replica_of_copy

MAX_HELD_BATCHES = 10_000
"""Batches that wait for a change of routes; beyond it the change does not wait any longer."""
FIRST_LANE_BELOW = 64
"""A record type below this is in lane 0 (its top two bits are the lane)."""
ROOM: Final = int(Kind.ROOM)
SIGNAL: Final = int(Kind.SIGNAL)


@dataclass(slots=True)
class _Batch:
    """A publisher's batch under way."""

    stream: int
    first: int
    last: int
    data: bytes
    copy: int = 0
    receipt: bool = False
    pending: int = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Target:
    """One broker replica, with the parcel that is being made up for it."""

    endpoint: EndpointID
    ordered: bool = True
    """False: its records are signals, for which no change of routes waits."""
    normal: list[bytes] = field(default_factory=list)
    first: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What the proxy has done since its start."""

    records_in: int = 0
    records_out: int = 0
    records_refused: int = 0
    records_dropped: int = 0
    batches_malformed: int = 0
    batches_held: int = 0
    signal_copies_in: int = 0
    signals_confirmed: int = 0
    """Told to publishers that had asked for receipts."""


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        max_record_bytes: larger records are refused, header included.
        barrier_ms: see `pixiu.routing.Routes`.
    """

    def __init__(self, *, max_record_bytes: int, barrier_ms: int = 200) -> None:
        self._max_size = max_record_bytes - SIZE_FIELD
        self._partitions = 1
        self._by_partition: dict[int, list[Replica]] = {}
        self._targets: dict[EndpointID, _Target] = {}
        self._signal_targets: dict[EndpointID, _Target] = {}
        self._routes: Routes[_Target] = Routes(self._choose, barrier_ms)
        self._tokens: dict[int, tuple[_Batch | None, list[bytes]]] = {}
        self._next_token = 1
        self._streams: dict[int, deque[_Batch]] = {}
        self._held: deque[BatchPublished | BatchForwarded] = deque()
        self._awaited = AwaitedSignals()
        self.counters = Counters()

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        effects: list[Effect] = []
        match event:
            case BatchPublished() | BatchForwarded():
                if self._routes.held and len(self._held) < MAX_HELD_BATCHES and not self._may_pass(event):
                    self._held.append(event)
                    self.counters.batches_held += 1
                else:
                    self._take(event, effects)
            case Settled(parcels):
                self._settle(parcels, effects)
            case SignalsDelivered(signals):
                for stream, told in self._awaited.delivered(signals).items():
                    if stream in self._streams:
                        self.counters.signals_confirmed += len(told)
                        effects.append(Delivered(stream, told))
            case BrokersChanged():
                self._brokers_changed(event, now)
            case PublisherOpened(stream):
                self._streams[stream] = deque()
            case PublisherClosed(stream):
                self._streams.pop(stream, None)
            case Tick():
                self._routes.expire(now)
        if self._held and not self._routes.held:
            held, self._held = self._held, deque()
            for batch in held:
                self._take(batch, effects)
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due, monotonic seconds; None for never."""
        return self._routes.deadline

    @property
    def under_way(self) -> int:
        """Parcels that are not settled yet."""
        return len(self._tokens) + len(self._held)

    def _may_pass(self, event: BatchPublished | BatchForwarded) -> bool:
        """Whether a batch need not wait for a change of routes: only signals, and none of its stream waits before it."""
        return (
            isinstance(event, BatchPublished)
            and only_signals(event.data, event.count)
            and not any(isinstance(held, BatchPublished) and held.stream == event.stream for held in self._held)
        )

    def _choose(self, key: int) -> _Target | None:
        replicas = self._by_partition.get(key % self._partitions)
        if not replicas:
            return None
        usable = [replica.endpoint for replica in replicas if replica.usable]
        return self._targets[EndpointID(rendezvous(key, usable or [replica.endpoint for replica in replicas]))]

    def _brokers_changed(self, event: BrokersChanged, now: float) -> None:
        self._partitions = event.partitions
        self._by_partition = {}
        for replica in event.replicas:
            self._by_partition.setdefault(replica.partition, []).append(replica)
        known = {replica.endpoint for replica in event.replicas}
        gone = [target for endpoint, target in self._targets.items() if endpoint not in known]
        self._targets = {endpoint: self._targets.get(endpoint) or _Target(endpoint) for endpoint in sorted(known)}
        self._signal_targets = {endpoint: _Target(endpoint, ordered=False) for endpoint in self._targets}
        self._routes.change(now, gone)

    def _target_of_signal(self, flags: int, signal: int, key: int, batch: _Batch | None) -> _Target | None:
        replicas = self._by_partition.get(key % self._partitions) if flags & Flag.TO_ROOM else None
        if not replicas:
            return None
        self.counters.signal_copies_in += 1
        if batch is not None and batch.receipt:
            self._awaited.wait(signal, batch.stream)
        copy = batch.copy if batch is not None else 0
        return self._signal_targets[EndpointID(replica_of_copy(replicas, signal, copy))]

    def _take(self, event: BatchPublished | BatchForwarded, effects: list[Effect]) -> None:
        """Route one batch: parcels for brokers, and for a publisher the reply when nothing is left to wait for."""
        if isinstance(event, BatchForwarded):
            self._route(event.data, event.start, event.end, event.count, None, effects)
            return
        batches = self._streams.get(event.stream)
        if batches is None:
            return
        batch = _Batch(event.stream, event.position, event.position + event.count - 1, event.data, event.copy, event.receipt)
        batches.append(batch)
        self._route(event.data, 0, len(event.data), event.count, batch, effects)
        if not batch.pending:
            self._reply(batches, effects)

    def _route(self, data: bytes, start: int, end: int, count: int, batch: _Batch | None, effects: list[Effect]) -> None:
        cache, unpack, largest = self._routes.cache, ROUTE.unpack_from, self._max_size
        touched: list[_Target] = []
        refused: list[tuple[int, type[errors.PixiuError], str]] = []
        position = start
        for index in range(count):
            if position + HEADER_SIZE > end:
                break
            size, kind, flags, type_, snowflake, key = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < LEAST_SIZE or after > end:
                break
            if kind == ROOM:
                target = cache.get(key) or self._routes.target(key)
            elif kind == SIGNAL:
                target = self._target_of_signal(flags, snowflake, key, batch)
            else:
                target = None
            if target is None or size > largest:
                refused.append((index, *self._refusal(kind == ROOM or (kind == SIGNAL and flags & Flag.TO_ROOM), size, key)))
            else:
                if not target.normal and not target.first:
                    touched.append(target)
                (target.normal if type_ >= FIRST_LANE_BELOW else target.first).append(data[position:after])
            position = after
        else:
            if position == end:
                self.counters.records_in += count
                self._send(touched, batch, effects)
                self._refuse(refused, batch)
                return
        for target in touched:
            target.normal, target.first = [], []
        self._malformed(batch, effects)

    def _send(self, touched: list[_Target], batch: _Batch | None, effects: list[Effect]) -> None:
        for target in touched:
            for lane, records in ((0, target.first), (1, target.normal)):
                if records:
                    token = self._next_token
                    self._next_token += 1
                    self._tokens[token] = (batch, records)
                    if target.ordered:
                        self._routes.sent(token, target)
                    if batch is not None:
                        batch.pending += 1
                    self.counters.records_out += len(records)
                    effects.append(SendRecords(target.endpoint, records, lane, token))
            target.normal, target.first = [], []

    def _refusal(self, served: bool | int, size: int, key: int) -> tuple[type[errors.PixiuError], str]:
        if size > self._max_size:
            text = f"a record of {size + SIZE_FIELD} bytes is above the cluster's limit of {self._max_size + SIZE_FIELD}"
            return errors.RecordTooLarge, f"{text}; send a reference to the content instead"
        if served:
            partition = key % self._partitions
            return errors.Unavailable, f"no broker of partition {partition} is running; `pixiu status` shows which are missing"
        return errors.InvalidArgument, "this cluster's proxies take room messages and signals to rooms"

    def _refuse(self, refused: list[tuple[int, type[errors.PixiuError], str]], batch: _Batch | None) -> None:
        self.counters.records_refused += len(refused)
        if batch is not None:
            for index, error, text in refused:
                batch.failures.append(Failure(batch.first + index, batch.first + index, error.code, text))

    def _malformed(self, batch: _Batch | None, effects: list[Effect]) -> None:
        self.counters.batches_malformed += 1
        if batch is not None:
            text = "the batch is not whole records end to end: the client library is broken or another version"
            batch.failures.append(Failure(batch.first, batch.last, errors.MalformedData.code, text))
            effects.append(MalformedBatch(batch.stream))

    def _settle(self, parcels: list[tuple[int, bool]], effects: list[Effect]) -> None:
        finished: dict[int, None] = {}
        for token, handled in parcels:
            self._routes.settled(token)
            batch, records = self._tokens.pop(token, (None, []))
            if not handled:
                self.counters.records_dropped += len(records)
            if batch is None:
                continue
            batch.pending -= 1
            if not handled:
                batch.failures.extend(_dropped(batch, records))
            if not batch.pending:
                finished[batch.stream] = None
        for stream in finished:
            batches = self._streams.get(stream)
            if batches is not None:
                self._reply(batches, effects)

    def _reply(self, batches: deque[_Batch], effects: list[Effect]) -> None:
        """Resolve what is finished at the head of a stream, in order."""
        up_to, stream = 0, 0
        failures: list[Failure] = []
        while batches and not batches[0].pending:
            batch = batches.popleft()
            up_to, stream = batch.last, batch.stream
            failures.extend(batch.failures)
        if up_to:
            effects.append(Reply(stream, up_to, failures))


def _dropped(batch: _Batch, records: list[bytes]) -> list[Failure]:
    """Name the positions of a parcel that a broker did not confirm. Rare, so it walks the batch again."""
    lost = {record[16:24] for record in records}
    positions: list[int] = []
    offset = 0
    for position in range(batch.first, batch.last + 1):
        if batch.data[offset + 16 : offset + 24] in lost:
            positions.append(position)
        offset += SIZE_FIELD + int.from_bytes(batch.data[offset : offset + 4], "little")
    text = "a broker did not confirm it: it may be lost; sending it again with the same ID is safe"
    failures: list[Failure] = []
    for position in positions:
        if failures and failures[-1].last == position - 1:
            failures[-1] = Failure(failures[-1].first, position, errors.Dropped.code, text)
        else:
            failures.append(Failure(position, position, errors.Dropped.code, text))
    return failures
