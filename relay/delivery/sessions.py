"""All deliveries of a relay: sessions, their turns and timers, and their requests, batched. Pure.

    logins, heartbeats, logouts ┐                         ┌ OpenSessions, ReadInboxes, SaveCursors ─▶ Pi
    notices (Pi's) ─────────────┼─▶ session of (UIN, ─────┼ FetchMessages ─▶ Xiu
    acknowledgements (gateways')┤   device): `session`    └ Deliver ─▶ gateways
    answers, ticks ─────────────┘

Requests of all sessions from one event leave in one effect of each kind.

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.core.contract import NEVER, EventTable, Tick
from pixiu.wire.record import INBOX_LANES
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.saving import Saving
from relay.delivery.session import Session
from relay.delivery.slots import Slots
from relay.delivery.states import Cause, State


@dataclass(slots=True)
class DeliveryCounters:
    """Totals of deliveries since the start."""

    delivered: int = 0
    """Envelopes sent, repeats included."""
    asked: int = 0
    """Lanes for which a gateway was asked what it has written, because nothing was acknowledged for half the time."""
    gaps: int = 0
    """Gap markers among them."""
    from_notices: int = 0
    """Sent with the record from the notice, without reading Pi or Xiu."""
    opened: int = 0
    fenced: int = 0
    """Sessions that ended because a newer one was opened elsewhere."""
    refused: int = 0
    """Refused logins: too many sessions, or a device that Pi does not know."""
    failures: int = 0
    """Calls without an answer in time, or refused for now."""
    acknowledgements_old: int = 0
    """Acknowledgements of a session that is no longer the device's."""
    acknowledgements_of_others: int = 0
    """Acknowledgements of a session at another gateway, whose number their gateway guessed."""
    answers_late: int = 0
    """Answers to a question that was no longer open."""


@dataclass(slots=True)
class _Remembered:
    """A device without a session."""

    sent: tuple[int, ...]
    """Per lane, the highest InboxSeq sent to it."""
    not_before: float
    """Time before which it is not served again."""
    cautious: bool
    """True if it gets little mail until it acknowledges something."""


