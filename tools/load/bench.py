"""`pixiu bench`: a load from this machine through the SDK, and its outcome.

With `--peers` it is another command, from the server package: it starts servers of its own and loads them by MQTT.

The sender and the receiver are two clients of one process, so that one clock measures the latency. Each run chooses new random
rooms and users, from numbers that nobody uses.

Source: docs/operations.md, "Watching a cluster".
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from typing import Annotated, Final

import typer
from rich.console import RenderableType
from rich.table import Table

import pixiu
from pixiu.client.client import Client
from pixiu.client.send.awaited import SendFailure
from pixiu.client.stores.view import InboxView
from pixiu.discovery.reachable import check_reachable
from pixiu.discovery.target import names_registry
from pixiu.errors import ConfigurationError, InvalidArgument, PixiuError
from pixiu.ids import UIN, RoomID
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, console, error_console, guarded, print_json
from tools.load.ledger import Judgement, Ledger
from tools.load.pace import Pace
from tools.load.payload import HEAD, HEAD_BYTES, monotonic_us

KINDS: Final = ("room", "signal", "mail")
FIRST_KEY: Final = 1 << 60
"""Lower bound of the random rooms and users of a load."""
KEY_BITS: Final = 40
MAX_KEYS: Final = 1000
US: Final = UIN(0)
"""Sender and receiver of every message, for the ledger."""
DEVICE: Final = "pixiu-bench"
POLL_S: Final = 0.001
MAX_BURST: Final = 50
"""Limit of messages that leave in one turn of the event loop, so that deliveries are taken in between."""
DEFAULT_COUNT: Final = 1000
MAX_BODY_BYTES: Final = 65_536
BENCH_GROUP: Final = "pixiu.bench"
"""Entry-point group of the parts of `pixiu bench` that need more than the SDK."""
PEERS_ONLY: Final = {"case": "--case", "server": "--server", "rounds": "--rounds", "layout": "--layout"}
PEERS_NOT: Final = {
    "kind": "--kind", "rate": "--rate", "size": "--size", "count": "--count", "window": "--window", "keys": "--keys",
    "timeout": "--timeout", "target": "--target",
}  # fmt: skip
Compare = Callable[[Sequence[str], Sequence[str], int, float, str, bool], int]
"""(cases, servers, rounds, seconds, layout, JSON) → exit code."""


@dataclass(frozen=True, slots=True)
class Load:
    """The messages to send of each kind."""

    rate: float = 0.0
    """Messages a second; 0: as fast as the window allows."""
    size: int = 100
    """Bytes of a body, at least 16."""
    count: int = DEFAULT_COUNT
    """Number of messages; 0: until the time is over."""
    seconds: float = 0.0
    """Time limit, seconds; 0: until all are sent."""
    window: int = 100
    """Limit of messages under way."""
    keys: int = 10
    """Number of rooms or users that get messages in turn."""
    timeout_s: float = 10.0
    """Time after which a message that has not arrived counts as lost, seconds."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a load of one kind."""

    kind: str
    sent: int
    delivered: int
    """Sent messages that were delivered, each counted once."""
    repeated: int
    """Deliveries beyond the first of a message."""
    failed: int
    """Sent messages that the cluster refused or reported as undelivered, and deliveries of another content or to another key."""
    lost: int
    """Sent messages that neither arrived nor failed in time."""
    seconds: float
    """Time from the first sending until nothing was open."""
    p50_us: int
    p99_us: int
    highest_us: int
    """Highest latency of the delivered messages, from `send` until the application has it; 0 without any."""
    failures: dict[str, int]
    """Error code, or what was wrong with a delivery → number."""

    @property
    def whole(self) -> bool:
        """True if everything arrived exactly once."""
        return not (self.failed or self.lost or self.repeated)

    @property
    def per_s(self) -> float:
        """Deliveries per second."""
        return self.delivered / self.seconds if self.seconds else 0.0


def result_of(kind: str, ledger: Ledger, seconds: float) -> Result:
    """The outcomes of all messages; call it when nothing is open."""
    outcomes, times = ledger.outcomes, ledger.latency_us
    failures = ledger.refusals + Counter({one.value: outcomes[one] for one in (Judgement.ALIEN, Judgement.DAMAGED)})
    return Result(
        kind,
        ledger.sent,
        ledger.delivered,
        outcomes[Judgement.REPEATED] + outcomes[Judgement.AGAIN],
        failures.total(),
        sum(not missing.refused for missing in ledger.missing()),
        seconds,
        times.percentile(50),
        times.percentile(99),
        times.highest,
        dict(failures),
    )


