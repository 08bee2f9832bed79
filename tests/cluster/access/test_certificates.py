"""Clients' certificates: whom one names, and those that let nobody in."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from cluster.access.certificates import CertificateSettings, identity_of, read, read_revoked
from cluster.access.login_guard import LoginGuard
from cluster.access.settings import parse
from cluster.core import log
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from pixiu.errors import ConfigurationError, NotAuthenticated
from tests.support.waiting import until

KEY = ec.generate_private_key(ec.SECP256R1())
NOW = time.time()


def certificate(*names: x509.GeneralName, cn: tuple[str, ...] = ("alice",), days: float = 1, serial: int = 0x1234) -> bytes:
    """DER, as TLS gives it."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in cn])
    begins, ends = sorted((now - datetime.timedelta(minutes=5), now + datetime.timedelta(days=days)))
    builder = x509.CertificateBuilder(subject, subject, KEY.public_key(), serial, begins, ends)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(Encoding.DER)


URI, DNS = x509.UniformResourceIdentifier, x509.DNSName


@pytest.mark.parametrize(
    ("settings", "shown", "user", "uin", "groups"),
    [
        (CertificateSettings(), certificate(), "alice", 0, set()),
        (CertificateSettings(uins={"alice": 7}, groups=("all",)), certificate(), "alice", 7, {"all"}),
        (CertificateSettings(template="{group}/{user}/{uin}"), certificate(cn=("ops/alice/7",)), "alice", 7, {"ops"}),
        (
            CertificateSettings(name="URI", template="pixiu://user/{uin}/{user}"),
            certificate(URI("https://x.example"), URI("pixiu://user/7/al"), URI("pixiu://role/client")), "al", 7, set(),
        ),
        (
            CertificateSettings(name="DNS", template="{uin}.devices.example"),
            certificate(DNS("other.example"), DNS("17.devices.example")), "17.devices.example", 17, set(),
        ),
    ],
)  # fmt: skip
def test_a_name_says_who_it_is(settings: CertificateSettings, shown: bytes, user: str, uin: int, groups: set[str]) -> None:
    found = identity_of(read(shown, frozenset(), NOW), settings)
    assert (found.user, found.uin, set(found.groups), found.by) == (user, uin, groups, "certificate")
    assert NOW < found.expires_at < NOW + 2 * 86_400


@pytest.mark.parametrize(
    ("settings", "shown", "why"),
    [
        (CertificateSettings(), certificate(cn=("alice", "bob")), "2 names"),
        (CertificateSettings(), certificate(cn=()), "0 names"),
        (CertificateSettings(), certificate(cn=("a/b",)), "0 names"),
        (CertificateSettings(template="x{user}"), certificate(), "0 names"),
        (CertificateSettings(name="URI", template="pixiu://user/{uin}"), certificate(), "0 names"),
        (CertificateSettings(name="DNS", template="{uin}.d"), certificate(DNS("1.d"), DNS("2.d")), "2 names"),
        (CertificateSettings(template="{uin}"), certificate(cn=("9223372036854775808",)), "UIN"),
        (CertificateSettings(template="{uin}"), certificate(cn=("0",)), "UIN"),
        (CertificateSettings(), certificate(cn=("al\nice",)), "printable"),
    ],
)
def test_a_name_that_does_not_fit_is_nobodys(settings: CertificateSettings, shown: bytes, why: str) -> None:
    with pytest.raises(NotAuthenticated, match=why):
        identity_of(read(shown, frozenset(), NOW), settings)


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (certificate(serial=0xAB), "revoked"),
        (certificate(days=-1), "expired"),
        (certificate(URI("pixiu://role/xiu")), "process"),
        (certificate(URI("pixiu://role/operator"), URI("pixiu://role/client")), "process"),
        (b"0" * 64, "read"),
        (b"", "read"),
    ],
)
def test_a_certificate_that_lets_nobody_in(shown: bytes, why: str) -> None:
    with pytest.raises(NotAuthenticated, match=why):
        read(shown, frozenset({0xAB}), NOW)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('name = "SAN"', r"\[certificate\] name"),
        ('template = "alice"', r"\[certificate\] template"),
        ('template = "{user}{user}"', r"\[certificate\] template"),
        ('template = "{name}"', r"\[certificate\] template"),
        ("uins = {alice = 0}", r"\[certificate\] uins"),
        ("trust = 1", "trust"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        parse(f"[certificate]\n{text}\n", "access.toml")


def test_serial_numbers_are_read_as_tools_write_them() -> None:
    assert read_revoked(b"1F\n0a:0b # the phone\n\n# nothing\n", "revoked") == {0x1F, 0x0A0B}
    with pytest.raises(ConfigurationError, match="revoked, line 2"):
        read_revoked(b"1F\nxyz\n", "revoked")


@pytest.mark.slow
async def test_a_session_ends_when_its_certificate_is_revoked_and_a_token_does_not_mend_it(tmp_path: Path) -> None:
    access, revoked = tmp_path / "access.toml", tmp_path / "revoked"
    revoked.write_text("")
    access.write_text('[certificate]\nrevoked = "revoked"\nuins = {alice = 7}\n')
    guard = LoginGuard(str(access), log.get_logger(), Audit(None))
    ended: list[str] = []
    shown = Credentials("", "", "phone", "10.0.0.9", certificate())
    identity = guard.check_now(shown)
    assert identity is not None
    session = guard.open(identity, "10.0.0.9", "phone", ended.append)
    guard.start()
    revoked.write_text("1234\n")
    await until(lambda: ended == ["the client's certificate has been revoked"], "the end of the session")
    session.close()
    for secret in ("", "ey.token.x"):
        with pytest.raises(NotAuthenticated, match="revoked"):
            guard.check_now(Credentials("", secret, "phone", "10.0.0.9", certificate()))
    with pytest.raises(NotAuthenticated, match="login"):
        guard.check_now(Credentials("", "", "phone", "10.0.0.9"))
    await guard.close()
