"""Plays a plan: one task a room, in the log's order; different rooms at the same time.

    JOIN   waits until the cluster has confirmed it, so that later messages of the room are owed to the user
    SEND   waits while too much is on its way; each pair of sender and room keeps one path, so that it has an order
    LEAVE  waits until the user got what it is owed (at most `overdue_s`), then unsubscribes

Source: docs/operations.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from pixiu.ids import UIN, RoomID
from tools.load.ledger import Ledger
from tools.load.payload import monotonic_us
from tools.replay.inbox import user_of
from tools.replay.options import ReplayOptions
from tools.replay.plan import Action, Plan, Step, share_of
from tools.replay.sessions import Connector
from tools.replay.users import Users

SWEEP_S = 0.2
"""Interval at which overdue messages are given up and progress is reported, seconds."""
GROUP = 64
"""Limit of joins, or leaves, in a row that are made at the same time."""


class Driver:
    """Drives one replay of a chat log."""

    def __init__(
        self,
        plan: Plan,
        options: ReplayOptions,
        connector: Connector,
        *,
        on_progress: Callable[[], None] = lambda: None,
        now_us: Callable[[], int] = monotonic_us,
    ) -> None:
        options.validate()
        self._plan = plan
        self._options = options
        self._connector = connector
        self._on_progress = on_progress
        self._now_us = now_us
        self.ledger = Ledger()
        self.users = Users(connector, options, self._on_message, now_us)
        self._owed_events: dict[RoomID, asyncio.Event] = {}
        self._room_event = asyncio.Event()
        """Set when another message may be under way."""
        self._start = 0.0
        self._last_arrival = 0.0
        self._rooms: list[asyncio.Task[None]] = []
        self.interrupted = False
        self.sent_by_sdk = 0

    async def run(self) -> None:
        """Play everything and wait for what is owed; `ledger` and `users.breaks` then hold the result."""
        loop = asyncio.get_running_loop()
        sweeper = asyncio.create_task(self._sweep(), name="replay-sweeper")
        try:
            rooms = {room: list(steps) for room, steps in self._plan.rooms.items()}
            self._rooms = [asyncio.create_task(self._log_in_first(room, steps)) for room, steps in rooms.items()]
            await self._all_rooms()
            self._start = self._last_arrival = loop.time()
            if not self.interrupted:
                self._rooms = [asyncio.create_task(self._play(room, steps)) for room, steps in rooms.items()]
                await self._all_rooms()
            await self._settle()
        finally:
            sweeper.cancel()
            for task in self._rooms:
                task.cancel()
            await asyncio.gather(sweeper, *self._rooms, return_exceptions=True)
            await self.users.close()

    def interrupt(self) -> None:
        """Send nothing more; messages already sent are still waited for."""
        self.interrupted = True
        for task in self._rooms:
            task.cancel()

    async def _all_rooms(self) -> None:
        for result in await asyncio.gather(*self._rooms, return_exceptions=True):
            if isinstance(result, BaseException) and not (self.interrupted and isinstance(result, asyncio.CancelledError)):
                raise result

    async def _log_in_first(self, room: RoomID, steps: list[Step]) -> None:
        """Log in the users who are present from the start; the clock of the replay starts afterwards."""
        while steps and steps[0].action is Action.JOIN and steps[0].at_ms == 0:
            group = self._take_group(steps)
            await self._join_all(room, group)

    def _take_group(self, steps: list[Step]) -> list[Step]:
        """Take steps of the same kind in a row (they concern different users) off the front."""
        size = 1
        while size < min(len(steps), GROUP) and steps[size].action is steps[0].action and self._is_due(steps[size]):
            size += 1
        group = steps[:size]
        del steps[:size]
        return group

    def _is_due(self, step: Step) -> bool:
        if not self._start:
            return step.at_ms == 0
        return self._start + step.at_ms / 1000 / self._options.speed <= asyncio.get_running_loop().time()

    async def _play(self, room: RoomID, steps: list[Step]) -> None:
        position = 0
        while position < len(steps):
            step = steps[position]
            wait_s = self._start + step.at_ms / 1000 / self._options.speed - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if step.action is Action.SEND:
                position += 1
                await self._send(room, step)
                continue
            group = self._take_group(steps[position : position + GROUP])
            position += len(group)
            if step.action is Action.JOIN:
                await self._join_all(room, group)
            else:
                await asyncio.gather(*(self._leave(room, one.uin) for one in group))

    async def _join_all(self, room: RoomID, group: Sequence[Step]) -> None:
        for step in group:
            self.ledger.joining(room, step.uin, self._now_us())
        await asyncio.gather(*(self._join(room, step.uin) for step in group))

    async def _join(self, room: RoomID, uin: UIN) -> None:
        if await self.users.join(uin, room):
            self.ledger.joined(room, uin)

    async def _leave(self, room: RoomID, uin: UIN) -> None:
        while self.ledger.owed(room, uin):
            # Bounded: the sweeper makes every message overdue in the end, and wakes this.
            event = self._owed_events.setdefault(room, asyncio.Event())
            event.clear()
            await event.wait()
        try:
            await self.users.leave(uin, room)
        finally:
            self.ledger.leaving(room, uin)

    async def _send(self, room: RoomID, step: Step) -> None:
        ledger, options = self.ledger, self._options
        while ledger.open_messages >= options.max_open_messages or ledger.open_deliveries >= options.max_open_deliveries:
            self._room_event.clear()
            await self._room_event.wait()
        payload = ledger.send(step.number, room, step.uin, step.text, self._now_us())
        done = partial(self._answered, step.number)
        session = self.users.session(step.uin)
        by_sdk = not session.publishes if session is not None else user_of(room) is not None
        if by_sdk or share_of(step.uin, room) < options.sdk_share:
            self.sent_by_sdk += 1
            await self._connector.publish(step.uin, room, payload, done)
        elif session is None:
            done("NOT_CONNECTED")
        else:
            await session.publish(room, payload, done)

    def _answered(self, number: int, code: str) -> None:
        if code:
            self.ledger.refused(number, code)
        else:
            self.ledger.acknowledged(number, self._now_us())

    def _on_message(self, uin: UIN, room: RoomID, payload: bytes) -> None:
        _, done = self.ledger.deliver(room, uin, payload, self._now_us())
        self._last_arrival = asyncio.get_running_loop().time()
        event = self._owed_events.get(room)
        if event is not None:
            event.set()
        if done:
            self._room_event.set()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.ledger.expire(self._now_us() - int(self._options.overdue_s * 1e6))
            for event in self._owed_events.values():
                event.set()
            self._room_event.set()
            self._on_progress()

    async def _settle(self) -> None:
        """Wait until everything has arrived and was answered, or nothing arrived for `settle_s`; then a moment for unexpected
        deliveries."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while self.ledger.lost or self.ledger.unacknowledged or self.users.resuming:
            if loop.time() - max(self._last_arrival, begun) >= self._options.settle_s:
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(self._options.linger_s)
