"""A connection to an nsqd, and where nsqds are.

    IDENTIFY ──▶ TLS ──▶ AUTH ──▶ answers, in the order of the commands; messages and heartbeats between them

Source: https://nsq.io/clients/tcp_protocol_spec.html; docs/bridges.md, "To and from NSQ".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from bridge.connector import away, said
from bridge.connectors.secrets import secret_of
from bridge.options import BridgeOptions
from cluster.nsq.frames import ERROR, HEARTBEAT, MAGIC, MESSAGE, FrameReader, Got, message_of, with_body
from cluster.settings.fields import bounded
from pixiu.errors import ConfigurationError, MalformedData, PixiuError

CONNECT_S: Final = 10.0
ASK_S: Final = 5.0
CLOSE_S: Final = 2.0
MISSED: Final = 2.5
"""Heartbeats after which a connection on which nothing comes counts as cut."""
READ_BYTES: Final = 1 << 18
MAX_ANSWER: Final = 8 << 20
"""Longest answer of nsqlookupd, bytes."""
MAX_NSQD: Final = 256
"""Most nsqds of a bridge."""
LOGIN_CODES: Final = frozenset(("E_AUTH_FIRST", "E_AUTH_FAILED", "E_AUTH_DISABLED", "E_UNAUTHORIZED"))
NOT_IN_FLIGHT: Final = (b"E_FIN_FAILED", b"E_TOUCH_FAILED", b"E_REQ_FAILED")
NOP: Final = b"NOP\n"


@dataclass(frozen=True, kw_only=True)
class NsqOptions(BridgeOptions):
    """Options of both ways."""

    nsqd: tuple[str, ...] = ()
    """Addresses of nsqd's TCP, HOST:PORT. Empty: those that `lookupd` names."""
    lookupd: tuple[str, ...] = ()
    """Addresses of nsqlookupd's HTTP, HOST:PORT."""
    secret_file: str = ""
    """File with the secret of AUTH. Empty: no login."""
    tls_ca: str = ""
    """File of the certificate authority for TLS, or "system". Empty: no TLS."""
    heartbeat_s: int = bounded(10, 1, 60)
    """Seconds between heartbeats of nsqd; a link counts as cut after two and a half of silence."""

    def problems(self) -> Any:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        if bool(self.nsqd) is bool(self.lookupd):
            yield "nsqd", 'either nsqd = ["HOST:4150"], or lookupd = ["HOST:4161"]'
        for key in ("nsqd", "lookupd"):
            if not all(_is_address(each) for each in getattr(self, key)) or len(getattr(self, key)) > MAX_NSQD:
                yield key, f"at most {MAX_NSQD} addresses, HOST:PORT"


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65_536


