"""Sessions with a real cluster: MQTT and gRPC subscribers, publishing by MQTT and through the SDK.

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from pixiu.client.client import Client, connect
from pixiu.client.receive.subscriber import Subscription
from pixiu.client.send.streams import Receipt
from pixiu.client.writer import Writer
from pixiu.discovery.node import Node
from pixiu.errors import NotConnected, Overloaded, PixiuError, Unavailable
from pixiu.ids import UIN, RoomID
from pixiu.rpc.client_tls import client_tls
from tools.load.mqtt import Answer, MQTTClient
from tools.replay.inbox import inbox_of, user_of
from tools.replay.options import ReplayOptions
from tools.replay.plan import share_of
from tools.replay.sessions import Done, Session
from tools.replay.watch import ClusterWatch

OnMessage = Callable[[UIN, RoomID, bytes], None]
OnBroken = Callable[[UIN, str], None]
TokenOf = Callable[[UIN], str]
CONNECT_TIMEOUT_S = 15.0
ANSWER_WAIT_S = 5.0
PAUSE_S = 0.01
"""Wait before a publish that a connection's own limit refused is tried again, seconds."""


class MQTTSession:
    """A user on an MQTT connection. `open` connects."""

    publishes = True

    def __init__(self, uin: UIN, node: Node, client_id: str, on_message: OnMessage, on_broken: OnBroken, token: str = "") -> None:
        self.gateway = int(node.endpoint)
        self._uin = uin
        self._on_message = on_message
        self._on_broken = on_broken
        self._rooms: dict[str, RoomID] = {}
        self._topics: dict[RoomID, str] = {}
        self._answers: set[Answer] = set()
        self._closing = False
        tls = client_tls()
        self._client = MQTTClient(
            node.mqtt_host,
            node.mqtt_port,
            client_id,
            str(uin),
            password=token or None,
            on_message=self._arrived,
            on_disconnect=self._ended,
            tls=None if tls is None else tls.context(),
        )

    async def open(self) -> None:
        """Connect. Raises `PixiuError`."""
        await self._client.connect()

    async def join(self, room: RoomID) -> None:
        """Subscribe; the gateway answers when the whole cluster knows."""
        await self._client.subscribe([self._topic(room)])

    async def leave(self, room: RoomID) -> None:
        """Unsubscribe from a room."""
        await self._client.unsubscribe([self._topic(room)])

    async def publish(self, room: RoomID, payload: bytes, done: Done) -> None:
        """Publish with QoS 1: the PUBACK is the cluster's acceptance."""
        while True:
            try:
                answer = self._client.publish_with_ack(self._topic(room), payload)
            except Overloaded:
                await asyncio.sleep(PAUSE_S)
            except PixiuError as error:
                done(error.code)
                return
            else:
                self._answers.add(answer)
                answer.add_done_callback(lambda future: self._answered(future, done))
                return

    async def close(self) -> None:
        """Send DISCONNECT, once everything published is answered (or `ANSWER_WAIT_S` is over)."""
        self._closing = True
        if self._answers:
            await asyncio.wait(self._answers, timeout=ANSWER_WAIT_S)
        await self._client.close()

    def _answered(self, answer: Answer, done: Done) -> None:
        self._answers.discard(answer)
        done(_code(answer))

    def _topic(self, room: RoomID) -> str:
        topic = self._topics.get(room)
        if topic is None:
            user = user_of(room)
            topic = self._topics[room] = f"room/{room}" if user is None else f"user/{user}"
            self._rooms[topic] = room
        return topic

    def _arrived(self, topic: str, payload: bytes) -> None:
        self._on_message(self._uin, self._rooms.get(topic, RoomID(0)), payload)

    def _ended(self, error: PixiuError | None) -> None:
        if not self._closing:
            self._closing = True
            self._on_broken(self._uin, str(error or "closed"))


class GRPCSession:
    """A user with the SDK's subscription, which must not reconnect by itself, so that breaks are seen."""

    publishes = False
    _closers: ClassVar[set[asyncio.Task[None]]] = set()
    """Tasks of clients that close by themselves: the loop holds tasks only weakly."""

    def __init__(
        self,
        uin: UIN,
        client: Client,
        endpoint_of: Callable[[str], int],
        on_message: OnMessage,
        on_broken: OnBroken,
        *,
        chat: bool,
    ) -> None:
        self._chat = chat
        self._uin = uin
        self._client = client
        self._endpoint_of = endpoint_of
        self._on_message = on_message
        self._on_broken = on_broken
        self._subscription: Subscription | None = None
        self._reader: asyncio.Task[None] | None = None
        self._last_gateway = ""
        self._closing = False

    @property
    def gateway(self) -> int:
        """The gateway's endpoint ID."""
        if self._subscription is not None and self._subscription.gateway:
            self._last_gateway = self._subscription.gateway
        return self._endpoint_of(self._last_gateway)

    async def open(self) -> None:
        """Connect. Raises `PixiuError`."""
        await self._client.open()
        self._subscription = self._client.subscribe(on_gap=self._gap, chat=self._chat)
        await self._subscription.ready(timeout_s=CONNECT_TIMEOUT_S)
        self._reader = asyncio.create_task(self._read(self._subscription), name=f"subscriber {self._uin}")

    async def join(self, room: RoomID) -> None:
        """Join a room; returns when the whole cluster knows. The user's own messages come from the start."""
        subscription = self._open_subscription()
        if user_of(room) is None:
            await subscription.join([room])
        self._last_gateway = subscription.gateway or self._last_gateway

    async def leave(self, room: RoomID) -> None:
        """Leave a room; returns when the whole cluster knows."""
        if user_of(room) is None:
            await self._open_subscription().leave([room])

    async def publish(self, room: RoomID, payload: bytes, done: Done) -> None:
        """Fail: a subscription does not publish."""
        done(NotConnected.code)

    async def close(self) -> None:
        """End the subscription and its client."""
        self._closing = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._client.close()

    def _open_subscription(self) -> Subscription:
        if self._subscription is None or self._closing:
            raise NotConnected("the subscription has ended")
        return self._subscription

    async def _read(self, subscription: Subscription) -> None:
        try:
            async for messages in subscription.batches():
                for message in messages:
                    self._on_message(self._uin, inbox_of(message.user) if message.user else message.room, message.payload)
        except PixiuError as error:
            self._gap(str(error))

    def _gap(self, reason: str) -> None:
        if self._closing:
            return
        self._on_broken(self._uin, reason)
        self._closing = True
        closer = asyncio.create_task(self._client.close())
        self._closers.add(closer)
        closer.add_done_callback(self._closers.discard)


