"""`python -m benchmarks`: every benchmark, one after the other."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

NO_BENCHMARKS = {
    "attack_load", "attack_requests", "connection", "growth", "stores", "strangers", "topic_scale", "topic_worker",
    "watching",
}  # fmt: skip
"""Parts of other benchmarks, and the long run of `make grow`."""


def main() -> int:
    """Run all. Returns the highest of their exit codes."""
    here = Path(__file__).parent
    names = [
        f"{folder}.{module.name}"
        for folder in ("cores", "clusters", "clients", "attacks")
        for module in pkgutil.iter_modules([str(here / folder)])
        if module.name not in NO_BENCHMARKS
    ]
    codes = []
    for name in names:
        print(f"== {name}", flush=True)
        codes.append(subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode)
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
