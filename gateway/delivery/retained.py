"""Retained messages on their way to clients that have just subscribed, and live messages that cross them. Pure.

A client gets what is retained once its subscription is in effect. Until everything has come, messages that it gets live are noted:
a retained message that it has already, or one older than that of the same topic, is not delivered. One that was published a moment
ago may come live after it was delivered as retained: that is not delivered again either. So it is delivered as the live one would
be, with the options of all filters of the client that match it.

Source: MQTT 5.0 section 3.3.1.3; docs/subscriptions.md, "Retained messages".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from cluster.mqtt.properties_in_records import qos_of, retain_of
from gateway import events as ev
from gateway.delivery.fan_out import FanOut, expires_at_ms_of
from gateway.membership.rooms import Channel, RoomIndex, merged
from pixiu.ids import snowflake_time_ms
from pixiu.placement.filter_tree import filter_matches
from pixiu.placement.topics import ROOM_PREFIX, Filter
from pixiu.wire.record import FLAGS_AT, KEY_AT, SENDER_AT, SNOWFLAKE_AT, Flag, intact_body

CROSSING_MS: Final = 15_000
"""Time after its publication for which a message may still come live, as in `gateway.delivery.dedupe`."""
MAX_RECENT: Final = 100_000
"""Retained messages in one generation that may still come live. Policy: beyond two generations one may come twice."""
MAX_CROSSED: Final = 100_000
"""Topics of live messages noted for one fetch. Policy: further ones may be repeated by older retained messages."""


@dataclass(slots=True)
class _Fetch:
    connection: int
    filters: dict[str, bytes]
    """Filter as the client names it → its name."""
    exact: dict[bytes, str] = field(default_factory=dict)
    wild: list[tuple[bytes, str]] = field(default_factory=list)
    crossed: dict[bytes, int] = field(default_factory=dict)
    """Topic → highest SnowflakeID of a retained message that came live."""


class RetainedDeliveries:
    """Fetches under way.

    Args:
        index: of the gateway.
        fan_out: takes what is delivered.
    """

    def __init__(self, index: RoomIndex, fan_out: FanOut) -> None:
        self._index, self._fan_out = index, fan_out
        self._last = 0
        self._fetches: dict[int, _Fetch] = {}
        self._recent: dict[bytes, set[int]] = {}
        """SnowflakeID of a message → connections that have got it as retained."""
        self._before: dict[bytes, set[int]] = {}
        self._turned_ms = 0
        self.delivered = 0

    def __len__(self) -> int:
        """Number of fetches under way."""
        return len(self._fetches)

    @property
    def watches(self) -> bool:
        """True while live messages must be shown to `watch`."""
        return bool(self._fetches or self._recent or self._before)

    def begin(self, connection: int, filters: list[str]) -> int:
        """Note live messages from now on: a client has subscribed. Returns the number of its fetch."""
        self._last += 1
        client = self._index.clients[connection]
        names = {text: client.filters[text].filter for text in filters}
        fetch = self._fetches[self._last] = _Fetch(connection, {text: found.name.encode() for text, found in names.items()})
        for text, found in names.items():
            name = found.name.encode()
            if found.wild:
                fetch.wild.append((name, text))
            else:
                fetch.exact[name] = text
        return self._last

    def effect(self, number: int, refused: frozenset[str]) -> ev.FetchRetained | None:
        """The fetch, now that the subscription is in effect, without what was refused."""
        fetch = self._fetches.get(number)
        if fetch is None:
            return None
        wanted = [name.decode() for text, name in fetch.filters.items() if text not in refused]
        if not wanted:
            del self._fetches[number]
            return None
        return ev.FetchRetained(fetch.connection, number, wanted)

    def found(self, event: ev.RetainedFound, now_ms: int) -> None:
        """Deliver a slice of what was found."""
        fetch = self._fetches.get(event.fetch)
        client = self._index.clients.get(event.connection)
        if fetch is None or client is None or client.gone:
            return
        self._turn(now_ms)
        for record in event.records:
            body = intact_body(record)
            topic = b"" if body is None else topic_of(record, body)
            snowflake = record[SNOWFLAKE_AT:KEY_AT]
            number = int.from_bytes(snowflake, "little")
            if not topic or fetch.crossed.get(topic, -1) >= number:
                continue
            texts = [fetch.exact[topic]] if topic in fetch.exact else []
            texts += [text for name, text in fetch.wild if filter_matches(name, topic)]
            options = [found.wanted for text in texts if (found := client.filters.get(text)) is not None]
            if not options:
                continue  # it has unsubscribed meanwhile
            if snowflake_time_ms(number) > now_ms - CROSSING_MS:
                self._recent.setdefault(snowflake, set()).add(event.connection)
                options = [found.wanted for found in client.filters.values() if _gets(found.filter, topic)]
            grant = merged(options)
            qos = min(qos_of(record), grant.qos)
            delivery = ev.Delivery(record, topic, qos, True, grant.identifiers, expires_at_ms_of(record))
            self._fan_out.each(event.connection, delivery)
            self.delivered += 1

    def fetched(self, event: ev.RetainedFetched) -> None:
        """End a fetch."""
        self._fetches.pop(event.fetch, None)

    def closed(self, connection: int) -> None:
        """Forget a client that is gone."""
        for number in [number for number, fetch in self._fetches.items() if fetch.connection == connection]:
            del self._fetches[number]

    def watch(self, channel: Channel, record: bytes, body: bytes, now_ms: int) -> Channel:
        """Note a live message for the fetches of its receivers. Returns the channel without those who have it already."""
        self._turn(now_ms)
        if self._fetches and retain_of(record):
            topic, number = topic_of(record, body), int.from_bytes(record[SNOWFLAKE_AT:KEY_AT], "little")
            receivers = set(channel.connections())
            for fetch in self._fetches.values():
                if fetch.connection in receivers and len(fetch.crossed) < MAX_CROSSED:
                    fetch.crossed[topic] = max(number, fetch.crossed.get(topic, 0))
        snowflake = record[SNOWFLAKE_AT:KEY_AT]
        having = self._recent.get(snowflake) or self._before.get(snowflake)
        return channel if not having else channel.without(having)

    def _turn(self, now_ms: int) -> None:
        if now_ms - self._turned_ms >= CROSSING_MS or len(self._recent) >= MAX_RECENT:
            self._before = self._recent if now_ms - self._turned_ms < 2 * CROSSING_MS else {}
            self._recent, self._turned_ms = {}, now_ms


def _gets(wanted: Filter, topic: bytes) -> bool:
    """True if a client with this filter gets each message of a topic."""
    name = wanted.name.encode()
    return not wanted.group and (filter_matches(name, topic) if wanted.wild else name == topic)


def topic_of(record: bytes, body: bytes) -> bytes:
    """Name of a record's topic, UTF-8: the free topic, or the room."""
    if record[FLAGS_AT] & Flag.TOPIC:
        return body[2 : 2 + (body[0] << 8 | body[1])]
    return f"{ROOM_PREFIX}{int.from_bytes(record[KEY_AT:SENDER_AT], 'little')}".encode()
