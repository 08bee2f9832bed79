"""What the core of a router or a relay keeps beyond what every member does: its state, and more counters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.membership.member_state import MemberCounters


class State(Enum):
    """A replica's state. Draining is the shell's matter: the core keeps working."""

    STARTING = "Starting"
    """The registry's view or the own database is not known yet."""
    LOADING = "Loading"
    """Reading the own database."""
    SYNCING = "Syncing"
    """Taking the first snapshot from a peer, or waiting to try again."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters(MemberCounters):
    """What the replica has done since its start."""

    messages_from_gateways: int = 0
    messages_from_replicas: int = 0
    messages_stale_sender: int = 0
    """For keys of another partition; passed on to it."""
    messages_unroutable: int = 0
    """For keys of a partition that has no replica now; not confirmed, so the gateway sends them again."""
    messages_of_others: int = 0
    """That a gateway said of another gateway's instance, or of another run of its own: not taken."""
    messages_of_strangers: int = 0
    """From nobody in the view: not taken, so that they are sent again; the registry is read again."""
    confirmed: int = 0
    stale_told: int = 0
    """Messages of gateways that something newer hid; not confirmed."""
    logins_refused: int = 0
    """Of gateways, because the map is full; they are told, and tell their clients."""
    snapshots_served: int = 0
    snapshots_refused: int = 0
    subscriptions_ended: int = 0
    store_failures: int = 0
    store_skipped: int = 0
    """Changes that were not written because the database had failed; it is written anew later."""
