"""A router whose map is full refuses new logins by name, and still takes what its peers hold."""

from __future__ import annotations

from cluster.core.contract import SendControl
from cluster.membership import events as ev
from cluster.membership.map.lww_map import LwwMap
from cluster.membership.map.updates import Update
from cluster.membership.replica.state import State
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID, gateway_msg_id
from router.core import Core
from tests.support.effects import of

ME, PEER, GATEWAY = EndpointID(10), EndpointID(11), EndpointID(30)
ENTRIES = 32
FOR_GATEWAYS = 30
"""All but a sixteenth."""


def login(counter: int, room: int, uin: int = 7) -> Update:
    return Update(gateway_msg_id(3, 1, counter), room, uin, True)


def router(*replicas: ev.Replica) -> Core:
    core = Core(
        endpoint=ME,
        partition=0,
        heartbeat_s=1.0,
        dead_after=4,
        poll_interval_s=60.0,
        gone_gateway_s=3600.0,
        membership=LwwMap(max_entries=ENTRIES),
    )
    core.step(ev.StoreOpened(None), 0.0)
    for known in ((), replicas):
        core.step(ev.ClusterChanged(1, 1, known, ev.NO_OTHER, (ev.Gateway(GATEWAY, 3, 1),)), 0.0)
    assert core.state is State.RUNNING
    return core


def confirms(effects: list[ev.Effect]) -> list[control_pb2.GatewayConfirm]:
    controls = [control_pb2.Control.FromString(data) for send in of(SendControl, effects) for data in send.messages]
    return [control.gateway_confirm for control in controls if control.HasField("gateway_confirm")]


def test_what_has_no_space_is_refused_and_not_confirmed() -> None:
    core = router()
    messages = [login(number, number) for number in range(1, ENTRIES + 9)]
    found = confirms(core.step(ev.MessagesReceived(GATEWAY, messages), 1.0))
    confirmed = [number for confirm in found for number in confirm.ids]
    assert confirmed == [message.id for message in messages[:FOR_GATEWAYS]]
    assert [number for confirm in found for number in confirm.refused] == [message.id for message in messages[FOR_GATEWAYS:]]
    assert (len(core.membership), core.counters.logins_refused) == (FOR_GATEWAYS, len(messages) - FOR_GATEWAYS)


def test_a_refused_login_is_not_passed_on() -> None:
    core = router(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(number, number) for number in range(1, FOR_GATEWAYS + 1)]), 1.0)
    effects = core.step(ev.MessagesReceived(GATEWAY, [login(99, 99)]), 1.0)
    assert [send.peer for send in of(SendControl, effects)] == [GATEWAY]
    assert of(ev.Persist, effects) == []


def test_the_rest_of_the_map_is_for_what_a_peer_holds() -> None:
    core = router(ev.Replica(PEER, 0, True))
    core.step(ev.MessagesReceived(GATEWAY, [login(number, number) for number in range(1, FOR_GATEWAYS + 1)]), 1.0)
    core.step(ev.MessagesReceived(PEER, [login(98, 98), login(99, 99)]), 1.0)
    assert len(core.membership) == ENTRIES


def test_known_keys_and_logouts_are_never_refused() -> None:
    core = router()
    core.step(ev.MessagesReceived(GATEWAY, [login(number, number) for number in range(1, FOR_GATEWAYS + 1)]), 1.0)
    again, gone = login(50, 1), login(51, 2)._replace(login=False)
    found = confirms(core.step(ev.MessagesReceived(GATEWAY, [again, gone, login(52, 60)]), 1.0))
    assert [number for confirm in found for number in confirm.ids] == [again.id, gone.id]
    assert [number for confirm in found for number in confirm.refused] == [login(52, 60).id]
