"""The pure core with a stream that the test plays: a large item goes by stream with its order, and nothing else waits for it."""

from __future__ import annotations

from cluster.links.api import PeerState
from cluster.links.datagrams.head import Codec
from cluster.links.link import MIN_DELAY_S
from cluster.links.options import LinkOptions
from cluster.links.peer.outbox import INFINITY
from cluster.links.peer.sender import STREAM_WAIT_S, Outputs, Sender
from cluster.links.peer.switch import KEEP_S, Switch, order_of
from cluster.links.stats import Counts
from pixiu.ids import EndpointID
from tests.cluster.links.world import Node, World, make_record


class Streams:
    """Carries frames between nodes, when told to."""

    def __init__(self, world: World) -> None:
        self.world = world

    def node(self, id_: EndpointID) -> Node:
        return next(node for node in self.world.nodes if node.id == id_)

    def frames(self, node: Node) -> list[tuple[EndpointID, bytes]]:
        """What left on the stream that a node opened."""
        left, node.core.outputs.frames = node.core.outputs.frames, []
        return left

    def carry(self, sender: Node) -> int:
        """Deliver frames and their acknowledgements. Returns how many frames."""
        frames = self.frames(sender)
        for to, frame in frames:
            assert self.node(to).core.receive_frame(frame, None, "test", self.world.now) == sender.id
        for node in self.world.nodes:
            node.turn()
            replies, node.core.outputs.replies = node.core.outputs.replies, []
            for to, reply in replies:
                assert self.node(to).core.receive_frame(reply, node.id, "test", self.world.now) == node.id
        return len(frames)


def pair(world: World, options: LinkOptions | None = None) -> tuple[Node, Node, Streams]:
    alice, bob = world.node(1, options), world.node(2, options)
    alice.know(bob)
    bob.know(alice)
    world.advance(0.05)
    return alice, bob, Streams(world)


def test_a_large_record_wants_a_stream_and_settles_when_it_was_handled(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.send(bob, [make_record(1, 200_000)], token=1)
    alice.turn()
    assert alice.core.outputs.streams == [bob.id]
    assert streams.frames(alice) == []
    alice.core.stream_connected(bob.id, True, world.now)
    alice.turn()
    assert streams.carry(alice) == 1
    alice.turn()
    assert bob.handler.records == [make_record(1, 200_000)]
    assert alice.handler.settled == [(1, True)]


def test_order_survives_the_switch_to_the_stream_and_back(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1), make_record(2), make_record(3, 200_000), make_record(4), make_record(5, 210_000)], token=1)
    alice.send(bob, [make_record(6)], token=2)
    alice.turn()
    assert streams.frames(alice) == [], "the datagram before it is not acknowledged yet"
    for _ in range(10):
        world.advance(0.02)
        streams.carry(alice)
    assert bob.handler.keys() == [1, 2, 3, 4, 5, 6]
    assert alice.handler.settled == [(1, True), (2, True)]


def test_the_switch_waits_at_most_100_ms_for_datagrams_that_nobody_acknowledges(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1), make_record(2, 200_000)])
    world.advance(0.09, keep=lambda data: False)
    assert streams.frames(alice) == []
    world.advance(0.03, keep=lambda data: False)
    assert len(streams.frames(alice)) == 1


def test_what_is_behind_a_large_record_rides_with_it(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1, 200_000), make_record(2)])
    world.advance(0.05)
    assert bob.handler.keys() == []
    assert streams.carry(alice) == 1
    assert bob.handler.keys() == [1, 2]


def test_other_keys_do_not_wait_for_a_large_record(world: World) -> None:
    alice, bob, streams = pair(world)
    others = [room for room in range(100) if order_of(make_record(1, room=room)) != order_of(make_record(1))]
    assert len(others) > 90
    alice.send(bob, [make_record(1, 200_000), *(make_record(room, room=room) for room in others), make_record(2)], token=1)
    world.settle()
    assert bob.handler.keys() == others, "not even for a stream that is not there"
    alice.core.stream_connected(bob.id, True, world.now)
    alice.turn()
    assert streams.carry(alice) == 1
    assert bob.handler.keys() == [*others, 1, 2]
    alice.turn()
    assert alice.handler.settled == [(1, True)]