class NsqRefused(Exception):
    """An error frame.

    Args:
        text: its data: a code, and words.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.split(" ", 1)[0]


class NsqLink:
    """One connection.

    Args:
        address: HOST:PORT.
        options: of the bridge.
        identify: more fields of IDENTIFY.
        on_message: called with messages that came at a time.
    """

    def __init__(
        self, address: str, options: NsqOptions, identify: dict[str, Any],
        on_message: Callable[[NsqLink, Sequence[Got]], None] | None = None,
    ) -> None:  # fmt: skip
        self.address, self._options, self._identify, self._on_message = address, options, identify, on_message
        self.terms: dict[str, Any] = {}
        """Answer to IDENTIFY."""
        self.cut = ""
        """Why the connection is over; empty: it is not."""
        self.room = asyncio.Event()
        """Cleared while nothing more should be read."""
        self.room.set()
        self._frames = FrameReader()
        self._answers: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect. Raises `Unavailable`; `ConfigurationError` for a login or TLS that does not fit."""
        host, _, port = self.address.rpartition(":")
        secret = secret_of(self._options.secret_file, "secret_file")
        try:
            async with asyncio.timeout(CONNECT_S):
                self._reader, self._writer = await asyncio.open_connection(host.strip("[]"), int(port))
                await self._greet(self._writer, host, secret)
        except ssl.SSLError as error:
            raise ConfigurationError(f"TLS with the nsqd at {self.address} fails: {said(error)}; check tls_ca") from None
        except (OSError, EOFError) as error:
            raise away(f"the nsqd at {self.address} does not answer: {said(error) or 'in time'}") from None
        except NsqRefused as error:
            raise self.refused(error) from None
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pixiu-nsq-{self.address}")

    async def _greet(self, writer: asyncio.StreamWriter, host: str, secret: str) -> None:
        options = self._options
        said_of_us = {
            "client_id": "pixiu-bridge", "hostname": "pixiu-bridge", "user_agent": "pixiu-bridge", "feature_negotiation": True,
            "heartbeat_interval": options.heartbeat_s * 1000, "tls_v1": bool(options.tls_ca), **self._identify,
        }  # fmt: skip
        writer.write(MAGIC + with_body(b"IDENTIFY", json.dumps(said_of_us).encode()))
        with contextlib.suppress(ValueError):
            terms = json.loads(await self._one())
            self.terms = terms if isinstance(terms, dict) else {}
        if options.tls_ca:
            if not self.terms.get("tls_v1"):
                raise ConfigurationError(f"the nsqd at {self.address} has no TLS: leave tls_ca out, or give it a certificate")
            await writer.start_tls(_context(options.tls_ca), server_hostname=host.strip("[]"))
            await self._one()
        if self.terms.get("auth_required") and not secret:
            raise ConfigurationError(f"the nsqd at {self.address} requires a login: give secret_file")
        if secret:
            writer.write(with_body(b"AUTH", secret.encode()))
            await self._one()

    async def _one(self) -> bytes:
        """The next answer, before messages come. Raises `NsqRefused`, `EOFError`, `OSError`."""
        while True:
            data = await self._reader.read(READ_BYTES)
            if not data:
                raise EOFError("it ended the connection")
            for kind, found in self._frames.feed(data):
                if kind == ERROR:
                    raise NsqRefused(found.decode(errors="replace"))
                if found != HEARTBEAT:
                    return found

    def tell(self, data: bytes) -> None:
        """Write commands. Raises `Unavailable` once the connection is over."""
        if self.cut or self._writer is None:
            raise away(f"the nsqd at {self.address} ended the connection: {self.cut or 'it is closed'}")
        self._writer.write(data)

    async def drain(self) -> None:
        """Wait until what was written has left, as far as the other side takes it."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                await self._writer.drain()

    async def answer(self) -> bytes:
        """Wait for the next answer. Raises `NsqRefused`, `Unavailable`."""
        found = await self._answers.get()
        if isinstance(found, Exception):
            if isinstance(found, PixiuError):
                self._answers.put_nowait(found)  # there is none after it
            raise found
        return found

    async def _run(self) -> None:
        try:
            while True:
                await self.room.wait()
                async with asyncio.timeout(MISSED * self._options.heartbeat_s):
                    data = await self._reader.read(READ_BYTES)
                if not data:
                    raise EOFError("it closed it")
                self._take(self._frames.feed(data))
        except (OSError, EOFError, MalformedData) as error:
            self.cut = said(error) or "it is silent"
            self._answers.put_nowait(away(f"the nsqd at {self.address} ended the connection: {self.cut}"))

    def _take(self, frames: Sequence[tuple[int, bytes]]) -> None:
        messages = list[Got]()
        for kind, data in frames:
            if kind == MESSAGE:
                messages.append(message_of(data))
            elif kind == ERROR and data.startswith(NOT_IN_FLIGHT):
                continue  # its time was over, so it comes again
            elif kind == ERROR:
                self._answers.put_nowait(NsqRefused(data.decode(errors="replace")))
            elif data == HEARTBEAT:
                self.tell(NOP)
            else:
                self._answers.put_nowait(data)
        if messages and self._on_message is not None:
            self._on_message(self, messages)

    def refused(self, error: NsqRefused) -> PixiuError:
        """The error that an error frame means, where it does not concern a message."""
        if error.code in LOGIN_CODES:
            return ConfigurationError(f"the nsqd at {self.address} refuses the login: {said(error)}; check secret_file")
        if "TLS required" in str(error):
            return ConfigurationError(f"the nsqd at {self.address} requires TLS: give tls_ca")
        if error.code in ("E_INVALID", "E_BAD_BODY", "E_BAD_TOPIC", "E_BAD_CHANNEL", "E_BAD_PROTOCOL"):
            return ConfigurationError(f"the nsqd at {self.address} refuses what it is asked: {said(error)}")
        return away(f"the nsqd at {self.address} refuses: {said(error)}")

    async def close(self) -> None:
        """Disconnect; what was written leaves first."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await writer.wait_closed()


def _context(tls_ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if tls_ca == "system" else tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"tls_ca = {tls_ca}: cannot be read: {said(error)}") from None


async def addresses_of(options: NsqOptions, topic: str = "") -> list[str]:
    """Addresses of the nsqds: all, or those that have a topic. Raises `Unavailable` if no nsqlookupd answers."""
    if options.nsqd:
        return [*options.nsqd]
    path = f"/lookup?topic={quote(topic)}" if topic else "/nodes"
    found, problems = list[str](), list[str]()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        for lookupd in options.lookupd:
            try:
                found += await _ask(session, f"http://{lookupd}{path}")
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"the nsqlookupd at {lookupd} does not answer: {said(error) or 'in time'}")
    if len(problems) == len(options.lookupd):
        raise away(problems[0])
    return list(dict.fromkeys(found))[:MAX_NSQD]


async def _ask(session: aiohttp.ClientSession, url: str) -> list[str]:
    async with session.get(url, allow_redirects=False) as reply:
        if reply.status == 404:
            return []
        data = await reply.content.read(MAX_ANSWER)
    answer = json.loads(data)
    producers = answer.get("data", answer)["producers"]
    return [f"{each['broadcast_address']}:{int(each['tcp_port'])}" for each in producers]
