"""Limits that clients met are named with how often they were, each since the last report."""

from __future__ import annotations

from cluster.mqtt import codec
from cluster.mqtt.events import CloseReason
from cluster.mqtt.packets import MQTT_5, Connect, Subscribe
from gateway.limits import LIMITS, LIMITS_BY_LABEL, LimitReport
from gateway.mqtt.connection import MQTTConnection
from tests.gateway.sessions.test_of_tenants import Cluster, cluster
from tests.gateway.world import Wire, World

__all__ = ["cluster"]


async def test_every_limit_is_one_that_the_gateway_counts(cluster: Cluster) -> None:
    samples = cluster.world.clients.samples() | cluster.sessions.samples()
    assert set(LIMITS) | set(LIMITS_BY_LABEL) <= set(samples)


async def test_a_limit_is_named_when_it_was_met_and_not_again() -> None:
    world, report = World(), LimitReport()
    connection, wire = MQTTConnection(world.clients), Wire()
    connection.connection_made(wire)
    connection.data_received(codec.encode(Connect("phone", True, 0, dialect=MQTT_5), MQTT_5))
    assert report.met(world.clients.samples()) == {}
    most = world.clients.options.max_subscriptions
    for part in range(0, most + 100, 100):
        connection.data_received(codec.encode(Subscribe(1 + part, tuple((f"a/{part + n}", 0) for n in range(100))), MQTT_5))
    connection.end(CloseReason.RECEIVE_MAXIMUM, "more than it may")
    met = report.met(world.clients.samples())
    assert met == {LIMITS["filters_over_limit_total"]: 100, "gateway.receive_maximum": 1}
    assert report.met(world.clients.samples()) == {}
