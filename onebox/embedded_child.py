"""The embedded ZooKeeper as a child of `pixiu up`: started, watched, and restarted on the same port and data.

Source: docs/operations.md, "One machine".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import Final

from onebox.children import start_child, tail
from onebox.embedded import HOST, START_TIMEOUT_S, STOP_TIMEOUT_S
from pixiu.errors import ConfigurationError, RegistryUnavailable
from pixiu.rpc.backoff import Backoff

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 10.0
POLL_S: Final = 0.02
_SERVES = re.compile(r"ZooKeeper serves 127\.0\.0\.1:(\d+)")


class EmbeddedChild:
    """One embedded ZooKeeper in a process of its own, which dies with its parent.

    folder: its data. port: 0 takes a free one, kept over restarts. log: its output. tls_dir: its certificates; None: no TLS.
    """

    def __init__(self, folder: Path, port: int, log: Path, tls_dir: Path | None = None) -> None:
        self._folder, self._tls_dir = folder, tls_dir
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.port = port
        self.restarts = 0
        self.problem = ""
        """Reason why it does not run now; empty when it does."""

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        return f"{HOST}:{self.port}"

    @property
    def credentials(self) -> Path:
        """The file of logins that was made at the first start."""
        return self._folder / "credentials"

    @property
    def pid(self) -> int:
        """Process ID of the server (Java); 0 if unknown."""
        try:
            return int((self._folder / "zookeeper.pid").read_text())
        except (OSError, ValueError):
            return 0

    async def start(self) -> None:
        """Start it and wait until it serves. Raises `ConfigurationError` (no Java, port taken, …) or `RegistryUnavailable`."""
        await self._start()
        self._keeper = asyncio.create_task(self._keep(), name="embedded-zookeeper")

    async def stop(self) -> None:
        """Stop it in order, within some seconds."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S + 5):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._kill_orphan()

    async def _start(self) -> None:
        self._kill_orphan()
        start = self._log.stat().st_size if self._log.exists() else 0
        arguments = ["-m", "onebox.embedded", "--data", str(self._folder), "--port", str(self.port)]
        if self._tls_dir is not None:
            arguments += ["--tls-dir", str(self._tls_dir)]
        # SIGTERM, because then it ends the Java process, which would survive its SIGKILL.
        self._process = process = await start_child(arguments, self._log, death_signal=signal.SIGTERM)
        loop = asyncio.get_running_loop()
        until = loop.time() + START_TIMEOUT_S + 10
        while True:
            text = tail(self._log, start)
            found = _SERVES.search(text)
            if found is not None:
                self.port = int(found[1])
                return
            if process.returncode is not None:
                raise ConfigurationError(f"the embedded ZooKeeper did not start: {text or 'it logged nothing'}")
            if loop.time() >= until:
                process.kill()
                raise RegistryUnavailable(f"the embedded ZooKeeper was not ready in time: {text or 'it logged nothing'}")
            await asyncio.sleep(POLL_S)

    async def _keep(self) -> None:
        """Restart it whenever it ends; running processes do without it meanwhile."""
        backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S, random.random)
        while True:
            assert self._process is not None
            await self._process.wait()
            self.problem = "it ended and is being started again"
            await asyncio.sleep(backoff.next_s())
            self.restarts += 1
            try:
                await self._start()
            except (ConfigurationError, RegistryUnavailable) as error:
                self.problem = str(error)
                continue
            self.problem = ""
            backoff.reset()

    def _kill_orphan(self) -> None:
        """Kill a Java process whose own parent was killed: it would hold the port and the data for ever."""
        pid = self.pid
        if not pid:
            return
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            # Only the one that was started on this very folder: the number may belong to another process by now.
            if b"QuorumPeerMain" in command and str((self._folder / "zoo.cfg").resolve()).encode() in command:
                os.kill(pid, signal.SIGKILL)
