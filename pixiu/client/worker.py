"""The SnowflakeID worker number: lent by a proxy, renewed before it expires, and given back at the end.

It has a Publish stream of its own that carries nothing else, so that the number outlives the streams of messages and can move to
another proxy.

Source: docs/identifiers.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pixiu.client.login import REFUSED_LOGIN, raise_for_login
from pixiu.client.options import ClientOptions
from pixiu.errors import NotSent
from pixiu.ids import WORKERS, SnowflakeGenerator, SnowflakeID
from pixiu.rpc.backoff import Backoff, Resting, retry_after_s
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import CLOSED_BY_PEER, StreamEnded
from pixiu.rpc.grpc_streams import GrpcCall
from pixiu.wire.v1 import wire_pb2, wire_pb2_grpc

RENEW_RETRY_S: Final = 5.0
"""Minimum wait after an unanswered renewal before the next one, seconds."""
MIN_LEFT_MS: Final = 50
"""A number with less time left than this is no longer used, milliseconds."""

Lending = GrpcCall[wire_pb2.PublishRequest, wire_pb2.PublishReply]


class WorkerLease:
    """Holds a worker number from its first use, and makes SnowflakeIDs with it.

    `proxies` returns the current proxies, `clock_ms` Unix milliseconds, `uniform` numbers in [0, 1) for jitter.
    """

    def __init__(
        self,
        client: str,
        options: ClientOptions,
        channels: Channels,
        proxies: Callable[[], Sequence[str]],
        clock_ms: Callable[[], int],
        uniform: Callable[[], float],
    ) -> None:
        self._client = client
        self._options = options
        self._channels = channels
        self._proxies = proxies
        self._clock_ms = clock_ms
        self._uniform = uniform
        self._generator = SnowflakeGenerator(clock_ms)
        self._lent = asyncio.Event()
        self._over = asyncio.Event()
        """Set when the number is found to be expired: renew it now, because the planned time was computed before the clock was
        set."""
        self._task: asyncio.Task[None] | None = None
        self._call: Lending | None = None
        self._reason = ""
        self._login = ""
        """The reason why the last proxy refused the login; empty if it did not."""
        self._from_ms = 0
        self._refused = ""
        self._resting = Resting()
        self.lent = 0
        """Number of times that a number was lent or extended."""

    def worker(self) -> int:
        """The current number; meaningless before the first message."""
        return int(self._generator.worker)

    @property
    def until_ms(self) -> int:
        """No ID is made for this Unix millisecond and later ones; 0 before the first message."""
        return self._generator.until_ms

    def usable(self) -> bool:
        """True if an ID can be made now, without waiting."""
        return self._generator.usable(MIN_LEFT_MS)

    def next(self) -> SnowflakeID:
        """Make the next ID. Raises `LeaseExpired`; ask `usable` or `ready` before."""
        return self._generator.next()

    async def ready(self) -> None:
        """Wait until an ID can be made. Raises `NotSent` after `publish_timeout_s`, `NotAuthenticated` for a refused login."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.publish_timeout_s
        if self._task is None:
            self._task = loop.create_task(self._hold(), name="pixiu-worker-number")
        self._login = ""
        if self._generator.until_ms and not self.usable():
            self._over.set()
        while not self.usable():
            self._lent.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._lent.wait()
            except TimeoutError:
                raise NotSent(
                    f"no proxy lent a worker number for message IDs within {self._options.publish_timeout_s:g} s "
                    f"({self._why_not()}); check the proxies, and that this machine's clock is right"
                ) from None
            raise_for_login([self._login])

    def _why_not(self) -> str:
        clock = self._generator.why_not() if self._generator.until_ms else ""
        return "; ".join(why for why in (self._reason, clock) if why) or "no proxy answered"

    async def close(self, timeout_s: float) -> None:
        """Give the number back, waiting at most `timeout_s` for the proxy to take it."""
        task, self._task = self._task, None
        if task is None:
            return
        call = self._call
        if call is not None and self._generator.until_ms:
            self._call = None  # the loop in _serve ends with the stream and must not open another one
            last_used_ms = min(max(self._generator.last_used_ms, self._from_ms), self._generator.until_ms - 1)
            try:
                async with asyncio.timeout(timeout_s):
                    await self._give_back(call, last_used_ms, task)
            except (TimeoutError, StreamEnded):
                pass
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _give_back(self, call: Lending, last_used_ms: int, task: asyncio.Task[None]) -> None:
        await call.write(wire_pb2.PublishRequest(last_used_ms=last_used_ms))
        await call.done_writing()
        await asyncio.wait({task})

    async def _hold(self) -> None:
        backoff = Backoff(self._options.backoff_s, self._options.max_backoff_s, self._uniform)
        while True:
            now = asyncio.get_running_loop().time()
            proxies = self._resting.usable(self._proxies(), now)
            # A random proxy, so that clients spread over the proxies; after a failure another one.
            address = proxies[int(self._uniform() * len(proxies)) % len(proxies)]
            if len(proxies) > 1 and address == self._refused:
                address = proxies[(proxies.index(address) + 1) % len(proxies)]
            await asyncio.sleep(self._resting.left_s(address, now))
            before = self.lent
            reason = CLOSED_BY_PEER
            try:
                await self._serve(address)
            except StreamEnded as ended:
                reason = str(ended)
                rest_s = retry_after_s(ended.retry_after_ms, self._uniform)
                self._resting.refused(address, rest_s, asyncio.get_running_loop().time())
            if self._task is None:
                return
            self._refused = address
            self._reason = f"{address}: {reason}"
            self._login = reason if reason.startswith(REFUSED_LOGIN) else ""
            if self._login:
                self._lent.set()  # waiting callers get the error; the next attempt may use a new token
            if self.lent > before:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _serve(self, address: str) -> None:
        """Hold a number at one proxy until the stream ends or the proxy is leaving. Raises `StreamEnded`."""
        call: Lending = GrpcCall.over(
            self._channels,
            address,
            lambda channel: wire_pb2_grpc.PublisherStub(channel).Publish(metadata=self._channels.metadata()),
        )
        reading: asyncio.Task[wire_pb2.PublishReply | None] | None = None
        async with call:
            try:
                hello = wire_pb2.PublishHello(client=self._client, lend_worker=True)
                if self._generator.until_ms:
                    hello.returned_worker, hello.returned_until_ms = self.worker(), self._generator.until_ms
                await call.write(wire_pb2.PublishRequest(hello=hello))
                self._call = call
                lent_before = self.lent
                while True:
                    reading = reading or asyncio.create_task(call.read())
                    over = await self._wait_beside(reading)
                    if not reading.done():
                        if over and self.lent == lent_before:
                            continue
                        if not over and (self.lent == lent_before or not self.usable()):
                            raise StreamEnded("it answered, but lent no worker number")
                        await call.write(wire_pb2.PublishRequest(renew_worker=True))
                        continue
                    reply = reading.result()
                    reading = None
                    if reply is None:
                        raise StreamEnded(CLOSED_BY_PEER)
                    self._take(reply)
                    if reply.draining:
                        return  # it waits for its publishers to leave; the number stays ours until it expires
            finally:
                if self._call is call:
                    self._call = None
                if reading is not None:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)

    async def _wait_beside(self, reading: asyncio.Task[wire_pb2.PublishReply | None]) -> bool:
        """Wait for a reply or the next renewal; True if the number was found to be expired before either. The read itself is not
        cancelled, because that would cancel the stream."""
        over = asyncio.create_task(self._over.wait())
        try:
            await asyncio.wait({reading, over}, timeout=self._renew_in_s(), return_when=asyncio.FIRST_COMPLETED)
            return over.done()
        finally:
            over.cancel()
            self._over.clear()

    def _renew_in_s(self) -> float:
        """Time until the next renewal, seconds: half of the remaining time."""
        left_ms = self._generator.until_ms - max(self._clock_ms(), self._from_ms)
        return max(left_ms / 2000, min(RENEW_RETRY_S, self._options.publish_timeout_s / 4))

    def _take(self, reply: wire_pb2.PublishReply) -> None:
        if reply.failures:
            self._reason = f"{reply.failures[0].code}: {reply.failures[0].text}"
        if not reply.worker_until_ms or reply.worker >= WORKERS or reply.worker_from_ms >= reply.worker_until_ms:
            return
        same = reply.worker == self._generator.worker and self._generator.until_ms
        if same and reply.worker_until_ms < self._generator.until_ms:
            return  # an older answer than the one in use
        self._channels.loans.add(reply.worker, reply.worker_from_ms, reply.loan)
        self._generator.lease(reply.worker, reply.worker_from_ms, reply.worker_until_ms)
        self._from_ms = reply.worker_from_ms
        self.lent += 1
        self._lent.set()
