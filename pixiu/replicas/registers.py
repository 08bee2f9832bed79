"""What a soft role's map must offer, and how its changes are written: on the wire, in snapshots, in the database. Pure.

A map of last-writer-wins registers: `pixiu.softstore.Membership` (routers), `pixiu.devices.Devices` (relays).

Source: DESIGN section 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from pixiu.softstore import Chunk, Key, StoreCounters
from pixiu.wire.v1 import control_pb2


class RegisterChange(Protocol):
    """One write of one register."""

    @property
    def id(self) -> int:
        """GatewayMsgID; names the gateway instance too."""

    @property
    def partition_key(self) -> int:
        """The RoomID or UIN that chooses the partition."""

    def in_range(self) -> bool:
        """Whether every number is a possible one; it comes from the network."""


ChangeT = TypeVar("ChangeT", bound=RegisterChange)
ChangeT_co = TypeVar("ChangeT_co", bound=RegisterChange, covariant=True)


class Applied(Protocol[ChangeT_co]):
    """What a batch changed."""

    @property
    def changes(self) -> Sequence[ChangeT_co]:
        """Those that applied, in order."""


class Purged(Protocol):
    """What a purge removed."""

    @property
    def keys(self) -> Sequence[Key]:
        """Keys of removed registers, live ones and tombstones."""


class RegisterStore(Protocol[ChangeT]):
    """The map. `now` is monotonic seconds. See `pixiu.softstore.Membership`, which says more of each method."""

    @property
    def counters(self) -> StoreCounters:
        """What became of messages."""

    @property
    def tombstones(self) -> int:
        """Logouts that are remembered."""

    def __len__(self) -> int:
        """Live entries."""

    def instances(self) -> list[int]:
        """The gateway instances that have live entries."""

    def apply(self, batch: Iterable[ChangeT], now: float) -> Applied[ChangeT]:
        """Apply changes; what is stale is left out of the result."""

    def merge(self, chunk: Chunk, now: float) -> Applied[ChangeT]:
        """Apply a part of a snapshot. Raises `MalformedData`."""

    def snapshot(self, partition: int = 0, partitions: int = 1) -> Iterator[Chunk]:
        """Everything that a partition serves."""

    def expire(self, now: float) -> list[Key]:
        """Forget tombstones whose time is over."""

    def purge_partition(self, partition: int, partitions: int) -> Purged:
        """Drop what the partition does not serve."""

    def raise_floor(self, instance: int, generation: int) -> Purged:
        """Drop what lower generations of a gateway instance wrote, for ever."""

    def purge_instance(self, instance: int) -> Purged:
        """Drop all live entries of an instance."""


class Codec(Protocol[ChangeT]):
    """How changes are written. A database key is `pixiu.replicas.store.KEY` of a `Key`."""

    def encode(self, changes: Sequence[ChangeT]) -> list[bytes]:
        """Serialized `Control` messages that carry these changes, each small enough for a datagram."""

    def decode(self, control: control_pb2.Control) -> list[ChangeT]:
        """The changes in a `Control` from the network, whatever they are; empty where it carries something else."""

    def rows(self, changes: Iterable[ChangeT]) -> Iterator[tuple[Key, bytes]]:
        """Database keys and values."""

    def entry(self, key: Key, value: bytes) -> tuple[bool, bytes] | None:
        """Whether a row is live, and its snapshot entry; None for a value of another size."""

    def changes(self, chunk: Chunk) -> list[ChangeT]:
        """The changes that a snapshot's chunk stands for."""
