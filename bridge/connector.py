"""The shape of a connector: a target to which messages of a topic are written, or a source whose messages are stored in one. Pure.

    class Target                                     class Source
        open()      raises Unavailable, Configuration…   open(after)   continues after what is stored
        write(batch)  one outcome for each message       read()        some records, each with its position
        settled(…)    they will never come again         confirm(…)    they are stored: forget them
        close()                                          close()

Everything else is the bridge's: credit, retries, order, dead letters, pause and resume, metrics.

Source: docs/bridges.md, "A connector of your own".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

from pixiu.errors import Unavailable

MAX_WHY: Final = 200
"""Characters of a foreign system's own words in a reason."""


class Item(Protocol):
    """A message of a topic, as a target gets it: the SDK's `TopicMessage`."""

    @property
    def body(self) -> bytes:
        """The bytes that the writer sent."""

    @property
    def key(self) -> bytes | None:
        """The key; None if it has none."""

    @property
    def headers(self) -> Mapping[str, bytes]:
        """Named values."""

    @property
    def topic(self) -> str:
        """The topic's name."""

    @property
    def position(self) -> tuple[int, int]:
        """(part, offset), which no other message of the topic has."""

    @property
    def time_us(self) -> int:
        """Time of storing, Unix µs."""

    @property
    def event_time_us(self) -> int | None:
        """Time at which it happened, Unix µs, as its writer says."""


class Verdict(Enum):
    """Fate of a message in one write."""

    DONE = "the target has it, and has confirmed that"
    AGAIN = "not now: it is written again"
    NEVER = "it goes to the dead letters"
    SPLIT = "something in the batch is wrong: its halves are written again, and a message that is alone goes to the dead letters"


class Outcome(NamedTuple):
    """Fate of a message, and why."""

    verdict: Verdict
    why: str = ""
    """A sentence that says what to do; empty for DONE."""
    after_s: float = 0.0
    """Wait that the target asked for, seconds; 0: it named none."""


DONE: Final = Outcome(Verdict.DONE)


class Target(Protocol):
    """A place to which messages are written."""

    async def open(self) -> None:
        """Connect. Raises `Unavailable` (tried again soon) and `ConfigurationError` (tried again seldom)."""

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Write messages in their order, and wait until the target has confirmed them. Returns an outcome for each.

        A target that keeps order writes nothing after a message that it refuses for now. Raises `Unavailable` if nothing is known:
        the target is closed and opened, and everything is written again.
        """

    def settled(self, batch: Sequence[Item]) -> None:
        """Note messages whose acknowledgement is committed: they never come again."""

    async def close(self) -> None:
        """Disconnect. Also called when `open` failed."""


class Record(NamedTuple):
    """A message of a source."""

    body: bytes
    key: bytes | None = None
    headers: Mapping[str, bytes] = {}
    event_time_us: int | None = None
    stream: str = ""
    """The part of the source that it comes from, such as a partition's number; a stream is read in order."""
    progress: int = 0
    """Its position in the stream, from 1 on, rising: a repeat is not stored again. 0: the source has no positions."""
    handle: Any = None
    """Anything that the source needs to confirm it."""
    id_header: str = ""
    """Header whose value no other message of the source has: what the topic has stored lately is not stored again. Empty: none."""


class Source(Protocol):
    """A place from which messages are read."""

    async def open(self) -> Sequence[str]:
        """Connect. Returns its streams that have positions. Raises `Unavailable` and `ConfigurationError`."""

    async def resume(self, after: Mapping[str, int]) -> None:
        """Continue after these positions: stream → the highest up to which all is stored, 0 for none. Called once, after `open`."""

    async def read(self) -> Sequence[Record]:
        """Wait for records, a second at most; may return none. Raises `Unavailable`: the source is closed and opened."""

    async def confirm(self, records: Sequence[Record]) -> None:
        """Forget records: they are stored, and so is everything that was read before them. Raises `Unavailable`."""

    async def close(self) -> None:
        """Disconnect. Also called when `open` failed."""


def away(text: str, after_s: float = 0.0) -> Unavailable:
    """The error of a system that does not answer now; it asked for a wait, seconds."""
    error = Unavailable(text)
    error.retry_after_ms = int(after_s * 1000)
    return error


def said(error: object) -> str:
    """A foreign system's words, cut and on one line, for a reason."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_WHY else text[:MAX_WHY] + "…"
