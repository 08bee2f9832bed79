"""Files and their names on the disk: what a power cut leaves of them is known.

Source: `fsync(2)`: a file's sync does not include the entry in its folder.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def make_directory(directory: Path) -> None:
    """Make a directory if it is missing. Its name, and those of new parents, are durable afterwards, whoever made them."""
    missing = [each for each in directory.parents if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in (directory, *missing):
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Make the names that were created or removed in a directory durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file as a whole, in the place of an older one, in a directory that is made if it is missing. A power cut leaves the
    old or the new one; when this returns, the new one. Raises `OSError`. mode: of the file, from which the umask takes."""
    if not path.parent.exists():
        make_directory(path.parent)
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync_directory(path.parent)
