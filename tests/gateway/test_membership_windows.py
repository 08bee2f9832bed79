"""How a gateway paces what it tells routers: windows, back-off, and slices of many leaves."""

from __future__ import annotations

import itertools

import pytest

from cluster.core.contract import Settled, Tick
from gateway import events as ev
from gateway.core import Core
from gateway.joining import LEAVES_A_TURN
from gateway.membership.reporter import CROWD_PAUSE_S, MAX_A_TURN, WINDOW
from pixiu.ids import EndpointID
from tests.gateway.world import memberships, of, turn, updates
from tests.support.filters import wants

ROUTER, OTHER = EndpointID(101), EndpointID(102)
MANY = 3 * WINDOW


def gateway(replicas: tuple[ev.Replica, ...] = (ev.Replica(ROUTER, 0),)) -> Core:
    core = Core(instance=3, generation=5)
    core.step(ev.RoutersChanged(1, replicas), 0.0)
    return core


def joined(core: Core, rooms: int = MANY, now: float = 1.0) -> None:
    """One client joins so many rooms; nothing of it has been sent."""
    core.step(ev.Opened(1, 7, 3), now)
    core.step(ev.Join(1, 1, wants(*(room for room in range(1, rooms + 1)))), now)


def drive(core: Core, now: float, *, turns: int = 100) -> list[list[int]]:
    """The IDs that each of so many turns at this time sends for the first or only time."""
    sent = []
    for _ in range(turns):
        if core.next_deadline() > now:
            break
        core.step(Tick(), now)
        sent.append([message.id for send in memberships(turn(core, now=now)) for message in send.messages])
    return sent


@pytest.mark.slow
def test_a_turn_sends_a_slice_and_a_partition_gets_no_more_than_its_window() -> None:
    core = gateway()
    joined(core)
    sent = drive(core, 1.0)
    assert max(map(len, sent)) <= MAX_A_TURN
    assert sum(map(len, sent)) == WINDOW
    assert core.next_deadline() > 1.0, "nothing more is tried until something is confirmed or late"


@pytest.mark.slow
def test_what_is_confirmed_makes_room_in_the_window() -> None:
    core = gateway()
    joined(core)
    first = [number for turn_ids in drive(core, 1.0) for number in turn_ids]
    core.step(ev.Confirmed(ROUTER, first[:500]), 1.01)
    again = [number for turn_ids in drive(core, 1.01) for number in turn_ids]
    assert len(again) == 500
    assert not set(again) & set(first)


def test_in_the_end_everything_is_told() -> None:
    core = gateway()
    joined(core)
    now, told = 1.0, set()
    for _ in range(100):
        found = [number for turn_ids in drive(core, now) for number in turn_ids]
        if not found:
            break
        told |= set(found)
        core.step(ev.Confirmed(ROUTER, found), now)
        now += 0.01
    assert (len(told), core.unconfirmed) == (MANY, 0)


@pytest.mark.slow
def test_without_a_replica_nothing_is_tried_until_one_comes() -> None:
    core = gateway(())
    joined(core)
    turn(core)
    core.step(Tick(), 12.0)  # the client is answered
    assert core.next_deadline() == float("inf")
    core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 20.0)
    assert sum(map(len, drive(core, 20.0))) == WINDOW


@pytest.mark.parametrize("lost", [False, True], ids=["silence", "loss"])
def test_a_router_that_confirms_nothing_is_tried_ever_more_seldom(lost: bool) -> None:
    core = gateway()
    joined(core, 1)
    times: list[float] = []
    now = 1.0
    while len(times) < 8:
        for send in memberships(turn(core, Tick(), now=now)):
            times.append(now)
            core.step(Settled([(send.token, not lost)]), now)
        turn(core, now=now)
        now = max(core.next_deadline(), now + 0.001)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0]
    assert pauses[-1] <= 24.0


