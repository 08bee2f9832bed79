"""The folder of a group's state, and how a snapshot takes its place.

    DATA_DIR/state/parts, DATA_DIR/state/table     the state
    DATA_DIR/state.new                             a snapshot on its way: complete once both of these are in it
    DATA_DIR/state.damaged                         a state that was set aside; the newest one is kept

A snapshot moves in by renames. Each step may be interrupted and repeated: whatever is still in the snapshot's folder moves first,
then `state.new` takes the place of `state`.

Source: docs/topics.md, "How it is stored".
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from pixiu.durable import make_directory, sync_directory
from pixiu.errors import DiskFailed, DiskFull
from topic.storage.files import NO_SPACE

TABLE: Final = "table"
CONTENTS: Final = ("parts", TABLE)
DAMAGED: Final = "damaged"
"""File in the state's folder with the reason why it is to be set aside at the next start."""


def prepare(folder: Path) -> bool:
    """Make the folder of a state. Returns True if a damaged state was set aside, and this one is empty. Raises DiskFailed."""
    try:
        aside = (folder / DAMAGED).exists()
        if aside:
            put_aside(folder)
        make_directory(folder)
    except OSError as problem:
        raise DiskFailed(f"{folder}: {problem.strerror}") from problem
    return aside


def put_aside(folder: Path) -> None:
    """Set a state aside; an older one is deleted."""
    aside = folder.with_name(f"{folder.name}.damaged")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    (aside / DAMAGED).unlink(missing_ok=True)
    sync_directory(folder.parent)


def mark(folder: Path, reason: str) -> None:
    """Have the next start set the state aside. Raises DiskFull, DiskFailed."""
    try:
        with open(folder / DAMAGED, "w", encoding="utf-8") as file:
            file.write(reason)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(folder)
    except OSError as problem:
        (folder / DAMAGED).unlink(missing_ok=True)
        kind = DiskFull if problem.errno in NO_SPACE else DiskFailed
        raise kind(f"{folder}: the damaged state cannot be marked for a repair: {problem.strerror}; free some space") from problem


def move_in(snapshot: Path, folder: Path) -> None:
    """Put a snapshot in the place of a state, durably; see the module. The state is closed. Raises DiskFailed."""
    coming, going = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    try:
        coming.mkdir(exist_ok=True)
        for name in CONTENTS:
            if (snapshot / name).exists():
                shutil.rmtree(coming / name, ignore_errors=True)
                (snapshot / name).rename(coming / name)
        (coming / CONTENTS[0]).mkdir(exist_ok=True)  # a snapshot without blocks has no such folder
        sync_directory(coming)
        sync_directory(coming.parent)
        if snapshot.exists():
            sync_directory(snapshot)
        if not (coming / TABLE).exists():  # an interrupted call has done the rest
            coming.rmdir() if not any(coming.iterdir()) else shutil.rmtree(coming)
            return
        shutil.rmtree(going, ignore_errors=True)
        if folder.exists():
            folder.rename(going)
        coming.rename(folder)
        sync_directory(folder.parent)
        shutil.rmtree(going, ignore_errors=True)
    except OSError as problem:
        raise DiskFailed(f"{folder}: a snapshot cannot take its place: {problem.strerror}") from problem
