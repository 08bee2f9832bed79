"""A duplex stream of messages, client's side or server's: one reader, one writer, and the reason for its end in words.

    take(message) ◀── reader ◀──┐
                                 ├── carrier ⇄ the other side
    give() ─────────▶ writer ──▶┘

A `Carrier` transports the messages. gRPC is one (`pixiu.rpc.grpc_streams`); any other that keeps order and bounds may replace it.
The writer pulls: it calls `give` whenever it is free, so waiting messages can be joined or replaced until they leave. An owner that
wants a queue uses `Outbox`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from pixiu.rpc.turn_loop import call_at_end

Out = TypeVar("Out")
"""Messages that this side writes."""
In = TypeVar("In")
"""Messages that this side reads."""
_Out = TypeVar("_Out", contravariant=True)
_In = TypeVar("_In", covariant=True)

CLOSE_WAIT_S: Final = 2.0
"""Time limit for a serving side's write under way when the stream ends, seconds; then it is cut."""
WHY_S: Final = 1.0
"""Time limit for the reader to learn the reason after a write has failed, seconds."""
CLOSED_BY_PEER: Final = "the stream was closed by the other side"


class StreamEnded(Exception):
    """A stream broke, was refused or was not opened. Its text is the reason. It is for owners of streams, and never reaches users.

    Attributes:
        refused: the other side refused it, and trying again is useless.
        retry_after_ms: time for which the other side asks to be left alone; 0: not given.
    """

    def __init__(self, text: str, *, refused: bool = False, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.refused = refused
        self.retry_after_ms = retry_after_ms


class End(NamedTuple):
    """The end of a stream, with its reason."""

    text: str
    refused: bool = False


class Carrier(Protocol[_Out, _In]):
    """One open stream. Every method raises `StreamEnded` when it is over, and no exceptions of the transport."""

    @property
    def serves(self) -> bool:
        """True on the serving side: its end ends the stream, so a write under way must finish before."""

    async def opened(self, timeout_s: float) -> None:
        """Wait until the other side has taken the stream (client), or confirm it to the client (server)."""

    async def read(self) -> _In | None:
        """Read the next message; None when the other side has finished writing."""

    async def write(self, message: _Out) -> None:
        """Write a message; waits while the other side accepts no more."""

    async def done_writing(self) -> None:
        """Finish writing."""


class Served(Carrier[_Out, _In], Protocol[_Out, _In]):
    """The serving side of a stream, which ends when its handler returns, or with the `PixiuError` that it raises."""

    peer: str
    """The caller's address, for logs."""


async def ask(carrier: Carrier[Out, In], message: Out, timeout_s: float) -> In:
    """Begin a stream: write its first message and return the answer. Raises `StreamEnded`, also if the answer is late."""
    try:
        async with asyncio.timeout(timeout_s):
            await carrier.write(message)
            answer = await carrier.read()
    except TimeoutError:
        raise StreamEnded("no answer in time") from None
    if answer is None:
        raise StreamEnded(CLOSED_BY_PEER)
    return answer


@runtime_checkable
class Direct(Protocol[_Out, _In]):
    """A carrier that can also read and write without waiting."""

    def hear(self, arrived: Callable[[], None] | None) -> bool:
        """Call this when something has come, instead of a reader; None: nothing any more. Returns False if something is there, or
        nothing comes any more."""

    def take(self) -> _In | None:
        """Return the next message if it has come; None: there is none, or `read` says what is there. Raises as `read`."""

    def put(self, message: _Out) -> bool:
        """Queue a message, which leaves with `flush`. Returns False if the other side takes no more now. Raises `StreamEnded`."""

    def flush(self) -> bool:
        """Write what is queued. Returns False if nothing more can be queued: the other side takes no more now, or it is over."""


class Work(asyncio.Event):
    """Is set when there is something to write."""

    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[], None] | None = None
        """Writes at the end of the turn. The task that waits would go on in the next iteration of the loop only."""
        self._asked = False

    def set(self) -> None:
        """Have what there is written."""
        if self.act is None:
            super().set()
        elif not self._asked:
            self._asked = True
            call_at_end(self._act)

    def wake(self) -> None:
        """Have the task that waits go on."""
        super().set()

    def _act(self) -> None:
        self._asked = False
        if self.act is not None:
            self.act()
        else:
            super().set()


