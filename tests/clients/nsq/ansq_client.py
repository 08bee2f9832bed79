"""ansq: `python ansq_client.py TCP_HOST:PORT LOOKUP_HOST:PORT TOPIC`."""

from __future__ import annotations

import asyncio
import sys
import time

import ansq
from script import DELAY_MS, Seen

LIMIT_S = 60.0


async def consume(seen: Seen, lookup: str, topic: str) -> None:
    """Consume until everything was seen."""
    reader = await ansq.create_reader(topic=topic, channel="work", lookupd_http_addresses=[lookup])
    async for message in reader.messages():
        body = message.body.decode()
        if seen.requeues(body, message.attempts):
            await message.req(100)
            continue
        if seen.touches(body):
            await message.touch()
        await message.fin()
        seen.finished[body] += 1
        if seen.done:
            break
    await reader.close()


async def main(tcp: str, lookup: str, topic: str) -> None:
    """Play the script."""
    seen = Seen()
    writer = await ansq.create_writer(nsqd_tcp_addresses=[tcp])
    for number in range(20):
        answer = await writer.pub(topic, f"pub-{number}")
        assert answer.is_ok, answer
    await writer.mpub(topic, *(f"mpub-{number}" for number in range(10)))
    seen.delayed_at = time.monotonic()
    await writer.dpub(topic, "dpub", DELAY_MS)
    try:
        async with asyncio.timeout(LIMIT_S):
            await consume(seen, lookup, topic)
    except TimeoutError:
        pass
    await writer.close()
    seen.show()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
