"""What happens to a proxy's mail pipeline and to its notices, and what they ask their shells to do.

Source: docs/architecture.md, "A mail is sent".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.runtime.contract import EndOfTurn, Tick
from pixiu.ids import msg_lane
from pixiu.wire.levels import Level, Triple


class Store(NamedTuple):
    """A partition of Xiu or of Pi."""

    pi: bool
    partition: int

    @property
    def role(self) -> str:
        """The role that the store is: xiu or pi."""
        return "pi" if self.pi else "xiu"


@dataclass(frozen=True, slots=True)
class WriterOpened:
    """A writer's stream; it has said who it is."""

    stream: int
    worker: int
    generation: int


@dataclass(frozen=True, slots=True)
class WriterClosed:
    """The stream is gone: nobody waits for its answers. What is under way may be stored or not."""

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
    """Index of a record → its receivers beside its key."""


@dataclass(frozen=True, slots=True)
class StoresChanged:
    """The number of partitions of each; 0 where the layout has none."""

    xius: int
    pis: int
    next_xius: int = 0
    next_pis: int = 0
    """While a doubling is under way, how many there will be."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A stream to a partition's leader is open. `link` names it in what follows."""

    store: Store
    link: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    """It is gone, or could not be opened (`link` 0)."""

    store: Store
    link: int
    text: str


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a Xiu says of records one after the other."""

    position: int
    count: int
    sequence: int
    """Stored now: of the first."""
    msg_id: int
    """Stored before."""
    code: str
    text: str
    partitions: int = 0
    """With WRONG_PARTITION: by how many the partition counts that says so."""


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
    """InboxSeq of each append, or below 0 why not; none below level replicated."""
    code: str
    text: str
    triple: Triple
    copies: int
    partitions: int = 0
    """With WRONG_PARTITION: how many there are, by the store that refused."""


Event = WriterOpened | WriterClosed | MailReceived | StoresChanged | LinkUp | LinkDown | Stored | Appended | EndOfTurn | Tick


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a stream to a partition's leader, and again whenever it is gone."""

    store: Store


@dataclass(frozen=True, slots=True)
class Hurry:
    """Somebody waits for a stream that is not open."""

    store: Store


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A stream is of no use any more: open another one. What it still says does not count."""

    store: Store
    link: int
    text: str
    again: bool = False
    """To the same replica: it leads, and only what was under way is to be sent once more."""


@dataclass(frozen=True, slots=True)
class SendStore:
    """Records for a Xiu."""

    partition: int
    link: int
    position: int
    data: bytes
    count: int
    level: Level
    epoch: int


@dataclass(frozen=True, slots=True)
class SendAppend:
    """Operations for a Pi."""

    partition: int
    link: int
    request: int
    operations: bytes
    level: Level


@dataclass(frozen=True, slots=True)
class Result:
    """What became of records of a writer, one after the other."""

    position: int
    count: int
    copies: int = 0
    msg_ids: Sequence[int] = ()
    code: str = ""
    text: str = ""
    open: Sequence[int] = ()
    """Of a mail with several receivers: inboxes that have it not, as far as is known."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a writer: what became of its mail."""

    stream: int
    results: Sequence[Result]
    triples: Mapping[Store, Triple]
    unconfirmed_bytes: int
    """Of this writer, now."""


@dataclass(frozen=True, slots=True)
class EndWriter:
    """End a writer's stream: it opens another one and sends everything unconfirmed again."""

    stream: int
    code: str
    text: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class InboxesGrew:
    """These users have mail: for who delivers it. The records lie end to end in `data`."""

    uins: Sequence[int]
    seqs: Sequence[int]
    """InboxSeq of each; empty where the level gives none."""
    msg_ids: Sequence[int]
    data: bytes
    ends: Sequence[int]
    """Where each record of `data` ends; one record for all when there is one."""
    indexes: Sequence[int]
    """Which record is each user's."""

    def items(self) -> Iterator[tuple[int, int, int, int, bytes]]:
        """(UIN, lane, InboxSeq, MsgID, record) of each; InboxSeq 0: not known here."""
        for at, (uin, msg_id, index) in enumerate(zip(self.uins, self.msg_ids, self.indexes, strict=True)):
            start = self.ends[index - 1] if index else 0
            yield uin, msg_lane(msg_id), self.seqs[at] if self.seqs else 0, msg_id, self.data[start : self.ends[index]]


Effect = Connect | Hurry | Disconnect | SendStore | SendAppend | Answer | EndWriter | InboxesGrew


# --- notices: who delivers a user's mail is told that the inbox has grown; `InboxesGrew` is an event there


class Notice(NamedTuple):
    """A lane of an inbox has new entries."""

    uin: int
    lane: int
    seqs: list[int]
    """InboxSeq of each; 0: not known."""
    msg_ids: list[int]
    records: list[bytes]
    """Of each; empty: not in the notice."""
    tries: int

    @property
    def size(self) -> int:
        """Bytes of the records."""
        return sum(map(len, self.records))

    def part(self, begin: int, end: int) -> Notice:
        """The entries from the index `begin` to below `end`."""
        return Notice(self.uin, self.lane, self.seqs[begin:end], self.msg_ids[begin:end], self.records[begin:end], self.tries)

    def without_records(self, tries: int) -> Notice:
        """That there is the newest of them, and no more."""
        return Notice(self.uin, self.lane, self.seqs[-1:], self.msg_ids[-1:], [b""], tries)


@dataclass(frozen=True, slots=True)
class OwnersChanged:
    """The relays that run, by partition, and the number of partitions; 0 where the cluster has no relays."""

    partitions: int
    relays: Mapping[int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class NoticesTaken:
    """A relay has answered for a batch, but for these users, whom another relay serves."""

    relay: int
    number: int
    elsewhere: Sequence[int]


@dataclass(frozen=True, slots=True)
class RelayLost:
    """The stream to a relay is gone, or could not be opened: what it did not answer may be lost."""

    relay: int


NoticesEvent = InboxesGrew | OwnersChanged | NoticesTaken | RelayLost | EndOfTurn | Tick


@dataclass(frozen=True, slots=True)
class SendNotices:
    """Tell a relay, on the stream that is open to it, or on a new one."""

    relay: int
    number: int
    notices: Sequence[Notice]


@dataclass(frozen=True, slots=True)
class LeaveRelay:
    """End the stream to a relay, if there is one."""

    relay: int


NoticesEffect = SendNotices | LeaveRelay
