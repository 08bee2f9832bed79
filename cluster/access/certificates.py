"""Clients' certificates: the identities in them. TLS has verified the certificate; here its content is read. Pure.

    name = "CN"   template = "{user}"                       CN=alice                       → alice
    name = "URI"  template = "pixiu://user/{uin}/{user}"    URI:pixiu://user/7/alice       → alice, UIN 7
    name = "DNS"  template = "{uin}.devices.example"        DNS:17.devices.example         → 17.devices.example, UIN 17

Source: docs/security.md, "Certificates of clients"; RFC 5280.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509

from cluster.trust.identity import MAX_USER_BYTES, Identity, uin_of
from pixiu.errors import ConfigurationError, NotAuthenticated
from pixiu.rpc.tls import ROLE_URI

NAMES: Final = ("CN", "DNS", "email", "URI")
"""Places of a name: the subject's common name, or a kind of its alternative names."""
CLIENT: Final = "client"
"""The role in a client's certificate, which is not a process (`pixiu pki issue client`)."""
MAX_NAMES: Final = 64
_PARTS: Final = {"{user}": r"(?P<user>[^/]+)", "{uin}": r"(?P<uin>[0-9]{1,19})", "{group}": r"(?P<group>[^/]+)"}
_SPLIT: Final = re.compile(r"(\{[^}]*\})")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateSettings:
    """Settings for reading names."""

    name: str = "CN"
    template: str = "{user}"
    """`{user}`, `{uin}`, `{group}`, each at most once; other text is literal. Without `{user}` the user is the whole name."""
    groups: tuple[str, ...] = ()
    """Groups of everybody who logs in with a certificate."""
    revoked: str = ""
    """Path of a file with serial numbers, hexadecimal, one per line; empty: none."""
    uins: Mapping[str, int] = field(default_factory=dict)
    """User → UIN, for names without a UIN."""

    def pattern(self) -> re.Pattern[str]:
        """Pattern of a valid name. Raises `ValueError` for an invalid template."""
        parts = _SPLIT.split(self.template)
        named = [part for part in parts if part.startswith("{")]
        if not named or len(set(named)) < len(named) or not set(named) <= _PARTS.keys():
            raise ValueError("no template")
        return re.compile("".join(_PARTS.get(part) or re.escape(part) for part in parts))


def read_revoked(text: bytes, name: str) -> frozenset[int]:
    """Serial numbers in a file of revoked certificates; text after a # is a comment. Raises `ConfigurationError`."""
    found = set()
    for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
        word = line.partition("#")[0].strip().replace(":", "")
        if word:
            try:
                found.add(int(word, 16))
            except ValueError:
                raise ConfigurationError(f"{name}, line {number}: must be a serial number, hexadecimal") from None
    return frozenset(found)


def read(der: bytes, revoked: frozenset[int], now: float) -> x509.Certificate:
    """Decode a certificate that TLS has verified. Raises `NotAuthenticated` if it is revoked, not valid now, a process's, or
    unreadable."""
    try:
        certificate = x509.load_der_x509_certificate(der)
        begins, ends = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        roles = [uri.removeprefix(ROLE_URI) for uri in _names(certificate, "URI") if uri.startswith(ROLE_URI)]
    except (ValueError, x509.DuplicateExtension) as error:
        raise NotAuthenticated(f"the client's certificate cannot be read: {type(error).__name__}") from None
    if certificate.serial_number in revoked:
        raise NotAuthenticated("the client's certificate is revoked")
    if not begins <= now < ends:
        raise NotAuthenticated("the client's certificate has expired, or is not valid yet")
    if set(roles) - {CLIENT}:
        raise NotAuthenticated("the certificate belongs to a process or an operator, not to a client")
    return certificate


def identity_of(certificate: x509.Certificate, settings: CertificateSettings) -> Identity:
    """Identity in a certificate. Raises `NotAuthenticated` if no name, or more than one, fits the template."""
    pattern = settings.pattern()
    fitting = [found for name in _names(certificate, settings.name)[:MAX_NAMES] if (found := pattern.fullmatch(name))]
    if len(fitting) != 1:
        raise NotAuthenticated(f"the client's certificate has {len(fitting)} names ({settings.name}) that fit; it must have one")
    parts = fitting[0].groupdict()
    user = parts.get("user") or fitting[0].string
    if len(user.encode(errors="replace")) > MAX_USER_BYTES or not user.isprintable():
        raise NotAuthenticated(f"a user name in a certificate has at most {MAX_USER_BYTES} bytes, all of them printable")
    uin = uin_of(parts.get("uin") or settings.uins.get(user))
    groups = frozenset((*settings.groups, parts["group"])) if parts.get("group") else frozenset(settings.groups)
    serial = f"{certificate.serial_number:x}"
    return Identity(
        user, uin, groups, {"serial": serial}, certificate.not_valid_after_utc.timestamp(), "certificate", serial
    )  # fmt: skip


def _names(certificate: x509.Certificate, kind: str) -> list[str]:
    if kind == "CN":
        return [str(name.value) for name in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    if kind == "DNS":
        return names.get_values_for_type(x509.DNSName)
    return names.get_values_for_type(x509.RFC822Name if kind == "email" else x509.UniformResourceIdentifier)
