"""What a driver asks for: harm to the cluster, and the other end of a conversation, by Python's SDK."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import pixiu
from tests.support.cluster import LocalCluster, wait_for

SIGNALS: Final = {"kill": signal.SIGKILL, "drain": signal.SIGTERM}


class Favours:
    """Does what one scenario asks for. Usable by `async with`.

    Args:
        cluster: to harm, and to talk through.
        connect: makes a client of a user.
    """

    def __init__(self, cluster: LocalCluster, connect: Callable[[int], pixiu.Client]) -> None:
        self._cluster, self._connect = cluster, connect
        self._stack = AsyncExitStack()
        self._px: pixiu.Client | None = None
        self._subscriptions: list[pixiu.Subscription] = []
        self._hit: set[int] = set()
        self._actions: dict[str, Callable[..., Awaitable[str]]] = {
            "kill": self._kill, "drain": self._drain, "healthy": self._healthy, "publish": self._publish, "listen": self._listen,
            "heard": self._heard, "answer": self._answer, "request": self._request, "mail": self._mail, "inbox": self._inbox,
            "write": self._write, "read": self._read,
        }  # fmt: skip

    async def __aenter__(self) -> Favours:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def answer(self, line: str) -> str:
        """The answer to `ask …`: `done …` or `refused …`."""
        action, *words = line.split()[1:]
        try:
            return f"done {await self._actions[action](*words)}"
        except (pixiu.PixiuError, AssertionError, KeyError, TypeError, TimeoutError) as error:
            return f"refused {type(error).__name__}: {' '.join(str(error).split())}"

    async def _client(self) -> pixiu.Client:
        if self._px is None:
            self._px = await self._stack.enter_async_context(self._connect(0))
        return self._px

    async def _harm(self, how: str, role: str, whom: str) -> str:
        def find() -> dict[str, Any] | None:
            for process in self._cluster.processes(role):
                leads = process.get("replication", {}).get("state") == "Leading"
                if leads if whom == "leader" else process["client_address"] == whom:
                    return process
            return None

        process = await asyncio.to_thread(wait_for, find, f"{role} {whom}")
        assert process is not None
        self._hit.add(process["pid"])
        os.kill(process["pid"], SIGNALS[how])
        return ""

    async def _kill(self, role: str, whom: str) -> str:
        return await self._harm("kill", role, whom)

    async def _drain(self, role: str, whom: str) -> str:
        return await self._harm("drain", role, whom)

    async def _healthy(self) -> str:
        def replaced() -> bool:
            return not any(
                process["pid"] in self._hit and process["state"] == "Running" for process in self._cluster.status()["processes"]
            )

        await asyncio.to_thread(wait_for, replaced, "the end of what was killed or drained")
        await asyncio.to_thread(self._cluster.wait_healthy)
        return ""

    async def _publish(self, room: str, text: str) -> str:
        await (await self._client()).room(int(room)).send(text.encode())
        return ""

    async def _listen(self, room: str) -> str:
        px = await self._client()
        self._subscriptions.append(await self._stack.enter_async_context(px.subscribe(room=int(room))))
        return ""

    async def _heard(self, count: str) -> str:
        return await _texts(self._subscriptions[0], int(count))

    async def _answer(self, room: str, text: str) -> str:
        subscription = await self._stack.enter_async_context((await self._client()).subscribe(room=int(room)))
        answering = asyncio.create_task(subscription.run(lambda message: _reply(message, text)))
        self._stack.callback(answering.cancel)
        return ""

    async def _request(self, room: str, text: str) -> str:
        return (await (await self._client()).room(int(room)).request(text.encode())).payload.decode()

    async def _mail(self, uin: str, text: str) -> str:
        await (await self._client()).user(int(uin)).mail(text.encode())
        return ""

    async def _inbox(self, uin: str, device: str, count: str) -> str:
        async with self._connect(int(uin)) as px, px.inbox(device=device) as inbox:
            found: list[str] = []
            async for mail in inbox:
                mail.acknowledge()
                found.append(mail.payload.decode())
                if len(found) == int(count):
                    break
            return " ".join(found)

    async def _write(self, topic: str, key: str, text: str) -> str:
        await (await self._client()).durable_topic(topic).send(text.encode(), key=key)
        return ""

    async def _read(self, topic: str, count: str) -> str:
        async with (await self._client()).durable_topic(topic).reader(start="earliest") as reader:
            found: list[str] = []
            async for message in reader:
                found.append(f"{(message.key or b'').decode()}={message.body.decode()}")
                if len(found) == int(count):
                    break
            return " ".join(found)


async def _reply(message: pixiu.Message, text: str) -> None:
    await message.reply(text.encode())


async def _texts(messages: AsyncIterator[pixiu.Message], count: int) -> str:
    return " ".join([(await anext(messages)).payload.decode() for _ in range(count)])
