"""The shell of a relay's deliveries: Pi, Xiu, gateways and proxies around `relay.delivery.sessions.Deliveries`.

    relay data ─▶ MailDevices ─▶ logins ┐              ┌ PiLinks: sessions, entries, cursors
    proxies ─▶ Notify ─▶ notices ───────┼─ Deliveries ─┼ Fetcher: messages
    gateways ─▶ acknowledgements ───────┘              └ GatewayStreams: deliveries

A cluster without Pi or Xiu delivers no mail: then nobody is owned here.

Source: seed 004 §6.4; DESIGN section 9 ("Delivery of mail").
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

import grpc.aio

from cluster.rpc.xiu_fetcher import Fetcher
from cluster.runtime.context import Context
from pixiu.ids import msg_lane
from pixiu.rpc.channels import Channels
from pixiu.rpc.deadline_timer import DeadlineTimer
from pixiu.wire.inbox_operations import encode_acknowledges, encode_add_device, encode_opens
from pixiu.wire.record import LEAST_SIZE, SIZE_FIELD
from pixiu.wire.v1 import delivery_pb2, delivery_pb2_grpc, pi_pb2
from relay.core import Core
from relay.delivery.events import (
    Acknowledged,
    Acknowledgement,
    Asked,
    ConfirmNotices,
    Deliver,
    Effect,
    Event,
    Failure,
    Fetched,
    FetchMessages,
    GatewayLost,
    Listed,
    LoggedIn,
    LoggedOut,
    Notice,
    Notified,
    Opened,
    OpenSessions,
    ReadInboxes,
    SaveCursors,
    Saved,
    StillThere,
    Stopping,
    StreamBroken,
    StreamReady,
    Tick,
)
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries
from relay.gateway_streams import GatewayStreams
from relay.mail_answers import ReadItem, listings_of, numbers_of, read_requests, reads_of, records_of
from relay.mail_devices import MailDevices, Place, TrackedDevices
from relay.mail_stores import PiLinks
from relay.options import Options

HEARTBEAT_S: Final = 5.0
"""So often everybody who takes mail is looked at again: who has no session gets one."""
WALK_USERS: Final = 1000
"""Of them in one turn of the event loop."""
WALK_PAUSE_S: Final = 0.01
ASK_PAUSE_S: Final = 0.25
"""Devices whose numbers Pi did not say are asked about again so often."""
FETCH_S: Final = 2.5
"""Below the time in which a fetch must be answered."""
SETTLE_S: Final = 5.0
"""So long after a change of owners, or of gateways, logins are taken for such that others have served until now."""
SAVE_S: Final = 3.0
"""A relay that ends waits so long for Pi to take cursors."""
SAVE_POLL_S: Final = 0.02
MAX_NOTICES: Final = 4096
MALFORMED: Final = "a batch of notices has lists of the same length, at most 4096, and records of the sizes that it says"

NoticeCall = grpc.aio.ServicerContext[delivery_pb2.NoticeBatch, delivery_pb2.NoticesTaken]


def notices_of(batch: delivery_pb2.NoticeBatch) -> list[Notice] | None:
    """A batch's notices; None for one that is malformed."""
    count = len(batch.uins)
    if count > MAX_NOTICES or not count == len(batch.seqs) == len(batch.msg_ids) == len(batch.sizes):
        return None
    if sum(batch.sizes) != len(batch.records):
        return None
    found: list[Notice] = []
    at = 0
    for uin, seq, msg_id, size in zip(batch.uins, batch.seqs, batch.msg_ids, batch.sizes, strict=True):
        record = batch.records[at : at + size]
        at += size
        said = int.from_bytes(record[:SIZE_FIELD], "little")
        if size and (said < LEAST_SIZE or said + SIZE_FIELD != size):
            return None
        found.append(Notice(uin, msg_lane(msg_id), seq, msg_id, record))
    return found