def test_an_order_stays_on_the_stream_for_a_while_and_goes_back_when_it_is_acknowledged(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1, 200_000)])
    alice.turn()
    for number in (2, 3):
        streams.carry(alice)
        world.advance(KEEP_S / 4)
        alice.send(bob, [make_record(number)])
        assert alice.turn() == []
        assert streams.frames(alice) != []
    assert bob.handler.keys() == [1]
    world.advance(KEEP_S)
    alice.send(bob, [make_record(4)])
    alice.turn()
    assert streams.frames(alice) != [], "what was before it on the stream is not acknowledged"
    alice.core.stream_connected(bob.id, False, world.now)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(5)])
    world.settle()
    assert bob.handler.keys() == [1, 5]


def test_the_stream_asks_for_the_acknowledgement_that_it_waits_for(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    for number in range(1, 4):
        # The second one comes less than ten milliseconds after an acknowledgement: the next would be late.
        alice.send(bob, [make_record(number)])
        world.settle()
    alice.send(bob, [make_record(4, 200_000)])
    alice.turn()
    world.settle()
    assert streams.carry(alice) == 1
    assert bob.handler.keys() == [1, 2, 3, 4]


def test_without_a_stream_small_records_of_its_key_wait_once(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.send(bob, [make_record(1, 200_000), make_record(2)], token=1)
    world.advance(STREAM_WAIT_S + 0.1)
    assert alice.handler.settled == [(1, False)]
    alice.send(bob, [make_record(3), make_record(4, 200_000), make_record(5)], token=2)
    world.settle()
    assert bob.handler.keys() == [3, 5]
    assert alice.core.stats().dropped == {"push_back": 2, "no_stream": 1}
    assert alice.core.outputs.streams[-1] == bob.id, "and it is asked for again"
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(6, 200_000)], token=3)
    streams = Streams(world)
    for _ in range(3):
        world.advance(0.02)
        streams.carry(alice)
    assert bob.handler.keys() == [3, 5, 6]
    assert alice.handler.settled == [(1, False), (2, False), (3, True)]


def test_a_large_control_message_goes_by_stream_too(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.control(bob, [b"a", b"b" * 200_000, b"c"], token=1)
    for _ in range(5):
        world.advance(0.02)
        streams.carry(alice)
    assert bob.handler.control == [b"a", b"b" * 200_000, b"c"]
    assert alice.handler.settled == [(1, True)]


def test_a_stream_that_breaks_settles_what_was_in_flight_on_it(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1, 200_000)], token=1)
    alice.turn()
    streams.frames(alice)
    alice.core.stream_connected(bob.id, False, world.now)
    alice.turn()
    assert alice.handler.settled == [(1, False)]
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(2, 200_000)], token=2)
    alice.turn()
    streams.carry(alice)
    alice.turn()
    assert alice.handler.settled == [(1, False), (2, True)]
    assert bob.core.stats().total.lost == 1


def test_without_a_stream_a_large_record_is_dropped_after_a_bounded_wait(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.send(bob, [make_record(1, 200_000)], token=1)
    world.advance(STREAM_WAIT_S - 0.1)
    assert alice.handler.settled == []
    world.advance(0.2)
    assert alice.handler.settled == [(1, False)]
    alice.send(bob, [make_record(2)], token=2)
    world.advance(0.1)
    assert bob.handler.keys() == [2]


def test_what_waited_for_the_stream_is_not_dropped_when_it_comes(world: World) -> None:
    alice, bob, streams = pair(world)
    for number in range(1, 301):
        alice.send(bob, [make_record(number, 200_000 if number == 1 else 1000)], token=number)
    world.advance(1.5)
    alice.core.stream_connected(bob.id, True, world.now)
    for _ in range(15):
        world.advance(0.01)
        streams.carry(alice)
    assert bob.handler.keys() == list(range(1, 301))
    assert alice.core.stats().dropped == {}


def test_a_stream_that_hangs_is_reset(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1, 200_000)], token=1)
    world.advance(3.2)
    assert alice.core.outputs.resets == [bob.id]
    assert alice.handler.settled == [(1, False)]


