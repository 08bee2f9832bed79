"""Telemetry of devices: published by MQTT, recorded in a durable topic by a route, and summed up in windows without Spark."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

from tests.support.cluster import LocalCluster, wait_for
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
UNANSWERED: Final = 200
"""Messages that are published and not yet answered, at most."""
MONTH_MS: Final = 30 * 86_400_000
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


def record(cluster: LocalCluster, pattern: str, topic: str, file: Path) -> None:
    """Have a route made by `pixiu pipeline record`, and wait until the proxies use it. `file`: that of `proxy.routes`."""
    made = cluster.pixiu("pipeline record", pattern, "--topic", topic, "--file", str(file), "--only", "--json")
    assert made.returncode == 0, made.stderr
    said = json.loads(made.stdout)
    assert set(said["proxies_read"]) == {str(file.resolve())}
    name = said["route"]

    def used() -> bool:
        routes = cluster.pixiu("routes status", "--json").stdout
        return any(each["name"] == name and not each["why"] for each in json.loads(routes or "[]"))

    wait_for(used, f"route {name} in the proxies")


async def publish(port: int, messages: Sequence[tuple[str, bytes]]) -> None:
    """Publish bodies by device, by MQTT at QoS 1, each device on its own connection, in order. Returns once all are acknowledged:
    with a route that is when they are stored."""
    devices = {name: MQTTClient("127.0.0.1", port, name) for name in sorted({name for name, _ in messages})}
    await asyncio.gather(*(client.connect() for client in devices.values()))
    waiting: deque[asyncio.Future[list[int]]] = deque()
    for name, body in messages:
        waiting.append(devices[name].publish_with_ack(f"telemetry/{name}", body))
        if len(waiting) == UNANSWERED:
            await waiting.popleft()
    await asyncio.gather(*waiting)
    await asyncio.gather(*(client.close() for client in devices.values()))


def with_clocks(readings: Sequence[Reading], now_ms: int, every: int) -> tuple[list[Reading], list[Reading], list[Reading]]:
    """(all, fresh, ahead): after one of `every` rows one that is a few milliseconds old, and one of a device whose clock is a month
    ahead."""
    found, fresh, ahead = list[Reading](), list[Reading](), list[Reading]()
    for place, each in enumerate(readings):
        found.append(each)
        if place % every == 0:
            fresh.append(Reading(now_ms - len(fresh), "fresh", "50.5", "20.1"))
            ahead.append(Reading(now_ms + MONTH_MS + len(ahead), "ahead", "1.25", "9.9"))
            found += fresh[-1], ahead[-1]
    return found, fresh, ahead


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
