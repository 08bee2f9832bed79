"""A table of sessions for tests, and what it asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cluster.core.contract import TICK
from pixiu.wire.envelope import Delivery, split
from pixiu.wire.record import INBOX_LANES, Kind, encode
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries
from relay.delivery.states import State

LIMITS = Limits(opening=2, fetching=2, max_sessions=4000)
UIN, GATEWAY = 7, 101
E = TypeVar("E")


def record(seq: int, lane: int = 1, size: int = 0) -> bytes:
    return encode(Kind.MAIL, UIN, b"mail %d" % seq + bytes(size), seq, type=lane << 6)


class Bench:
    """A table, and what it asked for and was not answered yet."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.now = 100.0
        self.mine = True
        self.table = Deliveries(lambda uin: self.mine, limits)
        self.asked: list[ev.Effect] = []
        self.inbox: dict[int, list[int]] = {lane: [] for lane in range(INBOX_LANES)}
        """InboxSeqs that the device has not acknowledged."""
        self.delivered: list[Delivery] = []
        self.body_bytes = 0
        """That fetched records have beside their text."""

    def tell(self, event: ev.Event, after: float = 0.0) -> None:
        self.now += after
        for effect in self.table.step(event, self.now):
            if isinstance(effect, ev.Deliver):
                assert effect.gateway == GATEWAY
                self.delivered += [delivery for chunk in effect.chunks for delivery in split(chunk.data, chunk.mails)]
            else:
                self.asked.append(effect)

    def tick(self) -> None:
        """Time goes on to the next deadline."""
        self.now = max(self.now, self.table.next_deadline())
        self.tell(TICK)

    def take(self, kind: type[E]) -> E:
        """What was asked for: exactly one of a kind."""
        (found,) = [effect for effect in self.asked if isinstance(effect, kind)]
        self.asked = [effect for effect in self.asked if effect is not found]
        return found

    def none(self, kind: type[E]) -> bool:
        return not any(isinstance(effect, kind) for effect in self.asked)

    def state(self, device: int = 0) -> State:
        session = self.table.sessions.get(ev.Device(UIN, device))
        return State.OFFLINE if session is None else session.state

    def log_in(self, connection: int = 1, device: int = 0) -> None:
        self.tell(ev.LoggedIn([ev.Login(UIN, device, GATEWAY, connection)]))

    def answer_open(self, number: int = 1) -> None:
        self.tell(ev.Opened([(asked, number) for asked in self.take(ev.OpenSessions).items]))

    def answer_read(self) -> ev.ReadInboxes:
        effect = self.take(ev.ReadInboxes)
        answers: list[tuple[ev.Asked, Sequence[ev.Listing]]] = []
        for asked, _, reads in effect.items:
            listings = []
            for read in reads:
                unread = self.inbox[read.lane]
                first = min(unread, default=1)
                found = [(seq, seq << 8 | read.lane) for seq in unread if read.start is None or seq > read.start][: read.num]
                listings.append(ev.Listing(found, 0, 0, max(unread, default=0), first - 1 if unread else 0))
            answers.append((asked, listings))
        self.tell(ev.Listed(answers))
        return effect

    def answer_fetch(self, missing: dict[int, ev.Missing] | None = None) -> None:
        effect = self.take(ev.FetchMessages)
        answers = [
            (asked, [(missing or {}).get(msg_id >> 8) or record(msg_id >> 8, msg_id & 3, self.body_bytes) for msg_id in ids])
            for asked, ids in effect.items
        ]
        self.tell(ev.Fetched(answers))

    def online(self, *seqs: int, lane: int = 1) -> None:
        """Log in, and send what is there."""
        self.inbox[lane] = list(seqs)
        self.log_in()
        self.answer_open()
        self.answer_read()
        if seqs:
            self.answer_fetch()
        assert self.state() is State.SENDING

    def notify(self, seq: int, lane: int = 1) -> None:
        self.inbox[lane].append(seq)
        notice = ev.Notice(UIN, lane, seq, [seq << 8 | lane], [record(seq, lane)])
        self.tell(ev.Notified(5, seq, [notice]))
        assert self.take(ev.ConfirmNotices) == ev.ConfirmNotices(5, seq, ())

    def acknowledge(
        self, up_to: int, bits: int = 0, session: int = 1, lane: int = 1, written: int = -1, gateway: int = GATEWAY
    ) -> None:
        self.tell(ev.Acknowledged(gateway, [ev.Acknowledgement(UIN, 0, session, lane, up_to, bits, written)]))

    def seqs(self) -> list[int]:
        return [delivery.seq for delivery in self.delivered]
