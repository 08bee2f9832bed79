"""Marks of rooms with kept filters in the router's core: confirmed as a join is, and no gateway's."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.core.contract import SendControl, Settled, Tick
from cluster.membership import events as ev
from cluster.membership.events import Effect
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update, decode_messages
from cluster.wire.v1 import control_pb2
from pixiu.ids import KEPT_INSTANCE, EndpointID, gateway_msg_id
from router.core import FIRST_MARK_ID, MARK, Core
from tests.support.effects import of

ME, PEER, BROKER, OTHER_BROKER, GATEWAY = (EndpointID(number) for number in (10, 11, 20, 21, 30))
BROKERS = ev.OtherRole(2, replicas=(ev.Replica(BROKER, 0), ev.Replica(OTHER_BROKER, 1)))
NOW_MS = 1_800_000_000_000


def running(*replicas: ev.Replica, membership: LwwMap | None = None) -> Core:
    core = Core(
        endpoint=ME, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=2.0, membership=membership
    )  # fmt: skip
    core.step(ev.StoreOpened(None), 0.0)
    core.step(ev.ClusterChanged(1, 1, (), ev.NO_OTHER, ()), 0.0)
    core.step(ev.ClusterChanged(2, 1, replicas, BROKERS if replicas else ev.NO_OTHER, ()), 0.0)
    return core


def sent(effects: Iterable[Effect]) -> dict[EndpointID, list[Update]]:
    found: dict[EndpointID, list[Update]] = {}
    for effect in of(SendControl, effects):
        for data in effect.messages:
            found.setdefault(effect.peer, []).extend(decode_messages(control_pb2.Control.FromString(data).gateway_messages))
    return found


def test_a_mark_is_confirmed_when_peers_and_the_rooms_brokers_have_it() -> None:
    core = running(ev.Replica(PEER, 0))
    effects = core.step(ev.MarkRooms(5, (42, 43), True, NOW_MS), 1.0)
    both = [Update(FIRST_MARK_ID + NOW_MS, room, MARK, True) for room in (42, 43)]
    assert sent(effects) == {PEER: both, BROKER: both[:1], OTHER_BROKER: both[1:]}
    assert effects[-1] == ev.Persist(puts=both)
    assert core.is_marked(42)
    tokens = [effect.token for effect in of(SendControl, effects)]
    assert core.step(Settled([(token, True) for token in tokens[:2]]), 2.0) == []
    assert core.step(Settled([(tokens[2], True)]), 2.0) == [ev.RoomsMarked(5)]


def test_what_is_written_later_wins_whatever_the_clocks_say() -> None:
    core = running()
    assert core.step(ev.MarkRooms(1, (42,), True, NOW_MS), 1.0)[-1] == ev.RoomsMarked(1)
    core.step(ev.MarkRooms(2, (42,), False, NOW_MS - 5_000), 1.0)
    assert not core.is_marked(42)
    core.step(ev.MarkRooms(3, (42,), True, NOW_MS - 10_000), 1.0)
    assert core.is_marked(42)


def test_a_peer_that_takes_a_room_for_empty_is_noticed() -> None:
    core = running(ev.Replica(PEER, 0))
    core.step(ev.MarkRooms(1, (42, 43), True, NOW_MS), 1.0)
    removed = Update(FIRST_MARK_ID + NOW_MS + 1, 42, MARK, False)
    assert of(ev.MarksLost, core.step(ev.MessagesReceived(PEER, [removed]), 2.0)) == [ev.MarksLost((42,))]
    assert not core.is_marked(42)
    assert of(ev.MarksLost, core.step(ev.MessagesReceived(PEER, [removed]), 2.0)) == [], "a repeat removes nothing"


def test_no_purge_takes_a_mark_and_no_gateway_speaks_for_it() -> None:
    core = running(ev.Replica(PEER, 0))
    core.step(ev.ClusterChanged(3, 1, (), ev.NO_OTHER, (ev.Gateway(GATEWAY, 3, 1),)), 1.0)
    core.step(ev.MarkRooms(1, (42,), True, NOW_MS), 1.0)
    forged = Update(FIRST_MARK_ID + NOW_MS + 1, 42, MARK, False)
    core.step(ev.MessagesReceived(GATEWAY, [forged]), 2.0)
    core.step(ev.AbsenceReceived(GATEWAY, FIRST_MARK_ID + NOW_MS + 1, [42]), 2.0)
    for second in range(3, 12):
        core.step(Tick(), float(second))
    assert core.is_marked(42)
    assert core.membership.instances() == [KEPT_INSTANCE]


def test_a_full_map_refuses_marks_and_leaves_those_that_are_there() -> None:
    core = running(membership=LwwMap(max_entries=32))
    core.step(ev.MarkRooms(1, (1,), True, NOW_MS), 1.0)
    core.step(ev.ClusterChanged(3, 1, (), ev.NO_OTHER, (ev.Gateway(GATEWAY, 3, 1),)), 1.0)
    core.step(ev.MessagesReceived(GATEWAY, [Update(gateway_msg_id(3, 1, n), 7, n, True) for n in range(1, 40)]), 1.0)
    assert core.step(ev.MarkRooms(2, (1, 2), True, NOW_MS), 2.0) == [ev.RoomsMarked(2, refused=True)]
    assert core.step(ev.MarkRooms(3, (1,), True, NOW_MS), 2.0)[-1] == ev.RoomsMarked(3)
    assert [core.is_marked(room) for room in (1, 2)] == [True, False]
