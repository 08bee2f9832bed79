"""A gateway's streams to proxies for login tickets: passes logins on to one, and shows the tickets to all.

    login ─▶ own guard ─▶ a proxy checks and signs ─▶ shown to every other proxy ─▶ the client is let in
    new proxy ─▶ all tickets are shown ─▶ ready: messages may go through it

A client is let in once every proxy that messages may go through has its ticket: these refuse messages of other senders. A proxy
that does not confirm in time is left alone until it has been shown everything anew.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from cluster.access.login_guard import LoginGuard
from cluster.rpc.framed import OPEN_S, Framed
from cluster.rpc.methods import TICKETS
from cluster.trust.identity import Credentials, Identity
from cluster.trust.tickets import SHOWN, TICKET_BYTES
from cluster.wire.v1 import tickets_pb2
from gateway.tickets.held import NONE, Tickets, session_end
from pixiu.discovery.node import Node
from pixiu.errors import NotAuthenticated, Overloaded, Unavailable, error_of_code
from pixiu.ids import EndpointID, session_uin
from pixiu.rpc.backoff import Backoff
from pixiu.rpc.duplex import Duplex, StreamEnded

READY_S: Final = 2.0
"""Longest wait of a login for a proxy, seconds. Policy: a proxy that starts, or starts again, is ready by then."""
ASK_S: Final = 8.0
"""Time limit of a login's check, seconds: passwords are hashed, and callbacks are asked."""
SHOW_S: Final = 2.0
"""Time limit of a proxy's confirmation that it has a ticket, seconds. Policy: its stream is ended and opened again."""
SHOW_ALL_S: Final = 30.0
"""The same for all tickets, after a stream was opened."""
FIRST_BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
TICKETS_A_MESSAGE: Final = 2_000
MAX_WAITING: Final = 2_000
"""Logins that wait for tickets. Policy: further ones are refused, and may be tried again."""
RETRY_MS: Final = 1_000
NO_PROXY: Final = "no proxy can check logins now, and without one nobody can log in here; try again soon"
OTHER_USER: Final = "the proxies take this login for another user than this gateway: their access files differ"

Reply = tickets_pb2.TicketReply


