"""Gateways that a broker knows from a router before it knows them from the registry. Pure.

A client's SUBACK promises that messages sent from now on arrive. A broker that has its membership, but not its gateway's address,
would drop them; so routers report the addresses of the gateways of memberships. Once the registry shows a gateway, the registry is
right.

Source: docs/memberships.md, "Confirmation".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.links.api import Peer
from cluster.membership.events import Gateway
from cluster.wire.v1 import control_pb2
from pixiu.discovery.view import View
from pixiu.ids import KEPT_INSTANCE, LAST_GENERATION, MAX_ID, EndpointID

MAX_INTRODUCED: Final = 4_096
"""Limit of introduced gateways; further ones wait for the registry."""
MAX_HOST: Final = 256
MAX_PORT: Final = 65_535


class Introductions:
    """Gateways reported by routers that the registry does not show."""

    def __init__(self) -> None:
        self._known: dict[EndpointID, tuple[Gateway, Peer]] = {}

    @property
    def gateways(self) -> tuple[Gateway, ...]:
        """Introduced gateways, in the form that `gateways_of` gives for the registry."""
        return tuple(gateway for gateway, _ in self._known.values())

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Links to the introduced gateways."""
        return tuple(peer for _, peer in self._known.values())

    def take(self, gateways: Iterable[control_pb2.GatewayAddress], view: View) -> bool:
        """Note new gateways. Returns True if there were any."""
        before = len(self._known)
        for one in gateways:
            endpoint = EndpointID(one.endpoint)
            if endpoint in self._known or view.by_endpoint(endpoint) is not None or len(self._known) >= MAX_INTRODUCED:
                continue
            if _valid(one) and not _is_older(one.instance, one.generation, view):
                peer = Peer(endpoint, "gateway", one.host, one.port, one.stream_port)
                self._known[endpoint] = Gateway(endpoint, one.instance, one.generation), peer
        return len(self._known) > before

    def view_changed(self, view: View) -> None:
        """Forget gateways that the registry shows, or a later run of them."""
        for endpoint, (gateway, _) in list(self._known.items()):
            if view.by_endpoint(endpoint) is not None or _is_older(gateway.instance, gateway.generation, view):
                del self._known[endpoint]

    def died(self, endpoint: EndpointID) -> bool:
        """Forget a gateway that heartbeats report dead. Returns True if it was known from here."""
        return self._known.pop(endpoint, None) is not None


def _valid(one: control_pb2.GatewayAddress) -> bool:
    where = 0 < len(one.host) <= MAX_HOST and one.host.isprintable() and 0 < one.port <= MAX_PORT and one.stream_port <= MAX_PORT
    return where and 0 < one.endpoint <= MAX_ID and one.instance < KEPT_INSTANCE and one.generation <= LAST_GENERATION


def _is_older(instance: int, generation: int, view: View) -> bool:
    return any(node.instance == instance and node.generation >= generation for node in view.of_role("gateway"))
