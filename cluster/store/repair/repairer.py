"""The base of a role's repair: the other replicas that can help, and how the role's state is checked, digested and given up.

Source: docs/replication.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from cluster.process.context import Context
from cluster.replication.replica import Replica
from cluster.store.repair.digests import Digests
from cluster.wire.v1 import repair_pb2 as pb
from pixiu.discovery.node import Node
from pixiu.errors import InvalidArgument


class StoreRepairer(ABC):
    """Repairs one replica's state with the help of the others.

    Args:
        context: of the process.
        replica: its log.
    """

    RANGES: ClassVar[str]
    """Name of the things that the ranges of its digests divide."""

    def __init__(self, context: Context[Any], replica: Replica) -> None:
        self._context, self._replica = context, replica

    def others(self) -> list[Node]:
        """Other replicas with everything committed, each by its current process: for a minute the view may also hold a former
        one."""
        in_sync = self._replica.others_in_sync
        nodes = self._context.view.replicas(self._context.role, self._context.options.partition)
        newest = sorted(nodes, key=lambda node: node.member_incarnation)
        return list({node.member: node for node in newest if node.member in in_sync}.values())

    @property
    @abstractmethod
    def opened(self) -> bool:
        """True while the state can be read."""

    @abstractmethod
    async def verify(self, repair: bool) -> pb.VerifyReply:
        """Check everything stored, and repair it if asked to. Raises PixiuError."""

    @abstractmethod
    def mark(self) -> int:
        """Choose what names the state that is compared next."""

    @abstractmethod
    async def digests(self, mark: int, *, leads: bool) -> Digests:
        """Digest the state at a mark. `leads`: on behalf of a follower, by the leader. Raises PixiuError."""

    async def begin_again(self, text: str) -> bool:
        """Take the leader's state in place of this one, for this reason; return True if this begins. Raises StorageError."""
        return False

    async def give_up(self, operator: str, reason: str) -> tuple[int, list[str]]:
        """Give up values that no replica has undamaged; return their number and some names. Raises PixiuError."""
        raise InvalidArgument(f"a {self._context.role.capitalize()} gives nothing up")
