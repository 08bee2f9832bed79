"""An operator's request to end sessions: of a user, of a tenant, of one key, certificate or authenticator, or of everybody. Pure.

    {"user": "alice"}   {"by": "jwt", "signed_by": "2026-a"}   {"by": "callback"}   {"everybody": true}   {"client": "sensor-7"}
    {"client": "sensor-7", "forget": true}
    {"tenant": "acme"}

Source: docs/security.md, "Ending sessions".
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cluster.trust.identity import Identity
from pixiu.errors import InvalidArgument

AUTHENTICATORS: Final = ("jwt", "password", "certificate", "callback")


@dataclass(frozen=True, slots=True)
class Kick:
    """A request. One of `user` or `client` (or both), `tenant`, `by`, and `everybody` is given; `signed_by` restricts `by` to one
    key, or serial number."""

    user: str = ""
    """Name or UIN."""
    by: str = ""
    signed_by: str = ""
    everybody: bool = False
    client: str = ""
    """Client ID; without `user` of any user."""
    forget: bool = False
    """True if the client's session of MQTT is removed, too."""
    tenant: str = ""

    def check(self) -> None:
        """Raise `InvalidArgument` if the request is invalid."""
        if sum((bool(self.user or self.client), bool(self.by), self.everybody, bool(self.tenant))) != 1:
            raise InvalidArgument("give one of: USER (a name or a UIN) or --client or both, --tenant, --by, --all")
        if self.forget and not self.client:
            raise InvalidArgument("--forget: goes with --client, whose session is removed")
        if self.by and self.by not in AUTHENTICATORS:
            raise InvalidArgument(f"--by {self.by}: must be one of {', '.join(AUTHENTICATORS)}")
        if self.signed_by and self.by not in ("jwt", "certificate"):
            raise InvalidArgument("--key: goes with --by jwt (a key's kid) or --by certificate (a serial number, hexadecimal)")

    def fits(self, identity: Identity, client: str = "") -> bool:
        """True if the request applies to an identity, with this client ID."""
        if self.tenant:
            return self.tenant == identity.tenant
        if self.client or self.user:
            # A service has no UIN, and is selected by its name.
            meant = not self.user or self.user in (identity.user, str(identity.uin or identity.user))
            return meant and self.client in ("", client)
        if not self.by:
            return self.everybody
        return identity.by == self.by and self.signed_by in ("", identity.signed_by, identity.proof)

    def text(self) -> str:
        """The request in the registry's form."""
        return json.dumps({name: value for name, value in asdict(self).items() if value})


def kick_of(text: str) -> Kick | None:
    """Parse a request from the registry; None if it is invalid."""
    try:
        found = Kick(**json.loads(text))
        found.check()
    except (ValueError, TypeError, RecursionError, InvalidArgument):
        return None
    texts = (found.user, found.by, found.signed_by, found.client, found.tenant)
    return found if all(isinstance(value, str) for value in texts) else None
