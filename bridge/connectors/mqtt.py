"""Another broker of MQTT as a target and as a source, by MQTT 5 or 3.1.1 and QoS 1.

    target   PUBLISH ──▶ broker ──PUBACK──▶ written         a link that is cut, or silent: everything without a PUBACK again
    source   broker ──PUBLISH──▶ stored in the topic ──▶ PUBACK      the session stays at the broker, so it keeps what is not stored

Source: docs/bridges.md, "To and from another broker of MQTT"; MQTT 5.0 §3.3.1.2, §4.4, §4.9.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from bridge.connector import DONE, Item, Outcome, Record, Verdict, away, said
from bridge.connectors.secrets import secret_of
from bridge.connectors.templates import Template
from bridge.options import BridgeOptions, SourceOptions, TargetOptions
from cluster.settings.fields import bounded
from pixiu.errors import ConfigurationError, InvalidArgument

CONNECT_S: Final = 10.0
NEVER_EXPIRES: Final = 0xFFFFFFFF
READ_S: Final = 1.0
MAX_IN_FLIGHT: Final = 1_000
"""Messages that are published before their PUBACKs are there; a broker of MQTT 5 may allow fewer."""
AT_ONCE: Final = 1_000
TOPIC_HEADER: Final = "mqtt_topic"
"""Header of a message from MQTT with its topic, unless it is the key."""
LOGIN_CODES: Final = frozenset((4, 5, 134, 135, 138, 140))
"""Reason codes and return codes of CONNACK that say that the login is wrong."""
NEVER_CODES: Final = frozenset((144, 149, 153))
"""Reason codes of PUBACK that concern the message itself: topic name invalid, packet too large, payload format invalid."""
MAX_TEXT: Final = 65_535
"""Longest text of MQTT, bytes."""
_FORBIDDEN: Final = re.compile(r"[\0-\x1f\x7f-\x9f\ufdd0-\ufdef\ufffe\uffff]")
MAX_TOPIC_BYTES: Final = 65_535
"""Characters for which brokers end a connection: NUL, control characters, and what is no character. MQTT 5.0 §1.5.4."""
Callbacks = Mapping[str, Callable[..., None]]


@dataclass(frozen=True, kw_only=True)
class _BrokerOptions(BridgeOptions):
    """Options of both ways."""

    host: str = ""
    """Host of the other broker."""
    broker_port: int = bounded(0, 0, 65_535)
    """Its port. 0: 1883, or 8883 with TLS."""
    client_id: str = ""
    """Client ID at the broker. Empty: pixiu-bridge-NAME for a source, with a random part for a target."""
    username: str = ""
    """User name at the broker. Empty: none."""
    password_file: str = ""
    """File with the password. Empty: none."""
    tls_ca: str = ""
    """File of the certificate authority for TLS, or "system". Empty: no TLS."""
    version: int = bounded(5, 4, 5)
    """Version of MQTT: 5, or 4, which is 3.1.1."""
    keep_alive_s: int = bounded(10, 1, 3600)
    """Seconds of silence after which the link is tested; it counts as cut after half as much again."""

    @property
    def port(self) -> int:
        """The other broker's port."""
        return self.broker_port or (8883 if self.tls_ca else 1883)

    def broker_problems(self) -> list[tuple[str, str]]:
        """The wrong options of these."""
        return [] if self.host else [("host", "where the other broker is")]


def _is_topic(name: str) -> bool:
    """True if a message can be published there."""
    return bool(name) and not set("+#") & set(name) and not _FORBIDDEN.search(name) and len(name.encode()) <= MAX_TOPIC_BYTES


@dataclass(frozen=True, kw_only=True)
class MqttTargetOptions(_BrokerOptions, TargetOptions):
    """A bridge with kind = "to-mqtt"."""

    to: str = "{topic}"
    """Topic at the broker; {topic}, {key} and {header:NAME} stand for those of the message."""
    in_flight: int = bounded(1, 1, 1)
    """Batches that are written at one time: the messages of one are on their way together."""
    retain: bool = False
    """True: the broker keeps the last message of each topic."""

    def problems(self) -> Any:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        yield from self.broker_problems()
        try:
            name = Template(self.to).text.example()
        except InvalidArgument as error:
            yield "to", f"a topic: {error}"
        else:
            if not _is_topic(name):
                yield "to", f"a topic, without + and #; {name[:80]!r} is none"


