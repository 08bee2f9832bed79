"""Answers of the HTTP API: one table from errors to status codes, and texts that tell nothing about the cluster's inside. Pure.

Source: docs/http.md, "Errors".
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pixiu import errors
from pixiu.errors import LimitError, LocalError, PixiuError

STATUS: Final[dict[type[PixiuError], int]] = {
    errors.NotAuthenticated: 401,
    errors.NotAllowed: 403,
    errors.UnknownTopic: 404,
    errors.UnknownDevice: 404,
    errors.Offline: 404,
    errors.IdReused: 409,
    errors.IdTooOld: 409,
    errors.TopicExists: 409,
    errors.TopicInUse: 409,
    errors.LoginReplaced: 409,
    errors.TooManyDevices: 409,
    errors.InboxFull: 409,
    errors.OldSession: 409,
    errors.Gone: 410,
    errors.RecordTooLarge: 413,
    errors.TopicAway: 503,
    errors.Overloaded: 429,
    errors.NotServed: 501,
    errors.OutcomeUnknown: 504,
    errors.Dropped: 504,
    errors.Unavailable: 503,
    errors.Draining: 503,
    errors.LeaseExpired: 503,
    errors.TooFewInSync: 503,
    errors.DiskFull: 503,
    errors.LimitError: 429,
    errors.NotConnected: 503,
    errors.ConfigurationError: 500,
    errors.LocalError: 400,
}
"""Error → status; an error that is missing has that of its nearest base, and 500 without one."""
TEXTS: Final[dict[int, str]] = {
    404: "nobody is there to receive it",
    409: "the state of the cluster does not allow it now",
    410: "it is not there any more",
    429: "too much at once: try again later",
    500: "the request failed inside the cluster",
    501: "this cluster does not serve such requests",
    503: "the cluster cannot do it now: try again later",
    504: "nobody confirmed it in time: it may have happened or not",
}
"""Texts for errors whose own may name processes of the cluster."""
RETRY_S: Final = 1


class Answer(NamedTuple):
    """An error of the API."""

    status: int
    code: str
    text: str
    retry_after_s: int = 0


class Refused(Exception):
    """A request that the API itself refuses."""

    def __init__(self, status: int, code: str, text: str, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.answer = Answer(status, code, text, retry_after_s)


def bad(text: str) -> Refused:
    """A request that is wrong."""
    return Refused(400, errors.InvalidArgument.code, text)


def busy(text: str, retry_after_s: int = RETRY_S) -> Refused:
    """A request beyond a limit."""
    return Refused(429, errors.Overloaded.code, text, retry_after_s)


def answer_of(error: PixiuError) -> Answer:
    """Answer that reports an error of the SDK."""
    status = next((STATUS[base] for base in type(error).__mro__ if base in STATUS), 500)
    own = isinstance(error, LocalError | LimitError) and status < 500
    retry_s = -(-error.retry_after_ms // 1000)
    return Answer(
        status,
        error.code if status != 500 else "INTERNAL",
        str(error) if own else TEXTS[status],
        max(retry_s, RETRY_S) if status in (429, 503) else 0,
    )
