"""Between the links and a service: refuses what a peer's role may not say, keeps bugs in a service from breaking the links, and
tells discovery who is dead.

Source: docs/links.md, docs/registry.md; docs/decisions/README.md.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from cluster.links.api import LinkHandler, Outcome, PeerState
from cluster.runtime import log
from cluster.runtime.link_table import RECORDS, kind_of
from pixiu.ids import EndpointID, hex_id


def _ignore(_endpoint: EndpointID) -> None:
    pass


class Handler(LinkHandler):
    """The `LinkHandler` of a process. Until `service` is set, what comes is refused.

    Args:
        note: told of every batch of records that was handled: the data, where the batch begins and ends, how many records, and how
            long that took, seconds.
    """

    def __init__(
        self,
        note: Callable[[bytes, int, int, int, float], None] = lambda *_: None,
        refuses: Callable[[EndpointID, str], bool] | None = None,
    ) -> None:
        self._note, self._refuses = note, refuses
        self.service: LinkHandler | None = None
        self.on_dead: Callable[[EndpointID], None] = _ignore
        self.on_alive: Callable[[EndpointID], None] = _ignore
        self.counts = {"handler_failures_total": 0}

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Hand on a batch; NOT_TAKEN when the service is not there or fails, or what it says."""
        service = self.service
        if service is None or (self._refuses is not None and self._refuses(peer, RECORDS)):
            return Outcome.NOT_TAKEN
        began = monotonic()
        try:
            outcome = service.on_records(peer, data, start, end, count)
        except Exception as error:
            self._failed("on_records", error)
            return Outcome.NOT_TAKEN
        if outcome is Outcome.TAKEN:
            self._note(data, start, end, count, monotonic() - began)
        return outcome

    def on_control(self, peer: EndpointID, messages: list[bytes]) -> Outcome:
        """Hand on control messages; NOT_TAKEN when the service is not there or fails, or what it says."""
        if self._refuses is not None:
            for message in messages:
                kind = kind_of(message)
                if kind is None:
                    return Outcome.MALFORMED
                if kind and self._refuses(peer, kind):
                    return Outcome.NOT_TAKEN
        try:
            return self.service.on_control(peer, messages) if self.service is not None else Outcome.NOT_TAKEN
        except Exception as error:
            self._failed("on_control", error)
            return Outcome.NOT_TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Hand on what became of parcels."""
        if self.service is None:
            return
        try:
            self.service.on_settled(peer, settled)
        except Exception as error:
            self._failed("on_settled", error)

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Tell discovery of death and life, then the service."""
        if log.once_per(5, (log.PEER_STATE, peer, state)):
            log.get_logger().info(log.PEER_STATE, peer=hex_id(peer), state=state.value)
        if state is PeerState.DEAD:
            self.on_dead(peer)
        elif state is PeerState.ALIVE:
            self.on_alive(peer)
        if self.service is None:
            return
        try:
            self.service.on_peer_state(peer, state)
        except Exception as error:
            self._failed("on_peer_state", error)

    def on_heartbeat(self, peer: EndpointID, reply: bool, attachment: bytes) -> bytes:
        """Hand on a heartbeat's attachment; the service's reply, empty when it has none."""
        if self.service is None:
            return b""
        try:
            return self.service.on_heartbeat(peer, reply, attachment)
        except Exception as error:
            self._failed("on_heartbeat", error)
            return b""

    def _failed(self, where: str, error: Exception) -> None:
        self.counts["handler_failures_total"] += 1
        if log.once_per(60, (log.HANDLER_FAILED, where)):
            log.get_logger().error(log.HANDLER_FAILED, where=where, error=repr(error), exc_info=True)
