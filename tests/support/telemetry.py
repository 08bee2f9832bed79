"""Telemetry of devices: published by MQTT, recorded in a durable topic, and summed up in windows without Spark."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gzip
import json
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

import pixiu
from tests.support.waiting import WAIT_S, until
from tools.load.mqtt import MQTTClient

FIELDS: Final = "ts_ms timestamp, device string, humidity decimal(18,6), temp decimal(18,6)"
"""Decimals, so that sums do not depend on the order."""
VALUES: Final = ("humidity", "temp")
BROKEN: Final = (
    b"no json",
    b'{"device": "a", "temp": 1}',
    b'{"ts_ms": "noon", "device": "a"}',
    b"\xff\xfe",
    b'{"ts_ms": 1594598424502, "device": "a", "te',
    b"[]",
)
UNRECORDED: Final = 800
"""Messages that are published and not yet recorded, at most, but for `UNANSWERED`."""
UNANSWERED: Final = 200
"""Messages that a device has published and not yet got an answer for, at most."""
Windows = dict[tuple[int, str], tuple[int, *tuple[Decimal, ...]]]
"""Begin in Unix milliseconds and device → rows, and of each value least, most and sum."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One row of a file of telemetry."""

    ts_ms: int
    device: str
    humidity: str
    temp: str

    def body(self) -> bytes:
        """JSON as a device sends it, numbers as the file has them."""
        return f'{{"ts_ms": {self.ts_ms}, "device": "{self.device}", "humidity": {self.humidity}, "temp": {self.temp}}}'.encode()


def of_file(path: Path) -> Iterator[Reading]:
    """The rows of a file with the columns ts_ms, device, humidity, temp."""
    with gzip.open(path, "rt", newline="") as lines:
        for row in csv.DictReader(lines):
            yield Reading(int(row["ts_ms"]), row["device"], row["humidity"], row["temp"])


def made(count: int, seed: int = 1) -> Iterator[Reading]:
    """Rows like those of three real sensor arrays: some seconds apart, no two devices at the same pace."""
    chance, at = random.Random(seed), 1_594_598_424_502
    for _ in range(count):
        at += chance.randrange(400, 3000)
        yield Reading(at, f"device-{chance.randrange(3)}", f"{chance.uniform(1, 99):.6f}", f"{chance.uniform(0, 30):.1f}")


def disordered(readings: Iterable[Reading], every: int = 97, by: int = 150) -> list[Reading]:
    """Rows as they arrive where some are delayed: one of `every`, by so many others."""
    ordered = list(readings)
    places = [place + (by if place % every == 0 else 0) for place in range(len(ordered))]
    return [ordered[place] for place in sorted(range(len(ordered)), key=lambda each: (places[each], each))]


def expected(readings: Iterable[Reading], window_ms: int) -> Windows:
    """The windows of all rows, by plain addition."""
    found: dict[tuple[int, str], list[Reading]] = {}
    for each in readings:
        found.setdefault((each.ts_ms - each.ts_ms % window_ms, each.device), []).append(each)
    result: Windows = {}
    for key, of in found.items():
        columns = [[Decimal(getattr(each, name)) for each in of] for name in VALUES]
        result[key] = (len(of), *(number for column in columns for number in (min(column), max(column), sum(column, Decimal(0)))))
    return result


def windows_of(rows: Iterable[object]) -> Windows:
    """Rows of `ingest`, selected by `SELECTED`, in the form of `expected`."""
    return {(row[0], row[1]): tuple(row[2:]) for row in rows}  # type: ignore[index]


SELECTED: Final = (
    "unix_millis(begin)", "device", "rows", *(f"{name}_{what}" for name in VALUES for what in ("least", "most", "sum")),
)  # fmt: skip


@contextlib.asynccontextmanager
async def recording(target: str, port: int, pattern: str, topic: str) -> AsyncIterator[Callable[[], int]]:
    """Store what is published to an MQTT topic pattern in a durable topic; yield the number of what is stored.

    A subscriber that writes the topic. Where a proxy routes rooms to topics, this function makes the route instead, and all else
    here stays as it is.
    """
    stored = 0
    came: asyncio.Queue[bytes | None] = asyncio.Queue()
    subscriber = MQTTClient("127.0.0.1", port, f"recorder-{topic}", on_message=lambda _, body: came.put_nowait(bytes(body)))
    async with pixiu.connect(target) as px, px.durable_topic(topic).writer() as writer:

        async def write() -> None:
            nonlocal stored
            while (body := await came.get()) is not None:
                batch = [body]
                ended = False
                while not came.empty():
                    following = came.get_nowait()
                    if following is None:
                        ended = True
                        break
                    batch.append(following)
                for each in batch:
                    await writer.send(each)
                await writer.wait_finished()
                stored += len(batch)
                if ended:
                    return

        await subscriber.connect()
        await subscriber.subscribe([pattern], qos=1)
        writing = asyncio.create_task(write())
        try:
            yield lambda: stored
        finally:
            await subscriber.close()
            came.put_nowait(None)
            await writing


async def publish(port: int, messages: Sequence[tuple[str, bytes]], stored: Callable[[], int]) -> None:
    """Publish by MQTT at QoS 1, each device on its own connection, in order; no faster than it is recorded, because a gateway ends
    the connection of a subscriber that falls too far behind."""
    devices = {name: MQTTClient("127.0.0.1", port, name) for name in sorted({name for name, _ in messages})}
    await asyncio.gather(*(client.connect() for client in devices.values()))
    waiting: list[asyncio.Future[list[int]]] = []
    for number, (name, body) in enumerate(messages):
        waiting.append(devices[name].publish_with_ack(f"telemetry/{name}", body))
        if len(waiting) == UNANSWERED:
            await asyncio.gather(*waiting)
            waiting.clear()
            least = number - UNRECORDED
            await until(lambda: stored() >= least, lambda: f"{stored()} of {number} are stored")  # noqa: B023
    await asyncio.gather(*waiting)
    await asyncio.gather(*(client.close() for client in devices.values()))


async def record(target: str, port: int, topic: str, bodies: Sequence[tuple[str, bytes]]) -> None:
    """Publish bodies by device, and wait until all of them are in the topic."""
    async with recording(target, port, "telemetry/#", topic) as stored:
        await publish(port, bodies, stored)

        def missing() -> int:
            return len(bodies) - stored()

        await until(lambda: not missing(), lambda: f"{missing()} of {len(bodies)} are missing", WAIT_S + len(bodies) / 100)


def with_broken(readings: Sequence[Reading], every: int) -> list[tuple[str, bytes]]:
    """(device, body) of each row, and a body that is no row after one of `every`."""
    found: list[tuple[str, bytes]] = []
    for place, each in enumerate(readings):
        found.append((each.device, each.body()))
        if place % every == 0:
            found.append((each.device, BROKEN[place // every % len(BROKEN)]))
    return found


def check_bodies(bodies: Iterable[bytes]) -> int:
    """The number of bodies that are no row, by Python's own JSON."""
    broken = 0
    for body in bodies:
        try:
            row = json.loads(body)
            broken += not isinstance(row, dict) or not isinstance(row.get("ts_ms"), int)
        except ValueError:
            broken += 1
    return broken
