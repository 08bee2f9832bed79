"""Proofs of the worker numbers that proxies lend: the SnowflakeIDs that a login may use, at any proxy. Pure.

    offset  type  field                              a proof, little-endian
    0       u16   worker number
    2       u64   from, Unix milliseconds            IDs have times from here on
    10      u64   until                              to below this
    18      16 B  keyed BLAKE2b of these and of the login that it was lent to

A client shows the proofs that it was given on each stream. A proof covers IDs of its time, even after that time: mail is sent
again with its ID. The present holder of a number does not matter: no two loans of a number share a millisecond, except those to
one login.

Source: docs/security.md, "IDs of messages".
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cluster.trust.identity import Identity
from pixiu.ids import SNOWFLAKE_EPOCH_MS, SNOWFLAKE_SEQUENCE_BITS, SNOWFLAKE_WORKER_BITS, WORKERS
from pixiu.wire.inbox_operations import GENERATION_EPOCH_S, MAX_AHEAD_S

HEAD: Final = struct.Struct("<HQQ")
TAG_BYTES: Final = 16
PROOF_BYTES: Final = HEAD.size + TAG_BYTES
PERSON: Final = b"pixiu-loan"
MAX_SHOWN: Final = 16
"""Loans that a stream may have at one time; a further one replaces the one shown first."""
TIME_SHIFT: Final = SNOWFLAKE_WORKER_BITS + SNOWFLAKE_SEQUENCE_BITS
WORKER_MASK: Final = (WORKERS - 1) << SNOWFLAKE_SEQUENCE_BITS
NOBODY: Final = -1
"""Worker bits that no ID has."""


class Loan(NamedTuple):
    """A worker number for times in [from_ms, until_ms), Unix milliseconds."""

    worker: int
    from_ms: int
    until_ms: int


def owner_of(identity: Identity) -> bytes:
    """Owner of a loan: a login's UIN and user."""
    return f"{identity.uin} {identity.user}".encode()


def prove(key: bytes, loan: Loan, owner: bytes) -> bytes:
    """The proof of a loan."""
    head = HEAD.pack(*loan)
    return head + _tag(key, head, owner)


def proven(keys: Iterable[bytes], proof: bytes, owner: bytes) -> Loan | None:
    """The loan proved by a proof; None if it is invalid, or somebody else's."""
    if len(proof) != PROOF_BYTES:
        return None
    head, tag = proof[: HEAD.size], proof[HEAD.size :]
    if not any(hmac.compare_digest(tag, _tag(key, head, owner)) for key in keys):
        return None
    return Loan(*HEAD.unpack(head))


def _tag(key: bytes, head: bytes, owner: bytes) -> bytes:
    return hashlib.blake2b(head + owner, key=key, person=PERSON, digest_size=TAG_BYTES).digest()


class Lent:
    """The SnowflakeIDs that one stream may use.

    owner: from `owner_of`. may_derive: True if it may use derived IDs, which contain no worker number.
    """

    __slots__ = ("_loans", "_owner", "high", "low", "may_derive", "refused", "worker")

    def __init__(self, owner: bytes, may_derive: bool) -> None:
        self._owner, self.may_derive = owner, may_derive
        self._loans: dict[tuple[int, int], Loan] = {}
        self.worker, self.low, self.high = NOBODY, 0, 0
        """Data of the loan shown last: worker bits in place, and the range of IDs, whatever their worker and sequence."""
        self.refused = 0
        """Number of IDs refused."""

    def show(self, keys: Sequence[bytes], proofs: Sequence[bytes]) -> int:
        """Take proofs that a client shows. Returns the number that do not prove loans of this login."""
        wrong = max(len(proofs) - MAX_SHOWN, 0)
        for proof in proofs[-MAX_SHOWN:]:
            loan = proven(keys, proof, self._owner)
            if loan is None:
                wrong += 1
                continue
            key = loan.worker, loan.from_ms
            before = self._loans.pop(key, loan)
            if len(self._loans) >= MAX_SHOWN:
                del self._loans[next(iter(self._loans))]
            self._loans[key] = loan = max(before, loan)
            self.worker = loan.worker << SNOWFLAKE_SEQUENCE_BITS
            self.low, self.high = _first(loan.from_ms), _first(loan.until_ms)
        return wrong

    def covers(self, snowflake: int) -> bool:
        """True if an ID belongs to one of its loans."""
        worker = (snowflake & WORKER_MASK) >> SNOWFLAKE_SEQUENCE_BITS
        return any(
            loan.worker == worker and _first(loan.from_ms) <= snowflake < _first(loan.until_ms) for loan in self._loans.values()
        )

    def covers_writer(self, worker: int, generation: int) -> bool:
        """True if it may be the writer of mail with this number. Generations are seconds: one far in the future would shut out the
        number's next holder."""
        return any(
            loan.worker == worker and generation <= loan.until_ms // 1000 - GENERATION_EPOCH_S + MAX_AHEAD_S
            for loan in self._loans.values()
        )


def _first(time_ms: int) -> int:
    """Lowest ID of a millisecond."""
    return (time_ms - SNOWFLAKE_EPOCH_MS) << TIME_SHIFT
