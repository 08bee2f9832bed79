"""The table of a peer's states, and heartbeats between cores."""

from __future__ import annotations

import itertools

import pytest

from cluster.links.api import PeerState
from cluster.links.datagrams import heartbeat
from cluster.links.datagrams.head import HEAD_SIZE, HEARTBEAT
from cluster.links.link import MIN_DELAY_S
from cluster.links.peer.liveness import TABLE, Event, Liveness
from cluster.trust.key_ring import TAG_SIZE
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import UNMEASURED
from tests.cluster.links.world import World


def test_the_table_says_what_happens_in_every_state() -> None:
    assert set(TABLE) == {(state, event) for state in PeerState for event in Event}


def test_any_sign_of_life_revives_and_nothing_else_does() -> None:
    for (state, event), after in TABLE.items():
        if event is Event.HEARD:
            assert after is PeerState.ALIVE
        elif state is PeerState.DEAD:
            assert after is PeerState.DEAD
        else:
            assert after is (PeerState.SUSPECT if event is Event.MISSED_SOME else PeerState.DEAD)


def test_suspect_after_two_missed_and_dead_after_four() -> None:
    liveness = Liveness(2, 4)
    states = []
    for heard in (True, False, False, False, False, False, True):
        if heard:
            liveness.step(Event.HEARD)
        liveness.heartbeat_due(heard)
        states.append(liveness.state.value)
    assert states == ["alive", "alive", "suspect", "suspect", "dead", "dead", "alive"]


def test_heartbeats_make_peers_alive_and_measure_the_round_trip(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.handler.answer = b"subscribed"
    alice.core.set_attachment(bob.id, b"partition 3", world.now)
    alice.poll()
    world.now += 0.002
    world.deliver()
    assert alice.core.state(bob.id) is PeerState.UNKNOWN
    world.settle()
    assert alice.core.state(bob.id) is PeerState.ALIVE
    assert alice.handler.states == [(bob.id, PeerState.ALIVE)]
    assert (alice.id, False, b"partition 3") in bob.handler.heartbeats
    assert (bob.id, True, b"subscribed") in alice.handler.heartbeats
    assert alice.core.stats().peers[bob.id].rtt_us in range(1_900, 2_200)
    assert alice.core.quality(bob.id).round_trip_us == pytest.approx(2_000, rel=0.1)
    assert alice.core.quality(bob.id).answered == 1.0
    assert bob.core.state(alice.id) is PeerState.UNKNOWN, "it was never set there"


def test_a_silent_peer_becomes_suspect_then_dead_and_comes_back(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    world.advance(1.5)
    assert alice.core.state(bob.id) is PeerState.ALIVE
    world.advance(10, keep=lambda data: False)
    assert [state for _, state in alice.handler.states] == [PeerState.ALIVE, PeerState.SUSPECT, PeerState.DEAD]
    world.advance(1.5)
    assert alice.core.state(bob.id) is PeerState.ALIVE


def test_data_alone_keeps_a_peer_alive(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    world.advance(1.2)
    for _ in range(80):
        bob.control(alice, [b"x"])
        world.advance(0.1, keep=lambda data: data[3] != 3)
    assert alice.core.state(bob.id) is PeerState.ALIVE


def test_a_pause_of_this_process_counts_as_one_missed_heartbeat(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    world.advance(1.5)
    world.now += 60
    world.advance(1.5)
    assert alice.handler.states == [(bob.id, PeerState.ALIVE)]


@pytest.mark.parametrize("key", [b"0123456789abcdef", None])
def test_a_successor_at_the_same_port_makes_the_old_process_dead_at_once(world: World, key: bytes | None) -> None:
    alice, old = world.node(1, key=key), world.node(2, key=key)
    alice.know(old)
    world.advance(1.5)
    world.nodes.remove(old)
    new = world.node(3, key=key)
    new.address = old.address
    alice.send(old, [bytes(36)], token=9)
    world.advance(1.1)
    assert alice.handler.states == [(old.id, PeerState.ALIVE), (old.id, PeerState.DEAD)]
    assert alice.handler.settled == [(9, False)]
    assert alice.core.state(new.id) is PeerState.UNKNOWN
    assert new.handler.heartbeats == []


def test_a_reply_from_another_address_does_not_declare_a_peer_dead(world: World) -> None:
    alice, bob, mallory = world.node(1), world.node(2), world.node(3)
    alice.know(bob)
    world.advance(1.5)
    alice.core.poll(world.now + 1)
    heartbeat = alice.take()[-1]
    mallory.receive(heartbeat, alice.address)
    echo = mallory.take()[-1]
    alice.receive(echo, mallory.address)
    assert alice.core.state(bob.id) is PeerState.ALIVE
    alice.receive(echo, bob.address)
    assert alice.core.state(bob.id) is PeerState.DEAD


def test_a_replayed_heartbeat_is_refused(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    heartbeat = alice.poll()[0]
    bob.receive(heartbeat, alice.address)
    bob.receive(heartbeat, alice.address)
    assert len(bob.handler.heartbeats) == 1
    assert bob.core.refusals.counts == {"old_counter": 1}


def test_heartbeats_that_are_not_answered_lower_the_quality_although_the_peer_is_alive(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    heartbeats = 0

    def every_fifth_is_lost(data: bytes) -> bool:
        nonlocal heartbeats
        heartbeats += data[3] == HEARTBEAT
        return data[3] != HEARTBEAT or heartbeats % 5 != 0

    world.advance(60.0, step=0.05, keep=every_fifth_is_lost)
    assert alice.core.state(bob.id) is not PeerState.DEAD
    assert alice.core.quality(bob.id).answered < 0.9
    assert alice.core.quality(EndpointID(99)) == UNMEASURED


def test_many_heartbeats_leave_together_and_each_peer_has_its_own_in_time(world: World) -> None:
    alice = world.node(1)
    others = [world.node(100 + number) for number in range(500)]
    alice.know(*others)
    left: dict[EndpointID, list[float]] = {}
    wakes, until = 0, world.now + 4
    while world.now < until:
        world.now = max(world.now + MIN_DELAY_S, alice.core.next_deadline())
        alice.core.poll(world.now)
        wakes += 1
        for data, _ in alice.core.outputs.datagrams:
            target = heartbeat.decode(data, HEAD_SIZE, len(data) - TAG_SIZE)
            assert target is not None
            left.setdefault(EndpointID(target.target), []).append(world.now)
        alice.core.outputs.datagrams.clear()
    assert wakes < 1000
    assert set(left) == {other.id for other in others}
    gaps = [later - earlier for times in left.values() for earlier, later in itertools.pairwise(times[1:])]
    assert len(gaps) >= 1000
    assert all(0.99 <= gap <= 1.01 for gap in gaps)
