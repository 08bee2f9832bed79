"""Check that two processes can work in one cluster, by their data in the registry. Pure.

    protocol version   a process speaks a range; two ranges must overlap
    wire hash          of the cluster settings that must agree on the wire, nothing else

Source: docs/registry.md, "Who may join".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pixiu.discovery.node import Node

MIN_PROTOCOL: Final = 1
"""The oldest protocol version that this release speaks."""
MAX_PROTOCOL: Final = 1
"""The newest: see docs/registry.md, "Protocol versions"."""


def spoken(nodes: Iterable[Node]) -> int:
    """The newest protocol version that all of these processes speak; this release's own if there are none."""
    return min((node.protocol_max for node in nodes), default=MAX_PROTOCOL)


def disagreement(own: Node, other: Node) -> str:
    """The reason why `own` and `other` cannot be in one cluster, and what to do; empty if they can."""
    who = f"this {own.role}", f"{other.role} at {other.address}"
    if own.protocol_max < other.protocol_min or other.protocol_max < own.protocol_min:
        return (
            f"{who[0]} speaks the protocol versions {own.protocol_min} to {own.protocol_max}, and {who[1]} speaks "
            f"{other.protocol_min} to {other.protocol_max}: upgrade every process to a release in between first"
        )
    if own.wire_hash != other.wire_hash:
        return (
            f"the cluster settings that must agree have hash {own.wire_hash!r} in {who[0]}, and {other.wire_hash!r} in {who[1]}: "
            'give both the same [cluster] table (docs/operations.md, "Every setting", says which keys must agree)'
        )
    return ""
