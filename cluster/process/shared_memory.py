"""Tables on /dev/shm that outlive their process: LMDB, write-mapped and without syncs, fully allocated beforehand.

The memory lives as long as the machine, and a kill at any instant leaves it whole. A sparse file on a full tmpfs would end the
process with SIGBUS, so every page is allocated before the first write.

Source: docs/stores.md.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
from pathlib import Path
from typing import TextIO

import lmdb

from pixiu.errors import ConfigurationError


def folder_name(kind: str, owner: str) -> str:
    """Return the name of a table's folder: the same for a process that starts again in its place."""
    return f"pixiu-{kind}-" + re.sub(r"[^A-Za-z0-9.]+", "-", owner).strip("-")


def lock_folder(folder: Path, in_use: str) -> TextIO:
    """Make the folder and lock it for this process until the file is closed; the lock ends with the process, however it ends.

    Raises ConfigurationError with the text `in_use`, or when the folder is not this user's alone: everybody may make one on
    /dev/shm, and could then read and change its content. OSError.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"{folder}: must be a folder of this user alone (mode 700); it has mode {stat.S_IMODE(found.st_mode):o} and belongs to "
            f"user {found.st_uid}: remove it, if nothing uses it"
        )
    lock = open(folder / "lock", "w")  # noqa: SIM115 (held until close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigurationError(in_use) from None
    return lock


def open_environment(folder: Path, size_bytes: int, max_dbs: int = 0) -> lmdb.Environment:
    """Open the LMDB environment in a folder that this process has locked. Raises OSError when there is not enough memory,
    lmdb.Error when the file is damaged."""
    # An old file is allocated before it is mapped; a new one after, because LMDB takes only an empty file as new.
    data = folder / "data.mdb"
    if data.exists() and data.stat().st_size:
        allocate(data, size_bytes)
    db = lmdb.open(str(folder), map_size=size_bytes, max_dbs=max_dbs, writemap=True, sync=False, metasync=False, lock=False)
    try:
        allocate(data, size_bytes)
    except BaseException:
        db.close()
        raise
    return db


def allocate(path: Path, size: int) -> None:
    """Allocate all of a file's memory. Raises OSError when there is not enough."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)
