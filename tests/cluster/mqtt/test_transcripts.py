"""Connections as transcripts, one file for each matter: see `transcript.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.mqtt.transcript import play

FILES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_connection_goes_as_its_transcript_says(path: Path) -> None:
    text = path.read_text()
    found: list[str] = []
    for part in text.split("\n---\n"):
        found += [*play(part), "---"]
    if os.environ.get("PIXIU_TRANSCRIPTS") == "write":
        path.write_text("\n".join(found[:-1]) + "\n")
    assert found[:-1] == text.splitlines()
