"""NSQ as a target and as a source.

    target   MPUB of a batch, DPUB for a delay ──▶ nsqd ──OK──▶ written
    source   nsqd ──RDY──▶ stored in the topic ──▶ FIN; TOUCH until then. What has no FIN comes again, with the same ID

Source: https://nsq.io/clients/tcp_protocol_spec.html; docs/bridges.md, "To and from NSQ".
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bridge.connector import DONE, Item, Outcome, Record, Verdict, away, said
from bridge.connectors.nsq_link import NOP, NsqLink, NsqOptions, NsqRefused, addresses_of
from bridge.connectors.templates import Template
from bridge.options import SourceOptions, TargetOptions
from cluster.nsq.frames import Got, body_of_many, is_name, with_body
from cluster.settings.fields import bounded
from pixiu.errors import ConfigurationError, InvalidArgument, PixiuError, Unavailable

MAX_BODY: Final = 5 << 20
"""Bytes of an MPUB, as nsqd takes them unless it is configured otherwise."""
MAX_NSQ_NAME: Final = 64
"""Characters of a topic's or channel's name at nsqd."""
MAX_DELAY_MS: Final = 3_600_000
"""Longest delay at nsqd unless it is configured otherwise, milliseconds."""
READ_S: Final = 1.0
LOOK_S: Final = 15.0
"""Time after which a source looks for nsqds again, seconds."""
MAX_WAITING_BYTES: Final = 64 << 20
"""Bytes of messages that are here and not stored. Policy: above it no connection is read."""
TOUCH_SHARE: Final = 3
"""A message is kept by a TOUCH at this share of its time."""
ID_HEADER: Final = "nsq_id"
"""Header of a message from NSQ that no other message has: HOST:PORT/TOPIC/ID/TIME."""
ATTEMPTS_HEADER: Final = "nsq_attempts"
"""Header with NSQ's count of deliveries, from the second on."""
AGAIN_CODES: Final = frozenset(("E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED"))
MESSAGE_CODES: Final = frozenset(("E_BAD_MESSAGE", "E_BAD_BODY", "E_BAD_TOPIC"))


@dataclass(frozen=True, kw_only=True)
class NsqTargetOptions(NsqOptions, TargetOptions):
    """A bridge with kind = "to-nsq"."""

    to: str = "{topic}"
    """Topic at NSQ; {topic}, {key} and {header:NAME} stand for those of the message."""
    delay: str = ""
    """Milliseconds for which nsqd holds a message back, or {header:NAME} that has them. Empty: none."""
    in_flight: int = bounded(1, 1, 1)
    """Batches that are written at one time: the messages of one are on their way together."""

    def problems(self) -> Any:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        for key in ("to", "delay"):
            try:
                if key == "to" or self.delay:
                    Template(getattr(self, key))
            except InvalidArgument as error:
                yield key, str(error)


@dataclass(frozen=True, kw_only=True)
class NsqSourceOptions(NsqOptions, SourceOptions):
    """A bridge with kind = "from-nsq"."""

    nsq_topic: str = ""
    """Topic at NSQ."""
    nsq_channel: str = ""
    """Its channel, which is the bridge's alone. Empty: pixiu-NAME."""
    max_in_flight: int = bounded(1_000, 1, 10_000)
    """Messages that NSQ may give before they are stored here, of all nsqds together; each gives at least one."""
    msg_timeout_s: int = bounded(60, 1, 900)
    """Seconds after which nsqd gives a message again that was neither finished nor touched."""

    def problems(self) -> Any:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        names = [("nsq_topic", self.nsq_topic), *([("nsq_channel", self.nsq_channel)] if self.nsq_channel else [])]
        for key, name in names:
            if not is_name(name) or len(name) > MAX_NSQ_NAME:
                yield key, f"a name of NSQ: 1 to {MAX_NSQ_NAME} of A-Z a-z 0-9 . _ -"


@dataclass(slots=True)
class Chunk:
    """A command, and the places in the batch of the messages that it has."""

    command: bytes
    places: Sequence[int]


