"""A store's side of its callers' streams: a window over what is unanswered or unread, and nothing is left unanswered.

    requests ──▶ reader ──▶ core          stops while the window is full
    replies  ◀── writer ◀── answers       those that wait leave together, up to a number

Source: docs/links.md, docs/stores.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from pixiu.errors import Overloaded
from pixiu.rpc.duplex import Carrier, Duplex

MAX_STREAMS: Final = 4096
"""Limit of callers' streams of one replica. Policy: further ones are refused with OVERLOADED."""

In = TypeVar("In")
Out = TypeVar("Out")
Answer = TypeVar("Answer")


class Window(NamedTuple):
    """Limits of one stream. Policy: at one of them it is not read until answers have left."""

    requests: int
    """Unanswered requests, and answers that have not left."""
    size: int
    """Bytes of both."""
    joined: int = 1
    """Answers that leave in one reply."""


class ServedStream(Generic[Answer, Out, In]):
    """One caller: its requests that wait for an answer, and the answers that wait to leave. See `ServedStreams.open`."""

    def __init__(
        self, number: int, carrier: Carrier[Out, In], take: Callable[[int, In], str], served: ServedStreams[Answer, Out, In]
    ) -> None:
        self.number = number
        self.problem, self._ended = "", False
        self._on_request, self._served = take, served
        self._waiting: deque[int] = deque()
        """Size of each unanswered request."""
        self._answers: list[Answer] = []
        self._sizes: list[int] = []
        self._bytes = self._leaving = self._leaving_bytes = 0
        """The last two: of the answers in the reply that is being written."""
        self._space, self._all_answered = asyncio.Event(), asyncio.Event()
        self._space.set()
        self._all_answered.set()
        self._duplex = Duplex(
            carrier, self._take, self._give, over=lambda: served.closed(number), last=self._all_answered.wait
        )  # fmt: skip

    async def run(self) -> None:
        """Run until the caller has ended and has all its answers, or one side gave up."""
        await self._duplex.run()

    def answered(self, answer: Answer, size: int) -> None:
        """Take the answer to one request; `size`: its bytes, if they count."""
        if self._waiting:
            self._bytes -= self._waiting.popleft()
        self._answers.append(answer)
        self._sizes.append(size)
        self._bytes += size
        self._look_for_space()
        self._duplex.wake()

    def end(self, problem: str = "") -> None:
        """Take no more requests; answers still leave."""
        self.problem, self._ended = self.problem or problem, True
        self._duplex.wake()

    def _look_for_space(self) -> None:
        window, waiting = self._served.window, len(self._waiting) + len(self._answers) + self._leaving
        if waiting < window.requests and self._bytes < window.size:
            self._space.set()
        else:
            self._space.clear()

    def _take(self, request: In) -> Awaitable[object] | None:
        if self._ended:
            return None
        self._waiting.append(self._served.size_of(request))
        self._bytes += self._waiting[-1]
        self._all_answered.clear()
        if problem := self._on_request(self.number, request):
            self._bytes -= self._waiting.pop()
            self.end(problem)
        self._look_for_space()
        return None if self._space.is_set() else self._space.wait()

    def _give(self) -> Out | None:
        """Return the next reply. Answers count until their reply has left."""
        joined = self._served.window.joined
        answers, self._answers = self._answers[:joined], self._answers[joined:]
        sizes, self._sizes = self._sizes[:joined], self._sizes[joined:]
        self._bytes -= self._leaving_bytes
        self._leaving, self._leaving_bytes = len(answers), sum(sizes)
        self._look_for_space()
        if answers:
            return self._served.reply(answers)
        if not self._waiting:
            self._all_answered.set()
        if self._ended and (self.problem or not self._waiting):
            self._duplex.finish()
        return None


class ServedStreams(Generic[Answer, Out, In]):
    """All streams of a store's callers, by number.

    Args:
        window: limits of each.
        size_of: returns the bytes of a request.
        reply: makes the reply with some answers.
        left: called with the number of a stream that is over.
    """

    def __init__(
        self,
        window: Window,
        size_of: Callable[[In], int],
        reply: Callable[[Sequence[Answer]], Out],
        left: Callable[[int], None] = lambda _number: None,
    ) -> None:
        self.window, self.size_of, self.reply, self._left = window, size_of, reply, left
        self._streams: dict[int, ServedStream[Answer, Out, In]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, carrier: Carrier[Out, In], take: Callable[[int, In], str]) -> ServedStream[Answer, Out, In]:
        """Open a stream under a new number. Raises Overloaded.

        take: called with the number and each request; returns what is wrong with the stream, or "": then the request is answered
            once.
        """
        if len(self._streams) >= MAX_STREAMS:
            raise Overloaded(f"this replica has {MAX_STREAMS} streams; try again later", 1000)
        stream = ServedStream(next(self._numbers), carrier, take, self)
        self._streams[stream.number] = stream
        return stream

    def answer(self, number: int, answer: Answer, size: int = 0) -> None:
        """Pass an answer to its stream, if that is open; `size`: its bytes, if they count."""
        if (stream := self._streams.get(number)) is not None:
            stream.answered(answer, size)

    def end(self, number: int, problem: str) -> None:
        """End a stream because of what its caller sent."""
        if (stream := self._streams.get(number)) is not None:
            stream.end(problem)

    def closed(self, number: int) -> None:
        """Forget a stream that is over."""
        self._streams.pop(number, None)
        self._left(number)

    def close(self) -> None:
        """End all streams: the process stops."""
        for stream in self._streams.values():
            stream.end()