class _Run:
    """The load of one kind."""

    def __init__(self, target: str, kind: str, load: Load) -> None:
        self._target, self._kind, self._load = target, kind, load
        self._ledger, self._moved_us = Ledger(), 0
        self.keys = [FIRST_KEY + secrets.randbits(KEY_BITS) for _ in range(load.keys)]
        for key in self.keys:
            self._ledger.joining(RoomID(key), US, 0)
            self._ledger.joined(RoomID(key), US)
        self._numbers: dict[int, int] = {}
        """SnowflakeID → number, of messages that may still fail."""
        self._failed_at_once: dict[int, str] = {}

    async def run(self) -> Result:
        """Send, receive, count, clean up."""
        client = f"bench-{secrets.token_hex(4)}"
        async with (
            pixiu.connect(self._target, client=f"{client}-in") as receiver,
            pixiu.connect(self._target, client=f"{client}-out", on_failure=self._failure) as sender,
        ):
            try:
                async with self._receiving(receiver):
                    began_us = monotonic_us()
                    await self._send_all(sender)
                    while self._ledger.open_messages:
                        await asyncio.sleep(POLL_S)
                        self._expire()
            finally:
                await self._clean_up()
        return result_of(self._kind, self._ledger, max(self._moved_us - began_us, 0) / 1e6)

    def _expire(self) -> None:
        self._ledger.expire(monotonic_us() - int(self._load.timeout_s * 1e6))

    @contextlib.asynccontextmanager
    async def _receiving(self, receiver: Client) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            work: list[Callable[[], Awaitable[None]]] = []
            if self._kind == "mail":
                for uin in self.keys:
                    inbox = await stack.enter_async_context(receiver.inbox(uin=uin, device=DEVICE))
                    work.append(lambda inbox=inbox, uin=uin: self._take_mail(inbox, uin))  # type: ignore[misc]
            else:
                subscription = await stack.enter_async_context(receiver.subscribe(rooms=self.keys))
                work.append(lambda: self._take(subscription))
            tasks = [asyncio.ensure_future(one()) for one in work]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            for problem in ended:
                if isinstance(problem, Exception):
                    raise problem

    async def _take(self, subscription: pixiu.Subscription) -> None:
        async for messages in subscription.batches():
            now_us = monotonic_us()
            for message in messages:
                self._came(message.room, message, now_us)

    async def _take_mail(self, inbox: pixiu.Inbox, uin: int) -> None:
        async for mail in inbox:
            self._came(uin, mail.message, monotonic_us(), again=mail.redelivered)
            mail.acknowledge()

    def _came(self, key: int, message: pixiu.Message, now_us: int, *, again: bool = False) -> None:
        self._numbers.pop(message.message_id, None)
        outcome, _ = self._ledger.deliver(RoomID(key), US, message.payload, now_us, again=again)
        if outcome in (Judgement.DELIVERED, Judgement.OUT_OF_ORDER):
            self._ledger.acknowledged(HEAD.unpack_from(message.payload)[0], now_us)  # a failure that is reported later is none
            self._moved_us = now_us

    def _failed(self, number: int, code: str) -> None:
        self._ledger.refused(number, code)
        self._moved_us = monotonic_us()

    async def _send_all(self, sender: Client) -> None:
        load, pace, began = self._load, Pace(self._load.rate, self._load.window), time.monotonic()
        while True:
            sent, under_way = self._ledger.sent, self._ledger.open_messages
            due = min(pace.due(time.monotonic() - began, sent, under_way), MAX_BURST)
            if load.count:
                due = min(due, load.count - sent)
            for _ in range(due):
                self._send(sender)
            if (load.count and self._ledger.sent >= load.count) or (load.seconds and time.monotonic() - began >= load.seconds):
                return
            await asyncio.sleep(0 if due > 0 and not load.rate and self._ledger.open_messages < load.window else POLL_S)
            self._expire()

    def _send(self, sender: Client) -> None:
        number = self._ledger.sent
        key = self.keys[number % len(self.keys)]
        payload = self._ledger.send(number, RoomID(key), US, bytes(self._load.size - HEAD_BYTES), monotonic_us())
        try:
            match self._kind:
                case "room":
                    message_id = sender.room(key).send_soon(payload).id
                case "signal":
                    message_id = sender.room(key).signal_soon(payload).id
                case _:
                    message_id = sender.user(key).mail_soon(payload).id
        except PixiuError as error:
            self._failed(number, error.code)
            return
        code = self._failed_at_once.pop(message_id, None)
        if code is not None:
            self._failed(number, code)
        else:
            self._numbers[message_id] = number

    def _failure(self, failure: SendFailure) -> None:
        number = self._numbers.pop(failure.id, None)
        if number is None:
            self._failed_at_once[failure.id] = failure.error.code
        else:
            self._failed(number, failure.error.code)

    async def _clean_up(self) -> None:
        """Delete the inboxes' entries and the device of mail. Rooms and signals leave nothing behind."""
        if self._kind != "mail":
            return
        async with InboxView(self._target) as view:
            for uin in self.keys:
                lanes = await view.unread(uin)
                for lane in lanes:
                    if lane.readable:
                        await view.delete(uin, lane.lane, lane.floor + 1, lane.last)
                for device in {device.number for lane in lanes for device in lane.devices}:
                    await view.drop_device(uin, device)


