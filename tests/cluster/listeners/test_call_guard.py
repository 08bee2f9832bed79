"""The cluster's listener with certificates: every method is tried with every identity, and the page says the same."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

import cluster.wire.v1
from cluster.listeners.call_guard import EVERYBODY, METHODS, NOBODY, PROCESSES, SAME, CallGuard, may_call, read_certificate
from cluster.rpc import methods
from cluster.trust.audit import Audit, verify
from cluster.trust.pki import ZOOKEEPER, issue, make_authority, renew
from pixiu.errors import ConfigurationError
from pixiu.rpc.channels import Channels
from pixiu.rpc.tls import Tls, peer_channel
from pixiu.wire import v1

PAGE = Path(__file__).resolve().parents[3] / "docs/security.md"
SERVED: dict[str, Any] = {
    f"/{service.full_name}/{method.name}": method
    for folder in (v1, cluster.wire.v1)
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
    if module.name.endswith("_pb2")
    for service in importlib.import_module(module.name).DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every method of the product: of all modules that are generated, so that none is forgotten."""
CALLERS = (*EVERYBODY, ZOOKEEPER)
"""Whose certificates are tried. ZooKeeper's has a role that calls nothing: it is nobody's."""
UNKNOWN = "/pixiu.v1.Xiu/Nonsense"
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are taken at once, and not when they stood still for a while."""
    monkeypatch.setattr("pixiu.rpc.tls.STILL_S", 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tls` with a certificate of everybody, and `other` with those of another authority, which trusts the first one too."""
    folder = tmp_path_factory.mktemp("pki")
    for authority, out in (("ca", "tls"), ("ca2", "other")):
        make_authority(folder / authority)
        for role in CALLERS:
            issue(folder / authority, role, folder / out)
    with open(folder / "other/ca.pem", "ab") as file:
        file.write((folder / "tls/ca.pem").read_bytes())
    return folder


