"""`pixiu tail`: send the lines of files to a durable topic.

Source: docs/bridges.md, "Log files".
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

import pixiu
from pixiu.client.client import Client
from pixiu.client.topics.writing.writer import TopicWriter
from pixiu.errors import LocalError, NotServed, PixiuError
from tools.cli.output import DEFAULT_TARGET, AsJson, Target, guarded, print_result
from tools.tail.core import Keys, Life, lines_in, over_bound
from tools.tail.files import READ_BYTES, Files, read_at
from tools.topics.values import bytes_of

POLL_S: Final = 0.25
SAVE_S: Final = 1.0
AGAIN_S: Final = 1.0
MAX_AHEAD: Final = 10_000
"""Lines of a file that are sent and not stored. Policy: no more are read."""


class Sender:
    """Sends one life of a file.

    Args:
        writer: of that life, open.
        life: where it began.
        host: of this machine, for the header.
        keys: of lines.
    """

    def __init__(self, writer: TopicWriter, life: Life, host: str, keys: Keys) -> None:
        self._writer, self._keys = writer, keys
        self._headers = {"file": life.path, "host": host}
        self.sent = self.stored = life.position
        self._open: deque[tuple[int, Any]] = deque()

    async def send(self, life: Life, *, whole: bool) -> int:
        """Send the lines that are there. Returns their number."""
        count = 0
        while len(self._open) < MAX_AHEAD:
            data = await asyncio.to_thread(read_at, life, self.sent, self.sent + READ_BYTES)
            lines = lines_in(data, self.sent, whole=whole and len(data) < READ_BYTES)
            if not lines:
                return count
            for end, line in lines:
                receipt = await self._writer.send(line, key=self._keys.of(life.path, line), headers=self._headers, progress=end)
                self._open.append((end, receipt))
                self.sent = end
            count += len(lines)
            self.settle()
        return count

    def settle(self) -> None:
        """Note what is stored. Raises the error of a line that is not."""
        while self._open and self._open[0][1].done:
            end, receipt = self._open.popleft()
            if receipt.error is not None:
                raise receipt.error
            self.stored = end

    @property
    def idle(self) -> bool:
        """True if all that was sent is stored."""
        return not self._open

    async def close(self) -> None:
        """End the writer."""
        with suppress(PixiuError):
            await self._writer.close()


class Tail:
    """Follows files.

    Args:
        files: that are followed.
        topic: to which their lines go.
        keys: of lines.
        spill_bytes: bound of what rotated files wait with.
        once: end when all is stored.
    """

    def __init__(self, files: Files, topic: str, keys: Keys, spill_bytes: int, *, once: bool) -> None:
        self._files, self._topic, self._keys, self._spill_bytes, self._once = files, topic, keys, spill_bytes, once
        self._senders: dict[str, Sender] = {}
        self._host = socket.gethostname()
        self._saved_at = 0.0
        self.ends = False
        self.lines = 0
        self.lost = 0

    async def run(self, px: Client) -> None:
        """Follow until `ends`, or all is stored if that was asked for. Raises the errors of the topic."""
        while not self.ends:
            await self._look()
            sent = 0
            for life in self._first():
                sent += await self._send(px, life)
            await self._settle()
            if self._once and not sent and all(each.idle for each in self._senders.values()) and not self._rotated():
                return
            if not sent:
                await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Keep what is stored, and end the writers."""
        for sender in self._senders.values():
            await sender.close()
            with suppress(PixiuError):
                sender.settle()
        await asyncio.to_thread(self._files.stored, [(name, each.stored) for name, each in self._senders.items()])
        self._senders.clear()

    def _rotated(self) -> bool:
        return any(life.place for life in self._files.lives)

    async def _look(self) -> None:
        change = await asyncio.to_thread(self._files.look)
        for life in change.lost:
            self._tell(life, "is gone before all of it was stored")
        too_many = over_bound(self._files.lives, self._spill_bytes)
        if too_many:
            await asyncio.to_thread(self._files.drop, too_many)
        for life in too_many:
            self._tell(life, "was rotated, and is given up: --spill is the bound")
        known = {life.writer for life in self._files.lives}
        for name in [name for name in self._senders if name not in known]:
            await self._senders.pop(name).close()

    def _tell(self, life: Life, why: str) -> None:
        self.lost += life.waiting
        sys.stderr.write(f"pixiu: {life.path}: {life.waiting:,} bytes are lost: the file {why}\n")

    def _first(self) -> list[Life]:
        """Of each path the file that is read now: the oldest one."""
        found = dict[str, Life]()
        for life in self._files.lives:
            found.setdefault(life.path, life)
        return list(found.values())

    async def _send(self, px: Client, life: Life) -> int:
        sender = self._senders.get(life.writer)
        if sender is None:
            writer = await px.durable_topic(self._topic).writer(name=life.writer).open()
            sender = self._senders[life.writer] = Sender(writer, life, self._host, self._keys)
        count = await sender.send(life, whole=self._once or bool(life.place))
        self.lines += count
        return count

    async def _settle(self) -> None:
        done = list[tuple[str, int]]()
        for name, sender in self._senders.items():
            sender.settle()
            done.append((name, sender.stored))
        rotated = {life.writer for life in self._files.lives if life.place}
        if time.monotonic() >= self._saved_at + SAVE_S or any(name in rotated for name, _ in done):
            self._saved_at = time.monotonic()
            await asyncio.to_thread(self._files.stored, done)


