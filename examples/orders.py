"""Orders in a durable topic, billed by a pool of workers and counted by another program that reads the same topic.

pixiu up                            # in another terminal
python examples/orders.py           # topic "shop"
python examples/orders.py shop-2    # or another one

Start it twice at the same time: both runs share the work of the channel "billing".
"""

from __future__ import annotations

import asyncio
import os
import sys

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")
ORDERS = 12
CUSTOMERS = 3


async def bill(topic: pixiu.DurableTopic) -> None:
    """Bill every order with four workers. One fails the first time, and comes again."""
    billed = asyncio.Semaphore(0)

    async def handler(message: pixiu.ChannelMessage) -> None:
        if message.body == b"order 5" and message.attempts == 1:
            raise RuntimeError("the bank does not answer")
        again = f", attempt {message.attempts}" if message.redelivered else ""
        print(f"billed {message.body.decode()} of {(message.key or b'').decode()}{again}", flush=True)
        billed.release()

    async with topic.channel("billing") as messages:
        working = asyncio.create_task(messages.run(handler, workers=4, backoff_s=0.1))
        for _ in range(ORDERS):
            await billed.acquire()
        await messages.flush()
    await working


async def count(topic: pixiu.DurableTopic) -> None:
    """Count the orders of each customer, without a channel: the cluster keeps nothing of a reader."""
    orders: dict[bytes | None, int] = {}
    async with topic.reader(start="earliest") as reader:
        for _ in range(ORDERS):
            message = await anext(reader)
            orders[message.key] = orders.get(message.key, 0) + 1
    for key, number in sorted(orders.items(), key=lambda each: each[0] or b""):
        print(f"{(key or b'').decode()} has {number} orders")


async def main(name: str) -> None:
    """Make the topic, send the orders, then bill and count them."""
    async with pixiu.connect(TARGET, client="shop") as px:
        await px.topics.create(name, parts=2, if_missing=True)
        topic = px.durable_topic(name)
        async with topic.writer() as writer:
            for number in range(1, ORDERS + 1):
                await writer.send(b"order %d" % number, key=f"customer-{number % CUSTOMERS}", headers={"shop": "web"})
        print(f"{ORDERS} orders are stored")
        await bill(topic)
        await count(topic)
        left = sum(part.unacknowledged for part in await px.topics.channel_state(name, "billing"))
        print(f"{left} orders wait for billing")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "shop"))