class NsqTarget:
    """Publishes to one nsqd, and to another one when it is gone.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: NsqTargetOptions) -> None:
        self._options = options
        self._topic = Template(options.to)
        self._delay = Template(options.delay) if options.delay else None
        self._link: NsqLink | None = None

    async def open(self) -> None:
        """Connect to the first nsqd that answers. Raises `Unavailable`, `ConfigurationError`."""
        addresses = await addresses_of(self._options)
        random.shuffle(addresses)
        problem: PixiuError = away("nsqlookupd knows no nsqd: start one, or check lookupd")
        for address in addresses:
            link = NsqLink(address, self._options, {})
            try:
                await link.open()
            except PixiuError as error:
                problem = error
                await link.close()
                continue
            self._link = link
            return
        raise problem

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Publish messages, and wait for each OK. Raises `Unavailable`, `ConfigurationError` while nothing is known of any."""
        outcomes: list[Outcome | None] = [None] * len(batch)
        chunks = self._chunks(batch, outcomes)
        why = ""
        while chunks and not why:
            try:
                await self._publish(chunks, outcomes)
            except PixiuError as error:
                if all(each is None for each in outcomes):
                    raise
                why = str(error)
        return [each or Outcome(Verdict.AGAIN, why) for each in outcomes]

    async def _publish(self, chunks: list[Chunk], outcomes: list[Outcome | None]) -> None:
        """Publish chunks until all are answered, or one is refused: nsqd ends the connection with it, and takes none after it."""
        if self._link is None:
            await self.open()
        link = self._link
        assert link is not None
        link.tell(b"".join(chunk.command for chunk in chunks))
        await link.drain()
        while chunks:
            try:
                await link.answer()
                outcome = DONE
            except NsqRefused as error:
                await self.close()
                if error.code in AGAIN_CODES:
                    raise away(f"the nsqd at {link.address} answers: {said(error)}") from None
                if error.code not in MESSAGE_CODES:
                    raise link.refused(error) from None
                outcome = Outcome(Verdict.SPLIT, f"the nsqd refuses the message: {said(error)}")
            for place in chunks.pop(0).places:
                outcomes[place] = outcome
            if outcome is not DONE:
                return

    def _chunks(self, batch: Sequence[Item], outcomes: list[Outcome | None]) -> list[Chunk]:
        """Commands for a batch: an MPUB for each topic, as far as nsqd takes it, and a DPUB for each delayed message."""
        found, many = list[Chunk](), dict[str, list[list[int]]]()
        sizes = dict[str, int]()
        for place, item in enumerate(batch):
            wrong, topic, delay_ms = self._check(item)
            if wrong:
                outcomes[place] = Outcome(Verdict.NEVER, wrong)
            elif delay_ms:
                found.append(Chunk(with_body(b"DPUB %s %d" % (topic.encode(), delay_ms), item.body), [place]))
            else:
                size = sizes.get(topic, 4) + 4 + len(item.body)
                if topic not in many or size > MAX_BODY:
                    many.setdefault(topic, []).append([])
                    size = 8 + len(item.body)
                many[topic][-1].append(place)
                sizes[topic] = size
        for topic, pieces in many.items():
            for places in pieces:
                body = body_of_many([batch[place].body for place in places])
                found.append(Chunk(with_body(b"MPUB " + topic.encode(), body), places))
        return found

    def _check(self, item: Item) -> tuple[str, str, int]:
        """Why a message cannot be published, its topic, and its delay, milliseconds."""
        topic, delay = self._topic.fill(item), self._delay.fill(item) if self._delay is not None else ""
        if not is_name(topic) or len(topic) > MAX_NSQ_NAME:
            return f"{topic[:80]!r} is no topic of NSQ: change the template `to`, or the key", "", 0
        if not item.body:
            return "NSQ takes no message without a body: send one with at least a byte", "", 0
        if delay and not (delay.isdecimal() and len(delay) < 9 and int(delay) <= MAX_DELAY_MS):
            return f"{delay[:80]!r} is no delay of NSQ: 0 to {MAX_DELAY_MS} milliseconds", "", 0
        return "", topic, int(delay or 0)

    def settled(self, batch: Sequence[Item]) -> None:
        """Nothing to note."""

    async def close(self) -> None:
        """Disconnect."""
        link, self._link = self._link, None
        if link is not None:
            await link.close()


class Held:
    """Messages that one nsqd gave and that have no FIN yet."""

    __slots__ = ("link", "ready", "touch_at")

    def __init__(self, link: NsqLink) -> None:
        self.link = link
        self.ready = 0
        """RDY that it was told."""
        self.touch_at: dict[bytes, float] = {}
        """ID → time of the next TOUCH."""


