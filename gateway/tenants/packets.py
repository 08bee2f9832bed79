"""Packets of a tenant's MQTT client in the cluster's names, and deliveries to it in the tenant's. Pure.

    client ── a/b ──▶ decoder ── acme/a/b ──▶ session, rules, rooms, core
    client ◀── a/b ── delivered, for one client ◀── acme/a/b ──┤
    client ◀── a/b ── fan-out, bytes that they share ◀─────────┘

So everything behind the decoder knows only the cluster's names. A client without a tenant has no translator.

Source: docs/tenants.md, "Names".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cluster.access.tenants.names import TenantNames
from cluster.access.tenants.use import TenantUse
from cluster.mqtt.outbound import Delivery, KeptDelivery
from cluster.mqtt.packets import Connect, Packet, Publish, Subscribe, Unsubscribe
from cluster.mqtt.server import ServerSession


def outward(names: TenantNames, packet: Packet) -> Packet:
    """A client's packet in the cluster's names."""
    if isinstance(packet, Publish):
        return packet._replace(topic=names.outward(packet.topic))
    if isinstance(packet, Subscribe):
        return replace(packet, filters=tuple((names.outward(name), options) for name, options in packet.filters))
    if isinstance(packet, Unsubscribe):
        return replace(packet, filters=tuple(map(names.outward, packet.filters)))
    return packet


def connect_outward(names: TenantNames, connect: Connect) -> Connect:
    """A CONNECT in the cluster's names: its will."""
    will = connect.will
    return connect if will is None else replace(connect, will=replace(will, topic=names.outward(will.topic)))


def translate(session: ServerSession, names: TenantNames) -> None:
    """Have the packets of a session's client translated from now on, and those that wait for the end of its login."""
    # A method of the session would be at home there; these lines know what waits for `admitted`.
    session._decoder.translate = partial(outward, names)
    if session._judged_later is not None:
        connect, behind = session._judged_later
        session._judged_later = connect_outward(names, connect), [outward(names, packet) for packet in behind]


class Insider:
    """The tenant of a client, as the gateway's core knows it: see `gateway.events.Inside`."""

    __slots__ = ("_now", "_use")

    def __init__(self, use: TenantUse, now: Callable[[], float]) -> None:
        self._use, self._now = use, now

    def inward(self, name: bytes) -> bytes:
        """The tenant's name of a topic."""
        return self._use.names.inward(name)

    def take(self, messages: int, size: int) -> bool:
        """Charge messages of QoS 0. False: they are dropped."""
        return self._use.take_shared(messages, size, self._now())


def delivered(use: TenantUse, messages: Sequence[Delivery], now: float) -> list[Delivery]:
    """Messages to a tenant's client in the tenant's names, without what is beyond its rate. Retained ones are never dropped."""
    found: list[Delivery] = []
    for message in messages:
        topic = use.names.inward(message.topic)
        if topic and (use.take_out(message.qos, len(message.record), now) or message.retain):
            found.append(message._replace(topic=topic))
    return found


def kept_delivered(use: TenantUse, messages: Sequence[KeptDelivery], now: float) -> tuple[list[KeptDelivery], list[int]]:
    """Messages of a session's inbox in the tenant's names, and the packet identifiers of those that have no name there. One that
    waits for its PUBREL needs none."""
    found: list[KeptDelivery] = []
    others: list[int] = []
    for message in messages:
        delivery = message.delivery
        topic = use.names.inward(delivery.topic)
        if topic and not message.released:
            use.spend_out(1, len(delivery.record), now)
            found.append(message._replace(delivery=delivery._replace(topic=topic)))
        elif message.released:
            found.append(message)
        else:
            others.append(message.packet_id)
    return found, others
