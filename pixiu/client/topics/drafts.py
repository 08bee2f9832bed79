"""Messages to a durable topic before they are sent: options, and checks of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from pixiu.client.mail.options import LEVELS, level_of
from pixiu.client.messages.drafts import no_such_option
from pixiu.client.messages.load_test import mark_of
from pixiu.errors import InvalidArgument, RecordTooLarge
from pixiu.ids import is_within
from pixiu.placement.slots import SLOTS
from pixiu.wire.block import HEAD_BYTES, INDEX_BYTES, MAX_BLOCK_BYTES, MAX_TAG_BYTES, Encoded, Message, encode_message
from pixiu.wire.levels import Level

T = TypeVar("T")
TopicLevelName = Literal["stored", "replicated", "persisted", "accepted"]
MAX_NAME: Final = 128
NAME_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
MAX_PROGRESS: Final = (1 << 64) - 1
MAX_DELAY_US: Final = 366 * 24 * 3600 * 1_000_000
MAX_SECONDS: Final = 1e9
"""Longest time limit of a call."""
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)


class TopicSendOptions(TypedDict, total=False):
    """Options of a message beside its body: `await topic.send(b"…", key="order-7")`."""

    key: bytes | str | None
    """Messages with the same key stay in order, and are read as `message.key`; at most 4,096 bytes. None, the default: none."""
    headers: Mapping[str, str | bytes] | None
    """Named values, at most 64; None, the default: none."""
    slot: int | None
    """Logical partition, 0 to 65535; None, the default: that of the key, without a key in turn."""
    event_time: datetime | int | None
    """Time at which it happened: a datetime, or Unix µs; None, the default: not given."""
    deliver_at: datetime | int | None
    """Time from which channels deliver it, at most a year ahead: a datetime, or Unix µs; None, the default: at once. Readers get
    it at once."""
    expires_in_s: int | None
    """Seconds after which channels no longer deliver it; None, the default: never."""
    tag: str | None
    """Goes to members of a channel with this tag, if there are any; at most 100 bytes; None, the default: none."""
    load_test: bool
    """True: it belongs to a load test, and receivers do not get it unless they ask for such. Default: as the message that is being
    handled by a handler of `run`; else False."""
    level: TopicLevelName
    """"replicated", the default: confirmed when it is on the disks of all replicas in sync; "stored": in the object store as well,
    about a second later; "persisted": on the leader's disk; "accepted": in the leader's log. The latter two may be lost by a change
    of leader."""
    progress: int
    """The application's own number, which rises with every message, for writers with a name; 0, the default: none."""


KNOWN: Final = frozenset(TopicSendOptions.__annotations__)


class TopicDraft(NamedTuple):
    """A checked message."""

    encoded: Encoded
    """Its slot is set later if none is given."""
    key: bytes | None
    has_slot: bool
    level: Level
    progress: int

    @property
    def size(self) -> int:
        """Bytes in a block."""
        return INDEX_BYTES + len(self.encoded.data)


def draft(body: bytes, **options: Unpack[TopicSendOptions]) -> TopicDraft:
    """Check a message. Raises `InvalidArgument` and `RecordTooLarge`."""
    if not KNOWN.issuperset(options):
        unknown = {name: value for name, value in options.items() if name not in KNOWN}
        raise no_such_option(unknown, TopicSendOptions.__annotations__)
    if not isinstance(body, bytes | bytearray | memoryview):
        raise InvalidArgument(f"a message's body is bytes, not {type(body).__name__}; encode text: body.encode()")
    slot, progress, key = options.get("slot"), options.get("progress", 0), options.get("key")
    key, tag = None if key is None else key_of(key), options.get("tag")
    tag = None if tag is None else tag_of(tag)
    if slot is not None and not is_within(slot, 0, SLOTS - 1):
        raise InvalidArgument(f"a slot is from 0 to {SLOTS - 1}, not {slot!r}")
    if not is_within(progress, 0, MAX_PROGRESS):
        raise InvalidArgument(f"progress is from 1 to 2^64-1, or 0 for none, not {progress!r}")
    headers = headers_of(options.get("headers") or {})
    deliver_at_us, expires_in_s = micros_of(options.get("deliver_at")), options.get("expires_in_s")
    if deliver_at_us is not None and deliver_at_us > time.time_ns() // 1000 + MAX_DELAY_US:
        raise InvalidArgument("deliver_at is at most a year ahead; keep what is due later elsewhere, and send it then")
    if expires_in_s is not None:
        check_count(expires_in_s, "expires_in_s", least=1)
    message = Message(
        bytes(body), slot or 0, key, headers, micros_of(options.get("event_time")), deliver_at_us, expires_in_s,
        tag, mark_of(options.get("load_test")),
    )  # fmt: skip
    found = TopicDraft(encode_message(message), key, slot is not None, topic_level(options.get("level", "replicated")), progress)
    if HEAD_BYTES + found.size > MAX_BLOCK_BYTES:
        raise RecordTooLarge(
            f"a message of {found.size} bytes, headers and key included, is above the limit of {MAX_BLOCK_BYTES - HEAD_BYTES}; "
            "send a reference to the content instead"
        )
    return found


