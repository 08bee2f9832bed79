"""Identity of a client, as an authenticator reports it, and the client's credentials. Pure.

Source: docs/security.md, "Logging in".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pixiu.errors import NotAuthenticated
from pixiu.ids import MAX_ID

MAX_SECRET_BYTES: Final = 8192
"""Size of a token or a password; a longer one is refused before it is inspected."""
MAX_USER_BYTES: Final = 256
MAX_GROUPS: Final = 64
NEVER_S: Final = float("inf")
MAX_CLAIM_BYTES: Final = 256
"""Size of a claim that rules can use."""
UNUSABLE: Final = "\0"
"""Value of a claim in a form that rules cannot use: no `allow` matches it, every `deny` does, and no template accepts it."""
NETWORK_BITS: Final = 64
"""Network bits of an IPv6 address: its owner may choose the rest."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials of a client. The secret is never shown.

    user: as given by the client; may be empty if a token contains it. secret: a token or a password. client_id: MQTT's, or the
    client's name. address: of the client's machine. certificate: verified by TLS, DER; empty: none was shown. payer: charged for a
    failed login; empty: the address.
    """

    user: str
    secret: str = field(repr=False)
    client_id: str = ""
    address: str = ""
    certificate: bytes = field(default=b"", repr=False)
    payer: str = ""

    @property
    def charged(self) -> str:
        """Address, or payer, that a failed login is charged to."""
        return self.payer or self.address

    def check(self) -> None:
        """Raise `NotAuthenticated` if something is missing or too long."""
        if not self.secret and not self.certificate:
            raise NotAuthenticated("this port requires a login: a token, or a user name and a password")
        if len(self.secret.encode(errors="replace")) > MAX_SECRET_BYTES:
            raise NotAuthenticated(f"a token or password has at most {MAX_SECRET_BYTES} bytes")
        if len(self.user.encode(errors="replace")) > MAX_USER_BYTES:
            raise NotAuthenticated(f"a user name has at most {MAX_USER_BYTES} bytes")
        for text in (self.user, self.client_id, self.secret):
            # Text that a service behind a callback may be unable to handle is not passed to it.
            if (not text.isascii() and not _is_unicode(text)) or not _CONTROL.isdisjoint(text):
                raise NotAuthenticated(
                    "a user name, a client's ID and a secret must not contain control characters or lone surrogates"
                )


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a client. `uin` 0: a service, which is not a user and receives nothing."""

    user: str
    uin: int
    groups: frozenset[str] = frozenset()
    claims: Mapping[str, str] = field(default_factory=dict)
    expires_at: float = NEVER_S
    """Unix seconds."""
    by: str = ""
    """Authenticator that identified the client: jwt, password, certificate or callback."""
    proof: str = ""
    """Proof of the login: fingerprint of the key, digest of the password file's line, or serial number of the certificate. The
    login ends when its proof is no longer valid."""
    signed_by: str = ""
    """Name of the key that signed a token, for people."""
    tenant: str = ""
    """The login's tenant; empty: none. `user` begins with it then, and `uin` is the cluster's, not the tenant's."""

    @property
    def name(self) -> str:
        """Name of the user, without the tenant."""
        return self.user.removeprefix(f"{self.tenant}/") if self.tenant else self.user

    def check_name(self, name: str) -> None:
        """Raise `NotAuthenticated` if a client uses the number of another user as its name."""
        if name.isascii() and name.isdecimal() and int(name[:20]) != self.uin:
            raise NotAuthenticated("the user name is the number of another user; leave it out, or give your own")

    def check_uin(self, uin: int) -> None:
        """Raise `NotAuthenticated` if a client requests another user's UIN. 0: it requests none."""
        if uin and uin != self.uin:
            raise NotAuthenticated("the UIN belongs to another user: leave it out, or give your own")


def machine_of(address: str) -> str:
    """Unit to which limits per address apply: the address, or for IPv6 its network, whose owner has 2^64 addresses."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or ipaddress.IPv6Network((int(found), NETWORK_BITS), strict=False))


_CONTROL: Final = frozenset(map(chr, (*range(32), *range(127, 160))))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def text_of_claim(value: object) -> str:
    """Canonical text of a claim's value from any source: texts unchanged, integers in decimal, `true` and `false`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)  # JSON does not distinguish 1 and 1.0
    text = str(value) if isinstance(value, str | int) else UNUSABLE
    return text if _is_unicode(text) and len(text.encode()) <= MAX_CLAIM_BYTES else UNUSABLE


def claims_of(found: Mapping[str, object]) -> dict[str, str]:
    """Claims as rules use them; null means no claim."""
    return {str(name): text_of_claim(value) for name, value in found.items() if value is not None}


def user_of(value: object) -> str:
    """Name from an authenticator: a text, or an integer. Raises `NotAuthenticated`."""
    user = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
    try:
        size = len(user.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= MAX_USER_BYTES:
        raise NotAuthenticated(f"the login's user name is not a text of 1 to {MAX_USER_BYTES} bytes")
    return user


def uin_of(value: object) -> int:
    """UIN from an authenticator: an integer, or its decimal digits; 0 for None. Raises `NotAuthenticated`."""
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_ID:
        raise NotAuthenticated("the login's UIN is not an integer from 1 to 2^63-1")
    return value


def groups_of(value: object) -> frozenset[str]:
    """Groups from an authenticator: a list of texts, or one text with spaces; none for None. Raises `NotAuthenticated`."""
    if value is None:
        return frozenset()
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or len(items) > MAX_GROUPS or not all(isinstance(item, str) for item in items):
        raise NotAuthenticated(f"the login's groups are not a list of at most {MAX_GROUPS} texts")
    return frozenset(items)
