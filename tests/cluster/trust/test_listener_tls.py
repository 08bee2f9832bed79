"""What clients' listeners show by TLS: files that do not do, and files that change while the process runs."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509

from cluster.trust.listener_tls import ListenerTls
from cluster.trust.pki import issue, make_authority
from pixiu.errors import ConfigurationError
from pixiu.rpc.channels import reason_of
from pixiu.rpc.client_tls import ClientTls, client_tls

HOSTS = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are taken at once, and not when they stood still for a while."""
    monkeypatch.setattr("pixiu.rpc.tls.STILL_S", 0.0)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    for name in ("ca", "other"):
        make_authority(folder / name)
        issue(folder / name, "gateway", folder / f"{name}-tls", hosts=HOSTS)
        issue(folder / name, "client", folder / f"{name}-tls", name="ann")
    return folder


def serial(path: Path) -> int:
    return x509.load_pem_x509_certificate(path.read_bytes()).serial_number


def shown(tls: ListenerTls, trust: Path) -> int:
    """The serial number of the certificate that a new connection sees."""
    client, server = ssl.create_default_context(cafile=str(trust)), tls.context()
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done: set[int] = set()
    while len(done) < 2:
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                pass
    der = ends[0].getpeercert(True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def test_a_new_certificate_is_shown_to_the_next_connection_and_half_a_one_to_nobody(pki: Path, tmp_path: Path) -> None:
    listener, trust = tmp_path / "listener.pem", pki / "ca-tls/ca.pem"
    listener.write_bytes((pki / "ca-tls/gateway.pem").read_bytes())
    tls = ListenerTls(str(listener))
    first = shown(tls, trust)
    whole = issue(pki / "ca", "gateway", tmp_path / "new", hosts=HOSTS).read_bytes()
    for wrong in (whole[: len(whole) // 2], b"", b"no PEM"):
        listener.write_bytes(wrong)
        assert shown(tls, trust) == first
        assert f"tls_certificate = {listener}: must be a complete PEM" in tls.problem
    listener.unlink()
    assert shown(tls, trust) == first
    assert "cannot be read" in tls.problem
    listener.write_bytes(whole)
    assert (shown(tls, trust) == serial(listener), tls.problem) == (True, "")


def test_a_key_of_its_own_file_must_be_the_certificates(pki: Path, tmp_path: Path) -> None:
    text = (pki / "ca-tls/gateway.pem").read_text()
    key, _, certificate = text.partition("-----BEGIN CERTIFICATE")
    (tmp_path / "listener.key").write_text(key)
    (tmp_path / "listener.pem").write_text("-----BEGIN CERTIFICATE" + certificate)
    assert shown(ListenerTls(str(tmp_path / "listener.pem"), str(tmp_path / "listener.key")), pki / "ca-tls/ca.pem")
    (tmp_path / "listener.key").write_text((pki / "other-tls/gateway.pem").read_text())
    with pytest.raises(ConfigurationError, match=r"tls_certificate = .*KEY_VALUES_MISMATCH"):
        ListenerTls(str(tmp_path / "listener.pem"), str(tmp_path / "listener.key"))
    with pytest.raises(ConfigurationError, match=r"client_ca = .*must be a complete PEM"):
        ListenerTls(str(pki / "ca-tls/gateway.pem"), client_ca=str(Path(__file__)))


async def told(address: str, tls: ClientTls) -> str:
    """What a call is told; of a method that nobody serves when the handshake is done."""
    async with grpc.aio.secure_channel(address, tls.channel_credentials(), [("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            async with asyncio.timeout(30):
                call: Any = channel.unary_unary("/x/y")
                await call(b"")
        except grpc.aio.AioRpcError as error:
            return reason_of(error)
    raise AssertionError("answered")


async def test_grpc_takes_new_files_without_a_restart_and_says_what_is_wrong_with_a_handshake(pki: Path, tmp_path: Path) -> None:
    listener = tmp_path / "listener.pem"
    listener.write_bytes((pki / "ca-tls/gateway.pem").read_bytes())
    tls = ListenerTls(str(listener), client_ca=str(pki / "ca-tls/ca.pem"), required=True)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    plain = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        at, own = f"127.0.0.1:{port}", str(pki / "ca-tls/ann.pem")
        ours, theirs = str(pki / "ca-tls/ca.pem"), str(pki / "other-tls/ca.pem")
        assert "another role" in await told(at, ClientTls(ours, own))
        assert "not from the trusted authority" in await told(at, ClientTls(theirs, own))
        assert "does not speak TLS" in await told(f"127.0.0.1:{plain}", ClientTls(ours, own))
        for wrong in ("", str(pki / "other-tls/ann.pem")):
            assert "another role" not in await told(at, ClientTls(ours, wrong))
        listener.write_bytes((pki / "other-tls/gateway.pem").read_bytes())
        assert "another role" in await told(at, ClientTls(theirs, own))
    finally:
        await server.stop(None)


def test_a_client_says_which_file_is_wrong(pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIXIU_CA", raising=False)
    assert client_tls() is None
    with pytest.raises(ConfigurationError, match="PIXIU_CA"):
        client_tls(certificate=str(pki / "ca-tls/ann.pem"))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        client_tls(ca=str(tmp_path / "none.pem"))
    (tmp_path / "no.pem").write_text("no PEM")
    with pytest.raises(ConfigurationError, match=r"no\.pem: is not a PEM file"):
        client_tls(ca=str(tmp_path / "no.pem"))
    monkeypatch.setenv("PIXIU_CA", str(pki / "ca-tls/ca.pem"))
    found = client_tls()
    assert found is not None
    before = found.generation
    assert found.newest() == before
    assert client_tls(ca="") is None
