"""The proxy's core: routes records to brokers and relays, and tells publishers what became of them.

A record goes to partition `key % n` and, inside it, to the replica that rendezvous hashing names. A publisher's
position is resolved when brokers or relays have handled the record (their links' acknowledgements), so that an accepted
record has left the proxy and that replica when either of them dies.

Source: seed 004 §2.2 steps 6 to 8, §2.2.1 (batches in one loop here, threads there).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pixiu import errors
from pixiu.record import HEADER_SIZE, LEAST_SIZE, ROUTE, SIZE_FIELD, Flag, Kind
from proxy.chat import OfflineNotices
from proxy.destinations import Destinations, Target
from proxy.events import (
    BatchForwarded,
    BatchPublished,
    BrokersChanged,
    Effect,
    Event,
    Failure,
    MalformedBatch,
    PublisherClosed,
    PublisherOpened,
    RelaysChanged,
    Reply,
    SendRecords,
    Settled,
    Tick,
    UsersOffline,
)

MAX_HELD_BATCHES = 10_000
"""Batches that wait for a change of routes; beyond it the change does not wait any longer."""
FIRST_LANE_BELOW = 64
"""A record type below this is in lane 0 (its top two bits are the lane)."""
ROOM_KIND = int(Kind.ROOM)
ALL_KINDS = frozenset({"room", "chat"})
DROPPED = "a broker or relay did not confirm it: it may be lost; sending it again with the same ID is safe"
OFFLINE = "the user has no device online that takes messages; nobody got it, and it is not kept"


@dataclass(slots=True)
class _Batch:
    """A publisher's batch under way."""

    stream: int
    first: int
    last: int
    data: bytes
    pending: int = 0
    failures: list[Failure] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What the proxy has done since its start."""

    records_in: int = 0
    records_out: int = 0
    records_refused: int = 0
    records_dropped: int = 0
    records_offline: int = 0
    """To users of whom no device took them."""
    batches_malformed: int = 0
    batches_held: int = 0


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        max_record_bytes: larger records are refused, header included.
        barrier_ms: see `pixiu.routing.Routes`.
        kinds: what is taken: "room", "chat".
    """

    def __init__(self, *, max_record_bytes: int, barrier_ms: int = 200, kinds: frozenset[str] = ALL_KINDS) -> None:
        self._max_size = max_record_bytes - SIZE_FIELD
        self._kinds = kinds
        self._room_kind = ROOM_KIND if "room" in kinds else -1
        """The kind that takes the short way."""
        self._brokers = Destinations(barrier_ms)
        self._relays = Destinations(barrier_ms, chat=True)
        self._relays.partitions = 0
        self._offline = OfflineNotices()
        self._chat_tokens: set[int] = set()
        self._tokens: dict[int, tuple[_Batch | None, list[bytes]]] = {}
        self._next_token = 1
        self._streams: dict[int, deque[_Batch]] = {}
        self._held: deque[BatchPublished | BatchForwarded] = deque()
        self.counters = Counters()

    def step(self, event: Event, now: float) -> list[Effect]:
        """Take one event; `now` is monotonic seconds. Returns what to do, in order."""
        effects: list[Effect] = []
        match event:
            case BatchPublished() | BatchForwarded():
                if self._held_back() and len(self._held) < MAX_HELD_BATCHES:
                    self._held.append(event)
                    self.counters.batches_held += 1
                else:
                    self._take(event, effects)
            case Settled(parcels):
                self._settle(parcels, effects)
            case BrokersChanged(partitions, replicas):
                self._brokers.change(partitions, replicas, now)
            case RelaysChanged(partitions, replicas):
                self._relays.change(partitions, replicas, now)
            case UsersOffline(ids):
                self._offline.add(ids)
            case PublisherOpened(stream):
                self._streams[stream] = deque()
            case PublisherClosed(stream):
                self._streams.pop(stream, None)
            case Tick():
                self._brokers.routes.expire(now)
                self._relays.routes.expire(now)
        if self._held and not self._held_back():
            held, self._held = self._held, deque()
            for batch in held:
                self._take(batch, effects)
        return effects

    def next_deadline(self) -> float | None:
        """When `Tick` is due, monotonic seconds; None for never."""
        due = [when for when in (self._brokers.routes.deadline, self._relays.routes.deadline) if when is not None]
        return min(due, default=None)

    @property
    def under_way(self) -> int:
        """Parcels that are not settled yet."""
        return len(self._tokens) + len(self._held)

    def _held_back(self) -> bool:
        """Whether a change of routes waits for what is under way."""
        return self._brokers.routes.held or self._relays.routes.held

    def _take(self, event: BatchPublished | BatchForwarded, effects: list[Effect]) -> None:
        """Route one batch: parcels for brokers and relays, and for a publisher the reply when nothing is left to wait for."""
        if isinstance(event, BatchForwarded):
            self._route(event.data, event.start, event.end, event.count, None, effects)
            return
        batches = self._streams.get(event.stream)
        if batches is None:
            return
        batch = _Batch(event.stream, event.position, event.position + event.count - 1, event.data)
        batches.append(batch)
        self._route(event.data, 0, len(event.data), event.count, batch, effects)
        if not batch.pending:
            self._reply(batches, effects)

    def _route(self, data: bytes, start: int, end: int, count: int, batch: _Batch | None, effects: list[Effect]) -> None:
        routes, unpack, largest, room_kind = self._brokers.routes, ROUTE.unpack_from, self._max_size, self._room_kind
        cache = routes.cache
        touched: list[Target] = []
        refused: list[tuple[int, type[errors.PixiuError], str]] = []
        position = start
        for index in range(count):
            if position + HEADER_SIZE > end:
                break
            size, kind, flags, type_, _, key = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < LEAST_SIZE or after > end:
                break
            target = cache.get(key) or routes.target(key) if kind == room_kind else self._special(kind, flags, key)
            if target is None or size > largest:
                refused.append((index, *self._refusal(kind, flags, size, key)))
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

    def _send(self, touched: list[Target], batch: _Batch | None, effects: list[Effect]) -> None:
        for target in touched:
            for lane, records in ((0, target.first), (1, target.normal)):
                if records:
                    token = self._next_token
                    self._next_token += 1
                    self._tokens[token] = (batch, records)
                    if target.chat:
                        self._chat_tokens.add(token)
                        self._relays.routes.sent(token, target)
                    else:
                        self._brokers.routes.sent(token, target)
                    if batch is not None:
                        batch.pending += 1
                    self.counters.records_out += len(records)
                    effects.append(SendRecords(target.endpoint, records, lane, token))
            target.normal, target.first = [], []

    def _special(self, kind: int, flags: int, key: int) -> Target | None:
        """Where a record goes that is no room message, or whose kind this proxy may not take."""
        if kind == Kind.CHAT and "chat" in self._kinds and self._relays.partitions:
            return self._relays.routes.target(key)
        if kind == Kind.SIGNAL and flags & Flag.TO_ROOM and "room" in self._kinds:
            return self._brokers.routes.target(key)
        return None

    def _refusal(self, kind: int, flags: int, size: int, key: int) -> tuple[type[errors.PixiuError], str]:
        if size > self._max_size:
            text = f"a record of {size + SIZE_FIELD} bytes is above the cluster's limit of {self._max_size + SIZE_FIELD}"
            return errors.RecordTooLarge, f"{text}; send a reference to the content instead"
        to_room = kind == Kind.ROOM or (kind == Kind.SIGNAL and bool(flags & Flag.TO_ROOM))
        if not to_room and kind != Kind.CHAT:
            return errors.InvalidArgument, "this cluster's proxies take room messages, signals to rooms, and chat"
        name = "room" if to_room else "chat"
        if name not in self._kinds:
            return errors.InvalidArgument, f"this proxy does not take {name} messages (proxy.kinds); use another one"
        if not to_room and not self._relays.partitions:
            return errors.Unavailable, "this cluster has no relays, so no messages to users: `pixiu up --relays 2` has them"
        role, partitions = ("broker", self._brokers.partitions) if to_room else ("relay", self._relays.partitions)
        partition = key % partitions
        return errors.Unavailable, f"no {role} of partition {partition} is running; `pixiu status` shows which are missing"

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
            batch, records = self._tokens.pop(token, (None, []))
            offline: list[bytes] = []
            if token in self._chat_tokens:
                self._chat_tokens.remove(token)
                self._relays.routes.settled(token)
                offline = self._offline.take(records)
                self.counters.records_offline += len(offline)
            else:
                self._brokers.routes.settled(token)
            if not handled:
                self.counters.records_dropped += len(records)
            if batch is None:
                continue
            batch.pending -= 1
            if not handled:
                batch.failures.extend(_named(batch, records, errors.Dropped, DROPPED))
            elif offline:
                batch.failures.extend(_named(batch, offline, errors.Offline, OFFLINE))
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


def _named(batch: _Batch, records: list[bytes], error: type[errors.PixiuError], text: str) -> list[Failure]:
    """Failures of the positions of some records of a batch. Rare, so it walks the batch again."""
    lost = {record[16:24] for record in records}
    positions: list[int] = []
    offset = 0
    for position in range(batch.first, batch.last + 1):
        if batch.data[offset + 16 : offset + 24] in lost:
            positions.append(position)
        offset += SIZE_FIELD + int.from_bytes(batch.data[offset : offset + 4], "little")
    failures: list[Failure] = []
    for position in positions:
        if failures and failures[-1].last == position - 1:
            failures[-1] = Failure(failures[-1].first, position, error.code, text)
        else:
            failures.append(Failure(position, position, error.code, text))
    return failures