class MailService(delivery_pb2_grpc.MailNoticesServicer):
    """Serves `pixiu.v1.MailNotices`, and runs the deliveries.

    Args:
        context: of the process.
        core: of the relay.
        devices: relay data; `changed` is called when somebody who takes mail has changed.
    """

    def __init__(self, context: Context[Options], core: Core, devices: TrackedDevices) -> None:
        self._context, self._core = context, core
        options = context.options
        self.devices = MailDevices(devices, core.gateway_at, context.endpoint_id)
        self.deliveries = Deliveries(
            self.devices.owns,
            Limits(
                opening=options.mail_opening, fetching=options.mail_fetching, max_sessions=options.max_mail_sessions,
                record_bytes=options.mail_notice_bytes,
            ),
        )  # fmt: skip
        self._channels = Channels()
        self._pi = PiLinks(lambda: context.view, self._channels, context.crash)
        self._fetcher = Fetcher(lambda: context.view, self._channels)
        max_bytes = options.mail_waiting_mb << 20
        self._gateways = GatewayStreams(self, context.endpoint_id, lambda: context.view, max_bytes, context.crash)
        self._alarm = DeadlineTimer(lambda: self._step(Tick()))
        self._events: deque[Event] = deque()
        self._stepping = self._stopped = self._stopping = False
        self._confirmed: list[ConfirmNotices] = []
        self._peers = itertools.count(1)
        self._fetches: set[asyncio.Task[None]] = set()
        self._turn: asyncio.Handle | None = None
        self._walk_timer: asyncio.TimerHandle | None = None
        self._ask_timer: asyncio.TimerHandle | None = None
        self._to_walk: list[int] = []
        self._walk_at = self._settled_at = 0.0
        self._at: frozenset[int] = frozenset()
        """Gateways that can be reached."""
        self._malformed = 0
        delivery_pb2_grpc.add_MailNoticesServicer_to_server(self, context.server)

    # --- what the relay's service calls

    def look_around(self) -> None:
        """Who runs, and who can be reached, may have changed."""
        if self._stopped:
            return
        layout = self._context.view.layout
        pis, xius = (layout.partitions(role) if role in layout.roles else 0 for role in ("pi", "xiu"))
        serving = bool(pis and xius) and not self._stopping
        self._pi.set_partitions(pis if serving or self._stopping else 0)
        gateways = frozenset(self._core.reachable_gateways())
        owners = self._core.mail_owners() if serving else ()
        changed = self.devices.set_owners(owners, self._context.options.partition, self._core.partitions)
        for gateway in self._at - gateways:
            self._step(GatewayLost(gateway))
        if changed or gateways != self._at:
            self._at = gateways
            self._walk_again()

    def changed(self) -> None:
        """Relay data has changed: looked at when this turn of the loop has ended."""
        if self._turn is None and not self._stopped:
            self._turn = asyncio.get_running_loop().call_soon(self._end_turn)

    async def drain(self) -> None:
        """Deliver nothing more, and save what devices have acknowledged."""
        self._stopping = True
        self._step(Stopping())
        self.look_around()
        loop = asyncio.get_running_loop()
        end = loop.time() + SAVE_S
        while self.deliveries.unsaved and loop.time() < end:
            await asyncio.sleep(SAVE_POLL_S)

    async def stop(self) -> None:
        """End everything."""
        self._stopped = True
        self._alarm.cancel()
        for handle in (self._turn, self._walk_timer, self._ask_timer):
            if handle is not None:
                handle.cancel()
        for task in self._fetches:
            task.cancel()
        await asyncio.gather(*self._fetches, return_exceptions=True)
        await self._gateways.close()
        await self._pi.close()
        await self._channels.close()

    def health(self) -> dict[str, object]:
        """Sessions, and which of Pi's partitions answer."""
        return {
            "sessions": len(self.deliveries.sessions),
            "gateways": len(self._gateways),
            "pi_partitions": self._pi.partitions,
            "pi_leaders": self._pi.open,
            "unsaved": self.deliveries.unsaved,
        }

    def samples(self) -> dict[str, object]:
        """For metrics."""
        deliveries = self.deliveries
        counted: dict[str, object] = {f"mail_{name}_total": value for name, value in asdict(deliveries.counters).items()}
        return counted | {
            "mail_sessions": len(deliveries.sessions),
            "mail_sessions_busy": deliveries.busy,
            "mail_sessions_waiting": deliveries.waiting,
            "mail_cursors_unsaved": deliveries.unsaved,
            "mail_users": len(self.devices),
            "mail_devices_unnumbered": self.devices.unnumbered,
            "mail_devices_refused_total": self.devices.refused,
            "mail_gateway_streams": len(self._gateways),
            "mail_gateway_streams_broken_total": self._gateways.broken,
            "mail_gateway_waiting_bytes": self._gateways.waiting_bytes,
            "mail_notices_malformed_total": self._malformed,
        }

    # --- proxies

    async def Notify(
        self, request_iterator: AsyncIterator[delivery_pb2.NoticeBatch], context: NoticeCall
    ) -> AsyncIterator[delivery_pb2.NoticesTaken]:
        """One proxy's stream: each batch is answered at once."""
        peer = next(self._peers)
        async for batch in request_iterator:
            notices = notices_of(batch)
            if notices is None:
                self._malformed += 1
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, MALFORMED)
            else:
                self._step(Notified(peer, batch.number, notices))
                confirmed, self._confirmed = self._confirmed, []
                for each in confirmed:
                    yield delivery_pb2.NoticesTaken(number=each.number, elsewhere=each.elsewhere)

    # --- gateways' streams

    def stream_ready(self, gateway: int) -> None:
        """Deliveries go. What was sent before this stream was there is lost."""
        if self.deliveries.sendable(gateway, self._context.now()):
            self._step(StreamBroken(gateway))
        self._step(StreamReady(gateway))

    def stream_broken(self, gateway: int) -> None:
        """What was on the way may be lost."""
        self._step(StreamBroken(gateway))

    def acknowledged(self, reply: delivery_pb2.DeliveryReply) -> None:
        """Clients have got something."""
        self._step(
            Acknowledged(
                [
                    Acknowledgement(each.uin, each.device, each.session, each.lane, each.up_to, each.bits)
                    for each in reply.acknowledgements
                ]
            )
        )

    def place(self, uin: int, number: int) -> Place | None:
        """Where a device is."""
        return self.devices.place(uin, number)

    # --- who is there

    def _end_turn(self) -> None:
        self._turn = None
        self._look(self.devices.devices.take())

    def _look(self, uins: Sequence[int], *, heartbeat: bool = False) -> None:
        looked = self.devices.look(uins, self._context.now(), self.deliveries.sessions if heartbeat else None)
        if looked.logged_out:
            self._step(LoggedOut(looked.logged_out))
        self._logged_in(LoggedIn(looked.logged_in, self._settling))
        self._logged_in(StillThere(looked.still_there))
        self._ask_numbers()

    @property
    def _settling(self) -> bool:
        return self._context.now() < self._settled_at

    def _logged_in(self, event: LoggedIn | StillThere) -> None:
        if not event.logins:
            return
        self._step(event)
        for gateway in {login.gateway for login in event.logins}:
            # A session that opens finds a stream that is ready, or one that is known not to be.
            if not self._gateways.want(gateway) and self.deliveries.sendable(gateway, self._context.now()):
                self._step(StreamBroken(gateway))

    def _walk_again(self) -> None:
        """Look at everybody, a part a turn of the loop, from now on."""
        self._settled_at = self._context.now() + SETTLE_S
        self._to_walk = self.devices.users()
        self._walk_at = self._context.now()
        if self._walk_timer is not None:
            self._walk_timer.cancel()
        self._walk()

    def _walk(self) -> None:
        if not self._to_walk:
            self._gateways.keep(set(self.deliveries.gateways()))
            self._to_walk = self.devices.users()
            self._walk_at = self._context.now()
        part, self._to_walk = self._to_walk[-WALK_USERS:], self._to_walk[:-WALK_USERS]
        self._look(part, heartbeat=True)
        pause = WALK_PAUSE_S if self._to_walk else max(self._walk_at + HEARTBEAT_S - self._context.now(), WALK_PAUSE_S)
        if not self._stopped:
            self._walk_timer = asyncio.get_running_loop().call_later(pause, self._walk)

    # --- Pi

    def _ask_numbers(self) -> None:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for uin, device in self.devices.to_number(self._context.now()):
            wanted.setdefault(self._partition(uin), []).append((uin, device))
        for partition, items in wanted.items():
            operations = b"".join([encode_add_device(uin, device) for uin, device in items])
            self._pi.ask(partition, operations, (), partial(self._numbered, items))
        if self.devices.unnumbered and self._ask_timer is None and not self._stopped:
            self._ask_timer = asyncio.get_running_loop().call_later(ASK_PAUSE_S, self._ask_again)

    def _ask_again(self) -> None:
        self._ask_timer = None
        self._ask_numbers()

    def _numbered(self, items: Sequence[tuple[int, int]], reply: pi_pb2.PiReply | None) -> None:
        now = self._context.now()
        answers = zip(items, numbers_of(len(items), reply), strict=True)
        logins = [self.devices.numbered(uin, device, answer, now) for (uin, device), answer in answers]
        self._logged_in(LoggedIn([login for login in logins if login is not None], self._settling))

    def _partition(self, uin: int) -> int:
        return uin % max(self._pi.partitions, 1)

    def _open(self, effect: OpenSessions) -> None:
        wanted: dict[int, list[Asked]] = {}
        for asked in effect.items:
            wanted.setdefault(self._partition(asked.uin), []).append(asked)
        for partition, items in wanted.items():
            operations = encode_opens((asked.uin, asked.device) for asked in items)
            self._pi.ask(partition, operations, (), partial(self._opened, items))

    def _opened(self, items: Sequence[Asked], reply: pi_pb2.PiReply | None) -> None:
        answers = list(zip(items, numbers_of(len(items), reply), strict=True))
        self._forget_refused(answers)
        self._step(Opened(answers))

    def _read(self, effect: ReadInboxes) -> None:
        wanted: dict[int, list[ReadItem]] = {}
        for item in effect.items:
            wanted.setdefault(self._partition(item[0].uin), []).append(item)
        for partition, all_items in wanted.items():
            for items in read_requests(all_items):
                self._pi.ask(partition, b"", reads_of(items), partial(self._listed, items))

    def _listed(self, items: Sequence[ReadItem], reply: pi_pb2.PiReply | None) -> None:
        answers = listings_of(items, reply)
        self._forget_refused(answers)
        self._step(Listed(answers))

    def _forget_refused(self, answers: Sequence[tuple[Asked, object]]) -> None:
        for asked, answer in answers:
            if answer is Failure.REFUSED:
                self.devices.forget(asked.uin, asked.device)

    def _save(self, effect: SaveCursors) -> None:
        results: list[Failure | None] = [Failure.LATER] * len(effect.items)
        wanted: dict[int, list[int]] = {}
        for index, item in enumerate(effect.items):
            wanted.setdefault(self._partition(item.uin), []).append(index)
        left = len(wanted)

        def saved(indexes: Sequence[int], reply: pi_pb2.PiReply | None) -> None:
            nonlocal left
            for index, answer in zip(indexes, numbers_of(len(indexes), reply), strict=True):
                results[index] = answer if isinstance(answer, Failure) else None
            left -= 1
            if not left:
                self._step(Saved(effect.number, results))

        for partition, indexes in wanted.items():
            items = [effect.items[index] for index in indexes]
            operations = encode_acknowledges((i.uin, i.device, i.session, i.lane, i.up_to, i.bits) for i in items)
            self._pi.ask(partition, operations, (), partial(saved, indexes))

    # --- Xiu

    def _fetch(self, effect: FetchMessages) -> None:
        task = asyncio.get_running_loop().create_task(self._fetched(effect))
        self._fetches.add(task)
        task.add_done_callback(self._fetch_ended)

    async def _fetched(self, effect: FetchMessages) -> None:
        found = await self._fetcher.fetch((each for _, msg_ids in effect.items for each in msg_ids), FETCH_S)
        self._step(Fetched(records_of(effect.items, found)))

    def _fetch_ended(self, task: asyncio.Task[None]) -> None:
        self._fetches.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.crash(error)

    # --- the core

    def _step(self, event: Event) -> None:
        """Take an event; what it leads to at once is taken behind it."""
        self._events.append(event)
        if self._stepping or self._stopped:
            return
        self._stepping = True
        try:
            while self._events:
                for effect in self.deliveries.step(self._events.popleft(), self._context.now()):
                    self._perform(effect)
        finally:
            self._stepping = False
        self._alarm.set(self.deliveries.next_deadline())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Deliver(gateway, chunks):
                if not self._gateways.deliver(gateway, chunks):
                    self._events.append(StreamBroken(gateway))
            case ConfirmNotices():
                self._confirmed.append(effect)
            case OpenSessions():
                self._open(effect)
            case ReadInboxes():
                self._read(effect)
            case FetchMessages():
                self._fetch(effect)
            case SaveCursors():
                self._save(effect)
