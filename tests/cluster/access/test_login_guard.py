"""The guard: quotas, the end of sessions, files that change."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from structlog.testing import capture_logs

from cluster.access import passwords
from cluster.access.kicks import Kick
from cluster.access.login_guard import LoginGuard, LoginSession
from cluster.access.rules import PUBLISH, SUBSCRIBE
from cluster.access.visits import SLICE_S, SPREAD_S, Visits
from cluster.core import log
from cluster.trust.audit import Audit
from cluster.trust.identity import Credentials, Identity
from pixiu.errors import ConfigurationError, NotAuthenticated, Overloaded, Unavailable
from tests.support.logins import RULES, Logins, all_visited, login
from tests.support.waiting import until


async def take(guard: LoginGuard) -> None:
    """The files as they stand still, and all sessions by them."""
    await guard.read_again()
    await guard.read_again()
    await all_visited(guard)


async def test_sessions_are_counted_bounded_and_ended(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text() + "[quota]\nsessions_per_user = 2\nsessions_per_address = 3\nmessages_per_s = 100\n")
    ended: list[str] = []
    identity = Identity("alice", 7, frozenset({"players"}))
    mine = [guard.open(identity, "10.0.0.1", "", ended.append) for _ in range(2)]
    with pytest.raises(Overloaded, match="user"):
        guard.open(identity, "10.0.0.2", "", ended.append)
    bob = guard.open(Identity("bob", 8), "10.0.0.1", "", ended.append)
    with pytest.raises(Overloaded, match="address"):
        guard.open(Identity("carol", 9), "10.0.0.1", "", ended.append)
    assert guard.kick(Kick("alice").text()) == 2
    assert guard.kick(Kick("8").text()) == 1
    assert not bob.allows(SUBSCRIBE, -8)  # from now on
    service = guard.open(Identity("billing", 0), "10.0.0.2", "", ended.append)
    for none in (Kick("nobody").text(), Kick("0").text(), "", "alice", "{}", '{"user": 7}', '{"user": "alice", "everybody": true}'):
        assert guard.kick(none) == 0
    await all_visited(guard)
    assert len(ended) == 3
    assert guard.kick(Kick("billing").text()) == 1
    service.close()
    sensor = guard.open(Identity("dora", 10), "10.0.0.3", "sensor-7", ended.append)
    assert guard.kick(Kick(client="sensor-8").text()) == 0
    assert guard.kick(Kick("carol", client="sensor-7").text()) == 0
    assert guard.kick(Kick("dora", client="sensor-8").text()) == 0
    assert guard.kick(Kick("dora", forget=True).text()) == 0, "only of a client"
    assert guard.kick(Kick("10", client="sensor-7", forget=True).text()) == 1
    assert guard.kick(Kick(client="sensor-7").text()) == 1
    assert not sensor.allows(SUBSCRIBE, -10)
    sensor.close()
    assert mine[0].spend(50, 100) == 0
    assert mine[1].spend(150, 100) > 0  # of the user, whatever the session
    assert bob.spend(1, 100) == 0
    for session in (*mine, bob, bob):
        session.close()
    assert guard.samples()["access_sessions"] == 0
    guard.open(identity, "10.0.0.1", "", ended.append).close()


async def test_who_owes_is_held_until_nothing_is_owed(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.access.login_guard.MAX_HOLD_S", 0.01)
    guard = guards(Logins(tmp_path).file.read_text() + "[quota]\nbytes_per_s = 1000.0\n")
    first, second = (guard.open(Identity("alice", 7), "x", "", lambda _: None) for _ in range(2))
    assert first.spend(1, 1200) > 0
    await second.hold()
    assert first.owed() == second.owed() == 0
    first.close()
    second.close()


async def test_calls_one_after_the_other_cost_their_login_what_messages_cost(
    tmp_path: Path, guards: Callable[[str], LoginGuard]
) -> None:
    guard = guards(Logins(tmp_path).file.read_text() + "[quota]\nmessages_per_s = 100.0\n")
    calls = [guard.open(Identity("alice", 7), "x", "", lambda _why: None) for _ in range(20)]
    waiting = [asyncio.create_task(call.charge_call()) for call in calls]
    await asyncio.sleep(0)
    held = [(task, call) for task, call in zip(waiting, calls, strict=True) if not task.done()]
    assert 10 <= len(held) < 20, "a second's quota is there at once"
    for task, _ in held:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert {call for _, call in held}.isdisjoint(guard.sessions), "the callers are gone"
    assert len(guard.sessions) == 20 - len(held)


async def test_calls_that_were_held_go_on_one_after_the_other(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand that went on together were a turn of 153 ms."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    guard = guards(Logins(tmp_path).file.read_text() + "[quota]\nmessages_per_s = 100.0\n")
    call = guard.open(Identity("alice", 7), "x", "", lambda _why: None)
    monkeypatch.setattr("cluster.access.login_guard.asyncio.sleep", sleep)
    for _ in range(30):
        await call.charge_call()
    assert len(waits) >= 20
    assert all(after - before > 0.1 for before, after in itertools.pairwise(waits))
    call.close()


async def test_a_session_ends_at_its_time_and_not_before(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    guard = guards(Logins(tmp_path).file.read_text())
    ended: list[tuple[str, float]] = []
    until_s = time.time() + 0.2
    session = guard.open(Identity("a", 1, expires_at=until_s), "x", "", lambda why: ended.append((why, time.time())))
    guard.open(Identity("b", 2, expires_at=time.time() + 1e9), "x", "", lambda why: ended.append((why, 0.0)))
    await until(lambda: ended, "the end of the session")
    assert len(ended) == 1
    assert "expired" in ended[0][0]
    assert ended[0][1] >= until_s
    session.close()


async def test_too_many_failed_logins_of_an_address_close_it(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text() + "[quota]\nfailed_logins_per_min = 5\n")
    good = login(logins.token("alice", 7))
    for _ in range(20):
        with pytest.raises((NotAuthenticated, Overloaded)):
            await guard.check(login("eyJ.wrong.token"))
    with pytest.raises(Overloaded, match="failed"):
        await guard.check(good)
    assert guard.check_now(Credentials("", good.secret, "", "10.0.0.10")) is not None


async def test_failed_logins_count_for_a_network_of_version_6_and_for_an_address_of_version_4(
    tmp_path: Path, guards: Callable[[str], LoginGuard]
) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text() + "[quota]\nfailed_logins_per_min = 5\n")
    for number in range(20):  # whoever has one such address has 2^64 of them
        with pytest.raises((NotAuthenticated, Overloaded)):
            guard.check_now(Credentials("", "eyJ.wrong.token", "", f"2001:db8::{number:x}"))
        with pytest.raises(NotAuthenticated):
            guard.check_now(Credentials("", "eyJ.wrong.token", "", f"2001:db8:0:{number + 1:x}::1"))
        with pytest.raises(NotAuthenticated):
            guard.check_now(Credentials("", "eyJ.wrong.token", "", f"::ffff:10.0.1.{number}"))
    good = logins.token("alice", 7)
    with pytest.raises(Overloaded, match="failed"):
        guard.check_now(Credentials("", good, "", "2001:db8::ffff"))
    assert guard.check_now(Credentials("", good, "", "2001:db8:0:ffff::1")) is not None


async def test_files_are_read_again_and_wrong_ones_change_nothing(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    old = logins.token("alice", 7, "players")
    identity = await guard.check(login(old))
    ended: list[str] = []
    changed: list[bool] = []
    session = guard.open(identity, "x", "", ended.append)
    session.rules_changed = lambda: changed.append(session.allows(PUBLISH, 42))
    assert session.allows(PUBLISH, 42)
    logins.write_rules('[[rule]]\ndeny = ["publish"]\n' + RULES)
    await take(guard)
    assert changed == [False]
    logins.write_rules('[[rule]]\ndeny = ["fly"]\n')
    with capture_logs() as lines:
        await take(guard)
        await take(guard)
    assert [line["event"] for line in lines] == ["access_file_wrong"]
    assert not session.allows(PUBLISH, 42)
    # Another key: the old one's tokens open nothing new, and its sessions end.
    logins.key = logins.other
    logins.write_keys()
    logins.write_rules(RULES)
    await take(guard)
    with pytest.raises(NotAuthenticated, match="signature"):
        guard.check_now(login(old))
    assert guard.check_now(login(logins.token("alice", 7))) is not None
    assert ended == ["the key that signed the token was removed; connect again with a new token"]
    # To what the client still sends it is told that its session is over, and not that it may not do it.
    denied = guard.counts["denied"]
    with pytest.raises(Unavailable, match="the key that signed the token was removed"):
        session.require(PUBLISH, 42)
    assert guard.counts["denied"] == denied
    # Who is no longer in the password file is out.
    carol = guard.open(await guard.check(login("carols-password", "carol")), "x", "", ended.append)
    (tmp_path / "users").write_text("")
    await take(guard)
    assert len(ended) == 2
    for one in (session, carol):
        one.close()


async def test_what_is_refused_is_audited_without_a_secret(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    with capture_logs() as lines:
        with pytest.raises(NotAuthenticated):
            await guard.check(login("carols-passwort", "carol"))
        session = guard.open(await guard.check(login("carols-password", "carol")), "x", "", lambda _: None)
        for _ in range(3):
            assert not session.allows(PUBLISH, 13)
        session.close()
    said = [line["what"] for line in lines if line["event"] == "audit"]
    assert said == ["login_refused", "login", "denied"]  # one line for one thing, however often
    assert guard.counts["denied"] == 3
    assert "carols-pass" not in str(lines)
    assert "carols-pass" not in repr(login("carols-password", "carol"))


def part(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


@pytest.mark.parametrize(
    "make",
    [
        lambda logins: logins.token("alice", 7, lasts_s=-60),
        lambda logins: logins.token("alice", 7, nbf=time.time() + 60),
        lambda logins: logins.token("alice", 7, key=logins.other),
        lambda logins: f"{part({'alg': 'none'})}.{part({'sub': 'alice', 'aud': 'pixiu', 'exp': time.time() + 60})}.",
        lambda logins: logins.token("alice", 7, filler="x" * 20_000),
        lambda logins: jwt.encode({"sub": "alice"}, logins.key, "EdDSA", headers={"kid": "1", "cty": "JWT"}),
        lambda logins: logins.token("alice", 7, aud=7),
        lambda logins: logins.token("\ud800", 7),
    ],
    ids=["expired", "not yet", "another key", "alg none", "huge", "nested", "audience", "name"],
)
async def test_each_wrong_token_is_refused_counted_and_audited(
    tmp_path: Path, guards: Callable[[str], LoginGuard], make: Callable[[Logins], str]
) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    token = make(logins)
    with capture_logs() as lines, pytest.raises(NotAuthenticated):
        await guard.check(login(token))
    assert guard.counts["refused"] == 1
    assert [line["what"] for line in lines] == ["login_refused"]
    assert token not in str(lines)


PASSWORDS = '[password]\nfile = "users"\n'


async def test_another_password_ends_the_users_sessions_and_nobody_elses(
    tmp_path: Path, guards: Callable[[str], LoginGuard]
) -> None:
    users = tmp_path / "users"
    for name, uin in (("alice", 7), ("bob", 8)):
        passwords.put_user(users, name, passwords.line_of(name, "password-1", uin))
    guard = guards(PASSWORDS)
    ended: list[str] = []
    sessions = [
        guard.open(await guard.check(login("password-1", name)), "x", "", lambda _, name=name: ended.append(name))  # type: ignore[misc]
        for name in ("alice", "bob")
    ]
    passwords.put_user(users, "alice", passwords.line_of("alice", "password-2", 7))
    await take(guard)
    assert ended == ["alice"]
    for session in sessions:
        session.close()


@pytest.mark.parametrize("after", ["", "new"])
async def test_whose_entry_changes_while_the_password_is_hashed_is_told_to_try_again(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    users = tmp_path / "users"
    users.write_text(passwords.line_of("alice", "password-1", 7) + "\n")
    guard = guards(PASSWORDS)
    begun, go_on, check = threading.Event(), threading.Event(), passwords.check

    def slow(entry: passwords.PasswordEntry | None, secret: str) -> Identity:
        begun.set()
        go_on.wait(30)
        return check(entry, secret)

    monkeypatch.setattr(passwords, "check", slow)
    task = asyncio.create_task(guard.check(login("password-1", "alice")))
    await until(begun.is_set, "the thread")
    users.write_text(passwords.line_of("alice", "password-2", 7) if after else "")
    await take(guard)
    go_on.set()
    with pytest.raises(Overloaded, match="try again"):
        await task
    with pytest.raises(NotAuthenticated):
        await guard.check(login("password-1", "alice"))


async def test_what_comes_after_a_failed_read_or_during_it_is_read(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    users, later, parse = tmp_path / "users", tmp_path / "later", passwords.read_users
    users.write_text("")
    guard = guards(PASSWORDS)
    (tmp_path / "access.toml").write_text('[password]\nfile = "later"\n')
    await take(guard)  # names a file that comes afterwards
    later.write_text(passwords.line_of("bob", "password-1", 8))
    await take(guard)
    assert (await guard.check(login("password-1", "bob"))).uin == 8

    def completed(text: str, name: str) -> Mapping[str, passwords.PasswordEntry]:
        if text == "carol:9":
            later.write_text(passwords.line_of("carol", "password-1", 9))
        return parse(text, name)

    monkeypatch.setattr(passwords, "read_users", completed)
    later.write_text("carol:9")  # half of it
    await take(guard)
    await take(guard)
    assert (await guard.check(login("password-1", "carol"))).uin == 9


async def test_only_what_has_changed_is_parsed_and_not_by_the_event_loop(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    parse, threads = passwords.read_users, []

    def noted(text: str, name: str) -> Mapping[str, passwords.PasswordEntry]:
        threads.append(threading.current_thread())
        return parse(text, name)

    monkeypatch.setattr(passwords, "read_users", noted)
    logins.write_rules("")
    await take(guard)
    assert not threads
    assert (await guard.check(login("carols-password", "carol"))).by == "password"
    (tmp_path / "users").write_text("")
    await take(guard)
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


TYPOS = {
    "address": {"access.toml": '[callback]\nurl = "http://[bad/x"\n'},
    "port": {"access.toml": '[callback]\nurl = "http://host:99999999/x"\n'},
    "depth": {"access.toml": "x = " + "[" * 3000},
    "digits": {"access.toml": "x = " + "1" * 5000},
    "keys": {"access.toml": '[jwt]\nkeys = "keys.json"\n', "keys.json": '{"keys": ["x"]}'},
    "shared key": {"access.toml": '[jwt]\nkeys = "keys.json"\n', "keys.json": '{"keys": [{"kty": "oct", "k": 5}]}'},
    "depth of keys": {"access.toml": '[jwt]\nkeys = "keys.json"\n', "keys.json": "[" * 100_000},
}


@pytest.mark.parametrize("typo", TYPOS)
async def test_a_typo_is_said_and_what_comes_after_it_is_read(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch, typo: str
) -> None:
    monkeypatch.setattr("cluster.access.login_guard.LOOK_S", 0.01)
    (tmp_path / "users").write_text("")
    guard = guards(PASSWORDS)
    guard.start()
    for name, text in TYPOS[typo].items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError):
        LoginGuard(str(tmp_path / "access.toml"), log.get_logger(), Audit(None))
    await until(lambda: guard.counts["files_wrong"], "the line in the log")
    (tmp_path / "access.toml").write_text(PASSWORDS + "[quota]\nsessions_per_user = 5\n")
    await until(lambda: guard.settings.quota.sessions_per_user == 5, "the next change")


async def test_nothing_ends_the_look_at_the_files(
    tmp_path: Path, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.access.login_guard.LOOK_S", 0.01)
    (tmp_path / "users").write_text("")
    guard = guards(PASSWORDS)
    session = guard.open(Identity("alice", 7), "x", "", lambda _: None)

    def fails() -> None:
        raise RuntimeError("of a session")

    session.rules_changed = fails
    guard.start()
    for limit in (5, 6):
        (tmp_path / "access.toml").write_text(PASSWORDS + f"[quota]\nsessions_per_user = {limit}\n")
        await until(lambda limit=limit: guard.settings.quota.sessions_per_user == limit, "the change")  # type: ignore[misc]
    session.close()


async def test_nobody_can_roll_the_audit_log_over(tmp_path: Path) -> None:
    file, audit = Logins(tmp_path).file, Audit(tmp_path / "audit")
    guard = LoginGuard(str(file), log.get_logger(), audit)
    before, begun = audit.refusals.head[0], time.monotonic()
    for number in range(1, 200):
        session = guard.open(Identity("alice", 7), "10.0.0.1", "phone", lambda _: None)
        for target in (number + 1000, f"free/{number}", f"free/{number}/" + "x" * 1000):
            assert not session.allows(PUBLISH, target)
        session.close()
    assert audit.refusals.head[0] - before <= 2 * (time.monotonic() - begun) + 2
    await audit.flush()
    await guard.close()
    audit.close()


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"access\.toml: cannot be read"):
        LoginGuard(str(tmp_path / "access.toml"), log.get_logger(), Audit(None))
    (tmp_path / "access.toml").write_text('[jwt]\nkeys = "gone.json"\n')
    with pytest.raises(ConfigurationError, match=r"gone\.json: cannot be read"):
        LoginGuard(str(tmp_path / "access.toml"), log.get_logger(), Audit(None))


@pytest.mark.parametrize("name", ["users", "keys.pem", "revoked", "access.toml"])
async def test_half_of_a_file_is_not_taken_though_it_be_a_good_file(
    tmp_path: Path, guards: Callable[[str], LoginGuard], name: str
) -> None:
    """A file is read when it stood still from one look to the next."""
    logins = Logins(tmp_path)
    pems = [
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        for key in (logins.other, logins.key)
    ]
    (tmp_path / "keys.pem").write_bytes(b"".join(pems))
    (tmp_path / "revoked").write_text("0a\n0b\n")
    whole = '[jwt]\nkeys = "keys.pem"\naudience = "pixiu"\n[password]\nfile = "users"\n[certificate]\nrevoked = "revoked"\n' + RULES
    for user in ("dora", "eve"):
        with (tmp_path / "users").open("a") as users:
            users.write(passwords.line_of(user, "password-1", 10) + "\n")
    guard = guards(whole)
    ended: list[str] = []
    who = login("password-1", "eve") if name == "users" else login(logins.token("alice", 7, "players"))
    session = guard.open(await guard.check(who), "x", "", ended.append)
    path = tmp_path / name
    lines = path.read_text().splitlines(keepends=True)
    half = {"users": 2, "keys.pem": len(lines) // 2, "revoked": 1, "access.toml": len(whole.splitlines()) - 5}[name]
    with path.open("w") as file:
        for number, line in enumerate(lines, 1):
            file.write(line)
            file.flush()
            if number >= half:
                await guard.read_again()
                await all_visited(guard)
                assert not ended
                assert session.allows(SUBSCRIBE, -session.identity.uin)
        file.write("\n")
    await take(guard)
    assert not ended
    assert guard.settings.rules
    assert guard._files.revoked == {10, 11}
    session.close()


async def test_a_line_of_somebody_else_concerns_nobody_and_a_change_of_rules_is_worked_off_in_slices(
    tmp_path: Path, guards: Callable[[str], LoginGuard]
) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    now, visited, slices = 0.0, 0, [0]
    ended: list[str] = []

    class Changed(Visits[LoginSession]):
        def slice(self) -> float:
            slices.append(visited)
            return super().slice()

    def changed() -> None:
        nonlocal now, visited
        now, visited = now + SLICE_S / 4, visited + 1  # each costs a quarter of a slice

    guard._changed = Changed(LoginSession.visit, guard._wrong, lambda: now, lambda: 0.001)
    sessions = [guard.open(Identity(f"u{n}", n + 1, frozenset({"players"})), f"10.0.{n}.1", "", lambda _: None) for n in range(100)]
    for session in sessions:
        session.rules_changed = changed
    carol = guard.open(await guard.check(login("carols-password", "carol")), "x", "", ended.append)
    carol.rules_changed = changed  # or the clock would stand still where hers is the first visit
    passwords.put_user(tmp_path / "users", "dora", passwords.line_of("dora", "password-1", 11))
    await take(guard)
    assert (await guard.check(login("password-1", "dora"))).uin == 11
    assert (visited, ended) == (0, [])
    logins.write_rules('[[rule]]\ndeny = ["publish"]\nrooms = ["42"]\n' + RULES)
    await guard.read_again()
    await guard.read_again()
    assert not visited
    assert not sessions[99].allows(PUBLISH, 42), "a denial holds at once, though nobody was visited yet"
    await all_visited(guard)
    assert slices[-1] >= 96
    assert max(after - before for before, after in pairwise(slices)) <= 5
    for session in (*sessions, carol):
        session.close()


def test_many_are_visited_over_some_seconds_and_few_at_once() -> None:
    now = 0.0
    seen: list[int] = []
    visits: Visits[int] = Visits(seen.append, lambda _: None, lambda: now, lambda: 0.5)
    loop = asyncio.new_event_loop()
    visits._task = asyncio.Future(loop=loop)  # type: ignore[assignment]
    loop.close()
    visits.add(range(20))
    now = 0.02
    assert visits.slice() == pytest.approx(0, abs=0.001)
    assert len(seen) == 20
    seen.clear()
    visits.add([*range(20_000), *range(20_000)])
    when = {}
    while len(visits):
        now += 0.01
        visits.slice()
        when[len(seen)] = now
    assert seen == list(range(20_000))
    assert SPREAD_S / 2 - 0.1 < now < SPREAD_S / 2 + 0.2
    assert len(when) > 400


async def test_sessions_of_a_key_an_authenticator_or_all_are_ended(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text())
    ended: list[str] = []

    async def enter(credentials: Credentials) -> LoginSession:
        identity = await guard.check(credentials)

        def end(_: str) -> None:
            ended.append(identity.user)
            made.close()

        made = guard.open(identity, "x", "", end)
        return made

    for who in (login(logins.token("alice", 7)), login("carols-password", "carol"), login(logins.token("bob", 8))):
        await enter(who)
    assert guard.kick(Kick(by="jwt", signed_by="another").text()) == 0
    assert guard.kick(Kick(by="jwt", signed_by="1").text()) == 2
    await all_visited(guard)
    assert sorted(ended) == ["alice", "bob"]
    assert guard.kick(Kick(everybody=True).text()) == 1
    await all_visited(guard)
    assert sorted(ended) == ["alice", "bob", "carol"]
    assert not guard.sessions
    assert not guard._by_proof


async def test_sessions_of_a_revoked_certificate_end_and_no_others(tmp_path: Path, guards: Callable[[str], LoginGuard]) -> None:
    (tmp_path / "revoked").write_text("")
    guard = guards('[certificate]\nrevoked = "revoked"\n')
    ended: list[str] = []
    sessions = [
        guard.open(Identity(user, uin, by="certificate", proof=proof), "x", "", lambda _, user=user: ended.append(user))  # type: ignore[misc]
        for user, uin, proof in (("phone", 7, "a1"), ("tablet", 7, "b2"), ("pump", 8, "c3"))
    ]
    (tmp_path / "revoked").write_text("A1\n0c3 # lost\n")
    await take(guard)
    assert sorted(ended) == ["phone", "pump"]
    assert not sessions[0].allows(SUBSCRIBE, -7)
    assert sessions[1].allows(SUBSCRIBE, -7)
    with pytest.raises(Overloaded, match="revoked"):  # logged in just before
        guard.open(sessions[0].identity, "x", "", ended.append)
    for session in sessions:
        session.close()
