"""The publisher's decisions: choice of proxies, batches, and repeats. Pure.

    Ticket ── offer ──▶ queue of a proxy ── next_batch ──▶ unresolved (positions, window) ── reply ──▶ resolved
                            ▲                                        │
                            └───────────── the stream died ──────────┘   same IDs, same order, another proxy

One invariant keeps the order of a key: *all unresolved messages of a key are with one proxy*. The proxy of a key is
`key % proxies`, or another one while that one is down. If the choice changes while messages of a key are unresolved, the key stays
pinned to the proxy that has them until they are resolved.

Source: PiXiu §2.2 steps 1 to 7; docs/architecture.md, "A message to a room", docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pixiu.client.options import ClientOptions
from pixiu.client.send.events import (
    TRANSITIONS,
    Batch,
    CloseStream,
    Effect,
    Failure,
    Group,
    OpenStream,
    ProxyEvent,
    ProxyState,
    PublisherCounters,
    RefreshCluster,
    Resolved,
    Ticket,
    Writable,
    in_doubt,
)
from pixiu.errors import Draining, NotAuthenticated, NotSent, OutcomeUnknown, Unavailable
from pixiu.rpc.backoff import Backoff
from pixiu.wire.record import LANE_FIRST

MAX_FAILURE_RANGES: Final = 10_000
"""Limit of failure ranges ahead of `up_to` in a proxy's replies; a proxy that sends more is considered broken."""
MAX_WINDOW_BYTES: Final = 64 << 20
"""Upper limit of a proxy's window, bytes; larger values are cut to it."""
SEND_AGAIN: Final = "sending it again may deliver it twice"
DRAINED_PAUSE_S: Final = 5.0
"""Time for which a proxy that announced its end is not used even if it is still listed, seconds."""


@dataclass(slots=True)
class _Proxy:
    address: str
    state: ProxyState = ProxyState.IDLE
    listed: bool = True
    stream: int = 0
    first: deque[Ticket] = field(default_factory=deque)
    normal: deque[Ticket] = field(default_factory=deque)
    unresolved: deque[Ticket] = field(default_factory=deque)
    position: int = 1
    """Position of unresolved[0]."""
    refused: list[Ticket] = field(default_factory=list)
    """Tickets that the draining proxy refused without handling: they go to another one."""
    failures: list[tuple[int, int, Failure]] = field(default_factory=list)
    window_bytes: int = 0
    batch_bytes: int = 0
    batch_records: int = 0
    """The largest batch that the proxy takes, records; 0: not announced."""
    in_flight_bytes: int = 0
    progress_at: float = 0.0
    rest_until: float = 0.0
    deaths: int = 0
    earliest: float = 0.0
    """Lower bound of the deadlines of all tickets here."""

    def tickets(self) -> Iterator[Ticket]:
        """All unresolved tickets, in the order in which they are to be sent again."""
        yield from self.refused
        yield from (ticket for ticket in self.unresolved if not ticket.resolved)
        yield from self.first
        yield from self.normal

    def busy(self) -> bool:
        return bool(self.unresolved or self.first or self.normal or self.refused)


@dataclass(slots=True)
class _Pin:
    """A key that stays with a proxy while `count` of its messages are unresolved."""

    proxy: _Proxy
    count: int


