"""Login tickets, and keys that are followed while their ring changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.settings.options import ClusterOptions
from cluster.trust.followed_keys import KEYS_S, ProofKeys
from cluster.trust.key_folder import add_key, drop_keys, use_key
from cluster.trust.tickets import GRACE_S, MAX_TICKET_S, PURPOSE, SHOWN, TICKET_BYTES, shown_of, sign, signer, until_of
from pixiu.errors import ConfigurationError

KEY, OTHER = b"k" * 32, b"o" * 32
NOW = 1_800_000_000
UNTIL = NOW + 3600
TICKET = sign(KEY, 7, 9, UNTIL)


def test_a_ticket_is_of_one_user_at_one_run_until_its_end() -> None:
    assert (len(TICKET), until_of(TICKET)) == (TICKET_BYTES, UNTIL)
    assert signer((OTHER, KEY), TICKET, 7, 9, NOW) == KEY
    assert signer((KEY,), TICKET, 7, 9, UNTIL - 1) == KEY


@pytest.mark.parametrize(
    ("ticket", "uin", "run", "now"),
    [
        (TICKET, 8, 9, NOW),
        (TICKET, 7, 10, NOW),
        (TICKET, 7, 9, UNTIL),
        (sign(OTHER, 7, 9, UNTIL), 7, 9, NOW),
        (TICKET[:-1], 7, 9, NOW),
        (TICKET + b"\0", 7, 9, NOW),
        (b"", 7, 9, NOW),
        (sign(KEY, 7, 9, UNTIL + 1)[:4] + TICKET[4:], 7, 9, NOW),
        (sign(KEY, 7, 9, NOW + MAX_TICKET_S + 3 * GRACE_S), 7, 9, NOW),
        (bytes(TICKET_BYTES), 7, 9, NOW),
    ],
    ids=["user", "run", "ended", "key", "short", "long", "none", "later end", "too far ahead", "zeros"],
)
def test_anything_else_is_no_ticket(ticket: bytes, uin: int, run: int, now: int) -> None:
    assert signer((KEY,), ticket, uin, run, now) is None
    assert signer((), TICKET, 7, 9, NOW) is None


def test_shown_tickets_are_whole_or_nothing() -> None:
    assert list(shown_of(SHOWN.pack(7, TICKET) + SHOWN.pack(8, TICKET)) or ()) == [(7, TICKET), (8, TICKET)]
    assert shown_of(SHOWN.pack(7, TICKET)[:-1]) is None


def test_keys_are_followed_and_a_removed_one_is_gone(tmp_path: Path) -> None:
    now = [0.0]
    use_key(add_key(tmp_path).parent)
    keys = ProofKeys(ClusterOptions(ticket_key_dir=str(tmp_path)).ticket_ring, PURPOSE, lambda: now[0], keep=True)
    (first,) = keys.newest()
    add_key(tmp_path)
    assert keys.newest() == (first,), "read once a second at most"
    now[0] += KEYS_S
    assert (len(keys.newest()), keys.newest()[0]) == (2, first), "accepted, not signing yet"
    use_key(tmp_path)
    drop_keys(tmp_path)
    now[0] += KEYS_S
    (second,) = keys.newest()
    assert second != first
    (tmp_path / "2.key").rename(tmp_path / "away")
    now[0] += KEYS_S
    assert (keys.newest(), bool(keys.problem)) == ((second,), True), "what cannot be read ends nobody's session"
    assert str(tmp_path) in keys.problem


def test_tickets_need_a_ring_of_their_own_and_all_processes_have_them() -> None:
    both = ClusterOptions(key_dir="/a", ticket_key_dir="/b")
    both.validate()
    for wrong in (ClusterOptions(ticket_key_dir="/b"), ClusterOptions(key_dir="/b", ticket_key_dir="/b")):
        with pytest.raises(ConfigurationError, match="ticket_key_dir"):
            wrong.validate()
    assert both.wire_hash() != ClusterOptions(key_dir="/a").wire_hash()
    with pytest.raises(ConfigurationError, match="ticket_key_dir = /b: cannot be read"):
        both.ticket_ring()
