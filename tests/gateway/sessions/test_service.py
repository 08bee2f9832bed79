"""Sessions of one client begin and end in the order of its connections, over the production state of Pi."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.mqtt.events import Wanted
from cluster.trust.audit import Audit
from cluster.wire.v1 import kept_pb2
from gateway.sessions.queue import SessionState
from gateway.sessions.states import NoteName, SessionNote
from pixiu.errors import NotAllowed
from pixiu.ids import session_uin, topic_room
from tests.gateway.sessions.test_of_tenants import Cluster, Kept
from tests.gateway.world import World
from tests.support.logins import Logins
from tests.support.waiting import until

EXPIRY_S = 600


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    logins = Logins(tmp_path)
    guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    found = Cluster(World(roles=("gateway", "proxy", "router", "broker", "relay", "xiu", "pi")), logins, guard)
    yield found
    await found.sessions.close()
    await guard.close()


async def test_a_clean_start_discards_a_session_whose_end_is_being_stored(cluster: Cluster) -> None:
    sessions = cluster.sessions
    session = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
    await sessions.keep(session, [Wanted("a", 1)])
    sessions.end(session, -1)
    await sessions.discard(7, "phone")
    assert not (await sessions.begin(7, "phone", EXPIRY_S, clean=False)).present


async def test_a_session_begins_after_the_earlier_one_is_discarded(cluster: Cluster) -> None:
    sessions = cluster.sessions
    session = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
    await sessions.keep(session, [Wanted("a", 1)])
    sessions.end(session, -1)
    await until(lambda: not sessions.unfinished)
    await sessions.discard(7, "phone")
    again = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
    assert not again.present
    await sessions.keep(again, [Wanted("a", 1)])
    assert [entry.removed for entry in sorted(cluster.entries, key=lambda entry: entry.version)] == [False, True, False]


async def test_a_session_stays_that_a_client_resumes_while_it_is_being_removed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, read = cluster.sessions, cluster.read
    session = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
    await sessions.keep(session, [Wanted("a", 1)])

    async def resumed_after(uin: int) -> SessionState:
        monkeypatch.undo()
        state = await read(uin)
        again = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
        await sessions.keep(again, [Wanted("a", 1)])
        return state

    monkeypatch.setattr(cluster, "read", resumed_after)
    await sessions.forget(7, "phone")
    assert [each.filter for each in (await cluster.stored(session.uin)).filters] == ["a"]
    assert not max(cluster.entries, key=lambda entry: entry.version).removed


async def test_a_filter_that_a_clean_start_brings_back_is_kept_however_late_the_old_one_is_removed(cluster: Cluster) -> None:
    """Its removal had the version of the new entry, and of two with one version the removed one wins."""
    sessions = cluster.sessions
    session = await sessions.begin(7, "phone", EXPIRY_S, clean=False)
    await sessions.keep(session, [Wanted("a", 1)])
    sessions.end(session, -1)
    await until(lambda: not sessions.unfinished)
    again = await sessions.begin(7, "phone", EXPIRY_S, clean=True)
    await sessions.keep(again, [Wanted("a", 1)])
    await until(lambda: any(entry.removed for entry in cluster.entries))
    last = max(cluster.entries, key=lambda entry: (entry.version, entry.removed))
    assert not last.removed


async def test_nobody_gets_the_session_of_somebody_else(cluster: Cluster) -> None:
    number = session_uin(7, "phone")
    await cluster.write(number, NoteName.SESSION, 1, SessionNote("phone", 8, EXPIRY_S).encode())
    with pytest.raises(NotAllowed):
        await cluster.sessions.begin(7, "phone", EXPIRY_S, clean=True)
    assert (await cluster.stored(number)).uin == 8


def test_a_client_id_cannot_be_made_for_the_inbox_of_another_user() -> None:
    made = "hbevpfzchxnbrdcbhdkyhlqmhflmhvkp4z09Oh{p/)\U00024df3g\x1f"  # in 14 s, for an xxh3
    assert session_uin(1000007, made) != 2000007


@pytest.mark.parametrize("expiry_s", [-1, 0])
async def test_filters_that_are_kept_after_the_end_of_a_connection_do_not_undo_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, expiry_s: int
) -> None:
    sessions, put, may_put = cluster.sessions, cluster.put, asyncio.Event()
    session = await sessions.begin(7, "phone", EXPIRY_S, clean=False)

    async def late(entries: Sequence[kept_pb2.KeptEntry]) -> list[Kept]:
        await may_put.wait()
        return await put(entries)

    monkeypatch.setattr(cluster, "put", late)
    keeping = asyncio.create_task(sessions.keep(session, [Wanted("a", 1)]))
    await asyncio.sleep(0)
    sessions.end(session, expiry_s)
    monkeypatch.undo()
    await until(lambda: not sessions.unfinished)
    may_put.set()
    await keeping
    assert (await cluster.read(session.uin)).exists == bool(expiry_s)
    assert not expiry_s or not (await cluster.stored(session.uin)).connected


async def test_after_a_clean_start_no_gateway_finds_the_session_before_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The client leaves one gateway, starts clean at a second one, and hurries to a third; each call takes its own time.
    chance = random.Random(7)
    read, write, clear = cluster.read, cluster.write, cluster.clear

    async def take_time() -> None:
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)

    async def slow_read(uin: int) -> SessionState:
        await take_time()
        state = await read(uin)
        await take_time()
        return state

    async def slow_write(uin: int, name: int, generation: int, value: bytes) -> None:
        await take_time()
        await write(uin, name, generation, value)
        await take_time()

    async def slow_clear(uin: int, generation: int) -> None:
        await take_time()
        await clear(uin, generation)
        await take_time()

    for name, slow in (("read", slow_read), ("write", slow_write), ("clear", slow_clear)):
        monkeypatch.setattr(cluster, name, slow)
    first, second, third = cluster.sessions, cluster.gateway(), cluster.gateway()
    for number in range(100):
        session = await first.begin(7, f"phone{number}", EXPIRY_S, clean=False)
        await first.keep(session, [Wanted("a", 1)])
        first.end(session, -1)
        await take_time()
        await second.discard(7, f"phone{number}")
        assert not (await third.begin(7, f"phone{number}", EXPIRY_S, clean=False)).present, number


async def test_a_session_goes_when_its_expiry_has_passed_and_stays_if_it_was_resumed_elsewhere(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, other = cluster.sessions, cluster.gateway()
    for client in ("gone", "elsewhere", "here"):
        session = await sessions.begin(7, client, EXPIRY_S, clean=False)
        await sessions.keep(session, [Wanted("a", 1)])
        sessions.end(session, -1)
    await until(lambda: not sessions.unfinished)
    cluster.now += EXPIRY_S
    sessions.sweep()
    assert not sessions.unfinished, "it is not over yet"
    resumed = [await other.begin(7, "elsewhere", EXPIRY_S, clean=False), await sessions.begin(7, "here", EXPIRY_S, clean=False)]
    assert all(each.present for each in resumed)
    cluster.now += 2.0
    monkeypatch.setattr("gateway.sessions.service.is_over", lambda note, _: not note.connected)
    sessions.sweep()
    await until(lambda: not sessions.unfinished and len(cluster.table) == 2)
    assert sessions.expired == 1
    assert set(cluster.table.match(0, topic_room("a"), b"a", 0, 0)) == {each.uin for each in resumed}
    assert not (await cluster.read(session_uin(7, "gone"))).exists
