"""Selects the keys of a process's digests: those of the cluster's ring, and no key as well while some processes know no keys.

Source: docs/memberships.md, "Keys of digests".
"""

from __future__ import annotations

from typing import Final

from cluster.membership.map.digest import UNKEYED, DigestKey, digest_key
from cluster.settings.options import ClusterOptions
from cluster.trust.followed_keys import ProofKeys

DIGESTS: Final = ("member", "member, digests")
MAX_KEYS: Final = 3
"""Keys in use: the one that signs and the newest accepted ones, because each takes time for every entry. Policy: others are left
out."""
KEYS_S: Final = 1.0
"""Interval at which keys are checked, seconds."""


class DigestKeys:
    """The digest keys of one process."""

    def __init__(self, cluster: ClusterOptions) -> None:
        self._ring = ProofKeys(cluster.key_ring, DIGESTS)
        self._guests = cluster.guests
        self._before: tuple[DigestKey, ...] = ()

    def newest(self) -> tuple[DigestKey, ...]:
        """The current keys, the one for asking others first. They include sums without a key if processes of another cluster may
        ask."""
        found = tuple(digest_key(secret) for secret in self._ring.newest()[:MAX_KEYS]) or self._before
        if not found:
            return (UNKEYED,)
        self._before = found
        unkeyed = (UNKEYED,) if self._guests else ()
        return (*found, *unkeyed)
