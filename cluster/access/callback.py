"""Ask a web service to identify a client (`Callback`), or to decide on an action (`Decider`). Fails closed: a service that cannot
be asked, or gives a malformed answer, admits nobody and allows nothing. A status from 400 to 499 is a no to the question, so that a
client whose questions a service refuses harms nobody else.

    POST URL {"user": …, "secret": …, "client_id": …, "address": …}
    200 {"allow": true, "user": "alice", "uin": 7, "groups": ["players"], "expires_in_s": 3600}

    POST URL {"user": "alice", "uin": 7, "groups": …, "client_id": "phone", "address": …, "action": "subscribe", "topic": "room/42"}
    200 {"allow": true, "expires_in_s": 600}

Source: docs/security.md, "A callback", "Asking a callback".
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import aiohttp

from cluster.access.decisions import Breaker, Remembered
from cluster.access.settings import CallbackSettings
from cluster.trust.identity import Credentials, Identity, claims_of, groups_of, machine_of, uin_of, user_of
from pixiu.errors import NotAuthenticated, Overloaded, PixiuError

MAX_ANSWER_BYTES: Final = 16 << 10
RETRY_MS: Final = 1000
WAIT_S: Final = 2.0
"""Longest wait of a question for its turn, seconds."""
UNANSWERED_S: Final = 1.0
"""Time for which a missing answer counts as a no, seconds."""
Answer = TypeVar("Answer")
UNREACHABLE: Final = "the service that decides about logins does not answer: try again later"
COME_AGAIN: Final = (408, 425, 429)
"""Statuses below 500 that do not answer the question."""


class Unanswered(Overloaded):
    """A question got no answer; a part of the cost of a failed login is charged to its address."""


class _ServiceFailed(Exception):
    """The service itself reported a failure."""


class Asker(Generic[Answer]):
    """Asks one service, with a bounded number of questions at once, and remembers its answers.

    Args:
        now: returns monotonic seconds.
    """

    def __init__(self, settings: CallbackSettings, now: Callable[[], float]) -> None:
        self._settings, self._now = settings, now
        self.breaker = Breaker(settings.failures, settings.open_s)
        self.remembered: Remembered[Answer] = Remembered(secrets.token_bytes(32), settings.cached)
        self._session: aiohttp.ClientSession | None = None
        self._under_way = 0
        self.asked = self.failed = self.cached = 0

    def known(self, key: tuple[str, ...]) -> Answer | None:
        """A remembered answer."""
        found = self.remembered.get(key, self._now())
        self.cached += found is not None
        return found

    async def ask(
        self, key: tuple[str, ...], body: dict[str, object], address: str, read: Callable[[Any], tuple[Answer, float]]
    ) -> Answer:
        """Ask, and remember the answer. Raises `Unanswered` if no answer comes, `Overloaded` if no question may be asked now.

        Args:
            address: of the client that the question is about.
            read: converts the decoded body, None for a status that means no, into an answer and the seconds for which it is valid.
                If it raises, there is no answer.
        """
        settings = self._settings
        if self._under_way >= settings.at_once or not self.breaker.may_ask(self._now(), self.let_in(self.remembered.last(key))):
            raise Overloaded(UNREACHABLE, RETRY_MS)
        self._under_way += 1
        self.asked += 1
        try:
            async with asyncio.timeout(settings.timeout_s):
                found, lasts_s = read(await self._post(body))
        except (TimeoutError, aiohttp.ClientError, OSError, _ServiceFailed):
            self.failed += 1
            self.breaker.failed(machine_of(address), self._now())
            raise Unanswered(UNREACHABLE, RETRY_MS) from None
        except (ValueError, ArithmeticError, RecursionError, PixiuError):
            self.failed += 1  # it is alive, but this was no answer
            raise Unanswered(UNREACHABLE, RETRY_MS) from None
        finally:
            self._under_way -= 1
        self.breaker.answered()
        self.remembered.put(key, found, self._now() + lasts_s)
        return found

    def let_in(self, answer: Answer | None) -> bool:
        """True if an answer is a yes."""
        return answer is True

    async def close(self) -> None:
        """End the connections to the service."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: dict[str, object]) -> Any:
        if self._session is None:
            # An answer is never decompressed: a small one could become a huge one.
            plain = {"Accept-Encoding": "identity"}
            jar = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(headers=plain, cookie_jar=jar, trust_env=False, auto_decompress=False)
        async with self._session.post(self._settings.url, json=body, allow_redirects=False) as answer:
            if 400 <= answer.status < 500 and answer.status not in COME_AGAIN:
                return None
            if answer.status >= 500:
                raise _ServiceFailed
            if answer.status != 200:
                raise ValueError("neither yes nor no")
            data = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while len(data) <= MAX_ANSWER_BYTES and (more := await answer.content.read(MAX_ANSWER_BYTES + 1 - len(data))):
                data += more
            if len(data) > MAX_ANSWER_BYTES:
                answer.close()
                raise ValueError("too long")
        return json.loads(data)


