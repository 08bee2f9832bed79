"""Ownership of bridges that one process alone runs. Pure.

The owner is the Running process with the highest hash of the bridge's name and its endpoint. So all processes agree without asking
each other, and the end of a process moves only its own bridges. Two owners at a time, while the registry's view of one is old, do
no harm: the topic's writer, the transactions of Kafka and the sessions of MQTT each shut out the earlier one.

Source: docs/bridges.md, "Several processes".
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from pixiu.ids import EndpointID


def owner_of(name: str, endpoints: Iterable[EndpointID]) -> EndpointID | None:
    """The process that runs a bridge; None: there is none."""
    return max(endpoints, key=lambda each: (xxhash.xxh3_64_intdigest(f"{name}/{each:016x}".encode()), each), default=None)
