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
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import pixiu
from pixiu.ids import UIN, RoomID
from tests.support.waiting import until
from tools.load.ledger import Judgement, Ledger
from tools.load.payload import HEAD, HEAD_BYTES, monotonic_us

ROOMS: Final = range(1, 17)
USERS: Final = range(701, 717)
JOINED: Final = range(101, 117)
"""Rooms that users join and leave."""
PACE_S: Final = 0.06
"""Between two messages to a room or a user."""
SIGNAL_S: Final = 0.5
SIZES: Final = (16, 40, 300, 1200, 8 << 10)
PATIENT_S: Final = 120.0

US: Final = UIN(0)
"""Sender and receiver of every message, for the ledgers: each room or user has one order."""


@dataclass(slots=True)
class Kept:
    """All about one kind of message."""

    ledger: Ledger = field(default_factory=Ledger)
    receipts: list[Any] = field(default_factory=list)
    """Of each number, in order."""
    waits: list[tuple[int, float, float]] = field(default_factory=list)
    """(room or user, when it was sent, seconds until it came)."""


@dataclass(slots=True)
class Losses:
    """Of one kind."""

    sent: int = 0
    failed: int = 0
    """Reported as failed to their senders, or not decided; and not come."""
    lost: int = 0
    """Or came with another content, or to somebody else."""
    notified: int = 0
    """Of those, to rooms while their subscriber was without a gateway, as it was notified."""
    repeated: int = 0
    disordered: int = 0


