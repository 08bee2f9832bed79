"""Requests of a tenant's callers of the HTTP API in the cluster's names, and answers in the tenant's. Pure.

Source: docs/tenants.md, "Names"; docs/http.md.
"""

from __future__ import annotations

from typing import Any

from cluster.access.revocations import Revocation
from cluster.access.tenants.names import TenantNames
from gateway.http.answers import bad
from gateway.http.bodies import Mailing, Publication


def publication_outward(names: TenantNames, message: Publication) -> Publication:
    """A message to publish. Raises `Refused` for a room or user that the tenant does not have."""
    return message._replace(
        room=_known(names.room_outward(message.room), "room") if message.room else 0,
        user=_known(names.uin_outward(message.user), "user") if message.user else 0,
        topic=names.outward(message.topic),
    )


def mailing_outward(names: TenantNames, mail: Mailing) -> Mailing:
    """A mail. Raises `Refused` for a user that the tenant does not have."""
    return mail._replace(to=tuple(_known(names.uin_outward(uin), "user") for uin in mail.to))


def revocation_outward(names: TenantNames, revocation: Revocation) -> Revocation:
    """A revocation, of a user of the tenant. Raises `Refused` for one that the tenant does not have."""
    user = revocation.user
    number = int(user) if user.isascii() and user.isdecimal() and len(user) <= 19 else None
    who = f"{names.name}/{user}" if number is None else str(_known(names.uin_outward(number), "user"))
    return Revocation(who, names.outward(revocation.filter), revocation.reason)


def inward(names: TenantNames | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of an answer: its topic and its sender; a sender who is not the tenant's is 0. None: in the cluster's names."""
    if names is None:
        return fields
    found = {**fields, "sender": names.uin_inward(fields["sender"])}
    if "topic" in fields:
        found["topic"] = names.text_inward(fields["topic"])
    return found


def _known(number: int, what: str) -> int:
    if not number:
        raise bad(f"the tenant has no such {what}")
    return number