def drafts(bodies: Sequence[bytes], **options: Unpack[TopicSendOptions]) -> list[TopicDraft]:
    """Check messages with the same options. Raises as `draft`."""
    if not bodies:
        return []
    first = draft(b"", **options)  # the fields of the options; a body follows them
    slot, flags, head = first.encoded
    rest, found = first[1:], list[TopicDraft]()
    most = MAX_BLOCK_BYTES - HEAD_BYTES - INDEX_BYTES - len(head)
    for body in bodies:
        if not isinstance(body, bytes) or len(body) > most:
            draft(body, **options)  # says what is wrong with it, or takes another kind of bytes
        found.append(TopicDraft(Encoded(slot, flags, head + bytes(body)), *rest))
    return found


def key_of(key: bytes | str) -> bytes:
    """A key as bytes. Raises `InvalidArgument`."""
    if isinstance(key, str):
        return text_of(key, "a key").encode()
    if not isinstance(key, bytes):
        raise InvalidArgument(f"a key is bytes or text, not {type(key).__name__}; str(key) makes a text")
    return key


def text_of(text: str, what: str) -> str:
    """Check that a text can be sent, as UTF-8. Raises `InvalidArgument`."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{what} is text, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InvalidArgument(
            f"{what} has half a character at {problem.start}, {text[problem.start]!r}, which no UTF-8 has"
        ) from None
    return text


def tag_of(tag: str) -> str:
    """Check a tag. Raises `InvalidArgument`."""
    size = len(text_of(tag, "a tag").encode())
    if not 0 < size <= MAX_TAG_BYTES:
        raise InvalidArgument(f"a tag has 1 to {MAX_TAG_BYTES} bytes, this one {size}")
    return tag


def check_seconds(seconds: float | None, what: str, most: float = MAX_SECONDS) -> None:
    """Check a time limit; None: without. Raises `InvalidArgument`."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= most):
        raise InvalidArgument(f"{what} is from 0 to {most:g} seconds, not {seconds!r}")


def duration_of(time: timedelta | None, what: str, most: int) -> int:
    """Whole seconds of a time; None: 0. Raises `InvalidArgument`."""
    if time is None:
        return 0
    if not isinstance(time, timedelta):
        raise InvalidArgument(f"{what} is a timedelta, timedelta(days=7) for example, not {type(time).__name__}")
    seconds = int(time.total_seconds())
    if not 0 < seconds <= most:
        raise InvalidArgument(f"{what} is from a second to {most:,} seconds ({most // 86_400:,} days), not {time}")
    return seconds


def list_of(items: Iterable[T], what: str) -> list[T]:
    """List what an argument holds. Raises `InvalidArgument` if it is one value, not several."""
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        raise InvalidArgument(f"{what} is a list, [1] for example, not {items!r}")
    return list(items)


def topic_level(name: TopicLevelName) -> Level:
    """The level with a name. Raises `InvalidArgument`."""
    if name == "stored":
        return Level.STORED
    try:
        return level_of(name)
    except InvalidArgument:
        raise InvalidArgument(f"a level is one of stored, {', '.join(LEVELS)}, not {name!r}") from None


def headers_of(headers: Mapping[str, str | bytes]) -> list[tuple[str, bytes]]:
    """Headers as bytes. Raises `InvalidArgument`."""
    if not isinstance(headers, Mapping):
        raise InvalidArgument(f"headers are a dict of texts, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str):
            raise InvalidArgument(f"the header {name!r}: a name is text, not {type(name).__name__}")
        if not isinstance(value, str | bytes):
            raise InvalidArgument(f"the header {name!r}: a name is text, a value text or bytes, not {type(value).__name__}")
        text_of(name, "a header's name")
    return [
        (name, text_of(value, f"the header {name!r}").encode() if isinstance(value, str) else value)
        for name, value in headers.items()
    ]


def check_count(number: int, what: str, most: int = (1 << 32) - 1, *, least: int = 0) -> int:
    """Check a number of a request. Raises `InvalidArgument`."""
    if not is_within(number, least, most):
        raise InvalidArgument(f"{what} is a number from {least} to {most}, not {number!r}")
    return number


def micros_of(when: datetime | int | None) -> int | None:
    """Convert a time to Unix µs. Raises `InvalidArgument` for a datetime without a time zone."""
    if isinstance(when, datetime):
        if when.tzinfo is None:
            raise InvalidArgument(f"{when} has no time zone: datetime.now(UTC), or .astimezone()")
        if when < EPOCH:
            raise InvalidArgument(f"a time is from 1970 on, not {when}")
        return (when - EPOCH) // MICROSECOND
    if when is not None and not is_within(when, 0, (1 << 63) - 1):
        raise InvalidArgument(f"a time is a datetime or Unix µs, not {when!r}")
    return when


def time_of(micros: int) -> datetime:
    """Convert Unix µs to a time, UTC."""
    return EPOCH + timedelta(microseconds=micros)


def check_name(name: str, what: str = "topic") -> str:
    """Check the name of a topic or channel. Raises `InvalidArgument`."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not NAME_CHARACTERS.issuperset(name):
        raise InvalidArgument(f"the name of a durable {what} is 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -, not {name!r}")
    return name
