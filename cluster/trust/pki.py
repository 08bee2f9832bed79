"""A certificate authority for people who have none: makes it, and certificates of processes, operators and clients.

    FOLDER/ca.pem   the authority's certificate        FOLDER/ca.key   its private key: keep it off the machines of the cluster
    OUT/ca.pem      the trusted authority              OUT/ROLE.pem    private key and certificate (`pixiu.rpc.tls`)

Keys are of the curve P-256. The role is the URI `pixiu://role/ROLE`. A process's certificate also has the host name `ROLE.pixiu`;
those of operators and clients have none, so that nobody can serve with them.

Source: docs/security.md, "Certificates".
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pixiu.discovery.paths import ROLES
from pixiu.durable import replace_file
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.rpc.tls import OPERATOR, ROLE_URI, host_name

CLIENT: Final = "client"
PIPELINE: Final = "pipeline"
CALLERS: Final = (OPERATOR, PIPELINE, CLIENT)
"""Roles that call and never serve."""
ZOOKEEPER: Final = "zookeeper"
"""Role that serves and is no process of the cluster."""
AUTHORITY_DAYS: Final = 3650
DAYS: Final = 90
CLOCKS_DIFFER: Final = datetime.timedelta(minutes=5)
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def _write(path: Path, data: bytes, *, private: bool) -> None:
    """Replace a file atomically."""
    try:
        replace_file(path, data, mode=0o600 if private else 0o644)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}; `pixiu pki init` makes an authority") from None


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _builder(subject: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def make_authority(folder: Path, name: str = "Pixiu") -> None:
    """Make an authority. Raises ConfigurationError: there is one already, or the folder cannot be written."""
    if (folder / "ca.key").exists():
        raise ConfigurationError(f"{folder} has an authority already: give another folder, or issue certificates with this one")
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = _builder(name, issuer, key, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write(folder / "ca.key", _private(key), private=True)
    _write(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), private=False)


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=signs_certificates, crl_sign=signs_certificates, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    try:
        key = serialization.load_pem_private_key(_read(folder / "ca.key"), None)
        certificate = x509.load_pem_x509_certificate(_read(folder / "ca.pem"))
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{folder}: ca.key and ca.pem are no authority: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ConfigurationError(f"{folder}: ca.key is not the key of ca.pem")
    return key, certificate


def issue(authority: Path, role: str, out: Path, *, hosts: Sequence[str] = (), name: str = "", days: float = DAYS) -> Path:
    """Issue a certificate into `out`, with the authority's beside it. Returns the file.

    Args:
        role: a process's role, or `operator`, `pipeline`, `client`, `zookeeper`.
        hosts: further names and addresses at which clients reach a process by TLS.
        name: its owner, for audit logs; default: the role. A client's file has this name.

    Raises InvalidArgument, ConfigurationError.
    """
    if role not in (*ROLES, *CALLERS, ZOOKEEPER):
        raise InvalidArgument(f"{role}: is not a role: must be one of {', '.join((*sorted(ROLES), *CALLERS, ZOOKEEPER))}")
    if role in CALLERS and hosts:
        raise InvalidArgument(f"--host: a certificate of {role} is for calls only, and needs no host")
    if not 0 < days <= AUTHORITY_DAYS:
        raise InvalidArgument(f"--days {days:g}: must be above 0, up to {AUTHORITY_DAYS}")
    name = name or role
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"--name {name}: must be up to 64 letters, digits and the characters . _ - @, with a letter or digit first"
        )
    signing, issuer = _authority(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    subjects: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"{ROLE_URI}{role}")]
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role not in CALLERS:
        subjects += [x509.DNSName(host_name(role)), *map(_host, hosts)]
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = (
        _builder(name, issuer.subject, key, days)
        .add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        .sign(signing, hashes.SHA256())
    )
    path = out / f"{name if role == CLIENT else role}.pem"
    _write(path, _private(key) + certificate.public_bytes(serialization.Encoding.PEM), private=True)
    trusted = out / "ca.pem"
    own = issuer.public_bytes(serialization.Encoding.PEM)
    known = _read(trusted) if trusted.exists() else b""
    if own not in known:
        _write(trusted, known + own, private=False)
    return path


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*]([A-Za-z0-9.-]{0,252})", host):
            raise InvalidArgument(f"--host {host}: is neither a name nor an address") from None
        return x509.DNSName(host)


def renew(authority: Path, folder: Path, *, days: float = DAYS, before_days: float = 0.0) -> list[Path]:
    """Renew the certificates in a folder that this authority issued, with new keys: all, or those that expire within this number
    of days. Returns their files. Raises ConfigurationError."""
    _, issuer = _authority(authority)
    limit = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=before_days)
    done = []
    for path in sorted(folder.glob("*.pem")):
        if path.name == "ca.pem":
            continue
        try:
            old = x509.load_pem_x509_certificate(_read(path))
            old.verify_directly_issued_by(issuer)
            subjects = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
            continue
        roles = [uri.removeprefix(ROLE_URI) for uri in subjects.get_values_for_type(x509.UniformResourceIdentifier)]
        if len(roles) != 1 or (before_days and old.not_valid_after_utc > limit):
            continue
        hosts = [each for each in subjects.get_values_for_type(x509.DNSName) if each != host_name(roles[0])]
        hosts += [str(each) for each in subjects.get_values_for_type(x509.IPAddress)]
        name = str(old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        done.append(issue(authority, roles[0], folder, hosts=hosts, name=name, days=days))
    return done
