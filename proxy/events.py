"""Events of a proxy's core, and the effects that it requests, besides those that all roles share (`cluster.core.contract`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.core.contract import RecordsReceived, SendControl, SendRecords, Settle, Settled, Tick
from pixiu.ids import EndpointID
from pixiu.wire.trace import Sampler
from proxy.kept_events import (
    AskKept,
    KeptAvailable,
    KeptMatched,
    KeptRefused,
    KeptStored,
    StoreKept,
)
from proxy.publishers.rates import Rates
from proxy.routed_events import RoutedStored, RoutesChanged, StoreRouted


class Place(Enum):
    """Process of a replica, as a proxy sees it."""

    HERE = "the proxy's own"
    APART = "one without a proxy"
    BESIDE = "another proxy's"


@dataclass(frozen=True, slots=True)
class Replica:
    """A broker or relay replica that a proxy may send to."""

    endpoint: EndpointID
    partition: int
    usable: bool = True
    """False while its heartbeats are in doubt: chosen only if its partition has no other."""
    weight: float = 1.0
    """Its share of the rooms, relative to the others of its partition."""
    place: Place = Place.APART


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """The view or a peer's state changed: all brokers that have started and are not dead, and the number of partitions."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class RelaysChanged:
    """The same for relays. `partitions` is 0 where the cluster's layout has no relays."""

    partitions: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True)
class UsersOffline:
    """A relay reports that no device took these messages."""

    snowflake_ids: list[int]


@dataclass(frozen=True, slots=True)
class PublisherOpened:
    """A back end opened a stream."""

    stream: int


@dataclass(frozen=True, slots=True)
class PublisherClosed:
    """A back end's stream ended; nobody waits for its replies."""

    stream: int


@dataclass(frozen=True, slots=True)
class BatchPublished:
    """A batch came on a publisher's stream: `count` records, the first at `position`."""

    stream: int
    data: bytes
    count: int
    position: int
    copy: int = 0
    """Number of the copy of its signals."""
    receipt: bool = False
    """True if the publisher wants a report when its signals are delivered."""
    more: bool = False
    """True if another batch follows at once."""


@dataclass(init=False, slots=True)
class GatewayPublished:
    """A gateway's batch of `count` records, whose outcome it waits for. Its own number is `number`; as a stream of one batch, which
    no publisher opened, it is `stream`."""

    stream: int
    gateway: EndpointID
    number: int
    data: bytes
    count: int
    sessions: Sequence[int]
    """Of each record: the kept session whose client published it, or 0; empty: all 0."""

    def __init__(
        self, stream: int, gateway: EndpointID, number: int, data: bytes, count: int, sessions: Sequence[int] = ()
    ) -> None:
        self.stream, self.gateway, self.number = stream, gateway, number
        self.data, self.count, self.sessions = data, count, sessions


@dataclass(frozen=True, slots=True)
class SignalsDelivered:
    """A gateway delivered these signals, by SnowflakeID."""

    signals: list[int]
    gateway: EndpointID


@dataclass(frozen=True, slots=True)
class LimitsChanged:
    """An operator changed the rates of publishers and rooms, the pace of big rooms, or the tracing."""

    rates: Rates
    vrooms_per_s: float
    sampler: Sampler | None
    """Chooses the messages to trace; None: only those already marked."""


Event = (
    BrokersChanged
    | LimitsChanged
    | RelaysChanged
    | UsersOffline
    | PublisherOpened
    | PublisherClosed
    | BatchPublished
    | GatewayPublished
    | RecordsReceived
    | SignalsDelivered
    | KeptAvailable
    | KeptMatched
    | KeptRefused
    | KeptStored
    | RoutedStored
    | RoutesChanged
    | Settled
    | Tick
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Positions of a stream that were not passed on, with an error of `pixiu.errors`."""

    first: int
    last: int
    code: str
    text: str
    retry_after_ms: int = 0


def add_failure(failures: list[Failure], failure: Failure) -> None:
    """Add a failure after the others; equal adjacent ones become one."""
    if failures:
        last = failures[-1]
        if (last.last + 1, last.code, last.text, last.retry_after_ms) == (
            failure.first, failure.code, failure.text, failure.retry_after_ms,
        ):  # fmt: skip
            failures[-1] = Failure(last.first, failure.last, last.code, last.text, last.retry_after_ms)
            return
    failures.append(failure)


@dataclass(init=False, slots=True)
class Reply:
    """Report to a publisher that every position up to `up_to` is resolved."""

    stream: int
    up_to: int
    failures: list[Failure]

    def __init__(self, stream: int, up_to: int, failures: list[Failure]) -> None:
        self.stream, self.up_to, self.failures = stream, up_to, failures


@dataclass(frozen=True, slots=True)
class Delivered:
    """Report to a publisher that a gateway delivered these of its signals."""

    stream: int
    signals: list[int]
    gateway: EndpointID


Effect = SendRecords | SendControl | Settle | Reply | Delivered | AskKept | StoreKept | StoreRouted
