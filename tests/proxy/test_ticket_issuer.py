"""A proxy checks logins for gateways with its own guard, and signs tickets that no gateway can make."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from cluster.access.authorities import Authorities
from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.core.turn import Turn
from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.framed_listener import FramedListener
from cluster.rpc.methods import TICKETS
from cluster.trust.audit import Audit
from cluster.trust.pki import issue, make_authority
from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, SHOWN, sign, signer, until_of
from cluster.wire.v1 import tickets_pb2
from pixiu.discovery.node import Node, NodeState
from pixiu.errors import NotAuthenticated
from pixiu.ids import EndpointID, session_uin
from pixiu.rpc.duplex import StreamEnded
from proxy.publishers import sender_tickets, ticket_issuer
from proxy.publishers.sender_tickets import SenderTickets
from proxy.publishers.ticket_issuer import SPREAD, TicketIssuer
from tests.support.logins import RULES, Logins
from tests.support.waiting import until

KEY, OTHER = b"k" * 32, b"o" * 32
GATEWAY, RUN = EndpointID(30), 9
Call = FramedCall[tickets_pb2.TicketRequest, tickets_pb2.TicketReply]


class Bench:
    """A proxy's issuer on a framed listener."""

    def __init__(self, folder: Path, client_ca: str = "") -> None:
        self.logins = Logins(folder)
        self.audited: list[str] = []
        audit = Audit(None, tell=lambda kind, fields: self.audited.append(f"{kind} {fields}"))
        self.guard = LoginGuard(str(self.logins.file), log.get_logger(), audit)
        self.keys: tuple[bytes, ...] = (KEY,)
        self.senders = SenderTickets(lambda: self.keys, time.time)
        loop = asyncio.get_running_loop()
        self.issuer = TicketIssuer(
            self.guard, self.senders, lambda: self.keys, {GATEWAY: RUN}.get, Authorities(client_ca), Turn(loop.time, loop.call_soon)
        )
        self.port = 0

    @asynccontextmanager
    async def stream(self, gateway: int = GATEWAY) -> AsyncIterator[Call]:
        node = Node("proxy", -1, 0, NodeState.RUNNING, "127.0.0.1", 1, 1, EndpointID(20), 1, "", "", 0, stream_port=self.port)
        async with Framed("gateway", gateway, lambda _role: None, 1 << 20).call(
            node, TICKETS, tickets_pb2.TicketReply.FromString
        ) as call:
            yield call

    def login(self, **brought: Any) -> tickets_pb2.TicketRequest:
        return tickets_pb2.TicketRequest(number=1, login=tickets_pb2.LoginCredentials(address="10.0.0.9", **brought))


@asynccontextmanager
async def running(folder: Path, client_ca: str = "") -> AsyncIterator[Bench]:
    bench = Bench(folder, client_ca)
    listener = FramedListener()
    listener.serve(TICKETS, tickets_pb2.TicketRequest.FromString, bench.issuer.exchange)
    bench.port = await listener.bind("127.0.0.1", 0, fallback=True)
    await listener.start()
    try:
        yield bench
    finally:
        await listener.close()
        await bench.guard.close()


async def ask(call: Call, request: tickets_pb2.TicketRequest) -> tickets_pb2.TicketReply:
    await call.write(request)
    reply = await call.read()
    assert reply is not None
    return reply


