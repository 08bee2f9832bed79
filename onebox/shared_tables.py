"""Sizes of the tables in shared memory for the processes of `pixiu up`: a container's /dev/shm has 64 MiB by default.

Source: docs/operations.md, "Shared memory of gateways".
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cluster.process.shared_memory import folder_name
from cluster.settings.options import load_options
from onebox.settings_check import GIVEN, overrides_for

LEAST_MB: Final = 8
"""The smallest table of a Xiu."""


def fitting_mb(wanted_mb: int, tables: int, free_mb: int) -> int:
    """Return the size of each table. It is never below the minimum: if even that does not fit, the process reports it."""
    return max(min(wanted_mb, free_mb // tables), LEAST_MB)


def table_mb(
    xius: int, gateways: int, root: str, settings: tuple[str, ...], config: Path | None, environ: Mapping[str, str]
) -> tuple[int, int] | None:  # fmt: skip
    """Return (a smaller xiu.table_mb, MiB that are free) where the default does not fit for all Xius and gateways of the cluster
    at `root`; None where it fits, or where the size was chosen."""
    if not xius or "table_mb" in overrides_for("xiu", settings):
        return None
    wanted, signals = (_options(role, settings, config, environ) for role in ("xiu", "gateway"))
    base = Path(wanted.table_dir)
    if wanted.table_mb != type(wanted).table_mb or not base.is_dir():
        return None
    places = [(base, "xiu")]
    other = Path(signals.signal_table_dir)
    taken_mb = 0
    if other.is_dir() and other.stat().st_dev == base.stat().st_dev:
        places.append((other, "signals"))
        taken_mb = gateways * signals.signal_table_mb
    space = os.statvfs(base)
    # Space left by killed processes of this cluster is reused.
    left = sum(_bytes(folder) for place, kind in places for folder in place.glob(f"{folder_name(kind, root)}-*"))
    free_mb = (space.f_bavail * space.f_frsize + left) >> 20
    size = fitting_mb(wanted.table_mb, xius, free_mb - taken_mb)
    return (size, free_mb) if size < wanted.table_mb else None


def _options(role: str, settings: tuple[str, ...], config: Path | None, environ: Mapping[str, str]) -> Any:
    options = importlib.import_module(f"{role}.options").Options
    return load_options(role, options, config, environ, {"data_dir": GIVEN, **overrides_for(role, settings)})[1]


def _bytes(folder: Path) -> int:
    try:
        return (folder / "data.mdb").stat().st_blocks * 512
    except OSError:  # it is gone meanwhile, or belongs to another user
        return 0
