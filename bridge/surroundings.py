"""Surroundings of bridges that their file does not show: processes with other bridges, brokers that are this cluster's gateways.

Both are warned of, and stop nothing: a file is exchanged process by process, and no message need come back.

Source: docs/bridges.md, "Loops", "Several processes".
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Sequence

from bridge.catalog import Bridge
from bridge.connectors.mqtt import MqttSourceOptions, MqttTargetOptions
from cluster.settings.options import is_wildcard
from pixiu.discovery.node import Node
from pixiu.ids import EndpointID


def with_other_bridges(nodes: Iterable[Node], own: EndpointID, digest: str) -> list[Node]:
    """The processes that have other bridges than this one."""
    return [node for node in nodes if node.endpoint != own and node.files_digest != digest]


def others_text(own: Node, others: Sequence[Node]) -> str:
    """A sentence for an operator."""
    return (
        f"the bridge processes at {', '.join(node.address for node in (own, *others))} have different bridges: they may read one "
        "channel in different ways, and a bridge may run nowhere; give all the same files, and restart those with an old one"
    )


async def own_gateways(bridges: Iterable[Bridge], gateways: Sequence[Node]) -> dict[str, str]:
    """Bridge → warning, for those whose broker is one of these gateways. Names are resolved as connectors resolve them."""
    linked = {each.name: each.options for each in bridges if isinstance(each.options, MqttTargetOptions | MqttSourceOptions)}
    if not linked:
        return {}
    listeners: dict[tuple[str, int], Node] = {}
    for node in gateways:
        host = node.host if is_wildcard(node.mqtt_host) else node.mqtt_host
        listeners |= dict.fromkeys(await _addresses(host, node.mqtt_port), node) if node.mqtt_port else {}
    found = dict[str, str]()
    for name, options in linked.items():
        gateway = next((listeners[each] for each in await _addresses(options.host, options.port) if each in listeners), None)
        if gateway is not None:
            found[name] = _loop_text(options, gateway)
    return found


async def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # the connector says it
        return []
    return [(str(address[0]), int(address[1])) for *_, address in found]


def _loop_text(options: MqttTargetOptions | MqttSourceOptions, gateway: Node) -> str:
    where = f"{options.host}:{options.port} is gateway {gateway.replica} of this cluster"
    if isinstance(options, MqttTargetOptions):
        return (
            f"{where}: if a route or a bridge stores in {options.topic} what this one publishes, it comes back for ever: "
            'use kind = "to-clients", whose messages no route takes twice'
        )
    return (
        f"{where}: if a route or a bridge delivers {options.topic} to clients, what it stores comes back for ever: "
        "use a route, which takes no message twice (docs/routes.md)"
    )
