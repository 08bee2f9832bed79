"""`python -m bridge --config FILE`: one bridge process."""

from __future__ import annotations

import sys

from bridge.options import Options
from bridge.service import Service
from cluster.process.host import run_role
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("bridge", Options, Service, sys.argv[1:], membership=Membership))
