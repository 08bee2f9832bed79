"""Mail to one device of a user: PiXiu's flow as a state table. Pure.

`TABLE` is the table of transitions; docs/delivery_states.md draws it. Every state but OffLine has a deadline. One fetch is in
progress at a time: it begins with a read of Pi and ends with the records of Xiu. A notice received meanwhile raises `Lane.last`, so
that another fetch follows. Sent records are not kept: those to be redelivered are fetched again.

Source: PiXiu §6.4; docs/delivery.md. Departs from the article where docs/sources.md, "Where Pixiu differs from PiXiu" says so: a
logout acknowledges what the device acknowledged, order and gaps go by InboxSeq, and the relay delivers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from cluster.core.contract import NEVER
from pixiu.wire.envelope import GAP, REDELIVERED, encode
from pixiu.wire.record import INBOX_LANES
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.states import Cause, State
from relay.delivery.window import WINDOW, Lane, Plan

_WAITING: Final = (State.ONLINE, State.GETTING_IDS, State.GETTING_MESSAGES)
_GOLDEN: Final = 0x9E37_79B9_7F4A_7C15
CHUNK_BYTES: Final = 64 << 10
"""Size limit of several records in one chunk."""
_FIRST_READS: Final = [ev.Read(lane, None, WINDOW) for lane in range(INBOX_LANES)]
"""Reads of a whole window: only these show which of its entries were acknowledged before."""


class SessionHost(Protocol):
    """Interface of the table of sessions to a session."""

    limits: Limits

    def next_token(self) -> int:
        """Return a number that was not used before."""

    def queue(self, session: Session) -> None:
        """Wait for a slot: `Cause.SLOT_GRANTED` follows."""

    def leave(self, session: Session) -> None:
        """Give the slot back."""

    def open(self, session: Session) -> None:
        """Ask Pi for a session number."""

    def read(self, session: Session, reads: Sequence[ev.Read]) -> None:
        """Ask Pi for entries."""

    def fetch(self, session: Session, msg_ids: Sequence[int]) -> None:
        """Ask Xiu for records."""

    def deliver(self, gateway: int, chunks: list[ev.Chunk]) -> None:
        """Send to a gateway."""

    def sendable(self, gateway: int, now: float) -> bool:
        """Return True if a gateway's stream accepts deliveries."""

    def ask(self, gateway: int, lane: ev.DeviceLane) -> None:
        """Ask a gateway up to where it has written."""

    def save(self, item: ev.Acknowledgement, now: float) -> None:
        """Queue an acknowledgement to be saved at Pi."""

    def hurry(self, now: float) -> None:
        """Save acknowledgements at Pi at once."""

    def sent_gap(self) -> None:
        """Count a gap marker."""


