"""Paths in ZooKeeper. Pure functions of a root.

    ROOT/access                        persistent JSON: digests of all logins (`pixiu.discovery.access`)
    ROOT/layout                        persistent JSON: version and partitions of every role
    ROOT/ROLE/partition_num            its mirror, a decimal number
    ROOT/{proxy,gateway,admin}/n…      ephemeral sequential, one per process
    ROOT/ROLE/partition{p}/n…          ephemeral sequential, one per replica
    ROOT/{xiu,pi,topic}/partition{p}/state   persistent: epoch, leader, in-sync set
    ROOT/ROLE/changes                  persistent: written after every change of a node of the role
    ROOT/ROLE/doubling                 ephemeral, held by the operator's tool
    ROOT/ROLE/doublings                persistent: a JSON line for each step of the tool
    ROOT/admin/leader                  ephemeral, the admin that leads
    ROOT/admin/epoch                   persistent JSON: the number of leaderships so far
    ROOT/topics                        persistent JSON: the last numbers given to topics and channels
    ROOT/topics/{name}                 persistent JSON: a topic's settings, parts and channels, written by the leading admin
    ROOT/nsq/listeners/n…              ephemeral sequential JSON, one per listener for NSQ's clients
    ROOT/nsq/migration/{name}          persistent JSON: phase of a topic that moves from NSQ here
    ROOT/drain/{endpoint}              ephemeral, held by the tool that asks a process to drain
    ROOT/kick/r…                       ephemeral, held by the tool that asks gateways and proxies to end sessions
    ROOT/settings                      persistent JSON: version and values of settings that change at run time
    ROOT/settings_changes              persistent: a JSON line for each change of it
    ROOT/supervisor                    ephemeral, the `pixiu up` that starts and ends processes as the layout requires
    ROOT/worker/{k}                    time-range lease of a SnowflakeID worker
    ROOT/instance/{k}                  generation of a gateway instance
    ROOT/instance/{k}/holder           ephemeral, the gateway that has it

Source: docs/registry.md; PiXiu §2.1.
"""

from __future__ import annotations

import re
from typing import Final

from pixiu.errors import InvalidArgument
from pixiu.placement.partition import MAX_PARTITIONS

DEFAULT_ROOT: Final = "/pubsub"
UNPARTITIONED_ROLES: Final = ("proxy", "gateway", "admin", "bridge")
PARTITIONED_ROLES: Final = ("router", "broker", "relay", "xiu", "pi", "topic")
STORES: Final = ("xiu", "pi", "topic")
"""Roles with a replicated log, whose partitions have a `state` node."""
GROUPED_ROLES: Final = ("topic",)
"""Partitioned roles that grow by further partitions, one at a time, and are never doubled: no key chooses a partition of theirs."""
DOUBLED_ROLES: Final = tuple(role for role in PARTITIONED_ROLES if role not in GROUPED_ROLES)
"""Partitioned roles that grow by doubling: their number of partitions is a power of two."""
ROLES: Final = (*UNPARTITIONED_ROLES, *PARTITIONED_ROLES)
START_ORDER: Final = ("xiu", "pi", "topic", "router", "relay", "broker", "admin", "proxy", "gateway", "bridge")
"""Roles in the order in which a cluster starts."""
DRAIN_ORDER: Final = START_ORDER[::-1]
"""Roles in the order in which they end: clients first, and each while those that it hands over to still serve."""
NO_PARTITION: Final = -1
"""The partition of a process whose role has none."""
NODE_PREFIX: Final = "n"
MAX_ROOT_LENGTH: Final = 256
MAX_TOPIC_NAME: Final = 128
"""Maximum length of a topic's name, characters."""

