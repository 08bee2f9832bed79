"""The serving side of callers' streams: a window over what is unanswered or unread, and nothing is left unanswered.

    requests ──▶ reader ──▶ core          stops while the window is full
    replies  ◀── writer ◀── answers       those that wait leave together

A service has the requests and the answers of a stream, and says when it is full; `ServedStream` reads, writes and ends it.

Source: docs/links.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from pixiu.errors import Draining, Overloaded
from pixiu.rpc.duplex import Carrier, Duplex

In = TypeVar("In")
Out = TypeVar("Out")
_Out = TypeVar("_Out", covariant=True)
StreamT = TypeVar("StreamT")


class Pending(Protocol[_Out]):
    """Requests of a stream that wait for an answer, and answers that wait to leave."""

    def unanswered(self) -> bool:
        """Return True while a request waits for its answer."""

    def full(self) -> bool:
        """Return True while no more is to be read: too much is unanswered, or waits to leave."""

    def give(self) -> _Out | None:
        """Take the next reply; None: nothing waits to leave. Called again when the one before has left."""


class ServedStream(Generic[Out, In]):
    """One caller's stream.

    Args:
        carrier: its transport.
        take: takes a request; an awaitable that it returns waits for `space` itself.
        pending: requests and answers. Whoever changes them calls `changed`.
        over: called once, when the stream is over.
        last_s: time for which a caller that has ended its side is still answered, seconds; None: without a limit.
    """

    def __init__(
        self, carrier: Carrier[Out, In], take: Callable[[In], Awaitable[object] | None], pending: Pending[Out],
        over: Callable[[], None], last_s: float | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.ended = "", False
        self._request, self._pending, self._left = take, pending, over
        self._space, self._all_answered = asyncio.Event(), asyncio.Event()
        self._space.set()
        self._all_answered.set()
        self._full = self._owes = False
        """False while these events are set."""
        self._duplex = Duplex(carrier, self._take, self._give, over=self._over, last=self._all_answered.wait, last_s=last_s)

    async def run(self) -> None:
        """Run until the caller has ended and has all its answers, or one side gave up. Raises errors of `take`."""
        await self._duplex.run()

    def end(self, problem: str = "") -> None:
        """Take no more requests. All answers still leave; with a problem those that wait already."""
        self.problem, self.ended = self.problem or problem, True
        self.changed()

    def cut(self, problem: str) -> None:
        """End now, although the caller may not read."""
        self.end(problem)
        self._duplex.end(problem)

    def changed(self) -> None:
        """Look at what is pending: there may be something to write, or space."""
        self.took()
        self._duplex.wake()

    def took(self) -> None:
        """Look at what is pending: a request waits for its answer, and there is nothing to write yet."""
        self._owe()
        self._look_for_space()

    def space(self) -> Awaitable[object] | None:
        """Awaitable that ends when more may be taken; None: at once."""
        self._look_for_space()
        return self._space.wait() if self._full else None

    def _look_for_space(self) -> None:
        full = not self.ended and self._pending.full()
        if full != self._full:
            self._full = full
            if full:
                self._space.clear()
            else:
                self._space.set()

    def _owe(self) -> None:
        if not self._owes:
            self._owes = True
            self._all_answered.clear()

    def _take(self, request: In) -> Awaitable[object] | None:
        if self.ended:
            return None
        waits = self._request(request)
        if self._pending.unanswered():
            self._owe()
        return self.space() if waits is None else waits

    def _over(self) -> None:
        self.ended = True
        self._look_for_space()
        self._left()

    def _give(self) -> Out | None:
        reply = self._pending.give()
        self._look_for_space()
        if reply is None:
            answered = not self._pending.unanswered()
            if answered and self._owes:
                self._owes = False
                self._all_answered.set()
            if self.ended and (answered or self.problem):
                self._duplex.finish()
        return reply


class ServedStreams(dict[int, StreamT]):
    """Streams of a service by number.

    Args:
        limit: of streams. Policy: further ones are refused with OVERLOADED.
        whose: the process and its callers, in the refusal: "this proxy has %d publishers".
    """

    def __init__(self, limit: int, whose: str) -> None:
        super().__init__()
        self.limit, self.draining = limit, False
        self._whose, self.numbers = whose, itertools.count(1)
        """The second: of new streams."""

    def enter(self, stream: StreamT) -> int:
        """Number a new stream. Raises Draining, Overloaded."""
        if self.draining:
            raise Draining("this process is draining; use another one")
        if len(self) >= self.limit:
            raise Overloaded(f"{self._whose % self.limit}; use another one, or try again later", 1000)
        number = next(self.numbers)
        self[number] = stream
        return number