async def test_a_token_gets_a_ticket_for_its_user_at_this_gateway_until_it_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        reply = await ask(call, bench.login(secret=bench.logins.token("alice", 7, "players", lasts_s=300)))
        now = time.time()
        assert (reply.number, reply.uin, reply.error_code) == (1, 7, "")
        assert signer((KEY,), reply.ticket, 7, RUN, now) == KEY
        assert signer((KEY,), reply.ticket, 7, RUN + 1, now) is None
        assert 290 < until_of(reply.ticket) - now - GRACE_S <= 310
        assert not reply.session_ticket
        request = bench.login(user="carol", secret="carols-password")
        request.session_client = "meter"
        session = await ask(call, request)
        assert signer((KEY,), session.session_ticket, session_uin(9, "meter"), RUN, now) == KEY
        assert until_of(session.session_ticket) == until_of(session.ticket)
        reply = await ask(call, bench.login(user="carol", secret="carols-password"))
        assert reply.uin == 9
        assert (1 - SPREAD) * MAX_TICKET_S - 5 < until_of(reply.ticket) - now <= MAX_TICKET_S
        assert (len(bench.senders), bench.issuer.signed) == (2, 3), "they count as shown"


async def test_what_the_guard_refuses_gets_none_and_nothing_of_it_is_logged(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with running(tmp_path) as bench, bench.stream() as call:
            tokens = {
                "expired": bench.logins.token("alice", 7, "players", lasts_s=-60),
                "wrong key": bench.logins.token("alice", 7, "players", key=bench.logins.other),
                "service": bench.logins.token("billing", None, "services"),
            }
            codes = {what: (await ask(call, bench.login(secret=token))).error_code for what, token in tokens.items()}
            assert codes == {"expired": "UNAUTHENTICATED", "wrong key": "UNAUTHENTICATED", "service": "NOT_ALLOWED"}
            assert (await ask(call, bench.login(user="carol", secret="wrong-password"))).error_code == "UNAUTHENTICATED"
            assert (await ask(call, bench.login())).error_code == "UNAUTHENTICATED"
            reply = await ask(call, bench.login(user="carol", secret="carols-password"))
            assert (reply.uin, reply.error_code) == (9, "")
            assert (bench.issuer.refused, len(bench.senders)) == (5, 1)
    said = [*map(str, lines), *bench.audited]
    assert any("login_refused" in line and f"gateway {GATEWAY:016x}" in line for line in said)
    assert not [line for line in said for secret in (*tokens.values(), "wrong-password", "carols-password") if secret in line]


async def test_failed_logins_are_charged_to_the_address_at_this_gateway_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        wrong = bench.logins.token("alice", 7, "players", key=bench.logins.other)
        good = bench.logins.token("alice", 7, "players")
        for _ in range(200):
            reply = await ask(call, bench.login(secret=wrong))
            if reply.error_code == "OVERLOADED":
                break
        assert reply.retry_after_ms > 0
        from_there = bench.login(secret=good)
        assert (await ask(call, from_there)).error_code == "OVERLOADED"
        from_there.login.address = "10.0.0.10"
        assert (await ask(call, from_there)).error_code == ""
        with bench.guard.refusing("10.0.0.9", ""):
            bench.guard._check_failures("10.0.0.9")  # at the proxy's own listeners it may log in


async def test_shown_tickets_count_and_void_ones_are_named(tmp_path: Path) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        ends = int(time.time()) + 600
        good, other = (SHOWN.pack(uin, sign(key, uin, RUN, ends)) for uin, key in ((7, KEY), (8, OTHER)))
        reply = await ask(call, tickets_pb2.TicketRequest(number=5, shown=good + other))
        assert (reply.number, list(reply.void)) == (5, [8])
        assert bench.senders.permitted(GATEWAY, b"", 0, 0, 0) is None
        bench.keys = (OTHER,)
        bench.issuer.look()
        bench.issuer.look()
        gone = await call.read()
        assert gone is not None
        assert (gone.number, list(gone.void)) == (0, [7])


@pytest.mark.parametrize("size", [1, SHOWN.size - 1, (ticket_issuer.MAX_SHOWN + 1) * SHOWN.size])
async def test_a_request_of_a_wrong_length_ends_the_stream_before_it_is_read(tmp_path: Path, size: int) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        await call.write(tickets_pb2.TicketRequest(number=1, shown=bytes(size)))
        with pytest.raises(StreamEnded, match="INVALID_ARGUMENT"):
            await call.read()


async def test_credentials_that_are_too_long_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        assert (await ask(call, bench.login(secret="x" * 10_000))).error_code == "UNAUTHENTICATED"
        assert (await ask(call, bench.login(certificate=bytes(20_000)))).error_code == "INVALID_ARGUMENT"
        far = bench.login(secret=bench.logins.token("alice", 7))
        far.login.address = "a" * 65
        assert (await ask(call, far)).error_code == "INVALID_ARGUMENT"


async def test_only_a_registered_gateway_is_served_and_its_newest_stream(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        async with bench.stream(GATEWAY + 1) as stranger:
            with pytest.raises(StreamEnded, match="UNAVAILABLE"):
                await ask(stranger, bench.login(secret="x"))
        async with bench.stream() as first, bench.stream() as second:
            await ask(first, tickets_pb2.TicketRequest(number=1))
            await ask(second, tickets_pb2.TicketRequest(number=1))
            assert await first.read() is None
            assert (await ask(second, tickets_pb2.TicketRequest(number=2))).number == 2


async def test_a_gateway_that_left_the_registry_must_show_everything_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_tickets, "GONE_S", -1.0)
    async with running(tmp_path) as bench, bench.stream() as call:
        await ask(call, bench.login(secret=bench.logins.token("alice", 7)))
        monkeypatch.setattr(bench.issuer, "_run_of", lambda _gateway: None)
        bench.issuer.look()
        assert await call.read() is None
        assert len(bench.senders) == 0


async def test_without_keys_nothing_is_signed(tmp_path: Path) -> None:
    async with running(tmp_path) as bench, bench.stream() as call:
        bench.keys = ()
        assert (await ask(call, bench.login(secret=bench.logins.token("alice", 7)))).error_code == "UNAVAILABLE"


async def test_logins_that_are_checked_at_one_time_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticket_issuer, "MAX_LOGINS", 2)
    waits, asked = asyncio.Event(), 0

    async def check(_credentials: object) -> None:
        nonlocal asked
        asked += 1
        await waits.wait()
        raise NotAuthenticated("no")

    async with running(tmp_path) as bench, bench.stream() as call:
        monkeypatch.setattr(bench.guard, "check", check)
        for _ in range(5):
            await call.write(bench.login(secret="x"))
        await until(lambda: asked == 2)
        await asyncio.sleep(0.05)
        assert asked == 2
        waits.set()
        for _ in range(5):
            assert (await call.read() or tickets_pb2.TicketReply()).error_code == "UNAUTHENTICATED"