_PARTITION = re.compile(r"partition(0|[1-9][0-9]{0,2})", re.ASCII)
_NODE = re.compile(r"n([0-9]{10})", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_TOPIC = re.compile(r"[A-Za-z0-9._-]+", re.ASCII)
_ROOT = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+", re.ASCII)


def check_root(root: str) -> str:
    """Check a root: `/name` or `/name/name…`; returns it. Raises `InvalidArgument` otherwise.

    Source: docs/registry.md.
    """
    if len(root) > MAX_ROOT_LENGTH or not _ROOT.fullmatch(root):
        raise InvalidArgument(
            f"the registry's root {root!r} must look like /pubsub or /team/pubsub: names of letters, digits, '.', '_', '-', "
            f"each after one '/', none at the end, at most {MAX_ROOT_LENGTH} characters"
        )
    return root


def access(root: str) -> str:
    """The node that holds the digests of all logins."""
    return f"{root}/access"


def layout(root: str) -> str:
    """The node that holds the cluster's layout."""
    return f"{root}/layout"


def role_directory(root: str, role: str) -> str:
    """Directory of a role. Raises `InvalidArgument` for an unknown role."""
    if role not in ROLES:
        raise InvalidArgument(f"role {role!r} is unknown; one of {', '.join(ROLES)}")
    return f"{root}/{role}"


def partition_num(root: str, role: str) -> str:
    """The mirror of a partitioned role's number of partitions. Source: PiXiu §2.1."""
    return f"{role_directory(root, role)}/partition_num"


def partition_directory(root: str, role: str, partition: int) -> str:
    """Directory of the replicas of a partition. Raises `InvalidArgument` for an impossible role or number."""
    if role not in PARTITIONED_ROLES or not 0 <= partition < MAX_PARTITIONS:
        raise InvalidArgument(
            f"{role!r} has no partition {partition}; partitions are 0 to {MAX_PARTITIONS - 1} of {', '.join(PARTITIONED_ROLES)}"
        )
    return f"{root}/{role}/partition{partition}"


def node_directory(root: str, role: str, partition: int) -> str:
    """Directory of the nodes of a role's processes: of one partition, or of all if the role has none."""
    if role in UNPARTITIONED_ROLES:
        if partition != NO_PARTITION:
            raise InvalidArgument(f"{role} has no partitions; its partition is {NO_PARTITION}, not {partition}")
        return role_directory(root, role)
    return partition_directory(root, role, partition)


def node_prefix(root: str, role: str, partition: int) -> str:
    """Prefix of the path that a process creates; ZooKeeper adds the sequence of ten digits."""
    return f"{node_directory(root, role, partition)}/{NODE_PREFIX}"


def partition_state(root: str, role: str, partition: int) -> str:
    """Node with epoch, leader and in-sync set of a partition of a store."""
    return f"{partition_directory(root, role, partition)}/state"


def changes(root: str, role: str) -> str:
    """The marker that is written after every change of a node of the role."""
    return f"{role_directory(root, role)}/changes"


def doubling(root: str, role: str) -> str:
    """The lock of the tool that doubles a role."""
    return f"{role_directory(root, role)}/doubling"


def drain(root: str, endpoint: int) -> str:
    """Node that asks a run of a process to drain."""
    return f"{root}/drain/{endpoint:016x}"


def admin_lease(root: str) -> str:
    """The lease of the admin that leads: ephemeral."""
    return f"{root}/admin/leader"


def admin_epoch(root: str) -> str:
    """Node of the number of leaderships so far; each admin that begins to lead raises it."""
    return f"{root}/admin/epoch"


def topics(root: str) -> str:
    """Directory of the topics. Its data is the admin's."""
    return f"{root}/topics"


def topic(root: str, name: str) -> str:
    """Node of one topic. Raises `InvalidArgument` for a name that no topic can have."""
    return f"{root}/topics/{check_topic_name(name)}"


def check_topic_name(name: str) -> str:
    """Check the name of a topic; returns it. Raises `InvalidArgument`.

    Source: docs/topics.md.
    """
    if len(name) > MAX_TOPIC_NAME or not _TOPIC.fullmatch(name) or name in (".", ".."):
        raise InvalidArgument(
            f"{name[: MAX_TOPIC_NAME + 1]!r} cannot be the name of a topic: 1 to {MAX_TOPIC_NAME} characters of A-Z, a-z, 0-9, "
            "'.', '_' and '-' are allowed, but not '.' or '..' alone"
        )
    return name


def kicks(root: str) -> str:
    """Directory of the requests to end sessions."""
    return f"{root}/kick"


def revocations(root: str) -> str:
    """Directory of the requests to end subscriptions."""
    return f"{root}/revoke"


def settings(root: str) -> str:
    """Node of the settings that change at run time."""
    return f"{root}/settings"


def settings_changes(root: str) -> str:
    """Node of the log of changes to settings."""
    return f"{root}/settings_changes"


def supervisor(root: str) -> str:
    """The mark of the `pixiu up` that runs the cluster."""
    return f"{root}/supervisor"


def doublings(root: str, role: str) -> str:
    """Node of the log of the tool that doubles a role."""
    return f"{role_directory(root, role)}/doublings"


def workers(root: str) -> str:
    """Directory of the leases of SnowflakeID workers."""
    return f"{root}/worker"


def worker(root: str, number: int) -> str:
    """The lease of one SnowflakeID worker."""
    return f"{root}/worker/{number}"


def instances(root: str) -> str:
    """Directory of the gateway instances."""
    return f"{root}/instance"


def instance(root: str, number: int) -> str:
    """Node of one gateway instance, with its generation."""
    return f"{root}/instance/{number}"


def instance_holder(root: str, number: int) -> str:
    """Node of the gateway that holds the instance, while its session lives."""
    return f"{root}/instance/{number}/holder"


def partition_of(name: str) -> int | None:
    """The partition of a child of a role's directory; None for anything else."""
    found = _PARTITION.fullmatch(name)
    return int(found[1]) if found and int(found[1]) < MAX_PARTITIONS else None


def replica_of(name: str) -> int | None:
    """The replica ID in a node's name: ZooKeeper's sequence; None for anything else."""
    found = _NODE.fullmatch(name)
    return int(found[1]) if found else None


def number_of(name: str, limit: int) -> int | None:
    """The number in a lease's name, below `limit`; None for anything else."""
    found = _NUMBER.fullmatch(name)
    return int(name) if found and int(name) < limit else None
