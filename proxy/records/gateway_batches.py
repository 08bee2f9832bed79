"""Batches of gateways that wait for their outcome, and outcomes on their way back. Pure.

Source: docs/architecture.md, "A message to a room".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from cluster.core.contract import SendControl
from cluster.wire.v1 import control_pb2
from pixiu.ids import EndpointID
from proxy import events as ev

MAX_TIMES: Final = 5
"""Times that an outcome is sent to a gateway whose link lost it; after these the gateway sends its batch again."""


class GatewayBatches:
    """Batches by the stream that each of them is. `next_token` numbers parcels."""

    def __init__(self, next_token: Callable[[], int]) -> None:
        self._next_token = next_token
        self.streams: dict[int, tuple[EndpointID, int]] = {}
        """Stream of a batch → the gateway, and its number of the batch."""
        self._outcomes: dict[int, tuple[SendControl, int]] = {}
        """Token → outcome on its way, and how often it was sent."""

    @property
    def under_way(self) -> int:
        """Number of outcomes that gateways may not have."""
        return len(self._outcomes)

    def resolved(self, stream: int, failures: Iterable[ev.Failure]) -> SendControl:
        """Forget a batch. Returns its outcome for the gateway."""
        gateway, number = self.streams.pop(stream)
        outcome = control_pb2.PublishOutcome(number=number)
        for each in failures:
            outcome.failures.add(
                first=each.first, last=each.last, code=each.code, text=each.text, retry_after_ms=each.retry_after_ms
            )
        return self._send(gateway, [control_pb2.Control(publish_outcome=outcome).SerializeToString()], 1)

    def settled(self, token: int, handled: bool) -> list[SendControl] | None:
        """Note whether a gateway got an outcome. Returns it if it is sent again; None: the token is of no outcome."""
        found = self._outcomes.pop(token, None)
        if found is None:
            return None
        outcome, times = found
        return [] if handled or times >= MAX_TIMES else [self._send(outcome.peer, outcome.messages, times + 1)]

    def _send(self, gateway: EndpointID, messages: list[bytes], times: int) -> SendControl:
        sent = SendControl(gateway, messages, self._next_token())
        self._outcomes[sent.token] = sent, times
        return sent
