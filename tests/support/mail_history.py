"""Users who send mail to each other, come and go on their devices, and a history of all that happened, for its checker.

    history = History()
    async with Traffic(registry, history, seed=1) as traffic:
        await traffic.more(500)          # so many deliveries from now on
        ...                              # break something
        await traffic.settle()           # nothing more is sent; everybody comes until nothing is unacknowledged

Source: docs/architecture.md, "A mail is sent", "Delivery of mail") and 14.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self
from zlib import crc32

import pixiu
from pixiu.cli.inbox import Entry, read_inbox
from pixiu.client.mail_receipt import MailReceipt
from tests.history.record import UNTOLD, Acknowledge, Call, Gap, History, Listed, LoggedIn, Login, Logout, Mail, Read, Send, Sent

LANES = (0, 1)
PAGE = 1000
TIMEOUT_S = 240.0
"""For one mail to be confirmed: longer than all that a test breaks takes to heal."""


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
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._registry = registry
        self._history = history
        self._random = random.Random(seed)
        self._uins = tuple(range(8001, 8001 + users))
        self._devices = [Device(uin, number) for uin in self._uins for number in range(1, 3 if uin % 3 == 0 else 2)]
        self._senders, self._pace_s = senders, pace_s
        self._wanted: dict[int, set[int]] = {uin: set() for uin in self._uins}
        """By user: MsgIDs that were confirmed."""
        self._sending = True
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ready = 0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._live(device), name=f"{device.uin}/{device.number}") for device in self._devices]
        await self._until("every device has been there once", lambda: self._ready == len(self._devices))
        self._tasks += [asyncio.create_task(self._send(number), name=f"sender-{number}") for number in range(1, self._senders + 1)]
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
        for device in self._devices:
            for lane in LANES:
                await self._look(device, lane)

    def missing(self) -> dict[str, int]:
        """How many confirmed mails each device has not acknowledged; for a person."""
        return {f"{d.uin}/{d.number}": len(self._wanted[d.uin] - d.acknowledged) for d in self._devices if not self._has_all(d)}

    def _has_all(self, device: Device) -> bool:
        return device.acknowledged >= self._wanted[device.uin] and not device.unacknowledged

    async def _until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while not condition():
                    for task in self._tasks:
                        if task.done():
                            task.result()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{what}: not within {TIMEOUT_S:.0f} s; {dict(self.counts)}; missing {self.missing()}") from None

    # --- senders

    async def _send(self, number: int) -> None:
        process = f"writer-{number}"
        async with (
            pixiu.connect(
                self._registry, uin=100 + number, client=process, mail_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S
            ) as px,
            px.mail_writer() as writer,
        ):
            waiting: set[asyncio.Task[None]] = set()
            while self._sending:
                await writer.room()
                receivers = tuple(self._random.sample(self._uins, self._random.choice((1, 1, 1, 1, 3))))
                lane = self._random.choice((0, 1, 1, 1))
                self.counts["sent"] += 1
                body = b"mail %d of %d" % (self.counts["sent"], number)
                receipt = writer.send(receivers[0], body, to=receivers[1:], lane=lane)
                call = self._history.invoke(process, Send(receipt.id, 100 + number, receivers, lane, crc=crc32(body)))

                task = asyncio.create_task(self._confirmed(receipt, call, receivers))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                await asyncio.sleep(self._random.expovariate(1 / self._pace_s))
            await writer.wait_finished()
            await asyncio.gather(*waiting)

    async def _confirmed(self, receipt: MailReceipt, call: Call, receivers: Sequence[int]) -> None:
        try:
            await receipt
        except pixiu.PixiuError as error:
            self._history.unknown(call, error.code)
            self.counts[f"unconfirmed {error.code}"] += 1
            return
        self._history.ok(call, Sent(int(receipt.stored_as)))
        self.counts["confirmed"] += 1
        for uin in receivers:
            self._wanted[uin].add(int(receipt.stored_as))

    # --- devices

    async def _live(self, device: Device) -> None:
        """Come, take mail, go, again and again."""
        while True:
            last = self._leaving.is_set()
            device.run += 1
            device.unacknowledged.clear()
            process = f"app-{device.uin}-{device.number}-{device.run}"
            async with pixiu.connect(self._registry, uin=device.uin, client=process, connect_timeout_s=TIMEOUT_S) as px:
                call = self._history.invoke(process, Login(device.uin, device.number))
                async with px.inbox(device=device.name) as inbox:
                    inbox.on_gap = lambda gap, d=device, p=process: self._gap(p, d, gap)
                    await inbox.ready(timeout_s=TIMEOUT_S)
                    self._history.ok(call, LoggedIn())
                    self.counts["logins"] += 1
                    self._ready += device.run == 1
                    take = asyncio.create_task(self._take(process, device, inbox, last=last))
                    try:
                        await self._stay(take, last=last)
                    finally:
                        take.cancel()
                        await asyncio.gather(take, return_exceptions=True)
                call = self._history.invoke(process, Logout(device.uin, device.number))
            self._history.ok(call)
            if not self._leaving.is_set():
                await asyncio.sleep(self._random.expovariate(1 / 2.0))

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
            if last or chance < 0.9:
                self._acknowledge(process, device, mail)
            elif chance < 0.96:
                asyncio.get_running_loop().call_later(self._random.uniform(0.05, 1.0), self._acknowledge, process, device, mail)

    def _acknowledge(self, process: str, device: Device, mail: pixiu.Mail) -> None:
        msg_id = int(mail.msg_id)
        if device.unacknowledged.get(msg_id) == process:
            with contextlib.suppress(pixiu.NotConnected):
                self._history.invoke(process, Acknowledge(device.uin, device.number, mail.lane, seqs=(mail.seq,)))
                mail.acknowledge()
                device.acknowledged.add(msg_id)
                del device.unacknowledged[msg_id]

    def _gap(self, process: str, device: Device, gap: pixiu.MailGap) -> None:
        self.counts["gaps"] += 1
        self._history.gap(process, Gap(device.uin, device.number, gap.lane, gap.up_to, gap.up_to))

    # --- inboxes

    async def _look(self, device: Device, lane: int) -> None:
        call = self._history.invoke("reader", Read(device.uin, device.number, lane, start=0, final=True))
        entries = [page async for page in self._pages(device.uin, lane)]
        said = tuple((each.seq, each.msg_id, int(each.message.message_id) if each.message else 0) for each in entries)
        (end,) = await read_inbox(self._registry, device.uin, (lane,), 0, 1, peek=False)
        self._history.ok(call, Listed(said, end.last, end.floor, end.gap, UNTOLD))

    async def _pages(self, uin: int, lane: int) -> AsyncIterator[Entry]:
        after = 0
        while True:
            (page,) = await read_inbox(self._registry, uin, (lane,), after, PAGE, peek=True)
            for entry in page.entries:
                yield entry
            if not page.entries:
                return
            after = page.entries[-1].seq
