"""What the gateway's core does against lost messages: says it twice, answers routers, says what is not here, is fenced."""

from __future__ import annotations

import pytest

from cluster.core.contract import SendControl
from cluster.links.api import Outcome
from cluster.membership.map.digest import DigestRule
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from gateway.core import Core
from gateway.membership.feedback import MAX_ROOMS, Feedback
from gateway.membership.reporter import FEW_MEMBERS, REPEAT_S
from pixiu.ids import EndpointID, gateway_msg_id, topic_room
from pixiu.wire.record import Kind, encode
from tests.gateway.world import arrive, hand_over, of, turn
from tests.support.filters import names, wants

R1, R2 = EndpointID(101), EndpointID(102)
INSTANCE, GENERATION = 3, 5


def gateway() -> Core:
    core = Core(instance=INSTANCE, generation=GENERATION)
    core.step(ev.RoutersChanged(2, (ev.Replica(R1, 0), ev.Replica(R2, 1))), 0.0)
    return core


def join(core: Core, uin: int, room: int, now: float = 1.0) -> list[ev.Effect]:
    return turn(core, ev.Opened(uin, uin, 3), ev.Join(uin, 1, wants(room)), now=now)


def absences(core: Core, room: int, number: int, now: float) -> list[SendControl]:
    """What a gateway says that gets a message to a room."""
    return of(SendControl, arrive(core, encode(Kind.ROOM, room, b"hi", number), now=now))


def absent_rooms(effect: SendControl) -> tuple[int, list[int]]:
    found = [control_pb2.Control.FromString(message).absence for message in effect.messages]
    return found[0].as_of, [room for absence in found for room in absence.rooms]


# --- double sending


def test_a_change_of_a_room_with_few_members_goes_twice_ten_milliseconds_apart() -> None:
    core = gateway()
    (first,) = of(ev.SendMembership, join(core, 7, 42))
    assert core.next_deadline() == 1.0 + REPEAT_S
    assert of(ev.SendMembership, turn(core, now=1.009)) == []
    (second,) = of(ev.SendMembership, turn(core, now=1.0 + REPEAT_S))
    assert (second.peer, second.messages, second.token) == (first.peer, first.messages, 0)
    assert of(ev.SendMembership, turn(core, now=1.05)) == []


def test_a_leave_goes_twice_too() -> None:
    core = gateway()
    join(core, 7, 42)
    turn(core, now=1.5)
    (first,) = of(ev.SendMembership, turn(core, ev.Leave(7, names(42)), now=2.0))
    (second,) = of(ev.SendMembership, turn(core, now=2.0 + REPEAT_S))
    assert [m.login for m in second.messages] == [False]
    assert second.messages == first.messages


def test_a_change_of_a_room_with_enough_members_goes_once() -> None:
    core = gateway()
    sent = [len(of(ev.SendMembership, join(core, uin, 42))) for uin in range(1, FEW_MEMBERS + 2)]
    assert sent == [1] * (FEW_MEMBERS + 1)
    (again,) = of(ev.SendMembership, turn(core, now=1.0 + REPEAT_S))
    assert [m.member for m in again.messages] == list(range(1, FEW_MEMBERS))


# --- what is on this gateway


def test_the_answer_to_a_heartbeat_tells_what_is_here_of_the_routers_rooms() -> None:
    core = gateway()
    for uin, room in ((7, 42), (8, 42), (7, 43)):
        join(core, uin, room)
    turn(core, ev.Closed(8, 2))
    twin = LwwMap()
    own = [(gateway_msg_id(INSTANCE, GENERATION, n), room) for n, room in ((1, 42), (3, 43))]
    twin.apply([Update(id_, room, 7, True) for id_, room in own], 0.0)
    for rule in (DigestRule(0, 2), DigestRule(1, 2), DigestRule(0, 1)):
        state = core.heartbeat(*rule)
        wanted = twin.digest.first.total(rule)
        assert (state.digest.root, state.digest.count) == wanted
        assert state.digest.as_of == gateway_msg_id(INSTANCE, GENERATION, 4)
    assert not core.heartbeat(0, 3).HasField("digest")


