"""The files of routes that the running proxies read, for somebody who has just written one.

Source: docs/routes.md, "Recording for Spark".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.spark.registry import view_of
from pixiu.discovery.node import Node
from pixiu.discovery.target import names_registry
from pixiu.errors import PixiuError
from tools.cli.http import fetch


def files_of(target: str) -> list[str] | None:
    """Ask every running proxy for its file; an empty name: it has none. None: there is no registry here that names the proxies, or
    none of them answers."""
    if not names_registry(target):
        return None
    try:
        nodes = view_of(target).running("proxy")
    except PixiuError:
        return None

    async def ask() -> list[str | None]:
        return await asyncio.gather(*map(_file_of, nodes))

    return [each for each in asyncio.run(ask()) if each is not None] or None


async def _file_of(node: Node) -> str | None:
    try:
        _, body = await fetch(node.host, node.http_port, "/health")
        return str(json.loads(body)["service"]["routes_file"])
    except (OSError, ValueError, KeyError):
        return None


def read_by(file: Path, files: Sequence[str] | None) -> str:
    """Say whether the proxies read a file, given what each of them reads. Pure but for the file's own place."""
    look = "`pixiu routes status` shows the routes that proxies have"
    if files is None:
        return f"Proxies read it if their option proxy.routes names {file}; {look}"
    others = sorted({each for each in files if each} - {str(file.resolve())})
    if others:
        return f"Not stored yet: the running proxies read {', '.join(others)}, not {file}. Give that as --file; {look}"
    if not any(files):
        return f"Not stored yet: no running proxy reads a file of routes. Start proxies with proxy.routes={file.resolve()}; {look}"
    if not all(files):
        return f"Some running proxies read no file of routes: start all with proxy.routes={file.resolve()}; {look}"
    return f"All running proxies read {file}; {look}"
