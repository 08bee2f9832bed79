"""The connection of one NSQ client: performs what its session wants.

    socket ─▶ TLS, deflate ─▶ Session ─▶ Publisher ─▶ topics
                                   └───▶ Consumer  ─▶ a channel

Source: docs/nsq.md.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Final, Protocol

from cluster.listeners.clients import close_once, host_of
from cluster.nsq.frames import Sent
from cluster.trust.listener_tls import ListenerTls
from nsqdoor.consumer import Consumer
from nsqdoor.logins import Login, Logins
from nsqdoor.options import Options
from nsqdoor.protocol.commands import Refused
from nsqdoor.protocol.events import (
    Authenticate,
    Close,
    Credit,
    Effect,
    Finish,
    Limits,
    Publish,
    Requeue,
    StartDeflate,
    StartTls,
    Subscribe,
    Touch,
    Write,
)
from nsqdoor.protocol.session import Session
from nsqdoor.publisher import Outcomes, Publisher
from nsqdoor.topics import refused
from pixiu.errors import NotAuthenticated, PixiuError
from pixiu.rpc.deadline_timer import DeadlineTimer

HANDSHAKE_S: Final = 5.0
INFLATED: Final = 1 << 18
"""Bytes that are made at once of compressed ones. Policy: the rest is made when these are used."""
RAW: Final = -15
"""Deflate without zlib's head, as Go's package writes it."""


class Owner(Protocol):
    """The listener."""

    options: Options
    limits: Limits
    logins: Logins
    tls: ListenerTls | None

    def opened(self, connection: NsqConnection) -> bool:
        """Note a new connection. False: there are too many."""

    def closed(self, connection: NsqConnection) -> None:
        """Note that it is over."""


class NsqConnection(asyncio.Protocol):
    """One client; see the module."""

    def __init__(self, owner: Owner) -> None:
        self._owner, self._loop = owner, asyncio.get_running_loop()
        self.session = Session(owner.limits, self._loop.time())
        self.address = ""
        self._transport: asyncio.Transport | None = None
        self._timer = DeadlineTimer(self._tick, least_s=0.001)
        self._inflate: zlib._Decompress | None = None
        self._deflate: zlib._Compress | None = None
        self._compressed = b""
        self._login: Login | None = None
        self._publisher: Publisher | None = None
        self.consumer: Consumer | None = None
        self._queued: list[Effect] = []
        """Effects that wait for the client of the cluster."""
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._slow = self._paused = False

    # --- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection. Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.address = transport, host_of(transport)
        if not self._owner.opened(self):
            self._over = True
            transport.abort()
            return
        self._timer.set(self.session.next_deadline())

    def data_received(self, data: bytes) -> None:
        """Handle bytes. Called by asyncio."""
        if self._inflate is None:
            self._perform(self.session.receive(data, self._loop.time()))
        else:
            self._compressed += data
            self._decompress()

    def _decompress(self) -> None:
        """Use compressed bytes as long as the session takes some: a few may become very many."""
        while self._inflate is not None and self._compressed and not self._over and not self.session.held:
            try:
                data = self._inflate.decompress(self._compressed, INFLATED)
            except zlib.error:
                self._end()
                return
            self._compressed = self._inflate.unconsumed_tail
            self._perform(self.session.receive(data, self._loop.time()))

    def eof_received(self) -> bool:
        """Handle the end of what comes: there is nobody to answer."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end. Called by asyncio."""
        self._end()

    def pause_writing(self) -> None:
        """Stop giving: the client does not take what there is. Called by asyncio."""
        self._slow = True
        self._regulate()

    def resume_writing(self) -> None:
        """Go on giving. Called by asyncio."""
        self._slow = False
        self._regulate()

    # --- effects

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                self._write(effect.data)
            elif isinstance(effect, Publish | Subscribe):
                self._with_login(effect)
            elif isinstance(effect, Finish):
                if self.consumer is not None:
                    self.consumer.finish(effect.ids)
            elif isinstance(effect, Requeue):
                if self.consumer is not None:
                    self.consumer.requeue(effect.id, effect.delay_ms)
            elif isinstance(effect, Touch):
                if self.consumer is not None:
                    self.consumer.touch(effect.id)
            elif isinstance(effect, Credit):
                if self.consumer is not None:
                    self.consumer.set_credit(effect.count)
            elif isinstance(effect, StartTls):
                self._start(self._secure())
            elif isinstance(effect, StartDeflate):
                self._deflate = zlib.compressobj(effect.level, zlib.DEFLATED, RAW)
                self._inflate = zlib.decompressobj(RAW)
            elif isinstance(effect, Authenticate):
                self._start(self._authenticate(effect.secret))
            elif isinstance(effect, Close):
                self._end()
        if not self._over:
            self._regulate()
            self._timer.set(self.session.next_deadline())

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._over:
            return
        if self._deflate is not None:
            data = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        self._transport.write(data)

    def _regulate(self) -> None:
        """Read and give as far as the other side takes."""
        if self._over or self._transport is None:
            return
        pause = self._slow or (self.session.held and not self.session.begins_tls)
        if pause is not self._paused:
            self._paused = pause
            (self._transport.pause_reading if pause else self._transport.resume_reading)()
            if not pause and self._compressed:
                self._loop.call_soon(self._decompress)
        if self.consumer is not None:
            (self.consumer.may_deliver.clear if self._slow else self.consumer.may_deliver.set)()

    def _start(self, work: object) -> None:
        self._task = self._loop.create_task(work, name="nsq-connection")  # type: ignore[arg-type]
        self._task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a connection of an NSQ client failed", "exception": error})
            self._end()
        self._regulate()

    async def _secure(self) -> None:
        assert self._transport is not None
        assert self._owner.tls is not None
        context = self._owner.tls.context()
        try:
            transport = await self._loop.start_tls(
                self._transport, self, context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError):
            self._end()
            return
        if transport is None or self._over:
            self._end()
            return
        self._transport = transport
        self._perform(self.session.secured(self._loop.time()))

    # --- the cluster

    async def _authenticate(self, secret: str) -> None:
        try:
            self._login = await self._owner.logins.use(secret)
        except NotAuthenticated:
            found = None
        except PixiuError:
            found = None  # nobody learns by it whether the cluster is there
        else:
            found = ""
        if self._over:
            self._leave()
            return
        self._perform(self.session.authenticated(found, self._loop.time()))

    def _with_login(self, effect: Publish | Subscribe) -> None:
        if self._login is not None and not self._queued:
            self._use(effect)
            return
        self._queued.append(effect)
        if len(self._queued) == 1:
            self._opening = self._loop.create_task(self._open(), name="nsq-login")

    async def _open(self) -> None:
        """Connect with the listener's own login."""
        try:
            if self._login is None:
                self._login = await self._owner.logins.use(None)
        except PixiuError as error:
            queued, self._queued = self._queued, []
            for each in queued:
                self._fail(each, error)
            return
        if self._over:
            self._leave()
            return
        queued, self._queued = self._queued, []
        for each in queued:
            self._use(each)

    def _fail(self, effect: Effect, error: PixiuError) -> None:
        now = self._loop.time()
        if isinstance(effect, Publish):
            self._perform(self.session.published([(effect, refused(error, effect.command, effect.topic))], now))
        elif isinstance(effect, Subscribe):
            self._perform(self.session.subscribed(refused(error, "SUB", effect.topic, effect.channel), now))

    def _use(self, effect: Effect) -> None:
        assert self._login is not None
        topics, options = self._login.topics, self._owner.options
        if isinstance(effect, Publish):
            if self._publisher is None:
                self._publisher = Publisher(topics, options, self._published)
            self._publisher.offer(effect)
        elif isinstance(effect, Subscribe):
            seconds = self.session.terms.msg_timeout_ms / 1000
            self.consumer = Consumer(topics, effect, options, seconds, self._joined, self._deliver)
            self.consumer.set_credit(self.session.ready)

    def _published(self, outcomes: Outcomes) -> None:
        self._perform(self.session.published(outcomes, self._loop.time()))

    def _joined(self, why: Refused | None) -> None:
        self._perform(self.session.subscribed(why, self._loop.time()))

    def _deliver(self, messages: Sequence[Sent]) -> None:
        self._perform(self.session.deliver(messages, self._loop.time()))

    def _tick(self) -> None:
        self._perform(self.session.tick(self._loop.time()))

    # --- the end

    @property
    def idle(self) -> bool:
        """True if everything that was published is answered."""
        return not self._queued and (self._publisher is None or self._publisher.idle)

    def close(self) -> None:
        """End the connection."""
        self._end()

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._timer.cancel()
        if self._transport is not None:
            close_once(self._transport)
        if self._publisher is not None:
            self._publisher.close()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._owner.closed(self)
        if self.consumer is None:
            self._leave()

    async def leave(self) -> None:
        """Leave the channel, after the end."""
        if self.consumer is not None:
            await self.consumer.close()
            self._leave()

    def _leave(self) -> None:
        login, self._login = self._login, None
        if login is not None:
            self._owner.logins.leave(login)
