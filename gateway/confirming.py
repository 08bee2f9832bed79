"""Messages of QoS 1 on their way to the proxies, and what becomes of them. Pure.

    offered ──▶ waiting, by key ── flush ──▶ a batch for a proxy ── PublishOutcome ──▶ resolved
                     ▲                               │
                     └── lost, unanswered, or the proxy is gone: the same IDs, before the rest

The messages of a key are in one batch at a time; what comes meanwhile leaves when that batch is resolved. So they reach the
brokers in order, whatever is lost on the way and whichever proxies carry them. One that is refused for now takes its sender's
messages behind it along. What is sent again keeps its ID: gateways drop what they have seen. A message whose sender's time is over
does not leave: its client may have sent later ones by another gateway.

Source: docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cluster.core.contract import NEVER, SendControl
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from pixiu.errors import Draining, Dropped, Overloaded, PixiuError, Unavailable, error_of_code
from pixiu.ids import EndpointID
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.backoff import Backoff

MAX_BATCH_BYTES: Final = 16 << 10
"""Most bytes of a batch, unless it is a single record: more would go by the link's stream."""
MAX_BATCH_RECORDS: Final = 128
"""Most records of a batch: the outcome, with a failure for each of them, fits into datagrams."""
WINDOW_BYTES: Final = 1 << 20
"""Bytes that are unanswered at one proxy before the next batch waits, for big rooms and for all others each."""
SILENCE_S: Final = 10.0
"""Time after which an unanswered batch is sent again, seconds."""
FIRST_REST_S: Final = 0.1
MAX_REST_S: Final = 5.0
"""First and last rest of a proxy whose link loses one batch after the other, seconds; it doubles, less jitter."""
NOBODY: Final = EndpointID(0)
AGAIN: Final = (Overloaded, Unavailable, Draining, Dropped)
"""Errors after which a sender sends a message again."""
BEHIND: Final = "it waits for one before it to the same room, which was lost or refused for now"
LEFT: Final = "its client has left, and may have sent later ones by another gateway"


@dataclass(slots=True, eq=False)
class _Lane:
    """Keys for a proxy whose messages may leave, in order, and the bytes that are unanswered."""

    ready: deque[int] = field(default_factory=deque)
    unanswered: int = 0


@dataclass(slots=True, eq=False)
class _Proxy:
    endpoint: EndpointID
    ordinary: _Lane = field(default_factory=_Lane)
    big: _Lane = field(default_factory=_Lane)
    """Of big rooms: their acceptance takes long, and nobody else waits for it."""
    losses: int = 0
    """Batches lost in a row."""
    rest_until: float = NEVER
    """End of its rest; `NEVER`: it does not rest."""


class _Batch:
    __slots__ = ("lane", "messages", "proxy", "sent_at", "size")

    def __init__(self, proxy: _Proxy, lane: _Lane, messages: list[ev.Confirmable], size: int, sent_at: float) -> None:
        self.proxy, self.lane, self.messages, self.size, self.sent_at = proxy, lane, messages, size, sent_at