class LiveTraffic:
    """See the module. One back end sends, another subscribes to all rooms, each user has a client."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self.kinds: dict[str, Kept] = defaultdict(Kept)
        self.counts: Counter[str] = Counter()
        self.where: list[str] = []
        """What was lost, repeated or out of order, in words; `losses` fills it."""
        self._newest: dict[int, int] = {}
        """Room → when the newest message that came to its subscriber was sent, µs."""
        self._gaps: list[tuple[dict[int, int], int]] = []
        """Of each gap that the subscriber was notified of: the newest of each room before, and when that was."""
        self._sending = True
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._senders: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        connect, stack = self._connect, self._stack
        self._px = await stack.enter_async_context(connect("live-sender"))
        listener = await stack.enter_async_context(connect("live-listener"))
        self._take(await stack.enter_async_context(listener.subscribe(rooms=ROOMS, on_gap=self._missed)), 0)
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
            await until(lambda: all(self._whole(kept) for kept in self.kinds.values()), limit_s=10.0)

    # --- work

    def _take(self, messages: pixiu.Subscription, uin: int) -> None:
        async def take() -> None:
            async for message in messages:
                kind = "signal" if message.signal else "chat" if uin else "room"
                self._came(self.kinds[kind], uin or message.room, message.payload)
                if kind == "room":
                    self._newest[message.room] = HEAD.unpack_from(message.payload)[1]

        self._tasks.append(asyncio.create_task(take()))

    def _missed(self, _reason: str) -> None:
        self._gaps.append((dict(self._newest), monotonic_us()))

    def _in_a_gap(self, room: int, sent_us: int) -> bool:
        return any(newest.get(room, 0) < sent_us <= until_us for newest, until_us in self._gaps)

    @staticmethod
    def _came(kept: Kept, key: int, payload: bytes) -> None:
        now_us = monotonic_us()
        outcome, _ = kept.ledger.deliver(RoomID(key), US, payload, now_us)
        if outcome in (Judgement.DELIVERED, Judgement.OUT_OF_ORDER):
            sent_us = HEAD.unpack_from(payload)[1]
            kept.waits.append((key, sent_us / 1e6, (now_us - sent_us) / 1e6))

    def _send_one(self, kind: str, key: int, send: Callable[[bytes], Any]) -> Any:
        """Send one message, and return its receipt."""
        kept, room = self.kinds[kind], RoomID(key)
        ledger, number = kept.ledger, kept.ledger.sent
        if not ledger.members(room):
            ledger.joining(room, US, 0)
            ledger.joined(room, US)
        size = SIZES[number % len(SIZES)] if number % 7 == 0 and kind != "signal" else SIZES[0]
        receipt = send(ledger.send(number, room, US, bytes(size - HEAD_BYTES), monotonic_us()))
        kept.receipts.append(receipt)
        return receipt

    async def _send(self) -> None:
        while self._sending:
            for room in ROOMS:
                self._send_one("room", room, self._px.room(room).send_soon)
            for uin in USERS:
                self._send_one("chat", uin, self._px.user(uin).chat_soon)
            self.counts["turns"] += 1
            await asyncio.sleep(PACE_S)

    async def _signal(self) -> None:
        while self._sending:
            for room in ROOMS:
                self._send_one("signal", room, functools.partial(self._px.room(room).signal_soon, receipt=True))
            await asyncio.sleep(SIGNAL_S)

    async def _join(self, number: int) -> None:
        """Join a room, get what is sent to it from then on, leave. A join is a message of its room's key."""
        rooms = JOINED[number::2]
        while self._sending:
            for room in rooms:
                began = time.monotonic()
                async with self._joiner.subscribe(room=room) as messages:
                    self.kinds["join"].waits.append((room, began, time.monotonic() - began))
                    receipt = self._send_one("join", room, self._joiner.room(room).send_soon)
                    await self._get(messages, room, receipt)
                await asyncio.sleep(PACE_S)

    async def _get(self, messages: pixiu.Subscription, room: int, receipt: Any) -> None:
        if await receipt.outcome() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10.0):
                    message = await anext(messages)
                    self.kinds["join"].ledger.deliver(RoomID(room), US, message.payload, monotonic_us())

    # --- what came of it

    @staticmethod
    def _whole(kept: Kept) -> bool:
        receipts = [kept.receipts[missing.number] for missing in kept.ledger.missing()]
        return all(receipt.done and receipt.error is not None for receipt in receipts)

    def losses(self, began: float) -> dict[str, Losses]:
        """By kind. Times are told from `began`, monotonic seconds."""
        found: dict[str, Losses] = {}
        for kind, kept in sorted(self.kinds.items()):
            ledger, outcomes = kept.ledger, kept.ledger.outcomes
            for missing in list(ledger.missing()):
                receipt = kept.receipts[missing.number]
                if not receipt.done or receipt.error is not None:
                    ledger.refused(missing.number, receipt.error.code if receipt.error else "undecided")
            lost = [missing for missing in ledger.missing() if not missing.refused]
            disordered = 0 if kind == "signal" else outcomes[Judgement.OUT_OF_ORDER]
            repeated, wrong = outcomes[Judgement.REPEATED], outcomes[Judgement.ALIEN] + outcomes[Judgement.DAMAGED]
            for code, number in ledger.refusals.items():
                self.counts[f"{kind} failed {code}"] += number
            notified = sum(kind == "room" and self._in_a_gap(one.room, one.sent_us) for one in lost)
            found[kind] = Losses(ledger.sent, ledger.refusals.total(), len(lost) + wrong, notified, repeated, disordered)
            if lost or disordered or repeated or wrong:
                times = ", ".join(f"{one.number} in {one.room} (sent at {one.sent_us / 1e6 - began:.2f} s)" for one in lost[:9])
                self.where.append(f"{kind}: lost {times}, repeated {repeated}, out of order {disordered}, wrong {wrong}")
        return found

    def waits(self, kinds: tuple[str, ...], since: float, until_: float) -> dict[int, float]:
        """Room or user → the longest wait of what was sent in a span of monotonic seconds."""
        longest: dict[int, float] = {}
        for kind in kinds:
            for key, sent_at, seconds in self.kinds[kind].waits:
                if since <= sent_at <= until_:
                    longest[key] = max(longest.get(key, 0.0), seconds)
        return longest
