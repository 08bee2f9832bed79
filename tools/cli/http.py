"""Reads a process's HTTP pages: /health and /metrics. A small client, so that the command needs no other package."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Final

MAX_PAGE_BYTES: Final = 16 << 20
TIMEOUT_S: Final = 3.0
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


async def fetch(host: str, port: int, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Fetch (status, body) of one page. Raises OSError, including TimeoutError, when there is no proper answer."""
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 16)
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            data = bytearray()
            while part := await reader.read(1 << 16):
                data += part
                if len(data) > MAX_PAGE_BYTES:
                    raise OSError(f"{host}:{port}{path} has more than {MAX_PAGE_BYTES} bytes")
        finally:
            writer.close()
    head, blank, body = bytes(data).partition(b"\r\n\r\n")
    parts = head.split(b"\r\n", 1)[0].split(b" ")
    if not blank or len(parts) < 2 or not parts[1].isdigit():
        raise OSError(f"{host}:{port}{path} did not answer in HTTP")
    return int(parts[1]), body


def samples(page: bytes, wanted: tuple[str, ...] = ("",)) -> Iterator[tuple[str, dict[str, str], float]]:
    """Parse (name, labels, value) of each sample of a page in Prometheus's text format; invalid lines are skipped. wanted:
    beginnings of names, to parse only these."""
    for line in page.decode(errors="replace").splitlines():
        if not line.startswith(wanted):
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield match[1], dict(_LABEL.findall(match[2] or "")), value
