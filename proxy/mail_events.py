"""Events of a proxy's mail pipeline and of its notices, and the effects that they request.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.contract import EndOfTurn, Tick
from pixiu.errors import Refusal
from pixiu.ids import msg_lane
from pixiu.wire.levels import Level, Triple


class Store(NamedTuple):
    """A partition of Xiu or of Pi."""

    pi: bool
    partition: int

    @property
    def role(self) -> str:
        """Role of the store: xiu or pi."""
        return "pi" if self.pi else "xiu"


@dataclass(frozen=True, slots=True)
class WriterOpened:
    """A writer's stream opened and identified itself."""

    stream: int
    worker: int
    generation: int
    own: bool = False
    """True for the proxy's own one, for kept sessions: it is taken whatever kinds the proxy takes."""


@dataclass(frozen=True, slots=True)
class WriterClosed:
    """A writer's stream ended: nobody waits for its answers. Its mail in flight may be stored or not."""

    stream: int


@dataclass(frozen=True, slots=True)
class MailReceived:
    """A batch of a writer: `count` records, the first at `position`."""

    stream: int
    data: bytes
    count: int
    position: int
    level: Level
    more: Mapping[int, Sequence[int]]
    """Index of a record → its further receivers, besides its key."""


class RoomMail(NamedTuple):
    """A message to a room, as mail for some sessions: the room is its key, and chooses the partition of Xiu."""

    room: int
    record: bytes
    uins: Sequence[int]
    """Its receivers; the room is none of them."""


@dataclass(frozen=True, slots=True)
class RoomMailReceived:
    """Mail of the proxy's own writer, the first at `position`, each at level replicated."""

    stream: int
    position: int
    mails: Sequence[RoomMail]


@dataclass(frozen=True, slots=True)
class StoresChanged:
    """Number of partitions of each store; 0 if the layout has none."""

    xius: int
    pis: int
    next_xius: int = 0
    next_pis: int = 0
    """Number of partitions after the doubling in progress; 0 without one."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A stream to a partition's leader is open. `link` names it from now on."""

    store: Store
    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The stream to a leader ended, or could not be opened (`link` 0)."""

    store: Store
    link: int
    text: str


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Xiu's answer for consecutive records."""

    position: int
    count: int
    sequence: int
    """If stored now: of the first one."""
    msg_id: int
    """If stored before."""
    refusal: Refusal | None = None
    partitions: int = 0
    """With WRONG_PARTITION: number of partitions by the count of the partition that refused."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Xiu answered a request to store mail."""

    partition: int
    link: int
    runs: Sequence[StoredRun]
    triple: Triple
    copies: int


@dataclass(frozen=True, slots=True)
class Appended:
    """Pi answered a request to append to inboxes."""

    partition: int
    link: int
    request: int
    results: Sequence[int]
    """InboxSeq of each append, or a negative reason; none below level replicated."""
    refusal: Refusal | None
    triple: Triple
    copies: int
    partitions: int = 0
    """With WRONG_PARTITION: number of partitions, by the count of the store that refused."""


Event = (
    WriterOpened
    | WriterClosed
    | MailReceived
    | RoomMailReceived
    | StoresChanged
    | LinkUp
    | LinkDown
    | Stored
    | Appended
    | EndOfTurn
    | Tick
)


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to a partition's leader, and again whenever it ends."""

    store: Store


@dataclass(frozen=True, slots=True)
class Hurry:
    """Open a stream soon, because somebody waits for it."""

    store: Store


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Drop a stream that is of no use any more, and open another one. Later answers on it do not count."""

    store: Store
    link: int
    text: str
    again: bool = False
    """True to use the same replica again: it leads, and only what was in flight must be sent again."""


@dataclass(frozen=True, slots=True)
class SendStore:
    """Send records to a Xiu."""

    partition: int
    link: int
    position: int
    data: bytes
    count: int
    level: Level
    epoch: int


@dataclass(frozen=True, slots=True)
class SendAppend:
    """Send operations to a Pi."""

    partition: int
    link: int
    request: int
    operations: bytes
    level: Level


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of consecutive records of a writer."""

    position: int
    count: int
    copies: int = 0
    msg_ids: Sequence[int] = ()
    code: str = ""
    text: str = ""
    open: Sequence[int] = ()
    """Inboxes that do not have a mail with several receivers, as far as is known."""


