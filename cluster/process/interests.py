"""The roles that a process sees in the registry: those that it talks to, or that may talk to it. Pure.

Most processes of a large cluster are gateways: a process that does not see them has a small view, and a gateway's coming and going
costs it nothing.

Source: docs/registry.md, "What a process watches and reads".
"""

from __future__ import annotations

from typing import Final

SEES: Final[dict[str, tuple[str, ...]]] = {
    "proxy": ("proxy", "gateway", "router", "broker", "relay", "xiu", "pi", "topic", "admin"),
    "gateway": ("proxy", "router", "broker", "relay", "pi"),
    "router": ("gateway", "router", "broker"),
    "broker": ("proxy", "gateway", "router", "broker", "relay"),
    "relay": ("proxy", "gateway", "broker", "relay", "xiu", "pi"),
    "xiu": ("xiu", "pi"),
    "pi": ("xiu", "pi"),
    "topic": ("topic", "admin"),
    "admin": ("topic", "admin"),
    "bridge": ("bridge", "gateway"),
}
"""Role → the roles that it sees. They include every role that `MAY_SAY` lets send something to it."""
