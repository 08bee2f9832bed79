"""Users who send mail to each other, come and go on their devices, and a history of all that happened, for its checker.

    history = History()
    async with Traffic(registry, history, seed=1) as traffic:
        await traffic.more(500)          # so many deliveries from now on
        ...                              # break something
        await traffic.settle()           # nothing more is sent; everybody comes until nothing is unacknowledged

With `everything` it records what the checker's other rules need, too: every copy on the wire, the ends of acknowledgements as Pi
says them, lists of inboxes while mail flows, bodies of 15 bytes to 8 KiB, mail that the cluster must refuse (its records are at
most `REFUSED_BYTES`), and a few that devices have and never acknowledge. With `confirmed_s` what is not confirmed in time, or is
certainly not stored, is sent again. With `sleeper` there is a user who comes once, and then only in the end: by then his inboxes
have reached their cap, and some of his mail has expired.

Source: docs/architecture.md, "A mail is sent", "A mail is delivered".
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self
from zlib import crc32

import pixiu
from pixiu.client.mail.receipt import MailReceipt
from pixiu.client.stores.view import InboxView
from tests.history.record import (
    UNTOLD,
    Acknowledge,
    Acknowledged,
    Call,
    Gap,
    History,
    Listed,
    LoggedIn,
    Login,
    Logout,
    Mail,
    Read,
    Send,
    Sent,
)
from tests.support.mail_wire import record_wire
from tools.cli.inbox import InboxEntry, read_inbox

LANES = (0, 1)
PAGE = 1000
TIMEOUT_S = 240.0
"""For one mail to be confirmed: longer than all that a test breaks takes to heal."""
BODY_BYTES = (15, 8 << 10)
REFUSED_BYTES = 16 << 10
"""`cluster.max_record_bytes` of a cluster that refuses what is sent to be refused."""
REFUSED = 0.02
NOT_STORED = (pixiu.NotSent, pixiu.DiskFull)
"""Of a mail that failed so nothing is stored."""
SLEEPER = 8500
ALSO_TO_THE_SLEEPER = 0.2
EXPIRING = 0.2
"""Of those."""
EXPIRE, EARLY = timedelta(minutes=1), timedelta(seconds=2)
"""By how much the cluster's clock may be ahead of the history's."""
LISTED = 40
"""Entries of a list while mail flows."""
LIST_S = 0.25
"""Between two lists."""


@dataclass(slots=True)
class Device:
    """One device of a user, over all the runs of its application."""

    uin: int
    number: int
    run: int = 0
    unacknowledged: dict[int, str] = field(default_factory=dict)
    """MsgID → the run of the application that holds it: this one."""
    acknowledged: set[int] = field(default_factory=set)
    """MsgIDs that any run acknowledged."""
    kept: set[int] = field(default_factory=set)
    """MsgIDs that are never acknowledged."""
    unsaved: dict[int, list[tuple[int, Call]]] = field(default_factory=dict)
    """Lane → (InboxSeq, its acknowledgement), of which Pi is not known to have it."""

    @property
    def name(self) -> str:
        """What the cluster knows it by."""
        return f"device-{self.number}"


class Traffic:
    """See the module.

    Args:
        registry: zk://HOST:PORT/ROOT of the cluster.
        history: takes what happens.
        seed: of who sends to whom and who comes when.
        users: UINs that receive; every third has two devices.
        everything: see the module.
        token_of: the token of a user, where the cluster wants logins.
        confirmed_s: what is not confirmed within so many seconds is sent again, until it is; 0: `TIMEOUT_S`, and once.
        sleeper: see the module.
    """

    def __init__(
        self,
        registry: str,
        history: History,
        seed: int,
        *,
        users: int = 9,
        senders: int = 3,
        pace_s: float = 0.02,
        everything: bool = False,
        token_of: Callable[[int], str] | None = None,
        confirmed_s: float = 0.0,
        sleeper: bool = False,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._registry = registry
        self._history = history
        self._random = random.Random(seed)
        self._uins = tuple(range(8001, 8001 + users))
        self._devices = [Device(uin, number) for uin in self._uins for number in range(1, 3 if uin % 3 == 0 else 2)]
        self._sleeper = Device(SLEEPER, 1) if sleeper else None
        self._senders, self._pace_s, self._everything = senders, pace_s, everything
        self._token_of = token_of
        self._confirmed_s = confirmed_s
        self.waits: list[tuple[float, int, float]] = []
        """Of each confirmed mail to one user: when it was sent (monotonic seconds), the UIN, seconds until it was confirmed."""
        self._wanted: dict[int, set[int]] = {uin: set() for uin in (*self._uins, SLEEPER)}
        """By user: MsgIDs that were confirmed."""
        self._sending = True
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = 0

    async def __aenter__(self) -> Self:
        if self._sleeper is not None:
            await self._come(self._sleeper)
        self._tasks = [asyncio.create_task(self._live(device), name=f"{device.uin}/{device.number}") for device in self._devices]
        await self._until("every device has been there once", lambda: self._ready == len(self._devices))
        self._tasks += [asyncio.create_task(self._send(number), name=f"sender-{number}") for number in range(1, self._senders + 1)]
        if self._everything:
            self._tasks.append(asyncio.create_task(self._list(), name="reader"))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, deliveries: int) -> None:
        """So many mails are confirmed and delivered from now on."""
        sent, delivered = self.counts["confirmed"] + deliveries // 2, self.counts["delivered"] + deliveries
        await self._until(
            f"{deliveries} more deliveries", lambda: self.counts["confirmed"] >= sent and self.counts["delivered"] >= delivered
        )

    async def settle(self) -> None:
        """The senders end; every device comes and stays until it has acknowledged all. Then the inboxes are looked at."""
        self._sending = False
        await self._until("the senders have ended", lambda: all(t.done() for t in self._tasks if t.get_name().startswith("sender")))
        # Who holds something goes once more, because it gets that again only then.
        self._leaving.set()
        await self._until("every device has acknowledged everything", lambda: all(map(self._has_all, self._devices)))
        if self._sleeper is not None:
            await self._come(self._sleeper)
        for device in self._everybody():
            for lane in LANES:
                await self._look(device, lane)

    def _everybody(self) -> list[Device]:
        return [*self._devices, *([self._sleeper] if self._sleeper is not None else [])]

    def missing(self) -> dict[str, int]:
        """How many confirmed mails each device has not acknowledged; for a person."""
        return {f"{d.uin}/{d.number}": len(self._wanted[d.uin] - d.acknowledged) for d in self._devices if not self._has_all(d)}

    def _has_all(self, device: Device) -> bool:
        return device.acknowledged | device.kept >= self._wanted[device.uin] and device.unacknowledged.keys() <= device.kept

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S) as limit:
                while not condition():
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            if not limit.expired():
                raise  # a task's
            raise AssertionError(f"{what}: not within {TIMEOUT_S:.0f} s; {dict(self.counts)}; missing {self.missing()}") from None

    # --- senders

    async def _send(self, number: int) -> None:
        process = f"writer-{number}"
        async with (
            pixiu.connect(
                self._registry,
                uin=100 + number,
                client=process,
                token=self._token(100 + number),
                mail_timeout_s=self._confirmed_s or TIMEOUT_S,
                connect_timeout_s=TIMEOUT_S,
                join_timeout_s=TIMEOUT_S,
            ) as px,
            px.mail_writer() as writer,
        ):
            waiting: set[asyncio.Task[None]] = set()
            while self._sending:
                await writer.space()
                receivers = tuple(self._random.sample(self._uins, self._random.choice((1, 1, 1, 1, 3))))
                lane = self._random.choice((0, 1, 1, 1))
                expire, expires_us = None, 0
                if self._sleeper is not None and self._random.random() < ALSO_TO_THE_SLEEPER:
                    receivers += (SLEEPER,)
                    if self._random.random() < EXPIRING:
                        receivers, expire = (SLEEPER,), EXPIRE
                        expires_us = (time.monotonic_ns() + int((EXPIRE - EARLY).total_seconds() * 1e9)) // 1000
                self.counts["sent"] += 1
                body = self._body(number)
                receipt = writer.send(receivers[0], body, to=receivers[1:], lane=lane, expire=expire)
                sent = Send(receipt.id, 100 + number, receivers, lane, crc=crc32(body), expires_us=expires_us)
                task = asyncio.create_task(self._confirm(writer, receipt, self._history.invoke(process, sent), sent))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                await asyncio.sleep(self._random.expovariate(1 / self._pace_s))
            await asyncio.gather(*waiting)
            with contextlib.suppress(pixiu.PixiuError if self._confirmed_s else pixiu.RecordTooLarge):  # others were sent again
                await writer.wait_finished()

    def _token(self, uin: int) -> Callable[[], str] | None:
        return None if self._token_of is None else partial(self._token_of, uin)

    def _body(self, number: int) -> bytes:
        """Of the next mail: most are short."""
        body = b"mail %d of %d" % (self.counts["sent"], number)
        if not self._everything:
            return body
        if self._random.random() < REFUSED:
            return body.ljust(REFUSED_BYTES)
        return body.ljust(int(math.exp(self._random.uniform(*map(math.log, BODY_BYTES)))))

    async def _confirm(self, writer: pixiu.MailWriter, receipt: MailReceipt, call: Call, sent: Send) -> None:
        """Until it is confirmed, or is refused for good."""
        process, began = call.process, time.monotonic()
        while not await self._confirmed(receipt, call, sent):
            while True:
                await writer.space()
                call = self._history.invoke(process, sent)
                try:
                    receipt = writer.resend(receipt)
                    break
                except pixiu.Overloaded as error:  # others were faster
                    self._history.fail(call, error.code)
            self.counts["sent again"] += 1
        if receipt.stored_as and len(sent.receivers) == 1:
            self.waits.append((began, sent.receivers[0], time.monotonic() - began))

    async def _confirmed(self, receipt: MailReceipt, call: Call, sent: Send) -> bool:
        """How a call ended; False: the mail is to be sent again."""
        try:
            await receipt
        except pixiu.RecordTooLarge as error:
            self._history.fail(call, error.code)
            self.counts["refused"] += 1
            return True
        except NOT_STORED as error:
            self._history.fail(call, error.code)
            self.counts[f"not stored {error.code}"] += 1
            return not self._confirmed_s
        except pixiu.PixiuError as error:
            self._history.unknown(call, error.code)
            self.counts[f"unconfirmed {error.code}"] += 1
            return not self._confirmed_s
        self._history.ok(call, Sent(int(receipt.stored_as)))
        self.counts["confirmed"] += 1
        for uin in sent.receivers:
            self._wanted[uin].add(int(receipt.stored_as))
        return True

    # --- devices

    async def _live(self, device: Device) -> None:
        """Come, take mail, go, again and again."""
        while True:
            last = self._leaving.is_set()
            async with self._there(device) as (process, inbox):
                self._ready += device.run == 1
                take = asyncio.create_task(self._take(process, device, inbox, last=last))
                try:
                    await self._stay(take, last=last)
                finally:
                    take.cancel()
                    await asyncio.gather(take, return_exceptions=True)
            if not self._leaving.is_set():
                await asyncio.sleep(self._random.expovariate(1 / 2.0))

    @contextlib.asynccontextmanager
    async def _there(self, device: Device) -> AsyncIterator[tuple[str, pixiu.Inbox]]:
        """A run of its application: what it is called, and the inbox, which is ready."""
        device.run += 1
        device.unacknowledged.clear()
        process = f"app-{device.uin}-{device.number}-{device.run}"
        async with pixiu.connect(
            self._registry,
            uin=device.uin,
            client=process,
            token=self._token(device.uin),
            connect_timeout_s=TIMEOUT_S,
            join_timeout_s=TIMEOUT_S,
        ) as px:
            call = self._history.invoke(process, Login(device.uin, device.number))
            inbox = px.inbox(device=device.name)
            if self._everything:
                record_wire(inbox, self._history, process, device.uin, device.number)
            async with inbox:
                inbox.on_gap = lambda gap: self._gap(process, device, gap)
                await inbox.ready(timeout_s=TIMEOUT_S)
                self._history.ok(call, LoggedIn())
                self.counts["logins"] += 1
                yield process, inbox
            call = self._history.invoke(process, Logout(device.uin, device.number))
        self._history.ok(call)

    async def _come(self, device: Device) -> None:
        """Take and acknowledge all that is there, and go."""
        async with self._there(device) as (process, inbox), asyncio.timeout(TIMEOUT_S):
            take = asyncio.create_task(self._take(process, device, inbox, last=True))
            try:
                while not take.done() and await self._has_unread(device):
                    await asyncio.sleep(LIST_S)
                if take.done():
                    take.result()
            finally:
                take.cancel()
                await asyncio.gather(take, return_exceptions=True)

    async def _has_unread(self, device: Device) -> bool:
        """Whether Pi has anything in its inboxes that the device did not acknowledge."""
        async with InboxView(self._registry) as view:
            found = await view.unread(device.uin, LANES)
        return any(there.up_to < lane.last for lane in found for there in lane.devices)

    async def _stay(self, take: asyncio.Task[None], *, last: bool) -> None:
        """For a while; `last`: for good."""
        leaving = asyncio.create_task(asyncio.Event().wait() if last else self._leaving.wait())
        seconds = None if last else self._random.expovariate(1 / 4.0)
        try:
            await asyncio.wait({take, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if take.done():
            take.result()

    async def _take(self, process: str, device: Device, inbox: pixiu.Inbox, *, last: bool) -> None:
        async for mail in inbox:
            msg_id = int(mail.msg_id)
            said = Mail(
                device.uin, device.number, mail.lane, int(mail.message_id), mail.seq, msg_id, mail.redelivered, crc32(mail.payload)
            )
            self._history.delivered(process, said)
            self.counts["delivered"] += 1
            self.counts["delivered again"] += mail.redelivered
            device.unacknowledged[msg_id] = process
            # Some mail is acknowledged behind what comes after it, and some only by the application's next run.
            chance = self._random.random()
            if last and self._everything and self._is_kept(device, msg_id):
                device.kept.add(msg_id)
            elif last or chance < 0.9:
                self._acknowledge(process, device, mail)
            elif chance < 0.96:
                asyncio.get_running_loop().call_later(self._random.uniform(0.05, 1.0), self._acknowledge, process, device, mail)

    def _is_kept(self, device: Device, msg_id: int) -> bool:
        """The very last one, which the device never acknowledges: an earlier one would hold back what comes 64 after it in its
        lane."""
        wanted = self._wanted[device.uin]
        return msg_id in wanted and not wanted - device.acknowledged - device.unacknowledged.keys()

    def _acknowledge(self, process: str, device: Device, mail: pixiu.Mail) -> None:
        msg_id = int(mail.msg_id)
        if device.unacknowledged.get(msg_id) == process:
            with contextlib.suppress(pixiu.NotConnected):
                call = self._history.invoke(process, Acknowledge(device.uin, device.number, mail.lane, seqs=(mail.seq,)))
                mail.acknowledge()
                if self._everything:
                    device.unsaved.setdefault(mail.lane, []).append((mail.seq, call))
                device.acknowledged.add(msg_id)
                del device.unacknowledged[msg_id]

    def _gap(self, process: str, device: Device, gap: pixiu.MailGap) -> None:
        self.counts["gaps"] += 1
        self._history.gap(process, Gap(device.uin, device.number, gap.lane, gap.up_to, gap.up_to))

    # --- inboxes

    async def _list(self) -> None:
        """Look at one inbox after the other, at the newest of it and at what Pi has of its devices' acknowledgements."""
        async with InboxView(self._registry) as view:
            while True:
                for uin in sorted({device.uin for device in self._everybody()}):
                    for lane in LANES:
                        await self._look_now(view, uin, lane)
                    await asyncio.sleep(LIST_S)

    async def _look_now(self, view: InboxView, uin: int, lane: int) -> None:
        devices = {device.name: device for device in self._everybody() if device.uin == uin}
        invoke = self._history.invoke
        calls = {name: invoke("reader", Read(uin, device.number, lane, num=0)) for name, device in devices.items()}
        try:
            (found,) = await view.unread(uin, (lane,))
            start = max(found.last - LISTED, found.floor)
            call = invoke("reader", Read(uin, 1, lane, start=start, num=LISTED))
            (page,) = await view.page(uin, (lane,), after=start, count=LISTED, fetch=False)
        except pixiu.PixiuError as error:
            self.counts[f"lists {error.code}"] += 1
            return
        self.counts["lists"] += 1
        entries = tuple((entry.seq, entry.msg_id, 0) for entry in page.entries)
        self._history.ok(call, Listed(entries, page.last, page.floor, page.gap, UNTOLD))
        for there in found.devices:
            device = devices[there.name]
            self._history.ok(calls[there.name], Listed((), found.last, found.floor, found.gap, there.up_to))
            waiting = device.unsaved.get(lane, [])
            for seq, acknowledged in waiting:
                if seq <= there.up_to:
                    self._history.ok(acknowledged, Acknowledged())
                    self.counts["acknowledgements saved"] += 1
            device.unsaved[lane] = [each for each in waiting if each[0] > there.up_to]

    async def _look(self, device: Device, lane: int) -> None:
        call = self._history.invoke("reader", Read(device.uin, device.number, lane, start=0, final=True))
        entries = [page async for page in self._pages(device.uin, lane)]
        said = tuple((each.seq, each.msg_id, int(each.message.message_id) if each.message else 0) for each in entries)
        (end,) = await read_inbox(self._registry, device.uin, (lane,), 0, 1, peek=False)
        self._history.ok(call, Listed(said, end.last, end.floor, end.gap, UNTOLD))

    async def _pages(self, uin: int, lane: int) -> AsyncIterator[InboxEntry]:
        after = 0
        while True:
            (page,) = await read_inbox(self._registry, uin, (lane,), after, PAGE, peek=True)
            for entry in page.entries:
                yield entry
            if not page.entries:
                return
            after = page.entries[-1].seq