class Session:
    """One device. `on` takes events; see `TABLE`."""

    def __init__(self, uin: int, device: int, host: SessionHost) -> None:
        self.uin, self.device = uin, device
        self.state = State.OFFLINE
        self.number = 0
        """Pi's session number; 0: none yet."""
        self.gateway = self.connection = 0
        self.lanes = [self.make_lane() for _ in range(INBOX_LANES)]
        self.token = 0
        """New with every question, and never used again in this relay: an answer with another token belongs to a question that is
        no longer open."""
        self.deadline = NEVER
        self.opening = True
        """True if the session needs, or has, a slot for opening."""
        self._host = host
        self._fresh = True
        """True if its lanes are new: there was no login yet."""
        self._pausing = False
        self._failures = 0
        self._asked: list[ev.Read] = []
        self._plans: list[Plan] = []
        self._ask_at = self._resend_at = self._poll_at = self._reread_at = NEVER
        self._seen_at = 0.0
        """Time at which Pi heard of the device last."""
        self._resends = 0
        self._overdue = False
        """True if the time for an acknowledgement has passed since the last one."""
        self.cautious = False
        """True if nothing was acknowledged since a connection ended with an acknowledgement overdue."""

    def make_lane(self) -> Lane:
        """Make a lane; a test overrides it."""
        return Lane()

    @property
    def asked(self) -> ev.Asked:
        """Identity of the current question, echoed in its answer."""
        return ev.Asked(self.uin, self.device, self.token)

    @property
    def acknowledges_nothing(self) -> bool:
        """True if the next connection of the device should get little mail."""
        return self.cautious or self._overdue

    @property
    def waits_for_answer(self) -> bool:
        """True if its deadline limits the wait for a slot or an answer."""
        return self.state in _WAITING and not self._pausing

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        """Handle an event. Returns False if it has no meaning in this state."""
        row = TABLE.get((self.state, cause))
        if row is None:
            return False
        self.state = row[0]
        row[1](self, what, now)
        return True

    # --- time

    def set_deadline(self, now: float) -> None:
        """Compute the deadline; called after every event."""
        if self.state is State.OFFLINE:
            self.deadline = NEVER
        elif self.state is State.SENDING:
            deadline = min(self._poll_at, self._reread_at, self._ask_at, self._resend_at)
            for lane in self.lanes:
                if now < lane.blocked_until < deadline and lane.behind:
                    deadline = lane.blocked_until
            self.deadline = deadline

    def on_time(self, now: float) -> None:
        """Handle the deadline."""
        if self.state in _WAITING:
            self.on(Cause.PAUSED_ENOUGH if self._pausing else Cause.FAILED, None, now)
        elif self._resend_at <= now:
            self.on(Cause.UNACKNOWLEDGED, None, now)
        elif self._ask_at <= now:
            self._ask_written(now)
        elif min(self._poll_at, self._reread_at) <= now:
            self._reread_at = NEVER
            self.on(Cause.POLL, None, now)
        else:
            self._look(now)

    def _wait(self, seconds: float, now: float, *, pausing: bool = False) -> None:
        self._pausing = pausing
        self.deadline = now + seconds

    def _jitter(self, salt: int) -> float:
        """A factor from 0.5 to 1, the same in every run: a core has no randomness."""
        mixed: int = (self.uin * _GOLDEN + self.device * 31 + salt) * _GOLDEN & (1 << 64) - 1
        return 0.5 + (mixed >> 40) / (1 << 25)

    def _pause_s(self, failures: int) -> float:
        limits = self._host.limits
        return min(limits.max_pause_s, limits.pause_s * float(1 << min(failures, 10))) * self._jitter(failures)

    # --- coming and going

    def _log_in(self, login: ev.Login, now: float) -> None:
        """Wait for a slot among the sessions that are opened."""
        self._host.hurry(now)
        self.gateway, self.connection = login.gateway, login.connection
        self.cautious, self._overdue = self.acknowledges_nothing, False
        self.number = self._failures = self._resends = 0
        self.token = self._host.next_token()
        self._ask_at = self._resend_at = self._poll_at = NEVER
        if self.cautious or not self._fresh:
            for lane in self.lanes:
                lane.open(cautious=self.cautious)
        self._fresh = False
        self.opening = True
        self._queue(None, now)

    def _log_out(self, what: object, now: float) -> None:
        """Save what was acknowledged, not what was sent. What the device acknowledged last may still be under way."""
        self._host.hurry(now)
        self._host.leave(self)
        self.token = self._host.next_token()

    def _end(self, what: object, now: float) -> None:
        """Save what was acknowledged, and forget the rest: Pi takes nothing of this session any more."""
        self._log_out(what, now)
        self.number = 0

    # --- waiting

    def _queue(self, what: object, now: float) -> None:
        """Wait for a slot."""
        self._host.queue(self)
        self._wait(self._host.limits.slot_timeout_s, now)

    def _pause(self, what: object, now: float) -> None:
        """Give the slot back and pause."""
        self._host.leave(self)
        self.token = self._host.next_token()
        self._wait(self._pause_s(self._failures), now, pausing=True)
        self._failures += 1

    def _open(self, what: object, now: float) -> None:
        """Ask Pi for a session number."""
        self.token = self._host.next_token()
        self._host.open(self)
        self._wait(self._host.limits.call_timeout_s, now)

    def _opened(self, number: int, now: float) -> None:
        """Read all lanes from the stored cursors."""
        self.number = number
        self._failures, self._seen_at = 0, now
        self._read(None, now)

    def _read(self, what: object, now: float) -> None:
        """Read from Pi what the windows take, lane 0 first."""
        self.token = self._host.next_token()
        self._plans = []
        limits = self._host.limits
        self._asked = [
            ev.Read(number, lane.sent, min(limits.fetch_entries, lane.most)) if lane.known else _FIRST_READS[number]
            for number, lane in enumerate(self.lanes)
            if not lane.known or lane.worth_a_fetch(now)
        ]
        if not self._asked:  # it was acknowledged, or sent, while it waited for its slot
            self.on(Cause.LISTED_NONE, None, now)
            return
        self._host.read(self, self._asked)
        self._wait(limits.call_timeout_s, now)

    def listed(self, listings: Sequence[ev.Listing], now: float) -> None:
        """Take Pi's answer to a read."""
        if len(listings) != len(self._asked):
            self.on(Cause.FAILED, None, now)
            return
        limits = self._host.limits
        self._plans, left = [], limits.fetch_entries
        for read, listing in zip(self._asked, listings, strict=True):
            plan = self.lanes[read.lane].plan(read.lane, listing, read.num, left)
            for _, msg_id in plan.items:
                if msg_id:
                    left -= 1
            self._plans.append(plan)
        self._poll_at = now + limits.poll_s * self._jitter(self.token)
        self.on(Cause.LISTED if left < limits.fetch_entries else Cause.LISTED_NONE, None, now)

    def _fetch(self, what: object, now: float) -> None:
        """Ask Xiu for the records."""
        self.token = self._host.next_token()
        self._host.fetch(self, [msg_id for plan in self._plans for _, msg_id in plan.items if msg_id])
        self._wait(self._host.limits.call_timeout_s, now)

    def _nothing_to_fetch(self, what: object, now: float) -> None:
        """Tell gaps, if there are any, and give the slot back."""
        self._send([], now)

    # --- sending

    def _send(self, answers: Sequence[bytes | ev.Missing], now: float) -> None:
        """Send the records in order, gap markers for what is gone, and give the slot back."""
        self._host.leave(self)
        self.token = self._host.next_token()
        self.opening, self._failures = False, 0
        chunks: list[ev.Chunk] = []
        records = iter(answers)
        for plan in self._plans:
            lane = self.lanes[plan.lane]
            ready: list[tuple[int, int, bytes]] = []
            size = 0
            whole = True
            for seq, msg_id in plan.items:
                # Fewer answers than MsgIDs: the reply was full, and the rest is requested again at once.
                answer = next(records, ev.Missing.FULL) if msg_id else ev.Missing.GONE
                if lane.cursor.has(seq):  # sent before, and acknowledged meanwhile
                    continue
                if isinstance(answer, bytes):
                    record = answer
                    whole = lane.fits(len(record), size)
                    if not whole:
                        lane.wait_for_room(len(record))
                else:
                    record = b""
                    whole = answer is ev.Missing.GONE
                    if not whole and answer is not ev.Missing.FULL:
                        lane.blocked_until = now + self._pause_s(lane.failures)
                        lane.failures += 1
                if not whole:
                    # The lane continues from here; later answers for other lanes still count.
                    for _ in range(sum(1 for later, other in plan.items if later > seq and other)):
                        next(records, None)
                    break
                lane.failures = 0
                ready.append((seq, msg_id, record))
                size += len(record)
            chunks += self._chunks(plan.lane, ready, now)
            if whole:
                lane.sent_up_to(plan.end)
        self._plans = []
        if chunks:
            self._host.deliver(self.gateway, chunks)
        self._look(now)

    def _chunks(self, number: int, ready: Sequence[tuple[int, int, bytes]], now: float) -> list[ev.Chunk]:
        """Encode (InboxSeq, MsgID, record), consecutive ones in one chunk; an empty record is a gap marker."""
        chunks: list[ev.Chunk] = []
        msg_ids: list[int] = []
        records: list[bytes] = []
        first = size = 0
        for seq, msg_id, record in ready:
            if msg_ids and (not record or seq != first + len(msg_ids) or size + len(record) > CHUNK_BYTES):
                chunks.append(self._chunk(number, first, msg_ids, records, now))
                msg_ids, records, size = [], [], 0
            if not record:
                chunks.append(self._marker(number, seq, msg_id, now))
                continue
            if not msg_ids:
                first = seq
            msg_ids.append(msg_id)
            records.append(record)
            size += len(record)
        if msg_ids:
            chunks.append(self._chunk(number, first, msg_ids, records, now))
        return chunks

    def _chunk(self, number: int, first: int, msg_ids: Sequence[int], records: Sequence[bytes], now: float) -> ev.Chunk:
        """Encode mails of a lane, and note that they were sent."""
        lane = self.lanes[number]
        if not lane.unacknowledged:
            self._set_resend(now)
        lane.sent_records(first, records)
        uin, device, session, marked = self.uin, self.device, self.number, lane.marked
        parts: list[bytes] = []
        for seq, (msg_id, record) in enumerate(zip(msg_ids, records, strict=True), first):
            flags = REDELIVERED if seq <= marked else 0
            parts.append(encode(msg_id, seq, uin, session, device, number, flags, record))
        return ev.Chunk(uin, device, len(records), b"".join(parts))

    def _marker(self, number: int, seq: int, msg_id: int, now: float) -> ev.Chunk:
        """Encode a gap marker, and note that it was sent."""
        lane = self.lanes[number]
        if not lane.unacknowledged:
            self._set_resend(now)
        lane.sent_up_to(seq)
        lane.top = seq
        self._host.sent_gap()
        flags = GAP | (REDELIVERED if seq <= lane.marked else 0)
        return ev.Chunk(self.uin, self.device, 1, encode(msg_id, seq, self.uin, self.number, self.device, number, flags, b""))

    def _set_resend(self, now: float) -> None:
        limits, resends = self._host.limits, self._resends
        wait_s = limits.resend_s * float(1 << min(resends, 10)) if resends else limits.resend_s
        wait_s = min(limits.max_resend_s, wait_s)
        self._ask_at, self._resend_at = now + wait_s / 2, now + wait_s

    def _ask_written(self, now: float) -> None:
        """Ask the gateway, after half of the time, if mail is missing there, or only unacknowledged by the device."""
        self._ask_at = NEVER
        for lane in self.lanes:
            lane.asked = 0
        if self._host.sendable(self.gateway, now):
            for number, lane in enumerate(self.lanes):
                if lane.cursor.up_to < lane.top:
                    lane.asked, lane.written = lane.top, 0
                    self._host.ask(self.gateway, ev.DeviceLane(self.uin, self.device, self.number, number))

    def kind_of(self, notice: ev.Notice, now: float) -> tuple[Cause, int]:
        """Classify a notice; return the cause, and the number of its entries. The other entries are treated as another notice after
        it."""
        count = len(notice.msg_ids)
        if not notice.first:
            return Cause.NOTIFIED_SOME, count
        lane = self.lanes[notice.lane]
        if self.state is not _SENDING or not lane.takes(notice.first) or not self._host.sendable(self.gateway, now):
            return Cause.NOTIFIED, count
        fits = lane.room_for(notice.first, notice.records, self._host.limits.record_bytes)
        return (Cause.NOTIFIED_NEXT, fits) if fits else (Cause.NOTIFIED_ID, 1)

    def _send_notified(self, notice: ev.Notice, now: float) -> None:
        """Send the records."""
        self._host.deliver(self.gateway, [self._chunk(notice.lane, notice.first, notice.msg_ids, notice.records, now)])
        self._note(notice, now)

    def _fetch_notified(self, notice: ev.Notice, now: float) -> None:
        """Wait for a slot to fetch the record; Pi has nothing to add."""
        self._note(notice, now)
        self._plans = [Plan(notice.lane, [(notice.first, notice.msg_ids[0])], notice.first)]
        self._queue(None, now)

    def _note(self, notice: ev.Notice, now: float) -> None:
        """Remember how far the inbox goes: the next fetch gets it."""
        lane = self.lanes[notice.lane]
        lane.last = max(lane.last, notice.last)

    def _note_and_look(self, notice: ev.Notice, now: float) -> None:
        """Remember how far the inbox goes, and fetch if something is missing."""
        self._note(notice, now)
        self._look(now)

    def _note_some(self, notice: ev.Notice, now: float) -> None:
        """Remember that there is more, and to ask again a moment later: a read that is under way may be older, and the entry
        may not be in the inbox yet."""
        self.lanes[notice.lane].unread = True
        self._reread_at = now + self._host.limits.reread_s

    def _note_some_and_look(self, notice: ev.Notice, now: float) -> None:
        """The same, and fetch at once."""
        self._note_some(notice, now)
        self._look(now)

    def _look(self, now: float) -> None:
        """Fetch if the windows have space for more of the inbox."""
        if self.state is not _SENDING or not self._host.sendable(self.gateway, now):
            return
        for lane in self.lanes:
            if lane.worth_a_fetch(now):
                self.on(Cause.BEHIND, None, now)
                return

    def _poll(self, what: object, now: float) -> None:
        """Ask Pi whether there is more."""
        limits = self._host.limits
        self._poll_at = now + limits.poll_s * self._jitter(self.token)
        if now >= self._seen_at + limits.seen_s and self.lanes[0].known:
            self._seen_at = now
            cursor = self.lanes[0].cursor
            self._host.save(ev.Acknowledgement(self.uin, self.device, self.number, 0, cursor.up_to, cursor.bits), now)
        for lane in self.lanes:
            lane.unread = True
        self._look(now)

    def ready(self, now: float) -> None:
        """Continue: the gateway's stream accepts deliveries again."""
        self._look(now)

    def reread(self, at: float) -> None:
        """Read Pi once more at a time: notices may have gone to another relay meanwhile."""
        self._reread_at = at

    # --- acknowledgements

    def _acknowledge(self, item: ev.Acknowledgement, now: float) -> None:
        """Move the window, never beyond what was sent, and save the cursor."""
        lane = self.lanes[item.lane]
        lane.written = max(lane.written, item.written)
        if lane.acknowledge(item.up_to, item.bits):
            up_to, bits = lane.cursor.up_to, lane.cursor.bits
            if item.up_to != up_to or item.bits != bits:
                item = item._replace(up_to=up_to, bits=bits)
            self._host.save(item, now)
            self._resends, self._overdue, self._seen_at = 0, False, now
            self._ask_at = self._resend_at = NEVER
            if self.cautious:
                self.cautious = False
                for each in self.lanes:
                    each.widen()
            if self._waits_for_acknowledgement():
                self._set_resend(now)

    def _waits_for_acknowledgement(self) -> bool:
        return any(lane.unacknowledged for lane in self.lanes)

    def acknowledge_after_logout(self, item: ev.Acknowledgement, now: float) -> None:
        """Take an acknowledgement that the device sent before its logout, even if it comes later."""
        self._acknowledge(item, now)
        self._host.hurry(now)

    def _acknowledge_and_look(self, item: ev.Acknowledgement, now: float) -> None:
        """Move the window, never beyond what was sent, save the cursor, and fetch what has space now."""
        self._acknowledge(item, now)
        self._look(now)

    def _redeliver(self, what: object, now: float) -> None:
        """The time for an acknowledgement has passed. What the gateway has not written is redelivered; all, if it does not say."""
        self._overdue = True
        self._rewind([lane for lane in self.lanes if not lane.all_written], now)

    def _redeliver_all(self, what: object, now: float) -> None:
        """Redeliver everything that is under way: it is lost."""
        for lane in self.lanes:
            lane.written = 0
        self._rewind(self.lanes, now)

    def _rewind(self, lanes: Sequence[Lane], now: float) -> None:
        self._host.leave(self)
        self.token = self._host.next_token()
        self._plans = []
        self._resends += 1
        for lane in lanes:
            lane.rewind(lane.written)
        self._set_resend(now)
        if not self._waits_for_acknowledgement():
            self._ask_at = self._resend_at = NEVER
        self._poll_at = min(self._poll_at, now + self._host.limits.poll_s)
        self._look(now)


