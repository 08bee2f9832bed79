"""A real nsqd that can be killed and started again, where `python -m tests.clients.nsq.matrix --prepare --peer` has built one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from pathlib import Path
from typing import Any, Self

from comparison.processes import free_port
from tests.clients.nsq.matrix import BUILT
from tests.support.waiting import until

NSQD = BUILT / "nsqd/nsqd"
LOOKUPD = BUILT / "nsqd/nsqlookupd"


class Nsqd:
    """`async with Nsqd(folder) as nsqd`.

    Args:
        folder: of its data.
        arguments: more of its options.
    """

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder, self._arguments = folder, arguments
        self.port, self._http = free_port(), free_port()
        self._processes: list[asyncio.subprocess.Process] = []
        self.lookupd = ""
        """Address of its nsqlookupd's HTTP, if there is one."""

    @property
    def address(self) -> str:
        """Of its TCP."""
        return f"127.0.0.1:{self.port}"

    async def with_lookupd(self) -> None:
        """Start an nsqlookupd, too, at which it registers, and wait until it listens."""
        http = free_port()
        tcp, self.lookupd = f"127.0.0.1:{free_port()}", f"127.0.0.1:{http}"
        await self._run(LOOKUPD, "-tcp-address", tcp, "-http-address", self.lookupd)
        await until(lambda: _listens(http), "nsqlookupd listens")
        self._arguments += ("-lookupd-tcp-address", tcp, "-broadcast-address", "127.0.0.1")

    async def _run(self, *command: Path | str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*map(str, command), stderr=asyncio.subprocess.DEVNULL)
        self._processes.append(process)
        return process

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = await self._run(
            NSQD, "-tcp-address", self.address, "-http-address", f"127.0.0.1:{self._http}", "-data-path", self._folder,
            *self._arguments,
        )  # fmt: skip
        await until(lambda: _listens(self.port), "nsqd listens")

    async def stop(self) -> None:
        """End it: what is in its memory is in its files then."""
        self._process.terminate()
        await self._process.wait()

    async def stats(self, topic: str) -> list[dict[str, Any]]:
        """What it says of the channels of a topic."""
        url = f"http://127.0.0.1:{self._http}/stats?format=json&topic={topic}"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read())
        return [channel for each in json.loads(text)["topics"] for channel in each["channels"]]

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes[::-1]:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
