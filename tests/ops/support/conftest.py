"""A folder of a user who is not root, for what cannot be read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

NOBODY = 65_534


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of the user that the test runs as: nobody, if it was root."""
    was_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:  # pytest's own folder belongs to root alone
        if was_root:
            os.chown(name, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            if was_root:
                os.seteuid(0)
            for path in Path(name).rglob("*"):
                path.chmod(0o700)
