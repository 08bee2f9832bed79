"""Events and effects of the admin's core. Pure.

    shell      Elected, Deposed, GroupsChanged
    proxies    ChangeRequested, PlanRequested      Answer, Planned
    registry   Written                             WriteTopic
    groups     Appended, LoadRead                  Append, AskLoad

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from admin.balance import Move
from cluster.core.contract import Tick
from cluster.topics.entries import KnownWriter
from pixiu.discovery.topics import Numbers, TopicNode, TopicSettings
from pixiu.errors import Refusal

# --- what clients ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTopic(TopicSettings):
    """Make a topic. `parts` 0: one for each group."""

    parts: int = 0
    if_missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AlterTopic(TopicSettings):
    """Change a topic's settings."""


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    """Put a topic into the bin. `force`: although it has members; `now`: and remove its messages at once."""

    force: bool = False
    now: bool = False


@dataclass(frozen=True, slots=True)
class RestoreTopic:
    """Take a topic out of the bin."""


@dataclass(frozen=True, slots=True)
class SetChannel:
    """Make a channel or change it; one that is there keeps its mode and beginning. Numbers of 0: the defaults, or what it has."""

    name: str
    ordered: bool = False
    from_end: bool = False
    max_attempts: int = 0
    timeout_ms: int = 0
    filter: str = ""


@dataclass(frozen=True, slots=True)
class RemoveChannel:
    """Remove a channel."""

    name: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Seal parts that adjoin each other, and open others for their slots."""

    parts: tuple[int, ...]
    bounds: tuple[int, ...] = ()
    """First slots of the children after the first one."""
    groups: tuple[int, ...] = ()
    """Of the children; none: chosen by load."""


Change = CreateTopic | AlterTopic | DeleteTopic | RestoreTopic | SetChannel | RemoveChannel | Resize

# --- what groups say


class Load(NamedTuple):
    """Size and rate of a part, as its group's leader reports it."""

    sealed: bool
    first: int
    end: int
    stored_bytes: int = 0
    bytes_per_s: float = 0.0
    messages_per_s: float = 0.0
    members: int = 0


# --- events


@dataclass(frozen=True, slots=True)
class Elected:
    """This admin leads, and has read the registry."""

    epoch: int
    wall_ms: int
    """Time of day, Unix milliseconds."""
    numbers: Numbers
    topics: Mapping[str, tuple[int, TopicNode]]
    """Name → version of its node, and the topic."""


@dataclass(frozen=True, slots=True)
class Deposed:
    """This admin does not lead any more."""


@dataclass(frozen=True, slots=True)
class GroupsChanged:
    """The groups of the layout, and those of them that have a Running replica."""

    groups: Sequence[int]
    running: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """Somebody wants to change a topic. Answered by `Answer`."""

    request: int
    name: str
    change: Change


@dataclass(frozen=True, slots=True)
class PlanRequested:
    """Somebody wants to know which moves would even the groups out. Answered by `Planned`."""

    request: int
    drain: int | None = None
    """A group that is to have no open parts."""


@dataclass(frozen=True, slots=True)
class Written:
    """A write ended. `version` and `node`: those in the registry from now on; -1 and None: there is no node."""

    token: int
    version: int
    node: TopicNode | None


@dataclass(frozen=True, slots=True)
class Appended:
    """A group's answer to an entry; or a failure, after which it may be applied or not."""

    token: int
    ok: bool = False
    why: str = ""
    """Reason why the entry had no effect."""
    writers: Sequence[KnownWriter] = ()
    """Of a seal."""
    failure: str = ""
    """Reason why there is no answer; empty: there is one."""


@dataclass(frozen=True, slots=True)
class LoadRead:
    """A group's answer to a question for its parts. `parts` None: there is none."""

    group: int
    parts: Mapping[int, Load] | None
    """ID of a part → its load."""
    cpu: float = 0.0


Event = Elected | Deposed | GroupsChanged | ChangeRequested | PlanRequested | Written | Appended | LoadRead | Tick

# --- effects


@dataclass(frozen=True, slots=True)
class WriteTopic:
    """Write a topic's node if it has this version (-1: there is none); `node` None: delete it. Answered by `Written`, which says
    what is in the registry afterwards, whatever happened."""

    token: int
    name: str
    expected: int
    node: TopicNode | None
    numbers: Numbers


@dataclass(frozen=True, slots=True)
class Append:
    """Have a group's leader append an entry. Answered by `Appended`."""

    token: int
    group: int
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskLoad:
    """Ask a group's leader for its parts. Answered by `LoadRead`."""

    group: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer whoever asked for a change: it is in effect, or refused."""

    request: int
    node: TopicNode | None = None
    refusal: Refusal | None = None


class PlannedGroup(NamedTuple):
    """A group in a plan; loads in thousandths of a core."""

    group: int
    load: float
    after: float
    """The load that the moves leave it."""
    parts: int
    """Open ones."""


@dataclass(frozen=True, slots=True)
class Planned:
    """Answer whoever asked for a plan."""

    request: int
    moves: Sequence[Move] = ()
    groups: Sequence[PlannedGroup] = ()
    """Those that answered."""
    refusal: Refusal | None = None


Effect = WriteTopic | Append | AskLoad | Answer | Planned
