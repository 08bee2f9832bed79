"""Keeps the availability in a file, while `pixiu probe --watch --keep FILE` runs.

    FILE   {"saved": counts of 30 days, "report": shares}; written beside it first, so that a reader sees it whole

Source: docs/console.md, "Availability".
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from rich.markup import escape

from pixiu.errors import ConfigurationError, MalformedData
from tools.cli.output import error_console
from tools.probe.availability import MAX_FILE_BYTES, NO_PATH, Availability
from tools.probe.paths import Finding, Prober

WRITE_S: Final = 10.0
"""Interval at which the file is written, seconds: what a crash loses."""


class Keeper:
    """The availability in a file. Raises `ConfigurationError` if the file cannot be read or written at the start.

    Later a file that cannot be written, such as on a full disk, is one line on stderr: the counts stay in memory, and it is tried
    again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found = _read(path)
        self._written = 0.0
        self._alarms: list[str] = []
        self._warned = False
        self._write()

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
        self.save()

    def save(self) -> None:
        """Write the file; warn once if it cannot be written, until it can be again."""
        try:
            self._write()
        except ConfigurationError as error:
            if not self._warned:
                text = f"{error}; it is kept in memory, and written when that works again"
                error_console().print(f"[yellow]{escape(text)}[/]", highlight=False, soft_wrap=True)
            self._warned = True
        else:
            self._warned = False

    def _write(self) -> None:
        report = {**self._found.report(time.time()), "alarms": self._alarms}
        beside = self._path.with_name(f"{self._path.name}.new")
        self._written = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"saved": self._found.saved(), "report": report}))
            os.replace(beside, self._path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()
            raise ConfigurationError(f"{self._path}: the availability cannot be written there: {error.strerror}") from None

    def _write_late(self) -> None:
        if time.monotonic() - self._written >= WRITE_S:
            self.save()


def _read(path: Path) -> Availability:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise MalformedData(f"more than {MAX_FILE_BYTES} bytes")
        return Availability.restored(json.loads(data)["saved"])
    except FileNotFoundError:
        return Availability()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except MalformedData as error:
        why = f" ({error})"
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError):
        why = ""
    raise ConfigurationError(f"{path}: holds no availability of `pixiu probe`{why}; name another file, or move it away")
