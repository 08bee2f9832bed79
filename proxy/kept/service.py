"""The shell of kept messages: asks the routers, and runs the proxy's own writer beside the mail core.

Source: docs/architecture.md, "A message for sessions that are away".
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.core.contract import TICK
from cluster.core.role import totals
from cluster.core.runner import Runner
from cluster.process.context import Context
from cluster.routers.kept_client import KeptClient
from cluster.wire.v1 import kept_pb2
from pixiu.discovery.view import View
from pixiu.errors import PixiuError, Refusal
from pixiu.wire.inbox_operations import next_generation
from proxy import kept_events as ev
from proxy import mail_events as mail_ev
from proxy.kept.stage import RETRY_MS, KeptCounters
from proxy.kept.writer import KeptWriter
from proxy.mail.service import MailService
from proxy.options import Options

MATCH_S: Final = 3.0
"""Time for which the replicas of a router partition are asked, seconds. Policy: what waits for that partition is refused."""
QUESTIONS_A_CALL: Final = 1_000
LEASE_PAUSE_S: Final = 1.0
"""Pause before a worker number is asked for again, seconds."""
NO_WORKER_NUMBER: Final = "kept_worker_number_refused"


@dataclass(slots=True)
class _Partition:
    """Questions for one router partition: one call at a time, so the busier the proxy, the more go together."""

    waiting: deque[ev.Question] = field(default_factory=deque)
    busy: bool = False


class KeptService:
    """Performs what the core and the writer ask for.

    Args:
        context: of the process.
        mail: runs the mail core, which stores the messages.
        step: gives events to the proxy's core.
        spawn: runs a task whose failure ends the process.
        acquire: takes a worker number from the registry: (worker, from_ms, until_ms).
        held_until_ms: Unix milliseconds until which a number is held; 0: it is not.
    """

    def __init__(
        self,
        context: Context[Options],
        mail: MailService,
        step: Callable[[ev.KeptAvailable | ev.KeptMatched | ev.KeptRefused | ev.KeptStored], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        acquire: Callable[[], Awaitable[tuple[int, int, int]]],
        held_until_ms: Callable[[int], int],
    ) -> None:
        self._context, self._step, self._spawn = context, step, spawn
        self._acquire, self._held_until_ms = acquire, held_until_ms
        self._client = KeptClient(lambda: context.view, context.links.state, context.tls, MATCH_S)
        self._partitions: dict[int, _Partition] = {}
        self.worker = -1
        """The writer's worker number; -1: none. A cluster without kept sessions takes none."""
        self._acquiring = False
        self._core = KeptWriter(mail.next_stream)
        self.runner: Runner[ev.WriterEvent, ev.WriterEffect] = Runner(self._core, context.now, tick=TICK)
        self.runner.effects.on(ev.KeptStored, step)
        self.runner.effects.on(mail_ev.WriterOpened, self._opened)
        self.runner.effects.on(mail_ev.RoomMailReceived, mail.runner.step)
        self._mail = mail
        mail.own_writer = self.runner.step

    def on_view(self, view: View) -> None:
        """Note whether the cluster can keep messages."""
        layout, cluster, options = view.layout, self._context.cluster, self._context.options
        roles = all(role in layout.roles and layout.partitions(role) for role in ("router", "xiu", "pi"))
        self._step(ev.KeptAvailable(roles and cluster.fanout == "gateway" and "room" in options.kinds))

    def ask(self, effect: ev.AskKept) -> None:
        """Ask the routers for the sessions of messages."""
        partitions = max(self._context.view.layout.partitions("router"), 1)
        for question in effect.questions:
            found = self._partitions.setdefault(question.room % partitions, _Partition())
            found.waiting.append(question)
            if not found.busy:
                found.busy = True
                self._spawn(self._ask(found))

    async def _ask(self, partition: _Partition) -> None:
        waiting = partition.waiting
        while waiting:
            batch = [waiting.popleft() for _ in range(min(len(waiting), QUESTIONS_A_CALL))]
            questions = [kept_pb2.KeptQuestion(room=each.room, topic=each.topic, session=each.session) for each in batch]
            try:
                answers = await self._client.match(questions)
            except PixiuError as error:
                batch += waiting
                waiting.clear()
                why = Refusal.of(error)
                self._step(
                    ev.KeptRefused([each.number for each in batch], why._replace(retry_after_ms=why.retry_after_ms or RETRY_MS))
                )
            else:
                self._step(ev.KeptMatched([(each.number, sessions) for each, sessions in zip(batch, answers, strict=True)]))
        partition.busy = False

    def store(self, effect: ev.StoreKept) -> None:
        """Store messages; the first ones take a worker number."""
        if self.worker < 0:
            self._borrow()
        self.runner.step(effect)

    def _borrow(self) -> None:
        if not self._acquiring:
            self._acquiring = True
            self._spawn(self._borrow_number())

    async def _borrow_number(self) -> None:
        while True:
            try:
                self.worker, _, _ = await self._acquire()
            except PixiuError as error:
                self._context.log.warning(NO_WORKER_NUMBER, text=str(error))
                await asyncio.sleep(LEASE_PAUSE_S)
            else:
                break
        self._acquiring = False
        self.runner.step(ev.WriterLent(self.worker, next_generation(0, time.time())))

    def _opened(self, effect: mail_ev.WriterOpened) -> None:
        if self._held_until_ms(effect.worker) <= time.time_ns() // 1_000_000:
            self._borrow()  # another process has it; the stream after this one has a number of its own
        self._mail.runner.step(effect)

    async def stop(self) -> None:
        """End everything."""
        self.runner.stop()
        await self._client.close()

    def samples(self, counters: KeptCounters) -> dict[str, object]:
        """Samples for metrics."""
        return {
            **totals(counters),
            "kept_streams_total": self._core.streams,
            "kept_inboxes_full_total": self._core.inboxes_full,
        }