@guarded
def tail(
    files: Annotated[list[str], typer.Argument(metavar="FILE…", help="Files, or globs in quotes.")],
    topic: Annotated[str, typer.Option("--topic", help="The durable topic to which the lines go.", metavar="NAME")],
    start: Annotated[
        Literal["start", "end"], typer.Option("--from", help="Where a file begins of which nothing is known: start or end.")
    ] = "start",
    key: Annotated[
        str, typer.Option("--key", help="Expression whose first group is a line's key; else it is the path.", metavar="REGEX")
    ] = "",
    positions: Annotated[
        Path | None, typer.Option("--positions", help="File that keeps the positions; default: ~/.pixiu/tail-TOPIC.json.")
    ] = None,
    spill: Annotated[
        str, typer.Option("--spill", help="Bytes with which rotated files may wait while the cluster is away.", metavar="SIZE")
    ] = "10GiB",
    once: Annotated[bool, typer.Option("--once", help="End when all that is there is stored.")] = False,
    target: Target = DEFAULT_TARGET,
    as_json: AsJson = False,
) -> None:
    """Send each line of files as a message to a topic, and follow them, through rotations, restarts and outages."""
    keys, spill_bytes = Keys(key), bytes_of(spill)
    place = positions or Path.home() / ".pixiu" / f"tail-{topic}.json"
    found = Files(files, place, from_end=start == "end")
    run = Tail(found, topic, keys, spill_bytes, once=once)
    try:
        asyncio.run(_run(run, target))
    finally:
        found.close()
    value = {"topic": topic, "lines": run.lines, "lost_bytes": run.lost}
    print_result(value, f"sent: {run.lines:,} lines", as_json=as_json)


async def _run(run: Tail, target: str) -> None:
    """Follow, and begin again whenever the cluster was away."""

    def end() -> None:
        run.ends = True
        if task is not None:
            task.cancel()

    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end)
    told = ""
    with suppress(asyncio.CancelledError):
        while not run.ends:
            try:
                async with pixiu.connect(target, client="pixiu-tail") as px:
                    try:
                        await run.run(px)
                        return
                    finally:
                        await run.close()
            except PixiuError as error:
                if isinstance(error, LocalError | NotServed):
                    raise
                if str(error) != told:
                    told = str(error)
                    sys.stderr.write(f"pixiu: the lines wait in their files: {told}\n")
                await asyncio.sleep(AGAIN_S)
