"""Conversion of control messages between routers, relays or proxies and a gateway's core. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cluster.membership.map.anti_entropy import is_anti_entropy
from cluster.wire.v1 import control_pb2
from gateway import events as ev
from pixiu.ids import EndpointID


def event_of(peer: EndpointID, control: control_pb2.Control, is_relay: Callable[[EndpointID], bool | None]) -> ev.Event | None:
    """Convert a control message to an event; None if it is not for a core.

    is_relay: returns True if a peer is a relay; None: the gateway's view does not have the peer yet.
    """
    kind = control.WhichOneof("body")
    if kind == "publish_outcome":
        outcome = control.publish_outcome
        return ev.BatchResolved(peer, outcome.number, _failures(outcome.failures) if outcome.failures else [])
    if kind == "gateway_confirm":
        confirm = control.gateway_confirm
        newer = [(found.id, found.connect_time) for found in confirm.newer]
        return ev.Confirmed(peer, list(confirm.ids), newer, list(confirm.refused), list(confirm.stale))
    if kind == "device_replaced":
        gone = control.device_replaced
        return ev.Replaced(gone.uin, gone.device, gone.connect_time, gone.reason)
    if is_anti_entropy(control):
        return ev.HealingReceived(peer, control, is_relay(peer))
    if kind == "fenced":
        return ev.FenceReceived(peer, control.fenced.floor)
    return None


def _failures(found: Iterable[control_pb2.RecordFailure]) -> list[ev.RecordFailure]:
    return [ev.RecordFailure(each.first, each.last, each.code, each.text, each.retry_after_ms) for each in found]


def signals_delivered(effect: ev.SendDelivered) -> bytes:
    """Control message of a `SendDelivered` effect."""
    delivered = control_pb2.SignalsDelivered(ids=effect.signals)
    return control_pb2.Control(signals_delivered=delivered).SerializeToString()