class Outbox(Generic[Out]):
    """Messages that wait to be written, in order and bounded.

    Args:
        max_messages: limit of waiting messages. Policy: beyond either limit new ones are not taken.
        max_bytes: limit of their bytes; 0: none.
    """

    def __init__(self, max_messages: int, max_bytes: int = 0) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._waiting: deque[tuple[int, Out]] = deque()
        self._bytes = 0
        self.work = Work()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Out, size: int = 0) -> bool:
        """Queue a message of `size` bytes. False: there was no space."""
        if len(self._waiting) >= self._max_messages or (self._max_bytes and self._bytes + size > self._max_bytes):
            return False
        self._waiting.append((size, message))
        self._bytes += size
        self.work.set()
        return True

    def give(self) -> Out | None:
        """Take the next message to write; None when nothing waits."""
        if not self._waiting:
            return None
        size, message = self._waiting.popleft()
        self._bytes -= size
        return message

    def clear(self) -> None:
        """Drop everything that waits."""
        self._waiting.clear()
        self._bytes = 0

    async def wait(self) -> None:
        """Wait until there is a message to write."""
        while not self._waiting:
            self.work.clear()
            await self.work.wait()


class Duplex(Generic[Out, In]):
    """Runs one open stream.

    Args:
        carrier: the stream's transport.
        take: called with each message; if it returns an awaitable, nothing more is read until that is done.
        give: returns the next message to write, None if there is none. Called again after `wake`.
        reads_on: returns False while too much waits to be written: nothing is read until enough is written. Default: always read.
        work: event that is set when `give` has something, instead of `wake`; an `Outbox` has one.
        over: called once, when the stream is over, before the wait for a last write.
        last: awaited after the other side has finished, before the stream ends; default: nothing.
        last_s: time limit of `last`, seconds; None: none.
    """

    def __init__(
        self,
        carrier: Carrier[Out, In],
        take: Callable[[In], Awaitable[object] | None],
        give: Callable[[], Out | None],
        *,
        reads_on: Callable[[], bool] | None = None,
        work: asyncio.Event | None = None,
        over: Callable[[], None] | None = None,
        last: Callable[[], Awaitable[object]] | None = None,
        last_s: float | None = None,
    ) -> None:
        self._carrier, self._take, self._give = carrier, take, give
        self._reads_on, self._wrote = reads_on, asyncio.Event()
        self._work = Work() if work is None else work
        self._direct: Direct[Out, In] | None = carrier if isinstance(carrier, Direct) else None
        self._failure: Exception | None = None
        """Raised by `give` at the end of a turn."""
        self._heard: asyncio.Future[Awaitable[object] | None] | None = None
        """Set while the reader waits for what `_take_directly` leaves to it."""
        self._arrived = False
        self._context: contextvars.Context | None = None
        """Of the reader."""
        self._notify, self._last, self._last_s = over, last, last_s
        self._stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._text = ""
        self._finishing = False
        self._over = False
        self._work.set()  # messages that wait from the beginning

    def wake(self) -> None:
        """Wake the writer: `give` has a message."""
        self._work.set()

    def finish(self) -> None:
        """Write what `give` still has, then finish writing. A serving side ends then; a client reads on to the end."""
        self._finishing = True
        self._work.set()

    def end(self, text: str) -> None:
        """End now; `run` returns this text."""
        if not self._stop.done():
            self._text = text
            self._stop.set_result(None)

    async def run(self) -> End:
        """Run until one side has ended the stream, or it broke. Raises errors of `take` and `give`.

        Cancelling it ends the stream as well.
        """
        loop = asyncio.get_running_loop()
        reader, writer = loop.create_task(self._read()), loop.create_task(self._write())
        try:
            await _first_of(reader, writer, self._stop)
            if reader.done():
                if self._last is not None and reader.exception() is None and not self._stop.done():
                    await self._say_last(self._last, writer)
            elif writer.done() and not self._stop.done():
                await self._hear_last(reader, writer)
        finally:
            self._over = True
            if self._notify is not None:
                self._notify()
            await self._close(reader, writer)
        return self._ended(reader, writer)

    async def _read(self) -> None:
        while True:
            if self._direct is not None and self._direct.hear(self._arrives):
                taken = await self._until_heard(self._direct)
            elif (message := await self._carrier.read()) is None:
                return
            else:
                taken = self._take(message)
            if taken is not None:
                await taken
            while self._reads_on is not None and not self._reads_on():
                self._wrote.clear()
                await self._wrote.wait()

    async def _until_heard(self, carrier: Direct[Out, In]) -> Awaitable[object] | None:
        """Wait until something has come that `_take_directly` leaves to the reader. Returns what `take` waits for."""
        self._context = contextvars.copy_context()
        heard: asyncio.Future[Awaitable[object] | None] = asyncio.get_running_loop().create_future()
        self._heard = heard
        try:
            return await heard
        except asyncio.CancelledError:
            if heard.done() and not heard.cancelled() and heard.exception() is None:
                taken = heard.result()
                if asyncio.iscoroutine(taken):
                    taken.close()  # nobody waits for it any more
            raise
        finally:
            self._heard = None
            carrier.hear(None)

    def _arrives(self) -> None:
        if not self._arrived:
            self._arrived = True
            call_at_end(self._take_directly, self._context)

    def _take_directly(self) -> None:
        """Take what has come while the reader waits; it goes on where it has to wait for something else, and at the end."""
        self._arrived = False
        carrier, heard = self._direct, self._heard
        if carrier is None or heard is None or heard.done():
            return
        taken: Awaitable[object] | None = None
        try:
            reads_on = True
            while taken is None and reads_on and (message := carrier.take()) is not None:
                taken = self._take(message)
                reads_on = self._reads_on is None or self._reads_on()
            if taken is not None or not reads_on or not carrier.hear(self._arrives):
                heard.set_result(taken)
        except Exception as error:
            heard.set_exception(error)

    async def _write(self) -> None:
        while True:
            while not self._over and (message := self._give()) is not None:
                await self._carrier.write(message)
                self._written()
            if self._over:
                return
            if self._finishing:
                await self._carrier.done_writing()
                return
            self._work.clear()
            await self._until_work()

    async def _until_work(self) -> None:
        """Wait until the writer has something to do that `_write_directly` does not."""
        work = self._work
        if self._direct is None or not isinstance(work, Work):
            await work.wait()
            return
        work.act = self._write_directly
        try:
            await work.wait()
        finally:
            work.act = None
        if self._failure is not None:
            raise self._failure

    def _write_directly(self) -> None:
        """Write what there is while the writer waits; it goes on where the other side takes no more, and at the end."""
        carrier, work = self._direct, self._work
        assert carrier is not None
        assert isinstance(work, Work)
        if not (self._over or self._finishing):
            try:
                has_space = carrier.flush()
                while has_space and (message := self._give()) is not None:
                    has_space = carrier.put(message)
                    self._written()
                has_space = carrier.flush()
                if has_space and not self._finishing:
                    return
            except Exception as error:
                self._failure = error
        work.wake()

    def _written(self) -> None:
        if self._reads_on is not None:
            self._wrote.set()

    async def _say_last(self, last: Callable[[], Awaitable[object]], writer: asyncio.Task[None]) -> None:
        waiting = asyncio.ensure_future(last())
        try:
            await _first_of(waiting, writer, self._stop, timeout_s=self._last_s)
        finally:
            waiting.cancel()

    async def _hear_last(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        failed = writer.exception() is not None
        if failed or not self._carrier.serves:
            # After a failed write the reader learns the reason: only readers get the status of a call.
            await _first_of(reader, self._stop, timeout_s=WHY_S if failed else None)

    async def _close(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> None:
        try:
            reader.cancel()
            if self._carrier.serves:
                # A write under way may finish: gRPC refuses to close a call in the middle of one.
                self._work.set()
                await asyncio.wait({reader, writer}, timeout=CLOSE_WAIT_S)
        finally:
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)

    def _ended(self, reader: asyncio.Task[None], writer: asyncio.Task[None]) -> End:
        errors = [error for task in (reader, writer) if not task.cancelled() and (error := task.exception()) is not None]
        for error in errors:
            if not isinstance(error, StreamEnded):
                raise error
        if self._stop.done():
            return End(self._text)
        for error in errors:
            return End(str(error), isinstance(error, StreamEnded) and error.refused)
        return End(CLOSED_BY_PEER)


async def _first_of(*futures: asyncio.Future[None] | asyncio.Future[object], timeout_s: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