_Row = tuple[State, Callable[[Session, Any, float], None]]
_OFF, _ON, _IDS, _MESSAGES, _SENDING = State.OFFLINE, State.ONLINE, State.GETTING_IDS, State.GETTING_MESSAGES, State.SENDING
TABLE: dict[tuple[State, Cause], _Row] = {
    (_OFF, Cause.LOGIN): (_ON, Session._log_in),
    (_OFF, Cause.HEARTBEAT): (_ON, Session._log_in),
    (_ON, Cause.SLOT_GRANTED): (_ON, Session._open),
    (_ON, Cause.OPENED): (_IDS, Session._opened),
    (_ON, Cause.FAILED): (_ON, Session._pause),
    (_ON, Cause.PAUSED_ENOUGH): (_ON, Session._queue),
    (_IDS, Cause.SLOT_GRANTED): (_IDS, Session._read),
    (_IDS, Cause.LISTED): (_MESSAGES, Session._fetch),
    (_IDS, Cause.LISTED_NONE): (_SENDING, Session._nothing_to_fetch),
    (_ON, Cause.NOTIFIED_SOME): (_ON, Session._note_some),
    (_IDS, Cause.NOTIFIED): (_IDS, Session._note),
    (_IDS, Cause.NOTIFIED_SOME): (_IDS, Session._note_some),
    (_IDS, Cause.ACKNOWLEDGED): (_IDS, Session._acknowledge),
    (_IDS, Cause.FAILED): (_IDS, Session._pause),
    (_IDS, Cause.PAUSED_ENOUGH): (_IDS, Session._queue),
    (_MESSAGES, Cause.SLOT_GRANTED): (_MESSAGES, Session._fetch),
    (_MESSAGES, Cause.FETCHED): (_SENDING, Session._send),
    (_MESSAGES, Cause.NOTIFIED): (_MESSAGES, Session._note),
    (_MESSAGES, Cause.NOTIFIED_SOME): (_MESSAGES, Session._note_some),
    (_MESSAGES, Cause.ACKNOWLEDGED): (_MESSAGES, Session._acknowledge),
    (_MESSAGES, Cause.FAILED): (_IDS, Session._pause),
    (_SENDING, Cause.NOTIFIED_NEXT): (_SENDING, Session._send_notified),
    (_SENDING, Cause.NOTIFIED_ID): (_MESSAGES, Session._fetch_notified),
    (_SENDING, Cause.NOTIFIED): (_SENDING, Session._note_and_look),
    (_SENDING, Cause.NOTIFIED_SOME): (_SENDING, Session._note_some_and_look),
    (_SENDING, Cause.ACKNOWLEDGED): (_SENDING, Session._acknowledge_and_look),
    (_SENDING, Cause.BEHIND): (_IDS, Session._queue),
    (_SENDING, Cause.POLL): (_SENDING, Session._poll),
    (_SENDING, Cause.UNACKNOWLEDGED): (_SENDING, Session._redeliver),
    (_IDS, Cause.BROKEN): (_SENDING, Session._redeliver_all),
    (_MESSAGES, Cause.BROKEN): (_SENDING, Session._redeliver_all),
    (_SENDING, Cause.BROKEN): (_SENDING, Session._redeliver_all),
    **{(state, Cause.LOGIN): (_ON, Session._log_in) for state in (_ON, _IDS, _MESSAGES, _SENDING)},
    **{(state, Cause.LOGOUT): (_OFF, Session._log_out) for state in (_ON, _IDS, _MESSAGES, _SENDING)},
    **{
        (state, cause): (_OFF, Session._end)
        for state in (_ON, _IDS, _MESSAGES, _SENDING)
        for cause in (Cause.FENCED, Cause.REFUSED)
    },
}