class Everything(grpc.GenericRpcHandler):
    """Answers every method, each in its own form, with its name."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = str(details.method)
        found = SERVED.get(method)
        from_client, from_server = (found.client_streaming, found.server_streaming) if found else (False, False)
        if "reflection" in method:
            from_client = from_server = True

        async def answer(_request: Any, context: Any) -> bytes:
            return method.encode()

        async def answers(_request: Any, context: Any) -> AsyncIterator[bytes]:
            yield method.encode()

        async def writes(_request: Any, context: Any) -> None:
            await context.write(method.encode())

        if from_client and from_server:
            return grpc.stream_stream_rpc_method_handler(writes if method.endswith("Publish") else answers)
        if from_client:
            return grpc.stream_unary_rpc_method_handler(answer)
        return grpc.unary_stream_rpc_method_handler(answers) if from_server else grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def listener(folder: Path, role: str, audit: Audit) -> AsyncIterator[tuple[str, CallGuard]]:
    own = Tls(folder, role)
    guard = CallGuard(role, own, audit)
    server = grpc.aio.server(interceptors=[guard])
    server.add_generic_rpc_handlers((Everything(),))
    port = server.add_secure_port("127.0.0.1:0", own.server_credentials())
    await server.start()
    try:
        yield f"127.0.0.1:{port}", guard
    finally:
        await server.stop(0)


async def call(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    open_call: Any = channel.unary_stream(method)
    made: Any = open_call(b"", timeout=WAIT_S)
    try:
        async for _ in made:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def tried(address: str, role: str, tls: Tls | None, method: str) -> grpc.StatusCode:
    async with peer_channel(address, role, tls) as channel:
        return await call(channel, method)


def test_every_method_is_in_the_table() -> None:
    streams = {method for name, method in vars(methods).items() if name.isupper()}
    of_clients = {
        "/pixiu.v1.Publisher/Publish", "/pixiu.v1.Publisher/Cluster", "/pixiu.v1.Subscriber/Subscribe", "/pixiu.v1.Mailer/Send",
        *(f"/pixiu.v1.Topics/{name}" for name in ("Describe", "List", "Change", "Plan")),
        *(f"/pixiu.v1.TopicLog/{name}" for name in ("Write", "Positions", "Consume", "Read", "Channel", "Last")),
    }  # fmt: skip
    assert {*SERVED, *streams} - of_clients == {method for method in METHODS if method.startswith("/pixiu")}


def test_replicas_take_each_others_word_and_no_other_roles() -> None:
    assert may_call("/pixiu.v1.Replication/Exchange", "pi", "pi")
    assert not may_call("/pixiu.v1.Replication/Exchange", "xiu", "pi")
    assert not may_call("/pixiu.v1.Replication/Promote", "pi", "pi")
    assert not may_call(UNKNOWN, "operator", "xiu")


def test_the_page_says_who_may_call_what() -> None:
    _, _, section = PAGE.read_text().partition("\n### gRPC at the cluster's port\n")
    rows = re.findall(r"^\| `(/\S+)` \| (.+?) \|$", section, re.MULTILINE)
    names = {
        "every process": PROCESSES,
        "everybody with a certificate": EVERYBODY,
        "nobody": (),
        "replicas of the same role": (SAME,),
    }
    said = {method: [each for word in who.split(", ") for each in names.get(word, (word,))] for method, who in rows}
    assert {method: sorted(who) for method, who in said.items()} == {method: sorted(who) for method, who in METHODS.items()}


@pytest.mark.slow
async def test_every_method_with_every_identity(folders: Path, tmp_path: Path) -> None:
    audit = Audit(tmp_path)
    found: dict[tuple[str, str], bool] = {}
    async with listener(folders / "tls", "xiu", audit) as (address, guard):
        for caller in CALLERS:
            async with peer_channel(address, "xiu", Tls(folders / "tls", caller)) as channel:
                for method in (*METHODS, UNKNOWN):
                    code = await call(channel, method)
                    assert code in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED), (caller, method, code)
                    found[method, caller] = code is grpc.StatusCode.OK
        refused = guard.refused
    audit.close()
    assert found == {(method, caller): may_call(method, caller, "xiu") for method in (*METHODS, UNKNOWN) for caller in CALLERS}
    assert not any(allowed for (_, caller), allowed in found.items() if caller == ZOOKEEPER)
    assert refused == sum(not allowed for allowed in found.values()) > 100
    assert verify(tmp_path / "refusals.log").lines > 100
    text = (tmp_path / "refusals.log").read_text()
    assert '"kind": "call_refused", "method": "/pixiu.v1.Replication/Promote", "caller": "client"' in text


async def test_another_authority_no_certificate_and_another_role_at_the_address_do_not_connect(
    folders: Path, tmp_path: Path
) -> None:
    audit = Audit(None)
    method = "/grpc.health.v1.Health/Check"
    async with listener(folders / "tls", "xiu", audit) as (address, _):
        assert await tried(address, "xiu", Tls(folders / "other", "operator"), method) is grpc.StatusCode.UNAVAILABLE
        assert await tried(address, "xiu", None, method) is grpc.StatusCode.UNAVAILABLE
        assert await tried(address, "pi", Tls(folders / "tls", "operator"), method) is grpc.StatusCode.UNAVAILABLE
        assert await tried(address, "xiu", Tls(folders / "tls", "operator"), method) is grpc.StatusCode.OK


async def test_a_revoked_certificate_is_refused_and_a_new_one_is_taken(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.listeners.call_guard.REVOKED_S", 0.0)
    method = "/pixiu.v1.Repair/Compare"
    for role in ("xiu", "operator"):
        issue(folders / "ca", role, tmp_path)
    channels = []
    async with listener(tmp_path, "xiu", Audit(None)) as (address, _):
        shared = Channels("xiu", own=Tls(tmp_path, "operator"))
        channels.append(shared.acquire(address))
        assert await call(channels[0], method) is grpc.StatusCode.OK
        serial = x509.load_pem_x509_certificate((tmp_path / "operator.pem").read_bytes()).serial_number
        (tmp_path / "revoked").write_text(f"{serial:x}\n")
        assert await call(channels[0], method) is grpc.StatusCode.PERMISSION_DENIED
        (tmp_path / "revoked").write_text("no number\n")
        assert await call(channels[0], method) is grpc.StatusCode.PERMISSION_DENIED, "what was revoked stays revoked"
        assert len(renew(folders / "ca", tmp_path)) == 2
        channels.append(shared.acquire(address))
        assert channels[0] is not channels[1]
        assert await call(channels[1], method) is grpc.StatusCode.OK
        for channel in channels:
            await shared.release(channel)
        assert shared.acquire(address) not in channels, "they are closed"
        await shared.close()


def test_a_wrong_word_among_the_revoked_hides_none_of_the_others(folders: Path, tmp_path: Path) -> None:
    issue(folders / "ca", "xiu", tmp_path)
    lines: list[Mapping[str, object]] = []
    guard = CallGuard("xiu", Tls(tmp_path, "xiu"), Audit(None, tell=lambda _, fields: lines.append(fields)))
    assert guard.problem == ""
    for text, revoked, wrong in (
        ("serial=1F2E\n0a\n", {10}, "'serial=1F2E'"), ("serial\n0b", {10, 11}, "'serial'"), ("b", {11}, ""),
        ("\x00\udcff 0c", {11, 12}, "1 words"),
    ):  # fmt: skip
        (tmp_path / "revoked").write_bytes(text.encode(errors="surrogateescape"))
        guard._revoked_at = 0.0
        assert guard._read_revoked() == revoked
        assert wrong in guard.problem
        assert bool(wrong) == bool(guard.problem)
    (tmp_path / "revoked").unlink()  # and what comes in its place is not there yet
    guard._revoked_at = 0.0
    assert guard._read_revoked() == {11, 12}
    assert "is gone" in guard.problem
    (tmp_path / "revoked").touch()
    guard._revoked_at = 0.0
    assert (guard._read_revoked(), guard.problem) == (frozenset(), "")
    assert len(lines) == 1  # one line a second
    assert "serial=1F2E" in str(lines[0])


def test_half_of_a_list_is_not_taken_though_it_be_a_good_one(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A serial number that is cut is another one, and half of the authorities are authorities."""
    issue(folders / "ca", "xiu", tmp_path)
    ca = (tmp_path / "ca.pem").read_bytes()
    (tmp_path / "ca.pem").write_bytes(ca + ca)
    (tmp_path / "revoked").write_text("0a0b0c0d\n")
    tls = Tls(tmp_path, "xiu")
    guard = CallGuard("xiu", tls, Audit(None))
    assert guard._read_revoked() == {0x0A0B0C0D}  # at the start there is nothing before it
    monkeypatch.setattr("pixiu.rpc.tls.STILL_S", 1.0)
    (tmp_path / "revoked").write_text("0a0b")
    (tmp_path / "ca.pem").write_bytes(ca)
    guard._revoked_at = 0.0
    assert guard._read_revoked() == {0x0A0B0C0D}
    assert not tls.refresh()
    (tmp_path / "revoked").write_text("0a0b0c0d\n0b\n")
    for name in ("revoked", "ca.pem", "xiu.pem"):
        os.utime(tmp_path / name, (time.time() - 2, time.time() - 2))
    guard._revoked_at = 0.0
    assert guard._read_revoked() == {0x0A0B0C0D, 0x0B}
    assert tls.refresh()


