"""The states of the delivery to one device, and the causes of transitions. `session.TABLE` has the transitions."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Activity of a session."""

    __hash__ = object.__hash__  # `Enum` has one in Python, and every step of a session looks up (state, cause)

    OFFLINE = "OffLine"
    ONLINE = "OnLine"
    """Connected, without a session number yet."""
    GETTING_IDS = "GettingMsgIDList"
    GETTING_MESSAGES = "GettingMsgList"
    SENDING = "SendingMsg"
    """No question is open: everything that the windows take was sent."""


class Cause(Enum):
    """Cause of a transition."""

    __hash__ = object.__hash__

    LOGIN = "login on a newer connection"
    HEARTBEAT = "heartbeat of a device that is served by nobody here"
    LOGOUT = "logout, gateway gone or user served elsewhere"
    NOTIFIED_NEXT = "notify of the next entries, with their records"
    NOTIFIED_ID = "notify of the next entry, without its record"
    NOTIFIED = "notify of another entry"
    NOTIFIED_SOME = "notify of an entry whose number is not known"
    ACKNOWLEDGED = "acknowledgement"
    SLOT_GRANTED = "its turn"
    OPENED = "session number from Pi"
    LISTED = "entries from Pi"
    LISTED_NONE = "nothing to get from Pi"
    FETCHED = "records from Xiu"
    BEHIND = "the inbox has more and the window has space"
    FAILED = "no answer in time, or refused for now"
    PAUSED_ENOUGH = "pause over"
    UNACKNOWLEDGED = "nothing acknowledged for too long"
    POLL = "a minute without a read"
    BROKEN = "the gateway's stream broke"
    FENCED = "a newer session was opened elsewhere"
    REFUSED = "refused for good"