def test_jitter_spreads_those_that_lost_the_same_router() -> None:
    dues = set()
    for jitter in (lambda: 0.0, lambda: 0.5, lambda: 1.0):
        core = Core(instance=3, generation=5, jitter=jitter)
        core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 0.0)
        joined(core, 1)
        (send,) = memberships(turn(core))
        turn(core, now=1.011)
        core.step(Settled([(send.token, False)]), 1.02)
        dues.add(round(core.next_deadline(), 3))
    assert len(dues) == 3


def test_joins_of_a_crowd_are_told_together() -> None:
    crowd = True
    core = Core(instance=3, generation=5, is_crowd=lambda: crowd)
    core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 0.0)

    def come(uin: int, now: float, rooms: int = 1) -> int:
        core.step(ev.Opened(uin, uin, 3), now)
        core.step(ev.Join(uin, 1, wants(*(uin * 1000 + room for room in range(rooms)))), now)
        return sum(len(send.messages) for send in memberships(turn(core, now=now)) if send.token)

    assert come(1, 1.0) == 1, "nobody came before"
    assert [come(uin, 1.0 + uin / 1000) for uin in range(2, 6)] == [0] * 4
    assert core.next_deadline() == pytest.approx(1.0 + CROWD_PAUSE_S)
    assert come(6, 1.0 + CROWD_PAUSE_S) == 5
    assert come(7, 1.001 + CROWD_PAUSE_S, MAX_A_TURN + 1) == MAX_A_TURN, "what fills a turn does not wait"
    crowd = False
    assert come(8, 1.002 + CROWD_PAUSE_S) == 2


def test_a_replica_that_takes_anothers_place_is_told_at_once_in_a_crowd_too() -> None:
    core = Core(instance=3, generation=5, is_crowd=lambda: True)
    core.step(ev.RoutersChanged(1, (ev.Replica(ROUTER, 0),)), 0.0)
    joined(core, 1)
    (send,) = memberships(turn(core))
    (again,) = memberships(turn(core, ev.RoutersChanged(1, (ev.Replica(OTHER, 0),)), now=1.001))
    assert (send.peer, again.peer) == (ROUTER, OTHER)


def test_many_clients_that_go_together_leave_in_slices() -> None:
    core = gateway()
    clients, rooms = 20, 100
    for uin in range(1, clients + 1):
        core.step(ev.Opened(uin, uin, 3), 1.0)
        core.step(ev.Join(uin, 1, wants(*(room for room in range(1, rooms + 1)))), 1.0)
    turn(core)
    counter = core._counter
    for uin in range(1, clients + 1):
        core.step(ev.Closed(uin, 2), 2.0)
    assert core._counter == counter, "all of it waits for the ends of turns"
    steps = 0
    while core.index.clients:
        core.step(Tick(), 2.0)
        turn(core, now=2.0)
        steps += 1
        assert core._counter - counter <= steps * LEAVES_A_TURN, "a GatewayMsgID for each room that was left"
        assert core.next_deadline() <= 2.0 or not core.index.clients
    assert core.index.presences == 0
    assert len(core.rooms.own) == 0


def test_who_is_gone_joins_nothing_and_is_answered_nothing() -> None:
    core = gateway()
    joined(core, 2)
    effects = core.step(ev.Closed(1, 2), 1.0) + core.step(ev.Join(1, 2, wants(99)), 1.0) + core.step(ev.Closed(1, 2), 1.0)
    effects += turn(core)
    assert of(ev.Answer, effects) == []
    assert {update.login for update in updates(effects)} == {False}
    assert core.index.presences == 0


def test_requests_that_were_answered_are_not_kept() -> None:
    """20,000 requests for one room while its router was away stayed in memory when they had long been answered."""
    core = gateway(())
    core.step(ev.Opened(1, 7, 3), 1.0)
    for request in range(1, 1001):
        core.step(ev.Join(1, request, wants(42)), 1.0)
    assert len(of(ev.Answer, core.step(Tick(), 12.0))) == 1000
    assert not any(change.requests for change in core.rooms._changes.values())
