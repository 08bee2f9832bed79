"""Both clusters, asked by HTTP: nsqlookupd and nsqd of the old one, listeners of the new one.

Source: docs/nsq.md, "Moving from NSQ".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from nsqdoor.migration.phases import Found, Lookup, Side, left_of, lookup_of, merged
from pixiu.errors import MalformedData, PixiuError, Unavailable

ASK_S: Final = 5.0
MAX_ANSWER: Final = 8 << 20
NOT_FOUND: Final = 404
DONE: Final = range(200, 300)
AT_ONCE: Final = 64
"""Questions at one time. Policy: further ones wait."""
BOTH: Final = (Side.OLD, Side.NEW)


class Upstream:
    """Asks both clusters. `async with Upstream(old, new) as upstream`.

    Args:
        old: HTTP addresses, HOST:PORT, of nsqlookupd.
        new: HTTP addresses of listeners.
    """

    def __init__(self, old: Sequence[str], new: Sequence[str]) -> None:
        self._addresses: Mapping[Side, Sequence[str]] = {Side.OLD: old, Side.NEW: new}
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(AT_ONCE)

    async def __aenter__(self) -> Upstream:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S))
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, address: str, path: str, *, post: bool = False) -> Any:
        """Ask one address; None: 404. Raises `Unavailable`, `MalformedData`."""
        assert self._session is not None
        method = self._session.post if post else self._session.get
        try:
            async with self._places, method(f"http://{address}{path}", allow_redirects=False) as reply:
                if reply.status == NOT_FOUND:
                    return None
                data = b""
                async for chunk in reply.content.iter_any():
                    data += chunk
                    if len(data) > MAX_ANSWER:
                        raise MalformedData(f"{address} answered more than {MAX_ANSWER} bytes to {path.split('?')[0]}")
                if reply.status not in DONE:
                    raise Unavailable(
                        f"{address} answered {reply.status} to {path.split('?')[0]}: {data[:200].decode(errors='replace')}"
                    )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Unavailable(f"{address} does not answer: {error or 'time is over'}") from None
        try:
            return json.loads(data) if data[:1] in (b"{", b"[") else data.decode(errors="replace")
        except ValueError:
            raise MalformedData(f"{address} answered no JSON to {path.split('?')[0]}") from None

    async def all_of(self, side: Side, path: str) -> list[Any]:
        """The answers of all addresses of a side that answer, without those of 404. Raises the last one's error if none does."""
        answers = await asyncio.gather(*(self.ask(each, path) for each in self._addresses[side]), return_exceptions=True)
        errors = [each for each in answers if isinstance(each, BaseException)]
        if errors and len(errors) == len(answers):
            raise errors[-1]
        return [each for each in answers if each is not None and not isinstance(each, BaseException)]

    async def lookup(self, sides: Sequence[Side], topic: str) -> Lookup | None:
        """Look a topic up; None: no side has it. With two sides, one that does not answer is left out. Raises `PixiuError`."""
        path = f"/lookup?topic={quote(topic)}"
        answers = await asyncio.gather(*(self.all_of(side, path) for side in sides), return_exceptions=True)
        errors = [each for each in answers if isinstance(each, BaseException)]
        if len(errors) == len(answers):
            raise errors[-1]
        found = [lookup_of(each) for answer in answers if not isinstance(answer, BaseException) for each in answer]
        if not found and errors:
            raise errors[-1]
        return merged(found) if found else None

    async def names(self, path: str, key: str, sides: Sequence[Side] = BOTH) -> list[Any]:
        """List names of both sides under a key. Raises `PixiuError` if none answers."""
        answers = await asyncio.gather(*(self.all_of(side, path) for side in sides), return_exceptions=True)
        if all(isinstance(each, BaseException) for each in answers):
            raise next(each for each in answers if isinstance(each, BaseException))
        found: list[Any] = []
        for each in [one for answer in answers if not isinstance(answer, BaseException) for one in answer]:
            said = each.get("data", each) if isinstance(each, dict) else {}
            listed = said.get(key) if isinstance(said, dict) else None
            found += [name for name in (listed if isinstance(listed, list) else []) if name not in found]
        return found

    async def found(self, topic: str) -> Found:
        """Find out the state of both sides for an operator's step."""
        problems: list[str] = []
        sides: dict[Side, Lookup | None] = {}
        for side in BOTH:
            try:
                sides[side] = await self.lookup((side,), topic)
            except PixiuError as error:
                problems.append(f"the {side.name.lower()} side: {error}")
        old, new = sides.get(Side.OLD), sides.get(Side.NEW)
        left: int | None = 0
        for producer in old.producers if old is not None else ():
            try:
                address = f"{producer['broadcast_address']}:{producer.get('http_port')}"
                left_here = left_of(await self.ask(address, f"/stats?format=json&topic={quote(topic)}"), topic)
            except PixiuError as error:
                problems.append(f"an nsqd of the old side: {error}")
                left = None
            else:
                left = None if left is None else left + left_here
        return Found(old.channels if old is not None else (), new.channels if new is not None else None, left, problems)

    async def make(self, topic: str, channels: Sequence[str]) -> None:
        """Make a topic and its channels on the new side, if they are missing. Raises `PixiuError`."""
        address = self._addresses[Side.NEW][0]
        await self.ask(address, f"/topic/create?topic={quote(topic)}", post=True)
        for channel in channels:
            await self.ask(address, f"/channel/create?topic={quote(topic)}&channel={quote(channel)}", post=True)
