"""The twin of `cluster.rpc.leader_stream.LeaderStream`: a stream to the leader of a partition, opened again elsewhere.

It decides who is asked next, by hints and by turns, and when. That is to be a core some day.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from pixiu.wire.v1 import pi_pb2, xiu_pb2
from tests.sim.system.streams import Stream

if TYPE_CHECKING:
    from tests.sim.system.base import Served

Address = tuple[str, int]
ASK_TIMEOUT_S: Final = 3.0
BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 1.0
NOBODY_S: Final = 0.2
"""As in service."""


def address_of(text: str) -> Address | None:
    """host:port."""
    host, _, port = text.rpartition(":")
    return (host, int(port)) if host else None


class LeaderLink:
    """See the module; `up(epoch)`, `reply(message)` and `down()` as there."""

    def __init__(
        self,
        process: Served,
        role: str,
        partition: int,
        *,
        up: Callable[[int], None],
        reply: Callable[[Any], None],
        down: Callable[[str], None],
    ) -> None:
        self._process, self.role, self.partition = process, role, partition
        self._up, self._reply, self._down = up, reply, down
        self._stream: Stream | None = None
        self.open = False
        self._attempt = 0
        self._address: Address | None = None
        """Of the replica that was asked last."""
        self._asked = self._failures = 0
        self._closed = False
        self._connect(None)

    def send(self, request: Any) -> None:
        """On the stream that is open; on none it is lost, as `down` has said."""
        if self.open and self._stream is not None:
            self._stream.send(request)

    def leave(self, *, again: bool = False) -> None:
        """End the stream; the next one is opened by itself, `again`: to the same replica."""
        if self._stream is not None and self.open:
            self.open = False
            self._over("it was left", served=True, hint=self._address if again else None)

    def close(self) -> None:
        """End."""
        self._closed, self.open = True, False
        self._attempt += 1
        if self._stream is not None:
            self._stream.leave()

    def _connect(self, hint: Address | None) -> None:
        if self._closed:
            return
        self._attempt += 1
        attempt = self._attempt
        address = self._address = hint or self._candidate()
        if address is None:
            self._process.after(NOBODY_S, lambda: self._connect(None) if attempt == self._attempt else None)
            self._down("nobody is running")
            return
        method = "Exchange" if self.role == "pi" else "Store"
        process = self._process

        def opened(stream: Stream) -> None:
            if attempt != self._attempt or self._closed:
                stream.leave()
                return
            self._stream = stream
            stream.take_reply = lambda message: self._replied(attempt, message)
            stream.lost = lambda: self._over("it broke", served=self.open, hint=None, attempt=attempt)
            stream.send(pi_pb2.PiRequest() if self.role == "pi" else xiu_pb2.StoreRequest())

        def failed() -> None:
            self._over("it cannot be reached", served=False, hint=None, attempt=attempt)

        def overdue() -> None:
            if attempt == self._attempt and not self.open:
                self._over("it did not answer", served=False, hint=None, attempt=attempt)

        process.world.streams.call(process, address, method, opened, failed)
        process.after(ASK_TIMEOUT_S, overdue)

    def _candidate(self) -> Address | None:
        nodes = [n for n in self._process.view.of_role(self.role) if n.partition == self.partition and n.state != "Init"]
        self._asked += 1
        return nodes[self._asked % len(nodes)].address if nodes else None

    def _replied(self, attempt: int, message: Any) -> None:
        if attempt != self._attempt:
            return
        if self.open:
            self._reply(message)
        elif message.epoch:
            self.open = True
            self._failures = 0
            self._up(message.epoch)
        else:
            said = message.server.address if self.role == "pi" else message.leader
            self._over("it does not lead", served=False, hint=address_of(said), attempt=attempt)

    def _over(self, reason: str, *, served: bool, hint: Address | None, attempt: int = 0) -> None:
        if self._closed or (attempt and attempt != self._attempt):
            return
        self._attempt += 1
        stream, self._stream, self.open = self._stream, None, False
        if stream is not None:
            stream.leave()
        self._down(reason)
        self._failures = 0 if served or (hint and not self._failures) else self._failures + 1
        if self._failures:
            self._process.after(min(BACKOFF_S * 2 ** min(self._failures, 8), MAX_BACKOFF_S), lambda: self._connect(hint))
        else:
            self._later(lambda: self._connect(hint))

    def _later(self, action: Callable[[], None]) -> None:
        self._process.after(0.001, action)
