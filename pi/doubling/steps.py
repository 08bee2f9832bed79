"""Work of a Pi leader in the doubling of its partition that takes long, and its progress. Pure.

Source: docs/doubling.md.
"""

from __future__ import annotations

from enum import Enum

from cluster.store.doubling.phases import Phase
from cluster.store.doubling.steps import is_home
from cluster.wire.v1 import doubling_pb2 as pb
from pi.doubling.phases import Record
from pixiu.discovery.view import RoleLayout


class Work(Enum):
    """Work that takes long."""

    LEARN = 1
    DIGEST_HERE = 2
    """Any view will do: moved values no longer change in a split parent."""
    DIGEST_CUT = 3
    """For a child: on the view of the moment at which it opened."""
    END = 4
    """The layout includes this child: its doubling is over."""
    CLEAN = 5
    SETTLE = 6
    """A SPLIT without effect changes no record, so moved users are accepted again once it is applied."""


def work_of(record: Record, layout: RoleLayout, has_view: bool, unsettled: bool) -> Work | None:
    """Return the work pending in a phase.

    layout: of Pi. has_view: there is a view of the moment at which a child opened. unsettled: a SPLIT was in the log, and the core
      does not know its outcome yet.
    """
    match record.phase:
        case Phase.LEARNING:
            return Work.LEARN
        case Phase.SPLIT if not record.digest:
            return Work.DIGEST_HERE
        case Phase.OPEN | Phase.NONE if has_view and not record.digest:
            return Work.DIGEST_CUT
        case Phase.OPEN if is_home(record, layout):
            return Work.END
        case Phase.CLEANING:
            return Work.CLEAN
        case _:
            return Work.SETTLE if unsettled else None


def progress_of(record: Record, stored: tuple[int, int]) -> pb.DoublingStatus:
    """Return Pi's fields of the status. stored: keys and bytes of the whole state, which a child would have to learn."""
    keys, size = stored if record.phase is Phase.NONE else (record.keys, record.size)
    return pb.DoublingStatus(learned=record.learned.counter, keys=keys, bytes=size, digest=record.digest)
