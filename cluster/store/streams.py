"""Streams of a store's callers: each request has one answer, in the order of the requests.

Source: docs/links.md, docs/stores.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from cluster.rpc.served import ServedStream, ServedStreams
from pixiu.rpc.duplex import Carrier

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


class StoreStream(Generic[Answer, Out, In]):
    """One caller: its requests that wait for an answer, and the answers that wait to leave. See `StoreStreams.open`."""

    def __init__(self, carrier: Carrier[Out, In], take: Callable[[int, In], str], streams: StoreStreams[Answer, Out, In]) -> None:
        self.number = streams.enter(self)
        self._on_request, self._streams = take, streams
        self._waiting: deque[int] = deque()
        """Size of each unanswered request."""
        self._answers: list[Answer] = []
        self._sizes: list[int] = []
        self._bytes = self._leaving = self._leaving_bytes = 0
        """The last two: of the answers in the reply that is being written."""
        self.served: ServedStream[Out, In] = ServedStream(carrier, self._take, self, lambda: streams.closed(self.number))

    def answered(self, answer: Answer, size: int) -> None:
        """Take the answer to one request; `size`: its bytes, if they count."""
        if self._waiting:
            self._bytes -= self._waiting.popleft()
        self._answers.append(answer)
        self._sizes.append(size)
        self._bytes += size
        self.served.changed()

    def unanswered(self) -> bool:
        """Return True while a request waits for its answer."""
        return bool(self._waiting)

    def full(self) -> bool:
        """Return True while no more is to be read."""
        window, count = self._streams.window, len(self._waiting) + len(self._answers) + self._leaving
        return count >= window.requests or self._bytes >= window.size

    def give(self) -> Out | None:
        """Return the next reply. Answers count until their reply has left."""
        joined = self._streams.window.joined
        answers, self._answers = self._answers[:joined], self._answers[joined:]
        sizes, self._sizes = self._sizes[:joined], self._sizes[joined:]
        self._bytes -= self._leaving_bytes
        self._leaving, self._leaving_bytes = len(answers), sum(sizes)
        return self._streams.reply(answers) if answers else None

    def _take(self, request: In) -> None:
        self._waiting.append(self._streams.size_of(request))
        self._bytes += self._waiting[-1]
        if problem := self._on_request(self.number, request):
            self._bytes -= self._waiting.pop()
            self.served.end(problem)


class StoreStreams(ServedStreams[StoreStream[Answer, Out, In]], Generic[Answer, Out, In]):
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
        super().__init__(MAX_STREAMS, "this replica has %d streams")
        self.window, self.size_of, self.reply, self._left = window, size_of, reply, left

    def open(self, carrier: Carrier[Out, In], take: Callable[[int, In], str]) -> ServedStream[Out, In]:
        """Open a stream under a new number. Raises Overloaded.

        take: called with the number and each request; returns what is wrong with the stream, or "": then the request is answered
            once.
        """
        return StoreStream(carrier, take, self).served

    def answer(self, number: int, answer: Answer, size: int = 0) -> None:
        """Pass an answer to its stream, if that is open; `size`: its bytes, if they count."""
        if (stream := self.get(number)) is not None:
            stream.answered(answer, size)

    def end(self, number: int, problem: str) -> None:
        """End a stream because of what its caller sent."""
        if (stream := self.get(number)) is not None:
            stream.served.end(problem)

    def closed(self, number: int) -> None:
        """Forget a stream that is over."""
        self.pop(number, None)
        self._left(number)

    def close(self) -> None:
        """End all streams: the process stops."""
        for stream in self.values():
            stream.served.end()
