"""A route written for somebody who only wants the messages of some topics or rooms in a durable topic.

Source: docs/routes.md, "Recording for Spark".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from cluster.routes.routes import MAX_NAME, NAME_CHARACTERS, Routes, read_routes
from pixiu.durable import replace_file
from pixiu.errors import ConfigurationError, InvalidArgument
from pixiu.placement.topics import ROOM_PREFIX

MAX_FILE_BYTES: Final = 1 << 20


def record(path: Path, pattern: str, topic: str, *, deliver: bool, name: str = "") -> tuple[str, Routes]:
    """Add a route to the file of routes, which is made if it is missing. Returns the route's name, and all routes.

    Args:
        path: of the file.
        pattern: a filter of topics, room/N, or room/N-M.
        topic: the durable topic.
        deliver: clients go on getting the messages, in the log's order; otherwise they get them no more.
        name: of the route; empty: record-TOPIC.

    Raises `InvalidArgument` if there is such a route, and `ConfigurationError` if the file with it would be wrong; then it stays as
    it was.
    """
    name = name or f"record-{topic}"[:MAX_NAME]
    if not NAME_CHARACTERS.issuperset(name):
        raise InvalidArgument(f"{name[:80]!r} is no name of a route: 1 to {MAX_NAME} of A-Z a-z 0-9 . _ -")
    text = path.read_text() if path.exists() and path.stat().st_size <= MAX_FILE_BYTES else ""
    if text and name in read_routes(path).by_name:
        raise InvalidArgument(f"{path} has a route {name} already: change it there, or give --name")
    takes = (
        f'rooms = ["{_text(pattern.removeprefix(ROOM_PREFIX))}"]'
        if pattern.startswith(ROOM_PREFIX)
        else f'filter = "{_text(pattern)}"'
    )
    lines = [f"[{name}]" if "." not in name else f'["{name}"]', takes, f'topic = "{_text(topic)}"']
    lines += [f'clients = "{_text(topic)}"'] if deliver else []
    made = path.with_name(f".{path.name}.{os.getpid()}")
    content = "\n".join([*([text.rstrip(), ""] if text else []), *lines, ""])
    made.write_text(content)
    try:
        found = read_routes(made)
        replace_file(path, content.encode())
    except ConfigurationError as error:
        raise ConfigurationError(str(error).replace(str(made), str(path))) from None
    finally:
        made.unlink(missing_ok=True)
    return name, found


def _text(text: str) -> str:
    """A text between the quotes of TOML. Raises `InvalidArgument`."""
    if any(each in text for each in '"\\') or not text.isprintable():
        raise InvalidArgument(f"{text[:80]!r} has a quote, a backslash or a control character: write the route by hand")
    return text
