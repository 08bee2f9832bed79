"""Operations on the registry's nodes: what a transaction consists of, what is read, reported and raised.

Source: docs/registry.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pixiu.errors import InvalidArgument, RemoteError

MAX_DATA_BYTES: Final = 512 << 10
"""Limit of a node's data, read or written, bytes; ZooKeeper itself would take 1 MiB."""
MAX_TRANSACTION: Final = 64


class RegistryConflict(RemoteError):
    """The registry differs from what an operation needs: read it again and decide again."""


class NoNode(RegistryConflict):
    """The node, or the parent of a node to create, does not exist."""


class NodeExists(RegistryConflict):
    """The node to create exists."""


class VersionConflict(RegistryConflict):
    """Somebody else changed the node since it was read."""


class NotEmpty(RegistryConflict):
    """The node to delete has children."""


class SessionState(Enum):
    """State of the session with ZooKeeper."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """No connection; the session, its nodes and its watches may still live."""
    LOST = "lost"
    """The session is over; a new one is being set up. ZooKeeper may have removed its nodes long before."""


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """A change of the session."""

    state: SessionState
    session_id: int
    """0 when the session is lost."""
    new_session: bool
    """True if CONNECTED with another session than before (or with the first one)."""


class WatchKind(Enum):
    """Kind of change that a watch reports."""

    CREATED = "CREATED"
    DELETED = "DELETED"
    CHANGED = "CHANGED"
    CHILD = "CHILD"


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """A watch fired; it will not fire again until it is set again."""

    kind: WatchKind
    path: str


Watch = Callable[[WatchEvent], None]
"""Called in the event loop. Setting an equal one twice on a path sets it once."""
SessionListener = Callable[[SessionEvent], None]


@dataclass(frozen=True, slots=True)
class Stat:
    """ZooKeeper's metadata of a node."""

    version: int
    created_zxid: int
    modified_zxid: int
    """The transaction that changed the data last."""
    children_zxid: int
    """The transaction that last changed the list of children, not their data."""
    ephemeral_owner: int
    """The session that owns an ephemeral node; 0 for a persistent one."""
    children: int
    created_ms: int
    """Creation by the wall clock of ZooKeeper's leader, Unix milliseconds."""


@dataclass(frozen=True, slots=True)
class Create:
    """Operation of a transaction: create a node. Its result is the path."""

    path: str
    data: bytes = b""
    ephemeral: bool = False
    sequence: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    """Operation of a transaction: replace the data of a node that has this version (-1: any)."""

    path: str
    data: bytes
    version: int = -1


@dataclass(frozen=True, slots=True)
class Delete:
    """Operation of a transaction: delete a node that has this version (-1: any)."""

    path: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class Check:
    """Operation of a transaction: continue only if a node has this version."""

    path: str
    version: int


Operation = Create | Set | Delete | Check


def check_size(path: str, data: bytes) -> None:
    """Raise `InvalidArgument` for data above the limit."""
    if len(data) > MAX_DATA_BYTES:
        raise InvalidArgument(f"{path}: {len(data)} bytes of data; at most {MAX_DATA_BYTES} are written to the registry")
