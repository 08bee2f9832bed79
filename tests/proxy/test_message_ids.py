"""Proofs of lent worker numbers, between proxies and over a change of keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.settings.options import ClusterOptions
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials, Identity
from cluster.trust.loans import Lent, Loan
from pixiu.errors import Unavailable
from pixiu.wire.record import Kind, encode
from proxy.publishers.message_ids import MessageIDs
from tests.support.logins import Logins

LOAN = Loan(5, 1_800_000_000_000, 1_800_000_600_000)


def test_what_a_proxy_lent_another_one_takes_also_after_the_ring_has_another_key(tmp_path: Path) -> None:
    (tmp_path / "1.key").write_bytes(b"first key of a ring, long enough")
    (tmp_path / "2.next").write_bytes(b"second key of the ring, as well!")
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    one, other = (MessageIDs(ClusterOptions(key_dir=str(tmp_path))) for _ in range(2))
    session = SimpleNamespace(identity=Identity("alice", 7))
    proof = one.prove(LOAN, session)  # type: ignore[arg-type]
    (tmp_path / "2.next").rename(tmp_path / "2.key")
    lent = Lent(MessageIDs.owner(session), False)  # type: ignore[arg-type]
    other.show(lent, [proof])
    assert (lent.covers_writer(5, 0), other.proofs_refused) == (True, 0)
    assert one.prove(LOAN, None) == b""
    (tmp_path / "3.key").write_bytes(b"short")
    other._keys._until = -1.0
    assert other.prove(LOAN, session)  # type: ignore[arg-type]
    (tmp_path / "3.key").unlink()
    (tmp_path / "1.key").unlink()
    late = MessageIDs(ClusterOptions(key_dir=str(tmp_path)))
    late.show(Lent(MessageIDs.owner(session), False), [proof])  # type: ignore[arg-type]
    assert late.proofs_refused == 1


async def test_a_batch_of_a_session_that_is_over_is_not_refused_for_good(tmp_path: Path) -> None:
    """Its messages are sent again in a new session: none of them may fail as not allowed."""
    logins = Logins(tmp_path)
    logins.write_rules('[[rule]]\nallow = ["mail"]\n')
    guard = LoginGuard(str(logins.file), log.get_logger(), Audit(None))
    try:
        identity = await guard.check(Credentials("alice", logins.token("alice", 7)))
        session = guard.open(identity, "", "", lambda _why: None)
        ids, data = MessageIDs(ClusterOptions()), encode(Kind.MAIL, 8, b"x", 1, sender=7)
        assert ids.permitted(data, 1, session, Lent(MessageIDs.owner(session), True)) != b""
        session.lose("the key that signed the token was removed")
        with pytest.raises(Unavailable, match="the key that signed the token was removed"):
            ids.permitted(data, 1, session, Lent(MessageIDs.owner(session), True))
    finally:
        await guard.close()
