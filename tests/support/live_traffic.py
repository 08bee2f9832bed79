"""Rooms, signals, chat, and users who join and leave, all the time: what came, how often, in which order, and how late.

    async with LiveTraffic(registry) as live:
        ...                              # change something
        await live.settle()
    live.losses()                        # lost, repeated, out of order, of each kind

A message says which it is and when it was sent. One that failed, as far as its sender is told, is not lost.

Source: docs/promises.md, "Guarantees by kind of message".
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import pixiu
from tests.support.waiting import until
from tools.load.payload import HEAD, encode_payload, monotonic_us
from tools.load.tally import Tally

ROOMS: Final = range(1, 17)
USERS: Final = range(701, 717)
JOINED: Final = range(101, 117)
"""Rooms that users join and leave."""
PACE_S: Final = 0.06
"""Between two messages to a room or a user."""
SIGNAL_S: Final = 0.5
SIZES: Final = (16, 40, 300, 1200, 8 << 10)
PATIENT_S: Final = 120.0

Key = tuple[str, int]
"""What kind of message, and to which room or user."""


@dataclass(slots=True)
class Kept:
    """All about one key."""

    tally: Tally = field(default_factory=Tally)
    receipts: list[Any] = field(default_factory=list)
    """Of each number, in order."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(when it was sent, seconds until it came)."""


@dataclass(slots=True)
class Losses:
    """Of one kind."""

    sent: int = 0
    failed: int = 0
    """Reported as failed to their senders, or not decided; and not come."""
    lost: int = 0
    repeated: int = 0
    disordered: int = 0


class LiveTraffic:
    """See the module. One back end sends, another subscribes to all rooms, each user has a client."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self.keys: dict[Key, Kept] = defaultdict(Kept)
        self.counts: Counter[str] = Counter()
        self.where: list[str] = []
        """What was lost, repeated or out of order, in words; `losses` fills it."""
        self._sending = True
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._senders: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        connect, stack = self._connect, self._stack
        self._px = await stack.enter_async_context(connect("live-sender"))
        listener = await stack.enter_async_context(connect("live-listener"))
        self._take(await stack.enter_async_context(listener.subscribe(rooms=ROOMS)), 0)
        for uin in USERS:
            user = await stack.enter_async_context(connect(f"live-{uin}", uin=uin))
            self._take(await stack.enter_async_context(user.subscribe(chat=True)), uin)
        self._joiner = await stack.enter_async_context(connect("live-joiner"))
        self._senders = [asyncio.create_task(work) for work in (self._send(), self._signal(), *(self._join(n) for n in range(2)))]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in (*self._senders, *self._tasks):
            task.cancel()
        await asyncio.gather(*self._senders, *self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def _connect(self, name: str, **options: Any) -> pixiu.Client:
        return pixiu.connect(self._registry, client=name, connect_timeout_s=PATIENT_S, join_timeout_s=PATIENT_S, **options)

    def check(self) -> None:
        """Raises what ended a part of it."""
        for task in (*self._senders, *self._tasks):
            if task.done():
                task.result()

    async def settle(self) -> None:
        """Nothing more is sent; what was sent has come, or a while has gone by."""
        self._sending = False
        await asyncio.gather(*self._senders)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENT_S):
                await self._px.flush()
        # What is not lost is there soon: nothing is sent again by anybody later than that.
        with contextlib.suppress(AssertionError):
            await until(lambda: all(self._whole(kept) for kept in self.keys.values()), limit_s=10.0)

    # --- work

    def _take(self, messages: pixiu.Subscription, uin: int) -> None:
        async def take() -> None:
            async for message in messages:
                number, sent_us = HEAD.unpack_from(message.payload)
                kind = "signal" if message.signal else "chat" if uin else "room"
                kept = self.keys[kind, uin or message.room]
                took_us = kept.tally.delivered(number, monotonic_us())
                if took_us is not None:
                    kept.waits.append((sent_us / 1e6, took_us / 1e6))

        self._tasks.append(asyncio.create_task(take()))

    def _payload(self, kind: str, key: int) -> bytes:
        sent_us = monotonic_us()
        number = self.keys[kind, key].tally.send(sent_us)
        return encode_payload(number, sent_us, b"").ljust(SIZES[number % len(SIZES)] if number % 7 == 0 else SIZES[0])

    async def _send(self) -> None:
        while self._sending:
            for room in ROOMS:
                body = self._payload("room", room)
                self.keys["room", room].receipts.append(self._px.room(room).send_soon(body))
            for uin in USERS:
                body = self._payload("chat", uin)
                self.keys["chat", uin].receipts.append(self._px.user(uin).chat_soon(body))
            self.counts["turns"] += 1
            await asyncio.sleep(PACE_S)

    async def _signal(self) -> None:
        while self._sending:
            for room in ROOMS:
                body = self._payload("signal", room)[:64]
                self.keys["signal", room].receipts.append(self._px.room(room).signal_soon(body, receipt=True))
            await asyncio.sleep(SIGNAL_S)

    async def _join(self, number: int) -> None:
        """Join a room, get what is sent to it from then on, leave. A join is a message of its room's key."""
        rooms = JOINED[number::2]
        while self._sending:
            for room in rooms:
                began = time.monotonic()
                kept = self.keys["join", room]
                async with self._joiner.subscribe(room=room) as messages:
                    kept.waits.append((began, time.monotonic() - began))
                    body = self._payload("join", room)
                    receipt = self._joiner.room(room).send_soon(body)
                    kept.receipts.append(receipt)
                    await self._get(messages, kept, receipt)
                await asyncio.sleep(PACE_S)

    async def _get(self, messages: pixiu.Subscription, kept: Kept, receipt: Any) -> None:
        if await receipt.outcome() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    message = await anext(messages)
                    kept.tally.delivered(HEAD.unpack_from(message.payload)[0], monotonic_us())

    # --- what came of it

    @staticmethod
    def _whole(kept: Kept) -> bool:
        return all(kept.receipts[number].done and kept.receipts[number].error is not None for number in kept.tally.missing)

    def losses(self, began: float) -> dict[str, Losses]:
        """By kind. Times are told from `began`, monotonic seconds."""
        found: dict[str, Losses] = defaultdict(Losses)
        for (kind, key), kept in sorted(self.keys.items()):
            of, tally = found[kind], kept.tally
            for number in tally.missing:
                receipt = kept.receipts[number]
                if not receipt.done or receipt.error is not None:
                    tally.failed(number, receipt.error.code if receipt.error else "undecided", monotonic_us())
            result, lost = tally.result(), sorted(tally.missing.items())
            disordered = 0 if kind == "signal" else tally.disordered
            for code, number in result.failures.items():
                self.counts[f"{kind} failed {code}"] += number
            of.sent += result.sent
            of.failed += result.failed
            of.lost += result.lost
            of.repeated += result.repeated
            of.disordered += disordered
            if lost or disordered or result.repeated:
                times = ", ".join(f"{n} (sent at {sent_us / 1e6 - began:.2f} s)" for n, sent_us in lost[:9])
                self.where.append(f"{kind} {key}: lost {times}, repeated {list(tally.repeats)[:9]}, out of order {disordered}")
        return found

    def waits(self, kinds: tuple[str, ...], since: float, until_: float) -> dict[int, float]:
        """Room or user → the longest wait of what was sent in a span of monotonic seconds."""
        longest: dict[int, float] = {}
        for (kind, key), kept in self.keys.items():
            if kind in kinds:
                for sent_at, seconds in kept.waits:
                    if since <= sent_at <= until_:
                        longest[key] = max(longest.get(key, 0.0), seconds)
        return longest