class Deliveries:
    """All delivery sessions of a relay. `step` never raises on input from the network.

    Args:
        owns: returns True if this relay serves a user, by its current view of the cluster.
        limits: validated.
        make_session: for tests that replace it.
    """

    def __init__(self, owns: Callable[[int], bool], limits: Limits, make_session: type[Session] = Session) -> None:
        self.limits = limits
        self.counters = DeliveryCounters()
        self.sessions: dict[ev.Device, Session] = {}
        self._of_user: dict[int, dict[Session, None]] = {}
        self._at: dict[int, dict[Session, None]] = {}
        """Gateway → its sessions."""
        self._held: dict[int, float] = {}
        """Gateways whose streams accept nothing → time until which they count as such; only gateways with sessions."""
        self._owns = owns
        self._make_session = make_session
        self._remembered: dict[ev.Device, _Remembered] = {}
        self._leaving: dict[ev.Device, Session] = {}
        """Sessions ended by a logout, for their devices' last acknowledgements, which come by another path than the logout."""
        self._opening: Slots[Session] = Slots(limits.opening)
        self._fetching: Slots[Session] = Slots(limits.fetching)
        self._saving = Saving(limits)
        self._timers: list[tuple[float, int, Session]] = []
        """A heap. An entry earlier than its session's deadline is put back."""
        self._timed: dict[Session, float] = {}
        """Time of the session's entry in the heap."""
        self._order = self._token = 0
        self._touched: dict[Session, None] = {}
        self._opens: list[ev.Asked] = []
        self._reads: list[tuple[ev.Asked, int, Sequence[ev.Read]]] = []
        self._fetches: list[tuple[ev.Asked, Sequence[int]]] = []
        self._chunks: dict[int, list[ev.Chunk]] = {}
        self._asks: dict[int, list[ev.DeviceLane]] = {}
        self._confirmed: list[ev.Effect] = []
        self._events: EventTable[ev.Effect] = EventTable()
        self._events.on(ev.LoggedIn, self._on_logged_in)
        self._events.on(ev.StillThere, self._on_still_there)
        self._events.on(ev.LoggedOut, self._on_logged_out)
        self._events.on(ev.GatewayLost, self._on_gateway_lost)
        self._events.on(ev.StreamBroken, self._on_stream_broken)
        self._events.on(ev.StreamReady, self._on_stream_ready)
        self._events.on(ev.OwnersChanged, self._on_owners_changed)
        self._events.on(ev.Notified, self._on_notified)
        self._events.on(ev.Acknowledged, self._on_acknowledged)
        self._events.on(ev.Opened, self._on_opened)
        self._events.on(ev.Listed, self._on_listed)
        self._events.on(ev.Fetched, self._on_fetched)
        self._events.on(ev.Saved, self._on_saved)
        self._events.on(ev.Stopping, self._on_stopping)
        self._events.on(Tick, self._on_tick)

    # --- the outside

    def step(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Handle one event; `now` is monotonic seconds. Returns effects, in order."""
        out = self._events.step(event, now)
        while granted := [*self._opening.grant(), *self._fetching.grant()]:
            for session in granted:
                self._on(session, Cause.SLOT_GRANTED, None, now)
        for session in self._touched:
            session.set_deadline(now)
            self._schedule(session)
        self._touched.clear()
        self._leave_together(now, out)
        return out

    def next_deadline(self) -> float:
        """Time at which a `Tick` is due, monotonic seconds; `NEVER` while there are no deliveries."""
        return min(self._timers[0][0] if self._timers else NEVER, self._saving.next_deadline())

    @property
    def unsaved(self) -> int:
        """Number of cursors that Pi has not confirmed."""
        return self._saving.unsaved

    def gateways(self) -> Collection[int]:
        """Gateways with sessions."""
        return self._at.keys()

    @property
    def busy(self) -> int:
        """Number of sessions that have a slot: they open, or fetch."""
        return self._opening.held + self._fetching.held

    @property
    def waiting(self) -> int:
        """Number of sessions that wait for a slot."""
        return self._opening.waiting + self._fetching.waiting

    def _leave_together(self, now: float, out: list[ev.Effect]) -> None:
        """Send the sessions' requests of this step. Cursors first: sessions opened before them would make them stale."""
        out += self._saving.due(now)
        if self._opens:
            out.append(ev.OpenSessions(self._opens))
            self._opens = []
        if self._reads:
            out.append(ev.ReadInboxes(self._reads))
            self._reads = []
        if self._fetches:
            out.append(ev.FetchMessages(self._fetches))
            self._fetches = []
        for gateway, chunks in self._chunks.items():
            self.counters.delivered += sum([chunk.mails for chunk in chunks])
            out.append(ev.Deliver(gateway, chunks))
        self._chunks.clear()
        for gateway, lanes in self._asks.items():
            self.counters.asked += len(lanes)
            out.append(ev.AskWritten(gateway, lanes))
        self._asks.clear()
        out += self._confirmed
        self._confirmed.clear()

    # --- requests of sessions

    def next_token(self) -> int:
        """Return a number that was not used before."""
        self._token += 1
        return self._token

    def queue(self, session: Session) -> None:
        """Queue a session for a slot."""
        if session.opening:
            self._fetching.leave(session)
            self._opening.ask(session)
        else:
            self._opening.leave(session)
            self._fetching.ask(session)

    def leave(self, session: Session) -> None:
        """Give a session's slot back."""
        self._opening.leave(session)
        self._fetching.leave(session)

    def open(self, session: Session) -> None:
        """Ask Pi for a session number."""
        self._opens.append(session.asked)

    def read(self, session: Session, reads: Sequence[ev.Read]) -> None:
        """Ask Pi for entries."""
        self._reads.append((session.asked, session.number, reads))

    def fetch(self, session: Session, msg_ids: Sequence[int]) -> None:
        """Ask Xiu for records."""
        self._fetches.append((session.asked, msg_ids))

    def deliver(self, gateway: int, chunks: list[ev.Chunk]) -> None:
        """Send to a gateway."""
        there = self._chunks.get(gateway)
        if there is None:
            self._chunks[gateway] = chunks
        else:
            there += chunks

    def ask(self, gateway: int, lane: ev.DeviceLane) -> None:
        """Ask a gateway up to where it has written."""
        self._asks.setdefault(gateway, []).append(lane)

    def sendable(self, gateway: int, now: float) -> bool:
        """Return True if a gateway's stream accepts deliveries."""
        return gateway not in self._held or now >= self._held[gateway]

    def save(self, item: ev.Acknowledgement, now: float) -> None:
        """Queue an acknowledgement to be saved at Pi."""
        self._saving.add(item, now)

    def hurry(self, now: float) -> None:
        """Save acknowledgements at Pi at once."""
        self._saving.hurry(now)

    def sent_gap(self) -> None:
        """Count a gap marker."""
        self.counters.gaps += 1

    # --- sessions

    def _on(self, session: Session, cause: Cause, what: Any, now: float) -> None:
        session.on(cause, what, now)
        self._touched[session] = None
        if session.state is State.OFFLINE:
            self._forget(session, now + self.limits.fenced_pause_s if cause in (Cause.FENCED, Cause.REFUSED) else now)

    def _forget(self, session: Session, not_before: float) -> None:
        device = ev.Device(session.uin, session.device)
        if self.sessions.get(device) is not session:
            return
        del self.sessions[device]
        self._leave_gateway(session)
        others = self._of_user[session.uin]
        del others[session]
        if not others:
            del self._of_user[session.uin]
        if session.number:
            self._leaving.pop(device, None)
            if len(self._leaving) >= self.limits.max_leaving:
                del self._leaving[next(iter(self._leaving))]
            self._leaving[device] = session
        self._remembered.pop(device, None)
        if len(self._remembered) >= self.limits.max_remembered:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[device] = _Remembered(
            tuple(max(lane.marked, lane.reach) for lane in session.lanes), not_before, session.acknowledges_nothing
        )

    def _leave_gateway(self, session: Session) -> None:
        there = self._at.get(session.gateway)
        if there is not None:
            there.pop(session, None)
            if not there:
                del self._at[session.gateway]
                self._held.pop(session.gateway, None)

    def _serve(self, login: ev.Login, cause: Cause, now: float, *, taken_over: bool = False) -> None:
        """Serve a connected device: make a session for it, or restart it for a newer connection."""
        if not self._owns(login.uin):
            return
        device = ev.Device(login.uin, login.device)
        session = self.sessions.get(device)
        if session is not None:
            if login.connection <= session.connection:
                return
            self._leave_gateway(session)
            cause = Cause.LOGIN
        else:
            known = self._remembered.get(device)
            if known is not None and now < known.not_before:
                return
            if len(self.sessions) >= self.limits.max_sessions:
                self.counters.refused += 1
                return
            self._leaving.pop(device, None)
            session = self.sessions[device] = self._make_session(login.uin, login.device, self)
            self._of_user.setdefault(login.uin, {})[session] = None
            if known is not None:
                del self._remembered[device]
                for lane, sent in zip(session.lanes, known.sent, strict=True):
                    lane.marked = sent
                session.cautious = known.cautious
        self._at.setdefault(login.gateway, {})[session] = None
        self._on(session, cause, login, now)
        if taken_over:
            session.reread(now + self.limits.settle_s)

    def _on_logged_in(self, event: ev.LoggedIn, now: float, out: list[ev.Effect]) -> None:
        for login in event.logins:
            self._serve(login, Cause.LOGIN, now, taken_over=event.taken_over)

    def _on_still_there(self, event: ev.StillThere, now: float, out: list[ev.Effect]) -> None:
        """Source: PiXiu §6.4 ("a heartbeat can be treated as a login")."""
        for login in event.logins:
            self._serve(login, Cause.HEARTBEAT, now)

    def _on_logged_out(self, event: ev.LoggedOut, now: float, out: list[ev.Effect]) -> None:
        for login in event.logins:
            session = self.sessions.get(ev.Device(login.uin, login.device))
            if session is not None and login.connection >= session.connection:
                self._on(session, Cause.LOGOUT, None, now)

    def _on_gateway_lost(self, event: ev.GatewayLost, now: float, out: list[ev.Effect]) -> None:
        for session in self._sessions_at(event.gateway):
            self._on(session, Cause.LOGOUT, None, now)

    def _on_stream_broken(self, event: ev.StreamBroken, now: float, out: list[ev.Effect]) -> None:
        sessions = self._sessions_at(event.gateway)
        if sessions:
            self._held[event.gateway] = now + self.limits.hold_s
        for session in sessions:
            self._on(session, Cause.BROKEN, None, now)

    def _on_stream_ready(self, event: ev.StreamReady, now: float, out: list[ev.Effect]) -> None:
        self._held.pop(event.gateway, None)
        for session in self._sessions_at(event.gateway):
            session.ready(now)
            self._touched[session] = None

    def _on_owners_changed(self, event: ev.OwnersChanged, now: float, out: list[ev.Effect]) -> None:
        for uin in [uin for uin in self._of_user if not self._owns(uin)]:
            for session in list(self._of_user[uin]):
                self._on(session, Cause.LOGOUT, None, now)

    def _on_stopping(self, event: ev.Stopping, now: float, out: list[ev.Effect]) -> None:
        for session in list(self.sessions.values()):
            self._on(session, Cause.LOGOUT, None, now)

    def _sessions_at(self, gateway: int) -> list[Session]:
        return list(self._at.get(gateway, ()))

    # --- reports of inboxes and devices

    def _on_notified(self, event: ev.Notified, now: float, out: list[ev.Effect]) -> None:
        elsewhere: dict[int, None] = {}
        for notice in event.notices:
            if not self._owns(notice.uin):
                elsewhere[notice.uin] = None
            elif 0 <= notice.lane < INBOX_LANES:
                for session in self._of_user.get(notice.uin, ()):
                    self._notify(session, notice, now)
        self._confirmed.append(ev.ConfirmNotices(event.peer, event.number, tuple(elsewhere)))

    def _notify(self, session: Session, notice: ev.Notice, now: float) -> None:
        count = len(notice.msg_ids)
        begin = min(count, max(0, session.lanes[notice.lane].sent - notice.first + 1)) if notice.first else 0
        while begin < count:
            rest = notice.part(begin, count)
            cause, taken = session.kind_of(rest, now)
            if cause is Cause.NOTIFIED_NEXT:
                self.counters.from_notices += taken
            self._on(session, cause, rest.part(0, taken), now)
            begin += taken

    def _on_acknowledged(self, event: ev.Acknowledged, now: float, out: list[ev.Effect]) -> None:
        for item in event.acknowledgements:
            device = ev.Device(item.uin, item.device)
            session = self.sessions.get(device) or self._leaving.get(device)
            if session is None or item.session != session.number or not 0 <= item.lane < INBOX_LANES:
                self.counters.acknowledgements_old += 1
            elif session.gateway != event.gateway:
                self.counters.acknowledgements_of_others += 1
            elif session.state is State.OFFLINE:
                session.acknowledge_after_logout(item, now)
            else:
                self._on(session, Cause.ACKNOWLEDGED, item, now)

    # --- answers

    def _open_question(self, asked: ev.Asked) -> Session | None:
        session = self.sessions.get(ev.Device(asked.uin, asked.device))
        if session is None or session.token != asked.token:
            self.counters.answers_late += 1
            return None
        return session

    def _answered(self, answers: Iterable[tuple[ev.Asked, Any]], now: float) -> Iterator[tuple[Session, Any]]:
        """Yield sessions whose questions are still open, with the answers; failures are handled here."""
        for asked, answer in answers:
            session = self._open_question(asked)
            if session is None:
                continue
            if isinstance(answer, ev.Failure):
                self._fail(session, answer, now)
            else:
                yield session, answer

    def _fail(self, session: Session, failure: ev.Failure, now: float) -> None:
        if failure is ev.Failure.FENCED:
            self.counters.fenced += 1
            self._on(session, Cause.FENCED, None, now)
        elif failure is ev.Failure.REFUSED:
            self.counters.refused += 1
            self._on(session, Cause.REFUSED, None, now)
        else:
            self.counters.failures += 1
            self._on(session, Cause.FAILED, None, now)

    def _on_opened(self, event: ev.Opened, now: float, out: list[ev.Effect]) -> None:
        for session, number in self._answered(event.answers, now):
            self.counters.opened += 1
            self._on(session, Cause.OPENED, number, now)

    def _on_listed(self, event: ev.Listed, now: float, out: list[ev.Effect]) -> None:
        for session, listings in self._answered(event.answers, now):
            session.listed(listings, now)
            self._touched[session] = None

    def _on_fetched(self, event: ev.Fetched, now: float, out: list[ev.Effect]) -> None:
        for session, records in self._answered(event.answers, now):
            self._on(session, Cause.FETCHED, records, now)

    def _on_saved(self, event: ev.Saved, now: float, out: list[ev.Effect]) -> None:
        for item, failure in self._saving.answered(event.number, event.results, now):
            session = self.sessions.get(ev.Device(item.uin, item.device))
            if session is not None and session.number == item.session:
                self._fail(session, failure, now)

    # --- time

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        while self._timers and self._timers[0][0] <= now:
            at, _, session = heapq.heappop(self._timers)
            if self._timed.get(session) != at:
                continue
            del self._timed[session]
            if session.deadline <= now:
                if session.waits_for_answer:
                    self.counters.failures += 1
                session.on_time(now)
            self._touched[session] = None

    def _schedule(self, session: Session) -> None:
        """Make sure that the heap has an entry no later than the deadline; an earlier one stays."""
        at = self._timed.get(session)
        if session.deadline < (NEVER if at is None else at):
            self._order += 1
            self._timed[session] = session.deadline
            heapq.heappush(self._timers, (session.deadline, self._order, session))
        elif session.state is State.OFFLINE and at is not None:
            del self._timed[session]
