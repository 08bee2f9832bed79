"""The processes of `pixiu up`, and the roles that each of them runs. Pure.

    nodes      node-0 {gateway-0, proxy-0, broker-0-0, …}   node-1 {gateway-1, …}   xiu-0-0   xiu-0-1
               store-0-0 {pi-0-0, topic-0-0}   store-0-1 {pi-0-1, topic-0-1}
    small      node-0 {gateway-0, proxy-0, broker-0-0, …, xiu-0-0, pi-0-0, topic-0-0}
    separate   gateway-0   gateway-1   proxy-0   …   broker-0-0   broker-0-1   …

The n-th replica of a partition runs in the n-th node, so that no node has two of one partition. Replicas and partitions that are
added while the cluster runs are processes of their own: a running node takes no further role.

Source: docs/operations.md, "One machine".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from pixiu.discovery.paths import DRAIN_ORDER, PARTITIONED_ROLES, START_ORDER, STORES
from pixiu.errors import ConfigurationError

CLIENT_ROLES: Final = ("gateway", "proxy", "topic")
"""Roles that have listeners for clients."""
NODE: Final = "node"
"""Module and name of a process of several roles."""
STORE: Final = "store"
"""Name of a process of a Pi with a replica of topics."""


class Grouping(Enum):
    """A way to group roles into processes."""

    SEPARATE = "every role its own process"
    NODES = "nodes, with stores apart"
    SMALL = "one node of everything"


PLAIN: Final = Grouping.NODES
"""The grouping without an option."""
FLAGS: Final = {Grouping.SMALL: "small", Grouping.SEPARATE: "separate"}
"""The option of each other one."""

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})
_SOFT: Final = ("brokers", "routers", "relays")
REPLICAS: Final = ("broker_replicas", "router_replicas", "relay_replicas", "xiu_replicas", "pi_replicas", "topic_replicas")
_TWO: Final = dict.fromkeys(("proxies", "gateways", "admins", *REPLICAS), 2)
_STORES: Final = {"xius": 1, "pis": 1, "topics": 1}
NUMBERS: Final[Mapping[Grouping, Mapping[str, int]]] = {
    Grouping.SEPARATE: _TWO | dict.fromkeys(_SOFT, 2) | _STORES,
    # In a node further partitions would only share one event loop.
    Grouping.NODES: _TWO | dict.fromkeys(_SOFT, 1) | _STORES,
    Grouping.SMALL: dict.fromkeys((*_TWO, *_SOFT), 1) | _STORES,
}
"""Numbers of partitions and replicas where the user gives none, by the options of `pixiu up`."""


def grouping_of(flags: Mapping[Grouping, bool]) -> Grouping:
    """Return the grouping whose flag is set. Raises `ConfigurationError` when there are several."""
    chosen = [grouping for grouping, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise ConfigurationError(f"{' and '.join(f'--{FLAGS[grouping]}' for grouping in chosen)}: give one of them")
    return chosen[0] if chosen else PLAIN


def roles_together(grouping: Grouping, *, guarded: bool) -> frozenset[str]:
    """Return the roles that share nodes. guarded: client-facing roles stay apart unless everything is to be one node.

    Source: docs/security.md, "Keys of a node".
    """
    if grouping is Grouping.SEPARATE:
        return frozenset()
    if grouping is Grouping.SMALL:
        return frozenset(START_ORDER)
    return frozenset(START_ORDER) - frozenset(STORES) - (frozenset(CLIENT_ROLES) if guarded else frozenset())


def roles_beside(grouping: Grouping, *, guarded: bool) -> Mapping[str, str]:
    """Return the roles whose replicas share the process of another role's: role → that role. guarded: client-facing roles stay
    apart.

    Both are bound by the disk, and a process of its own for each replica of topics would cost memory.
    """
    return {} if guarded or grouping is not Grouping.NODES else {"topic": "pi"}


def clients_of(topics: int | None) -> tuple[str, ...]:
    """Return the roles with listeners for clients of a cluster. topics: its number of groups; None: not given."""
    return tuple(role for role in CLIENT_ROLES if role != "topic" or topics != 0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A role in a process: one proxy or gateway, or one replica of a partition."""

    role: str
    partition: int
    """-1 for a role without partitions."""
    number: int
    """Number within its role and partition, from 0."""

    @property
    def name(self) -> str:
        """Name in tables and of its data folder; the same in every grouping."""
        return f"{self.role}-{self.number}" if self.partition < 0 else f"{self.role}-{self.partition}-{self.number}"

    @property
    def key(self) -> str:
        """Name in the options of a node."""
        return self.role if self.partition < 0 else f"{self.role}-{self.partition}"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One wanted process."""

    name: str
    """Name in tables and of the log file."""
    entries: tuple[Entry, ...]
    """Its roles, in starting order."""

    @property
    def module(self) -> str:
        """The module to run."""
        return self.entries[0].role if len(self.entries) == 1 else NODE

    @property
    def kinds(self) -> int:
        """Number of kinds of roles: each drains after the one before."""
        return len({entry.role for entry in self.entries})

    @property
    def stops_with(self) -> int:
        """Place in `DRAIN_ORDER` at which it ends: that of its first role there."""
        return min(DRAIN_ORDER.index(entry.role) for entry in self.entries)


def alone(entry: Entry) -> ProcessSpec:
    """Return the process of a single role."""
    return ProcessSpec(entry.name, (entry,))


def wanted_processes(
    wanted: Mapping[str, tuple[int, int]], together: frozenset[str] = frozenset(), beside: Mapping[str, str] = NOTHING
) -> list[ProcessSpec]:
    """Return every process of a cluster, in starting order.

    wanted: role → partitions (a role without: 1 or 0) and replicas. together: the roles that share nodes. beside: role → the role,
    earlier in that order, whose replica of the same partition and number has it in its process, if there is one.
    """
    specs: list[ProcessSpec] = []
    nodes: dict[int, list[Entry]] = {}
    for role in START_ORDER:
        count, replicas = wanted.get(role, (0, 0))
        partitions = range(count) if role in PARTITIONED_ROLES else [-1][:count]
        for entry in (Entry(role, partition, number) for number in range(replicas) for partition in partitions):
            host = alone(replace(entry, role=beside.get(role, "")))
            if role in together:
                nodes.setdefault(entry.number, []).append(entry)
            elif host in specs:
                name = f"{STORE}-{entry.partition}-{entry.number}"
                specs[specs.index(host)] = ProcessSpec(name, (*host.entries, entry))
            else:
                specs.append(alone(entry))
    for number, entries in sorted(nodes.items()):
        specs.append(ProcessSpec(f"{NODE}-{number}", tuple(entries)) if len(entries) > 1 else alone(entries[0]))
    return sorted(specs, key=lambda spec: START_ORDER.index(spec.entries[0].role))
