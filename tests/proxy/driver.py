"""Drives a proxy's core: what publishers and gateways send, and what of its effects a test looks at."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.contract import RecordsReceived, SendRecords, Settled
from pixiu.ids import EndpointID
from proxy import events as ev
from proxy.core import Core

GATEWAY = EndpointID(2001)


def publish(core: Core, records: Sequence[bytes], position: int = 1, now: float = 0.0, stream: int = 1) -> list[ev.Effect]:
    """A publisher's batch."""
    return core.step(ev.BatchPublished(stream, b"".join(records), len(records), position), now)


def forward(core: Core, data: bytes, count: int = 1, *, start: int = 0, end: int | None = None) -> list[ev.Effect]:
    """A gateway's batch, by a link: records in data[start:end]."""
    return core.step(RecordsReceived(GATEWAY, data, start, len(data) if end is None else end, count), 0.0)


def settle(core: Core, sent: Sequence[SendRecords], now: float, *, handled: bool = True) -> list[ev.Effect]:
    """What became of parcels."""
    return core.step(Settled([(send.token, handled) for send in sent]), now)


def sends(effects: Sequence[ev.Effect]) -> list[SendRecords]:
    """The parcels among the effects."""
    return [effect for effect in effects if isinstance(effect, SendRecords)]


def replies(effects: Sequence[ev.Effect]) -> list[ev.Reply]:
    """The replies among the effects."""
    return [effect for effect in effects if isinstance(effect, ev.Reply)]


def failures(effects: Sequence[ev.Effect]) -> list[tuple[int, int, str]]:
    """What the replies say failed: first and last position, and the code."""
    return [(found.first, found.last, found.code) for reply in replies(effects) for found in reply.failures]
