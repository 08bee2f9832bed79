"""What a scenario gets: a cluster, numbers of its own, clients that end with it, and the harness."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

import pixiu

LIMIT_S: Final = 60.0
"""Time for each condition."""
PAUSE_S: Final = 0.005
"""Between two looks at a condition."""
Thing = TypeVar("Thing")
ErrorT = TypeVar("ErrorT", bound=BaseException)


class Failed(Exception):
    """A scenario does not hold."""


class Play:
    """One play of a scenario.

    Args:
        target: of the cluster.
        seed: rooms and users from here to 999 above are the scenario's.
        ask: has the harness do something, and returns what it says.
    """

    def __init__(self, target: str, seed: int, ask: Callable[..., Awaitable[str]]) -> None:
        self.target, self.seed, self.ask = target, seed, ask
        self.ends = AsyncExitStack()
        """Closes what the scenario opened."""

    async def connect(self, target: str = "", **options: Any) -> pixiu.Client:
        """A client that ends with the scenario."""
        return await self.ends.enter_async_context(pixiu.connect(target or self.target, **options))

    async def user(self, number: int, **options: Any) -> pixiu.Client:
        """A client of a user."""
        return await self.connect(uin=self.seed + number, client=f"device-{self.seed}-{number}", **options)

    async def subscribe(self, px: pixiu.Client, **to: Any) -> pixiu.Subscription:
        """A subscription that has joined what it is to, by default the scenario's room."""
        subscription = px.subscribe(**(to or {"room": self.seed}))
        await subscription.ready()
        return subscription

    async def pair(self, **options: Any) -> tuple[pixiu.Client, pixiu.Subscription]:
        """A client and its subscription to the scenario's room."""
        px = await self.connect(**options)
        return px, await self.subscribe(px)

    async def topic(self, texts: list[str] | None = None, **settings: Any) -> tuple[pixiu.Client, pixiu.DurableTopic]:
        """A client and a durable topic of the scenario's own, with these messages."""
        px, name = await self.connect(), f"s{self.seed}-topic"
        await px.topics.create(name, **{"parts": 2, **settings})
        topic = px.durable_topic(name)
        async with topic.writer() as writer:
            for text in texts or ():
                await writer.send(text.encode(), key=text)
        return px, topic

    def background(self, work: Awaitable[Thing]) -> asyncio.Task[Thing]:
        """Do something beside the scenario, until its end at the latest."""
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        self.ends.push_async_callback(end)
        return task


Scenario = Callable[[Play], Awaitable[None]]
SCENARIOS: Final[dict[str, Scenario]] = {}
"""By name."""


def scenario(name: str) -> Callable[[Scenario], Scenario]:
    """Mark a function that plays the scenario of a name."""

    def noted(play: Scenario) -> Scenario:
        SCENARIOS[name] = play
        return play

    return noted


def check(holds: bool, why: str) -> None:
    """Check a condition."""
    if not holds:
        raise Failed(why)


def same(found: object, wanted: object, what: str) -> None:
    """Check that two values are equal."""
    check(found == wanted, f"{what}: {found!r:.300}, not {wanted!r:.300}")


async def fails(kind: type[ErrorT], call: Callable[[], Awaitable[object]]) -> ErrorT:
    """Check that a call fails with an error of this kind; returns it."""
    try:
        await call()
    except kind as error:
        return error
    except Exception as error:
        raise Failed(f"failed with {error!r}, not {kind.__name__}") from error
    raise Failed(f"did not fail with {kind.__name__}")


async def take(things: AsyncIterator[Thing], count: int) -> list[Thing]:
    """Take so many things, within the limit."""
    found: list[Thing] = []
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(found) < count:
                found.append(await anext(things))
    except TimeoutError:
        raise Failed(f"{len(found)} of {count} came in {LIMIT_S:.0f} s") from None
    except StopAsyncIteration:
        raise Failed(f"it ended after {len(found)} of {count}") from None
    return found


async def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds, which may be a coroutine function."""
    try:
        async with asyncio.timeout(limit_s):
            while not (await found if inspect.isawaitable(found := condition()) else found):
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        raise Failed(f"{what}: not within {limit_s:.0f} s") from None


def numbers(count: int) -> list[str]:
    """The texts "0", "1", …"""
    return [str(number) for number in range(count)]


def closed_port() -> str:
    """An address at which nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{one.getsockname()[1]}"
