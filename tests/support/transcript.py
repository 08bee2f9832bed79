"""Tests that are texts: what is done to a core, and what it asked for then, as a person reads it.

    # why
    command and its words
    ----
    what came of it

A blank line ends a block. The texts are compared exactly; `PIXIU_TRANSCRIPTS=write` writes what came instead, to be read in the
difference before it is committed. The form is that of the test data of etcd's raft library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

SEPARATOR = "----"
NOTHING = "nothing"
"""Stands where a command led to nothing."""
WRITE = os.environ.get("PIXIU_TRANSCRIPTS") == "write"


def written(text: str, do: Callable[[str], Iterable[str]]) -> str:
    """The same transcript with what its commands lead to now."""
    blocks = []
    for block in text.strip().split("\n\n"):
        asked = block.split(f"\n{SEPARATOR}")[0]
        commands = [line for line in asked.splitlines() if line and not line.startswith("#")]
        found = [line for command in commands for line in do(command)]
        blocks.append("\n".join([asked, SEPARATOR, *(found or [NOTHING])]) if commands else asked)
    return "\n\n".join(blocks) + "\n"


def check(path: Path, do: Callable[[str], Iterable[str]]) -> None:
    """Play a transcript, and compare it with what it says."""
    text = path.read_text()
    found = written(text, do)
    if WRITE:
        path.write_text(found)
    assert found == path.read_text(), f"{path}: PIXIU_TRANSCRIPTS=write shows the difference in the repository"
