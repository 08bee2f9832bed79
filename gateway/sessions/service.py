"""The shell of a gateway's MQTT sessions that outlive their connections: begins them, stores them, keeps their filters at routers.

    CONNECT ─▶ read ─▶ over, or clean start? clear ─▶ new, of a tenant? take a place at the routers
            ─▶ write (a fence: older connections write nothing any more) ─▶ CONNACK
    SUBSCRIBE, UNSUBSCRIBE ─▶ put entries, write ─▶ SUBACK, UNSUBACK
    end ─▶ write the time; session expiry 0, or the expiry has passed: clear, and remove the entries

Source: docs/mqtt.md, "Sessions".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from structlog.typing import FilteringBoundLogger

from cluster.access.tenants.use import TenantUse
from cluster.mqtt.events import Wanted
from cluster.wire.v1 import kept_pb2
from gateway.sessions.queue import SessionState
from gateway.sessions.session import Session, is_over, renewal_s
from gateway.sessions.states import InboundTable, NoteName, Released, SessionNote
from pixiu.errors import MalformedData, NotAllowed, OldSession, Overloaded, PixiuError, Unavailable
from pixiu.ids import session_uin
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.filter_tree import filter_matches
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, Filter, resolve

RENEW_S: Final = 10.0
"""Interval at which sessions that are due are renewed, seconds."""
RENEWALS_A_TURN: Final = 100
"""Sessions renewed at a time; more wait for the next interval."""
MAX_BACKGROUND: Final = 20_000
"""Ends of sessions, and clean starts of plain clients, that are stored at a time. Policy: more are left out and counted; such a
session ends by its expiry."""
DISCARD_S: Final = 2.0
"""Time for which a clean start waits until the session before it is removed, seconds. Policy: where Pi takes longer, the client is
accepted all the same, and the session is removed as soon as Pi answers."""
MAX_EXPIRING: Final = 100_000
"""Sessions that ended here and are removed when their expiry has passed. Policy: further ones go when their entries at routers
become void, somewhat later."""
LOST_S: Final = 60.0
"""Interval of reports of messages that sessions have lost, seconds."""
MESSAGES_LOST: Final = "session_messages_lost"


class Put(Protocol):
    """Outcome of an entry; see `cluster.routers.kept_client.PutOutcome`."""

    @property
    def error(self) -> PixiuError | None:
        """The reason why it is not kept; None: it is."""


class KeptFilters(Protocol):
    """Keeps filters at routers; see `cluster.routers.kept_client.KeptClient`."""

    async def put(self, entries: Sequence[kept_pb2.KeptEntry]) -> Sequence[Put]:
        """Put entries; the outcomes are in their order. Raises `Overloaded`."""


class Store(Protocol):
    """Stores sessions; see `gateway.sessions.store.SessionStore`."""

    async def read(self, uin: int) -> SessionState:
        """Read a session's state."""

    async def write(self, uin: int, name: int, generation: int, value: bytes) -> None:
        """Set a note."""

    async def clear(self, uin: int, generation: int) -> None:
        """Remove a session's state and inbox."""

    def on_view(self) -> None:
        """Follow the cluster's layout."""

    async def close(self) -> None:
        """End what is under way."""

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""


