"""QoS 1 messages of a gateway's clients, sent through the SDK's publisher, which proxies answer.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from cluster.rpc.framed import Framed, FramedCall
from cluster.rpc.methods import PUBLISH
from pixiu.client.options import ClientOptions
from pixiu.client.send.policy import room_policy
from pixiu.client.send.sender import Sender
from pixiu.client.send.streams import PublisherShell, Receipt
from pixiu.discovery.view import View
from pixiu.errors import PixiuError
from pixiu.ids import SnowflakeID
from pixiu.placement.big_rooms import VRooms
from pixiu.rpc.channels import Channels
from pixiu.rpc.duplex import StreamEnded
from pixiu.wire.record import LANE_FIRST, TYPE_AT, TYPE_BITS
from pixiu.wire.v1 import wire_pb2


class Confirmable:
    """A message of QoS 1 in flight to the brokers.

    Args:
        resolved: called once with the message: the brokers have it, or the error is the reason.
    """

    __slots__ = ("_resolved", "attempts", "key", "number", "packet_id", "record", "snowflake")

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
        self.number = 0
        """Place of the message among those of its client."""
        self.attempts = 0

    def resolved(self, error: PixiuError | None) -> None:
        """Report that the brokers have it, or the reason why not."""
        self._resolved(self, error)


class _Awaited(Receipt):
    """A receipt that notifies a connection instead of a coroutine."""

    __slots__ = ("_done", "message")

    def __init__(self, message: Confirmable, done: Callable[[], None]) -> None:
        super().__init__(message.record, message.key, message.record[TYPE_AT] >> TYPE_BITS or LANE_FIRST, message.snowflake)
        self.message, self._done = message, done
        self.watched = True

    def wake(self) -> None:
        self.message.resolved(self.error)
        self._done()


class _Publisher:
    """One stream of messages to each proxy. Clients that meet no capacity wait and get it in turn."""

    def __init__(self, name: str, view: Callable[[], View], framed: Framed) -> None:
        self._name = name
        self._view, self._framed = view, framed
        self._options = ClientOptions()
        self._channels = Channels("proxy")
        self._shell: PublisherShell | None = None
        self._waiting: dict[Callable[[], None], None] = {}
        """Callbacks for when there is capacity, in that order; at most one for each client."""
        self._letting_in = False

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Set the Running proxies, in the order of their registration."""
        if self._shell is not None:
            self._shell.set_proxies(addresses)
        elif addresses:
            core = Sender(room_policy(self._options), addresses, random.random)
            self._shell = PublisherShell(core, self._name, self._channels, lambda: None, self._opens)
        self._space()

    def _opens(self, address: str) -> FramedCall[wire_pb2.PublishRequest, wire_pb2.PublishReply]:
        proxy = next((node for node in self._view().of_role("proxy") if node.address == address), None)
        if proxy is None:
            raise StreamEnded(f"{address}: the registry does not have it any more")
        return self._framed.call(proxy, PUBLISH, wire_pb2.PublishReply.FromString)

    def publish(self, message: Confirmable, when_space: Callable[[], None]) -> bool:
        """Send a message; `message.resolved` is called once. False: no capacity; `when_space` is called when there may be some."""
        shell = self._shell
        if shell is None or not shell.try_admit(len(message.record)):
            self._waiting[when_space] = None
            return False
        shell.offer(_Awaited(message, self._space))
        return True

    def forget(self, when_space: Callable[[], None]) -> None:
        """Forget a client that waits for capacity."""
        self._waiting.pop(when_space, None)

    def _space(self) -> None:
        if self._waiting and not self._letting_in:
            self._letting_in = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        """Call each waiting client once; one that meets no capacity goes to the end."""
        self._letting_in = False
        for when_space in list(self._waiting):
            if self._waiting.pop(when_space, False) is None:
                before = len(self._waiting)
                when_space()
                if len(self._waiting) > before:
                    return  # it met no capacity again: nor would those after it

    async def close(self) -> None:
        """End the streams; unresolved messages fail."""
        if self._shell is not None:
            await self._shell.close(grace_s=1.0)
        await self._channels.close()


class ConfirmedPublishers:
    """Publishes through the cluster's proxies, and reports each message's outcome.

    Acceptance in a big room takes long, and a stream's answers keep their order: big rooms have a stream of their own.

    Args:
        view: gives the newest view of the cluster.
        framed: opens streams.
    """

    def __init__(self, name: str, vrooms: VRooms, view: Callable[[], View], framed: Framed) -> None:
        self._vrooms = vrooms
        self._ordinary, self._big = _Publisher(name, view, framed), _Publisher(name, view, framed)

    def set_proxies(self, addresses: tuple[str, ...]) -> None:
        """Set the Running proxies, in the order of their registration."""
        self._ordinary.set_proxies(addresses)
        self._big.set_proxies(addresses)

    def publish(self, message: Confirmable, when_space: Callable[[], None]) -> bool:
        """Send a message; `message.resolved` is called once. False: no proxy runs, or too much waits for them; `when_space` is
        called when that may have changed."""
        return (self._big if self._vrooms.is_big(message.key) else self._ordinary).publish(message, when_space)

    def forget(self, when_space: Callable[[], None]) -> None:
        """Forget a client that waits for capacity."""
        self._ordinary.forget(when_space)
        self._big.forget(when_space)

    async def close(self) -> None:
        """End the streams; unresolved messages fail."""
        await asyncio.gather(self._ordinary.close(), self._big.close())
