"""The work for every server. Pure.

Source: docs/performance.md, "Beside others".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["idle", "messages", "connections", "mail", "topics"]


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of work. Every subscriber has a connection of its own; a publisher may serve several topics."""

    name: str
    title: str
    kind: Kind = "messages"
    groups: int = 1
    """Number of topics."""
    members: int = 1
    """Subscribers of each topic; for `connections` and `mail` the total over all topics."""
    publishers: int = 1
    qos: int = 0
    """QoS of publications."""
    subscribed_qos: int = 0
    """QoS that subscribers ask for, at every server the same. A load fails where another is granted."""
    window: int = 0
    """Closed loop: messages of a topic that its slowest subscriber does not have yet, or that are not confirmed."""
    rate: float = 0.0
    """Open loop: messages a second, whatever the fate of earlier ones."""
    bytes: int = 100
    """Size of a message's body."""
    timed_every: int = 1
    """Interval of the messages that are timed, at every subscriber. It does not divide the window, so that it is not always the
    first."""
    act: Literal["write", "take", "read"] = "write"
    """Of topics: write windows; take messages that were written before, and acknowledge them; read without acknowledgements."""
    level: Literal["accepted", "persisted", "replicated"] = "accepted"
    """Of topics: when a written message is confirmed."""
    block: int = 256 << 10
    """Of topics: bytes of the bodies in a block of a writer, if the server has blocks."""
    ordered: bool = False
    """Of topics: acknowledged in the order of keys."""
    prefilled: int = 0
    """Of topics: messages that are written before."""

    @property
    def size(self) -> str:
        """Description of the sent messages."""
        if self.kind == "idle":
            return "fresh, no client"
        if self.kind == "connections":
            return f"{self.members:,}, of which the first tenth is not counted"
        if self.kind == "topics" and self.act != "write":
            return f"{self.bytes} bytes, {self.prefilled:,} stored"
        how = f"{self.rate:,g} a second" if self.rate else f"window {self.window:,}"
        return f"{self.bytes} bytes, {how}"


STORED: Final = 1_000_000
"""Messages that are there before a case takes or reads them."""
CASES: Final = {
    case.name: case
    for case in (
        Case("idle", "at rest", "idle"),
        Case("connections", "connections, each subscribed", "connections", groups=100, members=1000),
        Case("fanout-100", "fan-out to 100", members=100, window=32, timed_every=13),
        Case("fanout-1000", "fan-out to 1,000", members=1000, window=8, timed_every=7),
        Case("fanout-100-open", "fan-out to 100, open", members=100, rate=500),
        Case("rooms", "100 rooms of 10", groups=100, members=10, publishers=4, window=4, timed_every=13),
        Case("pair-qos0", "one to one, QoS 0", window=256, timed_every=7),
        Case("pair-qos1-1", "one to one, QoS 1", qos=1, window=1),
        Case("pair-qos1-64", "one to one, QoS 1", qos=1, window=64, timed_every=7),
        Case("pair-2000", "one to one, small, open", rate=2000, bytes=16),
        Case("mail", "mail to 100 users", "mail", groups=100, members=100, qos=1, subscribed_qos=1, window=1000),
        Case("mail-1", "mail to 100 users", "mail", groups=100, members=100, qos=1, subscribed_qos=1, window=1),
        Case("topic-write-256k", "topic, blocks of 256 KiB", "topics", window=20_000),
        Case("topic-write-16k", "topic, blocks of 16 KiB", "topics", window=2_500, block=16 << 10),
        Case("topic-write-sync", "topic, blocks of 256 KiB, synced", "topics", window=20_000, level="replicated"),
        Case("topic-one", "topic, one at a time, synced", "topics", window=1, block=0, level="replicated"),
        Case("topic-any", "topic, acknowledged", "topics", act="take", prefilled=STORED),
        Case("topic-ordered", "topic, acknowledged in order", "topics", act="take", ordered=True, prefilled=STORED),
        Case("topic-read", "topic, read from its beginning", "topics", act="read", prefilled=STORED),
        Case("topic-100", "100 topics, synced", "topics", groups=100, window=1_000, level="replicated"),
    )
}
"""By name, in running order: connections before messages, because their memory is what they add to a fresh server."""
