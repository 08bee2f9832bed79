"""Who may call the console, and what it answers to others. No cluster: nothing here gets that far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from cluster.access.login_guard import LoginGuard
from cluster.access.minting import key_of, token
from cluster.core import log
from cluster.trust.audit import Audit
from ops.console.changes import CHANGES
from ops.console.cluster import Cluster
from ops.console.logins import MAX_SESSIONS, Logins, Session
from ops.console.reads import CONTENTS, OPEN
from ops.console.server import Console, Place
from pixiu.errors import NotAuthenticated

SECRET = "a secret of this run"


@asynccontextmanager
async def console(logins: Logins) -> AsyncIterator[aiohttp.ClientSession]:
    """A console, and a browser without its page's headers."""
    server = Console(Cluster("zk://127.0.0.1:9/none"), logins, Place("127.0.0.1", 0))
    await server.start()
    try:
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}", cookie_jar=jar) as browser:
            yield browser
    finally:
        await server.close()


async def asked(browser: aiohttp.ClientSession, method: str, path: str, **words: Any) -> tuple[int, str]:
    """Status, and code of the error or nothing."""
    async with browser.request(method, path, **words) as answer:
        return answer.status, (await answer.json()).get("error", {}).get("code", "")


def secret_logins() -> Logins:
    return Logins(SECRET, None, "operators", "viewers", operator="ann@here")


async def test_nothing_is_shown_without_a_login() -> None:
    async with console(secret_logins()) as browser:
        assert [await asked(browser, "GET", f"/api/{path}") for path in (*OPEN, *CONTENTS, "gateways", "mqtt")] == [
            (401, "UNAUTHENTICATED")
        ] * (len(OPEN) + len(CONTENTS) + 2)
        assert {await asked(browser, "POST", f"/api/{path}", json={}) for path in CHANGES} == {(401, "UNAUTHENTICATED")}
        assert await asked(browser, "POST", "/api/login", json={"token": "another"}) == (401, "UNAUTHENTICATED")
        assert await asked(browser, "POST", "/api/login", json={"token": "x" * 9_000}) == (401, "UNAUTHENTICATED")


async def test_the_token_of_this_run_gives_a_cookie_that_no_script_reads() -> None:
    async with console(secret_logins()) as browser:
        async with browser.post("/api/login", json={"token": SECRET}) as answer:
            assert await answer.json() == {"user": "ann@here", "may_change": True}
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        async with browser.get("/api/session") as answer:
            said = await answer.json()
            assert (said["user"], said["logged_in"], said["login_required"]) == ("ann@here", True, True)
        # It gets as far as its inputs.
        assert await asked(browser, "POST", "/api/topic/seek", json={"name": ""}) == (400, "INVALID_ARGUMENT")
        await asked(browser, "POST", "/api/logout", json={})
        assert await asked(browser, "GET", "/api/map") == (401, "UNAUTHENTICATED")


async def test_a_console_without_logins_shows_and_changes_nothing() -> None:
    async with console(Logins("", None, "operators", "viewers", operator="")) as browser:
        assert {await asked(browser, "POST", f"/api/{path}", json={}) for path in CHANGES} == {(403, "NOT_ALLOWED")}
        assert {await asked(browser, "GET", f"/api/{path}") for path in (*CONTENTS, "mqtt")} == {(403, "NOT_ALLOWED")}
        assert await asked(browser, "GET", "/api/series") == (200, "")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"Host": "evil.example:7080"},
        {"Host": ""},
    ],
    ids=str,
)
async def test_pages_of_other_sites_may_not_call(headers: dict[str, str]) -> None:
    async with console(Logins("", None, "operators", "viewers", operator="")) as browser:
        assert await asked(browser, "GET", "/api/series", headers=headers) == (403, "NOT_ALLOWED")


async def test_a_form_of_another_site_changes_nothing() -> None:
    async with console(secret_logins()) as browser:
        await asked(browser, "POST", "/api/login", json={"token": SECRET})
        assert await asked(browser, "POST", "/api/topic/seek", data={"name": "orders"}) == (403, "NOT_ALLOWED")
        assert await asked(browser, "POST", "/api/topic/seek", data=b"{}", headers={"Content-Type": "text/plain"}) == (
            403,
            "NOT_ALLOWED",
        )


