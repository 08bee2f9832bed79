"""Benchmarks: one file per question, each stating its estimate first. Run all with `make bench`."""

import sys

from cluster.runtime.compiled import BUILD

print(f"build: {BUILD}", file=sys.stderr)
