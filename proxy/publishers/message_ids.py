"""Message IDs that a login may use: proofs for lent numbers, and the check of published IDs.

Source: docs/security.md, "IDs of messages".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cluster.access.login_guard import LoginSession
from cluster.access.logins import LOANS
from cluster.settings.options import ClusterOptions
from cluster.trust.followed_keys import ProofKeys
from cluster.trust.loans import WORKER_MASK, Lent, Loan, owner_of, prove
from pixiu.errors import NotAllowed
from pixiu.wire.record import KEY_AT, SNOWFLAKE_AT
from proxy.publishers.permits import permitted

WRITER_TEXT: Final = (
    "a writer of mail needs a worker number that its login was lent, with its proof, and a generation close to the current time "
    '(docs/security.md, "IDs of messages")'
)


class MessageIDs:
    """Proves loans, and checks the IDs of published messages.

    Args:
        cluster: whose keys prove.
        saw: called with the first ID of each batch, if it is of a number that was lent to its publisher.
    """

    def __init__(self, cluster: ClusterOptions, saw: Callable[[int], None] = lambda _id: None) -> None:
        self._keys, self._saw = ProofKeys(cluster.key_ring, LOANS), saw
        self._last: tuple[bytes, ...] = ()
        self.proofs_refused = 0

    @staticmethod
    def owner(session: LoginSession | None) -> bytes:
        """Owner to lend numbers to; empty for those who need not log in."""
        return owner_of(session.identity) if session is not None else b""

    @staticmethod
    def of(session: LoginSession) -> Lent:
        """Initial rights of a stream: none, except derived IDs if a service or an impersonator has logged in."""
        return Lent(owner_of(session.identity), not session.identity.uin or session.permissions.may_impersonate)

    def prove(self, loan: Loan, session: LoginSession | None) -> bytes:
        """Proof of a loan; empty if nobody needs one."""
        keys = self._newest()
        return prove(keys[0], loan, owner_of(session.identity)) if keys and session is not None and loan.until_ms else b""

    def show(self, lent: Lent, proofs: Sequence[bytes]) -> None:
        """Take proofs shown by a client."""
        if proofs:
            self.proofs_refused += lent.show(self._newest(), proofs)

    def _newest(self) -> tuple[bytes, ...]:
        """Newest keys; the previous ones while their folder cannot be read, because a proof is shown once to a stream."""
        self._last = self._keys.newest() or self._last
        return self._last

    def permitted(
        self, data: bytes, count: int, session: LoginSession, lent: Lent, more: Mapping[int, Sequence[int]] | None = None
    ) -> bytes:
        """Return a batch as its publisher may publish it, see `proxy.publishers.permits.permitted`. Raises `Unavailable` if the
        session is over: its end refuses nothing for good."""
        first = int.from_bytes(data[SNOWFLAKE_AT:KEY_AT], "little")
        if first & WORKER_MASK == lent.worker and lent.low <= first < lent.high:
            self._saw(first)
        uin = None if session.permissions.may_impersonate else session.identity.uin
        data = permitted(data, count, session, uin, more, lent)
        session.require_session()
        if lent.refused:
            session.not_lent(lent.refused)
            lent.refused = 0
        return data

    def check_writer(self, session: LoginSession, lent: Lent, worker: int, generation: int) -> None:
        """Raises `NotAllowed` if a writer of mail could be somebody else's."""
        if not lent.covers_writer(worker, generation):
            session.not_lent(1)
            raise NotAllowed(WRITER_TEXT)
