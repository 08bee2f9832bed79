"""Whose word of memberships a router or relay takes: a gateway's of its own run, a replica's of all of them, nobody else's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import relay.core
import router.core
from cluster.core.contract import NOT_TAKEN, SendControl, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import ENTRY, Update
from cluster.membership.replica.core import ReplicaCore
from cluster.membership.replica.state import State
from cluster.wire.v1 import control_pb2
from pixiu.ids import LAST_GENERATION, EndpointID, gateway_msg_id
from tests.support.effects import of

ME, PEER = EndpointID(10), EndpointID(11)
VICTIM, EVIL = EndpointID(30), EndpointID(66)
GATEWAYS = (ev.Gateway(VICTIM, 3, 1), ev.Gateway(EVIL, 5, 1))
AHEAD = 1 << 37
EVERYBODY = 3
REFUSED = [ev.SenderRefused(EVIL, True)]


def view(*replicas: ev.Replica, gateways: tuple[ev.Gateway, ...] = GATEWAYS) -> ev.ClusterChanged:
    return ev.ClusterChanged(1, 1, replicas, ev.NO_OTHER, gateways)


def make(role: Any) -> ReplicaCore:
    core: ReplicaCore = role(endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=10.0)
    return core


def say(core: ReplicaCore, peer: EndpointID, *messages: Update, now: float = 1.0) -> list[Effect]:
    return core.step(ev.MessagesReceived(peer, list(messages)), now)


def joins(first: int = 1, instance: int = 3, generation: int = 1) -> list[Update]:
    return [Update(gateway_msg_id(instance, generation, first + n), 42, n, True) for n in range(EVERYBODY)]


def confirms(effects: Iterable[Effect]) -> list[control_pb2.GatewayConfirm]:
    controls = [control_pb2.Control.FromString(data) for effect in of(SendControl, effects) for data in effect.messages]
    return [control.gateway_confirm for control in controls if control.HasField("gateway_confirm")]


@pytest.fixture(params=[router.core.Core, relay.core.Core], ids=["router", "relay"])
def core(request: pytest.FixtureRequest) -> ReplicaCore:
    """A replica that has heard of three members on the victim."""
    made = make(request.param)
    made.step(ev.StoreOpened(None), 0.0)
    for _ in range(2):
        made.step(view(), 0.0)
    assert made.state is State.RUNNING
    (confirm,) = confirms(say(made, VICTIM, *joins()))
    assert list(confirm.ids) == [join.id for join in joins()]
    return made


def test_a_gateway_cannot_log_out_the_clients_of_another_one(core: ReplicaCore) -> None:
    forged = [Update(gateway_msg_id(3, 1, AHEAD + n), 42, n, False) for n in range(EVERYBODY)]
    own = Update(gateway_msg_id(5, 1, 1), 42, 9, True)
    effects = say(core, EVIL, *forged, own)
    assert of(ev.SenderRefused, effects) == REFUSED
    assert [list(confirm.ids) for confirm in confirms(effects)] == [[own.id]]
    assert core.counters.messages_of_others == EVERYBODY
    assert core.membership.members_by_instance() == {3: EVERYBODY, 5: 1}
    again = joins(100)
    assert [list(confirm.ids) for confirm in confirms(say(core, VICTIM, *again))] == [[join.id for join in again]]


@pytest.mark.parametrize(("instance", "generation"), [(3, LAST_GENERATION), (3, 2), (5, 2), (5, 0)])
def test_a_gateway_cannot_begin_or_go_on_with_another_run(core: ReplicaCore, instance: int, generation: int) -> None:
    assert say(core, EVIL, Update(gateway_msg_id(instance, generation, 1), 1, 1, True)) == REFUSED
    for second in range(2, 20):
        core.step(Tick(), float(second))
        core.step(view(), float(second))
    assert core.membership.members_by_instance() == {3: EVERYBODY}
    assert core.membership.floor(3) == gateway_msg_id(3, 1, 0)


def test_a_gateway_cannot_say_who_is_absent_at_another_one(core: ReplicaCore) -> None:
    assert core.step(ev.AbsenceReceived(EVIL, gateway_msg_id(3, 1, AHEAD), [42]), 1.0) == REFUSED
    assert core.step(ev.AbsenceReceived(EndpointID(99), gateway_msg_id(3, 1, AHEAD), [42]), 1.0) == []
    assert core.membership.members(42) == EVERYBODY
    assert core.step(ev.AbsenceReceived(VICTIM, gateway_msg_id(3, 1, AHEAD), [42]), 1.0)
    assert core.membership.members(42) == 0


@pytest.mark.parametrize(
    "answer",
    [
        control_pb2.Control(bucket_digests=control_pb2.BucketDigests(instance=3, floor=LAST_GENERATION, buckets=bytes(768))),
        control_pb2.Control(
            bucket_digests=control_pb2.BucketDigests(
                instance=5, floor=2, as_of=gateway_msg_id(5, 1, 9), partitions=1, buckets=bytes(768)
            )
        ),
        control_pb2.Control(
            listing_page=control_pb2.ListingPage(instance=3, as_of=gateway_msg_id(3, 1, AHEAD), partitions=1, last=True)
        ),
        control_pb2.Control(
            listing_page=control_pb2.ListingPage(
                instance=5,
                as_of=gateway_msg_id(5, 1, 9),
                partitions=1,
                last=True,
                entries=ENTRY.pack(42, 1, gateway_msg_id(3, 1, AHEAD)),
            )
        ),
    ],
    ids=["floor", "own floor", "listing", "entry"],
)
@pytest.mark.parametrize("speaker", [EVIL, EndpointID(99)])
def test_answers_are_taken_of_the_own_run_only_and_of_no_stranger(
    core: ReplicaCore, speaker: EndpointID, answer: control_pb2.Control
) -> None:
    assert core.step(ev.AntiEntropyReceived(speaker, answer), 1.0) == (REFUSED if speaker == EVIL else [])
    assert core.membership.members_by_instance() == {3: EVERYBODY}
    assert core.membership.get(42, 1, 3) == (joins()[1].id, True)


def test_a_replica_speaks_for_every_gateway_that_it_heard_of(core: ReplicaCore) -> None:
    core.step(view(ev.Replica(PEER, 0, True)), 1.0)
    assert confirms(say(core, PEER, *joins(instance=9, generation=4))) == []
    assert core.membership.members_by_instance() == {3: EVERYBODY, 9: EVERYBODY}


def test_a_gateway_that_the_view_does_not_show_yet_is_not_confirmed_and_loses_nothing(core: ReplicaCore) -> None:
    late = EndpointID(31)
    for _ in range(2):
        assert say(core, late, *joins(instance=6)) == [ev.SenderRefused(late, False), NOT_TAKEN]
    assert core.counters.messages_of_strangers == 2 * EVERYBODY
    core.step(view(gateways=(*GATEWAYS, ev.Gateway(late, 6, 1))), 2.0)
    (confirm,) = confirms(say(core, late, *joins(instance=6), now=2.1))
    assert len(confirm.ids) == EVERYBODY
    assert core.membership.members_by_instance() == {3: EVERYBODY, 6: EVERYBODY}


def test_a_gateway_that_started_again_replaces_the_run_before(core: ReplicaCore) -> None:
    """It has another endpoint and a higher generation, whatever its address is; for a while the view may show both."""
    successor = EndpointID(31)
    core.step(view(gateways=(*GATEWAYS, ev.Gateway(successor, 3, 2))), 2.0)
    again = joins(generation=2)
    assert [list(c.ids) for c in confirms(say(core, successor, *again, now=2.1))] == [[join.id for join in again]]
    last = joins(200)
    assert [list(c.stale) for c in confirms(say(core, VICTIM, *last, now=2.2))] == [[join.id for join in last]]
    assert core.membership.get(42, 1, 3) == (again[1].id, True)


def test_a_stale_join_is_told_and_not_confirmed_and_a_repeated_one_is_confirmed(core: ReplicaCore) -> None:
    core.step(view(ev.Replica(PEER, 0, True)), 1.0)
    # What a broken replica says a router cannot tell from the truth, and the map may have been spoilt before.
    say(core, PEER, Update(gateway_msg_id(3, 1, AHEAD), 42, 1, False))
    core.step(view(), 1.0)
    again, repeated = joins(100)[1], joins()[0]
    (stale, confirm) = confirms(say(core, VICTIM, again, repeated))
    assert (list(stale.stale), list(stale.ids)) == ([again.id], [])
    assert list(confirm.ids) == [repeated.id]
    assert core.counters.stale_told == 1


def test_what_a_replica_said_before_a_snapshot_counts_although_it_is_gone_since() -> None:
    core = make(router.core.Core)
    peers = (ev.Replica(PEER, 0, True), ev.Replica(EndpointID(12), 0, True))
    core.step(ev.StoreOpened(None), 0.0)
    core.step(view(*peers), 0.0)
    say(core, PEER, *joins())
    say(core, EVIL, *joins(100))
    assert core.queued == EVERYBODY
    core.step(view(), 2.0)
    for source in (PEER, EndpointID(12)):
        core.step(ev.SnapshotFinished(source, None), 3.0)
    assert core.state is State.RUNNING
    assert core.membership.members_by_instance() == {3: EVERYBODY}


def test_a_leave_that_a_listing_has_told_already_is_confirmed(core: ReplicaCore) -> None:
    """What a gateway lists as of a later GatewayMsgID, or says to be absent, may overtake the leave itself."""
    core.step(ev.AbsenceReceived(VICTIM, gateway_msg_id(3, 1, 60), [42]), 1.0)
    leave = joins(50)[0]._replace(login=False)
    assert [(list(c.ids), list(c.stale)) for c in confirms(say(core, VICTIM, leave))] == [([leave.id], [])]


def test_a_map_knows_what_keeps_a_message_from_coming_true() -> None:
    membership = LwwMap()
    first, second = joins()[0], joins(50)[0]
    membership.apply([second], 0.0)
    assert [membership.hides(change) for change in (first, second, joins(60)[0], joins()[1])] == [True, False, False, False]
    leave = first._replace(login=False)
    assert membership.hides(leave)
    membership.apply([joins(70)[0]._replace(login=False)], 0.0)
    assert [membership.hides(change) for change in (second, leave)] == [True, False]
    membership.raise_floor(3, 2)
    assert membership.hides(joins(60)[1])
