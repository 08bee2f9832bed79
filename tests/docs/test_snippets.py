"""Every snippet of README and docs, and every command and option that their text names, is one that exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.snippets import (
    DRAWINGS,
    PAGES,
    READ_FOR_NAMES,
    Snippet,
    indented_code,
    problems_of_line,
    problems_of_prose,
    problems_of_python,
    problems_of_toml,
    snippets,
)


def of(language: str) -> list[object]:
    """The snippets of a language, each named by page and line."""
    return [pytest.param(found, id=f"{found.page}:{found.line}") for found in snippets() if found.language == language]


def test_every_snippet_says_what_it_is() -> None:
    # The tests of the SDKs look at the snippets of their languages.
    assert {found.language for found in snippets()} <= {"python", "sh", "toml", "go", "ts", *DRAWINGS}
    assert {page: found for page in PAGES if (found := indented_code(page))} == {}


@pytest.mark.parametrize("snippet", of("python"))
def test_python_names_what_is_there(snippet: Snippet) -> None:
    assert problems_of_python(snippet.text) == []


@pytest.mark.parametrize("snippet", of("sh"))
def test_commands_can_be_given_so(snippet: Snippet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for word in snippet.text.split():
        if word.endswith(".toml"):  # that it exists is looked at when the options are parsed
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    lines = snippet.text.replace("\\\n", " ").splitlines()
    assert [problem for line in lines for problem in problems_of_line(line)] == []


@pytest.mark.parametrize("snippet", of("toml"))
def test_configuration_is_loaded(snippet: Snippet, tmp_path: Path) -> None:
    assert problems_of_toml(snippet.text, tmp_path) == []


@pytest.mark.parametrize("page", READ_FOR_NAMES)
def test_commands_and_options_in_the_text_exist(page: str) -> None:
    assert problems_of_prose(page) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("async with pixiu.conect('x') as px: pass", "has no conect"),
        ("async with pixiu.connect('x') as px:\n    await px.rom(42)", "Client has no rom"),
        ("await px.room(42).send_now(b'x')", "Room has no send_now"),
        ("await px.user(7).mail(b'x', two=[8])", "mail: no argument two"),
        ("await px.room(42).signal(b'x', 1, 2)", "too many positional"),
        ("async with px.inbox(uin=7) as box:\n    async for mail in box:\n        mail.ack()", "Mail has no ack"),
        ("def handler(message: pixiu.Message) -> None:\n    print(message.body)", "Message has no body"),
        (
            "view = pixiu.InboxView('x')\nfor one in (await view.unread(7))[1].devices:\n    one.client_id",
            "DeviceState has no client_id",
        ),
        ("from pixiu import Clint", "pixiu has no Clint"),
        ("import pixiu.nothing", "No module named"),
        ("if True", "expected ':'"),
    ],
)
def test_what_is_wrong_with_python_is_found(text: str, problem: str) -> None:
    (found,) = problems_of_python(text)
    assert problem in found


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("pixiu nope", "no such command"),
        ("pixiu status --colour", "NoSuchOption"),
        ("pixiu send --room abc hello", "should be a valid integer"),
        ("pixiu presence", "MissingParameter"),
        ("make everything", "no such target"),
        ("python -m no_such_module", "no module"),
        ("frobnicate 1", "what is frobnicate"),
    ],
)
def test_what_is_wrong_with_a_command_is_found(line: str, problem: str) -> None:
    (found,) = problems_of_line(line)
    assert problem in found


def test_what_is_wrong_with_configuration_is_found(tmp_path: Path) -> None:
    (found,) = problems_of_toml('[gateway]\nhost = "0.0.0.0"\nadvertised_host = "10.0.0.7"\n', tmp_path)
    assert "loopback" in found
    (found,) = problems_of_toml("[broker]\npartitoin = 1\n", tmp_path)
    assert "Did you mean partition?" in found
