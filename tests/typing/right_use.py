"""What users write. Nothing runs it: that it type-checks under `mypy --strict` is the test."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pixiu


async def publish() -> None:
    async with pixiu.connect("127.0.0.1:7000,127.0.0.1:7001", uin=7, client="billing", publish_timeout_s=5.0) as px:
        receipt: pixiu.Receipt = await px.room(42).send(b"x", type=3, lifetime_min=5, extension=b"{}", first_lane=True)
        await receipt
        number: int = receipt.id
        problem: pixiu.PixiuError | None = receipt.error
        px.topic("a/b").send_nowait(b"y")
        try:
            await px.topic("a/b").send_and_wait(b"y")
        except pixiu.Overloaded as error:
            await asyncio.sleep(error.retry_after_ms / 1000)
        signal: pixiu.SignalReceipt = await px.room(42).signal(b"z", receipt=True)
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
                print(found.payload, found.lane, found.seq, found.msg_id, found.again, found.sent_at_ms)
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
    async with pixiu.connect("zk://127.0.0.1:2181/pubsub") as px:
        async for message in px.subscribe(room=42, topics=["a/+"], on_gap=print, on_dropped=lambda count: None):
            found.append(message.payload)
            topic: str | None = message.topic
            print(topic, message.room, message.sent_at_ms)
        async with px.subscribe() as subscription:
            await subscription.join(rooms=[1, 2], timeout_s=3.0)
            async for batch in subscription.batches():
                found.extend(message.payload for message in batch)
    return found


def synchronous() -> None:
    with pixiu.connect_sync("127.0.0.1:7000", join_timeout_s=1.0) as px:
        with px.inbox(uin=7, device="phone") as inbox:
            for got in inbox:
                got.acknowledge()
            inbox.run(lambda one: print(one.payload))
        receipt: pixiu.SyncReceipt = px.room(42).send(b"x")
        receipt.wait(timeout_s=1.0)
        px.room(42).signal(b"x", receipt=True).wait()
        mail: pixiu.SyncMailReceipt = px.user(7).mail(b"kept")
        with px.mail_writer() as writer:
            writer.send(7, b"kept", level="accepted").wait()
        print(mail.id)
        for message in px.subscribe(room=42):
            data: bytes = message.payload
            print(data)