def test_a_frame_of_another_speaker_on_the_same_stream_is_refused(world: World) -> None:
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    alice.send(bob, [make_record(1, 200_000)])
    alice.turn()
    (_, frame) = streams.frames(alice)[0]
    assert bob.core.receive_frame(frame, EndpointID(77), "test", world.now) is None
    assert bob.core.stats().refused == {"sender": 1}
    bob.receive(frame, alice.address)
    assert bob.handler.records == []


def test_the_core_never_asks_to_be_woken_at_once_for_ever(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.send(bob, [make_record(1), make_record(2, 200_000), make_record(3)], token=1)
    wakes = 0
    until = world.now + 4
    while world.now < until:
        world.now = max(world.now + MIN_DELAY_S, alice.core.next_deadline())
        alice.poll()
        alice.core.outputs.datagrams.clear()
        wakes += 1
    assert wakes < 200
    assert alice.handler.settled == [(1, False)]


def test_what_waits_for_a_suspect_peer_does_not_arrive_when_it_is_back(world: World) -> None:
    """Senders have gone to another one meanwhile: it would arrive behind later records."""
    alice, bob, streams = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    world.advance(1.8, keep=lambda data: False)
    alice.core.stream_connected(bob.id, False, world.now)
    alice.send(bob, [make_record(3, 200_000)], token=3)
    while alice.core.state(bob.id) is not PeerState.SUSPECT:
        world.advance(0.1, keep=lambda data: False)
    assert alice.handler.settled == [(3, False)]
    assert alice.core.stats().dropped == {"peer_suspect": 1}
    alice.core.stream_connected(bob.id, True, world.now)
    world.advance(1.5)
    alice.send(bob, [make_record(5, 200_000)], token=5)
    alice.turn()
    streams.carry(alice)
    world.settle()
    assert bob.handler.keys() == [5]


def test_a_stream_that_holds_records_of_a_suspect_peer_is_reset(world: World) -> None:
    alice, bob, _ = pair(world)
    alice.core.stream_connected(bob.id, True, world.now)
    world.advance(1.8, keep=lambda data: False)
    alice.send(bob, [make_record(1, 200_000)], token=1)
    while alice.core.state(bob.id) is not PeerState.SUSPECT:
        world.advance(0.1, keep=lambda data: False)
    assert alice.core.outputs.resets == [bob.id]
    assert alice.handler.settled == [(1, False)]


def test_orders_that_join_later_do_not_make_the_wait_longer() -> None:
    """Every 10 ms a large item of another key, while the datagram before it is always in flight."""
    switch = Switch()
    went_on = []
    for number in range(1, 31):
        switch.enter(number, number, number / 100)
        if switch.may_stream(INFINITY, number + 1, number, number / 100):
            went_on.append(number)
    assert went_on == [11, 22]


def test_nor_does_what_they_have_queued_before_them() -> None:
    switch = Switch()
    switch.enter(1, 1, 0.0)
    assert not switch.may_stream(1, 1, INFINITY, 0.15), "what was queued before the first order has not left"
    for number in range(2, 12):
        now = 0.14 + number / 100
        switch.enter(number, number, now)
        assert not switch.may_stream(number, number, number - 1, now)
    assert switch.may_stream(11, 11, 10, 0.27)


def test_records_do_not_take_back_that_control_asks_for_an_acknowledgement() -> None:
    codec = Codec(EndpointID(1), 65536, 1 << 20)
    sender = Sender(EndpointID(2), LinkOptions(), codec, Outputs(), Counts(), lambda reason, items: None, 1)
    sender.locate(("10.0.0.1", 5))
    sender.connected(True, 0.0)
    sender.queue_records([make_record(1), make_record(2, 30_000)], 1, 0, 0.0)
    sender.pump(0.0)
    assert sender.asks
    sender.asks = False
    sender.queue_control([b"small"], 0, 0.001)
    sender.queue_control([bytes(30_000)], 0, 0.001)
    sender.pump(0.001)
    assert sender.asks
