"""A relay with its deliveries: production cores, and the twin of `relay.mail.service.MailService` around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from cluster.core.contract import END_OF_TURN, TICK
from cluster.membership.map.devices import LoginPolicy
from cluster.rpc.pi_links import STALL_S
from cluster.rpc.xiu_fetcher import CALL_S
from cluster.wire.v1 import delivery_pb2
from pixiu.errors import NotLeader, NotYet, WrongPartition
from pixiu.ids import msg_partition
from pixiu.wire.record import split
from pixiu.wire.v1 import pi_pb2, xiu_pb2
from relay.delivery import events as dv
from relay.delivery.limits import Limits
from relay.mail import events as ev
from relay.mail.answers import acknowledgements_of, notices_of, records_of
from relay.mail.devices import Place, TrackedDevices
from relay.mail.gateway_streams import Outbox
from relay.mail.service import FETCH_S, SAVE_POLL_S, SAVE_S
from tests.sim.cluster.stores import RelayProcess
from tests.sim.cluster.watched import Watched
from tests.sim.system.base import Served, unary
from tests.sim.system.leader import BACKOFF_S, LeaderLink, address_of
from tests.sim.system.streams import Stream

MAX_BACKOFF_S: Final = 2.0
CHECK_S: Final = 1.0
LIMITS: Final = Limits(
    opening=4, fetching=8, fetch_entries=16, max_sessions=100, max_remembered=100, record_bytes=200,
    call_timeout_s=0.8, slot_timeout_s=3.0, pause_s=0.05, max_pause_s=0.5, resend_s=1.5, max_resend_s=4.0,
    hold_s=3.0, poll_s=5.0, settle_s=1.5, acknowledge_batch=8, acknowledge_calls=2, fenced_pause_s=1.0,
)  # fmt: skip
"""Shorter and smaller than in service, so that more happens in a run."""


class WatchedTakers(Watched, TrackedDevices):
    """Relay data, watched, which notes who takes mail."""

    def __init__(self, is_true: Any, changed: Callable[[], None], policy: LoginPolicy) -> None:
        TrackedDevices.__init__(self, changed, policy=policy)
        self.is_true, self.highest, self.watching = is_true, {}, True


class _PiLink:
    """The twin of a partition of `cluster.rpc.pi_links.PiLinks`: every question is answered."""

    def __init__(self, relay: SystemRelay, partition: int) -> None:
        self._relay = relay
        self._unanswered: dict[int, tuple[float, Callable[[Any, int], None]]] = {}
        self._request = 0
        self._closed = False
        self._link = LeaderLink(relay, "pi", partition, up=lambda epoch: None, reply=self._replied, down=self._down)
        self._check()

    def ask(self, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Callable[[Any, int], None]) -> None:
        if not self._link.open:
            answered(None, 0)
            return
        self._request += 1
        self._unanswered[self._request] = self._relay.world.now, answered
        self._link.send(pi_pb2.PiRequest(request=self._request, operations=operations, reads=reads))

    def close(self) -> None:
        self._closed = True
        self._link.close()
        self._down("")

    def _check(self) -> None:
        if self._closed:
            return
        if self._unanswered and next(iter(self._unanswered.values()))[0] + STALL_S <= self._relay.world.now:
            self._link.leave()
        self._relay.after(CHECK_S, self._check)

    def _replied(self, reply: pi_pb2.PiReply) -> None:
        _, answered = self._unanswered.pop(reply.request, (0.0, None))
        if answered is None:
            return
        if reply.code == NotLeader.code:
            self._link.leave()
        answered(None if reply.code else reply, reply.server.partitions if reply.code == WrongPartition.code else 0)

    def _down(self, reason: str) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for _, answered in unanswered.values():
            answered(None, 0)


class _GatewayStream:
    """The twin of a stream of `relay.mail.gateway_streams.GatewayStreams`."""

    def __init__(self, relay: SystemRelay, gateway: int) -> None:
        self._relay, self.gateway = relay, gateway
        self.ready = self.over = False
        self.outbox = Outbox(relay.place_of, gateway)
        self._stream: Stream | None = None
        self._failures = 0
        self._connect()

    def send(self, chunks: Sequence[dv.Chunk]) -> None:
        """Envelopes, in order."""
        self.outbox.add(chunks)
        self._flush()

    def ask(self, lanes: Sequence[dv.DeviceLane]) -> None:
        """What was written of them."""
        self.outbox.ask(lanes)
        self._flush()

    def _flush(self) -> None:
        while self.outbox:
            parcel = self.outbox.take()
            self.outbox.sent(parcel)
            assert self._stream is not None
            batch = delivery_pb2.DeliveryBatch(devices=parcel.devices, deliveries=b"".join(parcel.chunks), count=parcel.count)
            batch.asked.extend(parcel.asked)
            self._stream.send(batch)

    def close(self) -> None:
        """End."""
        self.over = True
        if self._stream is not None:
            self._stream.leave()

    def _connect(self) -> None:
        if self.over:
            return
        node = next((n for n in self._relay.view.nodes if n.endpoint == self.gateway), None)
        if node is None:
            self._again()
            return
        self._relay.world.streams.call(self._relay, node.address, "Deliver", self._opened, self._again)

    def _opened(self, stream: Stream) -> None:
        if self.over:
            stream.leave()
            return
        self._stream = stream
        stream.take_reply = self._replied
        stream.lost = self._lost
        stream.send(delivery_pb2.DeliveryBatch(relay=self._relay.endpoint))

    def _replied(self, reply: delivery_pb2.DeliveryReply) -> None:
        if not self.ready:
            self.outbox = Outbox(self._relay.place_of, self.gateway)
            self.ready, self._failures = True, 0
            self._relay.mail_step(dv.StreamReady(self.gateway))
        else:
            self._relay.acknowledged(self.gateway, reply)

    def _lost(self) -> None:
        served, self.ready, self._stream = self.ready, False, None
        if served and not self.over:
            self._relay.mail_step(dv.StreamBroken(self.gateway))
        self._again()

    def _again(self) -> None:
        self._failures += 1
        self._relay.after(min(BACKOFF_S * 2 ** min(self._failures, 8), MAX_BACKOFF_S), self._connect)


class SystemRelay(Served, RelayProcess):
    """See the module."""

    def make_core(self, **options: Any) -> Any:
        """See `RelayProcess`."""
        self._noted = False
        self.takers = WatchedTakers(self.world.is_true_device, self._takers_changed, self.world.shape.policy)
        return self.world.variant.relay(devices=self.takers, **options)

    def start_core(self) -> None:
        """See `Process`."""
        super().start_core()
        variant = self.world.variant
        self.mail_devices = variant.mail_devices(self.takers, self.core.gateway_at, self.endpoint)
        self.deliveries = variant.deliveries(self.mail_devices.owns, LIMITS, variant.session)
        self.mail = variant.relay_mail(self.mail_devices, self.deliveries)
        self._events: list[ev.Event] = []
        self._stepping = False
        self._pis: list[_PiLink] = []
        self._gateways: dict[int, _GatewayStream] = {}
        self._confirmed: list[dv.ConfirmNotices] = []
        self._peers = 0
        self._xiu_leaders: dict[int, tuple[str, int]] = {}
        self._asked_xius = 0

    @property
    def methods(self) -> dict[str, Callable[[Stream], None]]:
        """See `Served`."""
        return {"Notify": self._notify}

    # --- what the relay's core says

    def on_view(self) -> None:
        """See `Process`."""
        super().on_view()
        self._look_around()

    def take_state(self, peer: Any, state: Any) -> None:
        """See `Process`."""
        super().take_state(peer, state)
        self._look_around()

    def step(self, event: Any) -> Any:
        """See `StoreProcess`."""
        before = self.core.state
        found = super().step(event)
        if self.core.state is not before and hasattr(self, "mail"):
            self._look_around()
        return found

    def _look_around(self) -> None:
        core = self.core
        pis, xius = (self.view.count(role) if self.view.of_role(role) else 0 for role in ("pi", "xiu"))
        gateways = frozenset(core.reachable_gateways())
        changed = ev.ClusterChanged(core.mail_owners(), self.place.partition, core.partitions, gateways, pis, xius)
        self.mail_step(changed)

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`: deliver nothing more, and save what devices have acknowledged."""
        self.mail_step(dv.Stopping())
        end = self.world.now + SAVE_S

        def poll() -> None:
            if self.deliveries.unsaved and self.world.now < end:
                self.after(SAVE_POLL_S, poll)
            else:
                self.after(0.2, done)

        poll()

    def _takers_changed(self) -> None:
        """They are looked at when the turn ends."""

    def end_of_turn(self) -> None:
        """See `Process`."""
        super().end_of_turn()
        if self.takers.dirty:
            self.mail_step(END_OF_TURN)

    # --- gateways

    def _want(self, gateway: int) -> bool:
        stream = self._gateways.get(gateway)
        if stream is None:
            stream = self._gateways[gateway] = _GatewayStream(self, gateway)
        return stream.ready

    def place_of(self, uin: int, number: int) -> Place | None:
        """Where a device is."""
        return self.mail_devices.place(uin, number)

    def acknowledged(self, gateway: int, reply: delivery_pb2.DeliveryReply) -> None:
        """Clients have got something."""
        self.mail_step(dv.Acknowledged(gateway, acknowledgements_of(reply)))

    # --- proxies

    def _notify(self, stream: Stream) -> None:
        self._peers += 1
        peer = self._peers

        def take(batch: delivery_pb2.NoticeBatch) -> None:
            notices = notices_of(batch)
            assert notices is not None, "a proxy sends a malformed batch of notices"
            self.mail_step(dv.Notified(peer, batch.number, notices))
            confirmed, self._confirmed = self._confirmed, []
            for each in confirmed:
                stream.reply(delivery_pb2.NoticesTaken(number=each.number, elsewhere=each.elsewhere))

        stream.take = take

    # --- Pi

    def _connect_pis(self, count: int) -> None:
        while len(self._pis) > count:
            self._pis.pop().close()
        while len(self._pis) < count:
            self._pis.append(_PiLink(self, len(self._pis)))

    def _ask_pi(self, effect: ev.AskPi) -> None:
        def answered(reply: Any, partitions: int) -> None:
            self.mail_step(ev.PiAnswered(effect.number, reply, partitions))

        if effect.partition >= len(self._pis):
            answered(None, 0)
        else:
            self._pis[effect.partition].ask(effect.operations, effect.reads, answered)

    # --- Xiu: the twin of `cluster.rpc.xiu_fetcher.Fetcher`

    def _fetch(self, effect: dv.FetchMessages) -> None:
        partitions: dict[int, list[int]] = {}
        for msg_id in dict.fromkeys(each for _, ids in effect.items for each in ids):
            partitions.setdefault(msg_partition(msg_id), []).append(msg_id)
        found: dict[int, tuple[str, bytes]] = {}
        left = [len(partitions)]
        over = [False]

        def done() -> None:
            if not over[0]:
                over[0] = True
                self.mail_step(dv.Fetched(records_of(effect.items, found)))

        def part_done() -> None:
            left[0] -= 1
            if not left[0]:
                done()

        for partition, ids in partitions.items():
            self._fetch_part(partition, ids, found, part_done)
        self.after(FETCH_S, done)

    def _fetch_part(self, partition: int, ids: list[int], found: dict[int, tuple[str, bytes]], done: Callable[[], None]) -> None:
        def taken(address: tuple[str, int] | None, reply: Any) -> None:
            if reply is None:
                self._xiu_leaders.pop(partition, None)
                done()
                return
            records = iter(split(reply.batch, sum(not code for code in reply.codes)))
            answers = [(code, b"" if code else next(records)) for code in reply.codes]
            if any(code == NotYet.code for code, _ in answers):
                self._xiu_leaders.pop(partition, None)
            found.update(zip(ids, answers, strict=False))
            done()

        def ask(address: tuple[str, int] | None) -> None:
            if address is None:
                done()
            else:
                unary(self, address, "Fetch", xiu_pb2.FetchRequest(msg_ids=ids), CALL_S, lambda reply: taken(address, reply))

        there = self._xiu_leaders.get(partition)
        if there is not None:
            ask(there)
        else:
            self._find_xiu(partition, ask)

    def _find_xiu(self, partition: int, found: Callable[[tuple[str, int] | None], None]) -> None:
        nodes = [node for node in self.view.running("xiu") if node.partition == partition]
        self._asked_xius += 1
        nodes = nodes[self._asked_xius % len(nodes) :] + nodes[: self._asked_xius % len(nodes)] if nodes else []

        def ask(at: int) -> None:
            if at >= len(nodes):
                found(None)
                return
            address = nodes[at].address
            unary(self, address, "Position", xiu_pb2.PositionRequest(), CALL_S, lambda reply: said(at, address, reply))

        def said(at: int, address: tuple[str, int], reply: Any) -> None:
            leader = (address if reply.epoch else address_of(reply.leader)) if reply is not None else None
            if leader is None:
                ask(at + 1)
            else:
                self._xiu_leaders[partition] = leader
                found(leader)

        ask(0)

    # --- the core of mail

    def deadline(self) -> float:
        """See `Process`."""
        return min(super().deadline(), self.mail.next_deadline())

    def tick(self) -> None:
        """See `Process`."""
        now = self.world.now
        if super().deadline() <= now:
            super().tick()
        if self.mail.next_deadline() <= now:
            self.mail_step(TICK)

    def mail_step(self, event: ev.Event) -> None:
        """Take an event; what it leads to at once is taken behind it."""
        self._events.append(event)
        if self._stepping or not self.alive:
            return
        self._stepping = True
        try:
            while self._events:
                for effect in self.mail.step(self._events.pop(0), self.world.now):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case dv.Deliver(gateway, chunks):
                self.world.mail.delivered(self, gateway, chunks)
                if self._want(gateway):
                    self._gateways[gateway].send(chunks)
                else:
                    self._events.append(dv.StreamBroken(gateway))
            case dv.AskWritten(gateway, lanes):
                if gateway in self._gateways and self._gateways[gateway].ready:
                    self._gateways[gateway].ask(lanes)
            case dv.ConfirmNotices():
                self._confirmed.append(effect)
            case dv.FetchMessages():
                self._fetch(effect)
            case ev.AskPi():
                self._ask_pi(effect)
            case ev.ConnectPis(partitions):
                self._connect_pis(partitions)
            case ev.OpenStreams(gateways):
                for gateway in gateways:
                    self._want(gateway)
            case ev.KeepStreams(gateways):
                for gateway in [gateway for gateway in self._gateways if gateway not in gateways]:
                    self._gateways.pop(gateway).close()
