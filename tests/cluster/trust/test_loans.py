"""Proofs of lent worker numbers: whose IDs are whose, after renewals, at the edges of time, and for who shows other things."""

from __future__ import annotations

import os

import pytest

from cluster.trust.identity import Identity
from cluster.trust.loans import MAX_SHOWN, Lent, Loan, owner_of, prove, proven
from pixiu.ids import snowflake
from pixiu.wire.inbox_operations import GENERATION_EPOCH_S, MAX_AHEAD_S, next_generation

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_800_000_000_000
LOAN = Loan(7, NOW, NOW + 600_000)
ALICE, MALLORY = owner_of(Identity("alice", 7)), owner_of(Identity("mallory", 8))


def lent(*loans: Loan, owner: bytes = ALICE) -> Lent:
    found = Lent(owner, False)
    assert found.show((KEY,), [prove(KEY, loan, owner) for loan in loans]) == 0
    return found


def test_a_proof_is_of_one_loan_to_one_login() -> None:
    proof = prove(KEY, LOAN, ALICE)
    assert proven((OTHER, KEY), proof, ALICE) == LOAN
    assert proven((KEY,), proof, MALLORY) is None
    assert proven((OTHER,), proof, ALICE) is None
    assert proven((), proof, ALICE) is None
    for at in range(len(proof)):
        assert proven((KEY,), proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :], ALICE) is None
    for wrong in (b"", proof[:-1], proof + b"x", os.urandom(34), bytes(34)):
        assert proven((KEY,), wrong, ALICE) is None


def test_a_user_whose_name_looks_like_anothers_owner_is_another() -> None:
    names = [("alice", 7), ("7 alice", 0), ("alice", 0), (" alice", 7)]
    assert len({owner_of(Identity(user, uin)) for user, uin in names}) == len(names)


def test_ids_are_of_the_loans_number_and_time() -> None:
    found = lent(LOAN)
    for time_ms, worker, is_its in [
        (NOW, 7, True), (NOW + 599_999, 7, True), (NOW - 1, 7, False), (NOW + 600_000, 7, False), (NOW, 6, False), (NOW, 8, False),
    ]:  # fmt: skip
        for sequence in (0, 1023):
            assert found.covers(snowflake(time_ms, worker, sequence)) is is_its
    assert not Lent(ALICE, False).covers(0)


def test_loans_from_before_serve_on_and_there_are_never_more_than_so_many() -> None:
    found = lent(LOAN, Loan(7, NOW, NOW + 900_000), Loan(9, NOW + 100_000, NOW + 700_000))
    assert found.covers(snowflake(NOW + 800_000, 7, 0))
    assert found.covers(snowflake(NOW + 100_000, 9, 0))
    # An older proof of a loan that was extended takes nothing away.
    found.show((KEY,), [prove(KEY, LOAN, ALICE)])
    assert found.covers(snowflake(NOW + 800_000, 7, 0))
    found.show((KEY,), [prove(KEY, Loan(worker, NOW, NOW + 1), ALICE) for worker in range(100, 100 + MAX_SHOWN)])
    assert not found.covers(snowflake(NOW, 7, 0))
    assert found.covers(snowflake(NOW, 100, 0))
    assert found.show((KEY,), [b"nothing"] * (MAX_SHOWN + 5)) == MAX_SHOWN + 5


@pytest.mark.parametrize("ahead_s", [0, MAX_AHEAD_S])
def test_a_writers_generation_ends_below_what_the_next_holder_reaches(ahead_s: int) -> None:
    found = lent(LOAN)
    until_s = LOAN.until_ms // 1000 - GENERATION_EPOCH_S
    assert found.covers_writer(7, until_s + ahead_s)
    assert not found.covers_writer(7, until_s + MAX_AHEAD_S + 1)
    assert not found.covers_writer(8, until_s)
    # Its next holder, whose stream is refused as stale again and again, jumps beyond that, and no further than it may.
    generation, tries = 0, 0
    now_s = LOAN.until_ms / 1000 + 1
    while generation <= until_s + ahead_s:
        generation, tries = next_generation(generation, now_s, (1 << min(tries, 20)) - 1), tries + 1
    assert tries < 30
    assert lent(Loan(7, LOAN.until_ms, LOAN.until_ms + 600_000)).covers_writer(7, generation)
