"""`python -m benchmarks`: every benchmark, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDERS = ("cores", "clusters", "clients", "attacks")
NO_BENCHMARKS = {"attack_load", "growth", "topic_worker"}
"""Processes of other benchmarks, and the long run of `make grow`."""


def benchmarks() -> list[str]:
    """Return the programs among the modules, by folder and name."""
    found = [path for folder in FOLDERS for path in sorted((Path(__file__).parent / folder).glob("*.py"))]
    programs = (path for path in found if '__name__ == "__main__"' in path.read_text())
    return [f"{path.parent.name}.{path.stem}" for path in programs if path.stem not in NO_BENCHMARKS]


def main() -> int:
    """Run all. Returns the highest of their exit codes."""
    codes = []
    for name in benchmarks():
        print(f"== {name}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
