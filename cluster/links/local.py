"""Links between the roles of one process: what one sends, the other's handler is called with at the end of the turn. Pure.

    send ─► queue of the pair ─► flush ─► `work`: the receiver's handler ─► its end of input ─► what it sent leaves, or waits here
                                            ▲                                                              │
                                            └─────────────────── one receiver after the other ◄────────────┘

A chain of roles is worked off in one call of `work`, without recursion: no handler is entered while another one runs.

Source: docs/links.md, "Inside a process".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

from cluster.links.api import LinkHandler, Outcome, PeerState
from cluster.links.datagrams.head import DatagramRefusal
from cluster.links.datagrams.heartbeat import MAX_ATTACHMENT_BYTES
from cluster.links.options import LinkOptions
from cluster.links.peer.outbox import INFINITY, ItemRun, Outbox, Settlement, close
from cluster.links.peer.sender import CONTROL_WAIT_S, KIND_CONTROL, KIND_RECORDS, Drop, Outputs
from cluster.links.refusals import Refusals
from cluster.links.stats import Counts, PeerStats
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import Quality
from pixiu.wire.record import LINK_LANES

MAX_BATCHES: Final = 64
"""Batches handed over in one call of `work`. Policy: the rest waits for the next iteration of the event loop, as with datagrams."""
PERFECT: Final = Quality(1.0, 1.0)
"""Quality of a peer in this process: it answers always, and at once."""
_WHERE: Final = "this process"

Delivery = tuple["LocalLink", list[Settlement], bool]
"""A batch that was handed over: its link, the parcels with a token in it, True if the handler took it."""
Run = Callable[..., object]
"""Calls a function with arguments in a role's context (`contextvars.Context.run`)."""


def directly(act: Callable[..., object], *arguments: object) -> object:
    """Call a function in the caller's context."""
    return act(*arguments)


class LocalHost(Protocol):
    """The shell of a role's links."""

    def take_local(self, now: float, most: int, done: list[Delivery]) -> None:
        """Call the port's `take` as received data is handled, then what wants the end of the input, then send what was queued
        meanwhile."""


class LocalLink:
    """The items of one role for another one that were not handed over yet."""

    __slots__ = ("boxes", "due", "got", "open", "receiver", "sender", "sent", "settled")

    def __init__(self, sender: LocalPort, receiver: LocalPort) -> None:
        self.sender, self.receiver = sender, receiver
        self.settled: list[tuple[int, bool]] = []
        """(token, all handled) of settled parcels, for the sender."""
        self.boxes = (Outbox(LINK_LANES, self.settled), Outbox(1, self.settled))
        """Items that wait: records, control."""
        self.due = False
        """True if something was flushed and waits for the receiver's turn."""
        self.open = False
        """True if the records, too, are due."""
        self.sent, self.got = sender.counts_of(receiver.id), receiver.counts_of(sender.id)

    def drop(self, reason: str, items: int) -> None:
        """Count dropped items."""
        if items:
            self.sent.queue_drops += items
            self.sender.dropped[reason] = self.sender.dropped.get(reason, 0) + items

    def clear(self, reason: str) -> None:
        """Drop everything."""
        for box in self.boxes:
            self.drop(reason, box.clear())
        self.due = self.open = False

    def drop_late(self, now: float, push_back_s: float) -> None:
        """Drop what waits for too long."""
        for box, longest_s in zip(self.boxes, (push_back_s, CONTROL_WAIT_S), strict=True):
            self.drop(Drop.PUSH_BACK, box.drop_older(now - longest_s))

    def waiting(self, found: list[tuple[Outbox, int]]) -> None:
        """Append the queues whose items are due, each with the number of its last one."""
        records, control = self.boxes
        if control.bytes:
            found.append((control, control.number))
        if self.open and records.bytes:
            found.append((records, records.number))


