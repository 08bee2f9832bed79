"""Secrets of every form, in every kind of text that a support bundle has, and what must stay readable."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest

from cluster.trust.key_folder import add_key, use_key
from cluster.trust.pki import issue, make_authority
from ops.support.redaction import REDACTED, Redaction, secret_files, secrets_of

KEPT = (
    b'{"event": "starting", "registry": "zk://10.0.0.1:2181/pubsub", "login": "used", "keys": "signs with 1, accepts 1"}\n',
    b'pixiu_gateway_connections_closed_total{reason="token",partition="-1"} 4\n',
    b"token_file = /etc/pixiu/token: cannot be read\n",
    b'pixiu_gateway_refused_total{reason="sessions_per_address"} 3\n',
    b"the password is wrong, and the basic settings differ\n",
    b"--token-file /etc/pixiu/token --password --verbose\n",
    b'{"token": "", "room": 7}\n',
)


@pytest.mark.parametrize(
    "text",
    [
        "password=hunter2secret",
        '"password": "hunter2secret"',
        "api_key: hunter2secret",
        "Authorization: Bearer hunter2secret",
        "https://alice:hunter2secret@example.com/x",
        "https://example.com/x?token=hunter2secret&y=1",
        "PIXIU_TOKEN=hunter2secret",
        "-----BEGIN PRIVATE KEY-----\nhunter2secret\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\nhunter2secret",
        "eyJhbGciOiJFZERTQSJ9.hunter2secret.c2ln",
        "alice:$scrypt$hunter2secret",
        "start --password hunter2secret",
        "start --db-password 'one hunter2secret'",
        "['start', '--api-key', 'one hunter2secret']",
        "secret = 'one hunter2secret'",
        r"""secret = 'it\'s hunter2secret'""",
        '{"password": "one hunter2secret", "room": 7}',
        r'{"event": "{\"password\": \"one hunter2secret\"}"}',
        "password = b'hunter2secret'",
        'password = "one hunter2secret',
    ],
)
def test_a_text_loses_secrets_by_their_form(text: str) -> None:
    cleaned = Redaction().text(b"before " + text.encode() + b"\nafter\n")
    assert b"hunter2secret" not in cleaned
    assert cleaned.startswith(b"before ")
    assert REDACTED.encode() in cleaned


@pytest.mark.parametrize("line", KEPT, ids=range(len(KEPT)))
def test_what_is_no_secret_stays(line: bytes) -> None:
    assert Redaction().text(line) == line


def test_values_of_the_files_that_the_options_name_stand_nowhere(tmp_path: Path) -> None:
    add_key(tmp_path / "keys")
    use_key(tmp_path / "keys")
    make_authority(tmp_path / "ca")
    issue(tmp_path / "ca", "broker", tmp_path / "tls")
    words = {name: secrets.token_urlsafe(24) for name in ("registry", "users", "token", "jwt")}
    (tmp_path / "logins").write_text(f"broker {words['registry']}\n")
    (tmp_path / "users").write_text(f"alice 7 {words['users']}\n")
    (tmp_path / "access.toml").write_text('[password]\nfile = "users"\n[quota]\nsessions_per_address = 20000\n')
    (tmp_path / "token").write_text(words["token"])
    (tmp_path / "jwt.pem").write_text(f"-----BEGIN PRIVATE KEY-----\n{words['jwt']}\n-----END PRIVATE KEY-----\n")
    tables: list[dict[str, object]] = [
        {"key_dir": str(tmp_path / "keys"), "tls_dir": "tls", "registry_credentials_file": "logins"},
        {"access_file": "access.toml", "token_file": "token", "data_dir": "ca", "port": 7000},
    ]
    paths = secret_files(tables, tmp_path)
    assert {path.name for path in paths} >= {"1.key", "broker.pem", "logins", "access.toml", "users", "token"}
    lines = (tmp_path / "tls/broker.pem").read_text().splitlines()
    held = [*words.values(), (tmp_path / "keys/1.key").read_text().strip(), *(line for line in lines if len(line) == 64)]
    assert len(held) > 5
    found, unread = secrets_of(paths)
    assert unread == {}
    cleaned = Redaction(found).text("\n".join(f"x {word} y" for word in held).encode())
    assert [word for word in held if word.encode() in cleaned] == []
    assert cleaned.count(b"x ") == len(held)
    assert [Redaction(found).text(line) for line in KEPT] == list(KEPT)


@pytest.mark.parametrize(
    ("line", "cleaned"),
    [
        (b"--password one --room 7", b"--password [redacted] --room 7"),
        (b'{"secret": "one two", "room": 7}', b'{"secret": "[redacted]", "room": 7}'),
        (b"secret = 'one two' of 3", b"secret = '[redacted]' of 3"),
    ],
    ids=["flag", "json", "quoted"],
)
def test_only_the_value_is_removed(line: bytes, cleaned: bytes) -> None:
    assert Redaction().text(line) == cleaned
    assert Redaction().text(cleaned) == cleaned


def test_secrets_that_cannot_be_read_are_named(unprivileged: Path) -> None:
    for name in ("listed", "hidden", "keys"):
        (unprivileged / name).mkdir()
        (unprivileged / name / "1.key").write_text("a secret of a key, 0")
    (unprivileged / "access.toml").write_text('[password]\nfile = "hidden/1.key"\n')
    (unprivileged / "alone").write_text("a secret of a file, 0")
    (unprivileged / "listed").chmod(0o400)
    (unprivileged / "hidden").chmod(0o000)
    (unprivileged / "keys").chmod(0o300)
    (unprivileged / "alone").chmod(0o000)
    table = {"key_dir": "keys", "tls_dir": "listed", "token_file": "alone", "access_file": "access.toml", "login_file": "missing"}
    found, unread = secrets_of(secret_files([table], unprivileged))
    places = {str(path.relative_to(unprivileged)) for path in unread}
    assert places == {"keys", "listed/1.key", "alone", "hidden/1.key"}
    assert set(unread.values()) == {"Permission denied"}
    assert not any(b"secret" in word for word in found)


def test_of_a_configuration_only_known_options_have_values() -> None:
    known = {"gateway": ["mqtt_port", "access_file", "api_token"], "cluster": ["key_dir"]}
    tables = {
        "cluster": {"key_dir": "/etc/pixiu/keys"},
        "gateway": {"mqtt_port": 1883, "access_file": "a.toml", "api_token": "hunter2", "mqtt_prot": "hunter2"},
        "strangers": {"url": "hunter2"},
        "loose": "hunter2",
    }
    shown = Redaction().tables(tables, known)
    assert shown["cluster"] == {"key_dir": "/etc/pixiu/keys"}
    assert shown["gateway"] == {"mqtt_port": 1883, "access_file": "a.toml", "api_token": REDACTED, "mqtt_prot": REDACTED}
    assert "hunter2" not in json.dumps(shown)