class Callback(Asker[Identity]):
    """Service that identifies clients.

    Args:
        now: returns monotonic seconds. wall: returns Unix seconds.
    """

    def __init__(self, settings: CallbackSettings, now: Callable[[], float], wall: Callable[[], float]) -> None:
        super().__init__(settings, now)
        self._wall = wall

    def remembered_login(self, credentials: Credentials) -> Identity | None:
        """Identity from a remembered answer; None if there is none. Raises `NotAuthenticated` if the answer was a no."""
        identity = self.known(_key(credentials))
        return None if identity is None else _checked(identity)

    async def log_in(self, credentials: Credentials) -> Identity:
        """Identify a client. Raises `NotAuthenticated`, or `Overloaded` if the service does not answer."""
        identity = self.remembered_login(credentials)
        if identity is not None:
            return identity
        body: dict[str, object] = {
            "user": credentials.user, "secret": credentials.secret, "client_id": credentials.client_id,
            "address": credentials.address,
        }  # fmt: skip
        settings = self._settings

        def read(answer: Any) -> tuple[Identity, float]:
            wall = self._wall()
            found = NOBODY if answer is None else read_answer(answer, credentials, wall, settings.max_session_s)
            return found, settings.refused_s if not found.user else min(settings.cache_s, found.expires_at - wall)

        return _checked(await self.ask(_key(credentials), body, credentials.address, read))

    def let_in(self, answer: Identity | None) -> bool:
        """True if an answer identifies a client."""
        return answer is not None and bool(answer.user)


class Decider(Asker[bool]):
    """Service that decides on actions for rules that name it (`ask`)."""

    def __init__(self, settings: CallbackSettings, now: Callable[[], float]) -> None:
        super().__init__(settings, now)
        self._slots = asyncio.Semaphore(settings.at_once)

    async def decide(self, question: Question) -> None:
        """Get and remember the answer; if none comes, a no for a moment."""
        settings, key = self._settings, question.key
        if self.known(key) is not None:
            return

        def read(answer: Any) -> tuple[bool, float]:
            allowed, lasts_s = (False, None) if answer is None else _yes_or_no(answer)
            if not allowed:
                return False, settings.refused_s
            return True, settings.cache_s if lasts_s is None else min(lasts_s, settings.cache_s)

        try:
            async with asyncio.timeout(settings.timeout_s + WAIT_S), self._slots:
                await self.ask(key, question.body(), question.address, read)
        except (TimeoutError, Overloaded):
            self.remembered.put(key, False, self._now() + UNANSWERED_S)


NOBODY: Final = Identity("", 0)
"""Identity that stands for a no."""


def read_answer(answer: Any, credentials: Credentials, wall: float, max_session_s: float) -> Identity:
    """Identity in a service's answer; `NOBODY` for a no. Raises `ValueError` or `NotAuthenticated` if it is neither."""
    allowed, expires_in_s = _yes_or_no(answer)
    if not allowed:
        return NOBODY
    claims = answer.get("claims", {})
    if not isinstance(claims, dict) or len(claims) > 64:
        raise ValueError("no claims")
    until = wall + (max_session_s if expires_in_s is None else min(expires_in_s, max_session_s))
    name = answer.get("user", credentials.user)
    user = user_of(name if isinstance(name, str) else None)
    return Identity(user, uin_of(answer.get("uin")), groups_of(answer.get("groups")), claims_of(claims), until, "callback")


@dataclass(frozen=True, slots=True)
class Question:
    """Question about an action of a login. topic: `room/42`, `user/7` or a free one."""

    identity: Identity
    client_id: str
    address: str
    action: str
    topic: str

    @property
    def key(self) -> tuple[str, ...]:
        """Parts of the question on which the answer depends."""
        who = self.identity
        return who.user, str(who.uin), " ".join(sorted(who.groups)), self.client_id, self.address, self.action, self.topic

    def body(self) -> dict[str, object]:
        """Body of the request to the service."""
        who = self.identity
        return {
            "user": who.user, "uin": who.uin, "groups": sorted(who.groups), "client_id": self.client_id,
            "address": self.address, "action": self.action, "topic": self.topic,
        }  # fmt: skip


def _checked(identity: Identity) -> Identity:
    if not identity.user:
        raise NotAuthenticated("the login was refused")
    return identity


def _yes_or_no(answer: Any) -> tuple[bool, float | None]:
    """A service's decision, and the limit of its validity in seconds. Raises `ValueError` if it is neither yes nor no."""
    if not isinstance(answer, dict) or not isinstance(answer.get("allow"), bool):
        raise ValueError("neither yes nor no")
    lasts_s = answer.get("expires_in_s")
    if isinstance(lasts_s, bool) or not (lasts_s is None or (isinstance(lasts_s, int | float) and lasts_s > 0)):
        raise ValueError("no time")
    return answer["allow"], lasts_s


def _key(credentials: Credentials) -> tuple[str, ...]:
    return credentials.user, credentials.secret, credentials.client_id, credentials.address
