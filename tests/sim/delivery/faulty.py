"""Deliveries with one fault each, put back into the production core: what the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relay.delivery import events as ev
from relay.delivery.limits import Limits
from relay.delivery.saving import Saving
from relay.delivery.session import Session
from relay.delivery.sessions import Deliveries
from relay.delivery.states import Cause, State
from relay.delivery.window import Lane


class IgnoresTheFence(Deliveries):
    """A session goes on although Pi says that there is a newer one."""

    def _fail(self, session: Session, failure: ev.Failure, now: float) -> None:
        super()._fail(session, ev.Failure.LATER if failure is ev.Failure.FENCED else failure, now)


class _Forgetful(Saving):
    def _put_back(self, number: int, item: ev.Acknowledgement) -> None:
        return


class SavesOnce(Deliveries):
    """A cursor whose call was not answered is not sent again."""

    def __init__(self, owns: Callable[[int], bool], limits: Limits, make_session: type[Session] = Session) -> None:
        super().__init__(owns, limits, make_session)
        self._saving = _Forgetful(limits)


class ReusesTokens(Deliveries):
    """An answer may be taken for that to a later question."""

    def next_token(self) -> int:
        self._token = self._token % 3 + 1
        return self._token


class NoDirtyMark(Session):
    """What is told during a fetch is forgotten."""

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        if cause is Cause.NOTIFIED and self.state in (State.GETTING_IDS, State.GETTING_MESSAGES):
            return False
        return super().on(cause, what, now)


class WaitsForEver(Session):
    """A question has no timeout."""

    def _wait(self, seconds: float, now: float, *, pausing: bool = False) -> None:
        super()._wait(seconds if pausing else 1e9, now, pausing=pausing)


class NoRewind(Session):
    """What was lost with a stream is not sent again."""

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        return False if cause is Cause.BROKEN else super().on(cause, what, now)


class LogoutAcknowledges(Session):
    """The article's way: a logout acknowledges what was sent."""

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        if cause is Cause.LOGOUT and self.number:
            for number, lane in enumerate(self.lanes):
                everything = ev.Acknowledgement(self.uin, self.device, self.number, number, lane.reach, 0)
                super().on(Cause.ACKNOWLEDGED, everything, now)
        return super().on(cause, what, now)


class NotYetIsGone(Session):
    """What Xiu has not committed yet passes for lost."""

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        if cause is Cause.FETCHED:
            what = [ev.Missing.GONE if answer is ev.Missing.NOT_YET else answer for answer in what]
        return super().on(cause, what, now)


class NeverPolls(Session):
    """A notify is believed never to be lost."""

    def on(self, cause: Cause, what: Any, now: float) -> bool:
        if cause is Cause.POLL:
            self._poll_at = 1e9
            return False
        return super().on(cause, what, now)


class _Trusting(Lane):
    def acknowledge(self, up_to: int, bits: int) -> bool:
        changed = self.cursor.acknowledge(up_to, bits)
        self.sent = max(self.sent, self.cursor.up_to)
        return changed


class AcknowledgesBeyond(Session):
    """A device is believed whatever it acknowledges."""

    def make_lane(self) -> Lane:
        return _Trusting()


class _Careless(Lane):
    def takes(self, seq: int) -> bool:
        return self.known and self.sent < seq <= self.limit


class NoGapCheck(Session):
    """A notify's record is sent whatever is missing before it."""

    def make_lane(self) -> Lane:
        return _Careless()


class _Wide(Lane):
    @property
    def limit(self) -> int:
        return self.cursor.up_to + 1000


class NoWindow(Session):
    """Everything is sent at once."""

    def make_lane(self) -> Lane:
        return _Wide()


class _Silent(Lane):
    def _skip(self, listing: ev.Listing) -> list[tuple[int, int]]:
        super()._skip(listing)
        return []


class TellsNoGap(Session):
    """What the inbox has dropped is passed over."""

    def make_lane(self) -> Lane:
        return _Silent()


class _Unmarked(Lane):
    def rewind(self, written: int = 0) -> None:
        marked = self.marked
        super().rewind(written)
        self.marked = marked


class MarksNothing(Session):
    """What is sent again looks as if it were new."""

    def make_lane(self) -> Lane:
        return _Unmarked()
