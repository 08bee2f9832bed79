"""Sits between the links and a service: refuses messages that a peer's role may not send, keeps bugs in a service from breaking the
links, and reports dead peers to discovery.

Source: docs/links.md, docs/registry.md.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from cluster.core import log
from cluster.links.api import LinkHandler, Outcome, PeerState
from cluster.listeners.link_table import RECORDS, kind_of
from pixiu.ids import EndpointID, hex_id


def _ignore(_endpoint: EndpointID) -> None:
    pass


class Handler(LinkHandler):
    """The `LinkHandler` of a process. Until `service` is set, all input is refused.

    Args:
        note: called after every handled batch of records with the data, the start and end of the batch, the number of records, and
            the duration in seconds.
    """

    def __init__(
        self,
        note: Callable[[bytes, int, int, int, float], None] = lambda *_: None,
        refuses: Callable[[EndpointID, str], bool] | None = None,
    ) -> None:
        self._note, self._refuses = note, refuses
        self.allowed: set[tuple[EndpointID, str]] = set()
        """(peer, kind) of messages that are not asked about any more."""
        self.service: LinkHandler | None = None
        self.on_dead: Callable[[EndpointID], None] = _ignore
        self.on_alive: Callable[[EndpointID], None] = _ignore
        self.counts = {"handler_failures_total": 0}

    def on_records(self, peer: EndpointID, data: bytes, start: int, end: int, count: int) -> Outcome:
        """Pass on a batch. Returns the service's outcome; NOT_TAKEN if there is no service or it fails."""
        service = self.service
        if service is None or (self._refuses is not None and (peer, RECORDS) not in self.allowed and self._refuses(peer, RECORDS)):
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
        """Pass on control messages. Returns the service's outcome; NOT_TAKEN if there is no service or it fails."""
        if self._refuses is not None:
            for message in messages:
                kind = kind_of(message)
                if kind is None:
                    return Outcome.MALFORMED
                if kind and (peer, kind) not in self.allowed and self._refuses(peer, kind):
                    return Outcome.NOT_TAKEN
        try:
            return self.service.on_control(peer, messages) if self.service is not None else Outcome.NOT_TAKEN
        except Exception as error:
            self._failed("on_control", error)
            return Outcome.NOT_TAKEN

    def on_settled(self, peer: EndpointID, settled: list[tuple[int, bool]]) -> None:
        """Pass on the outcomes of parcels."""
        if self.service is None:
            return
        try:
            self.service.on_settled(peer, settled)
        except Exception as error:
            self._failed("on_settled", error)

    def on_peer_state(self, peer: EndpointID, state: PeerState) -> None:
        """Report dead and alive peers to discovery, then pass the state to the service."""
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
        """Pass on a heartbeat's attachment. Returns the service's reply, empty if it has none."""
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
