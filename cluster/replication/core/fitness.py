"""Reasons why a replica may not lead, and why a leader does not count one as in sync; for operators. Pure.

Source: docs/replication.md.
"""

from __future__ import annotations

from cluster.replication.core.core import Core
from cluster.replication.core.leader import NEVER, Leader, Mode, Progress
from cluster.replication.model import MemberID


def hindrance(core: Core) -> str:
    """Reason why this replica would not be promoted now, as far as it knows; empty if it leads or may lead."""
    context = core.context
    state = context.read.state if context.read is not None else None
    if core.leader is not None and not core.draining:
        return ""
    if core.halted_by:
        return "it halted"
    if core.draining:
        return "it drains"
    if not core.is_clean():
        return "what it acknowledged may be missing here"
    if not context.is_live(context.member, context.incarnation):
        return "it is not in the registry"
    if context.read is None:
        return "it has not read ZooKeeper's state"
    if core.waits_for_data:
        return "ZooKeeper has no state of the partition"
    if state is not None and context.member not in state.in_sync:
        return "it is not in sync"
    return "" if context.space else "it lacks disk space: others go first"


def left_out(leader: Leader, now: float) -> dict[MemberID, str]:
    """Followers that are not in sync, and the reasons."""
    members = leader.in_sync.state.in_sync
    return {
        member: _why_out(leader, member, progress, now)
        for member, progress in sorted(leader.followers.items())
        if member not in members
    }


def _why_out(leader: Leader, member: MemberID, progress: Progress, now: float) -> str:
    options = leader.context.options
    behind = leader.context.log.last.counter - progress.matched
    if progress.confirmed_at == NEVER or now > progress.confirmed_at + options.silence_s:
        return "it does not answer"
    if progress.full:
        return "its disk is full"
    if progress.mode is Mode.SNAPSHOT:
        return "it receives a snapshot"
    if now > progress.heard_at + options.silence_s:
        return "it answers, but accepts no entries"
    if progress.late_s > 0:
        return "it is slow"
    if behind > options.join_within:
        return f"it is {behind:,} entries behind"
    return "it joins" if member in leader.in_sync.joining else "it must keep up for a while first"
