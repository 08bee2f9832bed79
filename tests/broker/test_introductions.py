"""A broker sends to a gateway that only a router told it of: a confirmed subscription does not wait for the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.core import Core
from broker.introductions import Introductions
from cluster.core.contract import SendControl
from cluster.membership import events as ev
from cluster.membership.map.updates import Update, decode_messages
from cluster.membership.member.service import gateways_of, introduction
from cluster.wire.v1 import control_pb2
from pixiu.discovery.node import NodeState
from pixiu.discovery.view import View
from pixiu.ids import EndpointID, gateway_msg_id
from router.core import Core as RouterCore
from tests.support.effects import of
from tests.support.zookeeper import make_node

ROUTER, BROKER = EndpointID(11), EndpointID(20)
GATEWAY = make_node("gateway", port=7100, host="10.0.0.7", instance=5, generation=3, state=NodeState.RUNNING)
LOGIN = Update(gateway_msg_id(5, 3, 1), 42, 7, True)


def addresses(*nodes: object) -> list[control_pb2.GatewayAddress]:
    return [one for node in nodes for one in control_pb2.Control.FromString(introduction(node)).gateway_messages.gateways]  # type: ignore[arg-type]


def forwarded() -> control_pb2.Control:
    """What a router that sees the gateway sends a broker of its login."""
    router = RouterCore(endpoint=ROUTER, partition=0, heartbeat_s=1.0, dead_after=4, poll_interval_s=60.0, gone_gateway_s=9e9)
    router.step(ev.StoreOpened(None), 0.0)
    brokers = ev.OtherRole(1, replicas=(ev.Replica(BROKER, 0),))
    router.step(ev.ClusterChanged(1, 1, (), brokers, gateways_of(View(nodes=(GATEWAY,)))), 0.0)
    assert of(ev.ServeSnapshot, router.step(ev.SnapshotRequested(1, BROKER, "broker", 0, 1), 30.0))
    effects = router.step(ev.MessagesReceived(GATEWAY.endpoint, [LOGIN]), 31.0)
    (sent,) = [effect for effect in of(SendControl, effects) if effect.peer == BROKER]
    return control_pb2.Control.FromString(sent.messages[0])


def test_known_from_a_router_until_the_registry_shows_it() -> None:
    known = Introductions()
    assert known.take(addresses(GATEWAY), View())
    assert not known.take(addresses(GATEWAY), View())
    assert [(one.endpoint, one.instance, one.generation) for one in known.gateways] == [(GATEWAY.endpoint, 5, 3)]
    assert [(one.id, one.role, one.host, one.port) for one in known.peers] == [(GATEWAY.endpoint, "gateway", "10.0.0.7", 7100)]
    known.view_changed(View(nodes=(replace(GATEWAY, endpoint=EndpointID(99), generation=2),)))
    assert known.gateways
    known.view_changed(View(nodes=(GATEWAY,)))
    assert not known.gateways
    assert not known.peers


def test_one_that_died_or_has_a_successor_is_forgotten_and_an_older_run_is_not_taken() -> None:
    known = Introductions()
    known.take(addresses(GATEWAY), View())
    assert known.died(GATEWAY.endpoint)
    assert not known.died(GATEWAY.endpoint)
    later = View(nodes=(replace(GATEWAY, endpoint=EndpointID(99), generation=4),))
    assert not known.take(addresses(GATEWAY), later)
    known.take(addresses(GATEWAY), View())
    known.view_changed(later)
    assert not known.gateways


@pytest.mark.parametrize(
    "change", [{"host": ""}, {"host": "x" * 300}, {"host": "a\nb"}, {"port": 0}, {"port": 70_000}, {"instance": 40_000}]
)
def test_what_cannot_be_an_address_is_not_taken(change: dict[str, object]) -> None:
    (one,) = addresses(GATEWAY)
    for name, value in change.items():
        setattr(one, name, value)
    assert not Introductions().take([one], View())


def test_a_gateway_whose_datagrams_go_elsewhere_is_not_introduced() -> None:
    assert introduction(replace(GATEWAY, udp_port=9)) == b""


def test_a_broker_reaches_a_gateway_that_it_knows_from_the_routers_message_alone() -> None:
    control = forwarded()
    assert decode_messages(control.gateway_messages) == [LOGIN]
    known = Introductions()
    assert known.take(control.gateway_messages.gateways, View())
    broker = Core(endpoint=BROKER, partition=0, heartbeat_s=1.0, poll_interval_s=60.0, gone_gateway_s=3600.0)
    routers = ev.OtherRole(1, 1, (ev.Replica(ROUTER, 0, True),))
    for gateways, reached in ((), []), (known.gateways, [GATEWAY.endpoint]):
        broker.step(ev.ClusterChanged(1, 1, (), ev.NO_OTHER, gateways, routers), 0.0)
        broker.step(ev.SnapshotFinished(ROUTER, None), 0.5)
        broker.step(ev.MessagesReceived(ROUTER, decode_messages(control.gateway_messages)), 1.0)
        assert [target.endpoint for target in broker._gateway_targets(42)] == reached