@dataclass(frozen=True, kw_only=True)
class MqttSourceOptions(_BrokerOptions, SourceOptions):
    """A bridge with kind = "from-mqtt"."""

    filters: tuple[str, ...] = ()
    """Filters of topics at the broker, such as ["devices/+/events"]."""
    receive_maximum: int = bounded(1_000, 1, 65_535)
    """Messages that the broker may send before they are stored here (MQTT 5). A broker sends no more than it has for itself."""

    def problems(self) -> Any:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        yield from self.broker_problems()
        if not self.filters:
            yield "filters", 'at least one filter, such as ["devices/+/events"]'


class Link:
    """One connection to a broker. Its library has a thread of its own; callbacks come in the event loop.

    Args:
        options: of the bridge.
        client_id: at the broker.
        keeps: True: the session stays when the connection ends.
    """

    def __init__(self, options: _BrokerOptions, client_id: str, *, keeps: bool) -> None:
        self._options, self._keeps = options, keeps
        self._loop = asyncio.get_running_loop()
        mqtt5 = options.version == 5
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5 if mqtt5 else paho.MQTTv311,
            clean_session=None if mqtt5 else not keeps, manual_ack=True, reconnect_on_failure=False,
        )  # fmt: skip
        self.cut: asyncio.Future[str] = self._loop.create_future()
        """Resolved when the connection ends."""
        self._connected: asyncio.Future[Any] = self._loop.create_future()

    async def open(self, receive_maximum: int = 0, callbacks: Callbacks | None = None) -> Any:
        """Connect. Returns the properties of CONNACK. Raises `Unavailable`, `ConfigurationError` for a login that is refused."""
        options, client = self._options, self.client
        password = secret_of(options.password_file, "password_file")
        if options.username:
            client.username_pw_set(options.username, password or None)
        if options.tls_ca:
            try:
                client.tls_set_context(ssl.create_default_context(cafile=None if options.tls_ca == "system" else options.tls_ca))
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(f"tls_ca = {options.tls_ca}: cannot be read: {said(error)}") from None
        client.max_inflight_messages_set(65_535)
        client.max_queued_messages_set(0)
        client.on_connect = lambda *found: self._call(self._on_connect, found[3], found[4])
        client.on_disconnect = lambda *found: self._call(self._on_cut, str(found[3]))
        for name, call in (callbacks or {}).items():
            setattr(client, name, partial(self._call, call))
        properties = None
        if options.version == 5:
            properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            properties.SessionExpiryInterval = NEVER_EXPIRES if self._keeps else 0
            if receive_maximum:
                properties.ReceiveMaximum = receive_maximum
        clean = not self._keeps if options.version == 5 else paho.MQTT_CLEAN_START_FIRST_ONLY
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.to_thread(
                    client.connect, options.host, options.port, options.keep_alive_s, clean_start=clean, properties=properties
                )
                client.loop_start()
                return await self._connected
        except (OSError, ValueError) as error:
            raise away(f"the broker at {options.host}:{options.port} does not answer: {said(error) or 'in time'}") from error

    async def close(self) -> None:
        """Disconnect."""
        with contextlib.suppress(ValueError, OSError):
            self.client.disconnect()
        await asyncio.to_thread(self.client.loop_stop)

    def _call(self, what: Callable[..., None], *found: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(what, *found)

    def _on_connect(self, code: Any, properties: Any) -> None:
        if self._connected.done():
            return
        if not code.is_failure:
            self._connected.set_result(properties)
            return
        text = f"the broker refuses the connection: {code}"
        if code.value in LOGIN_CODES:
            self._connected.set_exception(ConfigurationError(f"{text}; check username and password_file"))
        else:
            self._connected.set_exception(away(text))

    def _on_cut(self, why: str) -> None:
        if not self._connected.done():
            self._connected.set_exception(away(f"the broker ended the connection: {why}"))
        if not self.cut.done():
            self.cut.set_result(why)


def _cut(text: str) -> str:
    return text.encode()[:MAX_TEXT].decode(errors="ignore")


class MqttTarget:
    """Publishes to a broker.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: MqttTargetOptions) -> None:
        self._name, self._options = name, options
        self._topic = Template(options.to)
        self._link: Link | None = None
        self._max_packet, self._window = 0, MAX_IN_FLIGHT
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._early: dict[int, Any] = {}
        """PUBACKs of packets that are just being sent."""

    async def open(self) -> None:
        """Connect. Raises `Unavailable`, `ConfigurationError`."""
        client_id = self._options.client_id or f"pixiu-bridge-{self._name}-{secrets.token_hex(4)}"
        self._link = link = Link(self._options, client_id, keeps=False)
        properties = await link.open(callbacks={"on_publish": self._on_publish})
        self._max_packet = getattr(properties, "MaximumPacketSize", 0)
        self._window = min(getattr(properties, "ReceiveMaximum", MAX_IN_FLIGHT), MAX_IN_FLIGHT)

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Publish messages, and wait for each PUBACK. Raises `Unavailable` when the connection ends."""
        assert self._link is not None
        outcomes = list[Outcome]()
        for at in range(0, len(batch), self._window):
            outcomes += await self._publish(self._link, batch[at : at + self._window])
            if any(each.verdict is Verdict.AGAIN for each in outcomes):
                break  # nothing may overtake it
        return outcomes + [Outcome(Verdict.AGAIN, outcomes[-1].why)] * (len(batch) - len(outcomes))

    async def _publish(self, link: Link, batch: Sequence[Item]) -> Sequence[Outcome]:
        outcomes = list[Outcome | None]()
        sent = dict[int, asyncio.Future[Any]]()
        for at, item in enumerate(batch):
            wrong, topic = self._check(item)
            if wrong:
                outcomes.append(Outcome(Verdict.NEVER, wrong))
                continue
            info = link.client.publish(topic, item.body, qos=1, retain=self._options.retain, properties=self._properties(item))
            if info.rc not in (MQTTErrorCode.MQTT_ERR_SUCCESS, MQTTErrorCode.MQTT_ERR_QUEUE_SIZE):
                raise away(f"the broker cannot be written to: {paho.error_string(info.rc)}")
            outcomes.append(None)
            sent[at] = self._waiting[info.mid] = asyncio.get_running_loop().create_future()
            if info.mid in self._early:
                self._on_published(info.mid, self._early.pop(info.mid))
        acknowledged = asyncio.gather(*sent.values())
        try:
            await asyncio.wait((acknowledged, link.cut), return_when=asyncio.FIRST_COMPLETED)
        finally:
            acknowledged.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acknowledged
        if any(not each.done() or each.cancelled() for each in sent.values()):
            raise away(f"the broker ended the connection: {link.cut.result() if link.cut.done() else 'it is silent'}")
        return [each or outcome_of(sent[at].result()) for at, each in enumerate(outcomes)]

    def _check(self, item: Item) -> tuple[str, str]:
        """Why a message cannot be published, and its topic."""
        topic = self._topic.fill(item)
        headers = sum(len(name.encode()) + len(value.encode()) + 5 for name, value in self._headers(item))
        size = len(topic.encode()) + len(item.body) + 64 + headers
        if not _is_topic(topic):
            return f"{topic[:80]!r} is no topic of MQTT: change the template `to`, or the key", ""
        if self._max_packet and size > self._max_packet:
            return f"the message has {size - 64} bytes, and the broker takes packets of {self._max_packet}", ""
        return "", topic

    def _headers(self, item: Item) -> list[tuple[str, str]]:
        """The headers as user properties; what MQTT does not allow in texts is replaced, and what is too long is cut."""
        if self._options.version != 5:
            return []
        pairs = ((name, value.decode(errors="replace")) for name, value in item.headers.items() if name != TOPIC_HEADER)
        return [(_FORBIDDEN.sub("\ufffd", name), _cut(_FORBIDDEN.sub("\ufffd", value))) for name, value in pairs]

    def _properties(self, item: Item) -> Properties | None:
        if self._options.version != 5:
            return None
        found = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        headers = self._headers(item)
        if headers:
            found.UserProperty = headers
        return found

    def _on_publish(self, _client: Any, _data: Any, mid: int, code: Any, _properties: Any) -> None:
        if mid in self._waiting:
            self._on_published(mid, code)
        else:
            self._early[mid] = code

    def _on_published(self, mid: int, code: Any) -> None:
        future = self._waiting.pop(mid)
        if not future.done():
            future.set_result(code)

    def settled(self, batch: Sequence[Item]) -> None:
        """Nothing to note."""

    async def close(self) -> None:
        """Disconnect."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()


def outcome_of(code: Any) -> Outcome:
    """The outcome that the reason code of a PUBACK means."""
    if not code.is_failure:
        return DONE
    if code.value in NEVER_CODES:
        return Outcome(Verdict.NEVER, f"the broker refuses the message: {code}")
    need = "; allow this user to publish there" if code.value == 135 else ""
    return Outcome(Verdict.AGAIN, f"the broker answers: {code}{need}")


class MqttSource:
    """Subscribes at a broker, with a session that stays there, and confirms what is stored.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: MqttSourceOptions) -> None:
        self._name, self._options = name, options
        self._link: Link | None = None
        self._arrived: asyncio.Queue[Record] = asyncio.Queue()

    async def open(self) -> Sequence[str]:
        """Connect. Raises `Unavailable`, `ConfigurationError`."""
        client_id = self._options.client_id or f"pixiu-bridge-{self._name}"
        self._link = link = Link(self._options, client_id, keeps=True)
        subscribed = asyncio.get_running_loop().create_future()

        def on_subscribe(_client: Any, _data: Any, _mid: int, codes: Sequence[Any], _properties: Any) -> None:
            if not subscribed.done():
                subscribed.set_result(codes)

        await link.open(
            self._options.receive_maximum if self._options.version == 5 else 0,
            {"on_message": self._on_message, "on_subscribe": on_subscribe},
        )
        link.client.subscribe([(each, 1) for each in self._options.filters])
        async with asyncio.timeout(CONNECT_S):
            codes = await subscribed
        refused = [each for each, code in zip(self._options.filters, codes, strict=False) if code.is_failure]
        if refused:
            raise ConfigurationError(f"the broker refuses the filter {refused[0]}: allow this user to subscribe to it")
        return ()

    async def resume(self, after: Mapping[str, int]) -> None:
        """The broker knows what is not confirmed."""

    async def read(self) -> Sequence[Record]:
        """Wait for messages. Raises `Unavailable` when the connection has ended."""
        assert self._link is not None
        if self._link.cut.done() and self._arrived.empty():
            raise away(f"the broker ended the connection: {self._link.cut.result()}")
        found = list[Record]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                found.append(await self._arrived.get())
        while found and len(found) < AT_ONCE and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return found

    async def confirm(self, records: Sequence[Record]) -> None:
        """Send a PUBACK for each, in their order."""
        assert self._link is not None
        for record in records:
            if record.handle:
                self._link.client.ack(record.handle, 1)

    def _on_message(self, _client: Any, _data: Any, message: Any) -> None:
        headers = {TOPIC_HEADER: message.topic.encode()}
        for name, value in getattr(message.properties, "UserProperty", ()) or ():
            headers[name] = value.encode()
        handle = message.mid if message.qos else 0
        self._arrived.put_nowait(Record(message.payload, key=message.topic.encode(), headers=headers, handle=handle))

    async def close(self) -> None:
        """Disconnect; the session stays."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()
