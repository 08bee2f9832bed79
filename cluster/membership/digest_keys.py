"""By which keys a process makes its digests: those of the cluster's ring or secret, and none at all while a process knows no keys.

Source: docs/memberships.md, "Anti-entropy"; docs/decisions/0255-digests-of-memberships-have-keys.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.access.doors import ProofKeys
from cluster.membership.digest import UNKEYED, DigestKey, digest_key
from cluster.runtime.options import ClusterOptions
from pixiu.discovery.agreement import spoken
from pixiu.discovery.node import Node

KEYED: Final = 4
"""The protocol version from which on processes name the key of a digest."""
DIGESTS: Final = ("member", "member, digests")
MAX_KEYS: Final = 3
"""The one that signs, and the newest of those that are accepted: each takes time for every entry. Policy: others are left out."""
KEYS_S: Final = 1.0
"""How often they are looked at."""


class DigestKeys:
    """The keys of one process."""

    def __init__(self, cluster: ClusterOptions) -> None:
        self._ring = ProofKeys(cluster, DIGESTS)
        accepted = cluster.accepted_secret()
        self._accepted = (digest_key(accepted),) if accepted is not None else ()
        self._guests = cluster.guests
        self._before: tuple[DigestKey, ...] = ()

    def newest(self, nodes: Iterable[Node]) -> tuple[DigestKey, ...]:
        """The keys of now, the one to ask others by first.

        Sums without a key are there as well while one of `nodes` is of a version that has no others, and where processes of another
        cluster may ask, which this one's registry does not have."""
        found = tuple(digest_key(secret) for secret in self._ring.newest()[:MAX_KEYS]) or self._before
        if not found:
            return (UNKEYED,)
        self._before = found
        unkeyed = (UNKEYED,) if self._guests or spoken(nodes) < KEYED else ()
        return (*found, *self._accepted, *unkeyed)
