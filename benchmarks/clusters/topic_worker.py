"""A process of writers, or of members, for `topics.py`: it can be killed at any time, and notes what it saw before it acts on it.

Input by arguments; output are the lines of `tests.history.topics` in a file, written without a buffer.

    python -m benchmarks.clusters.topic_worker writers TARGET TOPIC FILE --numbers 1,2 --keys 8 --pace 100
    python -m benchmarks.clusters.topic_worker members TARGET TOPIC FILE --channels any,ordered --name m1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pixiu
from tests.history.topics import ACKNOWLEDGED, CONFIRMED, GIVEN, REPORTED, SENT, VOID, Note, parse

SWEEP_S = 0.005
"""Interval at which receipts are looked at."""
BODY = 100
AGAIN = 100
"""Messages that are sent in one go by a writer that makes up for what is missing."""
RETRY_S = 0.5
NACKED = 0.005
"""Share of messages that a member gives back."""


def key_of(number: int, keys: int) -> int:
    """Key of a writer's message."""
    return number % keys


def slot_of(writer: int, key: int, keys: int) -> int:
    """Slot of a key: those of all writers lie evenly in all slots."""
    return (65_536 * key // keys + 97 * writer) % 65_536


class Worker:
    """What writers and members share.

    Args:
        arguments: the command line's.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        file = Path(arguments.file)
        self._sent: dict[int, int] = defaultdict(int)
        """Writer → number of the last message that it has sent, also before it was killed."""
        for note in parse(file.read_text()) if file.exists() else ():
            if note.kind == SENT:
                self._sent[note.writer] = note.number
        self._file = os.open(arguments.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.ending = asyncio.Event()

    def note(self, kind: str, who: str, channel: str, place: tuple[int, int], writer: int, number: int) -> None:
        """Write down what is true from now on."""
        os.write(self._file, Note(time.monotonic_ns(), kind, who, channel, *place, writer, number).line())

    async def write(self, px: pixiu.Client, writer: int) -> None:
        """Send until SIGTERM, from where the writer was; whatever ends the writer, it opens again."""
        while not self.ending.is_set():
            try:
                async with px.durable_topic(self.arguments.topic).writer(f"writer-{writer}") as sends:
                    await self._send(sends, writer)
            except pixiu.PixiuError as error:
                print(f"writer {writer}: {error!r}", flush=True)
                await asyncio.sleep(RETRY_S)

    async def _send(self, sends: Any, writer: int) -> None:
        keys, pace = self.arguments.keys, self.arguments.pace
        waiting: list[deque[tuple[int, Any]]] = [deque() for _ in range(keys)]
        number, began, sent = sends.progress, time.monotonic(), 0
        while not self.ending.is_set() or any(waiting) or number < self._sent[writer]:
            due = int((time.monotonic() - began) * pace) if not self.ending.is_set() else sent
            if number < self._sent[writer]:  # it makes up for what was under way when it ended
                began, sent, due = time.monotonic(), 0, min(AGAIN, self._sent[writer] - number)
            if due - sent > pace:  # it was stopped or held: it does not make up for all of it
                began, sent, due = time.monotonic(), 0, 1
            for _ in range(due - sent):
                number, sent = number + 1, sent + 1
                key = key_of(number, keys)
                at = time.monotonic_ns()
                body = (b"%d %d %d %d" % (writer, number, key, at)).ljust(BODY)
                if number > self._sent[writer]:
                    self._sent[writer] = number
                    self.note(SENT, "", "", (0, -1), writer, number)
                slot = slot_of(writer, key, keys)
                waiting[key].append((number, await sends.send(body, slot=slot, progress=number)))
            for found in waiting:
                while found and found[0][1].resolved:
                    which, receipt = found.popleft()
                    await receipt  # raises its failure
                    self.note(CONFIRMED, "", "", receipt.position or (0, -1), writer, which)
            await asyncio.sleep(SWEEP_S)

    async def consume(self, px: pixiu.Client, channel: str) -> None:
        """Take messages until SIGTERM."""
        name = f"{self.arguments.name}-{os.getpid()}"
        while not self.ending.is_set():
            try:
                topic = px.durable_topic(self.arguments.topic)
                async with topic.channel(channel, credit=256) as messages, asyncio.TaskGroup() as tasks:
                    ending = tasks.create_task(self._close(messages))
                    while (message := await messages.next()) is not None:
                        writer, number = map(int, message.body.split(b" ", 2)[:2])
                        self.note(GIVEN, name, channel, message.position, writer, number)
                        if self.arguments.quick:
                            self.note(REPORTED, name, channel, message.position, writer, number)
                            message.ack_soon()
                        elif random.random() < NACKED:
                            message.nack_soon(0.05)
                        else:
                            tasks.create_task(self._acknowledge(message, name, channel, writer, number))
                    ending.cancel()
            except* pixiu.PixiuError as errors:
                print(f"{name} {channel}: {errors.exceptions!r}", flush=True)
                await asyncio.sleep(RETRY_S)

    async def _close(self, messages: Any) -> None:
        await self.ending.wait()
        await messages.close()

    async def _acknowledge(self, message: Any, name: str, channel: str, writer: int, number: int) -> None:
        await asyncio.sleep(0)
        self.note(REPORTED, name, channel, message.position, writer, number)
        counts = await message.ack()
        self.note(ACKNOWLEDGED if counts else VOID, name, channel, message.position, writer, number)

    async def run(self) -> None:
        """Run all writers or members."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.ending.set)
        async with pixiu.connect(self.arguments.target, client=f"judge-{self.arguments.name}") as px:
            if self.arguments.what == "writers":
                await asyncio.gather(*(self.write(px, int(each)) for each in self.arguments.numbers.split(",")))
            else:
                await asyncio.gather(*(self.consume(px, each) for each in self.arguments.channels.split(",")))


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("writers", "members"))
    for name in ("target", "topic", "file"):
        parser.add_argument(name)
    parser.add_argument("--name", default="w")
    parser.add_argument("--numbers", default="1", help="of the writers")
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--pace", type=float, default=100.0, help="messages a second of each writer")
    parser.add_argument("--channels", default="any,ordered")
    parser.add_argument("--quick", action="store_true", help="acknowledge without waiting, and do not note the answers")
    arguments = parser.parse_args()

    async def run() -> None:
        await Worker(arguments).run()

    asyncio.run(run())


if __name__ == "__main__":
    main()
