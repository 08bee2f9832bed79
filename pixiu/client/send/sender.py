"""The confirmed sender's decisions, for messages and mail: choice of proxies, batches, windows, and repeats. Pure.

    Ticket ── offer ──▶ queue of a proxy ── next_batch ──▶ in flight (positions, window) ── reply ──▶ resolved
                            ▲                                        │
                            └───────────── the stream died ──────────┘   same IDs, same order, another stream

One invariant keeps the order of a key: *all unresolved messages of a key are with one proxy*. The proxy of a key is
`key % proxies`, or another one while that one is down. If the choice changes while messages of a key are unresolved, the key stays
pinned to the proxy that has them until they are resolved.

A writer of mail keeps the order of all its messages: they are with one proxy, whatever their keys, so that its worker number has
one generation. A client with `mail_streams` has several senders, each with a worker number of its own.

`Policy` has the differences.

Source: PiXiu §2.2 steps 1 to 7; docs/architecture.md, "A message to a room" and "A mail is sent"; docs/promises.md, "Failure
rules"; Swift (the write protocol).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from pixiu.client.send.events import (
    LOOKED,
    TRANSITIONS,
    Batch,
    CloseStream,
    Effect,
    Failure,
    Group,
    OpenStream,
    Outcome,
    ProxyEvent,
    ProxyState,
    RefreshCluster,
    Resolved,
    SendCounters,
    Ticket,
    Writable,
    in_doubt,
)
from pixiu.client.send.policy import Policy
from pixiu.client.send.proxy import Proxy
from pixiu.errors import (
    Draining,
    InvalidArgument,
    MalformedData,
    NotAllowed,
    NotAuthenticated,
    NotSent,
    NotServed,
    OutcomeUnknown,
    Overloaded,
)
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.deadline_timer import NEVER
from pixiu.wire.levels import Level
from pixiu.wire.record import LANE_FIRST

MAX_WINDOW_BYTES: Final = 64 << 20
"""Upper limit of a proxy's window, bytes; larger values are cut to it."""
HOPELESS: Final = frozenset({InvalidArgument.code, MalformedData.code, NotAllowed.code, NotServed.code})
"""Reasons for the end of a stream that would end any other stream too."""
ELSEWHERE: Final = frozenset({Draining.code, Overloaded.code})
"""Reasons for the end of a stream that another proxy may not have."""
DRAINED_PAUSE_S: Final = 5.0
"""Time for which a proxy that announced its end is not used even if it is still listed, seconds."""


@dataclass(slots=True)
class _Pin:
    """A key that stays with a proxy while `count` of its messages are unresolved."""

    proxy: Proxy
    count: int


