"""The shell of routes: reads their file, and writes durable topics by the SDK.

Source: docs/routes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from cluster.metrics.metrics import Sample
from cluster.process.context import Context
from cluster.routes.live_file import RoutesFile
from cluster.routes.routes import Routes
from cluster.settings.options import read_bounded
from pixiu import errors
from pixiu.client.client import Client, connect
from pixiu.client.options import ClientOptions
from pixiu.client.topics.writing.writer_shell import TopicReceipt
from pixiu.errors import PixiuError, Refusal
from pixiu.placement.slots import slot_of
from proxy import routed_events as ev
from proxy.options import Options
from proxy.routed.stage import MAX_BYTES, RETRY_MS, RoutedRooms
from proxy.routed_events import Storing

CLIENT: Final = ClientOptions(queue_bytes=2 * MAX_BYTES, topic_timeout_s=86_400.0)
"""Policy: no message is given up because its topic is away, since it would be sent again behind those that followed it.
`MAX_RECORDS` and `MAX_BYTES` bound what waits, and a repeat waits for the same write."""
STOP_S: Final = 5.0
"""Time for what is being stored at an end, seconds: its publishers were refused, or hear that the proxy is gone."""
CONNECT_PAUSE_S: Final = 1.0
SAY_S: Final = 60.0
QUEUES: Final = 64
"""Queues of outcomes of a durable topic, by slot: one of its groups that is away holds up few of the others' answers."""
MAX_TOKEN_BYTES: Final = 16_384
LOOP_STOPPED: Final = "routes_loop_stopped"
NOT_CONNECTED: Final = "routes_not_connected"
PASSING: Final = (errors.RecordTooLarge, errors.InvalidArgument, errors.MalformedData)
"""Errors of a message that will never be stored. After any other it may be sent again."""