class ClusterConnector:
    """Opens sessions with the gateways that a watch sees Running, in turn; publishes through one SDK client. `inboxes`: the users
    who get messages of their own. `token_of`: returns the token of a user (0: the back end), if the cluster requires a login."""

    def __init__(
        self,
        target: str,
        watch: ClusterWatch,
        options: ReplayOptions,
        inboxes: frozenset[UIN] = frozenset(),
        token_of: TokenOf | None = None,
    ) -> None:
        self._inboxes, self._token_of = inboxes, token_of
        self._target = target
        self._watch = watch
        self._options = options
        self._sdk: Client | None = None
        self._turn = itertools.count()
        self._answers: set[asyncio.Task[None]] = set()
        self._writers: dict[RoomID, Writer] = {}

    async def start(self) -> None:
        """Connect the SDK. Raises `PixiuError`."""
        self._sdk = connect(self._target, client="pixiu-replay", token=self._token(UIN(0)))
        await self._sdk.open()

    async def close(self) -> None:
        """Disconnect the SDK."""
        if self._sdk is not None:
            await self._sdk.close()
        await asyncio.gather(*self._answers, return_exceptions=True)

    async def open(self, uin: UIN, on_message: OnMessage, on_broken: OnBroken) -> Session:
        """Open one user's connection: by gRPC for `grpc_share` of the users, else by MQTT."""
        turn = next(self._turn)
        if share_of(uin) < self._options.grpc_share:
            return await self._open_grpc(uin, turn, on_message, on_broken)
        gateways = [node for node in self._watch.living("gateway") if node.mqtt_port]
        if not gateways:
            raise Unavailable("no gateway is Running")
        token = self._token_of(uin) if self._token_of is not None else ""
        session = MQTTSession(uin, gateways[turn % len(gateways)], f"replay-{uin:x}-{turn}", on_message, on_broken, token)
        await session.open()
        return session

    def _token(self, uin: UIN) -> Callable[[], str] | None:
        """A function that returns the current token; None if there are no tokens."""
        return None if self._token_of is None else partial(self._token_of, uin)

    async def publish(self, uin: UIN, room: RoomID, payload: bytes, done: Done) -> None:
        """Send like a back end. The SDK's sender is its client, so these records carry none of the log's users."""
        assert self._sdk is not None
        try:
            receipt = await self._writer(self._sdk, room).send(payload)
        except PixiuError as error:
            done(error.code)
            return
        task = asyncio.create_task(_answer(receipt, done))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _writer(self, sdk: Client, room: RoomID) -> Writer:
        if room not in self._writers:
            user = user_of(room)
            self._writers[room] = (sdk.room(room) if user is None else sdk.user(user).destination).writer()
        return self._writers[room]

    async def _open_grpc(self, uin: UIN, turn: int, on_message: OnMessage, on_broken: OnBroken) -> Session:
        proxies = ",".join(node.client_address for node in self._watch.living("proxy")[:8])
        if not proxies:
            raise Unavailable("no proxy is Running")
        client = connect(proxies, uin=uin, client=f"replay-{uin:x}-{turn}", token=self._token(uin))
        session = GRPCSession(uin, client, self._endpoint_of, on_message, on_broken, chat=uin in self._inboxes)
        try:
            await session.open()
        except BaseException:
            await session.close()
            raise
        return session

    def _endpoint_of(self, address: str) -> int:
        return next(
            (int(node.endpoint) for node in self._watch.seen() if node.role == "gateway" and node.client_address == address), 0
        )


async def _answer(receipt: Receipt, done: Done) -> None:
    try:
        await receipt
    except PixiuError as error:
        done(error.code)
    else:
        done("")


def _code(future: Answer) -> str:
    if future.cancelled():
        return NotConnected.code
    error = future.exception()
    if error is None:
        return ""
    return error.code if isinstance(error, PixiuError) else PixiuError.code
