"""The asyncio face of ZooKeeper against a real one: operations, watches, sessions, outages."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from pathlib import Path

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery.operations import (
    MAX_DATA_BYTES,
    Check,
    Create,
    Delete,
    NodeExists,
    NoNode,
    NotEmpty,
    RegistryConflict,
    SessionEvent,
    SessionState,
    Set,
    VersionConflict,
    WatchEvent,
    WatchKind,
)
from pixiu.discovery.zookeeper import MAX_IN_FLIGHT, ZooKeeper
from pixiu.errors import InvalidArgument, RegistryUnavailable
from tests.support.waiting import until
from tests.support.zookeeper import connected, expire, pause, resume


async def test_nodes_are_made_read_changed_listed_and_deleted(zookeeper: ZooKeeper, root: str) -> None:
    assert await zookeeper.exists(f"{root}/a") is None
    assert await zookeeper.create(f"{root}/a", b"1", make_parents=True) == f"{root}/a"
    data, stat = await zookeeper.get(f"{root}/a")
    assert (data, stat.version, stat.ephemeral_owner) == (b"1", 0, 0)
    assert (await zookeeper.set(f"{root}/a", b"2", 0)).version == 1
    assert await zookeeper.children(root) == ["a"]
    ephemeral = await zookeeper.create(f"{root}/n", ephemeral=True, sequence=True)
    assert ephemeral == f"{root}/n0000000001"
    found = await zookeeper.exists(ephemeral)
    assert found is not None
    assert found.ephemeral_owner == zookeeper.session_id
    await zookeeper.delete(f"{root}/a", 1)
    assert await zookeeper.exists(f"{root}/a") is None


async def test_conflicts_have_types_of_their_own(zookeeper: ZooKeeper, root: str) -> None:
    await zookeeper.create(f"{root}/a/b", make_parents=True)
    with pytest.raises(NodeExists):
        await zookeeper.create(f"{root}/a")
    with pytest.raises(NoNode):
        await zookeeper.get(f"{root}/x")
    with pytest.raises(NoNode):
        await zookeeper.create(f"{root}/x/y")
    with pytest.raises(VersionConflict):
        await zookeeper.set(f"{root}/a", b"", 9)
    with pytest.raises(NotEmpty):
        await zookeeper.delete(f"{root}/a")
    with pytest.raises(InvalidArgument):
        await zookeeper.set(f"{root}/a", b"x" * (MAX_DATA_BYTES + 1))


async def test_a_transaction_does_all_or_nothing_and_names_the_operation_at_fault(zookeeper: ZooKeeper, root: str) -> None:
    await zookeeper.ensure_path(root)
    results = await zookeeper.transaction([Create(f"{root}/a", b"1"), Create(f"{root}/n", ephemeral=True, sequence=True)])
    assert results == [f"{root}/a", f"{root}/n0000000001"]
    with pytest.raises(VersionConflict, match="/a "):
        await zookeeper.transaction([Create(f"{root}/b"), Set(f"{root}/a", b"2", 7), Delete(f"{root}/n0000000001")])
    assert await zookeeper.children(root) == ["a", "n0000000001"]
    with pytest.raises(RegistryConflict):
        await zookeeper.transaction([Check(f"{root}/a", 3), Create(f"{root}/b")])
    await zookeeper.transaction([Check(f"{root}/a", 0), Delete(f"{root}/n0000000001"), Set(f"{root}/a", b"2", 0)])
    assert (await zookeeper.get(f"{root}/a"))[0] == b"2"


async def test_a_watch_fires_once_in_the_loop_even_when_it_was_set_twice(zookeeper: ZooKeeper, root: str) -> None:
    events: list[WatchEvent] = []
    loops: list[object] = []

    def note(event: WatchEvent) -> None:
        events.append(event)
        loops.append(asyncio.get_running_loop())

    await zookeeper.exists(root, note)
    await zookeeper.create(root, b"1")
    await until(lambda: events)
    await zookeeper.get(root, note)
    await zookeeper.get(root, note)
    await zookeeper.children(root, note)
    await zookeeper.set(root, b"2")
    await zookeeper.set(root, b"3")
    await zookeeper.create(f"{root}/child")
    await until(lambda: len(events) >= 3)
    await zookeeper.get(root)
    assert events == [WatchEvent(kind, root) for kind in (WatchKind.CREATED, WatchKind.CHANGED, WatchKind.CHILD)]
    assert set(loops) == {asyncio.get_running_loop()}


async def test_many_operations_at_once_wait_for_their_turn(zookeeper: ZooKeeper, root: str) -> None:
    await zookeeper.ensure_path(root)
    made = await asyncio.gather(*(zookeeper.create(f"{root}/n", sequence=True) for _ in range(2 * MAX_IN_FLIGHT)))
    assert len(set(made)) == 2 * MAX_IN_FLIGHT


@pytest.mark.slow
async def test_connecting_where_nobody_listens_fails_with_the_address_and_never_blocks_the_loop() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        session = ZooKeeper(address, connect_timeout_s=0.5)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        counter = asyncio.create_task(count())
        with pytest.raises(RegistryUnavailable, match=address):
            await session.connect()
        counter.cancel()
        assert turns > 10
    with pytest.raises(RegistryUnavailable):
        await session.get("/x")


async def test_before_connect_and_after_close_operations_are_refused(zookeeper_server: EmbeddedZooKeeper) -> None:
    session = ZooKeeper(zookeeper_server.address)
    with pytest.raises(RegistryUnavailable):
        await session.get("/")
    await session.connect()
    await session.get("/")
    await session.close()
    await session.close()
    with pytest.raises(RegistryUnavailable):
        await session.get("/")
    with pytest.raises(InvalidArgument):
        await session.connect()


async def test_an_expired_session_is_reported_and_followed_by_a_new_one(zookeeper: ZooKeeper) -> None:
    events: list[SessionEvent] = []
    zookeeper.add_listener(events.append)
    first = zookeeper.session_id
    await expire(zookeeper)
    await until(lambda: events and events[-1].new_session)
    assert [event.state for event in events] == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    assert zookeeper.session_id == events[-1].session_id != first
    await zookeeper.get("/")


async def test_a_server_that_is_killed_and_started_again_keeps_the_session(own_server: EmbeddedZooKeeper) -> None:
    session = await connected(own_server, 8.0)
    events: list[SessionEvent] = []
    session.add_listener(events.append)
    try:
        before = session.session_id
        own_server.kill()
        await until(lambda: not session.connected)
        with pytest.raises(RegistryUnavailable):
            await session.get("/")
        await asyncio.to_thread(own_server.start)
        await until(lambda: session.connected)
        assert session.session_id == before, events
        assert not any(event.new_session for event in events)
    finally:
        await session.close()


async def test_an_operation_on_a_hung_server_ends_and_close_does_not_hang(own_server: EmbeddedZooKeeper) -> None:
    session = ZooKeeper(own_server.address, session_timeout_s=10.0, operation_timeout_s=0.3)
    await session.connect()
    pause(own_server)
    try:
        with pytest.raises(RegistryUnavailable, match="unknown"):
            await session.set("/zookeeper", b"")
        closing = asyncio.create_task(session.close())
        start = time.monotonic()
        await asyncio.sleep(0)
        assert time.monotonic() - start < 1.0
    finally:
        resume(own_server)
    await closing


async def test_connecting_to_a_server_that_never_answers_ends_after_the_time_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pixiu.discovery.zookeeper.CLOSE_TIMEOUT_S", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = ZooKeeper(f"127.0.0.1:{silent.getsockname()[1]}", session_timeout_s=600.0, connect_timeout_s=0.25)
        async with asyncio.timeout(60):
            with pytest.raises(RegistryUnavailable, match=r"within 0\.25 s"):
                await session.connect()


async def test_a_server_that_accepts_a_connection_and_never_answers_costs_no_session(zookeeper_server: EmbeddedZooKeeper) -> None:
    # As a ZooKeeper does now and then while it starts. Twice in a row, so that waits of a whole session time-out lose it.
    writers: list[asyncio.StreamWriter] = []
    silent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal silent
        writers.append(writer)
        if len(writers) in (3, 4):
            silent += len(await reader.read(1_000))
            return
        from_server, to_server = await asyncio.open_connection("127.0.0.1", zookeeper_server.port)
        writers.append(to_server)

        async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(1_000):
                sink.write(data)

        await asyncio.gather(copy(reader, to_server), copy(from_server, writer), return_exceptions=True)

    relay = await asyncio.start_server(serve, "127.0.0.1", 0)
    session = ZooKeeper(f"127.0.0.1:{relay.sockets[0].getsockname()[1]}", session_timeout_s=6.0)
    await session.connect()
    try:
        before = session.session_id
        for writer in writers:
            writer.close()
        await until(lambda: len(writers) >= 6)
        await until(lambda: session.connected)
        assert silent > 0
        assert session.session_id == before
        await session.get("/")
    finally:
        await session.close()
        relay.close()
        for writer in writers:
            writer.close()


@pytest.mark.slow
async def test_a_registry_that_comes_back_from_an_older_backup_is_taken_again(
    own_server: EmbeddedZooKeeper, tmp_path: Path
) -> None:
    session = await connected(own_server, 1.0)
    events: list[SessionEvent] = []
    session.add_listener(events.append)
    await session.ensure_path("/x")
    for number in range(20):
        await session.create(f"/x/{number}", b"")
    own_server.kill()
    shutil.rmtree(tmp_path / "zookeeper" / "data")
    await asyncio.to_thread(own_server.start)
    await until(lambda: session.connected)
    assert await session.exists("/x") is None
    assert events[-1].new_session, "whoever keeps nodes there makes them again"
    await session.close()
