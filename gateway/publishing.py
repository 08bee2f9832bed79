"""QoS 1 messages of a gateway's clients: through the publisher of the SDK, which a proxy answers.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from pixiu.client.options import ClientOptions
from pixiu.client.publisher import PublisherCore
from pixiu.client.streams import PublisherShell, Receipt
from pixiu.errors import Overloaded, PixiuError, Unavailable
from pixiu.ids import SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.channels import Channels
from pixiu.wire.record import LANE_FIRST


class Confirmable:
    """A message of QoS 1 on its way to the brokers.

    Args:
        resolved: called once with the message: the brokers have it, or the error says why not.
    """

    __slots__ = ("_resolved", "attempts", "key", "packet_id", "record", "snowflake")

    def __init__(
        self,
        resolved: Callable[[Confirmable, PixiuError | None], None],
        packet_id: int,
        key: int,
        record: bytes,
        snowflake: SnowflakeID,
    ) -> None:
        self._resolved = resolved
        self.packet_id = packet_id
        self.key = key
        self.record = record
        self.snowflake = snowflake
        self.attempts = 0

    def resolved(self, error: PixiuError | None) -> None:
        """The brokers have it, or `error` says why not."""
        self._resolved(self, error)


class _Awaited(Receipt):
    """A receipt that tells a connection instead of a coroutine."""

    __slots__ = ("message",)

    def __init__(self, message: Confirmable) -> None:
        super().__init__(message.record, message.key, message.record[6] >> 6 or LANE_FIRST, message.snowflake)
        self.message = message
        self.watched = True

    def wake(self) -> None:
        self.message.resolved(self.error)


class _Publisher:
    """One stream of messages to each proxy."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._options = ClientOptions()
        self._channels = Channels()
        self._shell: PublisherShell | None = None

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """The Running proxies, in the order of their registration."""
        if self._shell is not None:
            self._shell.set_proxies(addresses)
        elif addresses:
            core = PublisherCore(self._options, addresses, random.random)
            self._shell = PublisherShell(core, self._name, self._channels, lambda: None)

    def publish(self, message: Confirmable) -> None:
        """Send a message; `message.resolved` is called once. Raises `Unavailable` or `Overloaded`."""
        if self._shell is None:
            raise Unavailable("no proxy is running; `pixiu status` shows which processes are missing")
        if not self._shell.try_admit(len(message.record)):
            raise Overloaded(f"{self._options.queue_bytes} bytes of QoS 1 messages wait for the proxies", retry_after_ms=1_000)
        self._shell.offer(_Awaited(message))

    async def close(self) -> None:
        """End the streams; what is unresolved fails."""
        if self._shell is not None:
            await self._shell.close(grace_s=1.0)
        await self._channels.close()


class ConfirmedPublishers:
    """Publishes through the cluster's proxies, and reports each message's outcome.

    Acceptance in a big room takes long, and a stream's answers keep their order: big rooms have a stream of their own.
    """

    def __init__(self, name: str, vrooms: VRooms) -> None:
        self._vrooms = vrooms
        self._ordinary, self._big = _Publisher(name), _Publisher(name)

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """The Running proxies, in the order of their registration."""
        self._ordinary.set_proxies(addresses)
        self._big.set_proxies(addresses)

    def publish(self, message: Confirmable) -> None:
        """Send a message; `message.resolved` is called once. Raises `Unavailable` or `Overloaded`."""
        (self._big if self._vrooms.is_big(message.key) else self._ordinary).publish(message)

    async def close(self) -> None:
        """End the streams; what is unresolved fails."""
        await asyncio.gather(self._ordinary.close(), self._big.close())