class LocalPort:
    """One role's end of its links to the other roles of the process.

    Args:
        refusals, dropped: counters, which the role's links to other processes may share.
        outputs: of the role's links; its `waited` is called whenever data is handed over.
    """

    def __init__(
        self,
        switch: LocalSwitch,
        id_: EndpointID,
        role: str,
        options: LinkOptions,
        handler: LinkHandler,
        layout_version: Callable[[], int],
        refusals: Refusals,
        dropped: dict[str, int],
        outputs: Outputs,
    ) -> None:
        self.switch, self.id, self.role, self.options, self.handler = switch, id_, role, options, handler
        self.layout_version, self.refusals, self.dropped, self.outputs = layout_version, refusals, dropped, outputs
        self.host: LocalHost | None = None
        self.run: Run = directly
        self.links: dict[EndpointID, LocalLink] = {}
        """By receiver."""
        self.queued: dict[EndpointID, LocalLink] = {}
        """Those with items that were not flushed, or wait for more."""
        self.incoming: dict[EndpointID, LocalLink] = {}
        """By sender: those with items that are due here, in the order of their turns."""
        self.beats: dict[tuple[EndpointID, bool], bytes] = {}
        """(sender, it is a reply) → the attachment of the newest heartbeat that was not handed over yet."""
        self.states: list[tuple[EndpointID, PeerState]] = []
        self.settled: dict[EndpointID, list[tuple[int, bool]]] = {}
        self.peers: dict[EndpointID, PeerState] = {}
        """Peers that are or were in this process."""
        self.attachments: dict[EndpointID, bytes] = {}
        self.beat_at = INFINITY
        self._counts: dict[EndpointID, Counts] = {}
        self.gone = Counts()
        """Counters of peers that are no more."""
        self.taken = 0
        """Batches that the last call of `take` handed over."""

    def counts_of(self, peer: EndpointID) -> Counts:
        """The counters of what is exchanged with a role."""
        return self._counts.setdefault(peer, Counts())

    # ---- peers ----------------------------------------------------------------------------------------------------------

    def set_peers(self, peers: Iterable[EndpointID], now: float) -> set[EndpointID]:
        """Set the peers. Returns those that are in this process, or were."""
        found, switch, before = set[EndpointID](), self.switch, self.peers
        self.peers = {}
        for id_ in peers:
            if id_ in before:
                self.peers[id_] = before[id_]
            elif id_ in switch.ports and id_ != self.id:
                self.peers[id_] = PeerState.ALIVE
                self.states.append((id_, PeerState.ALIVE))
                self._beat(id_)
            else:
                continue
            found.add(id_)
        for id_ in before:
            if id_ not in self.peers:
                self.attachments.pop(id_, None)
                self._fail(id_, Drop.PEER_REMOVED)
        for id_ in [id_ for id_ in self._counts if id_ not in self.peers and id_ not in switch.ports]:
            self.gone.add(self._counts.pop(id_))
        if self.peers and self.beat_at == INFINITY:
            self.beat_at = now + self.options.heartbeat_interval_ms / 1000
        switch.look(self)
        return found

    def set_attachment(self, peer: EndpointID, attachment: bytes) -> None:
        """Set the attachment of heartbeats to a peer."""
        if self.attachments.get(peer, b"") != attachment:
            self.attachments[peer] = attachment
            self._beat(peer)

    def poll(self, now: float) -> None:
        """Send the heartbeats that are due."""
        if now >= self.beat_at:
            self.beat_at = now + self.options.heartbeat_interval_ms / 1000 if self.peers else INFINITY
            for id_ in self.peers:
                self._beat(id_)

    def _beat(self, peer: EndpointID) -> None:
        other = self.switch.ports.get(peer)
        if other is not None:
            self.counts_of(peer).heartbeats_sent += 1
            other.beats[self.id, False] = self.attachments.get(peer, b"")
            self.switch.look(other)

    def _fail(self, peer: EndpointID, reason: str) -> None:
        link = self.links.get(peer)
        if link is not None:
            link.clear(reason)
            self.queued.pop(peer, None)
            link.receiver.incoming.pop(self.id, None)
            self.report(link)

    def peer_gone(self, peer: EndpointID) -> None:
        """Note that a role of this process has closed its links."""
        self._fail(peer, Drop.PEER_DEAD)
        self.links.pop(peer, None)
        self.beats.pop((peer, False), None)
        self.beats.pop((peer, True), None)
        if peer in self.peers:
            self.peers[peer] = PeerState.DEAD
            self.states.append((peer, PeerState.DEAD))
        self.switch.look(self)

    # ---- sending --------------------------------------------------------------------------------------------------------

    def send(self, to: EndpointID, kind: int, items: list[bytes], lane: int, token: int, now: float) -> bool:
        """Queue a parcel. Returns False if the receiver is not of this process."""
        link = self.links.get(to)
        if link is None:
            link = self._link_to(to)
            if link is None:
                if to not in self.peers:
                    return False
                self._refuse_dead(to, len(items), token)
                return True
        if not items:
            if token:
                self._settle(link, token, True)
            return True
        size, options = sum(map(len, items)), self.options
        if size > options.max_record_bytes and max(map(len, items)) > options.max_record_bytes:
            link.drop(Drop.TOO_LARGE, len(items))
            if token:
                self._settle(link, token, False)
            return True
        box = link.boxes[kind]
        box.put(ItemRun(items, size, Settlement(token) if token else None, now), lane)
        if box.bytes > options.max_queue_bytes:
            link.drop(Drop.QUEUE_FULL, box.overflow(options.max_queue_bytes))
            self.report(link)
        self.queued[to] = link
        return True

    def _link_to(self, to: EndpointID) -> LocalLink | None:
        other = self.switch.ports.get(to)
        if other is None or other is self or self.host is None:
            return None
        link = self.links[to] = LocalLink(self, other)
        return link

    def _refuse_dead(self, peer: EndpointID, items: int, token: int) -> None:
        self.counts_of(peer).queue_drops += items
        self.dropped[Drop.PEER_DEAD] = self.dropped.get(Drop.PEER_DEAD, 0) + items
        if token:
            self.settled.setdefault(peer, []).append((token, False))
            self.switch.look(self)

    def _settle(self, link: LocalLink, token: int, handled: bool) -> None:
        link.settled.append((token, handled))
        self.report(link)

    def report(self, link: LocalLink) -> None:
        """Have the outcomes of a link's parcels reported in this role's turn."""
        if link.settled:
            self.settled.setdefault(link.receiver.id, []).extend(link.settled)
            link.settled.clear()
            if self.host is not None:
                self.switch.ready[self.id] = self

    def flush(self, least: int) -> None:
        """Let queued data leave in the receivers' turns; fewer than `least` bytes of records wait for more."""
        queued, self.queued = self.queued, {}
        for id_, link in queued.items():
            records, control = link.boxes
            if records.bytes:
                if records.bytes >= least:
                    link.open = True
                elif not link.open:
                    self.queued[id_] = link
            if (link.open or control.bytes) and not link.due:
                link.due = True
                receiver = link.receiver
                receiver.incoming[self.id] = link
                if receiver.host is not None:
                    self.switch.ready[receiver.id] = receiver

    # ---- handing over ---------------------------------------------------------------------------------------------------

    def take(self, now: float, most: int, done: list[Delivery]) -> None:
        """Call the handler with what is due, at most `most` batches. Appends those with tokens to `done`."""
        if self.beats:
            self._take_beats(now)
        incoming, taken = self.incoming, 0
        while incoming and taken < most:
            # Each sender in turn, so that none waits for all of another one's data.
            sender = next(iter(incoming))
            link = incoming.pop(sender)
            records, control = link.boxes
            if control.bytes:
                self._hand_over(link, KIND_CONTROL, control, now, done)
            elif link.open and records.bytes:
                self._hand_over(link, KIND_RECORDS, records, now, done)
            taken += 1
            if not records.bytes:
                link.open = False
            if control.bytes or link.open:
                incoming[sender] = link
            else:
                link.due = False
        self.taken = taken
        if self.states or self.settled:
            self.take_reports(now)

    def _take_beats(self, now: float) -> None:
        beats, self.beats = self.beats, {}
        for (sender, reply), attachment in beats.items():
            self.counts_of(sender).heartbeats_received += 1
            answer = b""
            try:
                answer = self.handler.on_heartbeat(sender, reply, attachment)
            except Exception as error:
                self._raised(sender, error, now)
            other = self.switch.ports.get(sender)
            if other is not None and not reply:
                other.beats[self.id, True] = answer if len(answer) <= MAX_ATTACHMENT_BYTES else b""
                self.switch.look(other)

    def _hand_over(self, link: LocalLink, kind: int, box: Outbox, now: float, done: list[Delivery]) -> None:
        items, size, settlements, _, _ = box.take(self.options.loopback_mtu_bytes)
        link.sender.outputs.waited(now - box.since)
        count, sent, got, sender = len(items), link.sent, link.got, link.sender.id
        sent.local_batches_sent += 1
        sent.local_bytes_sent += size
        got.local_batches_received += 1
        got.local_bytes_received += size
        outcome, refusal, raised = Outcome.MALFORMED, DatagramRefusal.HANDLER_RAISED, ""
        try:
            if kind == KIND_RECORDS:
                sent.records_sent += count
                data = items[0] if count == 1 else b"".join(items)
                outcome = self.handler.on_records(sender, data, 0, size, count)
                refusal = DatagramRefusal.MALFORMED_RECORDS
            else:
                sent.control_sent += count
                outcome = self.handler.on_control(sender, items)
                refusal = DatagramRefusal.MALFORMED_CONTROL
        except Exception as error:
            # A handler must not raise; if it does, the batch is not handled, and all others are.
            raised = type(error).__name__
        finally:
            handled = outcome is Outcome.TAKEN or (kind == KIND_CONTROL and outcome is Outcome.ANSWERED)
            if settlements:
                done.append((link, settlements, handled))
        if handled:
            if kind == KIND_RECORDS:
                got.records_received += count
            else:
                got.control_received += count
            return
        sent.sent_lost += count
        self.refusals.refuse(
            DatagramRefusal.NOT_TAKEN if outcome is Outcome.NOT_TAKEN else refusal, _WHERE, now, peer=sender, raised=raised
        )

    def take_reports(self, now: float) -> None:
        """Report changed states and outcomes of parcels to the handler."""
        if self.states:
            states, self.states = self.states, []
            for id_, state in states:
                try:
                    self.handler.on_peer_state(id_, state)
                except Exception as error:
                    self._raised(id_, error, now)
        if self.settled:
            settled, self.settled = self.settled, {}
            for id_, tokens in settled.items():
                try:
                    self.handler.on_settled(id_, tokens)
                except Exception as error:
                    self._raised(id_, error, now)

    def _raised(self, peer: EndpointID, error: Exception, now: float) -> None:
        self.refusals.refuse(DatagramRefusal.HANDLER_RAISED, _WHERE, now, peer=peer, raised=type(error).__name__)

    # ---- counters -------------------------------------------------------------------------------------------------------

    def stats(self) -> list[tuple[EndpointID, PeerStats]]:
        """Copies of the counters of each role of this process that something was exchanged with."""
        found = []
        for id_, counts in self._counts.items():
            other, link, copy = self.switch.ports.get(id_), self.links.get(id_), Counts()
            copy.add(counts)
            queued = sum(box.bytes for box in link.boxes) if link is not None else 0
            found.append(
                (
                    id_,
                    PeerStats(
                        role=other.role if other is not None else "",
                        state=self.peers.get(id_, PeerState.UNKNOWN),
                        counts=copy,
                        rtt_us=0,
                        window_bytes=self.options.max_queue_bytes,
                        in_flight_bytes=0,
                        queued_bytes=queued,
                    ),
                )
            )
        return found


