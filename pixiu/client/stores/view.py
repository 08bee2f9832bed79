"""Reading and managing users' inboxes without a relay or a gateway, for operators and servers of the same operator.

    async with InboxView("zk://127.0.0.1:2181/pubsub") as view:
        for lane in await view.page(7, before=view.NEWEST):
            ...

It connects to Pi and Xiu directly and finds their leaders by the registry. Reading changes nothing.

Source: docs/delivery.md, docs/pi.md, docs/operations.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Final, Self

from pixiu.client.client import Client, connect
from pixiu.client.inbox.dead_letters import DeadLetter, dead_letter_uin, decode
from pixiu.client.messages.message import Message, message_of
from pixiu.client.stores.leaders import Stores
from pixiu.client.stores.pages import (
    LANES,
    MAX_DEVICE_NAME_BYTES,
    MAX_PAGE,
    NEWEST,
    DeadLetterEntry,
    DeviceState,
    InboxEntry,
    Lane,
    lane_of,
)
from pixiu.errors import InvalidArgument, MalformedData
from pixiu.ids import MAX_ID, SnowflakeID, device_of_name, is_within
from pixiu.wire.inbox_operations import (
    encode_acknowledges,
    encode_add_device,
    encode_delete,
    encode_drop_device,
    encode_opens,
)
from pixiu.wire.record import LANE_FIRST, LANE_NORMAL
from pixiu.wire.v1 import pi_pb2

CLIENT_NAME: Final = "pixiu-inbox"
MAX_RESENT: Final = 100_000
"""Number of mails that a view remembers to have sent again. Policy: the oldest is forgotten."""


class InboxView:
    """Reads and manages users' inboxes: pages, unread counts, devices, deletion, dead letters.

    Args:
        target: "zk://host:port/root".
        connecting: makes a client that sends mail; for tests.

    Every method raises `InvalidArgument`, `NotServed` (a cluster without Pi) and `Unavailable` (no leader in 20 s). If the cluster
    requires an operator's certificate, it raises at once `ConfigurationError` without one and `NotAllowed` with another one.
    """

    NEWEST: Final = NEWEST

    def __init__(self, target: str, *, connecting: Callable[..., Client] = connect) -> None:
        self._target = target
        self._stores = Stores(target)
        self._connecting = connecting
        self._resent: dict[tuple[int, int], None] = {}

    async def __aenter__(self) -> Self:
        await self._stores.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # fmt: skip
        await self._stores.__aexit__(kind, error, trace)

    # --- reading

    async def page(
        self, uin: int, lanes: Sequence[int] = LANES, *, after: int = 0, before: int = 0, count: int = 50, fetch: bool = True,
    ) -> list[Lane]:  # fmt: skip
        """Read a page of each lane: entries after an InboxSeq, oldest first, or (`before` above 0) before one, newest first.

        It includes acknowledged entries; `before=view.NEWEST` begins with the newest.

        Args:
            count: entries of each lane, at most 1,000.
            fetch: read the messages too; else only their numbers.
        """
        _check(uin, *lanes)
        if after and before:
            raise InvalidArgument("give after or before, not both: a page begins at one entry")
        num = min(count, MAX_PAGE)
        reads = [pi_pb2.PiRead(uin=uin, lane=lane, start=after, num=num, peek=True, before=min(before, NEWEST)) for lane in lanes]
        found = [lane_of(lane, reply) for lane, reply in zip(lanes, await self._stores.read(uin, reads), strict=True)]
        if fetch:
            await self._stores.fetch([entry for lane in found for entry in lane.entries])
        return found

    async def unread(self, uin: int, lanes: Sequence[int] = LANES) -> list[Lane]:
        """Read the state of each lane without entries: the user's devices, and the number of entries that each has not
        acknowledged.

        Mail whose lifetime (`expire`) is over is counted until that device connects and skips it, because inboxes hold numbers and
        no lifetimes.
        """
        _check(uin, *lanes)
        reads = [pi_pb2.PiRead(uin=uin, lane=lane, peek=True, devices=True) for lane in lanes]
        return [lane_of(lane, reply) for lane, reply in zip(lanes, await self._stores.read(uin, reads), strict=True)]

    # --- managing

    async def delete(self, uin: int, lane: int, first: int, last: int = 0) -> int:
        """Delete an entry, or those up to `last`, for all devices: nobody can read them any more. Returns the number deleted.

        The record stays in Xiu until its age is over. Raises `LimitError` at 1,000 separate deletions in an inbox.
        """
        _check(uin, lane)
        last = last or first
        if not 0 < first <= last <= MAX_ID:
            raise InvalidArgument(f"a range of InboxSeqs starts at 1 or above, not {first}-{last}")
        return (await self._stores.change(uin, encode_delete(uin, lane, first, last)))[0]

    async def acknowledge(self, uin: int, lane: int, up_to: int, device: str) -> DeviceState:
        """Acknowledge everything up to an InboxSeq, as the device with this name (`px.inbox(device=…)`). Returns the device's new
        state.

        The device is one of the user's eight. It is created if it does not exist; from then on the inbox keeps entries for it until
        it has acknowledged them, is dropped, or has not been seen for 30 days. The call opens a session of the device, which ends
        the one it had. It acknowledges for this device alone: others still get what they have not acknowledged.

        Raises `TooManyDevices`; `InvalidArgument` beyond the inbox's end.
        """
        _check(uin, lane)
        _check_device(device)
        if not 0 < up_to <= MAX_ID:
            raise InvalidArgument(f"an InboxSeq is 1 or above, not {up_to}")
        number = (await self._stores.change(uin, encode_add_device(uin, device_of_name(device), device)))[0]
        session = (await self._stores.change(uin, encode_opens([(uin, number)])))[0]
        await self._stores.change(uin, encode_acknowledges([(uin, number, session, lane, up_to, 0)]))
        (found,) = await self.unread(uin, (lane,))
        return next(each for each in found.devices if each.number == number)

    async def drop_device(self, uin: int, number: int) -> None:
        """Drop a device: the inbox keeps nothing for it any more, and if it comes back it is a new one. Raises `UnknownDevice`."""
        _check(uin)
        if not 0 <= number <= 0xFFFF:
            raise InvalidArgument(f"a DeviceID is from 0 to 65535, not {number}")
        await self._stores.change(uin, encode_drop_device(uin, number))

    # --- dead letters

    async def dead_letters(self, uin: int, *, after: tuple[int, int] = (0, 0), count: int = 50) -> list[DeadLetterEntry]:
        """Read mail of a user that a receiver's handler could not process: `count` of each lane, oldest first.

        Args:
            after: InboxSeqs in lanes 0 and 1 of the dead-letter inbox after which to begin.
        """
        _check(uin)
        inbox = dead_letter_uin(uin)
        found: list[DeadLetterEntry] = []
        for lane in LANES:
            (page,) = await self.page(inbox, (lane,), after=after[lane], count=count)
            found += [_dead(uin, entry) for entry in page.entries]
        missing = [dead for dead in found if dead.letter is not None and dead.original is None]
        fetched = [InboxEntry(dead.letter.lane, dead.letter.seq, dead.letter.msg_id) for dead in missing if dead.letter]
        await self._stores.fetch(fetched)
        for dead, entry in zip(missing, fetched, strict=True):
            dead.original = entry.message
            dead.entry.code = entry.code
        return found

    async def resend(self, uin: int, letters: Iterable[DeadLetterEntry]) -> list[SnowflakeID]:
        """Send the mail of dead letters to the user again, at level replicated, then delete each dead letter.

        Each is a new mail, with an ID of its own and a new lifetime, from the original's sender, to all of the user's devices; the
        mails of one sender are sent in their order. Each device files a letter of its own: the mail is sent once, and further
        letters of the same mail are only deleted. Mail is sent at least once: if the process ends between the two steps, the mail
        exists twice. Letters that cannot be read are skipped. Returns the IDs of the mails sent.
        """
        _check(uin)
        senders: dict[int, list[tuple[InboxEntry, Message, int]]] = {}
        for dead in letters:
            if dead.original is not None and dead.letter is not None:
                senders.setdefault(dead.original.sender, []).append((dead.entry, dead.original, dead.letter.msg_id))
        sent: list[SnowflakeID] = []
        for sender, mails in senders.items():
            async with self._connecting(self._target, uin=sender, client=CLIENT_NAME) as client:
                for entry, mail, msg_id in mails:
                    if (uin, msg_id) in self._resent:
                        await self.delete(dead_letter_uin(uin), entry.lane, entry.seq)
                        continue
                    receipt = await client.user(uin).mail(
                        mail.payload,
                        lane=LANE_FIRST if mail.first_lane else LANE_NORMAL,
                        expire=timedelta(minutes=mail.lifetime_min) if mail.lifetime_min else None,
                        type=mail.type,
                        extension=mail.extension,
                    )
                    sent.append(receipt.id)
                    if len(self._resent) >= MAX_RESENT:
                        del self._resent[next(iter(self._resent))]
                    self._resent[uin, msg_id] = None
                    await self.delete(dead_letter_uin(uin), entry.lane, entry.seq)
        return sent

    async def drop(self, uin: int, letters: Iterable[DeadLetterEntry]) -> int:
        """Delete dead letters. Returns the number deleted."""
        _check(uin)
        return sum([await self.delete(dead_letter_uin(uin), dead.entry.lane, dead.entry.seq) for dead in letters])


def _check(uin: int, *lanes: int) -> None:
    if not is_within(uin, 1, MAX_ID):
        raise InvalidArgument(f"a UIN is from 1 to 2^63-1, not {uin!r}")
    for lane in lanes:
        if lane not in LANES:
            raise InvalidArgument(f"a lane is 0 (first) or 1 (normal), not {lane}")


def _check_device(name: str) -> None:
    if not 0 < len(name.encode()) <= MAX_DEVICE_NAME_BYTES:
        raise InvalidArgument(f"a device's name has 1 to {MAX_DEVICE_NAME_BYTES} bytes")


def _dead(uin: int, entry: InboxEntry) -> DeadLetterEntry:
    """Decode an entry of a dead-letter inbox; anybody may have sent it."""
    found = DeadLetterEntry(entry)
    if entry.message is None:
        return found
    try:
        letter: DeadLetter = decode(entry.message.payload)
        if letter.uin != uin:
            raise MalformedData("of somebody else")
        found.original = message_of(letter.record) if letter.record else None
    except MalformedData:
        entry.code = MalformedData.code
        return found
    found.letter = letter
    return found


async def read_inbox(target: str, uin: int, lanes: Sequence[int], after: int, count: int, *, peek: bool) -> list[Lane]:
    """Read pages of a user's inbox. Raises the errors of `InboxView`."""
    async with InboxView(target) as view:
        return await view.page(uin, lanes, after=after, count=count, fetch=peek)
