"""Notifications: mail that waits for each of a user's devices, and what becomes of one that a device cannot handle.

    pixiu up                              # in another terminal
    python examples/notifications.py      # user 7001
    PIXIU_TARGET=zk://127.0.0.1:2181/pubsub python examples/notifications.py 7002

The user has a phone and a desk. The desk's handler fails on pictures: after its retries such a mail is kept as a dead letter,
the ones behind it go on, and when the handler is mended the letter is sent again.
"""

from __future__ import annotations

import asyncio
import os
import sys

import pixiu

TARGET = os.environ.get("PIXIU_TARGET", "zk://127.0.0.1:2181/pubsub")  # dead letters are read by the registry
MAILS = (b"your parcel left", b"picture of the parcel", b"your parcel arrived")


class Device:
    """A device of the user: shows what comes, and acknowledges it by returning from the handler."""

    def __init__(self, name: str, *, shows_pictures: bool) -> None:
        self.name = name
        self.shows_pictures = shows_pictures
        self.shown: asyncio.Queue[bytes] = asyncio.Queue()

    def show(self, mail: pixiu.Mail) -> None:
        """The handler. A mail that it raises with is tried again, then put aside."""
        if mail.payload.startswith(b"picture") and not self.shows_pictures:
            raise RuntimeError("no screen for pictures")
        print(f"{self.name}: {mail.payload.decode()}")
        self.shown.put_nowait(mail.payload)

    async def until(self, payload: bytes) -> None:
        """Wait until this was shown."""
        while await self.shown.get() != payload:
            pass


async def main(uin: int) -> None:
    """Both devices, the service that sends, and the support desk that looks after dead letters."""
    phone, desk = Device("phone", shows_pictures=True), Device("desk", shows_pictures=False)
    async with (
        pixiu.connect(TARGET, client="notifications") as px,
        px.inbox(uin=uin, device=phone.name) as on_phone,
        px.inbox(uin=uin, device=desk.name) as on_desk,
        asyncio.TaskGroup() as group,
    ):
        handlers = [
            group.create_task(on_phone.run(phone.show)),
            group.create_task(on_desk.run(desk.show, retries=2, backoff_s=0.1)),
        ]
        for text in MAILS:
            await px.user(uin).mail(text)  # returns when it is on the disks of all replicas in sync
        await asyncio.gather(phone.until(MAILS[-1]), desk.until(MAILS[-1]))

        async with pixiu.InboxView(TARGET) as view:
            letters = await view.dead_letters(uin)
            for dead in letters:
                if dead.letter is not None and dead.original is not None:
                    text = dead.original.payload
                    print(f"dead letter: {text.decode()}: {dead.letter.reason}, {dead.letter.attempts} attempts")
            desk.shows_pictures = True
            await view.resend(uin, letters)  # to both devices: the phone shows it again
        await asyncio.gather(phone.until(MAILS[1]), desk.until(MAILS[1]))
        for handler in handlers:
            handler.cancel()
    print("nothing waits any more")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 7001))
