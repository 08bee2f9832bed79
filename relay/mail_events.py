"""What happens to a relay's mail, and what it asks its shell to do, beside what `relay.delivery.events` has.

Source: docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.runtime.contract import EndOfTurn, Tick
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as dv


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """Who runs, and who can be reached, may have changed."""

    owners: Sequence[int]
    """Relays among which the owner of each user of the partition is chosen; none while this one is none of them."""
    partition: int
    """Of this relay."""
    partitions: int
    """Of relays."""
    gateways: frozenset[int]
    """Endpoints of gateways that can be reached."""
    pis: int
    """Partitions of Pi; 0: the cluster has none."""
    xius: int


@dataclass(frozen=True, slots=True)
class PiAnswered:
    """The answer to `AskPi`; None: it was not done, or is not known to be."""

    number: int
    reply: pi_pb2.PiReply | None
    partitions: int = 0
    """Not 0: the partition that was asked serves some of these users no more, or not yet, and says that there are so many."""


Event = (
    ClusterChanged | PiAnswered | dv.StreamReady | dv.StreamBroken | dv.Notified | dv.Acknowledged | dv.Fetched | dv.Stopping
    | EndOfTurn | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConnectPis:
    """Have a stream to the leader of each of so many partitions of Pi, and to no others."""

    partitions: int


@dataclass(frozen=True, slots=True)
class AskPi:
    """Ask the leader of a partition; `PiAnswered` comes in any case."""

    number: int
    partition: int
    operations: bytes
    reads: Sequence[pi_pb2.PiRead] = ()


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Have a stream to these gateways: `StreamReady` says when it delivers."""

    gateways: Collection[int]


@dataclass(frozen=True, slots=True)
class KeepStreams:
    """End the streams to all other gateways."""

    gateways: Collection[int]


Effect = ConnectPis | AskPi | OpenStreams | KeepStreams | dv.FetchMessages | dv.Deliver | dv.AskWritten | dv.ConfirmNotices
