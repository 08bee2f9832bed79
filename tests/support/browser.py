"""A headless Chromium for a test: it opens pages, runs scripts in them and takes pictures, by the protocol of its developer tools.

The flags are those of the driver in `tests/clients/mqttjs/browser.js`.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.support.waiting import until

CHROMIUM = os.environ.get("BROWSER") or shutil.which("chromium") or ""
"""The browser; empty: none is installed."""
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--remote-debugging-port=0", "--hide-scrollbars",
)  # fmt: skip
MAX_MESSAGE = 64 << 20


class Browser:
    """A browser with one page: `async with Browser(folder) as browser`. `problems`: what it wrote into its console."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        self._folder, self._size = folder, f"--window-size={width},{height}"
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []

    async def __aenter__(self) -> Self:
        words = (CHROMIUM, *FLAGS, self._size, f"--user-data-dir={self._folder}", "about:blank")
        null = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*words, stdout=null, stderr=null, start_new_session=True)
        active = self._folder / "DevToolsActivePort"
        await until(lambda: active.exists() and "\n" in active.read_text(), "the browser")
        port = active.read_text().split("\n")[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [each for each in await answer.json() if each["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=MAX_MESSAGE)
        self._reading = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._reading.cancel()
        await self._session.close()
        os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        try:
            return await self._answers[number]
        finally:
            del self._answers[number]

    async def open(self, url: str) -> None:
        """Open a page."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited. An element is an empty dictionary."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def wait(self, script: str) -> Any:
        """The first true value of an expression in the page."""
        found: Any = None

        async def look() -> Any:
            nonlocal found
            found = await self.run(script)
            return found or found == {}

        await until(look, f"{script} in the page")
        return found

    async def picture(self, path: Path) -> None:
        """Take a picture of what the window shows."""
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers[said["id"]].set_result(said.get("result", said))
            elif said["method"] == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(said["params"]["exceptionDetails"])[:500])
            elif said["method"] == "Log.entryAdded":
                entry = said["params"]["entry"]
                if entry["level"] == "error" and entry["source"] != "network":  # an answer such as 503 is the page's to show
                    self.problems.append(entry["text"])
