"""A gateway gets a login ticket for each user from a proxy, and shows it to all before the client is let in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.rpc.framed import Framed, FramedHandler
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import TICKETS
from cluster.trust.audit import Audit
from cluster.trust.identity import NEVER_S, Credentials, Identity
from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, SHOWN, sign, signer
from cluster.wire.v1 import tickets_pb2
from gateway.tickets import client as ticket_client
from gateway.tickets.client import TicketClient
from gateway.tickets.held import NONE, Tickets, session_end
from pixiu.discovery.node import Node, NodeState
from pixiu.errors import NotAuthenticated, Overloaded, PixiuError, Unavailable
from pixiu.ids import EndpointID, session_uin
from pixiu.rpc.duplex import StreamEnded
from tests.support.logins import Logins
from tests.support.waiting import until

NOW = 1_800_000_000
KEY, RUN = b"k" * 32, 9


def ticket(uin: int, until: int) -> bytes:
    return sign(KEY, uin, RUN, until)


# --- what is held


def test_the_ticket_that_ends_last_is_held_and_those_that_ended_are_forgotten() -> None:
    held = Tickets()
    short, long = ticket(7, NOW + 60), ticket(7, NOW + 600)
    for each in (short, long, short):
        held.put(7, each, NOW)
    assert (held.of(7), held.of(8), len(held)) == (long, NONE, 1)
    held.put(8, ticket(8, NOW + 900), NOW + 61)
    assert (held.of(7), len(held)) == (long, 2)
    held.put(8, ticket(8, NOW + 901), NOW + 600)
    assert (held.of(7), len(held)) == (NONE, 1)
    held.drop([8, 9])
    assert len(held) == 0


def test_a_further_login_uses_what_lasts_for_half_of_what_a_new_one_could() -> None:
    held = Tickets()
    held.put(7, ticket(7, NOW + MAX_TICKET_S // 2), NOW)
    assert held.usable(7, NEVER_S, NOW) == held.of(7)
    assert held.usable(7, NEVER_S, NOW + 2) is None
    assert held.usable(7, NOW + 1000.0, NOW + 2) == held.of(7)
    assert held.usable(8, NEVER_S, NOW) is None


def test_a_session_ends_before_its_ticket() -> None:
    assert session_end(ticket(7, NOW + 600), NEVER_S) == NOW + 600 - GRACE_S
    assert session_end(ticket(7, NOW + 600), NOW + 10.0) == NOW + 10.0


def test_all_are_shown_in_parts() -> None:
    held = Tickets()
    for uin in range(1, 6):
        held.put(uin, ticket(uin, NOW + 60), NOW)
    assert [len(part) // SHOWN.size for part in held.shown(2)] == [2, 2, 1]


# --- the streams


class Proxy:
    """A proxy that does as the test says."""

    def __init__(self, number: int) -> None:
        self.endpoint = EndpointID(20 + number)
        self.shown: dict[int, bytes] = {}
        self.logins: list[tickets_pb2.LoginCredentials] = []
        self.lasts_s = MAX_TICKET_S
        self.says: Callable[[tickets_pb2.TicketReply], None] = lambda _reply: None
        self.void: Sequence[int] = ()
        self.answers = asyncio.Event()
        self.answers.set()
        self.handlers: list[FramedHandler[tickets_pb2.TicketReply, tickets_pb2.TicketRequest]] = []
        self.listener = FramedListener()
        self.listener.serve(TICKETS, tickets_pb2.TicketRequest.FromString, self.serve)
        self.port = 0

    @property
    def node(self) -> Node:
        return Node("proxy", -1, 0, NodeState.RUNNING, "127.0.0.1", 1, 1, self.endpoint, 1, "", "", 0, stream_port=self.port)

    async def serve(self, handler: FramedHandler[tickets_pb2.TicketReply, tickets_pb2.TicketRequest]) -> None:
        self.handlers.append(handler)
        while (request := await handler.read()) is not None:
            await self.answers.wait()
            reply = tickets_pb2.TicketReply(number=request.number, void=self.void)
            for uin, shown in SHOWN.iter_unpack(request.shown):
                self.shown[uin] = shown
            if request.HasField("login"):
                self.logins.append(request.login)
                until = int(time.time()) + self.lasts_s
                reply.uin, reply.ticket = 7, ticket(7, until)
                if request.session_client:
                    reply.session_ticket = ticket(session_uin(7, request.session_client), until)
                self.says(reply)
                if not reply.error_code:
                    self.shown[7] = reply.ticket
            await handler.write(reply)


class Bench:
    def __init__(self, folder: Path, proxies: Sequence[Proxy]) -> None:
        logins = Logins(folder)
        self.guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
        self.proxies, self.held, self.changes = proxies, Tickets(), 0
        self.crashes: list[BaseException] = []
        framed = Framed("gateway", 30, lambda _role: None, 1 << 20)
        self.client = TicketClient(self.held, framed, self.guard, self._changed, self.crashes.append)
        self.ended: list[str] = []

    def _changed(self) -> None:
        self.changes += 1

    def ready(self) -> list[bool]:
        return [self.client.is_ready(proxy.endpoint) for proxy in self.proxies]

    async def connect(self, *, count: int = 2) -> None:
        self.client.set_proxies(proxy.node for proxy in self.proxies[:count])
        await until(lambda: sum(self.ready()) == count)

    async def admit(self, session_client: str = "") -> Identity:
        credentials = Credentials("alice", "the-secret", "device", "10.0.0.9")
        return await self.client.admit(credentials, Identity("alice", 7), session_client)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[Bench]:
    proxies = [Proxy(number) for number in range(2)]
    for proxy in proxies:
        proxy.port = await proxy.listener.bind("127.0.0.1", 0, fallback=True)
        await proxy.listener.start()
    bench = Bench(folder, proxies)
    try:
        yield bench
    finally:
        for proxy in proxies:
            proxy.answers.set()
        await bench.client.close()
        for proxy in proxies:
            await proxy.listener.close()
        await bench.guard.close()
    assert not bench.crashes


async def test_a_login_is_let_in_when_every_proxy_has_its_ticket(tmp_path: Path) -> None:
    async with world(tmp_path) as bench:
        await bench.connect()
        identity = await bench.admit()
        assert [proxy.shown for proxy in bench.proxies] == [{7: bench.held.of(7)}] * 2
        assert 0 < time.time() + MAX_TICKET_S - GRACE_S - identity.expires_at < 60
        (login,) = [login for proxy in bench.proxies for login in proxy.logins]
        assert (login.user, login.secret, login.client_id, login.address) == ("alice", "the-secret", "device", "10.0.0.9")
        await bench.admit()
        assert bench.client.asked == 1, "the user's ticket lasts"


async def test_a_session_has_a_ticket_of_its_own_that_no_proxy_is_shown(tmp_path: Path) -> None:
    async with world(tmp_path) as bench:
        await bench.connect()
        await bench.admit()
        for client in ("meter", "meter", "other"):
            await bench.admit(client)
        assert bench.client.asked == 3, "the ticket of a client's session lasts, and is not another one's"
        for client in ("meter", "other"):
            number = session_uin(7, client)
            held = bench.client.of(number)
            assert signer((KEY,), held, number, RUN, time.time()) == KEY
            assert bench.held.of(number) == NONE
            assert all(number not in proxy.shown for proxy in bench.proxies)
        assert bench.client.of(7) == bench.held.of(7)
        assert bench.client.of(session_uin(8, "meter")) == NONE
        for proxy in bench.proxies:
            proxy.says = lambda reply: reply.ClearField("session_ticket")
        with pytest.raises(Unavailable):
            await bench.admit("third")


async def test_a_new_proxy_is_shown_everything_before_messages_go_through_it(tmp_path: Path) -> None:
    async with world(tmp_path) as bench:
        await bench.connect(count=1)
        await bench.admit()
        bench.proxies[1].answers.clear()
        bench.client.set_proxies(proxy.node for proxy in bench.proxies)
        await until(lambda: bench.proxies[1].handlers)
        assert bench.ready() == [True, False]
        bench.proxies[1].answers.set()
        await until(lambda: all(bench.ready()))
        assert bench.proxies[1].shown == {7: bench.held.of(7)}


async def test_a_proxy_that_does_not_confirm_is_left_until_it_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ticket_client, "SHOW_S", 0.1)
    monkeypatch.setattr(ticket_client, "ASK_S", 0.1)
    async with world(tmp_path) as bench:
        await bench.connect()
        deaf = bench.proxies[1]
        deaf.answers.clear()
        while True:
            try:
                await bench.admit()
                break
            except Overloaded:  # the deaf one was asked
                pass
        await until(lambda: bench.ready() == [True, False])
        deaf.answers.set()
        await until(lambda: all(bench.ready()))
        assert deaf.shown[7] == bench.held.of(7)


async def test_a_login_waits_for_a_proxy_that_is_not_ready_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_client, "READY_S", 60.0)
    async with world(tmp_path) as bench:
        first = asyncio.create_task(bench.admit())
        await until(lambda: bench.client.asked)
        await bench.connect(count=1)
        assert (await first).uin == 7


async def test_without_a_proxy_nobody_is_let_in_and_may_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.rpc.framed_listener.STOP_S", 0.05)
    monkeypatch.setattr(ticket_client, "READY_S", 0.05)
    async with world(tmp_path) as bench:
        with pytest.raises(Unavailable, match="no proxy can check logins now"):
            await bench.admit()
        await bench.connect(count=1)
        await bench.proxies[0].listener.close()
        await until(lambda: not any(bench.ready()))
        with pytest.raises(Unavailable):
            await bench.admit()


def refusing(code: str) -> Callable[[tickets_pb2.TicketReply], None]:
    def say(reply: tickets_pb2.TicketReply) -> None:
        reply.error_code, reply.error_text, reply.retry_after_ms = code, "because", 500

    return say


def other_user(reply: tickets_pb2.TicketReply) -> None:
    reply.uin = 8


def cut(reply: tickets_pb2.TicketReply) -> None:
    reply.ticket = reply.ticket[:-1]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (refusing("UNAUTHENTICATED"), NotAuthenticated),
        (refusing("OVERLOADED"), Overloaded),
        (refusing("UNAVAILABLE"), Unavailable),
        (other_user, NotAuthenticated),
        (cut, NotAuthenticated),
    ],
)
async def test_what_a_proxy_refuses_is_refused(
    tmp_path: Path, says: Callable[[tickets_pb2.TicketReply], None], error: type[PixiuError]
) -> None:
    async with world(tmp_path) as bench:
        await bench.connect()
        for proxy in bench.proxies:
            proxy.says = says
        with pytest.raises(error):
            await bench.admit()
        assert len(bench.held) == 0


async def test_a_void_ticket_ends_the_users_sessions_and_no_others(tmp_path: Path) -> None:
    async with world(tmp_path) as bench:
        await bench.connect()
        identity = await bench.admit()
        for uin in (7, 8):
            bench.guard.open(replace(identity, uin=uin), "", "", lambda text, uin=uin: bench.ended.append(f"{uin} {text}"))  # type: ignore[misc]
        await bench.proxies[0].handlers[0].write(tickets_pb2.TicketReply(void=[7]))
        await until(lambda: bench.ended)
        assert [text[:11] for text in bench.ended] == ["7 the login"]
        assert bench.held.of(7) == NONE


async def test_logins_that_wait_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_client, "MAX_WAITING", 1)
    async with world(tmp_path) as bench:
        await bench.connect()
        for proxy in bench.proxies:
            proxy.answers.clear()
        first = asyncio.create_task(bench.admit())
        await asyncio.sleep(0.05)
        with pytest.raises(Overloaded, match="too many logins wait"):
            await bench.admit()
        for proxy in bench.proxies:
            proxy.answers.set()
        await first


async def test_a_lost_stream_fails_what_waits(tmp_path: Path) -> None:
    async with world(tmp_path) as bench:
        await bench.connect(count=1)
        bench.proxies[0].answers.clear()
        waiting = asyncio.create_task(bench.admit())
        await asyncio.sleep(0.05)
        await bench.client.close()
        with pytest.raises((Unavailable, StreamEnded)):
            await waiting
