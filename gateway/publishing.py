"""QoS 1 messages of a gateway's clients: through the publisher of the SDK, which a proxy answers.

Source: DESIGN section 15, "PUBACK follows the proxy's acceptance".
"""

from __future__ import annotations

import random

from gateway.mqtt import Confirmable
from pixiu.client.options import ClientOptions
from pixiu.client.publisher import PublisherCore
from pixiu.client.streams import PublisherShell, Receipt
from pixiu.errors import Overloaded, Unavailable
from pixiu.rpc.channels import Channels
from pixiu.wire.record import LANE_FIRST


class _Awaited(Receipt):
    """A receipt that tells a connection instead of a coroutine."""

    __slots__ = ("message",)

    def __init__(self, message: Confirmable) -> None:
        super().__init__(message.record, message.key, message.record[6] >> 6 or LANE_FIRST, message.snowflake)
        self.message = message
        self.watched = True

    def wake(self) -> None:
        self.message.resolved(self.error)


class ConfirmedPublisher:
    """Publishes through the cluster's proxies and tells each message's outcome."""

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
