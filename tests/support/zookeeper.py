"""A real ZooKeeper for tests: fixtures, and the ways in which it fails.

In a conftest: `from tests.support.zookeeper import own_server, root, zookeeper, zookeeper_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.operations import NoNode
from pixiu.discovery.paths import UNPARTITIONED_ROLES
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.ids import EndpointID
from tests.support.cluster import wait_for
from tests.support.shared_zookeeper import own_root, shared_server

PATIENCE_S = 30.0
"""How long a test waits for what must come."""
SESSION_TIMEOUT_S = 10.0
"""The most that the server grants, so that a busy machine ends none. Tests that wait for the end of one say less."""
CLOSE_SESSION = -11
"""The request of ZooKeeper's protocol."""
CONNECT_ANSWER_BYTES = 41
"""Its answer to a connection; what follows is the answer to the request after that."""


async def remove(zookeeper: ZooKeeper, path: str) -> None:
    """A node and all below it, while processes that were killed have sessions left."""
    with contextlib.suppress(NoNode):
        for child in await zookeeper.children(path):
            await remove(zookeeper, f"{path}/{child}")
        await zookeeper.delete(path)


@pytest.fixture(scope="session")
def zookeeper_server() -> EmbeddedZooKeeper:
    """The server that tests share."""
    return shared_server()


@pytest.fixture
def own_server(tmp_path: object) -> Iterator[EmbeddedZooKeeper]:
    """A server that the test may kill and stop."""
    server = EmbeddedZooKeeper(f"{tmp_path}/zookeeper")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def root() -> str:
    """A root of the test's own."""
    return own_root()


@pytest.fixture
async def zookeeper(zookeeper_server: EmbeddedZooKeeper) -> AsyncIterator[ZooKeeper]:
    """A session with the shared server."""
    session = await connected(zookeeper_server)
    try:
        yield session
    finally:
        await session.close()


async def connected(server: EmbeddedZooKeeper, session_timeout_s: float = SESSION_TIMEOUT_S) -> ZooKeeper:
    """A new session."""
    session = ZooKeeper(server.address, session_timeout_s=session_timeout_s, connect_timeout_s=PATIENCE_S)
    await session.connect()
    return session


async def expire(zookeeper: ZooKeeper) -> None:
    """End a session on the server's side, as its time-out would."""
    session = zookeeper.session
    assert session is not None
    # Both requests in one write: the client, thrown out by the first, seldom gets the session back in between; else once more.
    connect = struct.pack(">iqiqi16s?", 0, 0, int(SESSION_TIMEOUT_S * 1000), session[0], len(session[1]), session[1], False)
    requests = b"".join(struct.pack(">i", len(one)) + one for one in (connect, struct.pack(">ii", 1, CLOSE_SESSION)))
    host, _, port = zookeeper.hosts.rpartition(":")
    async with asyncio.timeout(PATIENCE_S):
        answer, asked = b"", 0
        while len(answer) <= CONNECT_ANSWER_BYTES:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(requests)
            asked += 1
            with contextlib.suppress(ConnectionError):
                answer = await reader.read()
            writer.close()
            if len(answer) == CONNECT_ANSWER_BYTES and struct.unpack_from(">i", answer, 8)[0] == 0:
                assert asked > 1, "the server knew no such session"
                return  # it was ended before, and the answer that said so was lost


def pause(server: EmbeddedZooKeeper) -> None:
    """Stop a server as a hung machine would; when this returns none of its threads answers any more."""
    os.killpg(server.pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{server.pid}/task")
    wait_for(lambda: all(_state(task) in "TtZX" for task in tasks.iterdir()), "the server's stop", 10.0, pause_s=0.001)


def _state(task: Path) -> str:
    """Of a thread, one letter; "X" for one that has gone."""
    try:
        return (task / "stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def resume(server: EmbeddedZooKeeper) -> None:
    """Let a server that was paused go on."""
    os.killpg(server.pid, signal.SIGCONT)


def make_node(role: str = "router", partition: int = 0, port: int = 7000, **changes: object) -> Node:
    """A node of a process that was started just now."""
    node = Node(
        role=role,
        partition=-1 if role in UNPARTITIONED_ROLES else partition,
        replica=-1,
        state=NodeState.INIT,
        host="127.0.0.1",
        port=port,
        http_port=port + 1,
        endpoint=EndpointID(secrets.randbits(63)),
        incarnation=0,
        version="0.1.0",
        wire_hash="abc",
        started_ms=1_751_958_000_000,
    )
    return replace(node, **changes)  # type: ignore[arg-type]
