"""A gateway's client of the state that Pi keeps for sessions: reads, writes and clears, in batches. The shell of `queue.py`.

Source: docs/pi.md, "Notes"; docs/mqtt.md, "Sessions".
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from cluster.process.context import Context
from cluster.rpc.pi_links import PiLinks
from gateway.sessions.queue import Call, Done, Kind, Request, SessionQueue
from gateway.sessions.queue import SessionState as SessionState
from pixiu.errors import LimitError, Unavailable
from pixiu.rpc.turn_loop import call_at_end
from pixiu.wire.inbox_operations import MAX_NOTE_BYTES
from pixiu.wire.v1 import pi_pb2

TIMEOUT_S: Final = 10.0
"""Time for which a call is sent again while no leader answers, seconds: a change of leaders takes about ten."""

_Future = asyncio.Future[SessionState | None]


class SessionStore:
    """Reads and writes the state of sessions at the leaders of Pi.

    Args:
        context: of the process.
        timeout_s: time limit of a call, seconds; an answer that is under way then is waited for, up to 4 s more.

    Calls of one UIN are made in their order, those of a turn of the event loop together. Writes of one note that wait become one:
    all of them return when the last value is durable.
    """

    def __init__(self, context: Context[Any], *, timeout_s: float = TIMEOUT_S) -> None:
        self._context, self._timeout_s = context, timeout_s
        self._links = PiLinks(lambda: context.view, context.crash, context.framed)
        self._queue = SessionQueue[_Future]()
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.reads = self.writes = self.clears = self.failed = 0

    @property
    def available(self) -> bool:
        """True if the cluster keeps inboxes."""
        return all(role in self._context.view.layout.roles for role in ("pi", "xiu"))

    def on_view(self) -> None:
        """Follow the cluster's layout."""
        if not self._closed:
            self._queue.split.set_count(self._context.view.layout.partitions("pi") if self.available else 1)
            self._connect()

    def _connect(self) -> None:
        """Connect to all partitions, including children of split ones."""
        self._links.set_partitions(max(self._queue.split.all()) + 1 if self.available else 0)

    async def read(self, uin: int) -> SessionState:
        """Read a session's state. Raises Unavailable, Overloaded, StateDamaged."""
        self.reads += 1
        state = await self._call(Kind.READ, uin)
        assert state is not None
        return state

    async def write(self, uin: int, name: int, generation: int, value: bytes) -> None:
        """Set a note, or remove it if the value is empty; it is on every replica in sync when this returns.

        Raises OldSession if a higher generation has set or cleared a note of the session; Unavailable, Overloaded, DiskFull: the
        outcome is unknown, and the same call may be made again; LimitError for a value above `MAX_NOTE_BYTES`.
        """
        if len(value) > MAX_NOTE_BYTES:
            raise LimitError(f"a session's state has at most {MAX_NOTE_BYTES >> 10} KiB")
        self.writes += 1
        await self._call(Kind.WRITE, uin, name, generation, value)

    async def clear(self, uin: int, generation: int) -> None:
        """Remove all notes, devices and entries of a session. Raises as `write`."""
        self.clears += 1
        await self._call(Kind.CLEAR, uin, generation=generation)

    async def _call(self, kind: Kind, uin: int, name: int = 0, generation: int = 0, value: bytes = b"") -> SessionState | None:
        if self._closed or not self.available:
            raise Unavailable("this cluster keeps no inboxes, so no sessions")
        loop = asyncio.get_running_loop()
        future: _Future = loop.create_future()
        self._queue.add(Call(kind, uin, loop.time() + self._timeout_s, name, generation, value, [future]))
        if self._turn is None:
            self._turn = call_at_end(self._send)
        return await future

    def _send(self) -> None:
        """Send what is ready, and set the timer for what is to be sent again."""
        self._turn = None
        loop = asyncio.get_running_loop()
        for request in self._queue.requests(loop.time()):
            self._ask(request)
        due = self._queue.next_deadline()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._send) if due is not None and not self._closed else None

    def _ask(self, request: Request[_Future]) -> None:
        def answered(reply: pi_pb2.PiReply | None, partitions: int) -> None:
            over = self._queue.answered(request, reply, partitions, asyncio.get_running_loop().time())
            if partitions:
                self._connect()
            for done in over:
                self._end(done)
            if self._turn is None and not self._closed:
                self._turn = call_at_end(self._send)

        self._links.ask(request.partition, request.operations, request.reads, answered)

    def _end(self, done: Done[_Future]) -> None:
        self.failed += done.error is not None
        for future in done.call.waiters:
            if future.done():
                continue
            if done.error is not None:
                future.set_exception(done.error)
            else:
                future.set_result(done.state)

    async def close(self) -> None:
        """End the streams; calls under way raise Unavailable."""
        self._closed = True
        for handle in (self._turn, self._timer):
            if handle is not None:
                handle.cancel()
        await self._links.close()
        for call in self._queue.all():
            self._end(Done(call, error=Unavailable("the gateway stops; the outcome is unknown")))

    def samples(self) -> dict[str, object]:
        """Samples for metrics."""
        return {
            "session_reads_total": self.reads,
            "session_writes_total": self.writes,
            "session_writes_merged_total": self._queue.merged,
            "session_clears_total": self.clears,
            "session_calls_failed_total": self.failed,
            "session_calls_repeated_total": self._queue.repeated,
            "session_calls_waiting": self._queue.calls,
            "session_pi_leaders": self._links.open,
        }
