"""The pure core of all links of one process: takes datagrams, frames, parcels and the time; decides what to send.

A turn of the shell:  receive … receive  ─►  (the handler runs)  ─►  flush: data leaves  ─►  acknowledge handled data

so that an acknowledgement means "handled and passed on". The core calls the `LinkHandler` and appends to `outputs`; it does no I/O.

Source: docs/links.md, docs/promises.md, "Failure rules".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from cluster.links.api import LinkHandler, Outcome, Peer, PeerState
from cluster.links.datagrams import acknowledgement, heartbeat
from cluster.links.datagrams.fragments import Reassembly
from cluster.links.datagrams.head import (
    ACKNOWLEDGEMENT,
    FLAG_ANY_DESTINATION,
    FLAG_STREAM,
    FLAG_URGENT,
    HEAD_SIZE,
    HEARTBEAT,
    RECORD_FRAGMENT,
    RECORDS,
    Codec,
    DatagramRefusal,
    FieldsOfHead,
    split_control,
)
from cluster.links.datagrams.sequence import Tracker
from cluster.links.options import LinkOptions
from cluster.links.peer.liveness import Event, Liveness
from cluster.links.peer.outbox import INFINITY
from cluster.links.peer.peer_link import Link, stats_of
from cluster.links.peer.receiver import ACK_INTERVAL_S, Receiver, Shares
from cluster.links.peer.schedule import Schedule
from cluster.links.peer.sender import Address, Drop, Outputs, Sender
from cluster.links.peer.window import OVERHEAD_BYTES, VOID_S
from cluster.links.refusals import Refusals, no_warning
from cluster.links.stats import Counts, LinkStats, PeerStats
from cluster.trust.key_ring import ROLES, TAG_SIZE, KeyRing
from pixiu.errors import InvalidArgument
from pixiu.ids import EndpointID
from pixiu.placement.link_quality import UNMEASURED, Quality

MAX_SENDERS: Final = 4096
"""Senders known in addition to the peers of the view; beyond this the least recently heard are forgotten, a sixteenth at a time."""
REPEAT_S: Final = 5.0
"""Time after a sender's last data during which its heartbeats are also answered with an acknowledgement, seconds."""
MIN_DELAY_S: Final = 0.001
"""Shortest time after which the shell wakes the core, seconds."""

HOLD_S: Final = 0.02
"""Longest wait of records that their sender marked with `more`, seconds. Source: docs/links.md, "Datagrams and streams"."""
HELD_BYTES: Final = 64 << 10
"""Bytes for one peer at which waiting records leave at once."""

_OF_RECORDS: Final = frozenset((RECORDS, RECORD_FRAGMENT))


def _name(address: Address | None) -> str:
    return "stream" if address is None else f"{address[0]}:{address[1]}"


