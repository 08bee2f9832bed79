"""Delivery of mail in texts: the production core of a relay; Pi, Xiu and a gateway that do only what the text says.

inbox 1 2 3               what the user's inbox of lane 1 holds and the device has not acknowledged: entries 2 and 3
login [connection]        the device is connected, logout [connection]: it is not, heartbeat: it still is
pi [session]              Pi answers what it was asked: a session number, what the inbox holds, that cursors are saved
pi fails|fenced           it does not, or another session of the device is newer
xiu [seq=gone …]          Xiu answers with the messages, or says that there is none
notify 1 4 [without]      a proxy says that lane 1 has entry 4, with its message or without
ack 1 3 [bits]            the device acknowledges lane 1 up to 3; stale: under another session
broken, ready             the stream to the gateway
pass 1.5                  time passes
show                      the session's state
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cluster.core.contract import TICK
from pixiu.wire.envelope import GAP, REDELIVERED, split
from pixiu.wire.record import INBOX_LANES, Kind, decode, encode
from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.sessions import Deliveries
from relay.delivery.states import State
from tests.support.transcript import check

FOLDER = Path(__file__).parent / "transcripts"
UIN, DEVICE, GATEWAY, PROXY = 7, 0, 101, 5
FAILURES = {"fails": ev.Failure.LATER, "fenced": ev.Failure.FENCED, "refuses": ev.Failure.REFUSED}


def message_id(lane: int, seq: int) -> int:
    return seq << 8 | lane


def record(lane: int, seq: int) -> bytes:
    return encode(Kind.MAIL, UIN, b"mail %d" % seq, seq, type=lane << 6)


def effect_text(effect: ev.Effect) -> Iterator[str]:
    match effect:
        case ev.OpenSessions():
            yield "asks Pi for a session"
        case ev.ReadInboxes(items):
            for _, session, reads in items:
                lanes = [f"{each.num} of lane {each.lane} {_after(each.start)}" for each in reads]
                yield f"reads in session {session}: {'; '.join(lanes)}"
        case ev.FetchMessages(items):
            for _, ids in items:
                yield f"fetches {', '.join(f'{each & 3}/{each >> 8}' for each in ids)}"
        case ev.SaveCursors(_, items):
            for each in items:
                yield f"saves in session {each.session}: lane {each.lane} up to {each.up_to}, bits {each.bits:b}"
        case ev.Deliver(_, chunks):
            for mail in [mail for chunk in chunks for mail in split(chunk.data, chunk.mails)]:
                what = "a gap" if mail.flags & GAP else decode(mail.record).body.decode()
                again = ", redelivered" if mail.flags & REDELIVERED else ""
                yield f"→ device, session {mail.session}: {mail.lane}/{mail.seq} {what}{again}"
        case ev.ConfirmNotices(_, _, elsewhere):
            yield "confirms the notice" + (", whose user another relay serves" if elsewhere else "")


def _after(start: int | None) -> str:
    return "after the cursor" if start is None else f"after {start}"


class Bench:
    """The core, and what it asked for and was not answered yet."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = Deliveries(lambda uin: True, Limits())
        self.inbox: dict[int, list[int]] = {lane: [] for lane in range(INBOX_LANES)}
        self.asked: list[ev.Effect] = []
        self.notices = 0

    def do(self, command: str) -> Iterable[str]:
        """Carry out a command; what came of it."""
        verb, *words = command.split()
        lines: Iterator[str] = getattr(self, f"do_{verb}")(*words)
        return list(lines)

    def tell(self, event: ev.Event) -> Iterator[str]:
        for effect in self.core.step(event, self.now):
            if isinstance(effect, ev.OpenSessions | ev.ReadInboxes | ev.FetchMessages | ev.SaveCursors):
                self.asked.append(effect)
            yield from effect_text(effect)

    def login(self, connection: str) -> ev.Login:
        return ev.Login(UIN, DEVICE, GATEWAY, int(connection))

    def do_login(self, connection: str = "1") -> Iterator[str]:
        yield from self.tell(ev.LoggedIn([self.login(connection)]))

    def do_heartbeat(self, connection: str = "1") -> Iterator[str]:
        yield from self.tell(ev.StillThere([self.login(connection)]))

    def do_logout(self, connection: str = "1") -> Iterator[str]:
        yield from self.tell(ev.LoggedOut([self.login(connection)]))

    def do_inbox(self, lane: str, *seqs: str) -> Iterator[str]:
        self.inbox[int(lane)] = list(map(int, seqs))
        yield from ()

    def do_pi(self, answer: str = "1") -> Iterator[str]:
        asked = [effect for effect in self.asked if not isinstance(effect, ev.FetchMessages)]
        self.asked = [effect for effect in self.asked if isinstance(effect, ev.FetchMessages)]
        failure = FAILURES.get(answer)
        for effect in asked:
            match effect:
                case ev.OpenSessions(items):
                    yield from self.tell(ev.Opened([(each, failure or int(answer)) for each in items]))
                case ev.ReadInboxes(reads):
                    listed = [(each, failure or [self.listing(read) for read in lanes]) for each, _, lanes in reads]
                    yield from self.tell(ev.Listed(listed))
                case ev.SaveCursors(number, cursors):
                    yield from self.tell(ev.Saved(number, None if answer == "fails" else [failure] * len(cursors)))

    def listing(self, read: ev.Read) -> ev.Listing:
        unread = self.inbox[read.lane]
        found = [(seq, message_id(read.lane, seq)) for seq in unread if read.start is None or seq > read.start]
        return ev.Listing(found[: read.num], 0, 0, max(unread, default=0), min(unread) - 1 if unread else 0)

    def do_xiu(self, *missing: str) -> Iterator[str]:
        reasons = {int(seq): ev.Missing(why) for seq, _, why in (each.partition("=") for each in missing)}
        asked = [effect for effect in self.asked if isinstance(effect, ev.FetchMessages)]
        self.asked = [effect for effect in self.asked if not isinstance(effect, ev.FetchMessages)]
        for effect in asked:
            answers = [(each, [reasons.get(i >> 8) or record(i & 3, i >> 8) for i in ids]) for each, ids in effect.items]
            yield from self.tell(ev.Fetched(answers))

    def do_notify(self, lane: str, seq: str, without: str = "") -> Iterator[str]:
        self.notices += 1
        number, place = int(seq), int(lane)
        self.inbox[place].append(number)
        body = b"" if without else record(place, number)
        yield from self.tell(ev.Notified(PROXY, self.notices, [ev.Notice(UIN, place, number, [message_id(place, number)], [body])]))

    def do_ack(self, lane: str, up_to: str, bits: str = "0", session: str = "1") -> Iterator[str]:
        done = int(up_to)
        self.inbox[int(lane)] = [seq for seq in self.inbox[int(lane)] if seq > done]
        item = ev.Acknowledgement(UIN, DEVICE, int(session), int(lane), done, int(bits, 2))
        yield from self.tell(ev.Acknowledged(GATEWAY, [item]))

    def do_broken(self) -> Iterator[str]:
        yield from self.tell(ev.StreamBroken(GATEWAY))

    def do_ready(self) -> Iterator[str]:
        yield from self.tell(ev.StreamReady(GATEWAY))

    def do_pass(self, seconds: str) -> Iterator[str]:
        end = self.now + float(seconds)
        while self.core.next_deadline() <= end:
            self.now = max(self.now, self.core.next_deadline())
            yield from self.tell(TICK)
        self.now = end

    def do_show(self) -> Iterator[str]:
        session = self.core.sessions.get(ev.Device(UIN, DEVICE))
        state = State.OFFLINE if session is None else session.state
        yield state.value


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_transcript_is_what_happens(path: Path) -> None:
    check(path, Bench().do)
