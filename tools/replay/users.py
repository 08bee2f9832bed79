"""The replay's users: one connection for each user in a room, opened again when it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from pixiu.errors import PixiuError
from pixiu.ids import UIN, RoomID
from pixiu.rpc.backoff import Backoff
from tools.replay.options import ReplayOptions
from tools.replay.sessions import Connector, Session

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
FAILURES = (PixiuError, OSError, asyncio.TimeoutError)
"""Exceptions of opening or using a connection when the other side is gone."""


@dataclass(slots=True)
class Break:
    """A connection that ended by itself."""

    uin: UIN
    gateway: int
    at_us: int
    reason: str
    resumed_us: int | None = None
    """Time at which the user was connected again, and in all its rooms."""


class User:
    """One user: the user's rooms and connection."""

    __slots__ = ("lock", "rooms", "session", "uin")

    def __init__(self, uin: UIN) -> None:
        self.uin = uin
        self.rooms: set[RoomID] = set()
        self.session: Session | None = None
        self.lock = asyncio.Lock()


class Users:
    """Logs users in and out over a connector.

    Source: docs/operations.md.
    """

    def __init__(
        self,
        connector: Connector,
        options: ReplayOptions,
        on_message: Callable[[UIN, RoomID, bytes], None],
        now_us: Callable[[], int],
    ) -> None:
        self._connector = connector
        self._options = options
        self._on_message = on_message
        self._now_us = now_us
        self._users: dict[UIN, User] = {}
        self._slots = asyncio.Semaphore(options.login_slots)
        self._chance = Random()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.breaks: list[Break] = []
        self.failed_logins = 0
        self.logins = 0
        self.connections = 0
        self.resuming = 0
        """Number of users whose connection broke and is not back yet."""

    def session(self, uin: UIN) -> Session | None:
        """The user's connection; None if there is none now."""
        user = self._users.get(uin)
        return user.session if user else None

    def gateway_of(self, uin: UIN) -> int:
        """The gateway to which the user is or was last connected; 0 if never."""
        session = self.session(uin)
        if session is not None:
            return session.gateway
        return next((found.gateway for found in reversed(self.breaks) if found.uin == uin), 0)

    async def join(self, uin: UIN, room: RoomID) -> bool:
        """Log a user in to a room; True when the cluster confirmed it, False after `join_timeout_s`."""
        user = self._users.setdefault(uin, User(uin))
        async with user.lock:
            user.rooms.add(room)
            deadline = asyncio.get_running_loop().time() + self._options.join_timeout_s
            backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, self._chance.random)
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        session = user.session or await self._open(user, but=room)
                        await session.join(room)
                    self.logins += 1
                    return True
                except FAILURES:
                    wait_s = backoff.next_s()
                    if asyncio.get_running_loop().time() + wait_s >= deadline:
                        self.failed_logins += 1
                        user.rooms.discard(room)
                        return False
                await asyncio.sleep(wait_s)

    async def leave(self, uin: UIN, room: RoomID) -> None:
        """Log a user out of a room; the connection is closed with the last one."""
        user = self._users[uin]
        async with user.lock:
            user.rooms.discard(room)
            session = user.session
            if session is None:
                return
            try:
                async with asyncio.timeout(self._options.join_timeout_s):
                    await session.leave(room)
            except FAILURES:
                pass  # the connection is broken: `_broken` opens it again without the room
            if not user.rooms and user.session is session:
                user.session = None
                await session.close()

    async def close(self) -> None:
        """End all connections."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        sessions = [user.session for user in self._users.values() if user.session is not None]
        for user in self._users.values():
            user.session = None
        await asyncio.gather(*(self._close_one(session) for session in sessions), return_exceptions=True)

    async def _close_one(self, session: Session) -> None:
        async with self._slots:
            await session.close()

    async def _open(self, user: User, but: RoomID | None = None) -> Session:
        """Connect, and join the rooms that the user is already in."""
        async with self._slots:
            session = await self._connector.open(user.uin, self._on_message, self._broken)
        self.connections += 1
        user.session = session
        try:
            for room in sorted(user.rooms):
                if room != but:
                    await session.join(room)
        except BaseException:
            await self._drop(user)
            raise
        return session

    def _broken(self, uin: UIN, reason: str) -> None:
        user = self._users[uin]
        session, user.session = user.session, None
        if self._closed or session is None:
            return
        found = Break(uin, session.gateway, self._now_us(), reason)
        self.breaks.append(found)
        self.resuming += 1
        task = asyncio.create_task(self._resume(user, found), name=f"resume {uin}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resume(self, user: User, found: Break) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, self._chance.random)
        try:
            while user.rooms:
                try:
                    async with user.lock, asyncio.timeout(self._options.join_timeout_s):
                        if user.session is None:
                            await self._open(user)
                    found.resumed_us = self._now_us()
                    return
                except FAILURES:
                    pass
                await asyncio.sleep(backoff.next_s())
            found.resumed_us = self._now_us()  # the user left the last room meanwhile
        finally:
            self.resuming -= 1

    async def _drop(self, user: User) -> None:
        """Close a connection on which not all rooms could be joined."""
        session, user.session = user.session, None
        if session is not None:
            await session.close()
