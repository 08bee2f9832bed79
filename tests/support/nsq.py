"""A client of NSQ's protocol V2 for tests, and listeners for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Self

import aiohttp

from tests.support.roles import Roles
from tests.support.waiting import until

RESPONSE, ERROR, MESSAGE = range(3)


class NsqError(Exception):
    """An error frame."""


class Got(NamedTuple):
    """A message."""

    id: bytes
    time_ns: int
    attempts: int
    body: bytes


class NsqClient:
    """One connection: `async with NsqClient(port) as client`. Heartbeats are answered while something is read."""

    def __init__(self, port: int, **identify: Any) -> None:
        self._port, self._identify = port, {"client_id": "test", "feature_negotiation": True, **identify}
        self._messages: asyncio.Queue[Got | None] = asyncio.Queue()
        self._answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._task = asyncio.create_task(self._run())
        try:
            self.agreed = json.loads(await self.say(b"  V2IDENTIFY", json.dumps(self._identify).encode()))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        assert self._task is not None
        self._task.cancel()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _run(self) -> None:
        try:
            while True:
                size, kind = struct.unpack(">ii", await self._reader.readexactly(8))
                data = await self._reader.readexactly(size - 4)
                if kind == MESSAGE:
                    time_ns, attempts, name = struct.unpack_from(">qH16s", data)
                    self._messages.put_nowait(Got(name, time_ns, attempts, data[26:]))
                elif data == b"_heartbeat_":
                    self.tell(b"NOP")
                else:
                    self._answers.put_nowait(data if kind == RESPONSE else NsqError(data.decode()))
        except (ConnectionError, asyncio.IncompleteReadError):
            self._answers.put_nowait(ConnectionResetError("the connection is over"))
            self._messages.put_nowait(None)

    def tell(self, line: bytes, body: bytes | None = None) -> None:
        """Send a command."""
        self._writer.write(line + b"\n" + (b"" if body is None else len(body).to_bytes(4, "big") + body))

    async def answer(self) -> bytes:
        """The next answer. Raises `NsqError`, `ConnectionError`."""
        found = await self._answers.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def say(self, line: bytes, body: bytes | None = None) -> bytes:
        """Send a command, and wait for its answer."""
        self.tell(line, body)
        return await self.answer()

    async def next(self) -> Got:
        """The next message. Raises `ConnectionError`."""
        found = await self._messages.get()
        if found is None:
            raise ConnectionResetError("the connection is over")
        return found


def mpub(*bodies: bytes) -> bytes:
    """The body of an MPUB."""
    return len(bodies).to_bytes(4, "big") + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)


async def listener(roles: Roles, name: str, *arguments: str) -> tuple[int, int]:
    """Start a listener as a process; its ports of TCP and HTTP."""
    command = ["--target", roles.target(), "--tcp-port", "0", "--http-port", "0", "--log-format", "json", *arguments]
    roles.start_program(name, "nsqdoor", command)
    found: list[tuple[int, int]] = []

    def looks() -> bool:
        for line in roles.log(name).splitlines():
            if line.startswith("{") and (said := json.loads(line)).get("event") == "nsq_listens":
                found.append((said["tcp_port"], said["http_port"]))
        return bool(found)

    await until(looks, lambda: f"{name} listens: {roles.log(name)}")
    return found[0]


@contextlib.asynccontextmanager
async def http() -> AsyncIterator[Http]:
    """A client of the HTTP of nsqd and nsqlookupd."""
    async with aiohttp.ClientSession() as session:
        yield Http(session)


class Http:
    """Asks by HTTP."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def get(self, port: int, path: str) -> Any:
        """The JSON or text of an answer, and 404 as None."""
        async with self._session.get(f"http://127.0.0.1:{port}{path}") as reply:
            assert reply.status in (200, 404), await reply.text()
            return None if reply.status == 404 else _read(await reply.text())

    async def post(self, port: int, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Status and answer."""
        async with self._session.post(f"http://127.0.0.1:{port}{path}", data=body) as reply:
            return reply.status, _read(await reply.text())


def _read(text: str) -> Any:
    return json.loads(text) if text[:1] in ("{", "[") else text
