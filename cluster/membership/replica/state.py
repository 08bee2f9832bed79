"""State that the core of a router or a relay keeps in addition to a member's: its start-up state, and more counters. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from cluster.membership.member.state import MemberCounters


class State(Enum):
    """State of a replica. The shell handles draining: the core keeps working."""

    STARTING = "Starting"
    """The registry's view or the own database is not known yet."""
    LOADING = "Loading"
    """Reading the own database."""
    SYNCING = "Syncing"
    """Taking the first snapshot from a peer, or waiting to try again."""
    RUNNING = "Running"


@dataclass(slots=True)
class Counters(MemberCounters):
    """Counters of a replica since its start."""

    messages_from_gateways: int = 0
    messages_from_replicas: int = 0
    messages_stale_sender: int = 0
    """Messages for keys of another partition; passed on to it."""
    messages_unroutable: int = 0
    """Messages for keys of a partition without a replica now; not confirmed, so the gateway sends them again."""
    messages_of_others: int = 0
    """Messages of a gateway about another gateway's instance, or about another run of its own: not taken."""
    messages_of_strangers: int = 0
    """Messages from senders that are not in the view: not taken, so they are sent again; the registry is read again."""
    confirmed: int = 0
    stale_told: int = 0
    """Messages of gateways that something newer hides; not confirmed."""
    logins_refused: int = 0
    """Logins refused because the map is full; their gateways are informed, and inform their clients."""
    snapshots_served: int = 0
    snapshots_refused: int = 0
    subscriptions_ended: int = 0
    store_failures: int = 0
    store_skipped: int = 0
    """Changes that were not written because the database had failed; it is written anew later."""