class RoutedService:
    """Performs what the core asks for.

    Args:
        context: of the process.
        rooms: the core's part.
        step: gives events to the proxy's core.
        spawn: runs a task whose failure ends the process.

    Raises `ConfigurationError` if the file of routes is wrong.
    """

    def __init__(
        self,
        context: Context[Options],
        rooms: RoutedRooms[Any],
        step: Callable[[ev.RoutesChanged | ev.RoutedStored], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._context, self._rooms, self._step, self._spawn = context, rooms, step, spawn
        self._client: Client | None = None
        self._queues: dict[tuple[str, int], deque[tuple[int, TopicReceipt]]] = {}
        self._early: list[Storing] = []
        self._connecting = False
        self._problems: dict[str, str] = {}
        """Route → why its durable topic does not take messages."""
        path = context.options.routes
        self._file = RoutesFile(path, self._changed, context.log, context.audit) if path else None
        if self._file is not None:
            rooms.use(self._file.routes)

    def start(self) -> None:
        """Start looking at the file."""
        if self._file is not None:
            self._spawn(self._file.look())
            self._spawn(self._say())
            self._use(self._file.routes)

    async def stop(self) -> None:
        """End the client."""
        if self._client is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._client.close()

    def _changed(self, routes: Routes) -> None:
        self._problems.clear()
        self._step(ev.RoutesChanged(routes))
        self._use(routes)

    def _use(self, routes: Routes) -> None:
        if self._rooms.active and self._client is None and not self._connecting:
            self._connecting = True
            self._spawn(self._connect())

    async def _connect(self) -> None:
        options = self._context.options
        while self._client is None:
            try:
                token = _token(options.routes_token_file)
                name = f"routes-{socket.gethostname()[:64]}-{os.getpid()}"
                self._client = await connect(options.registry, client=name, token=token, options=CLIENT).open()
            except PixiuError as error:
                self._context.log.warning(NOT_CONNECTED, text=str(error))
                await asyncio.sleep(CONNECT_PAUSE_S)
        early, self._early = self._early, []
        self._write(early)

    async def _say(self) -> None:
        """Name the routes that stopped a loop, once a minute."""
        while True:
            await asyncio.sleep(SAY_S)
            loops, self._rooms.loops = self._rooms.loops, type(self._rooms.loops)()
            for route, number in loops.items():
                self._context.log.warning(LOOP_STOPPED, route=route, messages=number)

    # --- storing

    def store(self, effect: ev.StoreRouted) -> None:
        """Store messages."""
        if self._client is None:
            self._early += effect.messages
        else:
            self._write(effect.messages)

    def _write(self, messages: list[Storing] | Any) -> None:
        client, refused = self._client, list[tuple[int, Refusal | None]]()
        assert client is not None
        for each in messages:
            try:
                receipt = client.durable_topic(each.topic).send_soon(
                    each.body, key=each.key, headers=each.headers, tag=each.tag or None, event_time=each.event_time_us,
                    expires_in_s=each.expires_in_s, load_test=each.load_test,
                )  # fmt: skip
            except PixiuError as error:
                refused.append((each.number, self._why(each.route, each.topic, error)))
                continue
            queue = each.topic, 0 if each.key is None else slot_of(each.key) % QUEUES
            waiting = self._queues.get(queue)
            if waiting is None:
                waiting = self._queues[queue] = deque()
                self._spawn(self._follow(queue, waiting, each.route))
            waiting.append((each.number, receipt))
        if refused:
            asyncio.get_running_loop().call_soon(partial(self._step, ev.RoutedStored(refused)))

    async def _follow(self, queue: tuple[str, int], waiting: deque[tuple[int, TopicReceipt]], route: str) -> None:
        """Report the outcomes of a queue until it is empty."""
        while waiting:
            await waiting[0][1].outcome()
            found = list[tuple[int, Refusal | None]]()
            while waiting and waiting[0][1].done:
                number, receipt = waiting.popleft()
                error = receipt.error
                found.append((number, None if error is None else self._why(route, queue[0], error)))
                if error is None:
                    self._problems.pop(route, None)
            if not waiting:
                del self._queues[queue]
            self._step(ev.RoutedStored(found))

    def _why(self, route: str, topic: str, error: PixiuError) -> Refusal:
        """Refusal of a message, and why its route does not get on."""
        if isinstance(error, PASSING):
            return Refusal(error.code, f"the route {route} cannot store it: {error}")
        if isinstance(error, errors.UnknownTopic):
            missing = f"there is no such durable topic: `pixiu topic create {topic}`, or `pixiu topic restore {topic}`"
            text = f"the route {route} stores in {topic}, and {missing}"
        elif isinstance(error, errors.NotAllowed | errors.NotAuthenticated):
            text = f"the route {route} may not store in {topic}: give proxies a login that may `produce` (proxy.routes_token_file)"
        else:
            text = f"the durable topic {topic} of the route {route} does not store it now; send it again"
        self._problems[route] = text
        return Refusal(errors.TopicAway.code, text, RETRY_MS)

    # --- what others ask

    @property
    def problem(self) -> str:
        """Reason for an operator to look; empty: none."""
        found = [self._file.problem] if self._file is not None and self._file.problem else []
        return "; ".join([*found, *self._problems.values()])

    @property
    def file_path(self) -> str:
        """Absolute path of the file of routes; empty: there is none."""
        return str(Path(self._context.options.routes).resolve()) if self._context.options.routes else ""

    def status(self) -> list[Mapping[str, object]]:
        """Each route for `/health` and `pixiu routes status`."""
        found = list[Mapping[str, object]]()
        for each in self._rooms.routes.routes:
            counters = self._rooms.counters.get(each.name)
            numbers = {
                name: getattr(counters, name) if counters is not None else 0
                for name in ("stored", "repeated", "refused", "stopped", "waiting")
            }
            takes = each.options.filter or ", ".join(f"room/{room}" for room in each.options.rooms)
            names = {"name": each.name, "takes": takes, "topic": each.options.topic, "clients": each.options.clients}
            found.append({**names, **numbers, "why": self._problems.get(each.name, "")})
        return found

    def samples(self) -> Iterator[Sample]:
        """Samples for metrics, by route: at most `MAX_ROUTES`."""
        for name, counters in self._rooms.counters.items():
            labels = {"route": name}
            for field in ("stored", "repeated", "refused", "stopped"):
                yield Sample(f"routed_{field}_total", float(getattr(counters, field)), labels)
            yield Sample("routed_waiting", float(counters.waiting), labels)


def _token(path: str) -> str | None:
    """The login in a file; None: that of the environment."""
    return read_bounded(Path(path), MAX_TOKEN_BYTES).decode(errors="replace").strip() if path else None
