"""`pixiu acl test`, `passwd` and `token`: what they say, and that a guard takes what they make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cluster.access.login_guard import LoginGuard
from cluster.core import log
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials
from ops.access.access_commands import acl, passwd, token

RULES = """
[jwt]
keys = "keys.json"
[password]
file = "users"
[callbacks.shop]
url = "http://127.0.0.1:9/may"
[[rule]]
deny = ["publish"]
users = ["spammer"]
[[rule]]
allow = ["publish", "subscribe"]
groups = ["players"]
rooms = ["1-100"]
topics = ["games/{uin}/#"]
[[rule]]
ask = ["subscribe"]
callback = "shop"
rooms = ["500"]
"""


@pytest.fixture
def access(tmp_path: Path) -> Path:
    file = tmp_path / "access.toml"
    file.write_text(RULES)
    return file


def command(run: object) -> typer.Typer:
    app = typer.Typer()
    app.command()(run)  # type: ignore[type-var]
    return app


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["alice", "publish", "room/42", "--uin", "7", "--group", "players"], 0, "allowed: rule 2"),
        (
            ["billing", "publish", "room/42", "--group", "players"],
            1,
            "denied: no rule matches",
        ),  # it has no UIN, which rule 2 wants
        (["alice", "publish", "room/101", "--uin", "7", "--group", "players"], 1, "denied: no rule matches"),
        (["alice", "publish", "room/42", "--uin", "7"], 1, "denied: no rule matches"),
        (["spammer", "publish", "room/42", "--group", "players"], 1, "denied: rule 1"),
        (["alice", "subscribe", "games/7/chess", "--uin", "7", "--group", "players"], 0, "allowed: rule 2"),
        (["alice", "subscribe", "games/8/chess", "--uin", "7", "--group", "players"], 1, "denied: no rule matches"),
        (["alice", "inbox", "user/7", "--uin", "7"], 0, "allowed: the implicit last rule"),
        (["alice", "inbox", "user/8", "--uin", "7"], 1, "denied: no rule matches"),
    ],
)
def test_what_a_login_may_do_is_said_with_the_rule(access: Path, arguments: list[str], code: int, said: str) -> None:
    found = CliRunner().invoke(acl, [*arguments, "--file", str(access)])
    assert (found.exit_code, said in found.stdout) == (code, True), found.output
    as_json = json.loads(CliRunner().invoke(acl, [*arguments, "--file", str(access), "--json"]).stdout)
    assert as_json["allowed"] == (code == 0)


def test_rules_of_a_tenant_are_tried_in_its_own_names(access: Path) -> None:
    access.with_name("acme.toml").write_text('[[rule]]\nallow = ["publish", "produce"]\ntopics = ["own/#", "orders"]\n')
    with access.open("a") as file:
        file.write('[tenant.acme]\nuins = "1001-2000"\nrules = "acme.toml"\n')
    for action, topic, code in (("publish", "own/1", 0), ("publish", "other", 1), ("produce", "orders", 0), ("inbox", "user/7", 0)):
        arguments = ["alice", action, topic, "--uin", "7", "--claim", "tenant=acme", "--file", str(access)]
        assert CliRunner().invoke(acl, arguments).exit_code == code, (action, topic)
    wrong = CliRunner().invoke(acl, ["alice", "publish", "a", "--claim", "tenant=other", "--file", str(access)])
    assert "belongs to a tenant that this cluster does not have" in wrong.stderr


def test_who_decides_in_the_place_of_a_rule_is_named(access: Path) -> None:
    found = CliRunner().invoke(acl, ["alice", "subscribe", "room/500", "--file", str(access)])
    assert "the callback shop decides: rule 3" in found.stdout
    wrong = CliRunner().invoke(acl, ["alice", "fly", "room/500", "--file", str(access)])
    assert (wrong.exit_code, "must be one of publish" in wrong.stderr) == (2, True)


async def test_a_guard_takes_the_passwords_and_tokens_that_were_made(access: Path) -> None:
    run, users, key = CliRunner(), access.with_name("users"), access.with_name("key.pem")
    added = run.invoke(command(passwd), [str(users), "carol", "--uin", "30", "--group", "players"], input="a long word\n")
    assert "carol added" in added.stdout
    assert (users.stat().st_mode & 0o077, b"a long word" in users.read_bytes()) == (0, False)
    assert "carol changed" in run.invoke(command(passwd), [str(users), "carol", "--uin", "31"], input="another word\n").stdout
    arguments = [str(key), "alice", "--uin", "7", "--group", "players", "--claim", "tenant=acme", "--claim", "plan=a=b"]
    made = run.invoke(command(token), arguments).stdout.strip()
    guard = LoginGuard(str(access), log.get_logger(), Audit(None))
    try:
        carol = await guard.check(Credentials("carol", "another word"))
        alice = await guard.check(Credentials("", made))
    finally:
        await guard.close()
    assert (carol.user, carol.uin, alice.user, alice.uin, alice.groups) == ("carol", 31, "alice", 7, frozenset({"players"}))
    assert (alice.claims["tenant"], alice.claims["plan"]) == ("acme", "a=b")


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        (["tenant"], "must be NAME=VALUE"), (["=acme"], "must be NAME=VALUE"), (["sub=mallory"], "sets this claim itself"),
        (["a=1", "a=2"], "is there twice"), ([f"a={'x' * 257}"], "more than 256 bytes"),
        ([f"{number}={'x' * 256}" for number in range(40)], "give it fewer claims"),
    ],
)  # fmt: skip
def test_a_claim_that_no_rule_could_use_is_refused(tmp_path: Path, claims: list[str], why: str) -> None:
    arguments = [str(tmp_path / "key.pem"), "alice", *(part for claim in claims for part in ("--claim", claim))]
    found = CliRunner().invoke(command(token), arguments)
    assert (found.exit_code, why in found.stderr) == (2, True), found.output