class NsqSource:
    """Consumes from all nsqds that have the topic, and finishes what is stored.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: NsqSourceOptions) -> None:
        self._options = options
        self._channel = options.nsq_channel or f"pixiu-{name}"[:MAX_NSQ_NAME]
        self._held: dict[str, Held] = {}
        self._arrived: asyncio.Queue[Record] = asyncio.Queue()
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._why = ""

    async def open(self) -> Sequence[str]:
        """Connect to the nsqds of the topic. Raises `Unavailable`, `ConfigurationError`."""
        await self._look()
        self._task = asyncio.get_running_loop().create_task(self._keep(), name="pixiu-nsq-source")
        return ()

    async def resume(self, after: Mapping[str, int]) -> None:
        """NSQ knows what has no FIN."""

    async def _look(self) -> None:
        """Connect to nsqds that are new or were lost. Raises if there is none then."""
        topic, problem = self._options.nsq_topic, None
        for address in [address for address, held in self._held.items() if held.link.cut]:
            await self._held.pop(address).link.close()
        try:
            for address in await addresses_of(self._options, topic):
                if address not in self._held:
                    problem = await self._join(address) or problem
        except Unavailable as error:
            problem = error
        if not self._held:
            raise problem or away(f"no nsqd has the topic {topic}: publish something there, or check nsq_topic and lookupd")
        most = max(1, self._options.max_in_flight // len(self._held))
        for held in self._held.values():
            ready = min(most, int(held.link.terms.get("max_rdy_count") or most))
            if ready != held.ready:
                held.ready = ready
                with contextlib.suppress(Unavailable):
                    held.link.tell(b"RDY %d\n" % ready)

    async def _join(self, address: str) -> PixiuError | None:
        """Subscribe at an nsqd; the failure, if there is one."""
        options = self._options
        link = NsqLink(address, options, {"msg_timeout": options.msg_timeout_s * 1000}, self._on_messages)
        try:
            await link.open()
            link.tell(b"SUB %s %s\n" % (options.nsq_topic.encode(), self._channel.encode()))
            await link.answer()
        except NsqRefused as error:
            await link.close()
            return link.refused(error)
        except PixiuError as error:
            await link.close()
            return error
        self._held[address] = Held(link)
        return None

    def _on_messages(self, link: NsqLink, messages: Sequence[Got]) -> None:
        held = self._held[link.address]
        touch_at = asyncio.get_running_loop().time() + self._options.msg_timeout_s / TOUCH_SHARE
        for each in messages:
            held.touch_at[each.id] = touch_at
            identity = f"{link.address}/{self._options.nsq_topic}/{each.id.decode(errors='replace')}/{each.time_ns}"
            headers = {ID_HEADER: identity.encode()}
            if each.attempts > 1:
                headers[ATTEMPTS_HEADER] = b"%d" % each.attempts
            record = Record(
                each.body, headers=headers, event_time_us=each.time_ns // 1000, handle=(link, each.id), id_header=ID_HEADER
            )
            self._bytes += len(each.body)
            self._arrived.put_nowait(record)
        self._regulate()

    def _regulate(self) -> None:
        for held in self._held.values():
            (held.link.room.set if self._bytes < MAX_WAITING_BYTES else held.link.room.clear)()

    async def _keep(self) -> None:
        """Touch what waits, stay heard, and look for nsqds."""
        loop, options = asyncio.get_running_loop(), self._options
        look_at = loop.time() + LOOK_S
        while True:
            await asyncio.sleep(min(options.heartbeat_s, options.msg_timeout_s / TOUCH_SHARE) / 2)
            now = loop.time()
            for held in self._held.values():
                late = [each for each, at in held.touch_at.items() if at <= now]
                held.touch_at.update(dict.fromkeys(late, now + options.msg_timeout_s / TOUCH_SHARE))
                with contextlib.suppress(Unavailable):
                    held.link.tell(NOP + b"".join(b"TOUCH %s\n" % each for each in late))
            if now >= look_at or any(held.link.cut for held in self._held.values()):
                look_at = now + LOOK_S
                try:
                    await self._look()
                except (Unavailable, ConfigurationError) as error:
                    self._why = str(error)
                    return

    async def read(self) -> Sequence[Record]:
        """Wait for messages. Raises `Unavailable` when no nsqd is left."""
        if self._why and self._arrived.empty():
            raise away(self._why)
        found = list[Record]()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                found.append(await self._arrived.get())
        while found and not self._arrived.empty():
            found.append(self._arrived.get_nowait())
        return found

    async def confirm(self, records: Sequence[Record]) -> None:
        """Send a FIN for each. What came by a connection that is over comes again, and is known by its ID then."""
        fins = dict[NsqLink, list[bytes]]()
        for record in records:
            link, found = record.handle
            self._bytes -= len(record.body)
            fins.setdefault(link, []).append(b"FIN %s\n" % found)
            held = self._held.get(link.address)
            if held is not None and held.link is link:
                held.touch_at.pop(found, None)
        for link, lines in fins.items():
            with contextlib.suppress(Unavailable):
                link.tell(b"".join(lines))
                await link.drain()
        self._regulate()

    async def close(self) -> None:
        """Disconnect; nsqd gives what has no FIN to others at once."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        held, self._held = self._held, {}
        await asyncio.gather(*(each.link.close() for each in held.values()))