class Confirming:
    """The part of a gateway's core that sends messages until proxies answer. `next_number` numbers batches; they are the tokens of
    their parcels too. `uniform` gives numbers in [0, 1) for jitter."""

    def __init__(self, next_number: Callable[[], int], vrooms: VRooms, uniform: Callable[[], float]) -> None:
        self._next_number, self._vrooms, self._has_big = next_number, vrooms, vrooms.low < vrooms.high
        self._backoff = Backoff(FIRST_REST_S, MAX_REST_S, uniform)
        self._waiting: dict[int, deque[ev.Confirmable]] = {}
        """Key → messages that wait; a key with none of these has some in a batch."""
        self._batches: dict[int, _Batch] = {}
        """Number → batch that is not answered, the oldest first."""
        self._replicas: tuple[ev.Replica, ...] = ()
        self._proxies: dict[EndpointID, _Proxy] = {}
        self._homes = [_Proxy(NOBODY)]
        """Proxies that get new batches, each those of the keys for which it is `key % number`; without one a stand-in."""
        self.sessions: dict[int, int] = {}
        """Connection → its session, of those that outlive their connection."""
        self.unresolved = 0
        """Messages."""
        self.batches = self.lost = 0
        """Batches sent, and those of them that were lost, unanswered, or at a proxy that was gone."""

    def next_deadline(self) -> float:
        """Time at which `expire` is due, monotonic seconds."""
        deadline = NEVER
        for batch in self._batches.values():
            deadline = batch.sent_at + SILENCE_S
            break
        for proxy in self._proxies.values():
            if proxy.rest_until < deadline:
                deadline = proxy.rest_until
        return deadline

    def offered(self, event: ev.PublishConfirmed, now: float, out: list[ev.Effect]) -> None:
        """Take messages; they leave at `flush`."""
        self.unresolved += len(event.messages)
        for message in event.messages:
            waiting = self._waiting.get(message.key)
            if waiting is None:
                self._waiting[message.key] = deque((message,))
                self._lane_of(message.key).ready.append(message.key)
            else:
                waiting.append(message)

    def set_proxies(self, replicas: tuple[ev.Replica, ...]) -> None:
        """Set the proxies that may be used. What others have not answered goes to these."""
        if replicas == self._replicas:
            return
        self._replicas, before = replicas, self._proxies
        self._proxies = {each.endpoint: before.get(each.endpoint) or _Proxy(each.endpoint) for each in replicas}
        self._rehome([*before.values(), *self._homes])
        for number in [number for number, batch in self._batches.items() if batch.proxy.endpoint not in self._proxies]:
            self._take_back(number)

    def flush(self, now: float, out: list[ev.Effect]) -> None:
        """Send what may leave."""
        for proxy in self._homes:
            if proxy.endpoint and proxy.rest_until == NEVER:
                for lane in (proxy.ordinary, proxy.big):
                    while lane.ready and lane.unanswered < WINDOW_BYTES:
                        self._next_batch(proxy, lane, now, out)

    def resolved(self, event: ev.BatchResolved, now: float, out: list[ev.Effect]) -> None:
        """Take a proxy's answer. One that comes late is ignored: its messages were sent again."""
        batch = self._batches.get(event.number)
        if batch is None or batch.proxy.endpoint != event.proxy:
            return
        batch.proxy.losses = 0
        errors: list[PixiuError | None] = [None] * len(batch.messages)
        for failure in event.failures:
            error = error_of_code(failure.code, failure.text, failure.retry_after_ms)
            for position in range(max(failure.first, 1), min(failure.last, len(errors)) + 1):
                errors[position - 1] = error
        over = list(zip(batch.messages, errors, strict=True))
        if event.failures:
            over += self._behind(over)
        self.unresolved -= len(over)
        self._release(event.number)
        out.append(ev.Resolved(over))

    def _behind(self, over: list[tuple[ev.Confirmable, PixiuError | None]]) -> list[tuple[ev.Confirmable, PixiuError | None]]:
        """Take out what waits behind messages that were lost or refused for now: the same senders' for the same keys. It is sent
        again after these; if it left now, it would overtake them."""
        failed = {(message.key, message.sender) for message, error in over if isinstance(error, AGAIN)}
        taken: list[tuple[ev.Confirmable, PixiuError | None]] = []
        for key in dict.fromkeys(key for key, sender in failed if sender is not ev.NO_SENDER):
            waiting = self._waiting[key]
            behind = [message for message in waiting if message.sender is not ev.NO_SENDER and (key, message.sender) in failed]
            if behind:
                taken += [(message, Unavailable(BEHIND)) for message in behind]
                self._waiting[key] = deque(message for message in waiting if message not in behind)
        return taken

    def settled(self, number: int, handled: bool, now: float) -> bool:
        """Note whether a proxy got a batch. Returns False if the number is none of an unanswered batch."""
        batch = self._batches.get(number)
        if batch is None:
            return False
        if not handled:
            self._lost(number, batch.proxy, now)
        return True

    def expire(self, now: float) -> None:
        """End rests, and send again what was not answered for too long."""
        rested = [proxy for proxy in self._proxies.values() if proxy.rest_until <= now]
        for proxy in rested:
            proxy.rest_until = NEVER
        if rested:
            self._rehome(self._homes)
        for number, batch in list(self._batches.items()):
            if batch.sent_at + SILENCE_S > now:
                break
            self._lost(number, batch.proxy, now)

    def _lane_of(self, key: int) -> _Lane:
        home = self._homes[key % len(self._homes)]
        return home.big if self._has_big and self._vrooms.is_big(key) else home.ordinary

    def _next_batch(self, proxy: _Proxy, lane: _Lane, now: float, out: list[ev.Effect]) -> None:
        taken: list[ev.Confirmable] = []
        over: list[tuple[ev.Confirmable, PixiuError | None]] = []
        ready, size = lane.ready, 0
        full = False
        while ready and not full:
            waiting = self._waiting[ready[0]]
            before = len(taken)
            while waiting:
                if waiting[0].sender.until <= now:
                    over.append((waiting.popleft(), Dropped(LEFT)))
                    continue
                grown = size + len(waiting[0].record)
                full = len(taken) == MAX_BATCH_RECORDS or (grown > MAX_BATCH_BYTES and bool(taken))
                if full:
                    break
                size = grown
                taken.append(waiting.popleft())
            if len(taken) > before:
                ready.popleft()
            elif not waiting:
                del self._waiting[ready.popleft()]
        if over:
            self.unresolved -= len(over)
            out.append(ev.Resolved(over))
        if taken:
            out.append(self._batch(proxy, lane, taken, size, now))

    def _batch(self, proxy: _Proxy, lane: _Lane, taken: list[ev.Confirmable], size: int, now: float) -> SendControl:
        number = self._next_number()
        self._batches[number] = _Batch(proxy, lane, taken, size, now)
        lane.unanswered += size
        self.batches += 1
        records = taken[0].record if len(taken) == 1 else b"".join([message.record for message in taken])
        batch = control_pb2.PublishBatch(number=number, count=len(taken), records=records)
        if self.sessions:
            sessions = [self.sessions.get(message.sender.connection, 0) for message in taken]
            batch.sessions.extend(sessions if any(sessions) else ())
        return SendControl(proxy.endpoint, [control_pb2.Control(publish_batch=batch).SerializeToString()], number)

    def _release(self, number: int) -> None:
        """Forget a batch; what waits for its keys may leave."""
        batch = self._batches.pop(number)
        batch.lane.unanswered -= batch.size
        keys: dict[int, None] = {}
        for message in batch.messages:
            keys[message.key] = None
        for key in keys:
            if self._waiting[key]:
                self._lane_of(key).ready.append(key)
            else:
                del self._waiting[key]

    def _take_back(self, number: int) -> None:
        """Have the messages of a batch wait again, before the rest."""
        self.lost += 1
        for message in reversed(self._batches[number].messages):
            self._waiting[message.key].appendleft(message)
        self._release(number)

    def _lost(self, number: int, proxy: _Proxy, now: float) -> None:
        """Take a batch back; a proxy that loses several in a row rests, and others get what was for it."""
        self._take_back(number)
        proxy.losses += 1
        if proxy.losses > 1 and proxy.rest_until == NEVER and proxy.endpoint in self._proxies:
            proxy.rest_until = now + self._backoff.after_s(proxy.losses - 1)
            self._rehome(self._homes)

    def _rehome(self, before: list[_Proxy]) -> None:
        """Choose anew which proxies get new batches, and move what is ready to leave from those that had it `before`."""
        usable = [self._proxies[each.endpoint] for each in self._replicas if each.usable]
        rested = [proxy for proxy in usable if proxy.rest_until == NEVER]
        self._homes = rested or usable or list(self._proxies.values()) or [_Proxy(NOBODY)]
        keys: list[int] = []
        for proxy in dict.fromkeys(before):
            for lane in (proxy.ordinary, proxy.big):
                keys += lane.ready
                lane.ready.clear()
        for key in keys:
            self._lane_of(key).ready.append(key)
