"""The proxy's core: routes records to brokers and relays, and reports the outcome to publishers.

A record goes to partition `key % n` and, inside it, to the replica that rendezvous hashing names. A publisher's position is
resolved when the brokers have handled the record (their links acknowledge it), so an accepted record has left the proxy and the
broker if either of them dies.

Source: PiXiu §2.2 steps 6 to 8, §2.2.1 (batches in one loop here, threads there).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import Final

from cluster.core.contract import NEVER, EventTable, RecordsReceived, SendRecords, Settle, Settled, Tick
from cluster.links.api import Outcome
from pixiu import errors
from pixiu.errors import Refusal
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import NO_BIG_ROOMS, VRooms
from pixiu.placement.topic_rooms import BY_FIRST_LEVEL, TopicRooms
from pixiu.wire.record import (
    CHAT,
    FIRST_LANE_BELOW,
    HEADER_SIZE,
    KEY_AT,
    MIN_SIZE,
    PLAIN_ROOM,
    ROOM,
    SENDER_AT,
    SIGNAL,
    SIZE_FIELD,
    SNOWFLAKE_AT,
    TYPE_AT,
    WALK,
    Flag,
)
from pixiu.wire.trace import UNTRACED, Sampler, Tracer
from proxy import events as ev
from proxy import kept_events as kept_ev
from proxy import routed_events as routed_ev
from proxy.kept.messages import is_traced, sender_of, snowflake_of, without_kept
from proxy.kept.stage import BUSY as KEPT_BUSY
from proxy.kept.stage import RETRY_MS as KEPT_RETRY_MS
from proxy.kept.stage import KeptRooms, by_owner
from proxy.publishers.rates import PublisherRates, Rates
from proxy.records import refusals as texts
from proxy.records.batches import Batch, failures_of, sessions_of
from proxy.records.big_rooms import MAX_SWEEP_BYTES, BigRooms, Finished
from proxy.records.destinations import NOBODY, Destinations, Target
from proxy.records.gateway_batches import GatewayBatches
from proxy.records.offline_notices import OfflineNotices
from proxy.records.signals import AwaitedSignals
from proxy.records.topic_keys import with_rooms
from proxy.routed.stage import RoutedRooms

MAX_HELD_PARCELS = 10_000
"""Parcels of records that wait for a change of routes; beyond it the change waits no longer."""
CHECKED_RECORDS = 100
"""First records of a publisher's stream whose CRC is checked, so that a client that computes it wrongly gets an error. The CRC of
others is checked where the record leaves the cluster."""
HANDLED: Final = itemgetter(1)
NO_KIND: Final = -1
NO_LIMITS = Rates()
ALL_KINDS: Final = frozenset({"room", "chat"})
"""Kinds of records that come here; mail has a pipeline of its own, `proxy.mail.pipeline`."""


_Target = Target[Batch]
_Waited = list[tuple[bytes, Batch | None]]


@dataclass(slots=True)
class Counters:
    """Counts since the start of the proxy."""

    records_in: int = 0
    records_out: int = 0
    records_refused: int = 0
    records_dropped: int = 0
    records_offline: int = 0
    """Messages to users without a device that takes them."""
    batches_malformed: int = 0
    batches_held: int = 0
    signal_copies_in: int = 0
    signals_confirmed: int = 0
    """Reported to publishers that had asked for receipts, once for each gateway that delivered."""
    records_over_rate: int = 0
    """Refused because a publisher or a room exceeds its rate, or too much waits for big rooms; in records_refused too."""


class Core:
    """Decides; see the module. `step` never raises on what comes from the network.

    Args:
        max_record_bytes: larger records are refused, header included.
        barrier_ms: see `pixiu.placement.ordered_routes.Routes`.
        vrooms: the cluster's big rooms.
        topics: the rooms of free topics.
        vrooms_per_s: see `proxy.records.big_rooms`.
        rates: what publishers and rooms may send.
        kinds: kinds that are taken: "room", "chat".
        receipts: False if the gateways belong to another cluster, whose proxies alone hear from them.
        tracer: stamps traced records.
        sampler: chooses the messages to trace; None: only those already marked.
    """

    def __init__(
        self,
        *,
        max_record_bytes: int,
        barrier_ms: int = 200,
        vrooms: VRooms = NO_BIG_ROOMS,
        topics: TopicRooms = BY_FIRST_LEVEL,
        vrooms_per_s: float = 100.0,
        rates: Rates = NO_LIMITS,
        kinds: frozenset[str] = ALL_KINDS,
        receipts: bool = True,
        tracer: Tracer = UNTRACED,
        sampler: Sampler | None = None,
    ) -> None:
        self._room_kind = ROOM if "room" in kinds else NO_KIND
        """The kind that takes the fast path."""
        self._held: deque[tuple[list[bytes], Batch | None]] = deque()
        """Records of rooms that wait for a change of brokers, with their batches."""
        self._held_chat: deque[tuple[list[bytes], Batch | None]] = deque()
        """The same for relays."""
        self._brokers: Destinations[Batch] = Destinations(barrier_ms, partial(self._hold, self._held), self._choose)
        self._relays: Destinations[Batch] = Destinations(barrier_ms, partial(self._hold, self._held_chat))
        self._takes = texts.Takes(max_record_bytes - SIZE_FIELD, vrooms, kinds, self._brokers, self._relays)
        self._offline = OfflineNotices()
        self._tokens: dict[int, tuple[Batch | None, list[bytes]]] = {}
        self._next_token = 1
        self._streams: dict[int, deque[Batch]] = {}
        self._awaited = AwaitedSignals(receipts=receipts)
        self._vrooms = vrooms
        self._topics = topics if topics else None
        self._big: BigRooms[Batch] = BigRooms(vrooms_per_s, self._broker_of_vroom, self._broker_of_signal, self._token)
        self._big_target = _Target(NOBODY, divert=self._take_big)
        self.kept: KeptRooms[Batch] = KeptRooms(self._take_kept, self._reroute, _publisher_of)
        self.routed: RoutedRooms[Batch] = RoutedRooms(self._take_routed, _stream_of, topics)
        self._limits = PublisherRates(rates) if rates.any else None
        self._gateways = GatewayBatches(self._token)
        """They limit each client themselves."""
        self._over_target = _Target(NOBODY, divert=self._refuse_over_rate)
        self._over: dict[int, float] = {}
        self._tracer = tracer
        self._sampler = sampler
        self.counters = Counters()
        self._events: EventTable[ev.Effect] = EventTable()
        self._events.on(ev.BatchPublished, self._on_published)
        self._events.on(ev.GatewayPublished, self._on_gateway_published)
        self._events.on(RecordsReceived, self._on_records)
        self._events.on(Settled, self._on_settled)
        self._events.on(ev.SignalsDelivered, self._on_signals_delivered)
        self._events.on(ev.UsersOffline, self._on_users_offline)
        self._events.on(ev.BrokersChanged, self._on_brokers)
        self._events.on(ev.RelaysChanged, self._on_relays)
        self._events.on(ev.PublisherOpened, self._on_opened)
        self._events.on(ev.PublisherClosed, self._on_closed)
        self._events.on(ev.LimitsChanged, self._on_limits)
        self._events.on(kept_ev.KeptAvailable, self.kept.on_available)
        self._events.on(kept_ev.KeptMatched, self.kept.on_matched)
        self._events.on(kept_ev.KeptRefused, self.kept.on_refused)
        self._events.on(kept_ev.KeptStored, self.kept.on_stored)
        self._events.on(routed_ev.RoutesChanged, self._on_routes)
        self._events.on(routed_ev.RoutedStored, self.routed.on_stored)
        self._events.on(Tick, self._on_tick)

    def _on_routes(self, event: routed_ev.RoutesChanged, now: float, out: list[ev.Effect]) -> None:
        """Use other routes, for what comes from now on."""
        self.routed.use(event.routes)
        self._brokers.routes.cache.clear()

    def _on_limits(self, event: ev.LimitsChanged, now: float, out: list[ev.Effect]) -> None:
        """Use new limits. Everybody begins with a full burst."""
        self._big.set_pace(event.vrooms_per_s, now)
        self._sampler = event.sampler
        self._limits = PublisherRates(event.rates) if event.rates.any else None
        self._forget_over()
        if self._limits is not None:
            for stream in self._streams.keys() - self._gateways.streams.keys():
                self._limits.opened(stream, now)

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Take one event; `now` is monotonic seconds. Returns the effects, in order."""
        out = self._events.step(event, now)
        if self._held and not self._brokers.routes.held:
            self._release(self._held, self._brokers, out)
        if self._held_chat and not self._relays.routes.held:
            self._release(self._held_chat, self._relays, out)
        if self.routed.deadline <= now and not self._brokers.routes.held:
            self._run_routed(now, out)
        if self.kept.deadline <= now and not self._brokers.routes.held:
            self._run_kept(now, out)
        if self._big.deadline <= now and not self._brokers.routes.held:
            self._run_big(now, out)
        return out

    def next_deadline(self) -> float:
        """Time at which `Tick` is due, monotonic seconds; `NEVER` when nothing waits for a time."""
        brokers, relays = self._brokers.routes.deadline, self._relays.routes.deadline
        own = min(self._big.deadline, self.kept.deadline, self.routed.deadline)
        return min(own if brokers == NEVER else brokers, relays)

    @property
    def under_way(self) -> int:
        """Number of parcels that are not settled yet."""
        held = len(self._held) + len(self._held_chat)
        return (
            len(self._tokens) + held + self._big.under_way + self._gateways.under_way + self.kept.under_way + self.routed.under_way
        )

    def _token(self) -> int:
        token = self._next_token
        self._next_token += 1
        return token

    # --- the cluster, and publishers

    def _on_brokers(self, event: ev.BrokersChanged, now: float, out: list[ev.Effect]) -> None:
        self._brokers.change(event.partitions, event.replicas, now)

    def _on_relays(self, event: ev.RelaysChanged, now: float, out: list[ev.Effect]) -> None:
        self._relays.change(event.partitions, event.replicas, now)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        self._brokers.routes.expire(now)
        self._relays.routes.expire(now)

    def _on_opened(self, event: ev.PublisherOpened, now: float, out: list[ev.Effect]) -> None:
        self._streams[event.stream] = deque()
        if self._limits is not None:
            self._limits.opened(event.stream, now)

    def _on_closed(self, event: ev.PublisherClosed, now: float, out: list[ev.Effect]) -> None:
        self._streams.pop(event.stream, None)
        if self._limits is not None:
            self._limits.closed(event.stream)

    # --- batches

    def _on_records(self, event: RecordsReceived, now: float, out: list[ev.Effect]) -> None:
        """Route what a gateway's clients published at QoS 0; nobody waits for a reply."""
        if self._limits is not None:
            self._meter(self._limits, event.data, event.start, event.end, event.count, now)
        if not self._route(event.data, event.start, event.end, event.count, None, out):
            out.append(Settle(Outcome.MALFORMED))

    def _hold(self, held: deque[tuple[list[bytes], Batch | None]], records: list[bytes], batch: Batch | None) -> None:
        """Hold records whose keys move to other replicas."""
        held.append((records, batch))
        self.counters.batches_held += 1
        if batch is not None:
            batch.pending += 1
        if len(held) >= MAX_HELD_PARCELS:
            (self._brokers if held is self._held else self._relays).routes.expire(inf)

    def _release(
        self, held: deque[tuple[list[bytes], Batch | None]], destinations: Destinations[Batch], out: list[ev.Effect]
    ) -> None:
        """Send held records, before anything newer of their keys."""
        streams: dict[int, None] = {}
        self._forget_over()
        for records, batch in list(held):
            touched: dict[EndpointID, _Target] = {}
            refused: list[bytes] = []
            for record in records:
                target = destinations.routes.target(int.from_bytes(record[KEY_AT:SENDER_AT], "little"))
                if target is None:
                    refused.append(record)
                    continue
                touched[target.endpoint] = target
                (target.normal if record[TYPE_AT] >= FIRST_LANE_BELOW else target.first).append(record)
            self._send(list(touched.values()), batch, out, 0)
            if refused:
                self._refuse_records(refused, batch, errors.Unavailable, texts.GONE_MEANWHILE)
            if batch is not None:
                batch.pending -= 1
                if not batch.pending:
                    streams[batch.stream] = None
        held.clear()
        self._reply_to(streams, out)

    def _choose(self, key: int) -> _Target | None:
        return self.routed.target if self.routed.active and key in self.routed.rooms else self._unrouted(key)

    def _unrouted(self, key: int) -> _Target | None:
        if self._vrooms.is_big(key):
            return self._big_target if self._brokers.targets else None
        if self.kept.takes(key):
            return self.kept.target if self._brokers.targets else None
        return None if not key or self._vrooms.is_vroom(key) else self._brokers.replica(key)

    def _reroute(self, room: int) -> None:
        self._brokers.routes.cache.pop(room, None)

    def _broker_of_vroom(self, vroom: int) -> EndpointID | None:
        target = self._brokers.replica(vroom)
        return target.endpoint if target is not None else None

    def _broker_of_signal(self, vroom: int, record: bytes, batch: Batch | None) -> EndpointID | None:
        signal = int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")
        target = self._brokers.of_copy(vroom, signal, batch.copy if batch is not None else 0)
        return target.endpoint if target is not None else None

    def _target_of_other(self, kind: int, flags: int, number: int, key: int, batch: Batch | None) -> _Target | None:
        """Target of a record that is no room message: chat, and signals to rooms and users."""
        if not key:
            return None
        if kind == CHAT and "chat" in self._takes.kinds:
            return self._relays.routes.target(key)
        if kind != SIGNAL:
            return None
        to_room = bool(flags & Flag.TO_ROOM)
        if to_room and self._vrooms.is_vroom(key):
            return None
        if ("room" if to_room else "chat") not in self._takes.kinds:
            return None
        if to_room and self._vrooms.is_big(key):
            target = self._big_target if self._brokers.targets else None
        else:
            target = (self._brokers if to_room else self._relays).of_copy(key, number, batch.copy if batch is not None else 0)
        if target is not None:
            self.counters.signal_copies_in += 1
            if batch is not None and batch.receipt:
                self._awaited.wait(number, batch.stream)
        return target

    def _on_published(self, event: ev.BatchPublished, now: float, out: list[ev.Effect]) -> None:
        """Route a publisher's batch: parcels for brokers and relays, and the reply when nothing is left to wait for."""
        batches = self._streams.get(event.stream)
        if batches is None:
            return
        last = event.position + event.count - 1
        batch = Batch(event.stream, event.position, last, event.data, event.copy, event.receipt, event.more)
        batches.append(batch)
        if event.receipt and not self._awaited.receipts:
            self.counters.records_refused += event.count
            batch.failures.append(ev.Failure(batch.first, batch.last, errors.InvalidArgument.code, texts.NO_RECEIPTS))
        elif event.position <= CHECKED_RECORDS and (damaged := texts.first_damaged(event.data, event.count)) is not None:
            self.counters.records_refused += event.count
            text = f"the CRC of record {batch.first + damaged} does not fit its extension and body; its whole batch is refused"
            batch.failures.append(ev.Failure(batch.first, batch.last, errors.ChecksumWrong.code, text))
        elif self._limits is None or self._within_rate(self._limits, batch, event.count, now):
            self._route(event.data, 0, len(event.data), event.count, batch, out)
        if not batch.pending:
            self._reply(batches, out)

    def _on_gateway_published(self, event: ev.GatewayPublished, now: float, out: list[ev.Effect]) -> None:
        """Route what a gateway's clients published at QoS 1. It is a stream of one batch: none waits for another's outcome."""
        sessions = sessions_of(event.data, event.sessions) if event.sessions else None
        batch = Batch(event.stream, 1, event.count, event.data, sessions=sessions)
        self._streams[event.stream] = batches = deque((batch,))
        self._gateways.streams[event.stream] = event.gateway, event.number
        if self._limits is not None:
            self._meter(self._limits, event.data, 0, len(event.data), event.count, now)
        self._route(event.data, 0, len(event.data), event.count, batch, out)
        if not batch.pending:
            self._reply(batches, out)

    def _within_rate(self, limits: PublisherRates, batch: Batch, count: int, now: float) -> bool:
        """Charge a publisher's batch. Returns True if it may pass; otherwise it is refused whole."""
        wait_s = limits.publisher(batch.stream, count, len(batch.data), now)
        if wait_s:
            self.counters.records_refused += count
            self.counters.records_over_rate += count
            batch.failures.append(
                ev.Failure(batch.first, batch.last, errors.Overloaded.code, *texts.later(texts.PUBLISHER_OVER_RATE, wait_s))
            )
            return False
        self._meter(limits, batch.data, 0, len(batch.data), count, now)
        return True

    def _meter(self, limits: PublisherRates, data: bytes, start: int, end: int, count: int, now: float) -> None:
        """For the next batch to route, direct the rooms that exceed their rate to the target that refuses their records."""
        self._forget_over()
        self._over = limits.rooms(data, start, end, count, now)
        cache = self._brokers.routes.cache
        for key in self._over:
            cache[key] = self._over_target

    def _forget_over(self) -> None:
        """Direct the rooms that had exceeded their rate to their brokers again."""
        cache = self._brokers.routes.cache
        for key in self._over:
            cache.pop(key, None)
        self._over = {}

    def _take_big(self, records: list[bytes], batch: Batch | None) -> None:
        """Queue messages to big rooms; their positions are resolved after all of their copies."""
        large: list[bytes] = []
        late: list[bytes] = []
        longest_s = 0.0
        for record in records:
            if len(record) > MAX_SWEEP_BYTES:
                large.append(record)
            elif wait_s := self._big.offer(record, batch):
                late.append(record)
                longest_s = max(longest_s, wait_s)
            elif batch is not None:
                batch.pending += 1
        if large:
            self._refuse_records(large, batch, errors.RecordTooLarge, texts.TOO_LARGE_FOR_BIG_ROOMS)
        if late:
            self.counters.records_over_rate += len(late)
            self._refuse_records(late, batch, errors.Overloaded, *texts.later(texts.BIG_ROOMS_BUSY, longest_s))

    def _refuse_over_rate(self, records: list[bytes], batch: Batch | None) -> None:
        """Refuse records of rooms that exceed their rate."""
        self.counters.records_over_rate += len(records)
        longest_s = max(self._over.values(), default=0.0)
        self._refuse_records(records, batch, errors.Overloaded, *texts.later(texts.ROOM_OVER_RATE, longest_s))

    def _refuse_records(
        self, records: list[bytes], batch: Batch | None, error: type[errors.PixiuError], text: str, retry_ms: int = 0
    ) -> None:
        self.counters.records_refused += len(records)
        if batch is not None:
            batch.failures.extend(failures_of(batch, records, error.code, text, retry_ms))

    def _run_big(self, now: float, out: list[ev.Effect]) -> None:
        parcels, finished = self._big.run(now)
        for parcel in parcels:
            self._brokers.routes.sent(parcel.token, self._brokers.targets[parcel.peer])
            self.counters.records_out += len(parcel.records)
        out.extend(parcels)
        streams: dict[int, None] = {}
        self._finish_big(finished, streams)
        self._reply_to(streams, out)

    def _finish_big(self, finished: list[Finished[Batch]], streams: dict[int, None]) -> None:
        lost: dict[int, tuple[Batch, list[bytes]]] = {}
        for message in finished:
            self.counters.records_dropped += message.lost
            batch = message.owner
            if batch is None:
                continue
            batch.pending -= 1
            if message.lost:
                lost.setdefault(id(batch), (batch, []))[1].append(message.record)
            if not batch.pending:
                streams[batch.stream] = None
        for batch, records in lost.values():
            batch.failures.extend(failures_of(batch, records, errors.Dropped.code, texts.NOT_CONFIRMED))

    # --- messages for kept sessions

    def _take_kept(self, records: list[bytes], batch: Batch | None) -> None:
        """Have messages to rooms with kept filters wait until they are stored."""
        self._offer_kept(records, batch, self._next_token)

    def _offer_kept(self, records: list[bytes], batch: Batch | None, token: int) -> None:
        late: list[bytes] = []
        sessions = batch.sessions if batch is not None else None
        for record in records:
            if not self.kept.offer(record, batch, sessions.get(snowflake_of(record), 0) if sessions else 0, token):
                late.append(record)
            elif batch is not None:
                batch.pending += 1
        if late:
            self._refuse_records(late, batch, errors.Overloaded, KEPT_BUSY, KEPT_RETRY_MS)

    def _run_kept(self, now: float, out: list[ev.Effect]) -> None:
        """Ask and store what is next, and send what is stored: a publisher's batches one after the other."""
        due, streams = self.kept.run(now), dict[int, None]()
        if due.questions:
            out.append(kept_ev.AskKept(due.questions))
        if due.mails:
            out.append(kept_ev.StoreKept(due.mails))
        self._refuse_waiting(due.refused, streams)
        self._pass_on(due.send, self._brokers.replica, streams, out)
        self._reply_to(streams, out)

    # --- messages of routes

    def _take_routed(self, records: list[bytes], batch: Batch | None) -> None:
        """Look at the messages of a room that routes may take."""
        trusted = batch is not None and batch.stream not in self._gateways.streams
        for record in records:
            self.routed.offer(record, batch, trusted)
        if batch is not None:
            batch.pending += len(records)

    def _run_routed(self, now: float, out: list[ev.Effect]) -> None:
        """Store what routes take, and pass on what they do not."""
        due, streams = self.routed.run(now), dict[int, None]()
        if due.store:
            out.append(routed_ev.StoreRouted(due.store))
        self._refuse_waiting(due.refused, streams)
        for batch in due.accepted:
            batch.pending -= 1
            streams[batch.stream] = None
        self._pass_on(due.send, self._unrouted, streams, out)
        self._reply_to(streams, out)

    def _refuse_waiting(self, refused: Mapping[Refusal, _Waited], streams: dict[int, None]) -> None:
        """Refuse messages that waited here."""
        for why, found in refused.items():
            self.counters.records_refused += len(found)
            for batch, records in by_owner(found, _first_of):
                if batch is not None:
                    batch.failures.extend(failures_of(batch, records, why.code, why.text, why.retry_after_ms))
                    batch.pending -= len(records)
                    streams[batch.stream] = None

    def _pass_on(
        self, waited: _Waited, choose: Callable[[int], _Target | None], streams: dict[int, None], out: list[ev.Effect]
    ) -> None:  # fmt: skip
        """Send messages that waited here: a publisher's batches one after the other."""
        for batch, records in by_owner(waited, _first_of):
            touched: dict[int, _Target] = {}
            gone: list[bytes] = []
            for record in records:
                target = choose(int.from_bytes(record[KEY_AT:SENDER_AT], "little"))
                if target is None:
                    gone.append(record)
                    continue
                touched[id(target)] = target
                (target.normal if record[TYPE_AT] >= FIRST_LANE_BELOW else target.first).append(record)
            self._send(list(touched.values()), batch, out, self._tracer.now_us() if any(map(is_traced, records)) else 0)
            if gone:
                self._refuse_records(gone, batch, errors.Unavailable, texts.GONE_MEANWHILE)
            if batch is not None:
                batch.pending -= len(records)
                streams[batch.stream] = None

    def _route(self, data: bytes, start: int, end: int, count: int, batch: Batch | None, out: list[ev.Effect]) -> bool:
        if self._sampler is not None:
            data, start, end = self._sampler.mark(data, start, end, count)
        if self._topics is not None:
            data = with_rooms(data, start, end, count, self._topics)
        brokers, unpack, largest, room = self._brokers.routes, WALK.unpack_from, self._takes.max_size, self._room_kind
        cache, plain = brokers.cache, PLAIN_ROOM if room == ROOM else NO_KIND
        touched: list[_Target] = []
        refused: list[tuple[int, type[errors.PixiuError], str]] = []
        position, traced_us = start, 0
        for index in range(count):
            if position + HEADER_SIZE > end:
                break
            size, what, type_, snowflake, key = unpack(data, position)
            after = position + SIZE_FIELD + size
            if size < MIN_SIZE or after > end:
                break
            if what == plain:
                target = cache.get(key) or brokers.target(key)
            else:
                kind, flags = what & 255, what >> 8
                if flags & Flag.KEPT:  # what follows is without it, too
                    data, flags = without_kept(data, position, count - index), flags & ~Flag.KEPT
                    what = kind | flags << 8
                if flags & Flag.TRACED:
                    traced_us = traced_us or self._tracer.now_us()
                elif kind == room:
                    plain = what  # as a rule also that of the next record
                if kind == room:
                    target = cache.get(key) or brokers.target(key)
                else:
                    target = self._target_of_other(kind, flags, snowflake, key, batch)
            if target is None or size > largest:
                refused.append((index, *self._takes.why_not(what & 255, what >> 8, size, key)))
            else:
                if not target.normal and not target.first:
                    touched.append(target)
                (target.normal if type_ >= FIRST_LANE_BELOW else target.first).append(data[position:after])
            position = after
        else:
            if position == end:
                self.counters.records_in += count
                self._send(touched, batch, out, traced_us)
                if refused:
                    self._refuse(refused, batch)
                return True
        for target in touched:
            target.normal, target.first = [], []
        self._malformed(batch)
        return False

    def _send(self, touched: list[_Target], batch: Batch | None, out: list[ev.Effect], traced_us: int) -> None:
        awaited, more = batch is not None, batch is not None and batch.more
        for target in touched:
            if traced_us:
                self._tracer.stamp_all(target.first, traced_us)
                self._tracer.stamp_all(target.normal, traced_us)
            if target.divert is not None:
                target.divert(target.first + target.normal, batch)
                target.normal, target.first = [], []
                continue
            for lane, records in ((0, target.first), (1, target.normal)):
                if records:
                    token = self._token()
                    self._tokens[token] = (batch, records)
                    if target.routes is not None:
                        target.routes.sent(token, target)
                    if batch is not None:
                        batch.pending += 1
                    self.counters.records_out += len(records)
                    out.append(SendRecords(target.endpoint, records, lane, token, awaited, more))
            target.normal, target.first = [], []

    def _refuse(self, refused: list[tuple[int, type[errors.PixiuError], str]], batch: Batch | None) -> None:
        self.counters.records_refused += len(refused)
        if batch is not None:
            for index, error, text in refused:
                position, later = batch.first + index, texts.STARTING_MS if text == texts.STARTING else 0
                ev.add_failure(batch.failures, ev.Failure(position, position, error.code, text, later))

    def _malformed(self, batch: Batch | None) -> None:
        self.counters.batches_malformed += 1
        if batch is not None:
            text = "the batch is not whole records end to end: the client library is broken or another version"
            batch.failures.append(ev.Failure(batch.first, batch.last, errors.MalformedData.code, text))

    def _on_settled(self, event: Settled, now: float, out: list[ev.Effect]) -> None:
        finished: dict[int, None] = {}
        kept = self.kept
        if kept.available and not all(map(HANDLED, event.parcels)):
            kept.learn([token for token, handled in event.parcels if not handled], self._tokens)
        for token, handled in event.parcels:
            sent = self._tokens.pop(token, None)
            if sent is None and (outcomes := self._gateways.settled(token, handled)) is not None:
                out += outcomes
                continue
            if not self._brokers.routes.settled(token):
                self._relays.routes.settled(token)
            if sent is None:
                self._finish_big(self._big.settled(token, handled), finished)
                continue
            batch, records = sent
            if token in kept.awaited:
                kept.settled(token, handled, records, batch)
            if handled and kept.available:
                kept.handled(token, records, batch, next(iter(self._tokens), token))
            if not handled and (again := kept.returned(records)):
                self._offer_kept(again, batch, token)
                returned = set(again)
                records = [record for record in records if record not in returned]
            offline = self._offline.take(records) if self._offline.ids else []
            self.counters.records_offline += len(offline)
            if not handled and records:
                self.counters.records_dropped += len(records)
            if batch is None:
                continue
            batch.pending -= 1
            if not handled and records:
                batch.failures.extend(failures_of(batch, records, errors.Dropped.code, texts.NOT_CONFIRMED))
            elif offline:
                batch.failures.extend(failures_of(batch, offline, errors.Offline.code, texts.OFFLINE))
            if not batch.pending:
                finished[batch.stream] = None
        if finished:
            self._reply_to(finished, out)

    def _on_users_offline(self, event: ev.UsersOffline, now: float, out: list[ev.Effect]) -> None:
        self._offline.add(event.snowflake_ids)

    def _on_signals_delivered(self, event: ev.SignalsDelivered, now: float, out: list[ev.Effect]) -> None:
        for stream, told in self._awaited.delivered(event.signals, event.gateway).items():
            if stream in self._streams:
                self.counters.signals_confirmed += len(told)
                out.append(ev.Delivered(stream, told, event.gateway))

    def _reply_to(self, streams: dict[int, None], out: list[ev.Effect]) -> None:
        for stream in streams:
            batches = self._streams.get(stream)
            if batches is not None:
                self._reply(batches, out)

    def _reply(self, batches: deque[Batch], out: list[ev.Effect]) -> None:
        """Resolve the finished batches at the head of a stream, in order."""
        up_to, stream = 0, 0
        failures: list[ev.Failure] = []
        while batches and not batches[0].pending:
            batch = batches.popleft()
            up_to, stream = batch.last, batch.stream
            failures.extend(batch.failures)
        if up_to:
            out.append(ev.Reply(stream, up_to, failures))
            if stream in self._gateways.streams:
                del self._streams[stream]
                out.append(self._gateways.resolved(stream, failures))


def _publisher_of(record: bytes, batch: Batch | None) -> int:
    """Number of a record's publisher: of its stream, or, negative, of the user whose client sent it by a gateway."""
    return batch.stream if batch is not None else ~sender_of(record)


def _stream_of(batch: Batch) -> int:
    return batch.stream


def _first_of(batch: Batch | None) -> int:
    return batch.first if batch is not None else 0
