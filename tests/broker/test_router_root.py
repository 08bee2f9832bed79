"""What a broker sees whose routers are below another root."""

from __future__ import annotations

from broker.router_root import merged
from pixiu.discovery.view import Layout, RoleLayout, View
from tests.support.zookeeper import make_node


def view(version: int, n: int, first_port: int) -> View:
    roles = ("router", "broker", "gateway", "proxy")
    nodes = tuple(
        make_node(role, 0, port=first_port + at) if role in ("router", "broker") else make_node(role, port=first_port + at)
        for at, role in enumerate(roles)
    )
    return View(Layout(version, {role: RoleLayout(n, n, 1) for role in ("router", "broker")}), nodes)


def test_routers_and_gateways_are_the_others_and_all_else_its_own() -> None:
    own, other = view(3, 2, 7000), view(90, 8, 8000)
    found = merged(own, other)
    ports = {node.role: node.port for node in found.nodes}
    assert ports == {"router": 8000, "broker": 7001, "gateway": 8002, "proxy": 7003}
    assert (found.layout.partitions("router"), found.layout.partitions("broker")) == (8, 2)


def test_the_layouts_version_is_that_of_its_own_senders() -> None:
    assert merged(view(3, 2, 7000), view(90, 8, 8000)).layout.version == 3
