"""The settings of replication, the same for every replica of a partition.

Source: docs/replication.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pixiu.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationOptions:
    """Time-outs and limits of replication; all times in seconds."""

    heartbeat_s: float = 0.25
    """Longest time between two heartbeats of a leader."""
    lease_s: float = 1.0
    """A leader serves reads and acknowledges only while every other member confirmed its epoch within this time."""
    confirm_wait_s: float = 2.0
    """A member that confirmed an epoch seeks no promotion for this time. Above `lease_s`, because clocks run apart."""
    silence_s: float = 4.0
    """A follower that neither answers nor advances for this time leaves the in-sync set."""
    slow_s: float = 1.0
    """A follower that acknowledges something later than this is late."""
    slow_for_s: float = 5.0
    """A member that is late for this time, while the leader's own disk is not, leaves the in-sync set (above `min_in_sync`)."""
    rejoin_s: float = 1.0
    """A member that left must stay near the end, and not be late, for this time before it is required; it doubles each time."""
    max_rejoin_s: float = 120.0
    """The longest such time."""
    join_s: float = 2.0
    """A follower that joins and has not reached the end noted then within this time is no longer required."""
    candidate_step_s: float = 1.0
    """A candidate waits this time for each live candidate whose node has a smaller number."""
    unregistered_s: float = 30.0
    """After a leader's node has been gone for this time, members that reach ZooKeeper themselves no longer confirm it."""
    resend_s: float = 1.0
    """Entries that a follower has not acknowledged after this time are sent again."""
    poll_s: float = 1.0
    """Interval at which a replica without a leader, or with an open question, reads the state."""
    join_within: int = 1000
    """A follower within this many entries of the leader's end joins the maximal in-sync set."""
    min_in_sync: int = 1
    """Fewer replicas in sync: writes at level `replicated` are refused, and of those under way the outcome is unknown."""
    max_uncommitted: int = 100_000
    """Entries that wait for their commit. Policy: more are refused with OVERLOADED."""
    max_append_entries: int = 4096
    max_append_bytes: int = 262_144
    """Limit of one message to a follower, which has at least one entry."""
    max_unacknowledged: int = 16
    """Messages with entries on their way to one follower. Policy: the rest waits in the log."""
    snapshot_timeout_s: float = 600.0
    """A snapshot that makes no progress for this time is begun again."""
    max_kept: int = 10_000_000
    """Entries that a live follower holds back from being trimmed. Policy: beyond it takes a snapshot."""
    max_kept_bytes: int = 8 << 30
    """Bytes of the log that a live follower holds back. Policy: the same."""

    def validate(self) -> None:
        """Raise ConfigurationError naming the key at fault."""
        if not self.heartbeat_s * 2 < self.lease_s:
            raise ConfigurationError(f"lease_s = {self.lease_s}: must be above twice heartbeat_s ({self.heartbeat_s})")
        if not self.lease_s * 1.5 <= self.confirm_wait_s:
            raise ConfigurationError(f"confirm_wait_s = {self.confirm_wait_s}: must be at least 1.5 times lease_s ({self.lease_s})")
        if not self.silence_s > self.lease_s:
            raise ConfigurationError(f"silence_s = {self.silence_s}: must be above lease_s ({self.lease_s})")
        if not 0 < self.rejoin_s <= self.max_rejoin_s:
            raise ConfigurationError(f"max_rejoin_s = {self.max_rejoin_s}: must be at least rejoin_s ({self.rejoin_s}), above 0")
        for key in (
            "min_in_sync",
            "max_uncommitted",
            "max_append_entries",
            "max_append_bytes",
            "max_unacknowledged",
            "max_kept",
            "max_kept_bytes",
        ):
            if getattr(self, key) < 1:
                raise ConfigurationError(f"{key} = {getattr(self, key)}: must be at least 1")