class Sender:
    """Decides for one publisher or writer. The shell calls it, and performs the returned effects in order.

    `uniform` gives numbers in [0, 1) for jitter; `now` is monotonic seconds everywhere. `begin`, modulo the number of proxies, is
    the one of a writer's first stream. Raises ValueError when there is no proxy to begin with.

    Source: docs/architecture.md, "A message to a room". Departs from `key % proxies` while a proxy is down, because only its keys
    should move.
    """

    def __init__(self, policy: Policy, proxies: Sequence[str], uniform: Callable[[], float], begin: int = 0) -> None:
        if not proxies:
            raise ValueError("a sender needs at least one proxy")
        self._policy, self._options, self._writer = policy, policy.options, policy.writer
        self._backoff = Backoff(policy.options.backoff_s, policy.max_backoff_s, uniform)
        self._timeout_s, self._stall_s = policy.timeout_s, policy.stall_s
        self._proxies: dict[str, Proxy] = {}
        self._listed: list[Proxy] = []
        self._usable: list[Proxy] = []
        self._by_stream: dict[int, Proxy] = {}
        self._pins: dict[int, _Pin] = {}
        self._next_stream = 1
        self._rest_until = 0.0
        """No stream is opened before, because a proxy asked for it."""
        self._groups: deque[Group] = deque((Group(),))
        self._last_reason = ""
        self._logins_refused: set[str] = set()
        """Addresses of proxies that refused the login since their last answer; at most all that were ever listed."""
        self._login = Failure(NotAuthenticated.code, "")
        self.counters = SendCounters()
        self.unresolved = 0
        self.unresolved_bytes = 0
        for address in proxies:
            self._listed.append(self._proxies.setdefault(address, Proxy(address)))
        self._usable = list(self._listed)
        self._current = self._listed[begin % len(self._listed)]
        """Proxy of a writer's stream."""

    # Queries of the shell.

    def has_space(self, size: int = 0, reserved_bytes: int = 0, reserved_records: int = 0) -> bool:
        """True if a record of `size` bytes fits into the queue beside the reserved space."""
        records = self.unresolved + reserved_records
        if records == 0:
            return True
        return records < self._options.queue_records and self.unresolved_bytes + reserved_bytes + size <= self._options.queue_bytes

    def states(self) -> dict[str, ProxyState]:
        """State of every known proxy by its address."""
        return {address: proxy.state for address, proxy in self._proxies.items()}

    def next_deadline(self) -> float:
        """Time at which `tick` is due; `NEVER`: not before another event."""
        times: list[float] = []
        for proxy in self._proxies.values():
            if proxy.state is ProxyState.DOWN:
                times.append(proxy.rest_until)
            if proxy.busy():
                times.append(proxy.earliest)
                if proxy.state in (ProxyState.OPEN, ProxyState.DRAINING):
                    times.append(proxy.progress_at + self._stall_s)
                elif proxy.state is ProxyState.IDLE:
                    times.append(self._rest_until)
        return min(times, default=NEVER)

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

    def flushed(self, number: int) -> bool:
        """True if all messages of a writer up to the one with this number were given to a stream, or are resolved."""
        never = next((ticket for ticket in self._current.normal if not ticket.attempts), None)
        return never is None or never.number > number

    def sent(self, number: int) -> bool:
        """True if all messages of a writer up to the one with this number are taken by a proxy, or resolved."""
        proxy = self._current
        untaken = (ticket for position, ticket in proxy.in_flight.items() if position > proxy.taken and not ticket.resolved)
        first = next(untaken, None) or next(iter(proxy.normal), None)
        return first is None or first.number > number

    # Events.

    def offer(self, ticket: Ticket, now: float, timeout_s: float | None = None) -> list[Effect]:
        """Queue a message. The caller has asked `has_space`. `timeout_s` replaces the time-out of the options."""
        effects: list[Effect] = []
        if self._writer is not None:
            ticket.in_doubt, ticket.resolved, ticket.failure = ticket.attempts > 0, False, None  # it may have been sent before
            if self._current.state is ProxyState.OPEN and self._writer.changed():
                # Another holder of the old number may use it as a writer from now on.
                self._current.take_back(False)
                effects = self._leave(self._current, now, 0.0)
        group = self._groups[-1]
        group.unresolved += 1
        ticket.group = group
        ticket.deadline = now + (self._timeout_s if timeout_s is None else timeout_s)
        self.counters.offered += 1
        ticket.number = self.counters.offered
        self.unresolved += 1
        self.unresolved_bytes += ticket.size
        proxy = self._route(ticket.key)
        queue = proxy.first if ticket.lane == LANE_FIRST else proxy.normal
        if timeout_s is not None and ticket.deadline < proxy.earliest:
            proxy.earliest = ticket.deadline
        if queue:
            queue.append(ticket)
            return effects
        if not proxy.busy():
            proxy.progress_at = now
            proxy.earliest = ticket.deadline
        queue.append(ticket)
        return effects + self._wanted(proxy, now)

    def next_batch(self, stream: int, now: float) -> Batch | None:
        """Take the next batch for a stream: lane 0 first, within the window; None when nothing may leave."""
        proxy = self._by_stream.get(stream)
        if proxy is None or proxy.state is not ProxyState.OPEN:
            return None
        options, under_way = self._options, len(proxy.in_flight)
        room = proxy.window_bytes - proxy.in_flight_bytes
        longest = min(proxy.batch_bytes or options.batch_bytes, options.batch_bytes)
        most = proxy.batch_records or options.batch_records
        slots = min(options.batch_records, options.window_records - under_way)
        taken: list[Ticket] = []
        receivers: list[tuple[int, tuple[int, ...]]] = []
        in_flight, position, size, records = proxy.in_flight, proxy.sent, 0, 0
        level: Level | None = None
        for queue in (proxy.first, proxy.normal):
            while queue and len(taken) < slots:
                ticket = queue[0]
                grown = size + ticket.size
                records += 1 + len(ticket.more)
                # A message that is larger than a batch or the window goes alone.
                if (taken and (grown > longest or records > most or ticket.level is not level)) or (
                    grown > room and (taken or under_way)
                ):
                    slots = 0
                    break
                size, level = grown, ticket.level
                if ticket.more:
                    receivers.append((len(taken), ticket.more))
                if ticket.attempts:
                    self.counters.resent += 1
                ticket.attempts += 1
                position += 1
                in_flight[position] = ticket
                taken.append(queue.popleft())
        if not taken:
            return None
        if not under_way:
            proxy.progress_at = now
        first, proxy.sent = proxy.sent + 1, position
        proxy.in_flight_bytes += size
        proxy.batches += 1
        self.counters.batches += 1
        data = b"".join([ticket.record for ticket in taken])
        return Batch(data, len(taken), first, self._more(proxy), level, receivers)

    def _more(self, proxy: Proxy) -> bool:
        """True if more may leave for a proxy now, regardless of its answers."""
        waiting = proxy.first or proxy.normal
        return (
            bool(waiting)
            and len(proxy.in_flight) < self._options.window_records
            and proxy.in_flight_bytes + waiting[0].size <= proxy.window_bytes
        )

    def reply(
        self,
        stream: int,
        now: float,
        up_to: int = 0,
        outcomes: Sequence[Outcome] = (),
        window_bytes: int = 0,
        draining: bool = False,
        batch_bytes: int = 0,
        batch_records: int = 0,
        taken: int = 0,
    ) -> list[Effect]:
        """Process a proxy's reply: messages up to `up_to` are confirmed, but those with other `outcomes`; the proxy has those up to
        `taken`. Late replies are ignored; an impossible one ends the stream."""
        proxy = self._by_stream.get(stream)
        if proxy is None:
            return []
        self._logins_refused.discard(proxy.address)
        if window_bytes:
            proxy.window_bytes = min(window_bytes, MAX_WINDOW_BYTES)
            proxy.batch_bytes, proxy.batch_records = batch_bytes, batch_records
        last = max([outcome.position + outcome.number - 1 for outcome in outcomes], default=0) if outcomes else 0
        if last > proxy.sent or up_to > proxy.sent:
            self.counters.malformed_replies += 1
            return self.stream_died(stream, now, "it answered for messages that it was never sent")
        woken: list[Ticket] = []
        if outcomes or up_to > proxy.up_to or taken > proxy.taken:
            before = self.unresolved
            if outcomes:
                self._resolve(proxy, outcomes, woken)
            if up_to > proxy.up_to:
                self._confirm(proxy, up_to, woken)
                if outcomes:
                    woken.sort(key=lambda ticket: ticket.number)
            proxy.progress_at = now
            if self.unresolved < before:
                if self._writer is not None and (proxy.deaths or not proxy.heard):
                    self._writer.ended("")
                proxy.deaths = 0
            proxy.taken, proxy.heard = max(proxy.taken, taken), True
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

    def stream_died(self, stream: int, now: float, reason: str, login: str = "", end: Failure | None = None) -> list[Effect]:
        """Handle the end of a stream. Its unresolved messages go to another one, in order and before newer ones. `login`: the
        reason why the proxy refused the login, before it took anything; when all proxies have, messages that wait for them fail.
        `end`: the reason that the proxy gave for a writer's stream."""
        proxy = self._by_stream.get(stream)
        if proxy is None:
            return []
        self.counters.streams_died += 1
        self._last_reason = f"{proxy.address}: {reason}"
        proxy.deaths += 1
        rest_s = self._backoff.after_s(proxy.deaths)
        hopeless = False
        if end is not None and self._writer is not None:
            self._writer.ended(end.code)
            self._rest_until = now + end.retry_after_ms / 1000
            hopeless = end.code in HOPELESS
            if end.code not in ELSEWHERE and proxy.deaths == 1:
                rest_s = 0.0
        # A reason answers what was sent on the stream only if it is about the stream itself, or about its first and only batch.
        answered = hopeless and not proxy.heard and (proxy.batches <= 1 or (end is not None and end.code == NotServed.code))
        proxy.take_back(answered or bool(login))
        woken: list[Ticket] = []
        if end is not None and hopeless:
            self._give_up(proxy, end, woken)
        effects = self._leave(proxy, now, rest_s)
        effects.append(RefreshCluster())
        if login:
            self._logins_refused.add(proxy.address)
            self._login = Failure(NotAuthenticated.code, login)
            if self._nobody_takes_the_login():  # waiting would be useless
                for each in self._proxies.values():
                    if each.address in self._logins_refused:
                        self._give_up(each, self._login, woken)
        if woken:
            effects.append(Resolved(tuple(woken)))
        return effects

    def ended(self, stream: int, now: float, why: Failure) -> list[Effect]:
        """Handle the end of a writer's stream that the proxy ended with a reason."""
        return self.stream_died(stream, now, f"{why.code}: {why.text}", end=why)

    def _nobody_takes_the_login(self) -> bool:
        return bool(self._logins_refused) and all(proxy.address in self._logins_refused for proxy in self._listed)

    def _give_up(self, proxy: Proxy, why: Failure, woken: list[Ticket]) -> None:
        """Fail everything that waits for a proxy."""
        for queue in (proxy.first, proxy.normal):
            for ticket in queue:
                self._settle(ticket, in_doubt(why, self._policy.advice) if ticket.in_doubt else why, woken)
            queue.clear()

    def _leave(self, proxy: Proxy, now: float, rest_s: float) -> list[Effect]:
        """End a proxy's stream; what waits for it goes to those that now serve it. Without a rest that may be the same one."""
        del self._by_stream[proxy.stream]
        self._change(proxy, ProxyEvent.DIED)
        proxy.rest_until = now + rest_s
        if not rest_s and proxy.listed:
            self._change(proxy, ProxyEvent.RESTED)
        return [CloseStream(proxy.stream), *self._move_all(proxy, now)]

    def set_proxies(self, addresses: Sequence[str], now: float) -> list[Effect]:
        """Set the cluster's proxies, in the order of their registration. An empty list changes nothing.

        Source: docs/registry.md.
        """
        if not addresses or [proxy.address for proxy in self._listed] == list(dict.fromkeys(addresses)):
            return []
        listed = [self._proxies.setdefault(address, Proxy(address)) for address in dict.fromkeys(addresses)]
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
            proxy.requeue()
            for queue in (proxy.first, proxy.normal):
                for ticket in queue:
                    self._settle(ticket, unknown if ticket.attempts else never, woken)
                queue.clear()
        effects: list[Effect] = [Resolved(tuple(woken))] if woken else []
        effects += [CloseStream(stream) for stream in self._by_stream]
        self._by_stream.clear()
        return effects

    # Inside.

    def _change(self, proxy: Proxy, event: ProxyEvent) -> None:
        proxy.state = TRANSITIONS.get((proxy.state, event), proxy.state)

    def _plain_route(self, key: int) -> Proxy:
        proxy = self._listed[key % len(self._listed)]
        if proxy.state is ProxyState.IDLE or proxy.state is ProxyState.OPEN or not self._usable:
            return proxy
        return self._usable[key % len(self._usable)]

    def _route(self, key: int) -> Proxy:
        if self._writer is not None:
            return self._writers_route()
        if self._pins:
            pin = self._pins.get(key)
            if pin is not None:
                pin.count += 1
                return pin.proxy
        return self._plain_route(key)

    def _writers_route(self) -> Proxy:
        """The proxy of a writer's stream: the same as long as it is up or none is, then the next one that can be used."""
        proxy, listed = self._current, self._listed
        if proxy.state is ProxyState.DOWN:
            begin = listed.index(proxy) + 1 if proxy in listed else 0
            order = listed[begin:] + listed[:begin]
            self._current = next((each for each in order if each in self._usable), order[-1])
        return self._current

    def _rethink(self) -> None:
        """Handle a change in the choice of proxies: pin every key whose unresolved messages are not where new ones would go."""
        self._usable = [proxy for proxy in self._listed if proxy.state in (ProxyState.IDLE, ProxyState.OPEN)]
        self._pins = {}
        if self._writer is not None:
            return
        for proxy in self._proxies.values():
            counts: dict[int, int] = {}
            for ticket in proxy.tickets():
                counts[ticket.key] = counts.get(ticket.key, 0) + 1
            for key, count in counts.items():
                if self._plain_route(key) is not proxy:
                    self._pins[key] = _Pin(proxy, count)

    def _wanted(self, proxy: Proxy, now: float) -> list[Effect]:
        if proxy.state is ProxyState.OPEN:
            return [Writable(proxy.stream)]
        if proxy.state is not ProxyState.IDLE or now < self._rest_until:
            return []
        self._change(proxy, ProxyEvent.WANTED)
        proxy.begin(self._next_stream, self._options.window_bytes, now)
        self._next_stream += 1
        self._by_stream[proxy.stream] = proxy
        self.counters.streams_opened += 1
        writer = self._writer
        if writer is None:
            return [OpenStream(proxy.address, proxy.stream)]
        writer.begin()
        return [OpenStream(proxy.address, proxy.stream, writer.worker, writer.generation)]

    def _move_all(self, source: Proxy, now: float) -> list[Effect]:
        """Move everything that a proxy has to those that now serve its keys, before their own messages of the same lane."""
        moving = [*source.first, *source.normal]
        source.first.clear()
        source.normal.clear()
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

    def _finish_drain(self, proxy: Proxy, now: float) -> list[Effect]:
        refused = proxy.refused
        if any(not ticket.resolved and position not in refused for position, ticket in proxy.in_flight.items()):
            return []
        proxy.take_back(False)
        effects = self._leave(proxy, now, DRAINED_PAUSE_S)
        return [*effects, RefreshCluster()] if self._writer is not None else effects

    def _resolve(self, proxy: Proxy, outcomes: Sequence[Outcome], woken: list[Ticket]) -> None:
        """Resolve messages in flight that have an outcome of their own."""
        in_flight = proxy.in_flight
        first = next(iter(in_flight), proxy.sent + 1)
        for outcome in outcomes:
            failure = outcome.failure
            for position in range(max(outcome.position, first), outcome.position + outcome.number):
                ticket = in_flight.get(position)
                if ticket is None:
                    continue
                ticket.learn(outcome, position - outcome.position)
                if failure is not None and failure.code == self._policy.again:
                    if self._writer is None:
                        ticket.attempts = 1 if ticket.in_doubt else 0  # the proxy refused it unseen
                        proxy.refused.add(position)
                    continue
                del in_flight[position]
                proxy.in_flight_bytes -= ticket.size
                if not ticket.resolved:
                    self._settle(ticket, failure and self._failure_of(ticket, failure), woken)

    def _confirm(self, proxy: Proxy, up_to: int, woken: list[Ticket]) -> None:
        """Resolve what is in flight up to a position, without a failure."""
        in_flight, refused = proxy.in_flight, proxy.refused
        for position in range(proxy.up_to + 1, up_to + 1):
            if refused and position in refused:
                continue
            ticket = in_flight.pop(position, None)
            if ticket is not None:
                proxy.in_flight_bytes -= ticket.size
                if not ticket.resolved:
                    self._settle(ticket, None, woken)
        proxy.up_to = up_to

    def _failure_of(self, ticket: Ticket, why: Failure) -> Failure:
        """The failure of a message that a proxy answered."""
        if ticket.in_doubt and why.code not in LOOKED:
            found = in_doubt(why, self._policy.advice)
            if found is not why:
                return found
        elif not ticket.in_doubt and why.code == self._policy.unsent:
            why = Failure(NotSent.code, why.text)  # the only proxy that ever had it passed it on to nobody
        # All attempts are answered: if the message is sent again, counting starts over.
        ticket.in_doubt, ticket.attempts = False, 0
        return why

    def _settle(self, ticket: Ticket, failure: Failure | None, woken: list[Ticket]) -> None:
        ticket.failure = failure
        ticket.resolved = True  # last: another thread may look
        self.unresolved -= 1
        self.unresolved_bytes -= ticket.size
        if failure is None or self._writer is None:
            ticket.record = b""  # a receipt that is kept must not keep a message that is not sent again
        group = ticket.group
        if group is not None:
            group.unresolved -= 1
            ticket.group = None
        if failure is None:
            self.counters.confirmed += 1
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

    def _expire(self, proxy: Proxy, now: float, woken: list[Ticket]) -> None:
        policy = self._policy
        seconds = f"its time ({policy.timeout_s:g} s if the call names none)"
        because = f" (last failure: {self._last_reason})" if self._last_reason else ""
        never = Failure(
            NotSent.code,
            f"the {policy.noun} was not sent within {seconds}: no proxy took it{because}; check that a proxy runs, then send again",
        )
        unknown = Failure(
            OutcomeUnknown.code,
            f"no proxy confirmed the {policy.noun} within {seconds}{because}: its outcome is unknown, it may have been delivered; "
            f"{policy.advice}",
        )
        if self._nobody_takes_the_login():
            never = self._login
        for ticket in self._due(proxy.in_flight.values(), now):
            self.counters.expired += 1
            self._settle(ticket, unknown, woken)
        if self._writer is not None:
            for position in [position for position, _ in takewhile(lambda each: each[1].resolved, proxy.in_flight.items())]:
                proxy.in_flight_bytes -= proxy.in_flight.pop(position).size
        for queue in (proxy.first, proxy.normal):
            for ticket in self._due(queue, now):
                self.counters.expired += 1
                self._settle(ticket, unknown if ticket.attempts else never, woken)
            while queue and queue[0].resolved:
                queue.popleft()
            if self._writer is None:
                waiting = [ticket for ticket in queue if not ticket.resolved]
                queue.clear()
                queue.extend(waiting)
        tickets = proxy.tickets() if self._writer is None else islice(proxy.tickets(), 1)
        proxy.earliest = min((ticket.deadline for ticket in tickets), default=now + policy.timeout_s)

    def _due(self, tickets: Iterable[Ticket], now: float) -> list[Ticket]:
        """The unresolved tickets whose time is over. A writer's are in the order of their deadlines: a full queue costs nothing."""
        if self._writer is not None:
            tickets = takewhile(lambda ticket: ticket.deadline <= now, tickets)
        return [ticket for ticket in tickets if ticket.deadline <= now and not ticket.resolved]
