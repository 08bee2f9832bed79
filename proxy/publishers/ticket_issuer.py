"""Login tickets for gateways: a proxy checks logins with its own guard, signs, and takes the tickets that gateways show.

    gateway ── LoginCredentials ──▶ guard ── Identity ──▶ signed: (UIN, the gateway's run, until) ──▶ gateway
            ── shown tickets ─────▶ `proxy.publishers.sender_tickets`

A gateway has one framed stream to each proxy. Failed logins are charged to the address at that gateway alone: a gateway that was
broken into could otherwise shut out any address everywhere.

Source: docs/security.md, "Login tickets".
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from cluster.access.authorities import Authorities
from cluster.access.login_guard import LoginGuard
from cluster.core.turn import Turn
from cluster.rpc.framed import FramedHandler
from cluster.trust.identity import Credentials, Identity, machine_of
from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, SHOWN, shown_of, sign
from cluster.wire.v1 import tickets_pb2
from pixiu.errors import InvalidArgument, NotAllowed, PixiuError, Refusal, Unavailable
from pixiu.ids import EndpointID, hex_id, session_uin
from pixiu.rpc.duplex import Duplex
from proxy.publishers.sender_tickets import SenderTickets

MAX_LOGINS: Final = 256
"""Logins of one gateway that are being checked. Policy: nothing more is read from it."""
MAX_UNREAD: Final = 1_000
"""Answers that wait for a gateway. Policy: nothing more is read from it."""
MAX_SHOWN: Final = 4_096
"""Tickets in one request. Policy: more end the stream."""
SLICE: Final = 256
"""Shown tickets checked at a time, about 2 µs each."""
MAX_CERTIFICATE_BYTES: Final = 16 << 10
MAX_ADDRESS: Final = 64
SPREAD: Final = 0.125
"""Share of a ticket's time by which it is shortened at random, so that sessions which began together do not end together."""
LOOK_S: Final = 1.0
"""Interval at which ended tickets and removed keys are looked for, seconds."""
NOT_REGISTERED: Final = "this proxy's registry has no gateway with this endpoint yet; try again soon"

TicketHandler = FramedHandler[tickets_pb2.TicketReply, tickets_pb2.TicketRequest]


class _Stream:
    """One gateway's stream."""

    def __init__(self, gateway: EndpointID, run: int) -> None:
        self.gateway, self.run = gateway, run
        self.replies: deque[tickets_pb2.TicketReply] = deque()
        self.logins: set[asyncio.Task[None]] = set()
        self.work = asyncio.Event()
        self.cut: Callable[[str], None] = lambda _text: None

    def say(self, reply: tickets_pb2.TicketReply) -> None:
        """Queue a reply."""
        self.replies.append(reply)
        self.work.set()

    def give(self) -> tickets_pb2.TicketReply | None:
        """Next reply to write."""
        return self.replies.popleft() if self.replies else None

    def checked(self, task: asyncio.Task[None]) -> None:
        """Note that a login's check is over; after a bug the stream ends, and the gateway asks elsewhere."""
        self.logins.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "a login could not be checked", "exception": error})
            self.cut("a login could not be checked")

    def reads_on(self) -> bool:
        """True while there is space for more answers."""
        return len(self.replies) < MAX_UNREAD