def render(results: list[Result]) -> RenderableType:
    """Make the table, for people."""
    table = Table(box=None, pad_edge=False)
    table.add_column("kind")
    for name in ("sent", "delivered", "failed", "lost", "repeated", "delivered/s", "p50", "p99", "highest"):
        table.add_column(name, justify="right")
    for one in results:
        wrong = [f"[red]{number:,}[/]" if number else "0" for number in (one.failed, one.lost, one.repeated)]
        times = [f"{us / 1000:,.1f} ms" if one.delivered else "" for us in (one.p50_us, one.p99_us, one.highest_us)]
        table.add_row(one.kind, f"{one.sent:,}", f"{one.delivered:,}", *wrong, f"{one.per_s:,.0f}", *times)
    return table


def result_json(one: Result, keys: Sequence[int]) -> dict[str, object]:
    """One kind's result as JSON values, with its rooms or users."""
    return {**asdict(one), "delivered_per_s": round(one.per_s, 1), "whole": one.whole, "keys": list(keys)}


def _comparison() -> Compare:
    for entry in entry_points(group=BENCH_GROUP, name="peers"):
        compare: Compare = entry.load()
        return compare
    raise ConfigurationError(
        "--peers starts a cluster on this machine, and the SDK has no servers: pip install 'pixiu-sdk[onebox]'"
    )


def _check_options(context: typer.Context, peers: bool) -> None:
    """Refuse options of the other command, because users would believe that silently ignored ones had an effect."""
    for name, option in PEERS_NOT.items() if peers else PEERS_ONLY.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InvalidArgument(f"{option}: {'not with' if peers else 'only with'} --peers")


@guarded
def bench(
    context: typer.Context,
    kind: Annotated[list[str] | None, typer.Option("--kind", "-k", help="room, signal or mail; may be repeated.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Messages a second; 0: as fast as the window allows.")] = 0.0,
    size: Annotated[int, typer.Option(min=HEAD_BYTES, max=MAX_BODY_BYTES, help="Bytes of each message.")] = 100,
    count: Annotated[int, typer.Option("--count", "-n", min=0, help="Messages of each kind (default: 1000, without --for).")] = 0,
    seconds: Annotated[float, typer.Option("--for", min=0, help="Send each kind for this number of seconds.")] = 0.0,
    window: Annotated[int, typer.Option(min=1, max=100_000, help="Messages that may be under way at a time.")] = 100,
    keys: Annotated[int, typer.Option(min=1, max=MAX_KEYS, help="Number of rooms or users that messages go to in turn.")] = 10,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a message that has not arrived counts as lost.")
    ] = 10.0,
    target: Target = DEFAULT_TARGET,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare with other servers that are installed here. Every server is started for this.")
    ] = False,
    case: Annotated[list[str] | None, typer.Option(help="With --peers: only this case; may be repeated.")] = None,
    server: Annotated[list[str] | None, typer.Option(help="With --peers: only this one beside Pixiu; may be repeated.")] = None,
    rounds: Annotated[int, typer.Option(help="With --peers: how often each server is measured, in turn.")] = 3,
    layout: Annotated[str, typer.Option(help="With --peers: layout of Pixiu's processes: separate.")] = "",
    as_json: AsJson = False,
) -> None:
    """Send a load from this machine and measure it: delivered, lost, p50, p99, by kind. Exit code 1: something did not come.

    With --peers a cluster of its own and other servers get the same work in turn, each case for three seconds or --for. Exit code
    1: Pixiu lost, repeated or disordered something, or a server did not work.
    """
    _check_options(context, peers)
    if peers:
        raise typer.Exit(_comparison()(case or [], server or [], rounds, seconds, layout, as_json))
    kinds = kind or ["room", "signal"]
    for name in kinds:
        if name not in KINDS:
            raise InvalidArgument(f"--kind {name}: one of {', '.join(KINDS)}")
    if "mail" in kinds and not names_registry(target):
        raise InvalidArgument(f"--target {target}: a load of mail is removed again through the registry; give zk://HOST:PORT/ROOT")
    load = Load(rate, size, count or (0 if seconds else DEFAULT_COUNT), seconds, window, keys, timeout)

    async def run_all() -> list[Result]:
        check_reachable(target)
        results: list[Result] = []
        for name in dict.fromkeys(kinds):
            run = _Run(target, name, load)
            results.append(await run.run())
            if as_json:
                print_json(result_json(results[-1], run.keys))
        return results

    results = asyncio.run(run_all())
    if not as_json:
        console().print(render(results))
        for one in results:
            for code, number in one.failures.items():
                error_console().print(f"{one.kind}: {number:,} failed: {code}", highlight=False)
    if not all(one.whole for one in results):
        raise typer.Exit(1)
