"""Carries out revocations: ends the subscriptions that they cover, with what allowed them.

    a gateway's HTTP API ── /revoke/r… in the registry ──▶ every gateway ──▶ sessions of the user

Source: docs/security.md, "Revoking subscriptions".
"""

from __future__ import annotations

from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.revocations import Revocation, revocation_of
from cluster.trust.audit import Audit
from cluster.trust.identity import Identity
from gateway.clients.access import may_subscribe, target_of_filter


def revoke(guard: LoginGuard, audit: Audit, request: str) -> int:
    """End what a request covers. Returns the number of subscriptions; an invalid request ends none."""
    revocation, ended = revocation_of(request), 0
    if revocation is None:
        return 0
    for session in [session for session in guard.sessions if revocation.fits(session.identity)]:
        filters = _ending(guard, session, revocation)
        if filters:
            session.revoked(filters, revocation.reason)
            audit.write(
                "revoked", user=session.identity.user, address=session.address, filter=revocation.filter[:128], topics=len(filters),
                why=revocation.reason,
            )  # fmt: skip
        ended += len(filters)
    guard.counts["revoked"] += ended
    return ended


def _ending(guard: LoginGuard, session: LoginSession, revocation: Revocation) -> list[str]:
    """Subscriptions of a session that end. Remembered answers of callbacks are forgotten, so that these are asked before the client
    subscribes again."""
    concerned = [name for name in session.filters() if revocation.concerns(name) or revocation.covers(name)]
    for name in concerned:
        guard.forget(session, target_of_filter(name))
    return [name for name in concerned if revocation.covers(name) or not may_subscribe(session, name)]


def note_revocation(audit: Audit, by: Identity, revocation: Revocation) -> None:
    """Write who revokes what into the audit log."""
    audit.write(
        "revocation", user=by.user, about=revocation.user[:128], filter=revocation.filter[:128], why=revocation.reason
    )  # fmt: skip
