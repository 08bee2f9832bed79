"""What is remembered of answers, and when nobody is asked; passwords; a process's proof."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.access import passwords
from cluster.access.decisions import WINDOW, Breaker, Remembered
from pixiu.errors import ConfigurationError, InvalidArgument, NotAuthenticated


def test_answers_are_kept_for_a_time_and_up_to_a_number() -> None:
    kept: Remembered[int] = Remembered(b"k" * 32, 2)
    kept.put(("a", "b"), 1, until=10.0)
    assert kept.get(("a", "b"), 9.9) == 1
    assert kept.get(("ab", ""), 9.9) is None
    assert kept.get(("a", "b"), 10.0) is None
    for number in range(5):
        kept.put((str(number),), number, until=10.0)
    assert len(kept) == 2
    assert [kept.get((str(number),), 0.0) for number in range(5)] == [None, None, None, 3, 4]
    assert b"secret" not in repr(kept._answers).encode()


def test_an_answer_is_forgotten_alone() -> None:
    answers: Remembered[bool] = Remembered(b"key", 10)
    for name in ("a", "b"):
        answers.put((name,), True, 10.0)
    answers.forget(("a",))
    answers.forget(("unknown",))
    assert [answers.get((name,), 0.0) for name in ("a", "b")] == [None, True]


def test_a_breaker_opens_by_failures_of_several_addresses_and_lets_one_ask_at_a_time() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    for _ in range(100):
        breaker.failed("10.0.0.1", 0.0)
        breaker.failed("10.0.0.2", 0.0)
    assert breaker.may_ask(0.0)  # two that fail are two
    breaker.failed("10.0.0.3", 0.0)
    assert not breaker.may_ask(4.9, known=True)
    assert [breaker.may_ask(5.0, known=True), breaker.may_ask(5.0, known=True)] == [True, False]
    breaker.failed("10.0.0.1", 6.0)
    assert not breaker.may_ask(10.9, known=True)
    assert not breaker.may_ask(15.9), "whom nobody knows waits twice as long"
    assert breaker.may_ask(16.0)
    breaker.answered()
    assert breaker.may_ask(16.0)
    assert breaker.opened == 1


def test_a_breaker_judges_by_the_share_of_the_last_questions() -> None:
    breaker = Breaker(failures=10, open_s=5.0)
    for number in range(9 * WINDOW):
        breaker.failed(f"10.0.0.{number}", 0.0) if number % 20 < 9 else breaker.answered()
    assert not breaker.is_open
    for number in range(10):
        breaker.failed(f"10.0.1.{number}", 0.0)
    assert breaker.is_open


def test_the_last_answer_is_known_when_its_time_is_over() -> None:
    kept: Remembered[int] = Remembered(b"secret", limit=2)
    kept.put(("a",), 1, until=10.0)
    assert (kept.get(("a",), 10.0), kept.last(("a",)), kept.last(("b",))) == (None, 1, None)


def test_a_password_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "users"
    assert not passwords.put_user(path, "alice", passwords.line_of("alice", "correct horse", 7, ("players",)))
    assert not passwords.put_user(path, "svc", passwords.line_of("svc", "battery staple", 0))
    assert passwords.put_user(path, "alice", passwords.line_of("alice", "another one", 7, ("players", "staff")))
    assert path.stat().st_mode & 0o077 == 0
    users = passwords.read_users(path.read_text(), str(path))
    assert passwords.check(users["alice"], "another one").groups == {"players", "staff"}
    assert passwords.check(users["svc"], "battery staple").uin == 0
    for entry, password in ((users["alice"], "correct horse"), (None, "another one")):
        with pytest.raises(NotAuthenticated, match="user name or the password"):
            passwords.check(entry, password)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:7:",
        "alice:x::scrypt$16384$8$1$AA==$AA==",
        "alice:7::md5$1$1$1$AA==$AA==",
        "alice:7::scrypt$16383$8$1$AA==$AA==",
        ":7::scrypt$16384$8$1$AA==$AA==",
        "a:7::scrypt$16384$8$1$A$A",
    ],
)
def test_a_wrong_line_is_named_without_what_is_in_it(line: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^users, line 2: ") as caught:
        passwords.read_users(f"# a comment\n{line}\n", "users")
    assert "AA==" not in str(caught.value)


@pytest.mark.parametrize(
    ("user", "password"),
    [("", "long enough"), ("a:b", "long enough"), ("a\nb", "long enough"), ("#a", "long enough"), ("a", "short")],
)
def test_what_cannot_be_a_user_is_refused(user: str, password: str) -> None:
    with pytest.raises(InvalidArgument):
        passwords.line_of(user, password, 7)
