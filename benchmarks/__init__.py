"""Benchmarks: one file per question, each with its estimate made beforehand. Run all with `make bench`."""

import sys

from cluster.core.compiled import BUILD

print(f"build: {BUILD}", file=sys.stderr)
