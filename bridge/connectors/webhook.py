"""A target that posts batches of messages to a URL, signed.

    POST URL   webhook-id: stable for a batch, also when it is repeated
               webhook-timestamp: Unix seconds      webhook-signature: v1,BASE64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))
               {"bridge": …, "topic": …, "messages": [{"part": 1, "offset": 7, "time_us": …, "key": …, "headers": {…}, "body": …}]}

Source: docs/bridges.md, "To a webhook"; the headers are those of the specification Standard Webhooks 1.0.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp

from bridge.connector import DONE, Item, Outcome, Verdict, away, said
from bridge.connectors.secrets import secret_of
from bridge.options import TargetOptions
from pixiu.errors import ConfigurationError

WAIT_STATUS: Final = (408, 425, 429)
"""Answers that ask to try again, beside those from 500 on."""
MESSAGE_STATUS: Final = (400, 406, 409, 413, 415, 422)
"""Answers that say that something in the batch is wrong."""
MAX_RETRY_AFTER_S: Final = 3600.0
MAX_ANSWER_BYTES: Final = 4096


@dataclass(frozen=True, kw_only=True)
class WebhookOptions(TargetOptions):
    """A bridge with kind = "to-webhook"."""

    url: str = ""
    """Address to which batches are posted: https://… or http://…."""
    secret_file: str = ""
    """File with the secret that signs each request: whsec_ and base64, or any text. Empty: requests are not signed."""
    token_file: str = ""
    """File with a token for the header `Authorization: Bearer`. Empty: none."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        try:
            parts = urlsplit(self.url)
            wrong = (
                parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password or parts.port == 0
            )
        except ValueError:  # of the port, or of the host's brackets
            wrong = True
        if wrong:
            yield "url", "an address such as https://host:8443/path, without a user name or password"


class Webhook:
    """Posts batches to a URL.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: WebhookOptions) -> None:
        self._name, self._options = name, options
        self._session: aiohttp.ClientSession | None = None
        self._key = b""

    async def open(self) -> None:
        """Read the secrets. Raises `ConfigurationError`."""
        self._key = key_of(secret_of(self._options.secret_file, "secret_file"))
        token = secret_of(self._options.token_file, "token_file")
        headers = {"Content-Type": "application/json", "User-Agent": "pixiu-bridge"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=self._options.timeout_s)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=aiohttp.TCPConnector(limit=64))

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Post messages. Raises `Unavailable` if there is no answer."""
        assert self._session is not None
        body = body_of(self._name, batch)
        identity = identity_of(self._name, batch)
        seconds = str(int(time.time()))
        headers = {"webhook-id": identity, "webhook-timestamp": seconds}
        if self._key:
            headers["webhook-signature"] = signature(self._key, identity, seconds, body)
        try:
            async with self._session.post(self._options.url, data=body, headers=headers, allow_redirects=False) as answer:
                await answer.content.read(MAX_ANSWER_BYTES)
                outcome = outcome_of(answer.status, answer.headers.get("Retry-After", ""), time.time())
        except aiohttp.ClientError as error:
            raise away(f"the endpoint does not answer: {type(error).__name__}: {said(error)}") from error
        return [outcome] * len(batch)

    def settled(self, batch: Sequence[Item]) -> None:
        """Nothing to note."""

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def key_of(secret: str) -> bytes:
    """The bytes of a secret. Raises `ConfigurationError` for one that begins with whsec_ and goes on with something else than
    base64."""
    if not secret.startswith("whsec_"):
        return secret.encode()
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise ConfigurationError("secret_file: what follows whsec_ is not base64") from None


def signature(key: bytes, identity: str, seconds: str, body: bytes) -> str:
    """The signature of a request."""
    content = f"{identity}.{seconds}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()


def identity_of(name: str, batch: Sequence[Item]) -> str:
    """The ID of a batch: that of its messages, so a repetition of the same batch has it, too."""
    text = json.dumps([name, batch[0].topic, [each.position for each in batch]])
    return "msg_" + hashlib.sha256(text.encode()).hexdigest()[:32]


def text_field(name: str, data: bytes) -> dict[str, str]:
    """Bytes as a field of JSON: as text if they are UTF-8, else as base64 under another name."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def fields_of(item: Item) -> dict[str, Any]:
    """A message as JSON."""
    part, offset = item.position
    found: dict[str, Any] = {"part": part, "offset": offset, "time_us": item.time_us}
    if item.event_time_us is not None:
        found["event_time_us"] = item.event_time_us
    if item.key is not None:
        found |= text_field("key", item.key)
    headers = item.headers
    if headers:
        found["headers"] = {name: value.decode(errors="replace") for name, value in headers.items()}
    return found | text_field("body", item.body)


def body_of(name: str, batch: Sequence[Item]) -> bytes:
    """The body of a request."""
    messages = [fields_of(each) for each in batch]
    return json.dumps({"bridge": name, "topic": batch[0].topic, "messages": messages}, ensure_ascii=False).encode()


def retry_after(text: str, now: float) -> float:
    """The wait that `Retry-After` asks for, seconds or a date; 0 if it cannot be read."""
    try:
        wait = float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait, 0.0), MAX_RETRY_AFTER_S)


def outcome_of(status: int, after: str, now: float) -> Outcome:
    """The outcome that an answer means for each message of the request."""
    if 200 <= status < 300:
        return DONE
    if status >= 500 or status in WAIT_STATUS:
        return Outcome(Verdict.AGAIN, f"the endpoint answers {status}: it is tried again", retry_after(after, now))
    if status in MESSAGE_STATUS:
        return Outcome(Verdict.SPLIT, f"the endpoint answers {status} to this message: send it again when the endpoint takes it")
    if 300 <= status < 400:
        return Outcome(Verdict.AGAIN, f"the endpoint redirects ({status}): give the final address as url")
    need = "give its token_file" if status in (401, 403) else "check url and what runs there"
    return Outcome(Verdict.AGAIN, f"the endpoint answers {status}: {need}; nothing is lost, the messages wait")
