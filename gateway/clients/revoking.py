"""Carries out revocations: ends the subscriptions that they cover, with what allowed them.

    a gateway's HTTP API ── /revoke/r… in the registry ──▶ every gateway ──▶ sessions of the user

Source: docs/security.md, "Revoking subscriptions".
"""

from __future__ import annotations

from cluster.access.login_guard import LoginGuard
from cluster.access.revocations import Revocation, revocation_of
from cluster.access.rules import of_topic_name
from cluster.trust.audit import Audit
from cluster.trust.identity import Identity


def revoke(guard: LoginGuard, audit: Audit, request: str) -> int:
    """End what a request covers. Returns the number of subscriptions; an invalid request ends none.

    Remembered answers of callbacks are forgotten, so that these are asked before the client subscribes again.
    """
    revocation, ended = revocation_of(request), 0
    for session in [session for session in guard.sessions if revocation is not None and revocation.fits(session.identity)]:
        assert revocation is not None
        topics = session.revoked(revocation)
        ended += len(topics)
        for topic in topics:
            guard.forget(session, of_topic_name(topic))
        if topics:
            audit.write(
                "revoked", user=session.identity.user, address=session.address, filter=revocation.filter[:128], topics=len(topics),
                why=revocation.reason,
            )  # fmt: skip
    guard.counts["revoked"] += ended
    return ended


def note_revocation(audit: Audit, by: Identity, revocation: Revocation) -> None:
    """Write who revokes what into the audit log."""
    audit.write(
        "revocation", user=by.user, about=revocation.user[:128], filter=revocation.filter[:128], why=revocation.reason
    )  # fmt: skip
