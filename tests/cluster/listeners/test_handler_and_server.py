"""What stands between the links and a service, and the port that gRPC and links share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cluster.links.api import LinkHandler, Outcome, PeerState
from cluster.links.endpoint import Endpoint
from cluster.links.options import LinkOptions
from cluster.listeners import server as module
from cluster.listeners.handler import Handler
from cluster.listeners.server import (
    MIN_MESSAGE_BYTES,
    Server,
    bind_both,
    bind_clients,
    bracketed,
    keep_grpc_from_printing,
    server_options,
)
from cluster.settings.options import ClientListenerOptions, ClusterOptions, RoleOptions
from pixiu.errors import ConfigurationError
from pixiu.ids import EndpointID
from tests.support.waiting import until

PEER = EndpointID(7)


class Recorder:
    """Answers as it is told, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._error = error

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if self._error is not None:
            raise self._error

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        self._note(peer, data, start, end, count)
        return Outcome.TAKEN

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        self._note(peer, messages)
        return Outcome.TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        self._note(peer, settled)

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        self._note(peer, state)

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        self._note(peer, reply, attachment)
        return b"answer"


def everything(handler: LinkHandler) -> list[object]:
    handler.on_settled(PEER, [(1, True)])
    handler.on_peer_state(PEER, PeerState.SUSPECT)
    return [
        handler.on_records(PEER, b"data", 1, 3, 2),
        handler.on_control(PEER, [b"m"]),
        handler.on_heartbeat(PEER, True, b"attached"),
    ]


def test_everything_is_handed_on_as_it_is() -> None:
    handler, recorder = Handler(), Recorder()
    handler.service = recorder
    assert everything(handler) == [Outcome.TAKEN, Outcome.TAKEN, b"answer"]
    assert recorder.calls == [
        (PEER, [(1, True)]),
        (PEER, PeerState.SUSPECT),
        (PEER, b"data", 1, 3, 2),
        (PEER, [b"m"]),
        (PEER, True, b"attached"),
    ]


def test_before_there_is_a_service_everything_is_refused() -> None:
    assert everything(Handler()) == [Outcome.NOT_TAKEN, Outcome.NOT_TAKEN, b""]


@pytest.mark.slow
def test_a_service_that_raises_is_counted_and_its_batch_refused() -> None:
    handler = Handler()
    handler.service = Recorder(ValueError("a bug"))
    assert everything(handler) == [Outcome.NOT_TAKEN, Outcome.NOT_TAKEN, b""]
    assert handler.counts == {"handler_failures_total": 5}


def test_discovery_is_told_of_death_and_life_even_when_the_service_raises() -> None:
    handler, told = Handler(), list[tuple[str, EndpointID]]()
    handler.on_dead, handler.on_alive = lambda peer: told.append(("dead", peer)), lambda peer: told.append(("alive", peer))
    handler.service = Recorder(ValueError("a bug"))
    for state in (PeerState.SUSPECT, PeerState.DEAD, PeerState.ALIVE, PeerState.UNKNOWN):
        handler.on_peer_state(PEER, state)
    assert told == [("dead", PEER), ("alive", PEER)]


@pytest.mark.parametrize(("record_bytes", "message_bytes"), [(1024, MIN_MESSAGE_BYTES), (1 << 20, 4 << 20)])
def test_messages_of_grpc_are_bounded_by_the_largest_record(record_bytes: int, message_bytes: int) -> None:
    options = dict(server_options(ClusterOptions(max_record_bytes=record_bytes)))
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == message_bytes
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.server_handshake_timeout_ms"] == 2000


def test_hosts_of_ipv6_stand_in_brackets() -> None:
    assert (bracketed("::1"), bracketed("127.0.0.1"), bracketed("name")) == ("[::1]", "127.0.0.1", "name")


def endpoint() -> Endpoint:
    return Endpoint(PEER, LinkOptions(), Handler())


async def test_port_0_is_one_number_for_tcp_and_udp() -> None:
    server = Server(ClusterOptions())
    bound, port = await bind_both(RoleOptions(), server, endpoint)
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for other in (tcp, udp):
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
    await bound.close()
    await server.grpc.stop(0)


class Chosen:
    """Stands for endpoints that get given ports one after the other."""

    def __init__(self, ports: Iterator[int]) -> None:
        self._ports = ports
        self.closed = 0

    def __call__(self) -> Endpoint:
        async def close() -> None:
            self.closed += 1

        return cast(Endpoint, SimpleNamespace(bind=lambda host, port: next(self._ports), close=close))


async def test_a_port_that_is_free_for_udp_only_is_given_back_and_another_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
        free.close()
        chosen = Chosen(iter([taken.getsockname()[1], free_port]))
        server = Server(ClusterOptions())
        _, port = await bind_both(RoleOptions(), server, chosen)
        assert (port, chosen.closed) == (free_port, 1)
        await server.grpc.stop(0)


async def test_clients_have_a_port_of_their_own_beside_the_clusters() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        servers = [Server(ClusterOptions()) for _ in range(2)]
        found = bind_clients(ClientListenerOptions(), port - 2, servers[0])
        assert found not in (0, port)
        with pytest.raises(ConfigurationError, match=rf"port {port} on 127\.0\.0\.1 cannot be used for clients .*set client_port"):
            bind_clients(ClientListenerOptions(client_port=port), 1, servers[1])
        for server in servers:
            await server.grpc.stop(0)


async def test_the_clusters_listener_names_its_services_only_where_it_shall() -> None:
    for shall in (False, True):
        server = Server(ClusterOptions(), reflection=shall)
        port = server.grpc.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([]))
            assert (await call.code() is grpc.StatusCode.UNIMPLEMENTED) is not shall
        await server.grpc.stop(0)


async def test_when_no_port_does_the_tries_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        chosen = Chosen(iter([port] * 100))
        with pytest.raises(ConfigurationError, match=r"no port on 127\.0\.0\.1 is free for TCP and UDP after 20 tries .*set port"):
            await bind_both(RoleOptions(), server := Server(ClusterOptions()), chosen)
        assert chosen.closed == 20
        await server.grpc.stop(0)


def test_grpc_prints_no_traceback_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cygrpc.traceback  # the name by which grpcio finds what it prints with
    keep_grpc_from_printing()
    try:
        raise ValueError("printed")
    except ValueError:
        cygrpc.traceback.print_exc()
        assert "printed" in "".join(cygrpc.traceback.format_exception(ValueError("printed")))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
async def test_connections_of_clients_are_bounded_and_idle_ones_make_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "connections_of_clients", lambda _limit, *, beside_mqtt: 3)
    monkeypatch.setattr(module, "CLIENT_IDLE_MS", 1_000)  # gRPC takes less for a second
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_MS", 200)
    server = Server(ClusterOptions(), of_clients=True)
    port = server.listen("127.0.0.1:0")
    await server.start()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(5)]

    async def comes_in(channel: grpc.aio.Channel) -> bool:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True

    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    held = []
    for channel in channels[:3]:
        await until(lambda channel=channel: comes_in(channel), "connections that never became HTTP/2 are gone")  # type: ignore[misc]
        held.append(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()))
        await held[-1].read()
    assert not await comes_in(channels[3])
    for call in held:
        call.cancel()
    await until(lambda: comes_in(channels[4]), "connections without a call made space")
    for connection in silent:
        connection.close()
    for channel in channels:
        await channel.close()
    await server.grpc.stop(None)
