"""Small file systems, to be filled."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(mount: Path, size: str) -> Iterator[Path]:
    """A file system of its own at `mount`, such as of "24m"; skips the test where none can be mounted."""
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(mount)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def fill(file: Path) -> Path:
    """Take all the space that is left on a file system."""
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(4096))
    return file
