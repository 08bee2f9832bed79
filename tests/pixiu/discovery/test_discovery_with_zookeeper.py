"""Discovery against a real ZooKeeper: watch, poll, and everything that ZooKeeper may do to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.node import NodeState
from pixiu.discovery.operations import WatchEvent
from pixiu.discovery.view import Layout, RoleLayout, View
from pixiu.discovery.watcher import Discovery
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, RegistryUnavailable
from registry.membership import Membership
from tests.support.waiting import until
from tests.support.zookeeper import connected, expire, make_node, pause, resume


class Watched:
    """A discovery and the views that it gave."""

    def __init__(
        self, zookeeper: ZooKeeper, root: str, poll_interval_s: float = 60.0, roles: tuple[str, ...] = paths.ROLES
    ) -> None:
        self.views: list[View] = []
        self.discovery = Discovery(zookeeper, root, self.views.append, poll_interval_s, roles=roles)

    @property
    def view(self) -> View:
        return self.discovery.view


@pytest.fixture
async def watched(zookeeper: ZooKeeper, root: str) -> AsyncIterator[Watched]:
    watched = Watched(zookeeper, root)
    await watched.discovery.start()
    yield watched
    await watched.discovery.close()


async def test_the_first_view_is_there_when_start_returns_even_of_an_empty_registry(zookeeper: ZooKeeper, root: str) -> None:
    empty = Watched(zookeeper, root)
    await empty.discovery.start()
    assert empty.views == [View()]
    member = Membership(zookeeper, root)
    node = await member.register(make_node("gateway"))
    full = Watched(zookeeper, root)
    await full.discovery.start()
    assert full.views == [View(Layout(), (node,))]
    for one in (empty, full):
        await one.discovery.close()
    await member.unregister()


async def test_a_watch_sees_registrations_states_layouts_and_new_partitions(
    watched: Watched, zookeeper: ZooKeeper, root: str
) -> None:
    router, gateway = Membership(zookeeper, root), Membership(zookeeper, root)
    first = await router.register(make_node("router", 0, port=7000))
    await until(lambda: watched.view.by_endpoint(first.endpoint) == first)
    second = await gateway.register(make_node("gateway", port=7100))
    await until(lambda: watched.view.by_endpoint(second.endpoint) == second)
    assert watched.view.running("router") == ()
    assert await router.set_state(NodeState.RUNNING)
    await until(lambda: watched.view.running("router") == (router.node,))
    late = Membership(zookeeper, root)
    third = await late.register(make_node("router", 3, port=7200))
    await until(lambda: watched.view.replicas("router", 3, (NodeState.INIT,)) == (third,))
    layout = Layout(1, {"router": RoleLayout(4, 4, 1)}, "a" * 16)
    await zookeeper.create(paths.layout(root), layout.to_json())
    await until(lambda: watched.view.layout == layout)
    newer = Layout(2, {"router": RoleLayout(4, 8, 1)}, "a" * 16)
    await zookeeper.set(paths.layout(root), newer.to_json())
    await until(lambda: watched.view.layout == newer)
    await zookeeper.delete(paths.layout(root))
    await router.set_state(NodeState.DRAINING)
    await until(lambda: not watched.view.running("router"))
    await router.unregister()
    await until(lambda: watched.view.by_endpoint(first.endpoint) is None)
    assert watched.view.layout == newer
    for member in (gateway, late):
        await member.unregister()


async def test_a_poll_alone_finds_what_no_watch_told(zookeeper: ZooKeeper, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: Discovery, event: WatchEvent) -> None:
        """No watch is heard."""

    monkeypatch.setattr(Discovery, "_on_watch", deaf)
    watched = Watched(zookeeper, root, poll_interval_s=0.2)
    await watched.discovery.start()
    member = Membership(zookeeper, root)
    node = await member.register(make_node("broker", 1))
    await until(lambda: watched.view.by_endpoint(node.endpoint) == node)
    await member.set_state(NodeState.RUNNING)
    await until(lambda: len(watched.view.running("broker")) == 1)
    await watched.discovery.close()
    await member.unregister()


async def test_only_the_roles_that_were_asked_for_are_seen(zookeeper: ZooKeeper, root: str) -> None:
    members = [Membership(zookeeper, root) for _ in range(2)]
    await members[0].register(make_node("proxy", port=7000))
    broker = await members[1].register(make_node("broker", port=7100))
    watched = Watched(zookeeper, root, roles=("broker",))
    await watched.discovery.start()
    assert watched.view.nodes == (broker,)
    await watched.discovery.close()
    for member in members:
        await member.unregister()
    with pytest.raises(InvalidArgument, match="king"):
        Watched(zookeeper, root, roles=("king",))


async def test_malformed_data_is_counted_and_what_was_known_stays(watched: Watched, zookeeper: ZooKeeper, root: str) -> None:
    member = Membership(zookeeper, root)
    node = await member.register(make_node("proxy"))
    await until(lambda: watched.view.nodes == (node,))
    path = f"{paths.role_directory(root, 'proxy')}/n{node.replica:010}"
    await zookeeper.set(path, b"nonsense")
    await until(lambda: watched.discovery.malformed >= 1)
    before = watched.discovery.malformed
    await zookeeper.create(f"{paths.role_directory(root, 'proxy')}/n", make_node("gateway").to_json(), sequence=True)
    await until(lambda: watched.discovery.malformed > before)
    await zookeeper.create(paths.layout(root), b"[]")
    await until(lambda: watched.discovery.malformed > before + 1)
    assert watched.view == View(Layout(), (node,))
    await member.unregister()


async def test_a_receiver_that_fails_does_not_end_the_updates(zookeeper: ZooKeeper, root: str) -> None:
    views: list[View] = []

    def receive(view: View) -> None:
        views.append(view)
        raise RuntimeError("a bug")

    discovery = Discovery(zookeeper, root, receive)
    await discovery.start()
    member = Membership(zookeeper, root)
    await member.register(make_node("proxy"))
    await until(lambda: len(views) == 2)
    await discovery.close()
    await member.unregister()


async def test_a_process_whose_session_ended_is_held_until_heartbeats_say_dead(
    watched: Watched, zookeeper_server: EmbeddedZooKeeper, root: str
) -> None:
    theirs = await connected(zookeeper_server)
    node = await Membership(theirs, root).register(make_node("broker", state=NodeState.RUNNING))
    await until(lambda: watched.view.nodes == (node,))
    await theirs.close()
    await until(lambda: watched.discovery.held == 1)
    assert watched.view.nodes == (node,)
    watched.discovery.mark_dead(node.endpoint)
    await until(lambda: watched.view.nodes == ())
    assert watched.discovery.held == 0


async def test_one_that_was_said_dead_goes_with_its_registration_unless_it_lives_after_all(
    watched: Watched, zookeeper_server: EmbeddedZooKeeper, root: str
) -> None:
    sessions = [await connected(zookeeper_server) for _ in range(2)]
    dead, alive = [
        await Membership(session, root).register(make_node("broker", port=7000 + 10 * number))
        for number, session in enumerate(sessions)
    ]
    await until(lambda: len(watched.view.nodes) == 2)
    for node in (dead, alive):
        watched.discovery.mark_dead(node.endpoint)
    watched.discovery.mark_alive(alive.endpoint)
    await asyncio.sleep(0)
    assert len(watched.view.nodes) == 2
    for session in sessions:
        await session.close()
    await until(lambda: watched.view.nodes == (alive,) and watched.discovery.held == 1)


async def test_the_observers_own_session_may_end_without_a_change_of_its_view(
    watched: Watched, zookeeper: ZooKeeper, zookeeper_server: EmbeddedZooKeeper, root: str
) -> None:
    theirs = await connected(zookeeper_server)
    member = Membership(theirs, root)
    node = await member.register(make_node("broker"))
    await until(lambda: watched.view.nodes == (node,))
    seen = len(watched.views)
    before = zookeeper.session_id
    await expire(zookeeper)
    await until(lambda: zookeeper.connected and zookeeper.session_id != before)
    assert len(watched.views) == seen
    await member.set_state(NodeState.RUNNING)
    await until(lambda: watched.view.running("broker") == (member.node,))
    await member.unregister()
    await theirs.close()


async def cluster(server: EmbeddedZooKeeper, root: str, session_timeout_s: float) -> tuple[list[ZooKeeper], list[Membership]]:
    """Five processes."""
    sessions = [await connected(server, session_timeout_s) for _ in range(5)]
    members = [Membership(session, root) for session in sessions]
    for number, member in enumerate(members):
        await member.register(make_node("router", number % 2, port=7000 + 10 * number, state=NodeState.RUNNING))
    return sessions, members


async def test_a_zookeeper_that_is_killed_and_started_again_changes_no_view(own_server: EmbeddedZooKeeper, root: str) -> None:
    session = await connected(own_server, 8.0)
    sessions, members = await cluster(own_server, root, 8.0)
    watched = Watched(session, root, poll_interval_s=0.2)
    await watched.discovery.start()
    before = watched.view
    assert len(before.nodes) == 5
    own_server.kill()
    await until(lambda: not any(one.connected for one in (session, *sessions)))
    with pytest.raises(RegistryUnavailable):
        await Discovery(session, root, lambda view: None).start()
    assert await members[0].set_state(NodeState.DRAINING) is False
    await asyncio.to_thread(own_server.start)
    await until(lambda: all(one.connected for one in (session, *sessions)))
    # What could not be written during the outage is written after it, and nothing else has changed.
    await until(lambda: len(watched.view.running("router")) == 4)
    assert len(watched.views) == 2
    assert [node.incarnation for node in watched.view.nodes] == [node.incarnation for node in before.nodes]
    assert watched.discovery.held == 0
    await watched.discovery.close()
    for member, one in zip(members, sessions, strict=True):
        await member.unregister()
        await one.close()
    await session.close()


async def test_a_zookeeper_that_hangs_longer_than_all_sessions_changes_no_view_until_all_registered_anew(
    own_server: EmbeddedZooKeeper, root: str
) -> None:
    session = await connected(own_server, 1.0)
    sessions, members = await cluster(own_server, root, 1.0)
    watched = Watched(session, root)
    await watched.discovery.start()
    before = watched.view
    ids = [one.session_id for one in sessions]
    pause(own_server)
    await until(lambda: not any(one.connected for one in (session, *sessions)))
    await asyncio.sleep(1.5)  # beyond the session time-out: what a hung server misses cannot be seen from outside
    assert watched.view is before
    resume(own_server)
    # The server ends the sessions whose time passed, unless a client was quicker: each either way.
    await until(lambda: all(one.connected for one in (session, *sessions)))
    await until(
        lambda: all(
            member.registrations == (1 if one.session_id == old else 2)
            for member, one, old in zip(members, sessions, ids, strict=True)
        )
    )
    await until(lambda: set(watched.view.nodes) == {member.node for member in members})
    endpoints = {node.endpoint for node in before.nodes}
    assert all({node.endpoint for node in view.running("router")} == endpoints for view in watched.views)
    await watched.discovery.close()
    for member, one in zip(members, sessions, strict=True):
        await member.unregister()
        await one.close()
    await session.close()


async def test_all_sessions_gone_at_once_empty_no_view_and_registrations_replace_the_held_nodes(
    own_server: EmbeddedZooKeeper, root: str
) -> None:
    session = await connected(own_server)
    sessions, members = await cluster(own_server, root, 2.0)
    watched = Watched(session, root)
    await watched.discovery.start()
    before = watched.view
    for one in sessions:
        await expire(one)
    await until(lambda: all(member.registrations == 2 for member in members))
    wanted = {member.node for member in members}
    await until(lambda: set(watched.view.nodes) == wanted)
    assert {node.endpoint for node in before.nodes} == {node.endpoint for node in watched.view.nodes}
    assert all(len(view.nodes) == 5 for view in watched.views)
    for member, one in zip(members, sessions, strict=True):
        await member.unregister()
        await one.close()
    await watched.discovery.close()
    await session.close()


async def test_a_reading_that_somebody_asks_for_does_not_wait_for_the_poll(zookeeper: ZooKeeper, root: str) -> None:
    deaf = Watched(zookeeper, root, 3600.0)
    deaf.discovery._on_watch = lambda event: None  # type: ignore[method-assign]
    await deaf.discovery.start()
    layout = Layout(1, {"router": RoleLayout(4, 4, 1)}, "a" * 16)
    await zookeeper.ensure_path(root)
    await zookeeper.create(paths.layout(root), layout.to_json())
    assert deaf.view.layout == Layout()
    deaf.discovery.poll_within(0.01)
    await until(lambda: deaf.view.layout == layout)
    await deaf.discovery.close()
