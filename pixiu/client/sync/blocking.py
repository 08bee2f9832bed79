"""Blocking twins of asynchronous objects: a background thread with an event loop, and methods that run in it.

    class SyncSubscription(Twin[Subscription]):
        join = blocking(Subscription.join)          # the same name, arguments and docstring; waits for the result

Type checkers see the arguments of the asynchronous method, and what awaiting it returns.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from pixiu.client import forks
from pixiu.client.forks import BEFORE_FORK
from pixiu.client.messages.drafts import Draft
from pixiu.client.send.base_writer import BaseWriter
from pixiu.client.send.streams import Receipt
from pixiu.errors import NotConnected

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
W = TypeVar("W")
WriterT = TypeVar("WriterT", bound=BaseWriter[Any])
END_GRACE_S: Final = 1.0
"""Time for tasks that still run when the loop ends to handle their cancellation, seconds."""


class Background:
    """A thread that runs an event loop."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._handing_over = threading.Lock()
        """Held while work is handed to the loop, so that none goes to a loop that has stopped."""
        self._forked = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread and wait for it; interrupting this thread cancels it. Raises `NotConnected` when
        the thread has ended, also while waiting."""
        with self._handing_over:
            loop = self._loop
            future = None if loop is None else asyncio.run_coroutine_threadsafe(work, loop)
        if future is None:
            work.close()
            raise self._not_connected()
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._loop is loop:
                raise
            raise self._not_connected() from None
        except BaseException:
            future.cancel()
            raise

    def run_until_end(self, work: Coroutine[Any, Any, T | None]) -> T | None:
        """`run` for the next value of an iteration: None when the thread has ended."""
        try:
            return self.run(work)
        except NotConnected:
            if self._forked or self._loop is not None:
                raise
            return None

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call a function in the background thread, without waiting."""
        with self._handing_over:
            if self._loop is None:
                raise self._not_connected()
            self._loop.call_soon_threadsafe(call)

    def post(self, draft: Draft, timeout_s: float | None) -> Receipt:
        """Hand a message to the loop, without waiting for it."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until the loop's client has everything that was handed over, so that the next call does not overtake it."""

    def start_thread(self) -> None:
        """Start the thread with its event loop."""
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, args=(loop,), name="pixiu-client", daemon=True)
        self._thread.start()
        self._forked = False
        forks.watch(self)

    def stop_thread(self) -> None:
        """End the loop, and wait for the thread. Callers that wait in `run` get `NotConnected`."""
        forks.forget(self)
        with self._handing_over:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
            if loop is not None:
                loop.call_soon_threadsafe(loop.stop)
        if thread is not None:
            thread.join()

    @classmethod
    def _turn(cls, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.set_exception_handler(_report)
        try:
            loop.run_forever()
            loop.run_until_complete(cls._end_tasks())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    @staticmethod
    async def _end_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_GRACE_S)

    def forked(self) -> None:
        """Forget the thread: this process is a child of the one that connected, and threads do not survive a fork."""
        self._loop = self._thread = None
        self._handing_over = threading.Lock()
        self._forked = True

    def _not_connected(self) -> NotConnected:
        if self._forked:
            return NotConnected(BEFORE_FORK)
        return NotConnected("the client is not connected: use it inside `with pixiu.connect_sync(…) as px:`")


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle exceptions that no task took. gRPC wakes every loop of a process for an event that only one of them can read; the
    others' failures (https://github.com/grpc/grpc/issues/25364) are not errors."""
    if isinstance(context.get("exception"), BlockingIOError) and "PollerCompletionQueue" in context.get("message", ""):
        return
    loop.default_exception_handler(context)


class Twin(Generic[W]):
    """The blocking twin of an object that lives in the background thread.

    Args:
        background: the thread.
        wrapped: the object.
    """

    __slots__ = ("_background", "_wrapped")

    def __init__(self, background: Background, wrapped: W) -> None:
        self._background = background
        self._wrapped = wrapped


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The blocking twin of an asynchronous method."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._background.run(method(self._wrapped, *args, **kwargs))
        return result

    return call


def _returning(twin: Callable[[Background, T], R], call: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Let `help` and other readers of annotations see the twin that a method returns."""
    if isinstance(twin, type):
        call.__annotations__ = {**call.__annotations__, "return": twin}
    return call


def blocking_as(
    twin: Callable[[Background, T], R], method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Any, P], R]:
    """`blocking`, with a twin of the result."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return twin(self._background, self._background.run(method(self._wrapped, *args, **kwargs)))

    return _returning(twin, call)


def sending_as(
    twin: Callable[[Background, T], R], method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
) -> Callable[Concatenate[Any, P], R]:
    """`blocking_as` for methods that send: runs after everything that the thread sent before."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._background.settle()
        return twin(self._background, self._background.run(method(self._wrapped, *args, **kwargs)))

    return _returning(twin, call)


def in_loop_as(twin: Callable[[Background, T], R], method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], R]:
    """The twin of the result of a plain method that has to run in the background thread."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def there() -> T:
            return method(self._wrapped, *args, **kwargs)

        return twin(self._background, self._background.run(there()))

    return _returning(twin, call)


def here(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A plain method that may be called from any thread."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._wrapped, *args, **kwargs)

    return call


def here_as(twin: Callable[[Background, T], R], method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], R]:
    """`here`, with a twin of the result."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return twin(self._background, method(self._wrapped, *args, **kwargs))

    return _returning(twin, call)


class TwinWriter(Twin[WriterT]):
    """The blocking twin of a writer."""

    __slots__ = ()
    wait_finished = blocking(BaseWriter.wait_finished)

    def __enter__(self) -> Self:
        self._background.run(self._wrapped.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait_finished()