class TicketIssuer:
    """Serves gateways' ticket streams.

    Args:
        guard: checks logins.
        senders: takes shown tickets.
        keys: returns the current keys of tickets, the one that signs first.
        run_of: returns the run of a gateway in the registry; None if it is not there.
        authorities: check clients' certificates, which TLS has verified at the gateway only.
        turn: of clients' input.
        unix_s: Unix seconds.
    """

    def __init__(
        self,
        guard: LoginGuard,
        senders: SenderTickets,
        keys: Callable[[], tuple[bytes, ...]],
        run_of: Callable[[EndpointID], int | None],
        authorities: Authorities,
        turn: Turn,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._guard, self._senders, self._keys, self._run_of = guard, senders, keys, run_of
        self._authorities, self._turn, self._unix_s = authorities, turn, unix_s
        self._streams: dict[EndpointID, _Stream] = {}
        self.signed = self.refused = 0
        """Tickets signed, and logins for which none was."""

    async def exchange(self, handler: TicketHandler) -> None:
        """Serve one gateway's stream."""
        gateway = EndpointID(handler.endpoint)
        run = self._run_of(gateway)
        if run is None:
            raise Unavailable(NOT_REGISTERED)
        former = self._streams.get(gateway)
        if former is not None:
            former.cut("the gateway has opened another stream")
        stream = self._streams[gateway] = _Stream(gateway, run)

        def over() -> None:
            for task in stream.logins:
                task.cancel()
            if self._streams.get(gateway) is stream:
                del self._streams[gateway]

        duplex = Duplex(
            handler, lambda request: self._take(stream, request), stream.give, reads_on=stream.reads_on, work=stream.work, over=over
        )
        stream.cut = duplex.end
        await duplex.run()

    def look(self) -> None:
        """Look for tickets that have ended, and those whose key was removed; report the latter to their gateways. Called every
        `LOOK_S`."""
        for gateway in self._senders.forget_gone(self._run_of):
            if gateway in self._streams:
                self._streams[gateway].cut("the registry does not show the gateway")  # back again it shows everything anew
        for gateway, void in self._senders.look().items():
            stream = self._streams.get(gateway)
            if stream is not None:
                for start in range(0, len(void), MAX_SHOWN):
                    stream.say(tickets_pb2.TicketReply(void=void[start : start + MAX_SHOWN]))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "tickets_signed_total": self.signed,
            "tickets_refused_total": self.refused,
            "tickets_shown": len(self._senders),
            "tickets_void_total": self._senders.void,
            "records_without_ticket_total": self._senders.refused,
        }

    async def _take(self, stream: _Stream, request: tickets_pb2.TicketRequest) -> None:
        if len(request.shown) > MAX_SHOWN * SHOWN.size:
            raise InvalidArgument(f"a request shows at most {MAX_SHOWN} tickets; send several")
        shown = shown_of(request.shown)
        if shown is None:
            raise InvalidArgument(f"shown tickets have {SHOWN.size} bytes each")
        if request.HasField("login"):
            while len(stream.logins) >= MAX_LOGINS:
                await asyncio.wait(stream.logins, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.get_running_loop().create_task(self._log_in(stream, request))
            stream.logins.add(task)
            task.add_done_callback(stream.checked)
            return
        void: list[int] = []
        while part := list(islice(shown, SLICE)):
            void += await self._turn.run(partial(self._senders.show, stream.gateway, stream.run, part), len(part) * SHOWN.size)
        if request.number or void:
            stream.say(tickets_pb2.TicketReply(number=request.number, void=void))

    async def _log_in(self, stream: _Stream, request: tickets_pb2.TicketRequest) -> None:
        reply = tickets_pb2.TicketReply(number=request.number)
        try:
            identity = await self._check(stream, request.login)
            ticket, session_ticket = self._sign(stream, identity, request.session_client)
        except PixiuError as error:
            self.refused += 1
            reply.error_code, reply.error_text, reply.retry_after_ms = Refusal.of(error)
        else:
            self.signed += 1
            reply.uin, reply.ticket, reply.session_ticket = identity.uin, ticket, session_ticket
            self._senders.show(stream.gateway, stream.run, [(identity.uin, ticket)])
        stream.say(reply)

    async def _check(self, stream: _Stream, login: tickets_pb2.LoginCredentials) -> Identity:
        """Check what a client brought. Raises what the guard raises."""
        if len(login.certificate) > MAX_CERTIFICATE_BYTES or len(login.address) > MAX_ADDRESS:
            raise InvalidArgument(f"a certificate has at most {MAX_CERTIFICATE_BYTES} bytes, an address {MAX_ADDRESS} characters")
        certificate = login.certificate if self._guard.settings.certificate is not None else b""
        if certificate:
            self._authorities.check(certificate)
        payer = f"{machine_of(login.address)} at gateway {hex_id(stream.gateway)}"
        return await self._guard.check(Credentials(login.user, login.secret, login.client_id, login.address, certificate, payer))

    def _sign(self, stream: _Stream, identity: Identity, session_client: str) -> tuple[bytes, bytes]:
        """Sign a ticket, and one of a client's session; empty without its ID."""
        keys, now = self._keys(), self._unix_s()
        if not keys:
            raise Unavailable("this proxy cannot read the keys of login tickets: /health has the reason")
        if not identity.uin:
            raise NotAllowed("this login has no UIN: services publish at proxies, only users connect to gateways")
        until = min(now + MAX_TICKET_S * random.uniform(1.0 - SPREAD, 1.0), identity.expires_at + GRACE_S)
        users = (identity.uin, session_uin(identity.uin, session_client)) if session_client else (identity.uin,)
        ticket, *more = [sign(keys[0], uin, stream.run, int(until)) for uin in users]
        return ticket, more[0] if more else b""
