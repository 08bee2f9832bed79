"""Change events of accounts: the events of an account stay in order, while two members share the work and the topic is split.

pixiu up                                    # in another terminal
python examples/change_events.py            # topic "accounts"
python examples/change_events.py ledger     # or another one
"""

from __future__ import annotations

import asyncio
import os
import sys

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")
ACCOUNTS = 4
EVENTS = 25
"""Of each account."""


class Balances:
    """What the members have made of the events."""

    def __init__(self) -> None:
        self.last: dict[bytes | None, int] = {}
        self.wrong = 0
        self.left = ACCOUNTS * EVENTS
        self.done = asyncio.Event()

    def apply(self, message: pixiu.ChannelMessage) -> None:
        """Apply an event: the number of each is one more than that of the one before it, or it is a repetition."""
        number, last = int(message.body), self.last.get(message.key, 0)
        if number <= last:
            return
        self.wrong += number != last + 1
        self.last[message.key] = number
        self.left -= 1
        if not self.left:
            self.done.set()


async def consume(topic: pixiu.DurableTopic, balances: Balances) -> None:
    """Be one member of the channel."""
    async with topic.channel("ledger", ordered=True) as messages:
        working = asyncio.create_task(messages.run(balances.apply, workers=8))
        await balances.done.wait()
        await messages.flush()
    await working


async def produce(px: pixiu.Client, topic: pixiu.DurableTopic) -> None:
    """Send the events, and split the topic's first part in the middle of it."""
    async with topic.writer() as writer:
        for number in range(1, EVENTS + 1):
            for account in range(ACCOUNTS):
                await writer.send(b"%d" % number, key=f"account-{account}")
            if number == EVENTS // 2:
                await writer.flush()
                (part, *_) = (await topic.describe()).open_parts
                await px.topics.resize(topic.name, [part.number], bounds=[(part.low + part.high) // 2])


async def main(name: str) -> None:
    """Make the topic, produce and consume."""
    async with pixiu.connect(TARGET, client="ledger") as px:
        try:
            await px.topics.create(name, parts=1)
        except pixiu.TopicExists as error:
            sys.exit(f"{error}: give another name, `python examples/change_events.py ledger`")
        topic, balances = px.durable_topic(name), Balances()
        await asyncio.gather(produce(px, topic), consume(topic, balances), consume(topic, balances))
        parts = (await topic.describe()).parts
        print(f"{len(balances.last)} accounts with {EVENTS} events each, {balances.wrong} out of order")
        print(f"the topic has {sum(not part.sealed for part in parts)} open parts, {sum(part.sealed for part in parts)} sealed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "accounts"))
