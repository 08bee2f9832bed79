"""Which message IDs those who have logged in may use: proofs for what is lent, and the look at what is published.

Source: docs/security.md, "IDs of messages".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cluster.access.doors import LOANS, ProofKeys
from cluster.access.guard import Session
from cluster.access.loans import WORKER_MASK, Lent, Loan, owner_of, prove
from cluster.runtime.options import ClusterOptions
from pixiu.errors import NotAllowed
from proxy.permits import permitted

WRITER_TEXT: Final = (
    "a writer of mail needs a worker number that its login was lent, with its proof, and a generation close to the current time "
    '(docs/security.md, "IDs of messages")'
)


class MessageIDs:
    """Proves loans, and checks the IDs of what comes.

    Args:
        cluster: whose keys prove.
        saw: told of the first ID of each batch, where it is of a number that was lent to its publisher.
    """

    def __init__(self, cluster: ClusterOptions, saw: Callable[[int], None] = lambda _id: None) -> None:
        self._keys, self._saw = ProofKeys(cluster, LOANS), saw
        self._last: tuple[bytes, ...] = ()
        self.proofs_refused = 0

    @staticmethod
    def owner(session: Session | None) -> bytes:
        """Whom a number is lent to; empty for those who need not log in."""
        return owner_of(session.identity) if session is not None else b""

    @staticmethod
    def of(session: Session) -> Lent:
        """What a stream may use, to begin with: nothing, but derived IDs where a service or an impersonator has logged in."""
        return Lent(owner_of(session.identity), not session.identity.uin or session.permissions.may_impersonate)

    def prove(self, loan: Loan, session: Session | None) -> bytes:
        """The proof of a loan; empty where nobody needs one."""
        keys = self._newest()
        return prove(keys[0], loan, owner_of(session.identity)) if keys and session is not None and loan.until_ms else b""

    def show(self, lent: Lent, proofs: Sequence[bytes]) -> None:
        """A client shows proofs."""
        if proofs:
            self.proofs_refused += lent.show(self._newest(), proofs)

    def _newest(self) -> tuple[bytes, ...]:
        """The keys; those before while a folder cannot be read, as a proof is shown once to a stream."""
        self._last = self._keys.newest() or self._last
        return self._last

    def permitted(
        self, data: bytes, count: int, session: Session, lent: Lent, more: Mapping[int, Sequence[int]] | None = None
    ) -> bytes:
        """A batch as its publisher may publish it, see `proxy.permits.permitted`."""
        first = int.from_bytes(data[16:24], "little")
        if first & WORKER_MASK == lent.worker and lent.low <= first < lent.high:
            self._saw(first)
        uin = None if session.permissions.may_impersonate else session.identity.uin
        data = permitted(data, count, session, uin, more, lent)
        if lent.refused:
            session.not_lent(lent.refused)
            lent.refused = 0
        return data

    def check_writer(self, session: Session, lent: Lent, worker: int, generation: int) -> None:
        """Raises `NotAllowed` when a writer of mail is somebody else, perhaps."""
        if not lent.covers_writer(worker, generation):
            session.not_lent(1)
            raise NotAllowed(WRITER_TEXT)