async def test_a_certificate_must_be_of_the_proxys_own_authorities(tmp_path: Path) -> None:
    shown = {}
    for name in ("ca", "evil"):
        make_authority(tmp_path / name)
        pem = issue(tmp_path / name, "client", tmp_path / f"{name}-issued", name="alice").read_text()
        begin, end = pem.index("-----BEGIN CERTIFICATE"), pem.index("-----END CERTIFICATE-----") + 25
        shown[name] = ssl.PEM_cert_to_DER_cert(pem[begin:end])
    async with running(tmp_path, str(tmp_path / "ca/ca.pem")) as bench, bench.stream() as call:
        token = bench.logins.token("alice", 7)
        reply = await ask(call, bench.login(secret=token, certificate=shown["evil"]))
        assert reply.uin == 7, "no certificate is asked for"
        bench.logins.write_rules(f"[certificate]\nuins = {{ alice = 7 }}\n{RULES}")
        await asyncio.sleep(0.01)
        for _ in range(2):
            await bench.guard.read_again()
        assert bench.guard.settings.certificate is not None
        assert (await ask(call, bench.login(certificate=shown["ca"]))).uin == 7
        for wrong in (shown["evil"], b"nonsense"):
            assert (await ask(call, bench.login(certificate=wrong))).error_code == "UNAUTHENTICATED"