async def test_certificates_are_exchanged_while_the_listener_is_open_even_those_of_the_authority(
    folders: Path, tmp_path: Path
) -> None:
    for role in ("xiu", "operator"):
        issue(folders / "ca", role, tmp_path)
    method = "/pixiu.v1.Repair/Compare"
    async with listener(tmp_path, "xiu", Audit(None)) as (address, _):
        own = Tls(tmp_path, "operator")
        assert await tried(address, "xiu", own, method) is grpc.StatusCode.OK
        for role in ("xiu", "operator"):
            issue(folders / "ca2", role, tmp_path)
        assert (tmp_path / "ca.pem").read_text().count("BEGIN CERTIFICATE") == 2
        assert await tried(address, "xiu", own, method) is grpc.StatusCode.OK
        (tmp_path / "operator.pem").write_text("half a file")
        assert await tried(address, "xiu", own, method) is grpc.StatusCode.OK, "those before it stay in use"


def test_half_a_file_and_another_ones_key_are_not_taken(folders: Path, tmp_path: Path) -> None:
    issue(folders / "ca", "xiu", tmp_path)
    issue(folders / "ca", "pi", tmp_path)
    found = Tls(tmp_path, "xiu")
    own, other, authorities = ((tmp_path / name).read_bytes() for name in ("xiu.pem", "pi.pem", "ca.pem"))
    begin = b"-----BEGIN CERTIFICATE-----"
    key_first = own.startswith(b"-----BEGIN") and own.index(begin) > 0
    mixed = own[: own.index(begin)] + other[other.index(begin) :] if key_first else other[: other.index(b"-----END C")] + own
    for name, whole, wrong in (
        ("xiu.pem", own, own[: len(own) * 2 // 3]), ("xiu.pem", own, mixed),
        ("ca.pem", authorities, authorities + authorities[:200]),
    ):  # fmt: skip
        generation = found.generation
        (tmp_path / name).write_bytes(wrong)
        assert not found.refresh(), name
        assert f"{name} is damaged" in found.problem
        assert found.generation == generation
        with pytest.raises(ConfigurationError, match=f"{name} is damaged"):
            Tls(tmp_path, "xiu")
        (tmp_path / name).write_bytes(whole)
        found.refresh()
        assert found.problem == ""


def test_a_certificate_names_one_role_or_none(folders: Path) -> None:
    caller = read_certificate((folders / "tls/gateway.pem").read_bytes())
    assert (caller.role, caller.name) == ("gateway", "gateway")
    assert read_certificate((folders / "ca/ca.pem").read_bytes()).role == NOBODY
    assert read_certificate(b"nonsense").role == NOBODY


def test_what_a_folder_lacks_is_said(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tls_dir = .*ca\.pem cannot be read: .*pixiu pki issue"):
        Tls(tmp_path, "xiu")
    (tmp_path / "ca.pem").write_bytes((folders / "tls/ca.pem").read_bytes())
    with pytest.raises(ConfigurationError, match=r"xiu\.pem cannot be read"):
        Tls(tmp_path, "xiu")
    (tmp_path / "xiu.pem").write_text("nothing")
    with pytest.raises(ConfigurationError, match=r"xiu\.pem holds no private key"):
        Tls(tmp_path, "xiu")
