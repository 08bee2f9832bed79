"""A join for which a router or relay has no space is refused to the client, and to nobody else."""

from __future__ import annotations

import itertools

from cluster.core.contract import NEVER, Tick
from cluster.membership.map.lww_map import INSTANCE_SHIFT
from cluster.membership.map.updates import Update
from gateway import events as ev
from gateway.core import Core
from gateway.membership.reporter import MembershipReporter
from pixiu.ids import EndpointID, topic_room
from pixiu.wire.record import Kind, encode
from tests.gateway.world import fan_out, memberships, of, turn
from tests.support.filters import names, wants

ROUTER, RELAY = EndpointID(101), EndpointID(301)


def gateway() -> Core:
    core = Core(instance=3, generation=5)
    core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 0.0)
    return core


def refuse(core: Core, effects: list[ev.Effect], *rooms: int, peer: EndpointID = ROUTER, now: float = 1.1) -> list[ev.Effect]:
    """The router refuses these rooms of what was said, and confirms the others."""
    said = [message for send in memberships(effects) for message in send.messages]
    refused = [message.id for message in said if message.group in rooms]
    return turn(core, ev.Confirmed(peer, [m.id for m in said if m.id not in refused], refused=refused), now=now)


def test_each_room_of_a_request_is_answered_for_itself() -> None:
    core = gateway()
    said = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants(42, 43)))
    effects = refuse(core, said, 43)
    assert of(ev.Answer, effects) == [ev.Answer(1, 9, True, frozenset({"room/43"}))]
    assert [deliver.connections for deliver in fan_out(core, encode(Kind.ROOM, 42, b"hi", 1))] == [(1,)]
    assert fan_out(core, encode(Kind.ROOM, 43, b"hi", 2)) == []


def test_what_was_refused_is_not_on_this_gateway_for_routers_either() -> None:
    """Else their digests and this gateway's would differ for ever."""
    core = gateway()
    refuse(core, turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants(43))), 43)
    assert core.heartbeat(0, 1).digest.count == 0


def test_of_a_stream_of_records_the_whole_request_is_refused() -> None:
    """Its protocol has one answer for a request."""
    core = gateway()
    said = turn(core, ev.Opened(1, 7, 0), ev.Join(1, 9, wants(42, 43)))
    effects = refuse(core, said, 43)
    assert of(ev.Answer, effects) == [ev.Answer(1, 9, True, frozenset({"room/42", "room/43"}))]
    assert fan_out(core, encode(Kind.ROOM, 42, b"hi", 1)) == []


def test_a_topic_is_refused_with_the_room_that_carries_it() -> None:
    core = gateway()
    key = topic_room("home/a")
    said = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants("home/a", "home/b", 42)))
    (answer,) = of(ev.Answer, refuse(core, said, key))
    assert answer.refused == {"home/a", "home/b"}


def test_who_was_told_already_stays_and_is_tried_again() -> None:
    """A client that was answered without a confirmation is in the room as soon as there is space."""
    core = gateway()
    said = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants(43)))
    assert ev.Answer(1, 9, False) in turn(core, now=11.1) + core.step(Tick(), 11.1)
    assert of(ev.Answer, refuse(core, said, 43, now=12.0)) == []
    due = core.next_deadline()
    assert due > 20.0
    (again,) = memberships(turn(core, now=due))
    assert [message.group for message in again.messages] == [43]


def test_messages_to_the_user_are_refused_when_relays_are_full() -> None:
    core = gateway()
    core.step(ev.RelaysChanged(1, (ev.Replica(RELAY, 0),)), 0.0)
    said = turn(core, ev.Opened(1, 7, 3, device=5), ev.Join(1, 9, [], chat=True))
    effects = refuse(core, said, 7, peer=RELAY)
    assert of(ev.Answer, effects) == [ev.Answer(1, 9, True, user_refused=True)]
    assert core.index.users == {}


def test_a_refused_join_whose_client_has_left_is_looked_at_once_more() -> None:
    """Not for ever: a deadline that has passed, and nothing done about it, is a busy loop."""
    core = gateway()
    said = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants(43)))
    left = memberships(refuse(core, said, 43))
    turn(core, ev.Confirmed(ROUTER, [message.id for send in left for message in send.messages]), now=1.2)
    for _ in range(4):
        due = core.next_deadline()
        if due == NEVER:
            return
        core.step(Tick(), due)
        turn(core, now=due)
        assert core.next_deadline() > due


def test_what_one_copy_refused_and_the_other_confirmed_is_not_said_again_to_that_partition() -> None:
    """While routers double, the other partition may still have to confirm it."""
    first, second = 5 << INSTANCE_SHIFT, itertools.count(1)
    reporter = MembershipReporter(5, lambda: first + 1, lambda: next(second))
    parent, child = EndpointID(11), EndpointID(12)
    reporter.set_replicas(1, (ev.Replica(parent, 0), ev.Replica(child, 1)), 0.0)
    reporter.announce([Update(first + 1, 7, 9, True)], 0.0)
    reporter.flush(0.0)
    reporter.refused(parent, [first + 1], 0.01)
    reporter.flush(0.02)
    reporter.confirmed(parent, [first + 1])
    assert {effect.peer for effect in of(ev.SendMembership, reporter.flush(11.0))} == {child}
    reporter.confirmed(child, [first + 1])
    assert reporter.unconfirmed == 0
    for now in (12.0, 30.0):
        assert reporter.flush(now) == []
    assert reporter.next_deadline() == NEVER


def test_a_gateway_of_which_something_newer_is_known_ends_unless_it_said_that_itself() -> None:
    core = gateway()
    joined = turn(core, ev.Opened(1, 7, 3), ev.Join(1, 9, wants(42)))
    (join,) = {message.id for send in memberships(joined) for message in send.messages}
    assert of(ev.Fenced, turn(core, ev.Confirmed(RELAY, [], stale=[join]), now=1.1)) == []
    left = turn(core, ev.Leave(1, names(42)), now=1.2)
    (leave,) = {message.id for send in memberships(left) for message in send.messages}
    # A repeat of the join was overtaken by the departure, as happens on any network.
    assert of(ev.Fenced, turn(core, ev.Confirmed(ROUTER, [], stale=[join]), now=1.3)) == []
    effects = turn(core, ev.Confirmed(ROUTER, [], stale=[join, leave]), now=1.4)
    assert of(ev.Fenced, effects) == [ev.Fenced()]
    assert of(ev.Answer, effects) == []
