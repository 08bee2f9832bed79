"""Keeps the availability in a file, while `pixiu probe --watch --keep FILE` runs.

    FILE   {"saved": counts of 30 days, "report": shares}; written beside it first, so that a reader sees it whole

Source: docs/console.md, "Availability".
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Final

from pixiu.errors import ConfigurationError, MalformedData, PixiuError
from tools.probe.availability import MAX_FILE_BYTES, NO_PATH, Availability
from tools.probe.paths import Finding, Prober

WRITE_S: Final = 10.0
"""Interval at which the file is written, seconds: what a crash loses."""


class Keeper:
    """The availability in a file. Raises `ConfigurationError` if the file cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _read(path)
        self._written = 0.0
        self._alarms: list[str] = []
        self.write()

    def watch(self, prober: Prober) -> None:
        """Begin with a prober: take the times of its hops, too."""
        self._found.begin()
        prober.on_hops = self._found.note_hops

    def note(self, prober: Prober) -> None:
        """Count what a prober has found; write it from time to time."""
        self._found.note(prober, time.time())
        self._write_late()

    def note_no_path(self) -> None:
        """Count a moment at which there was no way through the cluster, or no registry that names one."""
        self._found.count(NO_PATH, 0, 1, time.time())
        self._write_late()

    def alarm(self, findings: list[Finding]) -> None:
        """Take the present alarms; none: every path works."""
        self._alarms = [finding.text for finding in findings]
        self.write()

    def write(self) -> None:
        """Write the file. Raises `ConfigurationError`."""
        report = {**self._found.report(time.time()), "alarms": self._alarms}
        beside = self._path.with_name(f"{self._path.name}.new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"saved": self._found.saved(), "report": report}))
            os.replace(beside, self._path)
        except OSError as error:
            raise ConfigurationError(f"{self._path}: the availability cannot be written there: {error.strerror}") from None
        self._written = time.monotonic()

    def _write_late(self) -> None:
        if time.monotonic() - self._written >= WRITE_S:
            self.write()


def _read(path: Path) -> Availability:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise MalformedData(f"has more than {MAX_FILE_BYTES} bytes")
        return Availability.restored(json.loads(data)["saved"])
    except FileNotFoundError:
        return Availability()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except (PixiuError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{path}: {error}; move it away to begin again") from None
