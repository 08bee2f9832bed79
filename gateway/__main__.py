"""`python -m gateway --config FILE`: one gateway."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from gateway.options import Options
from gateway.service import Service
from registry.membership import Membership

if __name__ == "__main__":
    sys.exit(run_role("gateway", Options, Service, sys.argv[1:], membership=Membership))
