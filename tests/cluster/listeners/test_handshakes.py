"""Handshakes at a real gRPC listener that come to nothing are counted and audited, and nobody else's are."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cluster.listeners.call_guard import CallGuard
from cluster.listeners.handshakes import HANDSHAKES_FAILED, Handshakes
from cluster.trust.audit import Audit
from cluster.trust.pki import issue, make_authority
from pixiu.rpc.tls import Tls, peer_channel
from tests.support.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pki")
    for authority in ("own", "other"):
        make_authority(found / f"{authority}-ca")
        issue(found / f"{authority}-ca", "operator", found / authority)
    issue(found / "own-ca", "xiu", found / "own")
    return found


@contextlib.asynccontextmanager
async def listener(folder: Path, found: Handshakes, audit: Audit) -> AsyncIterator[str]:
    own = Tls(folder / "own", "xiu")
    others = [grpc.aio.server() for _ in range(3)]  # which nobody has asked channelz for
    with found.watching():
        server = grpc.aio.server(interceptors=[CallGuard("xiu", own, audit, found.called)])
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_secure_port("127.0.0.1:0", own.server_credentials(found.begins))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for each in (server, *others):
            await each.stop(0)


async def call(channel: grpc.aio.Channel) -> None:
    # Health knows no such service; the call has come in all the same.
    with contextlib.suppress(grpc.aio.AioRpcError):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="none"), timeout=60)


async def knock(address: str, certificate: Path | None) -> None:
    """A handshake with this certificate, to its end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate is not None:
        context.load_cert_chain(certificate)
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        with contextlib.suppress(OSError):
            await reader.read()
        writer.transport.abort()


async def test_handshakes_that_come_to_nothing_are_counted_and_audited(folder: Path) -> None:
    lines: list[tuple[str, dict[str, Any]]] = []
    audit = Audit(None, tell=lambda kind, fields: lines.append((kind, dict(fields))))
    found, tls = Handshakes("cluster", audit, settle_s=0.0), Tls(folder / "own", "operator")
    async with listener(folder, found, audit) as address, peer_channel(address, "xiu", tls) as stays:
        await call(stays)
        for _ in range(3):
            async with peer_channel(address, "xiu", tls) as goes:
                await call(goes)
        await found.look()
        assert (found.begun, found.failed, lines) == (4, 0, [])
        for _ in range(2):
            await knock(address, folder / "other/operator.pem")
        await knock(address, None)
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"no TLS at all" * 10)
        await reader.read()
        writer.close()

        async def counted() -> bool:
            await found.look()
            return found.failed == 4

        await until(counted, lambda: f"4 handshakes that failed: {found.failed} of {found.begun}")
        # Who stays and calls again is no newcomer, and who comes anew is none that failed.
        await call(stays)
        async with peer_channel(address, "xiu", tls) as anew:
            await call(anew)
            await found.look()
        await found.look()
        assert (found.begun, found.failed) == (9, 4)
    assert {kind for kind, _ in lines} == {HANDSHAKES_FAILED}
    assert sum(fields["count"] for _, fields in lines) == 4
    assert {fields["listener"] for _, fields in lines} == {"cluster"}
