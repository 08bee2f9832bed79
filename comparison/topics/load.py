"""The load of durable topics: it writes windows, or takes what it wrote before.

As `comparison.load` does, it prints `{}`, then the results, and waits for a line each time.

    python -m comparison.topics.load CASE PORT WIRE SECONDS [PROXIES]

Source: docs/performance.md, "Durable topics beside others".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from comparison.cases import CASES, Case
from comparison.load import WARM_S, cpu_used_s, step
from comparison.topics.jetstream import JetStream
from comparison.topics.kafka import Kafka
from comparison.topics.nsq import Nsq
from comparison.topics.ours import Ours
from tools.load.histogram import Histogram
from tools.load.payload import monotonic_us

PREFILL_BLOCK: Final = 256 << 10
PREFILL_STEP: Final = 20_000
MARGIN: Final = 2.0
"""A server that cannot give its messages anew gets so many times as many as it would give by its rate in the warm-up."""


class Client(Protocol):
    """A client of one server."""

    can_begin_anew: bool
    """True if stored messages can be taken once more, from the beginning."""

    async def open(self) -> None:
        """Make the topics."""

    async def write(self, messages: int, block: int) -> None:
        """Write so many messages to every topic, in blocks of so many bytes, and wait until all is confirmed."""

    async def take(self) -> int:
        """Take some messages. Returns their number; 0: there are no more."""

    async def again(self) -> None:
        """Begin anew with what is stored, once all of it was taken; only where `can_begin_anew`."""

    async def finish(self) -> None:
        """Wait until all that was taken is acknowledged."""

    async def close(self) -> None:
        """End."""


CLIENTS: Final[dict[str, Callable[[int, Case, Sequence[str]], Client]]] = {"nats": JetStream, "kafka": Kafka, "nsq": Nsq}


async def run(client: Client, case: Case, seconds: float, left: int, stored: int = 0) -> tuple[dict[str, float], int]:
    """Work for `seconds`, or until nothing of `left` messages is left to take, and the server cannot begin anew with `stored` of
    them. Returns (results, messages that are left)."""
    done, took_us, used, began_us = 0, Histogram(), cpu_used_s(), monotonic_us()
    while (at_us := monotonic_us()) < began_us + seconds * 1e6:
        if case.act != "write" and left <= 0:
            if not stored or not client.can_begin_anew:
                break
            await client.again()
            left = stored
        if case.act == "write":
            await client.write(case.window, case.block)
            number = case.window * case.groups
        else:
            number = await client.take()
            left -= number
        if not number:
            break
        done += number
        took_us.add(monotonic_us() - at_us)
    if case.act != "write":
        await client.finish()
    wall = (monotonic_us() - began_us) / 1e6
    times = {} if case.act != "write" else {"p50_ms": took_us.percentile(50) / 1000, "p99_ms": took_us.percentile(99) / 1000}
    figures = {"published": done, "deliveries": done, "per_second": done / wall, "load_share": (cpu_used_s() - used) / wall}
    return figures | times, left


async def fill(client: Client, messages: int) -> None:
    """Store so many messages, in whole steps."""
    for _ in range(0, messages, PREFILL_STEP):
        await client.write(PREFILL_STEP, PREFILL_BLOCK)


async def work(case: Case, port: int, wire: str, seconds: float, proxies: str) -> None:
    """Make the topics, fill them if the case takes, warm up, and work."""
    topics = [f"{case.name}-{number}" for number in range(case.groups)]
    client: Client = Ours(proxies, case, topics) if proxies else CLIENTS[wire](port, case, topics)
    await client.open()
    await fill(client, case.prefilled)
    warm = case.prefilled // 10
    warmed, more = await run(client, case, min(WARM_S, seconds), warm)
    left = case.prefilled - warm + more
    if case.act == "take" and not client.can_begin_anew and (missing := int(warmed["per_second"] * seconds * MARGIN) - left) > 0:
        await fill(client, missing)
        left += -(-missing // PREFILL_STEP) * PREFILL_STEP
    step({})
    results, _ = await run(client, case, seconds, left, case.prefilled)
    step(results | {"repeated": getattr(client, "repeated", 0)})
    await client.close()


def main(arguments: list[str]) -> int:
    """Run one case against one server."""
    name, port, wire, seconds, *proxies = arguments
    asyncio.run(work(CASES[name], int(port), wire, float(seconds), "".join(proxies)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