class Sessions:
    """The sessions with a connection here.

    Args:
        serves: returns True if the cluster keeps sessions.
        max_expiry_s: returns the longest session expiry, seconds.
        important: filters of the topics whose messages are kept whatever their QoS.
        now: monotonic seconds.
        log: reports lost messages, once a minute.
    """

    def __init__(
        self,
        store: Store,
        kept: KeptFilters,
        *,
        serves: Callable[[], bool],
        max_expiry_s: Callable[[], int],
        topics: TopicRooms,
        vrooms: VRooms,
        important: Iterable[str] = (),
        now: Callable[[], float],
        log: FilteringBoundLogger,
    ) -> None:
        self.store, self._kept = store, kept
        self._serves, self._max_expiry_s, self._now, self._log = serves, max_expiry_s, now, log
        self._topics, self._vrooms = topics, vrooms
        self.important = [name.encode() for name in important]
        self._sessions: dict[int, Session] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ending: dict[int, asyncio.Task[None]] = {}
        """Session → what is being stored after its connection."""
        self._expiring: dict[int, float] = {}
        """Session that ended here → when its expiry has passed, monotonic seconds."""
        self._lost_at = -LOST_S
        self._lost = 0
        self.resumed = self.begun = self.expired = self.left_out = self.failed = 0
        self.gaps = self.unmatched = 0

    def __len__(self) -> int:
        """Number of sessions with a connection here."""
        return len(self._sessions)

    @property
    def serves(self) -> bool:
        """True if sessions can outlive their connections."""
        return self._serves() and self._max_expiry_s() > 0

    @property
    def unfinished(self) -> int:
        """Number of sessions whose end is not stored yet."""
        return len(self._ending)

    # --- a connection's session

    async def begin(self, uin: int, client_id: str, expiry_s: int, *, clean: bool, tenant: TenantUse | None = None) -> Session:
        """Resume the session of a user's client, or begin one. expiry_s: that it asks for, above 0. Raises `PixiuError`;
        `QuotaReached` if the tenant has too many."""
        found = await self._begin(uin, client_id, expiry_s, clean, tenant)
        assert found is not None, "only a session without an expiry is not begun"
        return found

    async def resume(self, uin: int, client_id: str, tenant: TenantUse | None = None) -> Session | None:
        """Resume the session of a user's client for one connection, with which it ends. Returns None if there is none.
        Raises `PixiuError`."""
        return await self._begin(uin, client_id, 0, False, tenant)

    async def _begin(self, uin: int, client_id: str, expiry_s: int, clean: bool, tenant: TenantUse | None) -> Session | None:
        number = session_uin(uin, client_id)
        ending = self._ending.get(number)
        if ending is not None:
            await asyncio.wait((ending,))
        state = await self.store.read(number)
        generation = max(state.generation + 2, _now_ms())  # above that of a removal that has read the same state
        before = _note_of(state)
        if before is not None and (before.uin, before.client_id) != (uin, client_id):
            raise NotAllowed("another session has the same number: use another client ID")
        expiry_s = min(expiry_s, self._max_expiry_s())
        present = before is not None and not clean and not is_over(before, _now_ms())
        name = tenant.name if tenant is not None else ""
        if not present:
            if state.exists or state.waiting:
                await self.store.clear(number, generation)
            if before is not None:
                stays = bool(expiry_s) and before.tenant == name
                # Below the entries of the new session, of which removed ones would win.
                self._background(self._remove(Session(before, generation - 1, present=False), place=not stays))
            if not expiry_s:
                return None
        connected = present and before is not None and before.connected
        note = before if present and before is not None else SessionNote(client_id, uin, expiry_s)
        note.expiry_s = expiry_s
        moved, note.tenant = note.tenant != name, name
        session = Session(note, generation, present=present)
        if tenant is not None and (moved or not present):
            await self._take_place(session, tenant)
        await self._write(session)
        if connected:
            # Another gateway may have stored something meanwhile; from now on it cannot.
            state = await self.store.read(number)
        if present:
            _restore(session, state)
        self.resumed += present
        self.begun += not present
        self._sessions[number] = session
        self._expiring.pop(number, None)
        session.renew_at = self._now() + renewal_s(expiry_s)
        return session

    async def keep(self, session: Session, filters: Iterable[Wanted]) -> dict[str, PixiuError]:
        """Store filters that were granted, and keep them at the routers. Returns those that cannot be kept, with the reasons.
        Raises `PixiuError` if the session cannot be stored."""
        filters = list(filters)
        left = session.add(filters)
        refused = await self._put(session, [wanted.filter for wanted in filters if session.filters[wanted.filter].kept])
        session.remove(refused)
        if left or refused:
            self._background(self._leave(session, [*left, *refused]))
        await self._write_open(session)
        return refused

    async def leave(self, session: Session, names: Iterable[str]) -> None:
        """Store the session without filters; routers are notified in the background. Raises `PixiuError`."""
        left = session.remove(names)
        await self._write_open(session)
        self._background(self._leave(session, left))

    async def store_inbound(self, session: Session) -> None:
        """Store the messages of QoS 2 that the client has not released. Raises `PixiuError`."""
        await self.store.write(session.uin, NoteName.INBOUND, session.generation, session.inbound.encode())

    async def store_released(self, session: Session) -> None:
        """Store the messages of QoS 2 that the client has. Raises `PixiuError`."""
        session.pruned = False
        try:
            await self.store.write(session.uin, NoteName.RELEASED, session.generation, session.released.encode())
        except PixiuError:
            session.pruned = True
            raise

    def end(self, session: Session, expiry_s: int) -> None:
        """End a connection. expiry_s: set at its end; -1: as it was. 0, here or before: the session is over."""
        if self._sessions.get(session.uin) is session:
            del self._sessions[session.uin]
        if expiry_s > 0:
            session.note.expiry_s = min(expiry_s, self._max_expiry_s())
        over = expiry_s == 0 or not session.note.expiry_s
        self._ends(session.uin, lambda: self._over(session) if over else self._end(session, put=expiry_s > 0))

    async def discard(self, uin: int, client_id: str) -> None:
        """Discard what an earlier connection left, before a client with a clean start that keeps no session is accepted: wherever
        it connects after that, the session is gone."""
        number = session_uin(uin, client_id)
        self._expiring.pop(number, None)
        self._ends(number, partial(self._clear, number))
        ending = self._ending.get(number)
        if ending is not None:
            await asyncio.wait((ending,), timeout=DISCARD_S)

    async def forget(self, uin: int, client_id: str) -> bool:
        """Remove a session, whether it has a connection or not. Returns False if there is none. Raises `PixiuError`."""
        return await self._clear(session_uin(uin, client_id))

    def lost(self, gaps: int) -> None:
        """Count markers of messages that an inbox has lost, and report them, once a minute."""
        self.gaps += gaps
        self._lost += gaps
        if self._now() >= self._lost_at + LOST_S:
            self._log.warning(MESSAGES_LOST, gaps=self._lost, text="inboxes of MQTT sessions were full, or messages expired there")
            self._lost_at, self._lost = self._now(), 0

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work of a connection, which handles its errors, in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- of the gateway

    def sweep(self) -> None:
        """Renew the sessions that are due: their entries at routers would become void, and Pi would forget them. Remove those whose
        expiry has passed."""
        due = [session for session in self._sessions.values() if session.renew_at <= self._now()]
        for session in due[:RENEWALS_A_TURN]:
            session.renew_at = self._now() + renewal_s(session.note.expiry_s)
            self._background(self._renew(session))
        over = [number for number, due in self._expiring.items() if due <= self._now()]
        for number in over[:RENEWALS_A_TURN]:
            del self._expiring[number]
            self._ends(number, partial(self._clear, number, over=True))

    async def close(self) -> None:
        """Wait for what is being stored, for a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        for task in self._tasks:
            task.cancel()

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "sessions_kept": len(self._sessions),
            "sessions_resumed_total": self.resumed,
            "sessions_begun_total": self.begun,
            "sessions_expired_total": self.expired,
            "sessions_ending": len(self._ending),
            "session_gaps_total": self.gaps,
            "session_unmatched_total": self.unmatched,
            "session_ends_left_out_total": self.left_out,
            "session_ends_failed_total": self.failed,
        }

    def is_important(self, name: str) -> bool:
        """True if a topic, or all that a filter can match, is of the important topics of the cluster."""
        return any(filter_matches(each, name.encode()) for each in self.important)

    def rooms_of(self, parsed: Filter) -> Sequence[int]:
        """Rooms at which a filter is kept: none for a big room, whose messages are not stored."""
        if parsed.wild:
            return self._topics.rooms(parsed.name)
        if not parsed.name.startswith(ROOM_PREFIX):
            return (self._topics.room(parsed.name),)
        room = resolve(parsed.name)
        return (room,) if isinstance(room, int) and not self._vrooms.is_big(room) and not self._vrooms.is_vroom(room) else ()

    # --- inside

    async def _write(self, session: Session) -> None:
        await self.store.write(session.uin, NoteName.SESSION, session.generation, session.state(_now_ms()))

    async def _write_open(self, session: Session) -> None:
        """Store a session unless its connection has ended meanwhile: what its end stores must stay."""
        if self._sessions.get(session.uin) is session:
            await self._write(session)

    async def _take_place(self, session: Session, tenant: TenantUse) -> None:
        """Take a place among the sessions of a tenant. If it cannot be stored after that, the place stays for its next attempt, or
        becomes void."""
        (put,) = await self._kept.put(session.place(_now_ms(), tenant.settings.kept_sessions))
        if isinstance(put.error, Overloaded):
            raise tenant.kept_refused(str(put.error))
        if put.error is not None:
            raise put.error

    async def _put(
        self, session: Session, names: Iterable[str], *, removed: bool = False, place: bool = False
    ) -> dict[str, PixiuError]:
        by_filter = session.entries(names, self.rooms_of, _now_ms(), removed=removed)
        entries = [entry for found in by_filter.values() for entry in found]
        if place:
            entries += session.place(_now_ms(), removed=removed)
        if not entries:
            return {}
        try:
            outcomes = await self._kept.put(entries)
        except Overloaded as error:
            return dict.fromkeys(by_filter, error)
        return {entry.filter: put.error for entry, put in zip(entries, outcomes, strict=True) if put.error is not None}

    async def _leave(self, session: Session, names: Iterable[str]) -> None:
        """Remove entries of filters that the session has not got again meanwhile."""
        await self._put(
            session, [name for name in names if name not in session.filters or not session.filters[name].kept], removed=True
        )

    async def _remove(self, session: Session, *, place: bool = True) -> None:
        await self._put(session, list(session.filters), removed=True, place=place)

    async def _clear(self, number: int, *, over: bool = False) -> bool:
        """Remove a session; its entries in the background. `over`: only if its expiry has passed. Returns False if nothing was."""
        state = await self.store.read(number)
        before = _note_of(state)
        if (before is None and not state.waiting) or (over and (before is None or not is_over(before, _now_ms()))):
            return False
        generation = state.generation + 1  # a connection that begins meanwhile, at any gateway, has a higher one: its session stays
        await self.store.clear(number, generation)
        if before is not None:
            self._background(self._remove(Session(before, generation, present=False)))
        self.expired += over
        return True

    async def _end(self, session: Session, *, put: bool) -> None:
        if len(self._expiring) < MAX_EXPIRING:
            self._expiring[session.uin] = self._now() + session.note.expiry_s + 1.0
        if put:
            await self._put(session, [name for name, wanted in session.filters.items() if wanted.kept], place=True)
        value = session.state(_now_ms(), connected=False)
        await self.store.write(session.uin, NoteName.SESSION, session.generation, value)

    async def _over(self, session: Session) -> None:
        await self.store.clear(session.uin, session.generation)
        await self._remove(session)

    async def _renew(self, session: Session) -> None:
        await self._put(session, [name for name, wanted in session.filters.items() if wanted.kept], place=True)
        await self._write_open(session)

    def _ends(self, number: int, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """End a session in the background, after what ends it already. The next connection of its client waits for that."""
        before = self._ending.get(number)

        async def end() -> None:
            if before is not None:
                await asyncio.wait((before,))
            await work()

        def ended(task: asyncio.Task[None]) -> None:
            if self._ending.get(number) is task:
                del self._ending[number]

        task = self._background(end())
        if task is not None:
            self._ending[number] = task
            task.add_done_callback(ended)

    def _background(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None] | None:
        """Do work that nobody waits for. None: there is too much of it."""
        if len(self._tasks) >= MAX_BACKGROUND:
            work.close()
            self.left_out += 1
            return None
        task = asyncio.get_running_loop().create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _quietly(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except OldSession:
            pass  # the client is connected elsewhere
        except (PixiuError, Unavailable):
            self.failed += 1


def _note_of(state: SessionState) -> SessionNote | None:
    """The session that is stored; None: there is none, or it cannot be read."""
    _, value = state.notes.get(NoteName.SESSION, (0, b""))
    try:
        return SessionNote.decode(value) if value else None
    except MalformedData:
        return None


def _restore(session: Session, state: SessionState) -> None:
    session.dropped, session.waiting = state.dropped, state.waiting
    try:
        session.inbound = InboundTable.decode(state.notes.get(NoteName.INBOUND, (0, b""))[1])
        session.released = Released.decode(state.notes.get(NoteName.RELEASED, (0, b""))[1])
    except MalformedData as error:
        raise Unavailable(f"the session's exchanges of QoS 2 cannot be read: {error}") from None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
