"""Answers of a Xiu parent to its child. Pure.

    child ── Ask ──▶ look: known here ── unknown, and older than the parent's own cut ──▶ its parent ──▶ reply

Source: docs/doubling.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cluster.wire.v1.xiu_partitions_pb2 import AskReply, AskRequest
from pixiu.discovery.view import RoleLayout
from pixiu.errors import InvalidArgument, Unavailable
from xiu.state.doubling import is_asked, parent_of
from xiu.state.state import Head

MAX_ASKED: Final = 4096
"""Limit of SnowflakeIDs in one call."""
Wanted = Sequence[tuple[int, bool]]
"""(SnowflakeID, True if it is derived) of each record."""
Known = list[tuple[int, int] | None]
"""MsgID and CRC of each; None: unknown."""


class Ids(Protocol):
    """Interface to a look-up of SnowflakeIDs: `xiu.core.Core`."""

    def known(self, wanted: Wanted) -> Known:
        """Look up stored SnowflakeIDs."""

    @property
    def copies(self) -> int:
        """Number of disks with everything committed; 0: fewer than `min_in_sync`."""


@dataclass(slots=True)
class Look:
    """Local answer to a child's question."""

    doubling: int
    """The doubling that split the two; 0: no answer."""
    split_at: int
    split_us: int
    known: Known
    above: list[int]
    """Indexes of `wanted` that the parent's parent may know."""
    wanted: Wanted
    copies: int = 0
    """Number of disks with everything that the parent has; 0: fewer than `min_in_sync`."""

    def asked(self) -> Wanted:
        """The question to the parent's parent."""
        return [self.wanted[at] for at in self.above]

    def reply(self, more: Known, copies: int = 0) -> AskReply:
        """Build the reply. `more` is the answer of the parent's parent to `asked`, `copies` the number of disks with it."""
        on_disks = ([self.copies] if any(self.known) else []) + ([copies] if any(more) else [])
        for at, each in zip(self.above, more, strict=True):
            self.known[at] = each
        return AskReply(
            doubling=self.doubling,
            split_at=self.split_at,
            split_us=self.split_us,
            msg_ids=[each[0] if each else 0 for each in self.known],
            crcs=[each[1] if each else 0 for each in self.known],
            copies=min(on_disks, default=0),
        )


def check_question(partition: int, request: AskRequest) -> None:
    """Raise InvalidArgument for a malformed question."""
    if len(request.snowflakes) > MAX_ASKED or any(at >= len(request.snowflakes) for at in request.derived):
        raise InvalidArgument(f"at most {MAX_ASKED} SnowflakeIDs are asked for at once")
    if request.child < 1 or parent_of(request.child) != partition:
        raise InvalidArgument(f"partition {request.child} was not split from partition {partition}")


class Answers:
    """Look-up of questions in a parent's leader."""

    def sure(self, lease: bool) -> bool:
        """True if everything committed is known here. lease: no other replica leads, and everything is applied."""
        return lease

    def look(self, request: AskRequest, head: Head, ids: Ids, layout: RoleLayout, lease: bool) -> Look:
        """Look up a checked question. Raises Unavailable.

        A parent whose disks were lost knows of no cut, although the layout shows that there was one: what it does not know then is
        no longer stored. This does not hold while it is being restored.
        """
        now, doubling = head.doubling, head.doubling.doubling.number
        if now.partitions <= request.child:
            doubling = self._lost(request.child, head, layout)
            if not doubling:
                return Look(0, 0, 0, [], [], [])
        if not self.sure(lease):
            raise Unavailable(
                "this replica cannot tell yet whether it still leads and has applied everything; try again in a moment"
            )
        derived = set(request.derived)
        wanted = [(one, at in derived) for at, one in enumerate(request.snowflakes)]
        known = ids.known(wanted)
        above = [at for at, each in enumerate(known) if each is None and is_asked(now, head.clock_us, *wanted[at])]
        return Look(doubling, now.split_at, now.split_us, known, above, wanted, ids.copies)

    @staticmethod
    def _lost(child: int, head: Head, layout: RoleLayout) -> int:
        """The doubling that the layout has ended, if the log knows none; 0: there is none."""
        if head.doubling.partitions or head.below or layout.n <= child:
            return 0
        made = child.bit_length() - (layout.n >> len(layout.ended)).bit_length()
        return int(layout.ended[made], 16) if 0 <= made < len(layout.ended) else 0
