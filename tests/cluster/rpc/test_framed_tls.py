"""Framed streams where the cluster has certificates: the same table as at gRPC's listener, by the same files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cluster.listeners.call_guard import CallGuard
from cluster.listeners.streams import framed_calls, framed_listener, stream_keys
from cluster.rpc.framed import Framed
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from cluster.trust.pki import issue, make_authority
from pixiu.discovery.node import Node, NodeState
from pixiu.ids import EndpointID
from pixiu.rpc.duplex import StreamEnded, ask
from pixiu.rpc.tls import Tls
from tests.cluster.rpc.framed_world import HOST, call_to
from tests.cluster.rpc.test_framed import echo
from tests.support.waiting import until

STORE = "/pixiu.v1.Xiu/Store"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are taken at once, and not when they stood still for a while."""
    monkeypatch.setattr("pixiu.rpc.tls.STILL_S", 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tls` with certificates of one authority, and `other` with those of another."""
    folder = tmp_path_factory.mktemp("pki")
    for authority, out in (("ca", "tls"), ("ca2", "other")):
        make_authority(folder / authority)
        for role in ("xiu", "proxy", "broker"):
            issue(folder / authority, role, folder / out)
    return folder


@asynccontextmanager
async def xiu(folder: Path, cluster: ClusterOptions) -> AsyncIterator[tuple[CallGuard, Node]]:
    """The listener of a Xiu with the certificates in a folder."""
    own = Tls(folder, "xiu")
    guard = CallGuard("xiu", own, Audit(None))
    listener = framed_listener("xiu", cluster, own, guard, cluster.key_ring, lambda _method, error: pytest.fail(repr(error)))
    listener.serve(STORE, bytes, echo)
    port = await listener.bind(HOST, 0, fallback=True)
    await listener.start()
    try:
        node = Node("xiu", 0, 0, NodeState.RUNNING, HOST, 1, 0, EndpointID(5), 1, "", "", 0, stream_port=port)
        yield guard, Node.from_json(node.to_json(), replica=0)
    finally:
        await listener.close()


async def said(node: Node, cluster: ClusterOptions, tls: Tls | None, role: str = "proxy", method: str = STORE) -> str:
    """What a caller gets for "hello"; with "refused" before it where trying again changes nothing."""
    calls = framed_calls(role, 3, cluster, tls)
    async with calls.call(node, method, bytes) as call:
        try:
            return (await ask(call, b"hello", 60.0)).decode()
        except StreamEnded as ended:
            return f"{'refused: ' if ended.refused else ''}{ended}"


@pytest.mark.slow
async def test_the_certificate_says_who_calls_and_who_is_called(folders: Path, tmp_path: Path) -> None:
    cluster = ClusterOptions()
    folder = tmp_path / "tls"
    shutil.copytree(folders / "tls", folder)
    async with xiu(folder, cluster) as (guard, node):
        assert await said(node, cluster, Tls(folders / "tls", "proxy")) == "hello"
        assert "refused" in await said(node, cluster, Tls(folders / "tls", "proxy"), method="/x/y")
        assert "does not prove that it is a pi" in await said(
            Node.from_json(node.to_json().replace(b"xiu", b"pi")), cluster, Tls(folders / "tls", "proxy")
        )
        # whatever it calls itself
        assert "refused: NOT_ALLOWED: broker may not call" in await said(node, cluster, Tls(folders / "tls", "broker"))
        assert "does not prove that it is a xiu" in await said(node, cluster, Tls(folders / "other", "proxy"))
        shutil.copy(folders / "tls/ca.pem", tmp_path / "ca.pem")
        shutil.copytree(folders / "other", tmp_path / "mixed")
        shutil.copy(folders / "tls/ca.pem", tmp_path / "mixed/ca.pem")  # trusts the listener, and is not trusted
        assert "hello" not in await said(node, cluster, Tls(tmp_path / "mixed", "proxy"))
        async with call_to(node.stream_port) as plain:
            with pytest.raises(StreamEnded):
                await plain.opened(0.2)
        assert guard.refused == 2
        serial = next(caller.serial for caller in guard._callers.values() if caller.role == "proxy")
        (folder / "revoked").write_text(f"{serial:x}\n")
        await until(lambda: _revoked(node, cluster, Tls(folders / "tls", "proxy")), "that the revoked certificate is refused")


async def _revoked(node: Node, cluster: ClusterOptions, tls: Tls) -> bool:
    await asyncio.sleep(0.1)
    return "nobody may not call" in await said(node, cluster, tls)


async def test_two_roles_of_one_loop_show_each_its_own_certificate(folders: Path) -> None:
    cluster, method = ClusterOptions(), "/pixiu.v1.Xiu/Store"
    async with xiu(folders / "tls", cluster) as (_, node):
        proxy, broker = (framed_calls(role, 3, cluster, Tls(folders / "tls", role)) for role in ("proxy", "broker"))

        async def called(calls: Framed) -> str:
            async with calls.call(node, method, bytes) as call:
                try:
                    return (await ask(call, b"hello", 60.0)).decode()
                except StreamEnded as ended:
                    return str(ended)

        found = await asyncio.gather(*(called(calls) for calls in (proxy, broker, proxy, broker)))
        assert found[0] == found[2] == "hello"
        assert found[1] == found[3] == f"NOT_ALLOWED: broker may not call {method} of xiu"


async def test_new_certificates_are_shown_to_new_connections(folders: Path, tmp_path: Path) -> None:
    cluster = ClusterOptions()
    folder = tmp_path / "tls"
    shutil.copytree(folders / "tls", folder)
    async with xiu(folder, cluster) as (_, node):
        for which in ("tls", "other"):
            for name in ("ca.pem", "xiu.pem"):
                shutil.copy(folders / which / name, folder / name)
            assert await said(node, cluster, Tls(folders / which, "proxy")) == "hello"
        (folder / "xiu.pem").write_text("half a file")
        assert await said(node, cluster, Tls(folders / "other", "proxy")) == "hello", (
            "what cannot be used leaves what was there before in use"
        )


async def test_a_ring_proves_roles_of_the_cluster(folders: Path, tmp_path: Path) -> None:
    for folder in ("one", "both"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.key").write_bytes(b"1" * 32)
    (tmp_path / "both/2.key").write_bytes(b"2" * 32)
    one = ClusterOptions(key_dir=str(tmp_path / "one"))
    both = ClusterOptions(key_dir=str(tmp_path / "both"))
    for listener, caller, taken in (
        (both, one, True),
        (one, both, False),
        (one, one, True),
    ):
        async with xiu(folders / "tls", listener) as (_, node):
            assert (await said(node, caller, Tls(folders / "tls", "proxy")) == "hello") is taken
    keys = one.key_ring()
    assert stream_keys(keys, "proxy", "xiu") != stream_keys(keys, "relay", "xiu")
    assert stream_keys(None, "proxy", "xiu") is None
