"""A relay's mail: chooses and checks the devices it delivers to, and asks Pi, with one request per partition. Pure.

    relay data ─▶ MailDevices ─▶ logins ┐              ┌ AskPi: sessions, entries, cursors, numbers of devices
    proxies' notices ───────────────────┼─ Deliveries ─┼ FetchMessages
    gateways' acknowledgements ─────────┘              └ Deliver

A cluster without Pi or Xiu delivers no mail: the relay then owns no users.

Source: PiXiu §6.4; docs/delivery.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from cluster.core.contract import NEVER, TICK, EndOfTurn, EventTable, Tick
from pixiu.placement.split import SplitPartitions
from pixiu.wire.inbox_operations import encode_acknowledges, encode_add_device, encode_opens
from pixiu.wire.v1 import pi_pb2
from relay.delivery import events as dv
from relay.delivery.sessions import Deliveries
from relay.mail import events as ev
from relay.mail.answers import ReadItem, listings_of, numbers_of, read_requests, reads_of
from relay.mail.devices import MailDevices

HEARTBEAT_S: Final = 5.0
"""Interval at which all users who take mail are checked, seconds: those without a session get one."""
WALK_USERS: Final = 1000
"""Number of them checked in one turn of the event loop."""
WALK_PAUSE_S: Final = 0.01
ASK_PAUSE_S: Final = 0.25
"""Interval at which Pi is asked again for missing numbers of devices, seconds."""
SETTLE_S: Final = 5.0
"""Time after a change of owners or gateways for which new logins count as taken over from other relays, seconds."""

Answered = Callable[[pi_pb2.PiReply | None, float, list[ev.Effect]], None]
Again = Callable[[list[ev.Effect]], None]
"""Repeats the request at the current server of these users."""
ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Cursors:
    """Cursors to be saved by Pi, with one request for each partition concerned."""

    call: dv.SaveCursors
    results: list[dv.Failure | None]
    unanswered: int


class MailCore(EventTable[ev.Effect]):
    """Decides; see the module. `step` never raises on input from the network.

    Args:
        devices: that take mail here.
        deliveries: to the users whom `devices` owns.
    """

    def __init__(self, devices: MailDevices, deliveries: Deliveries) -> None:
        super().__init__()
        self.devices, self.deliveries = devices, deliveries
        self._cluster: ev.ClusterChanged | None = None
        self._pis = 0
        self._split = SplitPartitions()
        """Of Pi: parents are split one by one before the layout shows it."""
        self._gateways: frozenset[int] = frozenset()
        """Endpoints of reachable gateways."""
        self._ready: set[int] = set()
        """Gateways whose streams deliver."""
        self._stopping = False
        self._asked: dict[int, tuple[int, Answered, Again]] = {}
        """Number of a question → (partition, handler of the answer, repeat); every question is answered."""
        self._number = 0
        self._to_walk: list[int] = []
        self._walk_began = self._settled_at = 0.0
        self._walk_due = self._ask_due = NEVER
        self.on(ev.ClusterChanged, self._on_cluster)
        self.on(ev.PiAnswered, self._on_pi_answered)
        self.on(dv.StreamReady, self._on_stream_ready)
        self.on(dv.StreamBroken, self._on_stream_broken)
        self.on(dv.Notified, self._deliver)
        self.on(dv.Acknowledged, self._deliver)
        self.on(dv.Fetched, self._deliver)
        self.on(dv.Stopping, self._on_stopping)
        self.on(EndOfTurn, self._on_end_of_turn)
        self.on(Tick, self._on_tick)

    def next_deadline(self) -> float:
        """Time at which a `Tick` is due, monotonic seconds; `NEVER` while nobody takes mail."""
        return min(self.deliveries.next_deadline(), self._walk_due, self._ask_due)

    def _on_tick(self, event: Tick, now: float, out: list[ev.Effect]) -> None:
        if self.deliveries.next_deadline() <= now:
            self._deliver(TICK, now, out)
        if self._ask_due <= now:
            self._ask_due = NEVER
            self._ask_numbers(now, out)
        if self._walk_due <= now:
            self._walk(now, out)

    def _deliver(self, event: dv.Event, now: float, out: list[ev.Effect]) -> None:
        """Give the deliveries an event; send their requests to Pi's partitions."""
        for effect in self.deliveries.step(event, now):
            if isinstance(effect, dv.OpenSessions):
                self._open(effect.items, out)
            elif isinstance(effect, dv.ReadInboxes):
                self._read(effect.items, out)
            elif isinstance(effect, dv.SaveCursors):
                self._save(effect, out)
            else:
                out.append(effect)

    # --- the cluster

    def _on_cluster(self, event: ev.ClusterChanged, now: float, out: list[ev.Effect]) -> None:
        self._cluster = event
        serving = bool(event.pis and event.xius) and not self._stopping
        self._pis = event.pis if serving or self._stopping else 0
        self._split.set_count(max(self._pis, 1))
        self._connect(out)
        changed = self.devices.set_owners(event.owners if serving else (), event.partition, event.partitions)
        for gateway in sorted(self._gateways - event.gateways):
            self._deliver(dv.GatewayLost(gateway), now, out)
        if changed or event.gateways != self._gateways:
            self._gateways = event.gateways
            self._settled_at = now + SETTLE_S
            self._to_walk, self._walk_began = self.devices.users(), now
            self._walk(now, out)

    def _connect(self, out: list[ev.Effect]) -> None:
        """Connect to all partitions, including children of split ones, which have the highest numbers."""
        out.append(ev.ConnectPis(max(self._split.all()) + 1 if self._pis else 0))

    def _on_stopping(self, event: dv.Stopping, now: float, out: list[ev.Effect]) -> None:
        """Stop deliveries, and own no users; acknowledgements of devices are still saved."""
        self._stopping = True
        self._deliver(event, now, out)
        if self._cluster is not None:
            self._on_cluster(self._cluster, now, out)

    def _on_stream_ready(self, event: dv.StreamReady, now: float, out: list[ev.Effect]) -> None:
        # Deliveries sent before this stream was there are lost.
        if self.deliveries.sendable(event.gateway, now):
            self._deliver(dv.StreamBroken(event.gateway), now, out)
        self._ready.add(event.gateway)
        self._deliver(event, now, out)

    def _on_stream_broken(self, event: dv.StreamBroken, now: float, out: list[ev.Effect]) -> None:
        self._ready.discard(event.gateway)
        self._deliver(event, now, out)

    # --- users who take mail

    def _on_end_of_turn(self, event: EndOfTurn, now: float, out: list[ev.Effect]) -> None:
        """Check users whose devices have changed in this turn."""
        if self.devices.devices.dirty:
            self._look(self.devices.devices.take(), now, out)

    def _walk(self, now: float, out: list[ev.Effect]) -> None:
        """Check all users, some in each turn of the loop; begin again every `HEARTBEAT_S`."""
        if not self._to_walk:
            wanted = set(self.deliveries.gateways())
            self._ready &= wanted
            out.append(ev.KeepStreams(wanted))
            self._to_walk, self._walk_began = self.devices.users(), now
        part, self._to_walk = self._to_walk[-WALK_USERS:], self._to_walk[:-WALK_USERS]
        self._look(part, now, out, heartbeat=True)
        soon = now + WALK_PAUSE_S
        self._walk_due = soon if self._to_walk else max(self._walk_began + HEARTBEAT_S, soon)

    def _look(self, uins: Sequence[int], now: float, out: list[ev.Effect], *, heartbeat: bool = False) -> None:
        looked = self.devices.look(uins, now, self.deliveries.sessions if heartbeat else None)
        if looked.logged_out:
            self._deliver(dv.LoggedOut(looked.logged_out), now, out)
        self._logged_in(dv.LoggedIn(looked.logged_in, now < self._settled_at), now, out)
        self._logged_in(dv.StillThere(looked.still_there), now, out)
        self._ask_numbers(now, out)

    def _logged_in(self, event: dv.LoggedIn | dv.StillThere, now: float, out: list[ev.Effect]) -> None:
        if not event.logins:
            return
        self._deliver(event, now, out)
        # A session that opens finds its stream ready, or held.
        missing = list(dict.fromkeys(login.gateway for login in event.logins if login.gateway not in self._ready))
        if missing:
            out.append(ev.OpenStreams(missing))
        for gateway in missing:
            if self.deliveries.sendable(gateway, now):
                self._deliver(dv.StreamBroken(gateway), now, out)

    # --- Pi

    def _by_partition(self, items: Iterable[ItemT], uin: Callable[[ItemT], int]) -> dict[int, list[ItemT]]:
        found: dict[int, list[ItemT]] = {}
        of = self._split.of
        for item in items:
            found.setdefault(of(uin(item)), []).append(item)
        return found

    def _ask(
        self,
        partition: int,
        answered: Answered,
        again: Again,
        out: list[ev.Effect],
        operations: bytes = b"",
        reads: Sequence[pi_pb2.PiRead] = (),
    ) -> None:
        self._number += 1
        self._asked[self._number] = partition, answered, again
        out.append(ev.AskPi(self._number, partition, operations, reads))

    def _on_pi_answered(self, event: ev.PiAnswered, now: float, out: list[ev.Effect]) -> None:
        asked = self._asked.pop(event.number, None)
        if asked is None:
            return
        partition, answered, again = asked
        if event.partitions and self._split.moved(partition, event.partitions):
            self._connect(out)
            again(out)
        else:
            answered(event.reply, now, out)

    def _ask_numbers(self, now: float, out: list[ev.Effect]) -> None:
        """Ask Pi for the numbers of new devices; again after a pause while some are missing."""
        self._ask_for(self.devices.to_number(now), out)
        if self.devices.unnumbered and self._ask_due == NEVER:
            self._ask_due = now + ASK_PAUSE_S

    def _ask_for(self, wanted: Iterable[tuple[int, int]], out: list[ev.Effect]) -> None:
        for partition, items in self._by_partition(wanted, lambda item: item[0]).items():
            operations = b"".join([encode_add_device(uin, device, self.devices.name(uin, device)) for uin, device in items])
            self._ask(partition, partial(self._numbered, items), partial(self._ask_for, items), out, operations)

    def _numbered(
        self, items: Sequence[tuple[int, int]], reply: pi_pb2.PiReply | None, now: float, out: list[ev.Effect]
    ) -> None:  # fmt: skip
        answers = zip(items, numbers_of(len(items), reply), strict=True)
        logins = [self.devices.numbered(uin, device, answer, now) for (uin, device), answer in answers]
        self._logged_in(dv.LoggedIn([login for login in logins if login is not None], now < self._settled_at), now, out)

    def _open(self, wanted: Sequence[dv.Asked], out: list[ev.Effect]) -> None:
        for partition, items in self._by_partition(wanted, lambda asked: asked.uin).items():
            operations = encode_opens((asked.uin, asked.device) for asked in items)
            self._ask(partition, partial(self._opened, items), partial(self._open, items), out, operations)

    def _opened(self, items: Sequence[dv.Asked], reply: pi_pb2.PiReply | None, now: float, out: list[ev.Effect]) -> None:
        answers = list(zip(items, numbers_of(len(items), reply), strict=True))
        self._forget_refused(answers)
        self._deliver(dv.Opened(answers), now, out)

    def _read(self, wanted: Sequence[ReadItem], out: list[ev.Effect]) -> None:
        for partition, all_items in self._by_partition(wanted, lambda item: item[0].uin).items():
            for items in read_requests(all_items):
                self._ask(partition, partial(self._listed, items), partial(self._read, items), out, reads=reads_of(items))

    def _listed(self, items: Sequence[ReadItem], reply: pi_pb2.PiReply | None, now: float, out: list[ev.Effect]) -> None:
        answers = listings_of(items, reply)
        self._forget_refused(answers)
        self._deliver(dv.Listed(answers), now, out)

    def _forget_refused(self, answers: Sequence[tuple[dv.Asked, object]]) -> None:
        for asked, answer in answers:
            if answer is dv.Failure.REFUSED:
                self.devices.forget(asked.uin, asked.device)

    def _save(self, effect: dv.SaveCursors, out: list[ev.Effect]) -> None:
        count = len(effect.items)
        cursors = _Cursors(effect, [dv.Failure.LATER] * count, 1)
        self._save_some(cursors, range(count), out)

    def _save_some(self, cursors: _Cursors, wanted: Iterable[int], out: list[ev.Effect]) -> None:
        """Send some of a call's cursors, with one request for each partition concerned; they replace one unanswered request."""
        items = cursors.call.items
        found = self._by_partition(wanted, lambda index: items[index].uin)
        cursors.unanswered += len(found) - 1
        for partition, indexes in found.items():
            operations = encode_acknowledges(
                (item.uin, item.device, item.session, item.lane, item.up_to, item.bits)
                for item in (items[index] for index in indexes)
            )
            again = partial(self._save_some, cursors, indexes)
            self._ask(partition, partial(self._saved, cursors, indexes), again, out, operations)

    def _saved(
        self, cursors: _Cursors, indexes: Sequence[int], reply: pi_pb2.PiReply | None, now: float, out: list[ev.Effect]
    ) -> None:  # fmt: skip
        """Take the answer to one request; the deliveries are informed when all partitions have answered."""
        for index, answer in zip(indexes, numbers_of(len(indexes), reply), strict=True):
            cursors.results[index] = answer if isinstance(answer, dv.Failure) else None
        cursors.unanswered -= 1
        if not cursors.unanswered:
            self._deliver(dv.Saved(cursors.call.number, cursors.results), now, out)
