"""A topic's parts and where they are, as a client knows them. Pure.

Source: docs/topics.md, "Slots, parts and their lineage".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pixiu.placement.slots import Lineage


class ChannelInfo(NamedTuple):
    """A channel of a topic."""

    name: str
    ordered: bool = False
    """True: the messages of a slot come one batch after the other."""
    from_end: bool = False
    """True: it began at the end of the parts there were; False: with the first message that was kept."""
    max_attempts: int = 0
    """Deliveries of a message before it goes to the dead letters."""
    timeout_ms: int = 0
    """Time for which a member may keep a message, milliseconds."""
    filter: str = ""
    """JSON; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedSettings:
    """A topic's settings, as a client knows them."""

    retention_s: int = 0
    """Age after which messages may be dropped, seconds; 0: never."""
    retention_bytes: int = 0
    """Size of a part above which its oldest messages may be dropped; 0: no limit."""
    messages_per_s: int = 0
    """Messages that it takes in a second, from all writers together; 0: no limit."""
    bytes_per_s: int = 0
    """Bytes that it takes in a second; 0: no limit."""
    read_messages_per_s: int = 0
    """Messages that it gives in a second, to all members and readers together; 0: no limit."""
    read_bytes_per_s: int = 0
    """Bytes that it gives in a second; 0: no limit."""
    retain_acknowledged: bool = False
    """True: what all channels have acknowledged may be dropped."""
    compact_s: int = 0
    """Seconds for which a tombstone is kept; 0: the topic is not compacted."""
    store: str = ""
    """Folder or URL where its closed segments go; empty: as the servers are configured."""


@dataclass(frozen=True, slots=True)
class TopicMap(DescribedSettings):
    """One version of a topic's description."""

    name: str
    id: int
    version: int
    lineage: Lineage = field(compare=False)
    groups: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Group → client addresses of its replicas, the leader first if it is known."""
    channels: Mapping[str, ChannelInfo] = field(default_factory=dict)
    deleted_at_ms: int = 0
    """Unix ms; 0: it is not deleted."""

    def replaces(self, other: TopicMap) -> bool:
        """True if the other topic is gone: this one was deleted, or has only the same name."""
        return self.id != other.id or self.deleted_at_ms > 0

    def gone_text(self) -> str:
        """A text for those who used the topic that this one replaces."""
        back = f"; `pixiu topic restore {self.name}` brings it back within a day" if self.deleted_at_ms else ""
        return f"the topic {self.name} was deleted{back}"
