"""Ends the calls that their handlers refuse, and frees them at once.

    handler ── raises a PixiuError ──▶ its status, as text "CODE: what is wrong", and the time after which to try again
            ── context.abort ────────▶ as it said

gRPC keeps the error that `context.abort` raises in the call. The error's traceback holds the handler's frames, and these hold the
call and its request. This cycle stays in memory until the garbage collector runs: 750 refused requests of 300 KiB held 300 MiB.

Source: docs/protocol.md; docs/security.md, "What one request may ask for".
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from pixiu.errors import PixiuError
from pixiu.rpc.grpc_streams import PUSHBACK
from pixiu.rpc.status import GRPC_STATUS


class RefusedCalls(grpc.aio.ServerInterceptor):
    """Makes a status of the error that a handler raises. It has to be the outermost interceptor: it takes the traceback off."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call. Called by gRPC for each call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        return handler._replace(**{kind: _ending(getattr(handler, kind))})


def _ending(inner: Any) -> Any:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await inner(request, context)
        except (PixiuError, grpc.aio.AbortError) as error:
            await _end(context, error)

    async def answers(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for reply in inner(request, context):
                yield reply
        except (PixiuError, grpc.aio.AbortError) as error:
            await _end(context, error)

    return answers if inspect.isasyncgenfunction(inner) else answer


async def _end(context: Any, error: Exception) -> None:
    """Abort the call, if that is not done, and take off what the error of that holds. gRPC raises it again, from its own frames,
    when the handler has returned."""
    try:
        if isinstance(error, PixiuError):
            if error.retry_after_ms:
                context.set_trailing_metadata(((PUSHBACK, str(error.retry_after_ms)),))
            await context.abort(GRPC_STATUS[error.code], f"{error.code}: {error}")
    except grpc.aio.AbortError as aborted:
        error = aborted
    error.__traceback__ = error.__context__ = None
