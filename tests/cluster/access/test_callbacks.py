"""Callbacks as authenticators and in rules: one that misbehaves, what is remembered, who pays for a login."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from cluster.access import passwords
from cluster.access.login_guard import MAX_HASHING, LoginGuard, LoginSession
from cluster.access.rules import SUBSCRIBE
from cluster.trust.identity import Credentials, Identity
from pixiu.errors import NotAuthenticated, Overloaded
from tests.support.logins import Logins, login
from tests.support.waiting import until

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Service:
    """A web service that is asked who somebody is, and does as the test says."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer: Answer = self.yes
        self.url = ""

    async def yes(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"allow": True, "user": "zoe", "uin": 70, "groups": ["players"], "expires_in_s": 60})

    async def serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        return await self.answer(request)


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    found = Service()
    app = web.Application()
    app.router.add_post("/login", found.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/login"
    yield found
    await runner.cleanup()


def callback(service: Service, **more: object) -> str:
    values = {"url": service.url, "timeout_s": 2.0, "failures": 3, "open_s": 0.2, "cache_s": 60.0, **more}
    return "[callback]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


async def test_a_callback_is_asked_once_for_a_while(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    guard = guards(callback(service))
    assert guard.check_now(login()) is None
    first = await guard.check(login())
    assert (first.user, first.uin, first.groups) == ("zoe", 70, frozenset({"players"}))
    assert guard.check_now(login()) == first
    assert guard.check_now(Credentials("zoe", "pass-phrase", "phone", "10.0.0.10")) is None  # of another address, which it was told
    assert service.asked == [{"user": "zoe", "secret": "pass-phrase", "client_id": "phone", "address": "10.0.0.9"}]

    async def no(request: web.Request) -> web.StreamResponse:
        return web.json_response({"allow": False})

    service.answer = no
    for _ in range(3):
        with pytest.raises(NotAuthenticated, match="refused"):
            await guard.check(login("another-one"))
    assert len(service.asked) == 2


async def hangs(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("/login")


async def floods(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    try:
        for _ in range(160):
            await response.write(b" " * 65536)
    except ConnectionError:
        pass
    return response


def says(text: str, status: int = 200) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


fails = says("", 500)
UNUSABLE = (
    hangs, redirects, floods, says("no JSON"), says("[" * 100_000), says("[]"), says("{}"), says('{"allow": 1}'), fails,
    says("", 429), says('{"allow": true, "expires_in_s": -1}'), says('{"allow": true}', 201),
)  # fmt: skip


async def lets_in(guard: LoginGuard, credentials: Credentials) -> bool:
    try:
        return bool(await guard.check(credentials))
    except Overloaded:
        return False


@pytest.mark.parametrize(
    "answer",
    [
        *UNUSABLE,
        says('{"allow": true, "user": ""}'), says('{"allow": true, "user": "\\ud800"}'), says('{"allow": true, "user": 7}'),
        says('{"allow": true, "uin": -1}'), says('{"allow": true, "groups": 5}'),
        says('{"allow": true, "expires_in_s": "x"}'),
    ],
)  # fmt: skip
@pytest.mark.slow
async def test_a_callback_that_hangs_lies_or_floods_lets_nobody_in(
    service: Service, guards: Callable[[str], LoginGuard], answer: Answer
) -> None:
    guard = guards(callback(service, timeout_s=0.2 if answer is hangs else 2.0, open_s=600.0))
    breaks = answer in (hangs, fails)  # what answers at all, whatever it says, is asked on
    await until(lambda: lets_in(guard, login()), "the first answer")
    service.answer = answer
    refused = guard.counts["refused"]
    with capture_logs() as lines:
        for number in range(3):
            with pytest.raises(Overloaded, match="does not answer"):
                await guard.check(login(f"secret-{number}", address=f"10.0.1.{number}"))
        asked = len(service.asked)
        with pytest.raises(Overloaded):
            await guard.check(login("one-more"))
    assert len(service.asked) == asked + (not breaks)
    assert guard.counts["refused"] == refused + 4
    assert "does not answer" in next(line["why"] for line in lines if line.get("what") == "login_refused")
    assert "secret-" not in str(lines)
    assert guard.check_now(login()) is not None  # who is remembered comes in


async def test_a_callback_is_asked_for_what_it_can_be_understood_in(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    """Many a web server compresses what whoever asks takes compressed."""

    async def compresses(request: web.Request) -> web.StreamResponse:
        response = await service.yes(request)
        response.enable_compression()
        return response

    service.answer = compresses
    assert (await guards(callback(service)).check(login())).uin == 70


async def test_a_callback_that_answers_again_is_asked_again(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    guard = guards(callback(service))
    service.answer = fails
    for number in range(5):
        with pytest.raises(Overloaded):
            await guard.check(login(f"secret-{number}", address=f"10.0.1.{number}"))
    assert guard.samples()["access_callback_open"] == 1
    service.answer = service.yes
    await until(lambda: lets_in(guard, login("one-more")), "the callback's recovery")


async def test_tokens_passwords_and_the_callback_in_turn(
    tmp_path: Path, service: Service, guards: Callable[[str], LoginGuard]
) -> None:
    logins = Logins(tmp_path)
    guard = guards(logins.file.read_text() + callback(service))
    assert (await guard.check(login(logins.token("alice", 7)))).by == "jwt"
    assert (await guard.check(login("carols-password", "carol"))).by == "password"
    assert guard.check_now(login("carols-password", "carol")) is not None  # hashed once
    assert (await guard.check(login())).by == "callback"
    asked = len(service.asked)
    for wrong in (
        login(logins.token("alice", 7, key=logins.other)),
        login("carols-passwort", "carol"),
        login(""),
        login("x" * 9000),
    ):
        with pytest.raises(NotAuthenticated):
            await guard.check(wrong)
    with pytest.raises(NotAuthenticated, match="number of another user"):
        await guard.check(login(logins.token("alice", 7), "8"))
    assert len(service.asked) == asked  # a wrong token or password is not offered to the next


@pytest.mark.parametrize("way", ["password", "callback"])
async def test_who_hangs_up_before_the_answer_pays_for_it(
    tmp_path: Path, service: Service, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    text = Logins(tmp_path).file.read_text() if way == "password" else callback(service, timeout_s=30.0)
    guard = guards(text + "[quota]\nfailed_logins_per_min = 10\n")
    begun: list[str] = []
    hashed, lock = threading.Event(), threading.Lock()
    at_once = most = 0

    def check(_entry: object, secret: str) -> Identity:
        nonlocal at_once, most
        with lock:
            begun.append(secret)
            at_once += 1
            most = max(most, at_once)
        hashed.wait(30)
        with lock:
            at_once -= 1
        raise NotAuthenticated("the user name or the password is wrong")

    async def answer(request: web.Request) -> web.StreamResponse:
        begun.append("asked")
        return await hangs(request)

    monkeypatch.setattr(passwords, "check", check)
    service.answer = answer
    with capture_logs() as lines:
        for number in range(11):
            before = len(begun)
            task = asyncio.create_task(guard.check(login(f"secret-{number}", "carol")))
            if way == "callback" or number < MAX_HASHING:
                await until(lambda before=before: len(begun) > before, "the question")  # type: ignore[misc]
            else:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert most <= MAX_HASHING  # what hangs up does not make space for one more
    with pytest.raises(Overloaded, match="failed"):
        await guard.check(login("secret", "carol"))
    hashed.set()
    assert guard.counts["refused"] == 12
    assert [line["why"] for line in lines if line.get("what") == "login_refused"] == ["the client hung up before the answer"]
    await until(lambda: not at_once, "the threads")


def decider(service: Service, **more: object) -> str:
    """An access file whose rules ask the service about rooms from 900 on."""
    rule = '[[rule]]\nask = ["subscribe", "publish"]\ncallback = "live"\nrooms = ["900-999"]\n'
    return callback(service) + callback(service, **more).replace("[callback]", "[callbacks.live]") + rule


def session_of(guard: LoginGuard, client_id: str = "phone", address: str = "10.0.0.9") -> LoginSession:
    return guard.open(Identity("zoe", 70, frozenset({"players"})), address, client_id, lambda _: None)


async def asked_for(session: LoginSession, *rooms: int, action: str = SUBSCRIBE) -> list[bool]:
    for room in rooms:
        session.foresee(action, room)
    await session.ask()
    return [session.allows(action, room) for room in rooms]


async def test_a_callback_is_asked_by_topic_and_by_device(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    guard = guards(decider(service))
    phone, tablet = session_of(guard), session_of(guard, "tablet")

    async def bound(request: web.Request) -> web.StreamResponse:
        question = await request.json()
        return web.json_response({"allow": question["client_id"] == "phone" and question["topic"] != "room/901"})

    service.answer = bound
    assert await asked_for(phone, 900, 901, 999) == [True, False, True]
    assert await asked_for(tablet, 999) == [False]
    assert not phone.allows(SUBSCRIBE, 42)  # no rule is about it, and nobody is asked
    assert await asked_for(phone, 900, 901) == [True, False]  # remembered
    assert len(service.asked) == 4
    assert service.asked[0] == {
        "user": "zoe", "uin": 70, "groups": ["players"], "client_id": "phone", "address": "10.0.0.9", "action": "subscribe",
        "topic": "room/900",
    }  # fmt: skip
    for session in (phone, tablet):
        session.close()


@pytest.mark.parametrize("answer", [*UNUSABLE, says('{"allow": "true"}')])
@pytest.mark.slow
async def test_a_callback_of_rules_that_hangs_lies_or_floods_allows_nothing(
    service: Service, guards: Callable[[str], LoginGuard], answer: Answer
) -> None:
    guard = guards(decider(service, timeout_s=0.2 if answer is hangs else 2.0, open_s=600.0))
    session = session_of(guard)
    service.answer = says('{"allow": true}')
    await until(lambda: first(session), "the first answer")
    service.answer = answer
    others = [session_of(guard, address=f"10.0.1.{number}") for number in range(3)]
    for other in others:
        assert await asked_for(other, 901) == [False]
    asked, breaks = len(service.asked), answer in (hangs, fails)
    assert await asked_for(session, 904) == [False]
    assert len(service.asked) == asked + (not breaks)  # it is not even asked any more
    assert await asked_for(session, 900) == [True]  # what is remembered holds
    assert guard.samples()["access_decider_open"] == breaks
    for one in (session, *others):
        one.close()


async def first(session: LoginSession) -> bool:
    return (await asked_for(session, 900))[0]


async def test_a_question_nobody_could_remember_is_asked_once_and_refused(
    service: Service, guards: Callable[[str], LoginGuard]
) -> None:
    guard = guards(decider(service, cached=1))
    session = session_of(guard)
    service.answer = says('{"allow": true}')
    assert sorted(await asked_for(session, 900, 901)) == [False, True]
    session.close()


async def test_a_session_of_a_callback_ends_one_day(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    guard = guards(callback(service, max_session_s=30.0))
    before = time.time()
    assert before < (await guard.check(login())).expires_at <= time.time() + 30.0  # it said 60

    async def for_ever(request: web.Request) -> web.StreamResponse:
        return web.json_response({"allow": True, "claims": {"banned": True, "level": 1.0, "long": "x" * 300}})

    service.answer = for_ever
    identity = await guard.check(login("another"))
    assert before < identity.expires_at <= time.time() + 30.0
    assert identity.claims == {"banned": "true", "level": "1", "long": "\0"}


async def test_a_stranger_closes_the_callback_to_nobody_and_pays(service: Service, guards: Callable[[str], LoginGuard]) -> None:
    async def refuses(request: web.Request) -> web.StreamResponse:
        user = service.asked[-1]["user"]
        if user.startswith("long"):
            return web.json_response({"error": "user name too long"}, status=400)
        return web.Response(status=500) if user.startswith("odd") else await service.yes(request)

    guard = guards(callback(service, failures=1) + "[quota]\nfailed_logins_per_min = 5\n")
    service.answer = refuses
    for number in range(4):
        with pytest.raises(NotAuthenticated, match="refused"):
            await guard.check(login(f"a{number}", "long", "10.0.0.66"))
    for number in range(12):  # a login without an answer costs a quarter of one that failed
        with pytest.raises(Overloaded, match="does not answer"):
            await guard.check(login(f"b{number}", "odd", "10.0.0.67"))
    assert not guard._callback.breaker.is_open  # type: ignore[union-attr]
    assert (await guard.check(login())).uin == 70
    for address, more in (("10.0.0.66", 1), ("10.0.0.67", 8)):
        for number in range(more + 2):
            with pytest.raises((NotAuthenticated, Overloaded)):
                await guard.check(login(f"c{number}", "long" if more == 1 else "odd", address))
        with pytest.raises(Overloaded, match="wait a minute"):
            await guard.check(login("right", "zoe", address))
    asked = len(service.asked)
    for user, secret in (("a\0b", "x"), ("a", "x\n"), ("\ud800", "x")):  # what a service may fail at is not its to judge
        with pytest.raises(NotAuthenticated, match="control"):
            await guard.check(Credentials(user, secret, "phone", "10.0.0.68"))
    assert len(service.asked) == asked


async def test_who_was_let_in_before_has_the_first_try_of_an_open_breaker(
    service: Service, guards: Callable[[str], LoginGuard], monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guards(callback(service, cache_s=1.0, open_s=100.0))
    found, now = guard._callback, 0.0
    assert found is not None
    monkeypatch.setattr(found, "_now", lambda: now)
    await guard.check(login())
    service.answer = fails
    for number in range(3):
        with pytest.raises(Overloaded):
            await guard.check(login("other", address=f"10.0.1.{number}"))
    assert found.breaker.is_open
    now, asked = 101.0, len(service.asked)
    with pytest.raises(Overloaded):
        await guard.check(login("stranger", "eve"))
    assert len(service.asked) == asked
    service.answer = service.yes
    assert (await guard.check(login())).uin == 70
    assert not found.breaker.is_open