class _Stream:
    """The stream to one proxy."""

    def __init__(self, node: Node, client: TicketClient) -> None:
        self.node, self._client = node, client
        self.ready = False
        """True if the proxy has all tickets."""
        self._out: deque[tickets_pb2.TicketRequest] = deque()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._duplex: Duplex[tickets_pb2.TicketRequest, Reply] | None = None
        self.task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-tickets-{node.endpoint:016x}")
        self.task.add_done_callback(client.ended)

    @property
    def is_open(self) -> bool:
        return self._duplex is not None

    async def ask(self, request: tickets_pb2.TicketRequest, timeout_s: float) -> Reply:
        """Send a request. Returns the answer; raises `StreamEnded`, or `TimeoutError`."""
        if self._duplex is None:
            raise StreamEnded("the proxy is not connected")
        request.number = next(self._client.numbers)
        future = self._waiting[request.number] = asyncio.get_running_loop().create_future()
        self._out.append(request)
        self._duplex.wake()
        try:
            async with asyncio.timeout(timeout_s):
                reply: Reply = await future
                return reply
        finally:
            self._waiting.pop(request.number, None)

    def end(self, text: str) -> None:
        """End the stream; it is opened again."""
        if self._duplex is not None:
            self._duplex.end(text)

    async def _run(self) -> None:
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            try:
                async with self._client.framed.call(self.node, TICKETS, Reply.FromString) as call:
                    await call.opened(2 * OPEN_S)
                    duplex = self._duplex = Duplex(call, self._take, self._give, over=self._over)
                    showing = asyncio.get_running_loop().create_task(self._show_all(backoff))
                    try:
                        await duplex.run()
                    finally:
                        showing.cancel()
                        await asyncio.gather(showing, return_exceptions=True)
            except StreamEnded:
                pass
            finally:
                self._over()
            await asyncio.sleep(backoff.next_s())

    async def _show_all(self, backoff: Backoff) -> None:
        """Show everything; tickets of later logins follow on the same stream, in order."""
        parts = self._client.tickets.shown(TICKETS_A_MESSAGE) or [b""]
        try:
            # All at once: a ticket that comes meanwhile must not be sent before an older one of its user.
            async with asyncio.timeout(SHOW_ALL_S):
                await asyncio.gather(*(self.ask(tickets_pb2.TicketRequest(shown=part), SHOW_ALL_S) for part in parts))
        except (StreamEnded, TimeoutError):
            self.end("the proxy does not take the tickets")
            return
        backoff.reset()
        self.ready = True
        self._client.one_ready.set()
        self._client.changed()

    def _take(self, reply: Reply) -> None:
        if reply.void:
            self._client.void(reply.void)
        future = self._waiting.pop(reply.number, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def _give(self) -> tickets_pb2.TicketRequest | None:
        return self._out.popleft() if self._out else None

    def _over(self) -> None:
        self._duplex = None
        self._out.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(StreamEnded("the stream to the proxy ended"))
                future.exception()  # nobody may be waiting any more
        if self.ready:
            self.ready = False
            self._client.changed()


class TicketClient:
    """Gets and shows the tickets of a gateway's users.

    Args:
        tickets: what the gateway holds.
        framed: opens framed streams.
        guard: of this gateway; ends the sessions of users whose tickets are void.
        changed: called when another set of proxies is ready.
        crash: called with an error that is a bug here.
        unix_s: Unix seconds.
    """

    def __init__(
        self,
        tickets: Tickets,
        framed: Framed,
        guard: LoginGuard,
        changed: Callable[[], None],
        crash: Callable[[BaseException], None],
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.tickets, self.framed, self.changed = tickets, framed, changed
        self.sessions = Tickets()
        """Of sessions of MQTT that outlive their connections: relays want them, proxies are not shown them."""
        self._guard, self._crash, self._unix_s = guard, crash, unix_s
        self.numbers = itertools.count(1)
        self._streams: dict[EndpointID, _Stream] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._asking = 0
        self.one_ready = asyncio.Event()
        """Set whenever a stream becomes ready."""
        self.asked = self.voided = 0
        """Tickets asked for, and tickets that were reported as void."""

    def set_proxies(self, nodes: Iterable[Node]) -> None:
        """Keep a stream to each of these proxies."""
        wanted = {node.endpoint: node for node in nodes if node.stream_port}
        for endpoint in [endpoint for endpoint in self._streams if endpoint not in wanted]:
            self._end(self._streams.pop(endpoint))
        for endpoint, node in wanted.items():
            if endpoint not in self._streams:
                self._streams[endpoint] = _Stream(node, self)

    def is_ready(self, proxy: EndpointID) -> bool:
        """True if a proxy has all tickets, so that messages may go through it."""
        stream = self._streams.get(proxy)
        return stream is not None and stream.ready

    def of(self, uin: int) -> bytes:
        """The ticket that goes with reports of a user, or a session, to relays."""
        ticket = self.tickets.of(uin)
        return ticket if ticket is not NONE else self.sessions.of(uin)

    async def admit(self, credentials: Credentials, identity: Identity, session_client: str = "") -> Identity:
        """Get a ticket for a login that this gateway has checked. Returns its identity, which ends before the ticket does.

        session_client: client ID of a session that outlives the connection, which gets one of its own; empty: there is none.

        Raises `Unavailable` or `Overloaded`, which may be tried again, and what a proxy refuses the login with.
        """
        if not identity.uin:
            return identity  # a service, which is refused in any case
        now, session = self._unix_s(), session_uin(identity.uin, session_client) if session_client else 0
        ticket = self.tickets.usable(identity.uin, identity.expires_at, now)
        of_session = self.sessions.usable(session, identity.expires_at, now) if session else ticket
        if ticket is None or of_session is None:
            if self._asking >= MAX_WAITING:
                raise Overloaded("too many logins wait for the proxies", RETRY_MS)
            self._asking += 1
            try:
                reply = await self._get(credentials, identity, session_client)
            finally:
                self._asking -= 1
            ticket = of_session = reply.ticket
            if session:
                self.sessions.put(session, reply.session_ticket, now)
        ends = min(session_end(ticket, identity.expires_at), session_end(of_session, identity.expires_at))
        return replace(identity, expires_at=ends)

    async def _get(self, credentials: Credentials, identity: Identity, session_client: str) -> Reply:
        reply, signer = await self._ask(credentials, session_client)
        if reply.error_code:
            error = error_of_code(reply.error_code, reply.error_text, reply.retry_after_ms)
            if isinstance(error, NotAuthenticated):
                with self._guard.refusing(credentials.address, credentials.client_id):
                    raise error
            raise error
        if reply.uin != identity.uin or len(reply.ticket) != TICKET_BYTES:
            raise NotAuthenticated(OTHER_USER)
        if session_client and len(reply.session_ticket) != TICKET_BYTES:
            raise Unavailable("the proxy makes no tickets for sessions")
        self.tickets.put(reply.uin, reply.ticket, self._unix_s())
        await self._show(SHOWN.pack(reply.uin, reply.ticket), [each for each in self._streams.values() if each is not signer])
        return reply

    async def _ask(self, credentials: Credentials, session_client: str) -> tuple[Reply, _Stream]:
        """Ask one proxy, once there is one; another one if the stream to it ends."""
        self.asked += 1
        login = tickets_pb2.LoginCredentials(
            user=credentials.user, secret=credentials.secret, client_id=credentials.client_id, address=credentials.address,
            certificate=credentials.certificate,
        )  # fmt: skip
        streams = await self._ready()
        random.shuffle(streams)
        for stream in streams[:2]:
            try:
                return await stream.ask(tickets_pb2.TicketRequest(login=login, session_client=session_client), ASK_S), stream
            except StreamEnded:
                continue
            except TimeoutError:
                raise Overloaded("the proxies did not check the login in time", RETRY_MS) from None
        raise Unavailable(NO_PROXY)

    async def _ready(self) -> list[_Stream]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while not (streams := [stream for stream in self._streams.values() if stream.ready]):
                    self.one_ready.clear()
                    await self.one_ready.wait()
                return streams
        return []

    async def _show(self, shown: bytes, streams: Sequence[_Stream]) -> None:
        """Show a ticket to proxies, and wait for them; one that does not confirm is left until it was shown everything."""

        async def show(stream: _Stream) -> None:
            try:
                await stream.ask(tickets_pb2.TicketRequest(shown=shown), SHOW_S)
            except StreamEnded:
                pass  # it will be shown everything
            except TimeoutError:
                stream.end("the proxy does not confirm tickets in time")

        if streams:
            await asyncio.gather(*(show(stream) for stream in streams if stream.is_open))

    def void(self, uins: Sequence[int]) -> None:
        """End the sessions of users whose tickets a proxy does not accept (any more): their clients log in again."""
        self.voided += len(uins)
        self.tickets.drop(uins)
        self._guard.end_users(frozenset(uins), "the login's ticket is not valid any more; connect again")

    async def close(self) -> None:
        """End all streams."""
        self.set_proxies(())
        await asyncio.gather(*self._ending, return_exceptions=True)

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "tickets": len(self.tickets),
            "session_tickets": len(self.sessions),
            "tickets_asked_total": self.asked,
            "tickets_void_total": self.voided,
            "ticket_proxies": sum(stream.ready for stream in self._streams.values()),
        }

    def ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a stream's task."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _end(self, stream: _Stream) -> None:
        stream.ready = False
        stream.task.cancel()
        self._ending.add(stream.task)
        stream.task.add_done_callback(self._ending.discard)
