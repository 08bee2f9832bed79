"""A target that publishes to the clients of the cluster: topics of MQTT and rooms. Every message has an ID that follows from its
place, so that gateways drop one that comes again.

    batch ──▶ rounds: each one batch of the SDK, so that what goes to a room in it reaches the room's broker whole, or not at all
                 │ all of a round is accepted, or refused, before the next one
                 └─ refused for now: nothing after it goes to this room, until all of it has gone again in order

Source: docs/routes.md, "How clients get it".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

import xxhash

from bridge.connector import DONE, Item, Outcome, Verdict
from bridge.connectors.templates import Template
from bridge.options import TargetOptions
from cluster.routes.carried import EXTENSION, MESSAGE, MQTT_TOPIC, OWN_PREFIX, ROUTES, carried, taken, with_taken
from cluster.routes.routes import check_reachable
from pixiu.client.client import Client
from pixiu.client.messages.drafts import Draft
from pixiu.client.messages.load_test import LoadTest
from pixiu.errors import InvalidArgument, MalformedData, NotAllowed, PixiuError, RecordTooLarge
from pixiu.ids import MAX_ID
from pixiu.placement.topics import TopicRefusal, resolve
from pixiu.wire.record import FIRST_LANE_BELOW

ROUND_MESSAGES: Final = 500
ROUND_BYTES: Final = 200 << 10
"""Messages and bytes of a round: below a batch of the SDK, so that it is one."""
NEVER: Final = (InvalidArgument, RecordTooLarge, MalformedData, NotAllowed)
"""Errors of a message that clients will never get so."""
_BUSY: Final[WeakKeyDictionary[Client, asyncio.Lock]] = WeakKeyDictionary()
"""Client → held while a round is under way: rounds of several bridges are never in one another's batches."""


@dataclass(frozen=True, kw_only=True)
class ClientsOptions(TargetOptions):
    """A bridge with kind = "to-clients"."""

    load_test: ClassVar[LoadTest] = "pass"

    to: str = ""
    """MQTT topic, room/N, or template with {topic}, {key} and {header:NAME}. Empty: the header mqtt_topic, else the key."""
    routes: tuple[str, ...] = ()
    """Routes that do not take what is delivered, beside those that the message says. Routes that deliver the topic are here."""
    stored: bool = False
    """Whether routes write the topic: a message that they stored twice is then delivered once. A program that makes several
    messages of one, and copies its headers, writes another topic."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        if self.to:
            try:
                check_reachable(Template(self.to).text)
            except InvalidArgument as error:
                yield "to", str(error)


class Clients:
    """Publishes to clients.

    Args:
        name: of the bridge.
        options: of it.
        client: of the process.
    """

    def __init__(self, name: str, options: ClientsOptions, client: Client) -> None:
        self._name, self._options, self._client = name, options, client
        self._to = Template(options.to) if options.to else None

    async def open(self) -> None:
        """The client is open."""

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Publish messages."""
        outcomes: list[Outcome] = [DONE] * len(batch)
        drafts = list[tuple[int, Draft]]()
        for at, item in enumerate(batch):
            try:
                drafts.append((at, self.draft(item)))
            except PixiuError as error:
                outcomes[at] = Outcome(Verdict.NEVER, str(error))
        held_up = dict[int, str]()
        for round_ in rounds(drafts):
            async with _BUSY.setdefault(self._client, asyncio.Lock()):
                await self._publish(round_, held_up, outcomes)
        return outcomes

    async def _publish(self, round_: Sequence[tuple[int, Draft]], held_up: dict[int, str], outcomes: list[Outcome]) -> None:
        under_way = []
        for at, draft in round_:
            if draft.key in held_up:
                outcomes[at] = Outcome(Verdict.AGAIN, held_up[draft.key])
                continue
            try:
                under_way.append((at, draft.key, self._client.submit_soon(draft)))
            except PixiuError as error:
                held_up[draft.key] = str(error)
                outcomes[at] = Outcome(Verdict.AGAIN, str(error))
        for at, key, receipt in under_way:
            why = await receipt.outcome()
            if isinstance(why, NEVER):
                outcomes[at] = Outcome(Verdict.NEVER, str(why))
            elif why is not None:
                held_up[key] = str(why)
                outcomes[at] = Outcome(Verdict.AGAIN, str(why), why.retry_after_ms / 1000)

    def draft(self, item: Item) -> Draft:
        """The message for clients. Raises `InvalidArgument` and `RecordTooLarge`."""
        headers, options = item.headers, self._options
        name = self._name_of(item)
        room = resolve(name)
        if isinstance(room, TopicRefusal):
            raise InvalidArgument(f"no room carries {name[:80]!r}: {room.value}; give the bridge or route another `to`")
        kept = {key: value.decode(errors="replace") for key, value in headers.items() if not key.startswith(OWN_PREFIX)}
        kept.pop(MQTT_TOPIC, None)
        if extension := headers.get(EXTENSION):
            kept[EXTENSION] = extension.decode(errors="replace")
        before = taken(headers.get(ROUTES, b"").decode(errors="replace"))
        if routes := with_taken(before, options.routes):
            kept[ROUTES] = routes
        own = carried(headers)
        to = self._client.room(room) if name.startswith("room/") else self._client.topic(name)
        made = to.draft(
            item.body, type=own.type & 63, lifetime_min=own.lifetime_min, headers=kept, derived_id=self._id(item),
            first_lane=MESSAGE in headers and own.type < FIRST_LANE_BELOW, load_test=getattr(item, "load_test", False),
        )  # fmt: skip
        return made._replace(origin=own.origin)

    def _name_of(self, item: Item) -> str:
        if self._to is not None:
            return self._to.fill(item)
        name = item.headers.get(MQTT_TOPIC, item.key)
        if name is None:
            raise InvalidArgument("it has neither a header mqtt_topic nor a key: give the bridge or route `to`")
        return name.decode(errors="replace")

    def _id(self, item: Item) -> int:
        """An ID that follows from where the message is, or, where routes write the topic, from the client's message itself."""
        part, offset = item.position
        own = carried(item.headers).message_id if self._options.stored else 0
        text = f"{self._options.topic}\0{own:x}" if own else f"{self._options.topic}\0{part}:{offset}"
        return (xxhash.xxh3_64_intdigest(text.encode()) & MAX_ID) or 1

    def settled(self, batch: Sequence[Item]) -> None:
        """Nothing to note."""

    async def close(self) -> None:
        """The client is the process's."""


def rounds(drafts: Sequence[tuple[int, Draft]]) -> Iterator[list[tuple[int, Draft]]]:
    """Messages in their order, in rounds of which each fits into one batch."""
    found, size = list[tuple[int, Draft]](), 0
    for each in drafts:
        if found and (len(found) >= ROUND_MESSAGES or size + each[1].size > ROUND_BYTES):
            yield found
            found, size = [], 0
        found.append(each)
        size += each[1].size
    if found:
        yield found
