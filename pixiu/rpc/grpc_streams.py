"""gRPC as the carrier of duplex streams: a call (client's side) and a handler (server's side).

All peculiarities of grpc.aio are handled here:

* It raises `CancelledError` in a task that reads, writes or waits for a call that was refused or cancelled. Only a task that was
  itself cancelled may treat that as its own cancellation.
* Cancelling a reader or writer cancels the call, so both have tasks of their own (`pixiu.rpc.duplex`).
* A write that meets the end of a refused call makes it forget the status with the reason: begin with `pixiu.rpc.duplex.ask`, or
  write only the first message before the first answer.
* The end of a call shows as one of five kinds of errors, or as a message that is `EOF`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, Self

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pixiu.errors import InvalidArgument, PixiuError
from pixiu.rpc.channels import REFUSED, STREAM_ERRORS, Channels, reason_of, without_frames
from pixiu.rpc.duplex import In, Out, StreamEnded
from pixiu.rpc.status import GRPC_STATUS

ENDED = (asyncio.CancelledError, *STREAM_ERRORS)
PUSHBACK: Final = "grpc-retry-pushback-ms"
MAX_PUSHBACK_MS: Final = 60_000
"""Longest time for which a server is left alone, milliseconds."""
GARBAGE: Final = "the request is not a message of this method: the client library is broken, or another program called"
Method = Callable[[grpc.aio.Channel], Any]
"""Opens a call: `lambda channel: PiStub(channel).Exchange()`."""


def _why(error: BaseException, *, answered: bool = False) -> BaseException:
    """Choose the exception to raise for an error of a call, `without_frames`. `answered`: the other side had answered it."""
    without_frames(error)
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            return error
        return StreamEnded("the call was cancelled")
    if not isinstance(error, grpc.aio.AioRpcError):
        return StreamEnded(reason_of(error))
    return StreamEnded(reason_of(error, answered=answered), refused=error.code() in REFUSED, retry_after_ms=_pushback_ms(error))


def _pushback_ms(error: grpc.aio.AioRpcError) -> int:
    """Read the time for which a server asks to be left alone from the trailing metadata that gRPC's own retries use too; 0: not
    given."""
    for name, value in error.trailing_metadata() or ():
        if name == PUSHBACK and str(value).isascii() and str(value).isdecimal():
            return min(int(value), MAX_PUSHBACK_MS)
    return 0


class _NotOpened:
    """Placeholder for a call that could not be made: reading and writing raise the reason."""

    def __init__(self, why: StreamEnded) -> None:
        self._why = why

    def cancel(self) -> None:
        """Do nothing: there is no call to cancel."""

    async def _ended(self, *_: object) -> NoReturn:
        raise self._why

    wait_for_connection = read = write = done_writing = _ended


class GrpcCall(Generic[Out, In]):
    """A call that this process makes; `async with` ends it. `over` makes one.

    Args:
        call: a bidirectional call of grpc.aio.
        release: releases its channel.
    """

    serves = False

    def __init__(self, call: Any, release: Callable[[], Awaitable[None]]) -> None:
        self._call, self._release = call, release
        self._answered = False

    @classmethod
    def over(cls, channels: Channels, address: str, method: Method, role: str | None = None) -> Self:
        """Call over a shared channel to an address (host:port); `role` overrides the role of the channels."""
        channel = channels.acquire(address, role)
        try:
            call = method(channel)
        except StreamEnded as why:
            call = _NotOpened(why)
        return cls(call, lambda: channels.release(channel))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """End the call, and release its channel."""
        self.cancel()
        # Owners of streams last, and the connection with the call, see `without_frames`.
        self._call = _NotOpened(StreamEnded("the call was closed"))
        await self._release()

    def cancel(self) -> None:
        """Cancel the call: messages in it are lost."""
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
        """Read the next message; None at the end. Raises `StreamEnded`."""
        try:
            message: In = await self._call.read()
        except ENDED as error:
            raise _why(error, answered=self._answered) from None
        self._answered = True
        return None if message is grpc.aio.EOF else message

    async def write(self, message: Out) -> None:
        """Write a message. Raises `StreamEnded`."""
        try:
            await self._call.write(message)
        except ENDED as error:
            raise _why(error, answered=self._answered) from None

    async def done_writing(self) -> None:
        """Finish writing. Raises `StreamEnded`."""
        try:
            await self._call.done_writing()
        except ENDED as error:
            raise _why(error, answered=self._answered) from None


class Unparsed(Generic[In]):
    """A message as it arrived, in place of the parsed one: the reader of the stream parses it in its turn.

    Args:
        parse: raises `DecodeError`.
        in_turn: calls a function for a number of bytes when it is their turn, and returns its result.
    """

    __slots__ = ("_data", "_in_turn", "_parse")

    def __init__(
        self, data: bytes, parse: Callable[[bytes], In], in_turn: Callable[[Callable[[], In], int], Awaitable[In]]
    ) -> None:
        self._data, self._parse, self._in_turn = data, parse, in_turn

    def parsed(self) -> Awaitable[In]:
        """Parse the message in its turn."""
        return self._in_turn(lambda: self._parse(self._data), len(self._data))


class GrpcHandler(Generic[Out, In]):
    """A call that another process makes to this one: lives in the handler of a bidirectional method, and ends when that returns.

    Args:
        context: gRPC's context of the call.
    """

    serves = True

    def __init__(self, context: Any) -> None:
        self._context = context
        self.peer = str(context.peer())
        """The caller's address, for logs."""

    async def opened(self, timeout_s: float = 0.0) -> None:
        """Confirm to the caller that its call is served, before there is anything to answer."""
        await self._context.send_initial_metadata(())

    async def read(self) -> In | None:
        """Read the next message; None when the caller has finished. Raises `StreamEnded`, and `InvalidArgument` for garbage."""
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
        """Write a message. Raises `StreamEnded`."""
        try:
            await self._context.write(message)
        except ENDED as error:
            raise _why(error) from None

    async def done_writing(self) -> None:
        """Do nothing: the return of the handler finishes the call."""

    async def refuse(self, error: PixiuError, status: grpc.StatusCode | None = None) -> NoReturn:
        """End the call with an error, with its own status or another one. The time after which to try again is sent with it."""
        if error.retry_after_ms:
            self._context.set_trailing_metadata(((PUSHBACK, str(error.retry_after_ms)),))
        await self._context.abort(GRPC_STATUS[error.code] if status is None else status, str(error))
        raise AssertionError("abort raises")
