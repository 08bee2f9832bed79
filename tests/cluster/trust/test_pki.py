"""The authority: what it issues, what it refuses, and that nobody else can read a key."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from cluster.trust.pki import issue, make_authority, renew
from ops.access.pki_command import pki
from pixiu.errors import ConfigurationError, InvalidArgument


def names(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    return [str(name.value) for name in certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value]


def test_the_commands_make_what_a_cluster_needs(tmp_path: Path) -> None:
    run, ca, out = CliRunner(), ["--ca", str(tmp_path / "ca")], ["--out", str(tmp_path / "tls")]
    assert run.invoke(pki, ["init", *ca]).exit_code == 0
    again = run.invoke(pki, ["init", *ca])
    assert (again.exit_code, "has an authority already" in again.stderr) == (2, True)
    said = run.invoke(pki, ["issue", *ca, *out, "gateway", "--host", "gw.example", "--host", "10.0.0.7"])
    assert said.stdout.split() == [str(tmp_path / "tls/gateway.pem")]
    assert names(tmp_path / "tls/gateway.pem") == ["pixiu://role/gateway", "gateway.pixiu", "gw.example", "10.0.0.7"]
    assert run.invoke(pki, ["issue", *ca, *out, "operator", "--name", "ann"]).exit_code == 0
    assert names(tmp_path / "tls/operator.pem") == ["pixiu://role/operator"]
    before = {path: path.read_bytes() for path in (tmp_path / "tls").glob("*.pem")}
    assert run.invoke(pki, ["renew", *ca, *out, "--before", "30"]).stdout == ""
    assert len(run.invoke(pki, ["renew", *ca, *out]).stdout.split()) == 2
    assert names(tmp_path / "tls/gateway.pem") == ["pixiu://role/gateway", "gateway.pixiu", "gw.example", "10.0.0.7"]
    assert [path.name for path, text in before.items() if path.read_bytes() == text] == ["ca.pem"]
    for path in (tmp_path / "ca/ca.key", tmp_path / "tls/gateway.pem"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("role", "options", "what"),
    [
        ("king", {}, "is not a role"),
        ("operator", {"hosts": ["a"]}, "for calls only"),
        ("xiu", {"hosts": ["a b"]}, "is neither a name nor an address"),
        ("xiu", {"days": 0}, "--days 0"),
        ("client", {"name": "../x"}, "--name"),
    ],
)
def test_what_cannot_be_issued_is_said(tmp_path: Path, role: str, options: dict[str, object], what: str) -> None:
    make_authority(tmp_path)
    with pytest.raises(InvalidArgument, match=what):
        issue(tmp_path, role, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_an_authority_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="`pixiu pki init` makes an authority"):
        issue(tmp_path, "xiu", tmp_path)
    for name in ("a", "b"):
        make_authority(tmp_path / name)
    (tmp_path / "a/ca.key").write_bytes((tmp_path / "b/ca.key").read_bytes())
    with pytest.raises(ConfigurationError, match=r"ca\.key is not the key of ca\.pem"):
        renew(tmp_path / "a", tmp_path)
