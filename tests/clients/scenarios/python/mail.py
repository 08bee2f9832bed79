"""Scenarios of mail."""

from __future__ import annotations

import asyncio

import pixiu
from tests.clients.scenarios.python.play import Play, check, numbers, same, scenario, take


async def read(inbox: pixiu.Inbox, count: int) -> list[str]:
    """Take so many mails, and acknowledge each: no more come than a device may have unacknowledged. Returns their texts."""
    found: list[str] = []
    for _ in range(count):
        (mail,) = await take(inbox, 1)
        mail.acknowledge()
        found.append(mail.payload.decode())
    return found


async def box(px: pixiu.Client, device: str = "", uin: int = 0) -> pixiu.Inbox:
    """An inbox that is connected."""
    inbox = px.inbox(device=device, uin=uin)
    await inbox.ready()
    return inbox


@scenario("inbox/send_receive")
async def send_receive(play: Play) -> None:
    receiver, sender = await play.user(1), await play.user(2)
    inbox = await box(receiver)
    receipt = await sender.user(play.seed + 1).mail(b"hello")
    check(receipt.stored_as > 0 and receipt.replicas >= 1, f"MsgID {receipt.stored_as}, {receipt.replicas} replicas")
    (mail,) = await take(inbox, 1)
    mail.acknowledge()
    same((mail.msg_id, mail.sender, mail.payload), (receipt.stored_as, play.seed + 2, b"hello"), "MsgID, sender, body")


@scenario("inbox/waits")
async def waits(play: Play) -> None:
    receiver, sender = await play.user(1), await play.connect()
    await (await box(receiver)).close()  # the device is known from now on
    await sender.user(play.seed + 1).mail(b"later")
    same(await read(await box(receiver), 1), ["later"], "mail")


@scenario("inbox/order")
async def order(play: Play) -> None:
    receiver, sender = await play.user(1), await play.connect()
    inbox = await box(receiver)
    receipts = [sender.user(play.seed + 1).mail_soon(text.encode()) for text in numbers(200)]
    same(await read(inbox, 200), numbers(200), "mail")
    await asyncio.gather(*receipts)


@scenario("inbox/ack_survives_reconnect")
async def ack_survives_reconnect(play: Play) -> None:
    receiver, sender = await play.user(1), await play.connect()
    inbox = await box(receiver)
    await sender.user(play.seed + 1).mail(b"first")
    same(await read(inbox, 1), ["first"], "mail")
    await inbox.flush()
    await inbox.close()
    again = await box(receiver)
    await sender.user(play.seed + 1).mail(b"second")
    same(await read(again, 1), ["second"], "mail of the next connection")


@scenario("inbox/unacknowledged_comes_again")
async def unacknowledged_comes_again(play: Play) -> None:
    receiver, sender = await play.user(1), await play.connect()
    inbox = await box(receiver)
    await sender.user(play.seed + 1).mail(b"again")
    await take(inbox, 1)
    await inbox.close()
    same(await read(await box(receiver), 1), ["again"], "mail")


@scenario("inbox/two_devices")
async def two_devices(play: Play) -> None:
    px = await play.user(1)
    phone, desk = await box(px, "phone"), await box(px, "desk")
    await px.user(play.seed + 1).mail(b"both")
    same(await read(phone, 1), ["both"], "mail of the first device")
    await phone.flush()
    await take(desk, 1)
    await desk.close()
    same(await read(await box(px, "desk"), 1), ["both"], "mail of the second device")


@scenario("inbox/many_receivers")
async def many_receivers(play: Play) -> None:
    px, users = await play.connect(), [play.seed + number for number in (1, 2, 3)]
    inboxes = [await box(px, "phone", uin) for uin in users]
    await px.user(users[0]).mail(b"all", to=users[1:])
    for inbox in inboxes:
        same(await read(inbox, 1), ["all"], "mail")


@scenario("inbox/lanes")
async def lanes(play: Play) -> None:
    px = await play.user(1)
    inbox = await box(px)
    for lane in (1, 0):
        await px.user(play.seed + 1).mail(str(lane).encode(), lane=lane)
    found = await take(inbox, 2)
    for mail in found:
        mail.acknowledge()
    same(sorted((mail.payload, mail.lane) for mail in found), [(b"0", 0), (b"1", 1)], "lanes")


@scenario("interop/mail")
async def interop_mail(play: Play) -> None:
    px = await play.user(1)
    inbox = await box(px)
    await play.ask("mail", play.seed + 1, "python")
    same(await read(inbox, 1), ["python"], "mail")
    for text in ("one", "two"):
        await px.user(play.seed + 2).mail(text.encode())
    same(await play.ask("inbox", play.seed + 2, "phone", 2), "one two", "mail of the harness")
