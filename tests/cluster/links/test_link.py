"""The core of a process's links: what arrives, what settles, what is dropped. No sockets, no waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.links import link as link_module
from cluster.links.api import Outcome, PeerState
from cluster.links.datagrams.acknowledgement import _BODY
from cluster.links.datagrams.head import ACKNOWLEDGEMENT, RECORDS
from cluster.links.options import LinkOptions
from cluster.links.peer.window import INITIAL_BYTES
from cluster.metrics.metrics import Metrics, link_samples
from pixiu.ids import EndpointID
from tests.cluster.links.world import Node, World, flood, make_record
from tests.support.alerts import firing


@pytest.fixture
def pair(world: World) -> tuple[Node, Node]:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    for node in (alice, bob):
        node.poll()
    world.settle()
    return alice, bob


def is_items(data: bytes) -> bool:
    return data[3] <= 2


def test_a_parcel_that_somebody_waits_for_is_acknowledged_at_the_end_of_the_turn(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    world.advance(0.05)
    for token, urgent in ((1, False), (2, False), (3, True)):
        alice.send(bob, [make_record(token)], token=token, urgent=urgent)
        world.settle()
        expected = [(1, True)] if token < 3 else [(1, True), (2, True), (3, True)]
        assert alice.handler.settled == expected, "the clock stands still"


def test_control_messages_are_acknowledged_at_once_unless_the_role_answers_them(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    world.advance(0.05)
    for token, outcome in ((1, Outcome.ANSWERED), (2, Outcome.ANSWERED), (3, Outcome.TAKEN)):
        bob.handler.outcome = outcome
        alice.control(bob, [b"hello"], token)
        world.settle()
        expected = [(1, True)] if token < 3 else [(1, True), (2, True), (3, True)]
        assert alice.handler.settled == expected, "the clock stands still"


def test_many_that_somebody_waits_for_cost_one_acknowledgement_a_turn(world: World) -> None:
    alice, bob = world.node(1), world.node(2)
    alice.know(bob)
    bob.know(alice)
    world.advance(0.05)
    for token in range(1, 21):
        alice.send(bob, [make_record(token)], token=token, urgent=True)
        alice.turn()
    world.deliver()
    before = bob.core.stats().total.acknowledgements_sent
    world.settle()
    assert bob.core.stats().total.acknowledgements_sent == before + 1
    assert alice.handler.settled == [(token, True) for token in range(1, 21)]


def test_datagrams_keep_to_their_size(world: World) -> None:
    alice, near, far = world.node(1), world.node(2), world.node(3)
    far.address = ("192.0.2.1", 7000)
    alice.know(near, far)
    records = [make_record(number) for number in range(200)]
    for other, limit in ((near, 8192), (far, 1400)):
        alice.send(other, records)
        sizes = [len(data) for data in alice.turn()]
        assert limit - 140 < max(sizes) <= limit


def test_an_acknowledgement_leaves_only_after_the_turn_in_which_data_was_handled(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    carol = world.node(3)
    bob.know(alice, carol)
    world.settle()
    alice.send(bob, [make_record(1)])
    alice.turn()
    world.deliver()
    bob.send(carol, bob.handler.records)
    left = bob.turn()
    assert [data[3] for data in left] == [1, 4], "what the handler handed on leaves first"


def test_a_busy_link_acknowledges_every_64_datagrams_or_10_ms(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    acknowledged = []
    for number in range(130):
        alice.send(bob, [make_record(number)])
        alice.turn()
        world.deliver()
        if any(data[3] == 4 for data in bob.turn()):
            acknowledged.append(number)
    assert acknowledged == [0, 64, 128]
    world.now += 0.011
    assert [data[3] for data in bob.turn()] == [4]


def test_control_is_acknowledged_in_the_same_turn(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for token in range(1, 6):
        alice.control(bob, [b"x"], token=token)
        alice.turn()
        world.deliver()
        assert [data[3] for data in bob.turn()] == [4]
    world.settle()
    assert alice.handler.settled == [(token, True) for token in range(1, 6)]


def test_a_lost_datagram_settles_its_parcels_as_not_handled_and_no_others(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for token in (1, 2, 3):
        alice.send(bob, [make_record(token)], token=token)
        alice.turn()
        world.deliver(lambda data, token=token: not (is_items(data) and token == 2))  # type: ignore[misc]
    world.advance(0.05)
    assert sorted(alice.handler.settled) == [(1, True), (2, False), (3, True)]
    assert bob.core.stats().total.lost == 1
    assert alice.core.stats().total.sent_lost == 1


def test_a_parcel_over_several_datagrams_is_handled_only_when_all_of_it_was(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(number) for number in range(150)], token=1)
    assert len(alice.turn()) == 3
    dropped = alice.sent.pop(1)
    world.advance(0.05)
    assert alice.handler.settled == [(1, False)]
    bob.receive(dropped[0])
    assert bob.core.stats().total.reordered > 0
    assert bob.core.stats().total.lost == 0
    assert len(bob.handler.records) == 150


def test_a_duplicate_is_refused_and_counted(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1), make_record(2)])
    data = alice.turn()[0]
    for _ in range(3):
        bob.receive(data)
    assert bob.handler.keys() == [1, 2]
    assert bob.core.stats().total.duplicates == 4
    assert bob.core.stats().refused == {"duplicate": 2}


def test_datagrams_that_overtake_each_other_all_arrive(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    for number in range(10):
        alice.send(bob, [make_record(number)])
        alice.turn()
    alice.sent.reverse()
    world.deliver()
    assert bob.handler.keys() == list(range(9, -1, -1))
    total = bob.core.stats().total
    assert (total.lost, total.reordered, total.duplicates) == (0, 9, 0)


def test_a_heartbeat_reveals_a_lost_tail(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1)], token=1)
    alice.turn()
    alice.sent.clear()
    world.advance(0.2)
    assert alice.handler.settled == [(1, False)]
    assert bob.core.stats().total.lost == 1


def test_a_lost_acknowledgement_comes_again(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1)], token=1)
    world.advance(0.05, keep=lambda data: data[3] != 4)
    assert alice.handler.settled == []
    world.advance(0.2)
    assert alice.handler.settled == [(1, True)]
    assert bob.handler.keys() == [1]


def test_a_replayed_acknowledgement_is_refused(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.control(bob, [b"x"], token=1)
    alice.turn()
    world.deliver()
    old = bob.turn()[0]
    bob.core.receive_buffer_given(2 << 20)
    alice.control(bob, [b"y"], token=2)
    world.settle()
    window = alice.core.stats().peers[bob.id].window_bytes
    alice.receive(old, bob.address)
    assert alice.core.stats().peers[bob.id].window_bytes == window == 1 << 20
    assert alice.core.stats().refused == {"old_counter": 1}
    assert alice.handler.settled == [(1, True), (2, True)]


def test_a_datagram_recorded_for_a_process_is_refused_by_its_successor(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    alice.send(bob, [make_record(1)])
    data = alice.turn()[0]
    successor = world.node(99)
    successor.receive(data, alice.address)
    assert successor.handler.records == []
    assert successor.core.stats().refused == {"tag": 1}
    carol = world.node(3)
    carol.receive(data, alice.address)
    assert carol.core.stats().refused == {"tag": 1}


def test_without_keys_a_successor_refuses_what_was_meant_for_its_predecessor(world: World) -> None:
    alice, bob, successor = world.node(1, key=None), world.node(2, key=None), world.node(3, key=None)
    alice.know(bob)
    alice.send(bob, [make_record(1)])
    successor.receive(alice.turn()[0], alice.address)
    assert successor.core.stats().refused == {"destination": 1}
    assert successor.core.stats().peers == {}


def test_a_forged_datagram_changes_nothing(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    mallory = Node(world, 1, LinkOptions(), b"not the key ring")
    mallory.know(bob)
    mallory.send(bob, [make_record(666)] * 100)
    for data in mallory.turn():
        bob.receive(data, alice.address)
    assert bob.handler.records == []
    alice.send(bob, [make_record(1)], token=1)
    world.settle()
    assert bob.handler.keys() == [1]
    assert alice.handler.settled == [(1, True)]


def test_input_is_warned_of_once_a_minute_for_each_address(world: World, pair: tuple[Node, Node]) -> None:
    _, bob = pair
    for _ in range(100):
        bob.receive(b"nonsense" * 10, ("192.0.2.7", 5))
    assert len(bob.warnings) == 1
    assert "nonsense" not in str(bob.warnings)
    bob.receive(b"nonsense" * 10, ("192.0.2.8", 5))
    world.now += 61
    bob.receive(b"nonsense" * 10, ("192.0.2.7", 5))
    assert len(bob.warnings) == 3
    assert bob.core.stats().refused == {"key": 102}


def test_what_does_not_fit_into_the_window_waits_for_the_acknowledgement(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    flood(alice, bob, 200)
    alice.turn()
    assert alice.core.stats().peers[bob.id].in_flight_bytes <= INITIAL_BYTES
    assert alice.core.stats().peers[bob.id].queued_bytes > 0
    world.advance(0.1)
    assert bob.handler.keys() == list(range(1, 201))
    assert alice.handler.settled == [(token, True) for token in range(1, 201)]
    assert alice.core.stats().peers[bob.id].window_bytes > INITIAL_BYTES


def test_a_small_window_is_filled_although_more_follows(world: World) -> None:
    alice, bob = world.node(1), world.node(2, LinkOptions(receive_buffer_bytes=65_536))
    alice.know(bob)
    bob.know(alice)
    world.advance(0.1)
    for number in range(1, 201):
        alice.send(bob, [make_record(number, 1024)], urgent=True, more=True)
        world.settle()
    waiting = 200 - len(bob.handler.keys())
    assert waiting * 1024 < 32 << 10, "no more than the window takes wait; the clock stands still"


def test_dropped_records_are_an_alert(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    metrics = Metrics("proxy")
    metrics.collect_from(lambda: link_samples(*alice.core.stats_by_peer(), str))
    before = {"proxy": asyncio.run(metrics.render())}
    assert firing(before, before) == set()
    flood(alice, bob, 200)
    world.advance(0.5, keep=lambda data: False)
    assert firing(before, {"proxy": asyncio.run(metrics.render())}) == {"PixiuLinksDrop"}


def test_how_long_a_batch_has_waited_is_told_when_it_leaves(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    waited: list[float] = []
    alice.core.outputs.waited = waited.append
    flood(alice, bob, 200)
    alice.turn()
    assert alice.core.stats().peers[bob.id].queued_bytes > 0
    world.advance(0.1)
    assert waited[0] == 0.0
    assert 0.0 < max(waited) <= 0.1, "what waited for the window"


def test_records_that_wait_too_long_are_dropped_oldest_first_and_counted(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    carol = world.node(3)
    alice.know(bob, carol)
    world.settle()
    flood(alice, bob, 200)
    world.advance(0.1, keep=lambda data: False)
    alice.send(bob, [make_record(500)], token=500)
    world.advance(0.15, keep=lambda data: False)
    dropped = [token for token, handled in alice.handler.settled if not handled]
    assert len(dropped) > 100
    assert dropped == sorted(dropped)
    assert 500 not in dropped
    assert alice.core.stats().dropped == {"push_back": len(dropped)}
    assert alice.core.stats().peers[bob.id].counts.queue_drops == len(dropped)
    alice.send(carol, [make_record(1)], token=1000)
    world.settle()
    assert carol.handler.keys() == [1], "the slow one does not affect others"


def test_a_stalled_receiver_gets_probes_and_the_flow_recovers(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    flood(alice, bob, 100)
    alice.turn()
    alice.sent.clear()
    probes = 0
    for _ in range(100):
        world.now += 0.01
        alice.send(bob, [make_record(7, 1000)])
        probes += sum(is_items(data) for data in alice.poll())
        alice.sent.clear()
    assert 8 <= probes <= 11
    assert alice.core.state(bob.id) is PeerState.ALIVE
    world.advance(1.2)
    bob.handler.records.clear()
    flood(alice, bob, 50)
    world.settle()
    assert bob.handler.keys() == list(range(1, 51))


def test_after_3_s_of_silence_all_settles_and_the_peer_is_dead(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    flood(alice, bob, 10)
    alice.control(bob, [b"x"], token=99)
    world.advance(3.05, keep=lambda data: False)
    assert sorted(alice.handler.settled) == [(token, False) for token in [*range(1, 11), 99]]
    assert alice.core.state(bob.id) is PeerState.DEAD
    alice.send(bob, [make_record(1)], token=100)
    alice.turn()
    assert alice.handler.settled[-1] == (100, False)
    assert alice.core.stats().dropped == {"peer_dead": 1}
    world.advance(1.5)
    alice.send(bob, [make_record(5)], token=101)
    world.settle()
    assert alice.handler.settled[-1] == (101, True)
    assert bob.handler.keys() == [5]


def test_senders_that_are_not_in_the_view_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_SENDERS", 32)
    bob = world.node(2)
    friend = world.node(3)
    bob.know(friend)
    for number in range(100, 200):
        stranger = Node(world, number, LinkOptions(), b"0123456789abcdef")
        stranger.know(bob)
        stranger.send(bob, [make_record(number)])
        for data in stranger.turn():
            bob.receive(data, stranger.address)
        world.now += 0.01
    peers = bob.core.stats().peers
    assert len(peers) <= 33
    assert friend.id in peers
    assert EndpointID(199) in peers
    assert EndpointID(100) not in peers
    assert bob.core.stats().total.records_received == 100


def test_windows_share_half_the_real_buffer_between_the_active_senders(world: World) -> None:
    bob = world.node(2)
    bob.core.receive_buffer_given(4 << 20)
    senders = [world.node(number) for number in (10, 11, 12, 13)]
    for sender in senders:
        sender.know(bob)
        sender.send(bob, [make_record(1)])
        world.settle()
    assert senders[-1].core.stats().peers[bob.id].window_bytes == (2 << 20) // 4
    world.now += 2
    senders[0].send(bob, [make_record(2)])
    world.settle()
    assert senders[0].core.stats().peers[bob.id].window_bytes == 2 << 20


def test_the_layout_version_of_a_peer_is_known(world: World, pair: tuple[Node, Node]) -> None:
    alice, bob = pair
    data = alice.core.codec.pack(RECORDS, 0, 1, 1, 77, bob.id, [make_record(1)])
    bob.receive(data, alice.address)
    assert bob.core.layout_of(alice.id) == 77
    assert bob.handler.keys() == [1]


def test_random_loss_duplication_and_reordering_never_lie(world: World, pair: tuple[Node, Node]) -> None:
    import random

    chance = random.Random(4)
    alice, bob = pair
    token = 0
    for _ in range(600):
        world.now += 0.004
        for _ in range(chance.randint(0, 4)):
            token += 1
            alice.send(bob, [make_record(token)], token=token, lane=chance.randint(0, 1))
        for node in (alice, bob):
            node.poll()
            traffic = [one for one in node.sent for _ in range(chance.choice((0, 1, 1, 1, 1, 2)))]
            chance.shuffle(traffic)
            node.sent = traffic
        world.deliver()
    world.advance(5)
    arrived = bob.handler.keys()
    assert len(arrived) == len(set(arrived)), "nothing arrives twice"
    assert sorted(token for token, _ in alice.handler.settled) == list(range(1, token + 1)), "everything settles once"
    handled = {token for token, good in alice.handler.settled if good}
    assert handled <= set(arrived), "what is settled as handled was handled"
    assert len(handled) > token / 2


def test_an_acknowledgement_near_the_end_of_numbers_is_malformed_and_harms_nobody() -> None:
    world = World()
    broker, liar, honest = world.node(1), world.node(2), world.node(3)
    for node in (broker, liar, honest):
        node.know(*(other for other in world.nodes if other is not node))
    broker.send(liar, [make_record(1)])
    broker.send(honest, [make_record(2)])
    world.settle()
    body = _BODY.pack((1 << 64) - 1, 1, 1, 1, 65536, 0, 0)
    broker.receive(liar.core.codec.pack(ACKNOWLEDGEMENT, 0, 0, 1 << 40, 0, broker.id, [body]), liar.address)
    for number in range(3, 6):
        broker.send(liar, [make_record(number)])
        broker.send(honest, [make_record(number)])
        world.settle()
    assert len(honest.handler.keys()) == len(liar.handler.keys()) == 4
    assert broker.core.stats().refused == {"malformed_acknowledgement": 1}


def test_a_link_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    broker, broken, honest = world.node(1), world.node(2), world.node(3)
    for node in (broker, broken, honest):
        node.know(*(other for other in world.nodes if other is not node))

    def raises(now: float, least: int = 0) -> None:
        raise ValueError("a bug")

    broker.send(broken, [make_record(1)], token=7)
    broker.send(honest, [make_record(2)])
    monkeypatch.setattr(broker.core._links[broken.id], "sender", Broken(broker.core._links[broken.id].sender, raises))
    world.settle()
    assert len(honest.handler.keys()) == 1
    assert broker.core.stats().refused == {"link_raised": 1}


class Broken:
    """A sender that raises."""

    def __init__(self, sender: Any, pump: Callable[..., None]) -> None:
        self.__dict__.update(_sender=sender, pump=pump)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_sender"], name)
