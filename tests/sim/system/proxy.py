"""A proxy with its mail: production cores, and the twins of `proxy.mail.service`, `proxy.mail.store_links` and
`proxy.notices.notice_links`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import proxy.mail_events as me
from cluster.core.contract import END_OF_TURN, TICK
from cluster.wire.v1 import delivery_pb2
from pixiu.errors import Draining, Refusal, WrongPartition
from pixiu.wire.levels import Triple
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from proxy.mail.service import POLL_S
from proxy.mail.store_links import refusal_of
from proxy.notices.mail_notices import Notices
from proxy.notices.notice_links import batch_of
from tests.sim.cluster.edges import ProxyProcess
from tests.sim.system.base import Served
from tests.sim.system.leader import LeaderLink
from tests.sim.system.streams import Stream

MAIL_TIMEOUT_S: Final = 4.0
DRAINING: Final = "draining"
"""What a proxy says that goes."""


class _StoreLink:
    """The twin of `proxy.mail.store_links.StoreLink`."""

    def __init__(self, proxy: SystemProxy, store: me.Store) -> None:
        self._proxy, self._store = proxy, store
        self._number = 0
        self._link = LeaderLink(proxy, store.role, store.partition, up=self._up, reply=self._replied, down=self._down)

    def send(self, effect: me.SendStore | me.SendAppend) -> None:
        """A request of the stream that is open."""
        if effect.link != self._number:
            return
        if isinstance(effect, me.SendStore):
            request = xiu_pb2.StoreRequest(batch=effect.data, count=effect.count, position=effect.position, epoch=effect.epoch)
            request.level = effect.level.value
            self._link.send(request)
        else:
            self._link.send(pi_pb2.PiRequest(request=effect.request, operations=effect.operations, level=effect.level.value))

    def leave(self, number: int, *, again: bool = False) -> None:
        """End a stream; the next one is opened by itself, `again`: to the same replica."""
        if number == self._number:
            self._number = 0
            self._link.leave(again=again)

    def _up(self, epoch: int) -> None:
        self._number = self._proxy.next_number()
        self._proxy.mail_step(me.LinkUp(self._store, self._number, epoch))

    def _down(self, reason: str) -> None:
        number, self._number = self._number, 0
        self._proxy.mail_step(me.LinkDown(self._store, number, reason))

    def _replied(self, reply: Any) -> None:
        partition, triple = self._store.partition, Triple(reply.layout_version, reply.epoch, reply.committed)
        if self._store.pi:
            results = list(reply.results)
            partitions = reply.server.partitions if reply.code == WrongPartition.code else 0
            answer = (reply.request, results, refusal_of(reply), triple, reply.copies, partitions)
            self._proxy.mail_step(me.Appended(partition, self._number, *answer))
        else:
            runs = [
                me.StoredRun(run.position, run.count, run.sequence, run.msg_id, refusal_of(run), run.partitions)
                for run in reply.results
            ]
            self._proxy.mail_step(me.Stored(partition, self._number, runs, triple, reply.copies))


class SystemProxy(Served, ProxyProcess):
    """See the module."""

    def start_core(self) -> None:
        """See `Process`."""
        super().start_core()
        self.mail = self.world.variant.mail(max_record_bytes=1 << 20, timeout_s=MAIL_TIMEOUT_S)
        self.notices = Notices()
        self._number = 0
        self._writers: dict[int, Stream] = {}
        self._links: dict[me.Store, _StoreLink] = {}
        self._relays: dict[int, Stream | None] = {}
        self._to_relays: dict[int, list[delivery_pb2.NoticeBatch]] = {}
        self._mail_in_turn = self._notices_in_turn = False

    def next_number(self) -> int:
        """Of a stream."""
        self._number += 1
        return self._number

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """See `Served`."""
        return {"Send": self._send}

    def on_view(self) -> None:
        """See `Process`."""
        super().on_view()
        there = {role for role, *_ in self.view.partitions}
        xius, pis = (self.view.count(role) if role in there else 0 for role in ("xiu", "pi"))
        self.mail_step(me.StoresChanged(xius, pis))

    def _replicas_changed(self) -> None:
        super()._replicas_changed()
        relays: dict[int, list[int]] = {}
        for replica in self._replicas("relay"):
            node = next(node for node in self.view.nodes if node.endpoint == replica.endpoint)
            if node.running:
                relays.setdefault(replica.partition, []).append(replica.endpoint)
        owners = {partition: tuple(sorted(found)) for partition, found in relays.items()}
        self.notices_step(me.OwnersChanged(self.view.count("relay"), owners))

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`: writers are told, and what is under way is confirmed."""
        self._drains = True
        for stream in self._writers.values():
            stream.reply(DRAINING)

        def poll() -> None:
            if self.mail.under_way or self._writers:
                self.after(POLL_S, poll)
            else:
                done()

        poll()

    _drains = False

    # --- writers

    def _send(self, stream: Stream) -> None:
        number = self.next_number()
        if self._drains:
            stream.reply(me.EndWriter(number, Refusal(Draining.code, "this proxy is going", 200)))
            stream.end()
            return
        self._writers[number] = stream

        def take(request: Any) -> None:
            if isinstance(request, me.MailReceived):
                taken = me.MailReceived(number, request.data, request.count, request.position, request.level, request.more)
                self.mail_step(taken)
            else:
                self.mail_step(me.WriterOpened(number, *request))

        def left() -> None:
            self._writers.pop(number, None)
            self.mail_step(me.WriterClosed(number))

        stream.take, stream.left = take, left

    # --- the core of mail

    def mail_step(self, event: me.Event) -> None:
        """Give the core an event."""
        if self.alive:
            self._mail_in_turn = True
            self._do_mail(self.mail.step(event, self.world.now))

    def end_of_turn(self) -> None:
        """See `Process`."""
        super().end_of_turn()
        if self._mail_in_turn:
            self._mail_in_turn = False
            self._do_mail(self.mail.step(END_OF_TURN, self.world.now))
        if self._notices_in_turn:
            self._notices_in_turn = False
            self._do_notices(self.notices.step(END_OF_TURN, self.world.now))

    def _do_mail(self, effects: list[me.Effect]) -> None:
        for effect in effects:
            match effect:
                case me.Answer(stream):
                    if stream in self._writers:
                        self._writers[stream].reply(effect)
                case me.EndWriter(stream):
                    found = self._writers.pop(stream, None)
                    if found is not None:
                        found.reply(effect)
                        found.end()
                case me.SendStore() | me.SendAppend():
                    self._links[me.Store(isinstance(effect, me.SendAppend), effect.partition)].send(effect)
                case me.InboxesGrew():
                    self.notices_step(effect)
                case me.Connect(store):
                    self._links[store] = _StoreLink(self, store)
                case me.Disconnect(store, link, _, again):
                    self._links[store].leave(link, again=again)

    # --- notices

    def deadline(self) -> float:
        """See `Process`."""
        return min(super().deadline(), self.mail.next_deadline(), self.notices.next_deadline())

    def tick(self) -> None:
        """See `Process`."""
        now = self.world.now
        if super().deadline() <= now:
            super().tick()
        if self.mail.next_deadline() <= now:
            self.mail_step(TICK)
        if self.notices.next_deadline() <= now:
            self.notices_step(TICK)

    def notices_step(self, event: me.NoticesEvent) -> None:
        """Give the core of notices an event."""
        if self.alive:
            self._notices_in_turn = True
            self._do_notices(self.notices.step(event, self.world.now))

    def _do_notices(self, effects: list[me.NoticesEffect]) -> None:
        for effect in effects:
            if isinstance(effect, me.LeaveRelay):
                self._leave_relay(effect.relay)
            else:
                self._tell(effect)

    def _leave_relay(self, relay: int) -> None:
        self._to_relays.pop(relay, None)
        stream = self._relays.pop(relay, None)
        if stream is not None:
            stream.leave()

    def _tell(self, effect: me.SendNotices) -> None:
        batch = batch_of(effect)
        if effect.relay not in self._relays:
            node = next((node for node in self.view.nodes if node.endpoint == effect.relay), None)
            if node is None:
                self.notices_step(me.RelayLost(effect.relay))
                return
            batch.proxy = self.endpoint
            self._relays[effect.relay] = None
            waiting = self._to_relays[effect.relay] = []
            self._call(effect.relay, node.address, waiting)
        stream = self._relays[effect.relay]
        if stream is None:
            self._to_relays[effect.relay].append(batch)
        else:
            stream.send(batch)

    def _call(self, relay: int, address: tuple[str, int], waiting: list[delivery_pb2.NoticeBatch]) -> None:
        def current() -> bool:
            return self._to_relays.get(relay) is waiting

        def opened(stream: Stream) -> None:
            if not current():
                stream.leave()
                return
            self._relays[relay] = stream
            stream.take_reply = lambda reply: self.notices_step(me.NoticesTaken(relay, reply.number, reply.elsewhere))
            stream.lost = broken
            for batch in waiting:
                stream.send(batch)
            waiting.clear()

        def broken() -> None:
            if current():
                del self._to_relays[relay], self._relays[relay]
                self.notices_step(me.RelayLost(relay))

        self.world.streams.call(self, address, "Notify", opened, broken)
