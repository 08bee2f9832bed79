"""gRPC as the carrier of duplex streams: a call (client's side) and a handler (server's side).

What is peculiar about grpc.aio is dealt with here and nowhere else:

* It raises `CancelledError` in whoever reads, writes or waits for a call that was refused or cancelled. Only a task that was
  itself asked to end may take that for its own end.
* A reader or writer that is cancelled cancels the call; so both have tasks of their own (`pixiu.rpc.duplex`).
* A write that meets the end of a refused call makes it forget the status that says why: begin with `pixiu.rpc.duplex.ask`, or write
  only the first message before the first answer.
* The end of a call is told by five kinds of errors, and by a message that is `EOF`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pixiu.errors import InvalidArgument, Overloaded, PixiuError
from pixiu.rpc.channels import REFUSED, STREAM_ERRORS, Channels, reason_of
from pixiu.rpc.duplex import In, Out, StreamEnded
from pixiu.rpc.status import GRPC_STATUS
from pixiu.rpc.tls import peer_channel

ENDED = (asyncio.CancelledError, *STREAM_ERRORS)
PUSHBACK: Final = "grpc-retry-pushback-ms"
MAX_PUSHBACK_MS: Final = 60_000
"""Nobody is left alone for longer."""
GARBAGE: Final = "the request is not a message of this method: the client library is broken, or another program called"
Method = Callable[[grpc.aio.Channel], Any]
"""Opens a call: `lambda channel: PiStub(channel).Exchange()`."""


def _why(error: BaseException, *, answered: bool = False) -> BaseException:
    """What to raise for an error of a call. `answered`: the other side had answered it."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return error
        return StreamEnded("the call was cancelled")
    if not isinstance(error, grpc.aio.AioRpcError):
        return StreamEnded(reason_of(error))
    return StreamEnded(reason_of(error, answered=answered), refused=error.code() in REFUSED, retry_after_ms=_pushback_ms(error))


def _pushback_ms(error: grpc.aio.AioRpcError) -> int:
    """How long a server wants to be left alone, by the trailing metadata that gRPC's own retries honour too; 0: it did not say."""
    for name, value in error.trailing_metadata() or ():
        if name == PUSHBACK and str(value).isascii() and str(value).isdecimal():
            return min(int(value), MAX_PUSHBACK_MS)
    return 0


class _NotOpened:
    """In the place of a call that could not be made: says why to whoever reads or writes."""

    def __init__(self, why: StreamEnded) -> None:
        self._why = why

    def cancel(self) -> None:
        """There is nothing to cancel."""

    async def _ended(self, *_: object) -> NoReturn:
        raise self._why

    wait_for_connection = read = write = done_writing = _ended


class GrpcCall(Generic[Out, In]):
    """A call that this process makes; `async with` ends it. Use `over` or `to`.

    Args:
        call: a bidirectional call of grpc.aio.
        release: gives up its channel.
    """

    serves = False

    def __init__(self, call: Any, release: Callable[[], Awaitable[None]]) -> None:
        self._call, self._release = call, release
        self._answered = False

    @classmethod
    def over(cls, channels: Channels, address: str, method: Method, role: str | None = None) -> Self:
        """Call over a shared channel to an address (host:port); `role` where it is another than the channels'."""
        channel = channels.acquire(address, role)
        try:
            call = method(channel)
        except StreamEnded as why:
            call = _NotOpened(why)
        return cls(call, lambda: channels.release(address, channel))

    @classmethod
    def to(cls, address: str, role: str, options: Sequence[tuple[str, int]], method: Method) -> Self:
        """Call a process of this role over a channel of its own, which connects now whatever back-off other channels are in."""
        channel = peer_channel(address, role, options)
        return cls(method(channel), channel.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """End it, and give up its channel."""
        self.cancel()
        await self._release()

    def cancel(self) -> None:
        """Break it: what it holds is lost."""
        self._call.cancel()

    async def opened(self, timeout_s: float) -> None:
        """Wait for the connection. Raises `StreamEnded`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._call.wait_for_connection()
        except (TimeoutError, *ENDED) as error:
            if isinstance(error, TimeoutError):
                raise StreamEnded("no connection in time") from None
            raise _why(error) from None

    async def read(self) -> In | None:
        """The next message; None at the end. Raises `StreamEnded`."""
        try:
            message: In = await self._call.read()
        except ENDED as error:
            raise _why(error, answered=self._answered) from None
        self._answered = True
        return None if message is grpc.aio.EOF else message

    async def write(self, message: Out) -> None:
        """Send one. Raises `StreamEnded`."""
        try:
            await self._call.write(message)
        except ENDED as error:
            raise _why(error, answered=self._answered) from None

    async def done_writing(self) -> None:
        """No more will be sent. Raises `StreamEnded`."""
        try:
            await self._call.done_writing()
        except ENDED as error:
            raise _why(error, answered=self._answered) from None


class Unparsed(Generic[In]):
    """A message as it came, in the place of itself: who reads the stream parses it when it is time.

    Args:
        parse: raises `DecodeError`.
        in_turn: calls a function for so many bytes when it is their turn, and returns what it returns.
    """

    __slots__ = ("_data", "_in_turn", "_parse")

    def __init__(
        self, data: bytes, parse: Callable[[bytes], In], in_turn: Callable[[Callable[[], In], int], Awaitable[In]]
    ) -> None:
        self._data, self._parse, self._in_turn = data, parse, in_turn

    def parsed(self) -> Awaitable[In]:
        """The message."""
        return self._in_turn(lambda: self._parse(self._data), len(self._data))


class GrpcHandler(Generic[Out, In]):
    """A call that another process makes of this one: lives in the handler of a bidirectional method, and ends when that returns.

    Args:
        context: of the call.
    """

    serves = True

    def __init__(self, context: Any) -> None:
        self._context = context
        self.peer = str(context.peer())
        """Where it comes from, for logs."""

    async def opened(self, timeout_s: float = 0.0) -> None:
        """Tell the caller that its call is served, before there is anything to answer."""
        await self._context.send_initial_metadata(())

    async def read(self) -> In | None:
        """The next message; None when the caller sends no more. Raises `StreamEnded`, and `InvalidArgument` for garbage."""
        try:
            message = await self._context.read()
            if isinstance(message, Unparsed):
                parsed: In = await message.parsed()
                return parsed
        except DecodeError:
            raise InvalidArgument(GARBAGE) from None
        except ENDED as error:
            raise _why(error) from None
        read: In | None = None if message is grpc.aio.EOF else message
        return read

    async def write(self, message: Out) -> None:
        """Send one. Raises `StreamEnded`."""
        try:
            await self._context.write(message)
        except ENDED as error:
            raise _why(error) from None

    async def done_writing(self) -> None:
        """The handler's return says it."""

    async def refuse(self, error: PixiuError, status: grpc.StatusCode | None = None) -> NoReturn:
        """End the call with an error: its own status, or another one. The time after which to try again goes with it."""
        if isinstance(error, Overloaded) and error.retry_after_ms:
            self._context.set_trailing_metadata(((PUSHBACK, str(error.retry_after_ms)),))
        await self._context.abort(GRPC_STATUS[error.code] if status is None else status, str(error))
        raise AssertionError("abort raises")