def test_a_listing_is_as_of_the_last_id() -> None:
    core = gateway()
    join(core, 7, 42)
    asked = control_pb2.ListingRequest(partition=0, partitions=1, instance=INSTANCE)
    for bucket in range(64):
        asked.buckets.add(bucket=bucket)
    (sent,) = core.step(ev.HealingReceived(R1, control_pb2.Control(listing_request=asked)), 1.0)
    assert isinstance(sent, SendControl)
    pages = [control_pb2.Control.FromString(message).listing_page for message in sent.messages]
    assert {page.as_of for page in pages} == {gateway_msg_id(INSTANCE, GENERATION, 1)}
    assert sum(len(page.entries) for page in pages) == 24
    asked.instance = INSTANCE + 1
    (sent,) = core.step(ev.HealingReceived(R1, control_pb2.Control(listing_request=asked)), 1.0)
    assert isinstance(sent, SendControl)
    assert {control_pb2.Control.FromString(m).listing_page.as_of for m in sent.messages} == {0}


def test_a_process_that_may_be_a_router_or_a_relay_is_not_told_what_is_here() -> None:
    """A relay that is taken for a router would believe that the gateway has no devices, and end those that others know."""
    core = gateway()
    join(core, 7, 42)
    state = core.heartbeat(0, 1, relay=None)
    assert state.subscribed
    assert not state.HasField("digest")
    asked = control_pb2.Control(digest_request=control_pb2.DigestRequest(partition=0, partitions=1, instances=[INSTANCE]))
    assert core.step(ev.HealingReceived(R1, asked, relay=False), 1.0)
    assert core.step(ev.HealingReceived(R1, asked, relay=None), 1.0) == []


# --- negative feedback


def test_a_record_for_a_room_without_members_is_answered_to_its_router_once_a_second() -> None:
    core = gateway()
    join(core, 7, 42)
    turn(core, ev.Leave(7, names(42)))
    (said,) = absences(core, 43, 1, 2.0)
    assert (said.peer, absent_rooms(said)) == (R2, (gateway_msg_id(INSTANCE, GENERATION, 2), [43]))
    assert absences(core, 43, 2, 2.9) == []
    assert [effect.peer for effect in absences(core, 42, 3, 2.9)] == [R1]
    assert absences(core, 43, 4, 3.1) == [], "noted while it was within its second: its next record says it"
    assert [effect.peer for effect in absences(core, 43, 5, 3.2)] == [R2]


def test_a_record_for_a_room_with_members_is_not_answered() -> None:
    core = gateway()
    join(core, 7, 42)
    assert absences(core, 42, 1, 2.0) == []
    assert core.rooms.feedback.said == 0


def test_a_free_topic_without_subscriber_in_a_room_with_members_is_not_answered() -> None:
    core = gateway()
    turn(core, ev.Opened(7, 7, 3), ev.Join(7, 1, wants("home/kitchen")))
    assert absences(core, topic_room("home"), 1, 2.0) == []
    assert core.counters.without_members == 1


def test_who_joins_before_it_is_said_is_not_said_to_be_absent() -> None:
    core = gateway()
    record = encode(Kind.ROOM, 42, b"hi", 1)
    assert hand_over(core, record) is Outcome.TAKEN
    assert of(SendControl, join(core, 7, 42)) == []


def test_feedback_is_bounded() -> None:
    feedback = Feedback()
    for room in range(MAX_ROOMS + 5):
        feedback.note(room)
    assert len(feedback.due(1.0)) == MAX_ROOMS
    assert feedback.left_out == 5
    feedback.note(MAX_ROOMS + 1)
    assert feedback.due(1.5) == []
    assert feedback.due(2.0) == []
    feedback.note(MAX_ROOMS + 1)
    assert feedback.due(2.1) == [MAX_ROOMS + 1]


# --- the fence


@pytest.mark.parametrize(
    ("instance", "generation", "over"), [(3, 5, False), (3, 6, True), (3, 9, True), (4, 6, False), (2, 9, False)]
)
def test_a_gateway_whose_generation_is_over_ends(instance: int, generation: int, over: bool) -> None:
    core = gateway()
    effects = core.step(ev.FenceReceived(R1, gateway_msg_id(instance, generation, 0)), 1.0)
    assert effects == ([ev.Fenced()] if over else [])
