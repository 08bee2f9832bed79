"""What a role may rely on, whether a peer is another process or in this one."""

from __future__ import annotations

import pytest

from cluster.links.api import PeerState
from cluster.links.options import LinkOptions
from pixiu.ids import EndpointID
from tests.cluster.links.world import Node, World, flood, make_record


@pytest.fixture(params=["datagrams", "one process"])
def world(request: pytest.FixtureRequest) -> World:
    return World(local=request.param == "one process")


@pytest.fixture
def pair(world: World) -> tuple[Node, Node]:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    for node in (alice, bob):
        node.poll()
    world.settle()
    return alice, bob


def test_a_parcel_arrives_whole_and_settles_as_handled(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    records = [make_record(number) for number in range(200)]
    alice.send(bob, records, token=7)
    world.settle()
    assert bob.handler.records == records
    assert alice.handler.settled == [(7, True)]
    assert bob.core.stats().total.records_received == 200
    assert alice.core.stats().total.records_sent == 200


def test_an_empty_parcel_settles_as_handled(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [], token=1)
    world.settle()
    assert alice.handler.settled == [(1, True)]


def test_nothing_leaves_before_the_end_of_the_turn_and_then_it_is_joined(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for number in range(30):
        alice.send(bob, [make_record(number)])
    assert (alice.batches_sent(), bob.handler.batches) == (0, [])
    alice.turn()
    assert alice.batches_sent() == 1
    world.settle()
    assert bob.handler.batches == [30]


def test_control_leaves_before_records_and_lane_0_before_lane_1(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1), make_record(2)], lane=1)
    alice.send(bob, [make_record(3)], lane=0)
    alice.control(bob, [b"control"])
    world.settle()
    assert bob.handler.arrived[0] == "control"
    assert bob.handler.control == [b"control"]
    assert bob.handler.keys() == [3, 1, 2]


def test_a_malformed_batch_is_dropped_whole_and_its_sender_learns_it(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    bob.handler.accept = False
    alice.send(bob, [make_record(1)], token=1)
    world.settle()
    bob.handler.accept = True
    alice.send(bob, [make_record(2)], token=2)
    world.advance(0.05)
    assert alice.handler.settled == [(1, False), (2, True)]
    assert bob.core.stats().refused == {"malformed_records": 1}
    assert bob.handler.keys() == [2]


def test_a_handler_that_raises_does_not_stop_the_link(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    bob.handler.error = RuntimeError("a bug")
    alice.send(bob, [make_record(1)], token=1)
    world.settle()
    bob.handler.error = None
    alice.send(bob, [make_record(2)], token=2)
    world.advance(0.05)
    assert alice.handler.settled == [(1, False), (2, True)]
    assert bob.core.stats().refused == {"handler_raised": 1}


def test_what_is_followed_by_more_waits_for_it_twenty_milliseconds_at_most(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1)], token=1, more=True)
    world.advance(0.01, step=0.001)
    alice.send(bob, [make_record(2)], token=2, urgent=True, more=True)
    alice.control(bob, [b"something else"])
    world.advance(0.008, step=0.001)
    assert (bob.handler.records, bob.handler.control) == ([], [b"something else"]), "control messages wait for no record"
    world.advance(0.004, step=0.001)
    assert bob.handler.keys() == [1, 2]
    world.settle()
    assert alice.handler.settled == [(1, True), (2, True)]
    assert alice.batches_sent() == 2, "one of records"


@pytest.mark.parametrize("to", ["the same", "another"])
def test_what_is_followed_by_nothing_takes_what_waits_with_it(world: World, pair: tuple[Node, Node], to: str) -> None:
    alice, bob = pair
    other = world.node(3)
    alice.know(bob, other)
    alice.send(bob, [make_record(1)], more=True)
    alice.turn()
    alice.send(bob if to == "the same" else other, [make_record(2)])
    world.settle()
    assert [*bob.handler.keys(), *other.handler.keys()] == [1, 2], "the clock stands still"
    alice.send(bob, [make_record(3)], more=True)
    alice.turn()
    assert bob.handler.keys()[-1] != 3, "the next may wait again"


def test_enough_of_what_is_followed_by_more_leaves_at_once(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    other = world.node(3)
    alice.know(bob, other)
    flood(alice, bob, 200)
    world.advance(0.1)  # the window grows
    alice.send(other, [make_record(1)], more=True)
    for number in range(1001, 1019):
        alice.send(bob, [make_record(number, 4096)], more=True)
        world.settle()
    assert bob.handler.keys()[200:] == list(range(1001, 1017)), "64 KiB with what it costs to queue them"
    assert other.handler.keys() == []
    alice.core.flush(world.now, every=True)
    world.settle()
    assert other.handler.keys() == [1], "a process that ends keeps nothing back"


def test_a_removed_peer_settles_everything(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    flood(alice, bob, 100)
    alice.know()
    alice.turn()
    assert sorted(alice.handler.settled) == [(token, False) for token in range(1, 101)]
    assert alice.core.state(bob.id) is PeerState.UNKNOWN


def test_a_peer_that_comes_back_after_removal_goes_on_in_its_sequence(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1)], token=1)
    world.settle()
    alice.know()
    alice.know(bob)
    alice.send(bob, [make_record(2)], token=2)
    world.advance(0.1)
    assert alice.handler.settled == [(1, True), (2, True)]
    assert bob.handler.keys() == [1, 2]


def test_an_unknown_peer_settles_at_once(world: World, pair: tuple[Node, Node]) -> None:
    alice, _ = pair
    alice.core.send_records(EndpointID(12345), [make_record(1)], 1, 3, world.now)
    alice.turn()
    assert alice.handler.settled == [(3, False)]
    assert alice.core.stats().dropped == {"unknown_peer": 1}


def test_a_sender_that_is_not_in_the_view_is_heard_and_can_be_answered(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    alice.send(bob, [make_record(1)], token=1)
    world.settle()
    assert alice.handler.settled == [(1, True)]
    assert bob.core.state(alice.id) is PeerState.UNKNOWN
    bob.send(alice, [make_record(2)], token=2)
    bob.control(alice, [b"answer"], token=3)
    world.settle()
    assert alice.handler.keys() == [2]
    assert sorted(bob.handler.settled) == [(2, True), (3, True)]
    assert bob.handler.states == []


def test_a_full_queue_drops_and_settles(world: World) -> None:
    alice, bob = world.node(1, LinkOptions(max_queue_bytes=2 << 20)), world.node(2)
    alice.know(bob)
    for token in range(1, 31):
        alice.send(bob, [make_record(token, 1000)] * 100, token=token)
    alice.turn()
    alice.turn()
    assert (1, False) in alice.handler.settled
    assert not any(token == 30 for token, _ in alice.handler.settled)
    assert alice.core.stats().dropped["queue_full"] == alice.core.stats().total.queue_drops > 0


def test_a_record_above_the_limit_is_refused(world: World) -> None:
    alice, bob = world.node(1, LinkOptions(max_record_bytes=50_000)), world.node(2)
    alice.know(bob)
    alice.send(bob, [make_record(1), make_record(2, 50_001)], token=1)
    alice.turn()
    assert alice.handler.settled == [(1, False)]
    assert alice.core.stats().dropped == {"too_large": 2}


def test_a_changed_attachment_leaves_at_once(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    alice.poll()
    world.settle()
    before = len(bob.handler.heartbeats)
    alice.core.set_attachment(bob.id, b"new", world.now)
    alice.core.set_attachment(bob.id, b"new", world.now)
    world.settle()
    assert bob.handler.heartbeats[before:] == [(alice.id, False, b"new")]