class LocalSwitch:
    """The roles of one process by their endpoints, and their turns. Each role's `LinkCore` has a port here."""

    def __init__(self) -> None:
        self.ports: dict[EndpointID, LocalPort] = {}
        self.ready: dict[EndpointID, LocalPort] = {}
        """Ports with input, in the order of their turns."""
        self._owed: list[tuple[list[tuple[Outbox, int]], list[Delivery]]] = []
        """Outcomes that wait: the queues, each with its last number, that must be empty up to it; and the deliveries."""
        self.working = False
        """True while `work` runs."""
        self.continues = False
        """True if the shell will call `work` again by itself."""

    def attach(self, port: LocalPort, host: LocalHost, run: Run = directly) -> None:
        """Open a role's port: from now on what others of this process send to it comes here."""
        port.host, port.run = host, run
        self.ports[port.id] = port

    def detach(self, port: LocalPort, now: float) -> None:
        """Close a role's port: it is dead for the others, and what was not handed over settles as not handled."""
        if self.ports.pop(port.id, None) is None:
            return
        self.ready.pop(port.id, None)
        for link in port.links.values():
            link.clear(Drop.PEER_REMOVED)
            link.receiver.incoming.pop(port.id, None)
            port.report(link)
        for other in self.ports.values():
            other.peer_gone(port.id)
        for _, done in self._owed:
            for link, settlements, _ in done:
                if link.sender is port:
                    for settlement in settlements:
                        close(settlement, False, link.settled)
                    settlements.clear()
                    port.report(link)
        self._settle()
        port.host, port.beat_at = None, INFINITY
        port.take_reports(now)

    def look(self, port: LocalPort) -> None:
        """Give a port a turn if it has input."""
        if port.host is not None and (port.incoming or port.beats or port.states or port.settled):
            self.ready[port.id] = port

    def waits(self) -> bool:
        """Return True if `work` has something to do."""
        return bool(self.ready) and not self.working

    def work(self, now: float) -> None:
        """Give turns to all ports with input, at most `MAX_BATCHES` batches. Does nothing while it runs already."""
        if self.working:
            return
        self.working = True
        left, ready = MAX_BATCHES, self.ready
        try:
            while ready and left > 0:
                port = ready.pop(next(iter(ready)))
                left -= max(self._turn(port, now, left), 1)
        finally:
            self.working = False
        for port in list(ready.values()):
            for link in list(port.incoming.values()):
                link.drop_late(now, link.sender.options.push_back_ms / 1000)
                link.sender.report(link)

    def _turn(self, port: LocalPort, now: float, most: int) -> int:
        done: list[Delivery] = []
        port.taken = 0
        try:
            if port.host is not None:
                port.run(port.host.take_local, now, most, done)
        finally:
            if port.incoming or port.beats or port.states or port.settled:
                self.look(port)
            if done:
                # As an acknowledgement, an outcome leaves after all that the receiver has passed on.
                waits: list[tuple[Outbox, int]] = []
                for link in port.links.values():
                    if link.due:
                        link.waiting(waits)
                self._owed.append((waits, done))
            if self._owed:
                self._settle()
        return port.taken

    def _settle(self) -> None:
        owed, self._owed = self._owed, []
        for waits, done in owed:
            while waits:
                box, number = waits[-1]
                if box.bytes and box.first_number() <= number:
                    break
                waits.pop()
            if waits:
                self._owed.append((waits, done))
                continue
            for link, settlements, handled in done:
                for settlement in settlements:
                    close(settlement, handled, link.settled)
                link.sender.report(link)
