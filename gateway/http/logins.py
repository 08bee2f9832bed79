"""Clients of the cluster for the callers of the HTTP API: one for each login, kept while it is used, with its inboxes and channels.

    request ──▶ Login (user, UIN, groups, claims) ──▶ pixiu.Client with the newest token ──▶ proxies, gateways, topics
                  └ receivers: inbox of a device, member of a channel, stream of events

So rules and quotas are those of every other client, checked where they are checked for all. Two tokens share a client only if they
have the same rights.

Source: docs/http.md, "Logins".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Final, Protocol, TypeVar

import pixiu
from cluster.metrics.metrics import Sample
from cluster.trust.identity import Identity
from gateway.http.answers import Refused, busy
from pixiu.client.client import Client
from pixiu.errors import PixiuError

IDLE_S: Final = 60.0
"""Time after which what nobody asks for is closed."""
LOOK_S: Final = 5.0
MAX_RECEIVERS: Final = 16
"""Inboxes, channels and streams of one login."""
CLOSE_S: Final = 5.0
"""Time for a client that is closed, seconds."""
OPTIONS: Final = pixiu.ClientOptions(
    connect_timeout_s=3.0, publish_timeout_s=10.0, mail_timeout_s=20.0, topic_timeout_s=20.0, join_timeout_s=8.0, max_backoff_s=1.0,
    queue_bytes=4 << 20, queue_records=4000, receive_bytes=1 << 20, receive_records=2000,
)  # fmt: skip

Key = tuple[object, ...]


class Receiver(Protocol):
    """Something of a login that stays between requests."""

    async def open(self) -> None:
        """Connect. Raises `PixiuError`."""

    async def close(self) -> None:
        """Disconnect."""

    @property
    def failed(self) -> bool:
        """True if it is of no use any more."""


ReceiverT = TypeVar("ReceiverT", bound=Receiver)


class _Place:
    """The place of one receiver."""

    def __init__(self) -> None:
        self.receiver: Receiver | None = None
        self.opening = asyncio.Lock()
        self.users = 0
        """Requests that use it."""
        self.used_at = 0.0


class Login:
    """One login, and its client."""

    def __init__(self, key: Key, identity: Identity | None, user: int) -> None:
        self.key, self.identity, self.user = key, identity, user
        self.token = ""
        """The newest token that was shown."""
        self.users = 0
        """Requests that use it."""
        self.used_at = 0.0
        self.client: Client | None = None
        self.opening = asyncio.Lock()
        self._places: dict[Key, _Place] = {}

    @property
    def name(self) -> str:
        """Name of the user, for memories of its requests."""
        return self.identity.user if self.identity is not None else str(self.user)

    @property
    def px(self) -> Client:
        """The client. Only within `Logins.use`."""
        assert self.client is not None
        return self.client

    @property
    def receivers(self) -> int:
        """Number of its receivers."""
        return len(self._places)

    @contextlib.asynccontextmanager
    async def receiver(self, key: Key, make: Callable[[], ReceiverT], *, shared: bool = False) -> AsyncIterator[ReceiverT]:
        """Use a receiver, which is made and opened if it is not there; by one request at a time unless it is `shared`.

        Raises `Refused`, `PixiuError`.
        """
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MAX_RECEIVERS:
                raise busy(f"a login has {MAX_RECEIVERS} inboxes, channels and streams at one time", int(IDLE_S))
            place = self._places[key] = _Place()
        if place.users and not shared:
            raise Refused(409, "IN_USE", "another request takes from it now", 1)
        place.users += 1
        try:
            async with place.opening:
                if place.receiver is not None and place.receiver.failed and place.users == 1:
                    failed, place.receiver = place.receiver, None
                    await close_quietly(failed)
                if place.receiver is None:
                    made = make()
                    await made.open()
                    place.receiver = made
            yield place.receiver  # type: ignore[misc]  # the key has the kind of receiver
        finally:
            place.users -= 1
            place.used_at = asyncio.get_running_loop().time()
            if place.receiver is None and not place.users and self._places.get(key) is place:
                del self._places[key]

    async def close_idle(self, before: float) -> None:
        """Close the receivers that nobody has used since."""
        for key, place in list(self._places.items()):
            if place.used_at < before and not place.users:
                del self._places[key]
                if place.receiver is not None:
                    await close_quietly(place.receiver)

    async def close(self) -> None:
        """Close the client, and everything of it."""
        places, self._places = self._places, {}
        for place in places.values():
            if place.receiver is not None:
                await close_quietly(place.receiver)
        client, self.client = self.client, None
        if client is not None:
            with contextlib.suppress(PixiuError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await client.close()


class Logins:
    """The logins that use the API.

    Args:
        target: addresses of proxies, or "".
        most: limit of logins at one time; those that are idle make way.
        ca: authority of the cluster's listeners for clients; empty: they do not use TLS.
    """

    def __init__(self, target: Callable[[], str], most: int, ca: str) -> None:
        self._target, self._most, self._ca = target, most, ca
        self._logins: OrderedDict[Key, Login] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._logins)

    def samples(self) -> list[Sample]:
        """Samples for metrics."""
        receivers = sum(login.receivers for login in self._logins.values())
        return [Sample("api_logins", len(self._logins)), Sample("api_receivers", receivers)]

    def start(self) -> None:
        """Start to close what is idle."""
        self._task = asyncio.get_running_loop().create_task(self._look(), name="api-logins")

    async def close(self) -> None:
        """Close all clients."""
        if self._task is not None:
            self._task.cancel()
        logins, self._logins = list(self._logins.values()), OrderedDict()
        await asyncio.gather(*(login.close() for login in logins), *self._closing, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def use(self, identity: Identity | None, user: int, token: str) -> AsyncIterator[Login]:
        """Use the client of a login. `user`: the UIN. Raises `PixiuError`, `Refused`."""
        login = self._login(identity, user)
        login.token = token
        login.users += 1
        try:
            async with login.opening:
                if login.client is None:
                    await self._open(login)
            yield login
        finally:
            login.users -= 1
            login.used_at = asyncio.get_running_loop().time()
            if login.client is None and not login.users:
                self._logins.pop(login.key, None)

    def _login(self, identity: Identity | None, user: int) -> Login:
        key: Key = (user,)
        if identity is not None:
            key = identity.user, user, identity.by, identity.groups, frozenset(identity.claims.items())
        found = self._logins.get(key)
        if found is None:
            if len(self._logins) >= self._most:
                self._make_way()
            found = self._logins[key] = Login(key, identity, user)
        self._logins.move_to_end(key)
        return found

    def _make_way(self) -> None:
        idle = next((login for login in self._logins.values() if not login.users and not login.receivers), None)
        if idle is None:
            raise busy("too many logins use the HTTP API here at one time (gateway.api_logins)", int(LOOK_S))
        self._end(idle)

    def _end(self, login: Login) -> None:
        del self._logins[login.key]
        task = asyncio.get_running_loop().create_task(login.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _open(self, login: Login) -> None:
        target = self._target()
        if not target:
            raise Refused(503, "UNAVAILABLE", "the cluster cannot do it now: try again later", 1)
        name = login.identity.user if login.identity is not None else f"http-{login.user}"
        client = pixiu.connect(
            target, uin=login.user, client=name[:40], token=lambda: login.token, ca=self._ca, certificate="", options=OPTIONS,
            on_failure=lambda _failure: None,
        )  # fmt: skip
        await client.open()
        login.client = client

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            before = asyncio.get_running_loop().time() - IDLE_S
            for login in list(self._logins.values()):
                await login.close_idle(before)
                if not login.users and not login.receivers and login.used_at < before:
                    self._end(login)


async def close_quietly(receiver: Receiver) -> None:
    """Close a receiver; what goes wrong concerns nobody any more."""
    with contextlib.suppress(PixiuError, TimeoutError):
        async with asyncio.timeout(CLOSE_S):
            await receiver.close()
