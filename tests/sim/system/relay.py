"""A relay with its deliveries: production cores, and the twin of `relay.mail_service.MailService` between them.

What the twin does that is a decision, and not carrying, is marked `decides`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import relay.delivery.events as de
from cluster.membership.devices import LoginPolicy
from cluster.rpc.xiu_fetcher import CALL_S
from pixiu.errors import NotLeader, NotYet, WrongPartition
from pixiu.ids import msg_partition
from pixiu.wire.inbox_operations import encode_acknowledges, encode_add_device, encode_opens
from pixiu.wire.record import split
from pixiu.wire.v1 import delivery_pb2, pi_pb2, xiu_pb2
from relay.delivery.limits import Limits
from relay.gateway_streams import Outbox
from relay.mail_answers import ReadItem, listings_of, numbers_of, read_requests, reads_of, records_of
from relay.mail_devices import Place, TrackedDevices
from relay.mail_service import ASK_PAUSE_S, FETCH_S, SAVE_POLL_S, SAVE_S, notices_of
from relay.mail_stores import STALL_S
from tests.sim.cluster.stores import RelayProcess
from tests.sim.cluster.watched import Watched
from tests.sim.system.base import Served, unary
from tests.sim.system.leader import BACKOFF_S, LeaderLink, address_of
from tests.sim.system.streams import Stream

HEARTBEAT_S: Final = 1.5
"""Everybody who takes mail is looked at so often; 5 s in service."""
SETTLE_S: Final = 2.0
MAX_BACKOFF_S: Final = 2.0
CHECK_S: Final = 1.0
LIMITS: Final = Limits(
    opening=4, fetching=8, fetch_entries=16, max_sessions=100, max_remembered=100, record_bytes=200,
    call_timeout_s=0.8, place_timeout_s=3.0, pause_s=0.05, max_pause_s=0.5, resend_s=1.5, max_resend_s=4.0,
    hold_s=3.0, poll_s=5.0, settle_s=1.5, acknowledge_batch=8, acknowledge_calls=2, fenced_pause_s=1.0,
)  # fmt: skip
"""Shorter and smaller than in service, so that more happens in a run."""


class WatchedTakers(Watched, TrackedDevices):
    """Relay data, watched, which notes who takes mail."""

    def __init__(self, is_true: Any, changed: Callable[[], None], policy: LoginPolicy) -> None:
        TrackedDevices.__init__(self, changed, policy=policy)
        self.is_true, self.highest, self.watching = is_true, {}, True


class _PiLink:
    """The twin of a partition of `relay.mail_stores.PiLinks`: every question is answered."""

    def __init__(self, relay: SystemRelay, partition: int) -> None:
        self._relay = relay
        self._unanswered: dict[int, tuple[float, Callable[[Any], None]]] = {}
        self._request = 0
        self._link = LeaderLink(relay, "pi", partition, up=lambda epoch: None, reply=self._replied, down=self._down)
        self._check()

    def ask(self, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Callable[[Any], None]) -> None:
        if not self._link.open:
            answered(None)
            return
        self._request += 1
        self._unanswered[self._request] = self._relay.world.now, answered
        self._link.send(pi_pb2.PiRequest(request=self._request, operations=operations, reads=reads))

    def _check(self) -> None:
        if self._unanswered and next(iter(self._unanswered.values()))[0] + STALL_S <= self._relay.world.now:
            self._link.leave()
        self._relay.after(CHECK_S, self._check)

    def _replied(self, reply: pi_pb2.PiReply) -> None:
        _, answered = self._unanswered.pop(reply.request, (0.0, None))
        if answered is None:
            return
        if reply.code in (NotLeader.code, WrongPartition.code):
            self._link.leave()
        answered(None if reply.code else reply)

    def _down(self, reason: str) -> None:
        unanswered, self._unanswered = self._unanswered, {}
        for _, answered in unanswered.values():
            answered(None)


class _GatewayStream:
    """The twin of a stream of `relay.gateway_streams.GatewayStreams`."""

    def __init__(self, relay: SystemRelay, gateway: int) -> None:
        self._relay, self.gateway = relay, gateway
        self.ready = self.over = False
        self.outbox = Outbox(relay.place_of, gateway)
        self._stream: Stream | None = None
        self._failures = 0
        self._connect()

    def send(self, chunks: Sequence[bytes]) -> None:
        """Envelopes, in order."""
        self.outbox.add(chunks)
        while self.outbox:
            parcel = self.outbox.take()
            self.outbox.sent(parcel)
            assert self._stream is not None
            data = b"".join(parcel.chunks)
            self._stream.send(delivery_pb2.DeliveryBatch(devices=parcel.devices, deliveries=data, count=len(parcel.chunks)))

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
            self._relay.stream_ready(self.gateway)
        else:
            self._relay.acknowledged(reply)

    def _lost(self) -> None:
        served, self.ready, self._stream = self.ready, False, None
        if served and not self.over:
            self._relay.deliver_step(de.StreamBroken(self.gateway))
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
        self._events: list[de.Event] = []
        self._stepping = False
        self._pis: list[_PiLink] = []
        self._gateways: dict[int, _GatewayStream] = {}
        self._at: frozenset[int] = frozenset()
        self._settled_at = 0.0
        self._asking = False
        self._confirmed: list[de.ConfirmNotices] = []
        self._peers = 0
        self._xiu_leaders: dict[int, tuple[str, int]] = {}
        self._asked_xius = 0
        self._unsaved: dict[int, int] = {}
        self.after(HEARTBEAT_S, self._heartbeat)

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
        if self.core.state is not before and hasattr(self, "mail_devices"):
            self._look_around()
        return found

    def _look_around(self) -> None:
        """Decides: who owns whom among which relays, and which gateways are gone."""
        while len(self._pis) < self.view.count("pi") and self.view.of_role("pi"):
            self._pis.append(_PiLink(self, len(self._pis)))
        gateways = frozenset(self.core.reachable_gateways())
        owners = self.core.mail_owners() if self._pis and not self._drains else ()
        changed = self.mail_devices.set_owners(owners, self.place.partition, self.core.partitions)
        for gateway in sorted(self._at - gateways):
            self.deliver_step(de.GatewayLost(gateway))
        if changed or gateways != self._at:
            self._at = gateways
            self._settled_at = self.world.now + SETTLE_S
            self._look(self.mail_devices.users(), heartbeat=True)

    _drains = False

    def drain(self, done: Callable[[], None]) -> None:
        """See `Served`: deliver nothing more, and save what devices have acknowledged."""
        self._drains = True
        self.deliver_step(de.Stopping())
        self._look_around()
        end = self.world.now + SAVE_S

        def poll() -> None:
            if self.deliveries.unsaved and self.world.now < end:
                self.after(SAVE_POLL_S, poll)
            else:
                self.after(0.2, done)

        poll()

    def _takers_changed(self) -> None:
        self._noted = True

    def end_of_turn(self) -> None:
        """See `Process`."""
        super().end_of_turn()
        if self._noted:
            self._noted = False
            self._look(self.takers.take())

    def _heartbeat(self) -> None:
        wanted = set(self.deliveries.gateways())
        for gateway in [gateway for gateway in self._gateways if gateway not in wanted]:
            self._gateways.pop(gateway).close()
        self._look(self.mail_devices.users(), heartbeat=True)
        self.after(HEARTBEAT_S, self._heartbeat)

    def _look(self, uins: Sequence[int], *, heartbeat: bool = False) -> None:
        """Decides: in which order deliveries hear of logouts, logins and heartbeats."""
        looked = self.mail_devices.look(uins, self.world.now, self.deliveries.sessions if heartbeat else None)
        if looked.logged_out:
            self.deliver_step(de.LoggedOut(looked.logged_out))
        self._logged_in(de.LoggedIn(looked.logged_in, self.world.now < self._settled_at))
        self._logged_in(de.StillThere(looked.still_there))
        self._ask_numbers()

    def _logged_in(self, event: de.LoggedIn | de.StillThere) -> None:
        """Decides: a session that opens finds a stream that is ready, or one that is known not to be."""
        if not event.logins:
            return
        self.deliver_step(event)
        for gateway in dict.fromkeys(login.gateway for login in event.logins):
            if not self._want(gateway) and self.deliveries.sendable(gateway, self.world.now):
                self.deliver_step(de.StreamBroken(gateway))

    # --- gateways

    def _want(self, gateway: int) -> bool:
        stream = self._gateways.get(gateway)
        if stream is None:
            stream = self._gateways[gateway] = _GatewayStream(self, gateway)
        return stream.ready

    def place_of(self, uin: int, number: int) -> Place | None:
        """Where a device is."""
        return self.mail_devices.place(uin, number)

    def stream_ready(self, gateway: int) -> None:
        """Decides: what was sent before this stream was there is lost."""
        if self.deliveries.sendable(gateway, self.world.now):
            self.deliver_step(de.StreamBroken(gateway))
        self.deliver_step(de.StreamReady(gateway))

    def acknowledged(self, reply: delivery_pb2.DeliveryReply) -> None:
        """Clients have got something."""
        said = [de.Acknowledgement(a.uin, a.device, a.session, a.lane, a.up_to, a.bits) for a in reply.acknowledgements]
        self.deliver_step(de.Acknowledged(said))

    # --- proxies

    def _notify(self, stream: Stream) -> None:
        self._peers += 1
        peer = self._peers

        def take(batch: delivery_pb2.NoticeBatch) -> None:
            notices = notices_of(batch)
            assert notices is not None, "a proxy sends a malformed batch of notices"
            self.deliver_step(de.Notified(peer, batch.number, notices))
            confirmed, self._confirmed = self._confirmed, []
            for each in confirmed:
                stream.reply(delivery_pb2.NoticesTaken(number=each.number, elsewhere=each.elsewhere))

        stream.take = take

    # --- Pi

    def _ask_pi(self, partition: int, operations: bytes, reads: Sequence[pi_pb2.PiRead], answered: Callable[[Any], None]) -> None:
        if partition >= len(self._pis):
            answered(None)
        else:
            self._pis[partition].ask(operations, reads, answered)

    def _partition(self, uin: int) -> int:
        return uin % max(len(self._pis), 1)

    def _ask_numbers(self) -> None:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for uin, device in self.mail_devices.to_number(self.world.now):
            wanted.setdefault(self._partition(uin), []).append((uin, device))
        for partition, items in wanted.items():
            operations = b"".join(encode_add_device(uin, device) for uin, device in items)
            self._ask_pi(partition, operations, (), partial(self._numbered, items))
        if self.mail_devices.unnumbered and not self._asking:
            self._asking = True
            self.after(ASK_PAUSE_S, self._ask_again)

    def _ask_again(self) -> None:
        self._asking = False
        self._ask_numbers()

    def _numbered(self, items: Sequence[tuple[int, int]], reply: Any) -> None:
        now = self.world.now
        answers = zip(items, numbers_of(len(items), reply), strict=True)
        logins = [self.mail_devices.numbered(uin, device, answer, now) for (uin, device), answer in answers]
        found = [login for login in logins if login is not None]
        self._logged_in(de.LoggedIn(found, now < self._settled_at))

    def _by_partition(self, items: Iterable[Any], uin: Callable[[Any], int]) -> dict[int, list[Any]]:
        wanted: dict[int, list[Any]] = {}
        for item in items:
            wanted.setdefault(self._partition(uin(item)), []).append(item)
        return wanted

    def _open(self, effect: de.OpenSessions) -> None:
        for partition, items in self._by_partition(effect.items, lambda asked: asked.uin).items():
            operations = encode_opens((asked.uin, asked.device) for asked in items)
            self._ask_pi(partition, operations, (), partial(self._opened, items))

    def _opened(self, items: Sequence[de.Asked], reply: Any) -> None:
        answers = list(zip(items, numbers_of(len(items), reply), strict=True))
        self._forget_refused(answers)
        self.deliver_step(de.Opened(answers))

    def _read(self, effect: de.ReadInboxes) -> None:
        for partition, all_items in self._by_partition(effect.items, lambda item: item[0].uin).items():
            for items in read_requests(all_items):
                self._ask_pi(partition, b"", reads_of(items), partial(self._listed, items))

    def _listed(self, items: Sequence[ReadItem], reply: Any) -> None:
        answers = listings_of(items, reply)
        self._forget_refused(answers)
        self.deliver_step(de.Listed(answers))

    def _forget_refused(self, answers: Sequence[tuple[de.Asked, object]]) -> None:
        """Decides: a device that Pi does not know is asked about again."""
        for asked, answer in answers:
            if answer is de.Failure.REFUSED:
                self.mail_devices.forget(asked.uin, asked.device)

    def _save(self, effect: de.SaveCursors) -> None:
        """Decides: one answer of what several partitions say."""
        results: list[de.Failure | None] = [de.Failure.LATER] * len(effect.items)
        wanted = self._by_partition(range(len(effect.items)), lambda index: effect.items[index].uin)
        left = [len(wanted)]

        def saved(indexes: Sequence[int], reply: Any) -> None:
            for index, answer in zip(indexes, numbers_of(len(indexes), reply), strict=True):
                results[index] = answer if isinstance(answer, de.Failure) else None
            left[0] -= 1
            if not left[0]:
                self.deliver_step(de.Saved(effect.number, results))

        for partition, indexes in wanted.items():
            items = [effect.items[index] for index in indexes]
            operations = encode_acknowledges((i.uin, i.device, i.session, i.lane, i.up_to, i.bits) for i in items)
            self._ask_pi(partition, operations, (), partial(saved, indexes))

    # --- Xiu: the twin of `cluster.rpc.xiu_fetcher.Fetcher`

    def _fetch(self, effect: de.FetchMessages) -> None:
        partitions: dict[int, list[int]] = {}
        for msg_id in dict.fromkeys(each for _, ids in effect.items for each in ids):
            partitions.setdefault(msg_partition(msg_id), []).append(msg_id)
        found: dict[int, tuple[str, bytes]] = {}
        left = [len(partitions)]
        over = [False]

        def done() -> None:
            if not over[0]:
                over[0] = True
                self.deliver_step(de.Fetched(records_of(effect.items, found)))

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

    # --- the core of deliveries

    def deadline(self) -> float | None:
        """See `Process`."""
        due = super().deadline()
        mine = self.deliveries.next_deadline()
        return mine if due is None else min(due, mine)

    def tick(self) -> None:
        """See `Process`."""
        now = self.world.now
        due = super().deadline()
        if due is not None and due <= now:
            super().tick()
        if self.deliveries.next_deadline() <= now:
            self.deliver_step(de.Tick())

    def deliver_step(self, event: de.Event) -> None:
        """Take an event; what it leads to at once is taken behind it."""
        self._events.append(event)
        if self._stepping or not self.alive:
            return
        self._stepping = True
        try:
            while self._events:
                for effect in self.deliveries.step(self._events.pop(0), self.world.now):
                    self._perform(effect)
        finally:
            self._stepping = False

    def _perform(self, effect: de.Effect) -> None:
        match effect:
            case de.Deliver(gateway, chunks):
                self.world.mail.delivered(self, gateway, chunks)
                if self._want(gateway):
                    self._gateways[gateway].send(chunks)
                else:
                    self._events.append(de.StreamBroken(gateway))
            case de.ConfirmNotices():
                self._confirmed.append(effect)
            case de.OpenSessions():
                self._open(effect)
            case de.ReadInboxes():
                self._read(effect)
            case de.FetchMessages():
                self._fetch(effect)
            case de.SaveCursors():
                self._save(effect)