class PublisherCore:
    """Decides for one publisher. The shell calls it, and performs the returned effects in order.

    `uniform` gives numbers in [0, 1) for jitter; `now` is monotonic seconds everywhere.
    Raises ValueError when there is no proxy to begin with.

    Source: docs/architecture.md, "A message to a room". Departs from `key % proxies` while a proxy is down, because only its keys
    should move.
    """

    def __init__(self, options: ClientOptions, proxies: Sequence[str], uniform: Callable[[], float]) -> None:
        if not proxies:
            raise ValueError("a publisher needs at least one proxy")
        self._options = options
        self._backoff = Backoff(options.backoff_s, options.max_backoff_s, uniform)
        # A silent proxy is left early enough for one more attempt within a message's time limit.
        self._stall_s = options.publish_timeout_s / 2
        self._proxies: dict[str, _Proxy] = {}
        self._listed: list[_Proxy] = []
        self._usable: list[_Proxy] = []
        self._by_stream: dict[int, _Proxy] = {}
        self._pins: dict[int, _Pin] = {}
        self._next_stream = 1
        self._groups: deque[Group] = deque((Group(),))
        self._last_reason = ""
        self._logins_refused: set[str] = set()
        """Addresses of proxies that refused the login since their last answer; at most all that were ever listed."""
        self._login = Failure(NotAuthenticated.code, "")
        self.counters = PublisherCounters()
        self.unresolved_records = 0
        self.unresolved_bytes = 0
        for address in proxies:
            self._listed.append(self._proxies.setdefault(address, _Proxy(address)))
        self._usable = list(self._listed)

    # Queries of the shell.

    def has_space(self, size: int, reserved_bytes: int = 0, reserved_records: int = 0) -> bool:
        """True if a record of `size` bytes fits into the queue beside the reserved space."""
        records = self.unresolved_records + reserved_records
        if records == 0:
            return True
        return records < self._options.queue_records and self.unresolved_bytes + reserved_bytes + size <= self._options.queue_bytes

    def states(self) -> dict[str, ProxyState]:
        """State of every known proxy by its address."""
        return {address: proxy.state for address, proxy in self._proxies.items()}

    def next_deadline(self) -> float | None:
        """Time at which `tick` is due; None: not before another event."""
        times: list[float] = []
        for proxy in self._proxies.values():
            if proxy.state is ProxyState.DOWN:
                times.append(proxy.rest_until)
            if proxy.busy():
                times.append(proxy.earliest)
                if proxy.state in (ProxyState.OPEN, ProxyState.DRAINING):
                    times.append(proxy.progress_at + self._stall_s)
        return min(times) if times else None

    def close_group(self) -> Group | None:
        """End the current flush group. Returns the last group with unresolved messages so far, None if all are resolved."""
        while len(self._groups) > 1 and not self._groups[0].unresolved:
            self._groups.popleft()
        if self._groups[-1].unresolved:
            self._groups.append(Group())
        return self._groups[-2] if len(self._groups) > 1 else None

    def group_done(self, group: Group) -> bool:
        """True if a group and all before it are resolved."""
        while len(self._groups) > 1 and not self._groups[0].unresolved:
            self._groups.popleft()
        return group not in self._groups

    # Events.

    def offer(self, ticket: Ticket, now: float, timeout_s: float | None = None) -> list[Effect]:
        """Queue a message. The caller has asked `has_space`. `timeout_s` replaces `publish_timeout_s`."""
        group = self._groups[-1]
        group.unresolved += 1
        ticket.group = group
        ticket.deadline = now + (self._options.publish_timeout_s if timeout_s is None else timeout_s)
        self.counters.offered += 1
        self.unresolved_records += 1
        self.unresolved_bytes += len(ticket.record)
        proxy = self._route(ticket.key)
        queue = proxy.first if ticket.lane == LANE_FIRST else proxy.normal
        if timeout_s is not None and ticket.deadline < proxy.earliest:
            proxy.earliest = ticket.deadline
        if queue:
            queue.append(ticket)
            return []
        if not proxy.busy():
            proxy.progress_at = now
            proxy.earliest = ticket.deadline
        queue.append(ticket)
        return self._wanted(proxy, now)

    def next_batch(self, stream: int, now: float) -> Batch | None:
        """Take the next batch for a stream: lane 0 first, within the window; None when nothing may leave."""
        proxy = self._by_stream.get(stream)
        if proxy is None or proxy.state is not ProxyState.OPEN:
            return None
        options = self._options
        room = proxy.window_bytes - proxy.in_flight_bytes
        longest = min(proxy.batch_bytes or options.batch_bytes, options.batch_bytes)
        most = min(proxy.batch_records or options.batch_records, options.batch_records)
        slots = min(most, options.window_records - len(proxy.unresolved))
        taken: list[Ticket] = []
        size = 0
        for queue in (proxy.first, proxy.normal):
            while queue and len(taken) < slots:
                grown = size + len(queue[0].record)
                # A record that is larger than a batch or the window goes alone.
                if (grown > longest and taken) or (grown > room and (taken or proxy.unresolved)):
                    slots = 0
                    break
                size = grown
                taken.append(queue.popleft())
        if not taken:
            return None
        if not proxy.unresolved:
            proxy.progress_at = now
        position = proxy.position + len(proxy.unresolved)
        for ticket in taken:
            ticket.attempts += 1
            if ticket.attempts > 1:
                self.counters.resent += 1
        proxy.unresolved.extend(taken)
        proxy.in_flight_bytes += size
        self.counters.batches += 1
        return Batch(b"".join([ticket.record for ticket in taken]), len(taken), position, self._more(proxy))

    def _more(self, proxy: _Proxy) -> bool:
        """True if more may leave for a proxy now, regardless of its answers."""
        waiting = proxy.first or proxy.normal
        return (
            bool(waiting)
            and len(proxy.unresolved) < self._options.window_records
            and proxy.in_flight_bytes + len(waiting[0].record) <= proxy.window_bytes
        )

    def reply(
        self,
        stream: int,
        now: float,
        up_to: int = 0,
        failures: Iterable[tuple[int, int, Failure]] = (),
        window_bytes: int = 0,
        draining: bool = False,
        batch_bytes: int = 0,
        batch_records: int = 0,
    ) -> list[Effect]:
        """Process a proxy's reply; `failures` are (first, last, why) by position. Late and impossible ones are counted, never
        raised."""
        proxy = self._by_stream.get(stream)
        if proxy is None:
            return []
        self._logins_refused.discard(proxy.address)
        if window_bytes:
            proxy.window_bytes = min(window_bytes, MAX_WINDOW_BYTES)
            proxy.batch_bytes, proxy.batch_records = batch_bytes, batch_records
        last_sent = proxy.position + len(proxy.unresolved) - 1
        told = [(first, last, why) for first, last, why in failures if last >= proxy.position and first <= last]
        if (
            up_to > last_sent
            or any(last > last_sent for _, last, _ in told)
            or len(proxy.failures) + len(told) > MAX_FAILURE_RANGES
        ):
            self.counters.malformed_replies += 1
            return self.stream_died(stream, now, "it answered for messages that it was never sent")
        if told:
            proxy.failures = sorted([*proxy.failures, *told], key=lambda failure: failure[0])
        woken: list[Ticket] = []
        if up_to >= proxy.position:
            self._resolve_up_to(proxy, up_to, woken)
            proxy.progress_at = now
            proxy.deaths = 0
        effects: list[Effect] = [Resolved(tuple(woken))] if woken else []
        if (draining or proxy.refused) and proxy.state is ProxyState.OPEN:
            self._change(proxy, ProxyEvent.LEAVING)
            self._rethink()
            effects.append(RefreshCluster())
        if proxy.state is ProxyState.DRAINING:
            return effects + self._finish_drain(proxy, now)
        if proxy.first or proxy.normal:
            effects.append(Writable(stream))
        return effects

    def stream_died(self, stream: int, now: float, reason: str, login: str = "") -> list[Effect]:
        """Handle the end of a stream. Its unresolved messages go to another proxy, in order and before newer ones. `login`: the
        reason why the proxy refused the login, before it took anything; when all proxies have, messages that wait for them fail."""
        proxy = self._by_stream.pop(stream, None)
        if proxy is None:
            return []
        self.counters.streams_died += 1
        self._last_reason = f"{proxy.address}: {reason}"
        for ticket in proxy.unresolved:
            ticket.in_doubt = ticket.in_doubt or not login
            ticket.attempts = ticket.attempts if ticket.in_doubt else 0
        if login:
            self._logins_refused.add(proxy.address)
            self._login = Failure(NotAuthenticated.code, login)
        proxy.deaths += 1
        proxy.rest_until = now + self._backoff.after_s(proxy.deaths)
        self._change(proxy, ProxyEvent.DIED)
        effects: list[Effect] = [CloseStream(stream), RefreshCluster(), *self._move_all(proxy, now)]
        return [*effects, *self._fail_for_login()] if login else effects

    def _nobody_takes_the_login(self) -> bool:
        return bool(self._logins_refused) and all(proxy.address in self._logins_refused for proxy in self._listed)

    def _fail_for_login(self) -> list[Effect]:
        """Fail waiting messages when every proxy has refused the login since its last answer: waiting would be useless."""
        if not self._nobody_takes_the_login():
            return []
        woken: list[Ticket] = []
        for proxy in self._proxies.values():
            if proxy.address in self._logins_refused:
                for ticket in (*proxy.refused, *proxy.first, *proxy.normal):
                    self._settle(ticket, in_doubt(self._login, SEND_AGAIN) if ticket.in_doubt else self._login, woken)
                for queue in (proxy.first, proxy.normal):
                    queue.clear()
                proxy.refused = []
        return [Resolved(tuple(woken))] if woken else []

    def set_proxies(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Set the cluster's proxies, in the order of their registration. An empty list changes nothing.

        Source: docs/registry.md.
        """
        if not addresses or [proxy.address for proxy in self._listed] == list(dict.fromkeys(addresses)):
            return []
        listed = [self._proxies.setdefault(address, _Proxy(address)) for address in dict.fromkeys(addresses)]
        left = [proxy for proxy in self._listed if proxy not in listed]
        self._listed = listed
        for proxy in listed:
            proxy.listed = True
        for proxy in left:
            proxy.listed = False
            proxy.rest_until = now + DRAINED_PAUSE_S
            self._change(proxy, ProxyEvent.LEAVING)
        self._rethink()
        effects: list[Effect] = []
        for proxy in left:
            effects += self._finish_drain(proxy, now) if proxy.state is ProxyState.DRAINING else self._move_all(proxy, now)
        return effects + self._rehome(now)

    def tick(self, now: float) -> list[Effect]:
        """Expire messages, leave silent streams, and end back-offs."""
        effects: list[Effect] = []
        woken: list[Ticket] = []
        for proxy in list(self._proxies.values()):
            if proxy.busy() and now >= proxy.earliest:
                self._expire(proxy, now, woken)
            if proxy.state in (ProxyState.OPEN, ProxyState.DRAINING) and proxy.busy() and now >= proxy.progress_at + self._stall_s:
                effects += self.stream_died(proxy.stream, now, f"no answer for {self._stall_s:g} s")
            elif proxy.state is ProxyState.DRAINING:
                effects += self._finish_drain(proxy, now)
        rested = [proxy for proxy in self._proxies.values() if proxy.state is ProxyState.DOWN and now >= proxy.rest_until]
        for proxy in rested:
            if proxy.listed:
                self._change(proxy, ProxyEvent.RESTED)
            elif not proxy.busy():
                del self._proxies[proxy.address]
            else:
                proxy.rest_until = now + self._options.max_backoff_s
        if rested:
            self._rethink()
            effects += self._rehome(now)
        if woken:
            effects.insert(0, Resolved(tuple(woken)))
        return effects

    def abandon(self, text: str) -> list[Effect]:
        """Fail everything unresolved with `text` and end every stream, because the client closes."""
        woken: list[Ticket] = []
        unknown, never = (
            Failure(OutcomeUnknown.code, f"{text}: its outcome is unknown"),
            Failure(NotSent.code, f"{text}; it was not sent"),
        )
        for proxy in self._proxies.values():
            for ticket in list(proxy.tickets()):
                self._settle(ticket, unknown if ticket.attempts else never, woken)
            for queue in (proxy.first, proxy.normal, proxy.unresolved):
                queue.clear()
            proxy.refused.clear()
        effects: list[Effect] = [Resolved(tuple(woken))] if woken else []
        effects += [CloseStream(stream) for stream in self._by_stream]
        self._by_stream.clear()
        return effects

    # Inside.

    def _change(self, proxy: _Proxy, event: ProxyEvent) -> None:
        proxy.state = TRANSITIONS.get((proxy.state, event), proxy.state)

    def _plain_route(self, key: int) -> _Proxy:
        proxy = self._listed[key % len(self._listed)]
        if proxy.state is ProxyState.IDLE or proxy.state is ProxyState.OPEN or not self._usable:
            return proxy
        return self._usable[key % len(self._usable)]

    def _route(self, key: int) -> _Proxy:
        if self._pins:
            pin = self._pins.get(key)
            if pin is not None:
                pin.count += 1
                return pin.proxy
        return self._plain_route(key)

    def _rethink(self) -> None:
        """Handle a change in the choice of proxies: pin every key whose unresolved messages are not where new ones would go."""
        self._usable = [proxy for proxy in self._listed if proxy.state in (ProxyState.IDLE, ProxyState.OPEN)]
        self._pins = {}
        for proxy in self._proxies.values():
            counts: dict[int, int] = {}
            for ticket in proxy.tickets():
                counts[ticket.key] = counts.get(ticket.key, 0) + 1
            for key, count in counts.items():
                if self._plain_route(key) is not proxy:
                    self._pins[key] = _Pin(proxy, count)

    def _wanted(self, proxy: _Proxy, now: float) -> list[Effect]:
        if proxy.state is ProxyState.OPEN:
            return [Writable(proxy.stream)]
        if proxy.state is not ProxyState.IDLE:
            return []
        self._change(proxy, ProxyEvent.WANTED)
        proxy.stream = self._next_stream
        self._next_stream += 1
        self._by_stream[proxy.stream] = proxy
        proxy.position = 1
        proxy.in_flight_bytes = 0
        proxy.failures = []
        proxy.window_bytes, proxy.batch_bytes, proxy.batch_records = self._options.window_bytes, 0, 0
        proxy.progress_at = now
        self.counters.streams_opened += 1
        return [OpenStream(proxy.address, proxy.stream)]

    def _move_all(self, source: _Proxy, now: float) -> list[Effect]:
        """Move everything that a proxy has to those that now serve its keys, before their own messages of the same lane."""
        moving = list(source.tickets())
        source.refused = []
        for queue in (source.first, source.normal, source.unresolved):
            queue.clear()
        source.in_flight_bytes = 0
        self._rethink()
        lanes: dict[str, tuple[list[Ticket], list[Ticket]]] = {}
        for ticket in moving:
            target = self._route(ticket.key)
            lanes.setdefault(target.address, ([], []))[ticket.lane != LANE_FIRST].append(ticket)
        effects: list[Effect] = []
        for address, (first, normal) in lanes.items():
            target = self._proxies[address]
            if not target.busy():
                target.progress_at = now
                target.earliest = min(ticket.deadline for ticket in (*first, *normal))
            else:
                target.earliest = min(target.earliest, *(ticket.deadline for ticket in (*first, *normal)))
            target.first.extendleft(reversed(first))
            target.normal.extendleft(reversed(normal))
            effects += self._wanted(target, now)
        return effects

    def _rehome(self, now: float) -> list[Effect]:
        """Move what waits with proxies that are down, because a proxy became usable."""
        if not self._usable:
            return []
        effects: list[Effect] = []
        for proxy in list(self._proxies.values()):
            if proxy.state is ProxyState.DOWN and proxy.busy():
                effects += self._move_all(proxy, now)
            elif proxy.state is ProxyState.IDLE and proxy.busy():
                effects += self._wanted(proxy, now)
        return effects

    def _finish_drain(self, proxy: _Proxy, now: float) -> list[Effect]:
        if any(not ticket.resolved for ticket in proxy.unresolved):
            return []
        self._by_stream.pop(proxy.stream, None)
        self._change(proxy, ProxyEvent.FINISHED)
        proxy.rest_until = now + DRAINED_PAUSE_S
        return [CloseStream(proxy.stream), *self._move_all(proxy, now)]

    def _resolve_up_to(self, proxy: _Proxy, up_to: int, woken: list[Ticket]) -> None:
        failures = proxy.failures
        reached = 0
        while proxy.position <= up_to:
            ticket = proxy.unresolved.popleft()
            position = proxy.position
            proxy.position += 1
            proxy.in_flight_bytes -= len(ticket.record)
            while reached < len(failures) and failures[reached][1] < position:
                reached += 1
            why = failures[reached][2] if reached < len(failures) and failures[reached][0] <= position else None
            if not ticket.resolved and why is not None and why.code == Draining.code:
                ticket.attempts = 1 if ticket.in_doubt else 0
                proxy.refused.append(ticket)
                continue
            if not ticket.resolved:
                if why is not None and ticket.in_doubt:
                    why = in_doubt(why, SEND_AGAIN)
                elif why is not None and why.code == Unavailable.code:
                    why = Failure(NotSent.code, why.text)  # the only proxy that ever had it passed it on to nobody
                self._settle(ticket, why, woken)
            ticket.record = b""  # a receipt that is kept must not keep the message
        if failures:
            proxy.failures = [failure for failure in failures if failure[1] > up_to]

    def _settle(self, ticket: Ticket, failure: Failure | None, woken: list[Ticket]) -> None:
        ticket.failure = failure
        ticket.resolved = True  # last: another thread may look
        self.unresolved_records -= 1
        self.unresolved_bytes -= len(ticket.record)
        group = ticket.group
        if group is not None:
            group.unresolved -= 1
            ticket.group = None
        if failure is None:
            self.counters.accepted += 1
        else:
            self.counters.failed += 1
            by_code = self.counters.failures_by_code
            by_code[failure.code] = by_code.get(failure.code, 0) + 1
        if ticket.watched or failure is not None:
            woken.append(ticket)
        if self._pins and (pin := self._pins.get(ticket.key)) is not None:
            pin.count -= 1
            if not pin.count:
                del self._pins[ticket.key]

    def _expire(self, proxy: _Proxy, now: float, woken: list[Ticket]) -> None:
        seconds = f"its time ({self._options.publish_timeout_s:g} s where the call names none)"
        because = f" (last failure: {self._last_reason})" if self._last_reason else ""
        never = Failure(
            NotSent.code,
            f"the message was not sent within {seconds}: no proxy took it{because}; check that a proxy runs, then send again",
        )
        unknown = Failure(
            OutcomeUnknown.code,
            f"no proxy confirmed the message within {seconds}{because}: its outcome is unknown, it may have been delivered; "
            "sending it again may deliver it twice",
        )
        if self._nobody_takes_the_login():
            never = self._login
        for ticket in list(proxy.tickets()):
            if ticket.deadline <= now:
                self.counters.expired += 1
                self._settle(ticket, unknown if ticket.attempts else never, woken)
        # An expired ticket keeps its place in `unresolved`, because the places are the stream's positions.
        proxy.first = deque(ticket for ticket in proxy.first if not ticket.resolved)
        proxy.normal = deque(ticket for ticket in proxy.normal if not ticket.resolved)
        proxy.refused = [ticket for ticket in proxy.refused if not ticket.resolved]
        proxy.earliest = min((ticket.deadline for ticket in proxy.tickets()), default=now + self._options.publish_timeout_s)
