"""The states of a replica and the causes of transitions; `core.TABLE` lists the transitions."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """Activity of a replica."""

    FOLLOWING = "Following"
    SEEKING = "Seeking"
    TAKING_OFFICE = "TakingOffice"
    LEADING = "Leading"
    HANDING_OVER = "HandingOver"
    LEAVING = "Leaving"
    REPAIRING = "Repairing"
    DAMAGED = "Damaged"
    HALTED = "Halted"


class Cause(Enum):
    """Cause of a transition."""

    VACANT = "no leader, and its turn"
    WON = "compare-and-set done"
    NOT_WON = "compare-and-set refused or unknown"
    FIRST_ENTRY_SYNCED = "promise and first entry synced"
    FENCED = "higher epoch, other leader or session lost"
    CAUGHT_UP = "drained or without space, a member holds everything"
    DRAINING = "drained while in sync"
    RELEASED = "answer about the hand-over"
    NOT_A_MEMBER = "not in sync"
    SOLE_MEMBER = "alone in the in-sync set"
    OTHERS_IN_SYNC = "another replica is in sync"
    UNCLEAN = "the log is damaged"
    WHOLE = "everything of a leader synced"
    FORCED = "an operator's word"
    BROKEN = "disk failed or log contradicts"