class LinkCore:
    """The links of one process. `now` is monotonic seconds everywhere."""

    def __init__(
        self,
        endpoint: EndpointID,
        options: LinkOptions,
        handler: LinkHandler,
        *,
        layout_version: Callable[[], int] = lambda: 0,
        on_warning: Callable[..., None] = no_warning,
        knows: Callable[[EndpointID], bool] = lambda _id: True,
        ring: KeyRing | None = None,
        role: str = "",
    ) -> None:
        """Create the core of a process's links.

        `knows`: returns True if a sender that is not a peer belongs to the cluster; a stranger's data is refused without an answer.
        `ring`: keys of datagrams, for a process of the role `role`.

        Raises `InvalidArgument`.
        """
        self._knows = knows
        largest = max(options.stream_frame_bytes, options.max_record_bytes + 4) + HEAD_SIZE + TAG_SIZE
        self.max_datagram_bytes = max(options.mtu_bytes, options.loopback_mtu_bytes)
        self.codec = Codec(endpoint, self.max_datagram_bytes, largest, ring, role)
        self.endpoint = endpoint
        self.outputs = Outputs()
        self._shares = Shares(options.receive_buffer_bytes)
        self._reassembly = Reassembly()
        self.refusals = Refusals(on_warning)
        self.dropped: dict[str, int] = {}
        self._options = options
        self._handler = handler
        self._layout_version = layout_version
        self._links: dict[int, Link] = {}
        self._gone = Counts()
        self._first_sequence = 1
        self._counter = 0
        self._pending: dict[Receiver, Link] = {}
        self._busy: dict[int, Link] = {}
        self._changed: dict[int, Link] = {}
        self._orphans: list[tuple[EndpointID, int]] = []
        self._states: list[tuple[EndpointID, PeerState]] = []
        self._wake = INFINITY
        self.urgent_came = False
        """True if something urgent has arrived since the owner last looked."""
        self._held_until = -INFINITY
        """Time until which records wait for more; -infinity: they do not wait."""
        self._schedule = Schedule(options.heartbeat_interval_ms / 1000)

    def receive_buffer_given(self, size: int) -> None:
        """Set the buffer size that the kernel granted to the socket; windows are computed from it."""
        self._shares.receive_buffer_bytes = size

    @property
    def receive_buffer_bytes(self) -> int:
        """Buffer size from which windows are computed."""
        return self._shares.receive_buffer_bytes

    def set_peers(self, peers: Mapping[EndpointID, tuple[Peer, Address | None]], now: float) -> None:
        """Set the peers to heartbeat and send to, each with its address (None while its name is being resolved)."""
        for link in list(self._links.values()):
            if link.peer is not None and link.id not in peers:
                link.peer = None
                link.heartbeat_at = INFINITY
                link.attachment = b""
                link.liveness = Liveness(self._options.suspect_after, self._options.dead_after)
                self._fail(link, Drop.PEER_REMOVED)
        self.codec.peer_roles = {int(id_): peer.role for id_, (peer, _) in peers.items() if peer.role in ROLES}
        for id_, (peer, address) in peers.items():
            if id_ == self.endpoint:
                continue
            link = self._links.get(id_) or self._add(id_)
            if link.peer is None:
                self._beat_at(link, now)
                link.liveness = Liveness(self._options.suspect_after, self._options.dead_after)
            link.peer = peer
            if address is not None and address != link.sender.address:
                link.sender.locate(address)
        self._bound_senders()

    def locate(self, id_: EndpointID, address: Address, now: float) -> None:
        """Set the address of a peer whose name was resolved."""
        link = self._links.get(id_)
        if link is not None and link.peer is not None:
            link.sender.locate(address)
            self._beat_at(link, now)

    def _add(self, id_: EndpointID) -> Link:
        counts = Counts()
        sender = Sender(id_, self._options, self.codec, self.outputs, counts, self._count_drop, self._first_sequence)
        link = Link(id_, sender, counts, Liveness(self._options.suspect_after, self._options.dead_after))
        self._links[id_] = link
        return link

    def _bound_senders(self) -> None:
        if len(self._links) <= MAX_SENDERS:
            return
        others = [link for link in self._links.values() if link.peer is None]
        if len(others) <= MAX_SENDERS:
            return
        others.sort(key=lambda link: link.heard_at)
        for link in others[: len(others) - MAX_SENDERS + MAX_SENDERS // 16]:
            self._fail(link, Drop.PEER_REMOVED)
            self._orphans += [(link.id, token) for token, _ in link.sender.settled]
            # A sequence must never restart for a process that may remember it.
            for window in (link.sender.datagram, link.sender.stream):
                self._first_sequence = max(self._first_sequence, *window.upcoming)
            self._gone.add(link.totals())
            del self._links[link.id]
            self._busy.pop(link.id, None)
            self._changed.pop(link.id, None)
            for receiver in link.receivers:
                self._pending.pop(receiver, None)

    def _fail(self, link: Link, reason: str) -> None:
        link.sender.fail(reason)
        if link.sender.stream_up:
            self.outputs.resets.append(link.id)
        self._busy.pop(link.id, None)
        self._settled(link)

    def close(self) -> None:
        """Settle everything as not handled."""
        for link in self._links.values():
            self._fail(link, Drop.PEER_REMOVED)

    def state(self, id_: EndpointID) -> PeerState:
        """State of a peer."""
        link = self._links.get(id_)
        return link.liveness.state if link is not None and link.peer is not None else PeerState.UNKNOWN

    def quality(self, id_: EndpointID) -> Quality:
        """Quality of a peer's answers to heartbeats."""
        link = self._links.get(id_)
        return link.quality.quality if link is not None else UNMEASURED

    def layout_of(self, id_: EndpointID) -> int:
        """The layout version in the last datagram of a peer; 0 before the first."""
        link = self._links.get(id_)
        return link.layout_version if link is not None else 0

    def set_attachment(self, id_: EndpointID, attachment: bytes, now: float) -> None:
        """Set the attachment of heartbeats to a peer. Raises `InvalidArgument` above 512 bytes."""
        if len(attachment) > heartbeat.MAX_ATTACHMENT_BYTES:
            raise InvalidArgument(f"an attachment has at most {heartbeat.MAX_ATTACHMENT_BYTES} bytes, this one {len(attachment)}")
        link = self._links.get(id_)
        if link is not None and link.peer is not None and link.attachment != attachment:
            link.attachment = attachment
            if link.sender.address is not None:
                # Not counted as a missed heartbeat: it is sent for its content.
                self._heartbeat(link, now)

    def send_records(
        self, id_: EndpointID, records: list[bytes], lane: int, token: int, now: float, urgent: bool = False, more: bool = False
    ) -> None:
        """Queue a parcel of whole records. It leaves with the next `flush`; with `more` it may wait, see `Links.send_records`."""
        self.hold(more, now)
        link = self._links.get(id_)
        if link is None or link.liveness.state is PeerState.DEAD:
            self._refuse_parcel(link, id_, len(records), token)
            return
        link.sender.queue_records(records, lane, token, now, urgent)
        self._busy[id_] = link
        self._settled(link)

    def hold(self, more: bool, now: float) -> None:
        """Note that a parcel is queued: records wait for more, or do so no longer."""
        if not more:
            self._held_until = -INFINITY
        elif self._held_until == -INFINITY:
            self._held_until = now + HOLD_S

    def send_control(self, id_: EndpointID, messages: list[bytes], token: int, now: float) -> None:
        """Queue serialized control messages. They leave before records."""
        link = self._links.get(id_)
        if link is None or link.liveness.state is PeerState.DEAD:
            self._refuse_parcel(link, id_, len(messages), token)
            return
        link.sender.queue_control(messages, token, now)
        self._busy[id_] = link
        self._settled(link)

    def _refuse_parcel(self, link: Link | None, id_: EndpointID, items: int, token: int) -> None:
        self._count_drop(Drop.UNKNOWN_PEER if link is None else Drop.PEER_DEAD, items)
        if link is None:
            self._gone.queue_drops += items
        else:
            link.counts.queue_drops += items
        if token:
            self._orphans.append((id_, token))

    def _count_drop(self, reason: str, items: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + items

    def flush(self, now: float, every: bool = False) -> None:
        """Send queued data as far as the windows allow; `every`: also data that may wait for more."""
        least = 0
        if self._held_until != -INFINITY:
            if now < self._held_until and not every:
                least = HELD_BYTES
                self._wake = min(self._wake, self._held_until)
            else:
                self._held_until = -INFINITY
        version = self._layout_version()
        for id_, link in list(self._busy.items()):
            sender = link.sender
            sender.layout_version = version
            try:
                sender.pump(now, least)
            except Exception as error:  # a bug; the other links are served nevertheless
                self.refusals.refuse(DatagramRefusal.LINK_RAISED, _name(sender.address), now, peer=id_, raised=type(error).__name__)
                sender.fail(Drop.LINK_RAISED)
            if sender.asks:
                sender.asks = False
                self._heartbeat(link, now)
            if sender.settled:
                self._changed[id_] = link
            deadline = sender.deadline(now)
            if deadline == INFINITY:
                self._busy.pop(id_, None)
            elif deadline < self._wake:
                self._wake = deadline

    @property
    def has_unacknowledged(self) -> bool:
        """True if `acknowledge` must be called at the end of this turn."""
        return bool(self._pending)

    def acknowledge(self, now: float, every: bool = False) -> None:
        """Send the acknowledgements that are due (`every`: all that are owed). Call it after the `flush` of the turn that handled
        the data."""
        for receiver, link in list(self._pending.items()):
            if not every and not receiver.due(now):
                self._wake = min(self._wake, receiver.acknowledged_at + ACK_INTERVAL_S)
                continue
            del self._pending[receiver]
            data = receiver.acknowledgement(
                self.codec, self._next_counter(), self._layout_version(), self._shares.window(receiver, self._receivers(), now), now
            )
            link.counts.acknowledgements_sent += 1
            if receiver.stream:
                self.outputs.replies.append((link.id, data))
            elif link.sender.address is not None:
                self.outputs.datagrams.append((data, link.sender.address))

    def _receivers(self) -> Iterator[Receiver]:
        for link in self._links.values():
            yield from link.receivers

    def _next_counter(self) -> int:
        self._counter += 1
        return self._counter

    def receive(self, data: bytes, address: Address, now: float) -> None:
        """Handle a received datagram. Never raises."""
        head = self.codec.unpack(data, False)
        if isinstance(head, str):
            self.refusals.refuse(head, _name(address), now)
            return
        link = self._links.get(head[6])
        if link is None:
            if head[2] == HEARTBEAT:
                self._on_heartbeat(head, None, data, address, now)
                return
            link = self._meet(head, address, now)
            if link is None:
                return
        self._heard(link, head[8], now)
        type_ = head[2]
        if type_ == HEARTBEAT:
            self._on_heartbeat(head, link, data, address, now)
        elif type_ < HEARTBEAT or type_ >= RECORD_FRAGMENT:
            self._on_items(head, link, link.receivers[0], data, address, now)
        else:
            self._on_acknowledgement(head, link, data, address, now)

    def receive_frame(self, data: bytes, source: EndpointID | None, where: str, now: float) -> EndpointID | None:
        """Handle a frame from a stream. `source` is the sender on this stream, None before its first good frame; `where` names the
        stream in warnings. Returns the sender, None if the frame was refused. Never raises."""
        head = self.codec.unpack(data, True)
        if isinstance(head, str):
            self.refusals.refuse(head, where, now)
            return None
        id_ = EndpointID(head[6])
        if source is not None and source != id_:
            self.refusals.refuse(DatagramRefusal.SENDER, where, now)
            return None
        link = self._links.get(id_) or self._meet(head, None, now)
        if link is None or head[2] == HEARTBEAT:
            self.refusals.refuse(DatagramRefusal.TYPE, where, now)
            return None
        self._heard(link, head[8], now)
        if head[2] < HEARTBEAT:
            self._on_items(head, link, link.receivers[1], data, (where, 0), now)
        else:
            self._on_acknowledgement(head, link, data, (where, 0), now)
        return id_

    def _meet(self, head: FieldsOfHead, address: Address | None, now: float) -> Link | None:
        """Return a link for a sender that is not a peer, if it belongs to the cluster; their number is bounded."""
        if head[2] == ACKNOWLEDGEMENT or not self._knows(EndpointID(head[6])):
            self.refusals.refuse(DatagramRefusal.UNKNOWN_SENDER, _name(address), now)
            return None
        link = self._add(EndpointID(head[6]))
        link.sender.locate(address)
        link.heard_at = now
        self._bound_senders()
        return link

    def _heard(self, link: Link, layout_version: int, now: float) -> None:
        link.heard_at = now
        link.layout_version = layout_version
        if link.liveness.state is not PeerState.ALIVE and link.peer is not None:
            self._step(link, Event.HEARD)

    def _on_items(self, head: FieldsOfHead, link: Link, receiver: Receiver, data: bytes, address: Address, now: float) -> None:
        type_, count, sequence = head[2], head[5], head[7]
        fragment = type_ >= RECORD_FRAGMENT
        records = type_ in _OF_RECORDS
        tracker = receiver.records if records else receiver.control
        items = 1 if fragment else count
        receiver.unacknowledged += 1
        receiver.unacknowledged_bytes += len(data) + OVERHEAD_BYTES
        receiver.data_at = now
        if head[4] & FLAG_URGENT:
            receiver.urgent = self.urgent_came = True
        if receiver not in self._pending:
            self._pending[receiver] = link
        if sequence == tracker.next:
            tracker.next = sequence + items
        elif not tracker.accept(sequence, items):
            receiver.urgent = True
            reason = DatagramRefusal.DUPLICATE if sequence < tracker.next else DatagramRefusal.SEQUENCE
            self.refusals.count(reason)
            return
        counts = link.counts
        counts.datagrams_received += 1
        counts.bytes_received += len(data)
        start, end = HEAD_SIZE, len(data) - self.codec.tag_size
        refusal, raised = DatagramRefusal.MALFORMED_RECORDS, ""
        if fragment:
            whole = self._reassembly.take(link.id, type_, sequence, count, data[start:end], now)
            if whole is None:
                return
            if isinstance(whole, str):
                self._reject(link, receiver, tracker, head, whole, address, now)
                return
            data, start, end, count = whole, 0, len(whole), 1
        try:
            if records:
                taken = self._handler.on_records(link.id, data, start, end, count)
                if taken is Outcome.TAKEN:
                    counts.records_received += count
                    return
            else:
                self.urgent_came = True
                refusal = DatagramRefusal.MALFORMED_CONTROL
                messages = split_control(data, start, end, count)
                taken = self._handler.on_control(link.id, messages) if messages is not None else Outcome.MALFORMED
                if taken in (Outcome.TAKEN, Outcome.ANSWERED):
                    receiver.urgent = receiver.urgent or taken is Outcome.TAKEN
                    counts.control_received += count
                    return
            if taken is Outcome.NOT_TAKEN:
                refusal = DatagramRefusal.NOT_TAKEN
        except Exception as error:
            # A handler must not raise; if it does, the datagram is not handled and the loop continues.
            refusal, raised = DatagramRefusal.HANDLER_RAISED, type(error).__name__
        self._reject(link, receiver, tracker, head, refusal, address, now, raised)

    def _reject(
        self,
        link: Link,
        receiver: Receiver,
        tracker: Tracker,
        head: FieldsOfHead,
        refusal: str,
        address: Address,
        now: float,
        raised: str = "",
    ) -> None:
        receiver.urgent = True
        tracker.reject(head[7], 1 if head[2] >= RECORD_FRAGMENT else head[5])
        self.refusals.refuse(refusal, _name(address), now, peer=link.id, raised=raised)

    def _on_acknowledgement(self, head: FieldsOfHead, link: Link, data: bytes, address: Address, now: float) -> None:
        stream = head[4] & FLAG_STREAM != 0
        receiver = link.receivers[stream]
        if head[7] <= receiver.heard:
            self.refusals.count(DatagramRefusal.OLD_COUNTER)
            return
        found = acknowledgement.decode(data, len(data) - self.codec.tag_size, head[5])
        if found is None:
            self.refusals.refuse(DatagramRefusal.MALFORMED_ACKNOWLEDGEMENT, _name(address), now, peer=link.id)
            return
        receiver.heard = head[7]
        link.counts.acknowledgements_received += 1
        link.sender.acknowledge(found, stream, now)
        self._settled(link)

    def _on_heartbeat(self, head: FieldsOfHead, link: Link | None, data: bytes, address: Address, now: float) -> None:
        body = heartbeat.decode(data, HEAD_SIZE, len(data) - self.codec.tag_size)
        reply = head[4] & FLAG_ANY_DESTINATION == 0
        if body is None or body.reply is not reply:
            self.refusals.refuse(DatagramRefusal.MALFORMED_HEARTBEAT, _name(address), now)
            return
        if body.target != self.endpoint:
            if reply:
                self._on_replaced(EndpointID(body.target), address)
            else:
                # The sender means another process, our predecessor at this port: inform it at once who is here.
                self._echo(head, body.sent_us, body.target, address)
            return
        if link is None:
            link = self._meet(head, address, now)
            if link is None:
                if not reply:  # a sign of life, with nothing that the sender did not send itself: its address may be another's
                    self._echo(head, body.sent_us, head[6], address)
                return
        if head[7] <= link.heard_counter:
            self.refusals.count(DatagramRefusal.OLD_COUNTER)
            return
        link.heard_counter = head[7]
        link.counts.heartbeats_received += 1
        if link.peer is None and link.sender.address != address:
            link.sender.locate(address)
        receiver = link.receivers[0]
        next_record, next_control = body.next_record, body.next_control
        # Most heartbeats reveal nothing: they contain what is expected.
        revealed = next_record > receiver.records.next and receiver.records.reveal(next_record)
        if next_control > receiver.control.next and receiver.control.reveal(next_control):
            revealed = True
        # The sender may have missed the acknowledgement of its last data: a heartbeat triggers it again.
        if revealed or now - receiver.data_at < REPEAT_S:
            receiver.urgent = True
            self._pending[receiver] = link
        if reply:
            link.quality.replied(int(now * 1e6) - body.sent_us)
            if next_record:  # sequences begin at 1, and a stranger gets none
                link.introduced = True
        answer = b""
        try:
            answer = self._handler.on_heartbeat(link.id, reply, body.attachment)
        except Exception as error:
            self.refusals.refuse(DatagramRefusal.HANDLER_RAISED, _name(address), now, peer=link.id, raised=type(error).__name__)
        if not reply:
            self._reply(link, body.sent_us, answer)

    def introduce(self, now: float, unanswered: bool) -> bool:
        """Send another heartbeat to each peer that does not know this process yet and so refuses its data; with `unanswered` also
        to peers that have not answered at all. Returns False if there are none."""
        states = (PeerState.ALIVE, PeerState.UNKNOWN) if unanswered else (PeerState.ALIVE,)
        strange = [link for link in self._links.values() if not link.introduced and link.peer and link.liveness.state in states]
        for link in strange:
            self._heartbeat(link, now)
        return bool(strange)

    def _on_replaced(self, old: EndpointID, address: Address) -> None:
        link = self._links.get(old)
        if (
            link is not None
            and link.peer is not None
            and link.sender.address is not None
            and link.sender.address[:2] == address[:2]
        ):
            self._step(link, Event.REPLACED)

    def _reply(self, link: Link, sent_us: int, attachment: bytes) -> None:
        sender = link.sender
        if sender.address is None:
            return
        if len(attachment) > heartbeat.MAX_ATTACHMENT_BYTES:
            attachment = b""
        next_record, next_control = sender.datagram.upcoming
        body = heartbeat.start(True, sent_us) + heartbeat.rest(next_record, next_control, attachment, link.id)
        self._send_heartbeat(0, link.id, body, sender.address)

    def _echo(self, head: FieldsOfHead, sent_us: int, target: int, address: Address) -> None:
        """Answer a heartbeat to a sender without a link."""
        echo = heartbeat.encode(reply=True, sent_us=sent_us, next_record=0, next_control=0, attachment=b"", target=target)
        self._send_heartbeat(0, EndpointID(head[6]), echo, address)

    def _heartbeat(self, link: Link, now: float) -> None:
        sender = link.sender
        if sender.address is None:
            return
        link.counts.heartbeats_sent += 1
        self._send_heartbeat(FLAG_ANY_DESTINATION, link.id, self._schedule.body(link, now), sender.address)

    def _send_heartbeat(self, flags: int, to: EndpointID, body: bytes, address: Address) -> None:
        data = self.codec.pack(HEARTBEAT, flags, 0, self._next_counter(), self._layout_version(), to, [body])
        self.outputs.datagrams.append((data, address))

    def poll(self, now: float) -> None:
        """Perform everything due: heartbeats, probes, push-back, expiry. Call `acknowledge` at the end of the turn as well."""
        self._wake = INFINITY
        for link in list(self._busy.values()):
            if link.sender.expire(now):
                self._void(link, now)
        self.flush(now)
        for id_, link in self._busy.items():
            if link.sender.probe_due(now):
                self._heartbeat(link, now)
            if link.sender.settled:
                self._changed[id_] = link
            self._wake = min(self._wake, link.sender.deadline(now))
        for at, id_ in self._schedule.due(now):
            due = self._links.get(id_)
            if due is not None and due.heartbeat_at == at:
                self._beat(due, now)
        self._wake = min(self._wake, self._schedule.next_at)

    def _beat_at(self, link: Link, at: float) -> None:
        self._schedule.put(link, at)
        self._wake = min(self._wake, at)

    def _beat(self, link: Link, now: float) -> None:
        if link.sender.address is not None:
            first = link.heartbeat_sent_at == -INFINITY
            # The first heartbeat has no predecessor that could be missed.
            if not first and link.liveness.heartbeat_due(link.heard_at >= link.heartbeat_sent_at):
                self._state_changed(link)
            link.quality.sent()
            self._heartbeat(link, now)
            link.heartbeat_sent_at = now
            self._schedule.put_after(link, now, spread=first)
            return
        if link.liveness.heartbeat_due(False):
            self._state_changed(link)
        self._schedule.put_after(link, now)

    def _void(self, link: Link, now: float) -> None:
        """Handle 3 s without an acknowledgement: the window is void, and so is the peer unless something else was heard from it."""
        if now - link.heard_at >= VOID_S:
            if link.peer is not None:
                self._step(link, Event.WINDOW_VOID)
            else:
                self._fail(link, Drop.PEER_DEAD)
        self._settled(link)

    def _step(self, link: Link, event: Event) -> None:
        if link.liveness.step(event):
            self._state_changed(link)

    def _state_changed(self, link: Link) -> None:
        state = link.liveness.state
        self._states.append((link.id, state))
        if state is PeerState.DEAD:
            self._fail(link, Drop.PEER_DEAD)
        elif state is PeerState.SUSPECT:
            link.sender.suspect()
            self._settled(link)

    def next_deadline(self) -> float:
        """Time at which `poll` is due, monotonic seconds; infinity if nothing is. The shell waits at least `MIN_DELAY_S`."""
        return self._wake

    def stream_connected(self, id_: EndpointID, up: bool, now: float) -> None:
        """Note that the stream that this process opened to a peer was connected or broke."""
        link = self._links.get(id_)
        if link is not None and link.sender.stream_up is not up:
            link.sender.connected(up, now)
            self._settled(link)

    def stream_wanted(self, id_: EndpointID) -> bool:
        """True if a stream to this peer is still needed: the peer can be sent to and has data queued or in flight."""
        link = self._links.get(id_)
        return link is not None and link.liveness.state is not PeerState.DEAD and link.sender.busy

    def _settled(self, link: Link) -> None:
        if link.sender.settled:
            self._changed[link.id] = link

    @property
    def has_events(self) -> bool:
        """True if `dispatch` has something to report."""
        return bool(self._changed or self._states or self._orphans)

    def dispatch(self, now: float) -> None:
        """Report changed states and settled parcels to the handler. Events that it causes meanwhile wait for the next call."""
        states, self._states = self._states, []
        changed, self._changed = self._changed, {}
        orphans, self._orphans = self._orphans, []
        settled: list[tuple[EndpointID, list[tuple[int, bool]]]] = [(id_, [(token, False)]) for id_, token in orphans]
        for link in changed.values():
            if link.sender.settled:
                settled.append((link.id, link.sender.settled[:]))
                link.sender.settled.clear()
        for id_, state in states:
            try:
                self._handler.on_peer_state(id_, state)
            except Exception as error:
                self.refusals.refuse(DatagramRefusal.HANDLER_RAISED, "handler", now, peer=id_, raised=type(error).__name__)
        for id_, tokens in settled:
            try:
                self._handler.on_settled(id_, tokens)
            except Exception as error:
                self.refusals.refuse(DatagramRefusal.HANDLER_RAISED, "handler", now, peer=id_, raised=type(error).__name__)

    def stats(self) -> LinkStats:
        """A copy of the counters."""
        stats, links = self.stats_by_peer()
        peers = dict(links)
        for peer in peers.values():
            stats.total.add(peer.counts)
        return replace(stats, peers=peers)

    def stats_by_peer(self) -> tuple[LinkStats, Iterator[tuple[EndpointID, PeerStats]]]:
        """Counters of closed links, and those of open links one by one as they are taken: that may take a while, in which links may
        close."""
        total = Counts()
        total.add(self._gone)
        links = list(self._links.values())
        stats = LinkStats(
            total=total,
            peers={},
            refused=dict(self.refusals.counts),
            dropped=dict(self.dropped),
            items_given_up=self._reassembly.given_up,
        )
        return stats, stats_of(links)

    def peer_states(self) -> Counter[PeerState]:
        """Number of peers in each state."""
        return Counter(link.state for link in self._links.values())