def refused(position: int, why: Refusal, msg_ids: Sequence[int] = (), open_inboxes: Sequence[int] = ()) -> Result:
    """Return the result of a record that was refused."""
    return Result(position, 1, 0, msg_ids, why.code, why.text, open_inboxes)


@dataclass(frozen=True, slots=True)
class Answer:
    """Report to a writer the outcome of its mail."""

    stream: int
    results: Sequence[Result]
    triples: Mapping[Store, Triple]
    unconfirmed_bytes: int
    """Bytes of this writer that are unconfirmed now."""


@dataclass(frozen=True, slots=True)
class EndWriter:
    """End a writer's stream; the writer opens another one and sends everything unconfirmed again."""

    stream: int
    why: Refusal


@dataclass(frozen=True, slots=True)
class InboxesGrew:
    """Inboxes of these users grew; their relay owners must be informed. The records lie end to end in `data`."""

    uins: Sequence[int]
    seqs: Sequence[int]
    """InboxSeq of each; empty if the level gives none."""
    msg_ids: Sequence[int]
    data: bytes
    ends: Sequence[int]
    """End of each record in `data`; one record for all if there is only one."""
    indexes: Sequence[int]
    """Index of each user's record."""

    def items(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        """(UIN, lane, InboxSeq, MsgID, record) of each; InboxSeq 0: not known here."""
        for at, (uin, msg_id, index) in enumerate(zip(self.uins, self.msg_ids, self.indexes, strict=True)):
            start = self.ends[index - 1] if index else 0
            yield uin, msg_lane(msg_id), self.seqs[at] if self.seqs else 0, msg_id, self.data[start : self.ends[index]]


Effect = Connect | Hurry | Disconnect | SendStore | SendAppend | Answer | EndWriter | InboxesGrew


# --- notices of grown inboxes, for the relays that deliver the users' mail; `InboxesGrew` is an event there


class Notice(NamedTuple):
    """A lane of an inbox has new entries."""

    uin: int
    lane: int
    seqs: list[int]
    """InboxSeq of each; 0: not known."""
    msg_ids: list[int]
    records: list[bytes]
    """Record of each; empty: not in the notice."""
    tries: int

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self.records))

    def part(self, begin: int, end: int) -> Notice:
        """Entries from the index `begin` to below `end`."""
        return Notice(self.uin, self.lane, self.seqs[begin:end], self.msg_ids[begin:end], self.records[begin:end], self.tries)

    def without_records(self, tries: int) -> Notice:
        """Notice of the newest entry alone, without its record."""
        return Notice(self.uin, self.lane, self.seqs[-1:], self.msg_ids[-1:], [b""], tries)


@dataclass(frozen=True, slots=True)
class OwnersChanged:
    """The running relays by partition, and the number of partitions; 0 if the cluster has no relays."""

    partitions: int
    relays: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class NoticesTaken:
    """A relay answered a batch; other relays serve the users in `elsewhere`."""

    relay: int
    number: int
    elsewhere: Sequence[int]


@dataclass(frozen=True, slots=True)
class RelayLost:
    """The stream to a relay ended, or could not be opened: unanswered notices may be lost."""

    relay: int


NoticesEvent = InboxesGrew | OwnersChanged | NoticesTaken | RelayLost | EndOfTurn | Tick


@dataclass(frozen=True, slots=True)
class SendNotices:
    """Send notices to a relay, on its open stream or on a new one."""

    relay: int
    number: int
    notices: Sequence[Notice]


@dataclass(frozen=True, slots=True)
class LeaveRelay:
    """End the stream to a relay, if there is one."""

    relay: int


NoticesEffect = SendNotices | LeaveRelay
