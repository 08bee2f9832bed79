"""Receivers that a login keeps between requests: mail of a device, messages of a channel.

Source: docs/http.md, "Mail", "Durable topics".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final

from gateway.http.bodies import shown
from pixiu.client.client import Client
from pixiu.client.inbox.inbox import ALL_LANES
from pixiu.client.inbox.mail import Mail
from pixiu.client.topics.reading.member import ChannelMessage
from pixiu.errors import PixiuError

CREDIT: Final = 100
"""Messages of a channel that are here for one login."""
FLUSH_S: Final = 5.0


class MailReceiver:
    """The inbox of one device."""

    def __init__(self, client: Client, uin: int, device: str) -> None:
        self._inbox = client.inbox(uin=uin, device=device)
        self._held: dict[int, Mail] = {}
        self.failed = False

    async def open(self) -> None:
        """Connect. Raises `PixiuError`."""
        try:
            await self._inbox.ready()
        except BaseException:
            await self._inbox.close()
            raise

    async def close(self) -> None:
        """Disconnect: what is not acknowledged is delivered again."""
        await self._inbox.close()

    async def take(self, most: int, wait_s: float) -> list[dict[str, Any]]:
        """Mail that is not acknowledged, the oldest first: at most this number, after waiting while there is none."""
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while len(self._held) < most:
            try:
                async with asyncio.timeout_at(loop.time() if self._held else until):
                    mail = await self._inbox.next(ALL_LANES)
            except TimeoutError:
                break
            except PixiuError:
                self.failed = True
                raise
            if mail is None:
                self.failed = True
                break
            self._held[mail.msg_id] = mail
        return [_mail(mail) for mail in list(self._held.values())[:most]]

    async def acknowledge(self, ids: Iterable[int]) -> tuple[int, list[str]]:
        """Acknowledge mail. Returns the number, and the IDs that are not known here: that mail comes again."""
        done, unknown = 0, []
        for msg_id in ids:
            mail = self._held.pop(msg_id, None)
            if mail is None:
                unknown.append(f"{msg_id:016x}")
            else:
                mail.acknowledge()
                done += 1
        if done:
            await self._inbox.flush(timeout_s=FLUSH_S)
        return done, unknown


class ChannelReceiver:
    """A member of one channel."""

    def __init__(self, client: Client, topic: str, channel: str) -> None:
        self._member = client.durable_topic(topic).channel(channel, credit=CREDIT, create=False)
        self._held: dict[str, ChannelMessage] = {}
        self.failed = False

    async def open(self) -> None:
        """Join. Raises `PixiuError`."""
        try:
            await self._member.open()
        except BaseException:
            await self._member.close()
            raise

    async def close(self) -> None:
        """Leave: what is not acknowledged goes to others."""
        await self._member.close()

    async def take(self, most: int, wait_s: float) -> list[dict[str, Any]]:
        """Messages that this login has not been given yet, at most this number, after waiting while there is none."""
        self._held = {token: message for token, message in self._held.items() if message.held}
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        found: dict[str, ChannelMessage] = {}
        while len(found) < most:
            try:
                async with asyncio.timeout_at(loop.time() if found else until):
                    message = await self._member.next()
            except TimeoutError:
                break
            except PixiuError:
                self.failed = True
                raise
            if message is None:
                self.failed = True
                break
            found[f"{message.part}-{message.offset}-{message.attempts}"] = message
        self._held |= found
        return [_entry(token, message) for token, message in found.items()]

    async def report(self, acks: Iterable[str], nacks: Iterable[str], delay_s: float) -> tuple[int, list[str]]:
        """Acknowledge messages, and give others back. Returns the number of those that were reported in time, and the others: they
        may come again, to whomever."""
        taken = [(token, self._held.pop(token, None), True) for token in acks]
        taken += [(token, self._held.pop(token, None), False) for token in nacks]
        reports = [
            message.ack() if acked else message.nack(delay_s) for _, message, acked in taken if message is not None
        ]  # fmt: skip
        results = iter(await asyncio.gather(*reports, return_exceptions=True))
        late = [token for token, message, _ in taken if message is None or next(results) is not True]
        return len(taken) - len(late), late


def _mail(mail: Mail) -> dict[str, Any]:
    return {
        "id": f"{mail.msg_id:016x}",
        "message_id": f"{mail.message_id:016x}",
        "sender": mail.sender,
        "sent_at_ms": mail.sent_at_ms,
        "type": mail.type,
        "lane": mail.lane,
        "redelivered": mail.redelivered,
        "headers": dict(mail.headers),
        **shown(mail.payload),
    }


def _entry(token: str, message: ChannelMessage) -> dict[str, Any]:
    return {
        "token": token,
        "part": message.part,
        "offset": message.offset,
        "attempts": message.attempts,
        "key": None if message.key is None else message.key.decode(errors="replace"),
        "tag": message.tag,
        "headers": {name: value.decode(errors="replace") for name, value in message.headers.items()},
        **shown(message.body),
    }
