"""`python -m router --config FILE`: one router."""

from __future__ import annotations

import sys

from cluster.process.host import run_role
from registry.membership import Membership
from router.options import Options
from router.service import Service

if __name__ == "__main__":
    sys.exit(run_role("router", Options, Service, sys.argv[1:], membership=Membership))
