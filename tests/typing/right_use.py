"""What users write. Nothing runs it: that it type-checks under `mypy --strict` is the test."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pixiu


async def publish() -> None:
    async with pixiu.connect(
        "127.0.0.1:7000,127.0.0.1:7001", uin=7, client="billing", on_failure=print, publish_timeout_s=5.0
    ) as px:
        receipt: pixiu.Receipt = await px.room(42).send(b"x", timeout_s=1.0, type=3, lifetime_min=5, first_lane=True)
        soon: pixiu.Receipt = px.room(42).send_soon(b"x", extension=b"{}")
        await soon
        many: list[pixiu.Receipt] = await px.room(42).send_many([b"x", b"y"], timeout_s=3.0)
        async with px.room(42).writer() as room_writer:
            await room_writer.send(b"x", type=3)
        print(many[0].id)
        number: int = receipt.id
        problem: pixiu.PixiuError | None = receipt.error
        px.topic("a/b").send_soon(b"y")
        try:
            await px.topic("a/b").send(b"y")
        except pixiu.Overloaded as error:
            await asyncio.sleep(error.retry_after_ms / 1000)
        signal: pixiu.SignalReceipt = px.room(42).signal_soon(b"z", receipt=True)
        try:
            await signal
        except pixiu.Undelivered:
            print(signal.id, px.stats().signals.repeated)
        mail: pixiu.MailReceipt = await px.user(7).mail(b"kept", level="persisted", lane=0, expire=timedelta(days=1), to=[8, 9])
        async with px.mail_writer() as writer:
            queued: pixiu.MailReceipt = writer.send(7, b"kept")
            await writer.wait_sent()
            await queued
            triple: pixiu.Triple = writer.triples["pi", 0]
            print(mail.stored_as, mail.replicas, triple.epoch, writer.counters.resent)
        async with px.inbox(uin=7, device="phone", on_gap=lambda gap: print(gap.reason, gap.up_to)) as inbox:
            async for got in inbox:
                found: pixiu.Mail = got
                print(found.payload, found.lane, found.seq, found.msg_id, found.redelivered, found.sent_at_ms)
                found.acknowledge()
            await inbox.flush(timeout_s=1.0)

        async def handle(one: pixiu.Mail) -> None:
            print(one.payload)

        await px.inbox().run(handle, retries=3)
        await px.inbox().run(lambda one: print(one.seq))
        await px.flush()
        print(px.stats().failures_by_code.get("OVERLOADED", 0), number, problem)


async def subscribe() -> list[bytes]:
    found: list[bytes] = []
    async with pixiu.connect(options=pixiu.ClientOptions(queue_records=10), join_timeout_s=3.0) as px:
        async for message in px.subscribe(room=42, topics=["a/b"], on_gap=print, on_dropped=lambda count: None):
            found.append(message.payload)
            topic: str | None = message.topic
            where: str = message.destination
            print(topic, where, message.room, message.sent_at_ms, message.sent_at)
        await px.subscribe(room=1).run(lambda message: print(message.payload))
        async with px.subscribe() as subscription:
            await subscription.join(rooms=[1, 2], timeout_s=3.0)
            async for batch in subscription.batches():
                found.extend(message.payload for message in batch)
    return found


async def durable_topics() -> None:
    async with pixiu.connect() as px:
        info: pixiu.TopicInfo = await px.topics.create("orders", parts=2, retention=timedelta(days=7), if_missing=True)
        topic: pixiu.DurableTopic = px.durable_topic("orders")
        receipt: pixiu.TopicReceipt = await topic.send(b"x", key="k", headers={"a": "b"}, level="persisted", timeout_s=3.0)
        place: tuple[int, int] | None = receipt.position
        await topic.send_soon(b"x", slot=7, tag="blue", event_time=datetime.now(UTC))
        async with topic.writer("loader") as writer:
            soon: pixiu.TopicReceipt = await writer.send(b"x", progress=writer.progress + 1)
            await writer.flush()
            await soon
            triple: pixiu.Triple = writer.triples[info.parts[0].group]
        async with topic.channel("billing", credit=10, ordered=True, filter=[{"header": "a", "equal": "b"}]) as messages:
            async for message in messages:
                found: pixiu.ChannelMessage = message
                done: bool = await found.ack() or await found.nack(1.5)
                print(found.key, found.headers["a"], found.attempts, found.time, done)

            async def handle(one: pixiu.ChannelMessage) -> None:
                one.touch()

            await messages.run(handle, workers=3)
        async with topic.reader("latest", slots=[1, 2], on_gap=lambda gap: print(gap.part, gap.low)) as reader:
            async for batch in reader.batches():
                bodies: list[bytes] = [one.body for one in batch]
                print(bodies)
            position: dict[str, int] = reader.position
        topic.reader(position)
        topic.reader({1: 5})
        await px.topics.seek("orders", "billing", "start", force=True)
        (dead, *_) = await px.topics.dead_letters("orders", "billing")
        await px.topics.resend("orders", "billing", [dead])
        print(place, triple.epoch)


def synchronous() -> None:
    with pixiu.connect_sync("127.0.0.1:7000", join_timeout_s=1.0) as px:
        with px.inbox(uin=7, device="phone") as inbox:
            for got in inbox:
                got.acknowledge()
            inbox.run(lambda one: print(one.payload))
        stored: pixiu.SyncTopicReceipt = px.durable_topic("orders").send(b"x", key="k")
        print(stored.position, [topic.name for topic in px.topics.list("or")])
        with px.durable_topic("orders").channel("billing") as messages:
            for order in messages:
                acknowledged: bool = order.ack()
                print(order.body, order.key, acknowledged)
        receipt: pixiu.SyncReceipt = px.room(42).send_soon(b"x")
        receipt.wait(timeout_s=1.0)
        told: pixiu.SyncSignalReceipt = px.room(42).signal(b"x", receipt=True, timeout_s=1.0)
        print(told.gateways + 1)
        with px.topic("a/b").writer() as room_writer:
            room_writer.send(b"x")
        receipts: list[pixiu.SyncReceipt] = px.room(42).send_many([b"x"])
        print(receipts[0].id, px.user(7).uin)
        mail: pixiu.SyncMailReceipt = px.user(7).mail(b"kept")
        with px.mail_writer() as writer:
            writer.send(7, b"kept", level="accepted").wait()
        print(mail.id)
        for message in px.subscribe(room=42):
            data: bytes = message.payload
            print(data)
