"""Events and effects of a relay's mail, beside those of `relay.delivery.events`.

Source: docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cluster.core.contract import EndOfTurn, Tick
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as dv


@dataclass(frozen=True, slots=True)
class ClusterChanged:
    """Running processes, or their reachability, may have changed."""

    owners: Sequence[int]
    """Relays among which the owner of each user of the partition is chosen; none while this one is not among them."""
    partition: int
    """This relay's."""
    partitions: int
    """Number of relay partitions."""
    gateways: frozenset[int]
    """Endpoints of reachable gateways."""
    pis: int
    """Number of Pi partitions; 0: the cluster has none."""
    xius: int


@dataclass(frozen=True, slots=True)
class PiAnswered:
    """The answer to `AskPi`; `reply` None: the request failed, or its outcome is unknown."""

    number: int
    reply: pi_pb2.PiReply | None
    partitions: int = 0
    """Not 0: the partition does not serve some of these users any more, or not yet, and this is its number of partitions."""


Event = (
    ClusterChanged | PiAnswered | dv.StreamReady | dv.StreamBroken | dv.Notified | dv.Acknowledged | dv.Fetched | dv.Stopping
    | EndOfTurn | Tick
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConnectPis:
    """Keep a stream to the leader of each of this number of Pi partitions, and to no others."""

    partitions: int


@dataclass(frozen=True, slots=True)
class AskPi:
    """Ask the leader of a partition; `PiAnswered` follows in any case."""

    number: int
    partition: int
    operations: bytes
    reads: Sequence[pi_pb2.PiRead] = ()


@dataclass(frozen=True, slots=True)
class OpenStreams:
    """Keep streams to these gateways: `StreamReady` follows when one delivers."""

    gateways: Collection[int]


@dataclass(frozen=True, slots=True)
class KeepStreams:
    """End the streams to all other gateways."""

    gateways: Collection[int]


Effect = ConnectPis | AskPi | OpenStreams | KeepStreams | dv.FetchMessages | dv.Deliver | dv.AskWritten | dv.ConfirmNotices