async def test_the_page_loads_from_this_host_alone() -> None:
    async with console(secret_logins()) as browser:
        async with browser.get("/") as answer:
            assert answer.status == 200
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert "//" not in (await answer.text()).replace("<!doctype", "")
        for path in ("/page/main.js", "/page/style.css", "/page/icon.svg"):
            async with browser.get(path) as answer:
                assert answer.status == 200
        for path in ("/page/other.js", "/page/..%2fserver.py", "/page/%2e%2e/server.py", "/server.py", "/api/none"):
            async with browser.get(path) as answer:
                assert answer.status == 404, path


async def test_a_body_that_is_too_large_is_not_read() -> None:
    async with console(secret_logins()) as browser:
        status, _ = await asked(browser, "POST", "/api/login", data=b"x" * 100_000, headers={"Content-Type": "application/json"})
        assert status in (400, 413)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "none"])
async def test_compressed_bodies_are_refused_without_a_line_in_a_log(encoding: str, caplog: pytest.LogCaptureFixture) -> None:
    async with console(secret_logins()) as browser:
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        for data in (b"abcde", b"{}"):
            assert (await asked(browser, "POST", "/api/login", data=data, headers=headers))[0] in (400, 401), data
        assert not caplog.records


async def test_a_misspelt_field_of_a_change_is_refused_and_no_letter_is_not_all() -> None:
    async with console(secret_logins()) as browser:
        await asked(browser, "POST", "/api/login", json={"token": SECRET})
        for path, body in {
            "topic/resend": {"name": "orders", "channel": "billing", "offset": [7]},
            "inbox/drop": {"uin": 7},
            "inbox/resend": {"uin": 7, "letter": ""},
            "mqtt?gateway=9": None,
        }.items():
            method = "GET" if body is None else "POST"
            assert await asked(browser, method, f"/api/{path}", json=body) == (400, "INVALID_ARGUMENT"), path


async def test_two_consoles_of_one_host_have_a_login_each() -> None:
    async with console(secret_logins()) as one, console(secret_logins()) as other:
        both = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=both) as browser:
            places = [str(each._base_url).rstrip("/") for each in (one, other)]
            for place in places:
                await asked(browser, "POST", f"{place}/api/login", json={"token": SECRET})
            for place in places:
                async with browser.get(f"{place}/api/session") as answer:
                    assert (await answer.json())["logged_in"], place


async def test_a_cluster_without_processes_is_an_error_and_not_an_empty_page() -> None:
    async with console(secret_logins()) as browser:
        await asked(browser, "POST", "/api/login", json={"token": SECRET})
        for path in ("clients", "rooms"):
            assert await asked(browser, "GET", f"/api/{path}") == (503, "UNAVAILABLE"), path


async def test_users_of_the_access_file_look_and_operators_change(tmp_path: Any) -> None:
    key = key_of(tmp_path / "signing.pem")
    (tmp_path / "access.toml").write_text('[jwt]\nkeys = "keys.json"\naudience = "pixiu"\n')
    guard = LoginGuard(str(tmp_path / "access.toml"), log.get_logger(), Audit(None))
    logins = Logins("", guard, "operators", "viewers", operator="")
    async with console(logins) as browser:
        nobody = token(key, "bob", 0, ("players",), lasts_s=60, audience="pixiu")
        assert await asked(browser, "POST", "/api/login", json={"token": nobody}) == (403, "NOT_ALLOWED")
        for groups, may_change in ((("viewers",), False), (("operators",), True)):
            given = token(key, "ann", 0, groups, lasts_s=60, audience="pixiu")
            async with browser.post("/api/login", json={"token": given}) as answer:
                assert await answer.json() == {"user": "ann", "may_change": may_change}
            expected = (400, "INVALID_ARGUMENT") if may_change else (403, "NOT_ALLOWED")
            assert await asked(browser, "POST", "/api/clients/kick", json={}) == expected
        assert await asked(browser, "POST", "/api/login", json={"token": given[:-8] + "AAAAAAAA"}) == (401, "UNAUTHENTICATED")


async def test_sessions_end_and_are_bounded() -> None:
    now = [1_000.0]
    logins = Logins(SECRET, None, "operators", "viewers", operator="ann", wall_s=lambda: now[0])
    first, session = await logins.log_in(SECRET, "127.0.0.1")
    assert logins.session(first) == session
    for _ in range(MAX_SESSIONS):
        last, _ = await logins.log_in(SECRET, "127.0.0.1")
    assert logins.session(first) is None
    assert isinstance(logins.session(last), Session)
    now[0] = session.until_s
    assert logins.session(last) is None
    with pytest.raises(NotAuthenticated):
        await logins.log_in("", "127.0.0.1")
